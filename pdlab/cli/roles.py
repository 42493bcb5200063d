"""``python -m pdlab roles``: show which fluid engines prefill and which decode, and why; or set another split."""

from __future__ import annotations

from pdlab.core.exit_code import command
from pdlab.deploy.roles import RolesSettings, execute


@command(RolesSettings)
def main(settings: RolesSettings) -> int:
    """Run the command line."""
    execute(settings)
    return 0
