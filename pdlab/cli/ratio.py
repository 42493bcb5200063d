"""Command line of the P:D ratio that the phases imply: ``python -m pdlab ratio``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from pdlab.analysis import phase_ratio
from pdlab.analysis.phase_ratio import report
from pdlab.core.errors import PdlabError, UsageError
from pdlab.results.store import Store


def main(argv: Sequence[str]) -> int:
    """``--prefill DIR --decode DIR [--measured DIR...]``; returns the exit code."""
    flags = _Parser(prog="python -m pdlab ratio", description=phase_ratio.__doc__, allow_abbrev=False)
    flags.add_argument("--prefill", type=Path, required=True, metavar="DIR", help="prefill-only levels of one replica")
    flags.add_argument("--decode", type=Path, required=True, metavar="DIR", help="decode-only levels of one replica")
    flags.add_argument("--measured", type=Path, nargs="*", default=[], metavar="DIR", help="PD deployments, mixed")
    try:
        args = flags.parse_args(list(argv))
        prefill, decode = Store(args.prefill).load(), Store(args.decode).load()
        for experiment in (prefill, decode):
            if not experiment.runs:
                raise UsageError(f"{experiment.name}: no levels in it")
        print(report(prefill, decode, [Store(path).load() for path in args.measured]))
    except PdlabError as error:
        print(f"ratio: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")
