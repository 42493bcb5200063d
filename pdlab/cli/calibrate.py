"""Fit a hardware file to measured runs: ``python -m pdlab calibrate``."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdlab.analysis.curves import gpus_of
from pdlab.core.arguments import OneLineParser, above_zero, check_writable, distinct, exit_code, positive
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
from pdlab.plan.calibration import coarse, compare, cross_validate, fit, fit_domain, fitted_names, measured, other_kind
from pdlab.plan.extrapolation import RanOn, major_minor, network_of, ran_on
from pdlab.results.published_folders import load_experiment
from pdlab.results.store import experiment_folders
from pdlab.sim.hardware import Constant, FitError, Hardware, load_hardware, signed

if TYPE_CHECKING:
    from pdlab.core.catalog import ModelShape
    from pdlab.plan.accuracy import MeasuredSweep
    from pdlab.results.schema import Experiment

EPILOG = """\
examples:
  python -m pdlab calibrate --runs bm_results/* --out my-cluster.yaml
      fit the hardware of your cluster; plan.py --hardware my-cluster.yaml predicts with it
  python -m pdlab calibrate --runs bm_results/* --cross-validate
      how well each experiment is predicted by a fit to the others
  python -m pdlab calibrate --runs bm_results/* --rounds 0
      how well the hardware predicts these runs as it is
  python -m pdlab calibrate --runs theirs/* --gpu H200 --engine 0.18 --out h200.yaml \\
      --data-sheet memory_gb=150.8,memory_gb_per_s=4800,tensor_tflops=989
      runs that do not record their GPU and vLLM, on a GPU that is not the one of --start
"""


MOST_PERCENT = 100.0
DATA_SHEET = ("memory_gb", "memory_gb_per_s", "tensor_tflops")  # constants of the GPU itself, which no fit moves
CALIBRATED = "python -m pdlab calibrate, see fitted_on"
NAME_RULE = r"[A-Za-z0-9][A-Za-z0-9._+-]*"


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
    add("--gpu", metavar="TYPE", help="GPU type as Ray names it, such as H200 (default: the one that the runs record)")
    add("--engine", type=_version, metavar="VERSION", help="vLLM version, such as 0.29 (default: as the runs record)")
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
    add(
        "--data-sheet",
        type=_data_sheet,
        metavar="NAME=VALUE,...",
        help=f"values of the GPU's data sheet for {', '.join(DATA_SHEET)}; asked for where --start is of another GPU",
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
    add("--name", metavar="NAME", help="name of the new hardware (default: that of the file of --out)")
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


def _of_that_model(shape: ModelShape, experiments: Sequence[MeasuredSweep]) -> None:
    """Raises UsageError where the runs record another model than the one that --model names."""
    for experiment in experiments:
        recorded = load_model(experiment.deployment.model)
        if recorded is not None and recorded.name != shape.name:
            raise UsageError(f"--model {shape.name}: {experiment.name} is of {recorded.name}; leave --model out")


def _days(text: str) -> tuple[float, float, float]:
    try:
        tpot, ttft, rate = (float(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not three percentages: TPOT, TTFT, requests/s") from error
    if not all(0 <= value <= MOST_PERCENT for value in (tpot, ttft, rate)):
        raise argparse.ArgumentTypeError(f"{text!r} has a percentage that is not from 0 to {MOST_PERCENT:g}")
    return tpot, ttft, rate


def _version(text: str) -> str:
    version = major_minor(text)
    if version is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a version such as 0.29")
    return version


def _data_sheet(text: str) -> dict[str, float]:
    values: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in DATA_SHEET:
            raise argparse.ArgumentTypeError(f"{name!r} is not a constant of a data sheet; {choices(name, DATA_SHEET)}")
        values[name] = above_zero(value)
    return values


def _made_on(args: argparse.Namespace, loaded: Sequence[Experiment]) -> RanOn:
    """GPU and vLLM version of all runs, from what they record and the flags. Raises UsageError where they differ, or
    where neither says it."""
    records = {experiment.name: ran_on(experiment) for experiment in loaded}

    def one(what: str, flag: str, stated: str | None, of_runs: dict[str, str | None]) -> str:
        recorded = sorted({value for value in of_runs.values() if value is not None})
        if len(recorded) > 1:
            raise UsageError(f"the runs are of {what} {' and '.join(recorded)}; constants are fitted to one: sort them")
        if stated is not None and recorded and recorded != [stated]:
            raise UsageError(f"{flag} {stated}: the runs record {what} {recorded[0]}; leave {flag} out")
        unknown = [name for name, value in of_runs.items() if value is None]
        if stated is None and unknown:
            raise UsageError(f"{unknown[0]} does not record its {what}, which --out writes down; give {flag}")
        return stated or recorded[0]

    gpu = one("GPU type", "--gpu", args.gpu, {name: each.gpu for name, each in records.items()})
    version = one("vLLM version", "--engine", args.engine, {name: each.version for name, each in records.items()})
    return RanOn(gpu, "vllm", version)


def _on_gpu(start: Hardware, gpu: str, node_gpus: int, sheet: dict[str, float]) -> Hardware:
    """The start, as hardware of the GPU that was measured. Raises UsageError where it is of another GPU and the data
    sheet of the measured one is not given."""
    of_start = "cpu" if start.cpu else start.gpu_type
    if gpu != of_start and "cpu" in (gpu, of_start):
        raise UsageError(f"the runs are of {gpu}, --start {start.name} is of {of_start}: give another --start")
    missing = [name for name in DATA_SHEET if name not in sheet]
    if gpu != of_start and missing:
        raise UsageError(
            f"the runs are of {gpu}, --start {start.name} is of {of_start}: give --data-sheet with "
            f"{', '.join(missing)} of {gpu}, or a --start of that GPU"
        )
    changes: dict[str, Any] = {"constants": start.constants | _data_sheet_constants(start, sheet)}
    if gpu != "cpu":
        changes |= {"gpu": start.gpu if gpu == of_start else gpu, "gpu_type": gpu, "gpus_per_node": node_gpus}
    return start.model_copy(update=changes)


def _data_sheet_constants(start: Hardware, sheet: dict[str, float]) -> dict[str, Constant]:
    return {
        name: Constant(value=value, unit=start.constants[name].unit, basis="published", source="--data-sheet")
        for name, value in sheet.items()
    }


def _stack(loaded: Sequence[Experiment], version: str) -> str:
    """Versions of what served, as the runs record them."""
    names = {"vllm": "vLLM", "ray": "Ray", "nixl": "NIXL"}
    recorded = {
        key: {value for experiment in loaded if (value := experiment.manifest.versions.get(key))} for key in names
    }
    if not recorded["vllm"]:
        return f"vLLM {version}"
    return ", ".join(f"{names[key]} {' or '.join(sorted(values))}" for key, values in recorded.items() if values)


def _run(args: argparse.Namespace) -> int:
    if args.name is not None and not args.out:
        raise UsageError("--name is of the file that --out writes: add --out FILE, or leave --name out")
    if args.out is not None and args.name is None and not re.fullmatch(NAME_RULE, args.out.stem):
        raise UsageError(f"--out {args.out}: the file's name is no name for hardware; give --name")
    if args.out is not None and not args.rounds:
        raise UsageError("--rounds 0 fits nothing: leave --out out, or fit")
    if args.name is not None and not re.fullmatch(NAME_RULE, args.name):
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
    made_on = None
    if args.out:
        rehearsed = [experiment.name for experiment in loaded if experiment.manifest.rehearsal]
        if rehearsed:
            raise UsageError(f"{rehearsed[0]} was rehearsed, not measured: hardware is fitted to measured runs alone")
        made_on = _made_on(args, loaded)
        assert made_on.gpu is not None
        node_gpus = max(gpus_of(experiment).node for experiment in loaded)
        start = _on_gpu(start, made_on.gpu, node_gpus, args.data_sheet or {})
        _of_that_model(shape, experiments)
    elif args.data_sheet or args.gpu or args.engine:
        raise UsageError("--gpu, --engine and --data-sheet are of the file that --out writes: add --out FILE")
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
        assert made_on is not None and made_on.gpu is not None and made_on.version is not None
        moved = {
            name: fitted.constants[name].model_copy(update={"source": CALIBRATED}) for name in fitted_names(fitted)
        }
        changed = {
            "name": args.name or args.out.stem,
            "stack": _stack(loaded, made_on.version),
            "fitted_on": tuple(e.name for e in experiments),
            "constants": fitted.constants | moved,
            "error": error,
        }
        crossed = [network_of(each.deployment, ran_on(run).nic) for each, run in zip(experiments, loaded, strict=True)]
        domain = fit_domain(experiments, shape.name, made_on, [each for each in crossed if each is not None])
        write_output(args.out, to_yaml(signed(fitted.model_copy(update=changed), domain)), "--out")
        print_line(f"wrote {args.out}")
    return 0
