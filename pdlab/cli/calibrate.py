"""Fit a hardware file to measured runs: ``python -m pdlab calibrate``."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pdlab.core.arguments import OneLineParser, check_writable, distinct, exit_code, positive
from pdlab.core.catalog import known_models, load_model
from pdlab.core.errors import UsageError
from pdlab.core.files import write_output
from pdlab.core.schema import to_yaml
from pdlab.core.text import choices
from pdlab.plan.accuracy import (
    NAMES,
    coverage,
    coverage_text,
    errors_text,
    median_errors,
    parts,
    parts_text,
    rankings,
    rankings_text,
    table,
)
from pdlab.plan.calibration import coarse, compare, cross_validate, fit, measured, other_kind
from pdlab.results.published_folders import load_experiment
from pdlab.results.store import experiment_folders
from pdlab.sim.hardware import FitError, load_hardware

if TYPE_CHECKING:
    from pdlab.core.catalog import ModelShape
    from pdlab.plan.accuracy import MeasuredSweep

EPILOG = """\
examples:
  python -m pdlab calibrate --runs bm_results/* --out my-cluster.yaml
      fit the hardware of your cluster; plan.py --hardware my-cluster.yaml predicts with it
  python -m pdlab calibrate --runs bm_results/* --cross-validate
      how well each experiment is predicted by a fit to the others
  python -m pdlab calibrate --runs bm_results/* --rounds 0
      how well the hardware predicts these runs as it is
"""


MOST_PERCENT = 100.0


def _rounds(text: str) -> int:
    return 0 if text.strip() == "0" else positive(text)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="python -m pdlab calibrate",
        description="Fit a hardware file (configs/catalog/) to measured runs, and say how well it predicts.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument_group("what was measured").add_argument
    add("--runs", nargs="+", type=Path, required=True, metavar="DIR", help="experiment folders, ours or published")
    add("--model", metavar="NAME", help="model that was measured (default: the one that the runs record)")
    add(
        "--prompts",
        choices=("fresh", "repeated"),
        default="fresh",
        help="whether levels repeat the prompts of earlier levels, as the published runs do (default %(default)s)",
    )
    add = parser.add_argument_group("fit").add_argument
    add("--start", default="h100-vllm-0.11", metavar="NAME|FILE", help="hardware to start from (default %(default)s)")
    add(
        "--coarse-start",
        action="store_true",
        help="round what is fitted of --start to 1, 2 or 5 times a power of ten first: how much does the start matter?",
    )
    add("--rounds", type=_rounds, default=12, metavar="N", help="rounds of the search (default %(default)s)")
    add("--cross-validate", action="store_true", help="leave each experiment out once; takes minutes")
    add(
        "--days",
        type=_days,
        metavar="TPOT,TTFT,RPS",
        help="with --cross-validate: median difference, in percent, of one configuration measured on different days, "
        "which widens the intervals of predictions; coverage is printed with and without (default: not known)",
    )
    add = parser.add_argument_group("result").add_argument
    add("--out", type=Path, metavar="FILE", help="write the fitted hardware there")
    add("--name", metavar="NAME", help="name of the new hardware (default: that of --start)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    return exit_code(lambda: _run(_parser().parse_args(argv)))


def _shape(model: str | None, experiments: Sequence[MeasuredSweep]) -> ModelShape:
    models = [model] if model else sorted({experiment.deployment.model for experiment in experiments})
    if len(models) > 1:
        raise UsageError(
            f"the runs are of {' and '.join(models)}; constants are fitted to one model: leave the others out"
        )
    shape = load_model(models[0])
    if shape is None:
        raise UsageError(
            f"--model {models[0]}: its shape is not in configs/models/; {choices(models[0], known_models())}"
        )
    return shape


def _days(text: str) -> tuple[float, float, float]:
    try:
        tpot, ttft, rate = (float(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not three percentages: TPOT, TTFT, requests/s") from error
    if not all(0 <= value <= MOST_PERCENT for value in (tpot, ttft, rate)):
        raise argparse.ArgumentTypeError(f"{text!r} has a percentage that is not from 0 to {MOST_PERCENT:g}")
    return tpot, ttft, rate


def _run(args: argparse.Namespace) -> int:
    if args.name is not None and not args.out:
        raise UsageError("--name is of the file that --out writes: add --out FILE, or leave --name out")
    if args.name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]*", args.name):
        raise UsageError(f"--name {args.name!r}: letters, digits and . _ + - only, for plan.py --hardware asks for it")
    if args.days is not None and not args.cross_validate:
        raise UsageError("--days is for the intervals that --cross-validate makes: add that, or leave --days out")
    start = load_hardware(args.start)
    if args.coarse_start:
        start = coarse(start)
    if args.out is not None:
        check_writable(args.out, "--out")  # before the minutes of a fit, not after
        if args.out.exists():
            raise UsageError(f"--out {args.out}: is there already; remove it, or choose another")
    loaded = [load_experiment(folder) for folder in distinct(experiment_folders(args.runs), "--runs")]
    experiments = [measured(experiment, args.prompts) for experiment in loaded]
    shape = _shape(args.model, experiments)
    if args.cross_validate and len(experiments) < 3:
        raise UsageError(f"--cross-validate needs at least 3 experiments, got {len(experiments)}")
    for text in filter(None, (other_kind(start, experiment) for experiment in loaded)):
        print(f"note: {text}: give --start", file=sys.stderr)

    def print_line(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    fitted = fit(start, shape, experiments, rounds=args.rounds, print_line=print_line)
    inside = [point for experiment in experiments for point in compare(fitted, shape, experiment)]
    print("fitted to all:", errors_text(median_errors(inside)))
    print(rankings_text(rankings(experiments, inside, start.gpus_per_node)))
    error = None
    if args.cross_validate:
        outside = cross_validate(start, shape, experiments, args.rounds)
        print("each left out once:", errors_text(median_errors(outside)))
        print(rankings_text(rankings(experiments, outside, start.gpus_per_node)))
        made = parts(outside)
        days = args.days or (0.0, 0.0, 0.0)
        if made:
            print(parts_text(made))
            print("without days:", coverage_text(coverage(outside)))
        if made and args.days:
            held = coverage(outside, dict(zip(NAMES, days, strict=True)))
            print("with days, as predictions are given:", coverage_text(held))
        print(table(outside))
        errors = median_errors(outside)
        error = FitError(
            tpot_percent=round(errors["TPOT"], 1),
            ttft_percent=round(errors["mean TTFT"], 1),
            requests_per_s_percent=round(errors["requests/s"], 1),
            points=len({(point.experiment, point.load) for point in outside}),
            how="each experiment predicted by a fit to the others; medians, without the lowest load of each",
            tpot_days_percent=days[0],
            ttft_days_percent=days[1],
            requests_per_s_days_percent=days[2],
            parts=made,
        )
    else:
        print(table(inside))
    if args.out:
        changed = {"name": args.name or start.name, "fitted_on": tuple(e.name for e in experiments), "error": error}
        text = to_yaml(fitted.model_copy(update=changed))
        write_output(args.out, text, "--out")
        print_line(f"wrote {args.out}")
    return 0
