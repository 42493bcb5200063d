"""Command line of ``make wire`` (`pdlab.demo.wire`). It needs root, because the two hosts are namespaces."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from pdlab.core.commands import PDLAB
from pdlab.core.exit_code import command
from pdlab.core.nodes import LinkShape
from pdlab.core.settings import FlagsOf, Numbers, Settings, setting
from pdlab.demo.wire import prove

EPILOG = f"""\
examples:
  sudo make wire
      two KV-cache sizes over a link of 1 Gbit/s
  sudo {PDLAB} wire --rate 20mbit --tokens 1000
      one size over a slow link
  sudo {PDLAB} wire --rate none
      without a limit on the link
"""


CHECKED, ONE_GBIT = "what is checked", {"gbit_per_s": "1gbit"}


class WireSettings(Settings):
    """What ``make wire`` checks."""

    COMMAND = "wire"
    ABOUT = (
        "Check the KV transfer on this machine: pack in memory, spread over a slow link, and a planted corruption "
        "that must be found."
    )
    EXAMPLES = EPILOG

    link: Annotated[dict[str, Any], FlagsOf(LinkShape, CHECKED, only=("gbit_per_s",), otherwise=ONE_GBIT)] = Field(
        default_factory=dict
    )
    tokens: Numbers = setting((1000, 5000), "KV-cache sizes in tokens", CHECKED, value="N,N,...")


@command(WireSettings)
def main(settings: WireSettings) -> int:
    """Run the checks."""
    return prove(LinkShape(**{"gbit_per_s": 1.0, **settings.link}), settings.tokens)
