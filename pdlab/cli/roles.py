"""``python -m pdlab roles``: which fluid engines prefill and which decode, why, and another split by hand."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pdlab.core.arguments import OneLineParser, exit_code

EPILOG = """\
examples:
  python -m pdlab roles
      who prefills and who decodes at port 8000, with the last decisions and their reasons
  python -m pdlab roles 3:5
      from now on three engines prefill and five decode; what they have begun they finish
  python -m pdlab roles auto
      the controller follows the load again
  python -m pdlab roles --log > decisions.jsonl
      every decision since the launch, one line of JSON each (docs/fluid.md)
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    flags = OneLineParser(
        prog="python -m pdlab roles",
        description="Look at the roles of a deployment of launch_gptoss.py --pd-fluid, or set them.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    group = flags.add_argument_group("roles")
    group.add_argument("split", nargs="?", metavar="P:D|auto", help="set the roles (default: look at them)")
    group.add_argument("--log", action="store_true", help="print every decision as a line of JSON")
    group.add_argument("--base-url", default="http://127.0.0.1:8000", metavar="URL", help="default %(default)s")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    return exit_code(lambda: _run(parser().parse_args(words)))


def _run(args: argparse.Namespace) -> int:
    from pdlab.core.deployment import AUTO, parse_split
    from pdlab.core.errors import UsageError

    if args.split is not None and args.log:
        raise UsageError("--log prints decisions: leave it out to set the roles")
    if args.split not in (None, AUTO):
        parse_split(args.split)
    from pdlab.deploy.roles import RolesOrder, execute

    execute(RolesOrder(base_url=args.base_url, split=args.split, log=args.log))
    return 0


if __name__ == "__main__":
    sys.exit(main())
