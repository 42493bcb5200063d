"""Command line of the P:D ratio that the phases imply: ``python -m pdlab ratio``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from pdlab.analysis.phase_ratio import report
from pdlab.core.arguments import OneLineParser, exit_code
from pdlab.core.errors import UsageError
from pdlab.results.published_folders import load_experiment

EPILOG = """\
examples:
  ./run_bm.sh --mode prefill-only -e p && ./run_bm.sh --mode decode-only -e d
      measure each phase first, on a collocated deployment of one replica each (decode with --decode-bench)
  python -m pdlab ratio --prefill bm_results/p --decode bm_results/d
      the rate-matched ratio at every decode level
  python -m pdlab ratio --prefill bm_results/p --decode bm_results/d --measured bm_results/pd-*
      beside the ratios that were measured
"""


def main(argv: Sequence[str] | None = None) -> int:
    """``--prefill DIR --decode DIR [--measured DIR...]``; returns the exit code."""
    return exit_code(lambda: _run(parser().parse_args(argv)))


def parser() -> argparse.ArgumentParser:
    flags = OneLineParser(
        prog="python -m pdlab ratio",
        description="The P:D ratio that measured rates of prefill alone and decode alone imply.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = flags.add_argument_group("result folders").add_argument
    add("--prefill", type=Path, required=True, metavar="DIR", help="prefill-only levels of one replica")
    add("--decode", type=Path, required=True, metavar="DIR", help="decode-only levels of one replica")
    add("--measured", type=Path, nargs="*", default=[], metavar="DIR", help="PD deployments under mixed load")
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
