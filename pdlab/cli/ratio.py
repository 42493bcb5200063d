"""Command line of the P:D ratio that the phases imply: ``python -m pdlab ratio``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from pdlab.analysis.phase_ratio import report
from pdlab.core.arguments import OneLineParser, exit_code
from pdlab.core.errors import UsageError
from pdlab.results.published_folders import load_experiment


def main(argv: Sequence[str] | None = None) -> int:
    """``--prefill DIR --decode DIR [--measured DIR...]``; returns the exit code."""
    return exit_code(lambda: _run(parser().parse_args(argv)))


def parser() -> argparse.ArgumentParser:
    flags = OneLineParser(
        prog="python -m pdlab ratio",
        description="The P:D ratio that measured rates of prefill alone and decode alone imply.",
    )
    flags.add_argument("--prefill", type=Path, required=True, metavar="DIR", help="prefill-only levels of one replica")
    flags.add_argument("--decode", type=Path, required=True, metavar="DIR", help="decode-only levels of one replica")
    flags.add_argument("--measured", type=Path, nargs="*", default=[], metavar="DIR", help="PD deployments, mixed")
    return flags


def _run(args: argparse.Namespace) -> int:
    prefill, decode = load_experiment(args.prefill), load_experiment(args.decode)
    for flag, experiment, mode in (("--prefill", prefill, "prefill-only"), ("--decode", decode, "decode-only")):
        modes = sorted({run.workload.mode for run in experiment.runs})
        if mode not in modes:
            raise UsageError(
                f"{flag} {experiment.name}: its levels are {' and '.join(modes)}; give a folder that run_bm.sh "
                f"--mode {mode} has measured"
            )
    print(report(prefill, decode, [load_experiment(path) for path in args.measured]))
    return 0
