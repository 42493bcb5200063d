"""``python -m pdlab roles``: show which fluid engines prefill and which decode, and why; or set another split."""

from __future__ import annotations

from pdlab.core.errors import UsageError
from pdlab.core.exit_code import command
from pdlab.core.settings import Settings, setting

EPILOG = """\
examples:
  python -m pdlab roles
      show the role of each engine at port 8000, and the last decisions with their reasons
  python -m pdlab roles 3:5
      from now on three engines prefill and five decode; requests that have begun end where they are
  python -m pdlab roles auto
      the controller follows the load again
  python -m pdlab roles --log > decisions.jsonl
      every decision since the launch, one line of JSON each (docs/fluid.md)
"""


class RolesSettings(Settings):
    """Whether ``python -m pdlab roles`` shows the roles or sets a split."""

    COMMAND = "roles"
    ABOUT = "Look at the roles of a deployment of launch_gptoss.py --pd-fluid, or set them."
    EXAMPLES = EPILOG

    split: str | None = setting(
        None, "set the roles; without it: show them", "roles", positional=True, value="P:D|auto"
    )
    log: bool = setting(False, "print every decision as a line of JSON", "roles")
    base_url: str = setting("http://127.0.0.1:8000", "server of the deployment", "roles", value="URL")

    def check(self) -> None:
        from pdlab.core.deployment import parse_split
        from pdlab.roles.spec import AUTO

        if self.split is not None and self.log:
            raise UsageError("--log prints decisions: leave it out to set the roles")
        if self.split not in (None, AUTO):
            parse_split(self.split)


@command(RolesSettings)
def main(settings: RolesSettings) -> int:
    """Run the command line."""
    from pdlab.deploy.roles import RolesOrder, execute

    execute(RolesOrder(base_url=settings.base_url, split=settings.split, log=settings.log))
    return 0
