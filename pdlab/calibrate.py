"""Fit the free constants of a hardware file to measured runs; `python -m pdlab.calibrate --help`.

Every level of every experiment is simulated as it was measured (same counts, same order, same
repeated or fresh prompts), and the logarithms of simulated over measured mean TPOT, mean TTFT and
requests/s, and of the median and the 99th percentile of ITL where they are known (they tell a
decode step from one with a prefill in it), are made small: sum of sqrt(1 + (r / 0.04)^2) - 1
(quadratic up to 4 %, linear beyond, so that one odd level does not bend the rest), plus a weak pull
of each constant towards its start value (a factor of two counts like one residual of 4 %).
Coordinate search with common random numbers: the simulator is cheap, and its small jumps (a request
more or less in a step) defeat derivatives.

Cross-validation leaves whole experiments out, one at a time, and predicts them by a fit to the others.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from pdlab.accuracy import NAMES, Measured, Point, Values, median_errors, name_of, ranked, rankings, table, told
from pdlab.analysis import gpus_of
from pdlab.arguments import OneLineParser, check_writable, exit_code, positive
from pdlab.catalog import ModelShape, load_model
from pdlab.errors import StoreError, UsageError
from pdlab.imports import load_experiment
from pdlab.perf import FitError, Hardware, load_hardware
from pdlab.results import Experiment, Run
from pdlab.sim import Prompts, SimulatedLevel, simulate
from pdlab.simulated import figures, gaps
from pdlab.spec import to_yaml
from pdlab.store import experiment_folders
from pdlab.workload import Level, Open

# TPOT, TTFT, requests/s, median and p99 ITL; repeats of TTFT differ more, percentiles jump.
WEIGHTS = (1.0, 0.4, 1.0, 0.3, 0.25)
FIRST_LEVEL = 0.2  # without a warm-up the first level holds handshakes and compilation
SCALE = 0.04
SATURATED = 0.8  # of an offered rate: below, the client's own limit on requests in flight sets the TTFT


def measured(experiment: Experiment, prompts: Prompts) -> Measured:
    """What to fit to. Request-rate levels far below their rate are left out, and such levels have prompts of
    their own in any case: a sweep of them that repeats prompts was never seen.

    Raises StoreError when the experiment does not say its deployment.
    """
    manifest = experiment.manifest
    if manifest.deployment is None:
        raise StoreError(f"{experiment.name}: its deployment is not known, so it cannot be simulated")
    runs = [run for run in experiment.runs if run.whole.ttft is not None and run.validity.valid and not _saturated(run)]
    if not runs:
        raise StoreError(f"{experiment.name}: no valid level with a TTFT")
    levels = tuple(
        Level(load=run.load, repeat=run.key.repeat, num_requests=run.num_requests, seed=run.seed or 0) for run in runs
    )
    return Measured(
        name=experiment.name,
        deployment=manifest.deployment,
        workload=runs[0].workload,
        levels=levels,
        values=tuple(_values(run) for run in runs),
        prompts="fresh" if isinstance(runs[0].load, Open) else prompts,
    )


def _saturated(run: Run) -> bool:
    return isinstance(run.load, Open) and run.whole.requests_per_s < SATURATED * run.load.rate_rps


def _values(run: Run) -> Values:
    whole = run.whole
    assert whole.ttft is not None
    itl = whole.itl.percentiles_s if whole.itl else {}
    if whole.tpot and itl.get("p50", 0.0) < whole.tpot.mean_s / 2:
        itl = {}  # chunks of several tokens: their gaps are not the engine's steps
    return (
        whole.tpot.mean_s if whole.tpot else None,
        whole.ttft.mean_s,
        whole.requests_per_s,
        itl.get("p50"),
        itl.get("p99"),
    )


def _simulated(level: SimulatedLevel) -> Values:
    itl = gaps(level)
    return (*figures(level), *((itl.percentiles_s["p50"], itl.percentiles_s["p99"]) if itl else (None, None)))


def predict(hardware: Hardware, shape: ModelShape, experiment: Measured, seeds: Sequence[int]) -> list[Values]:
    """What `Measured.values` has of every level, means over the seeds."""
    trials = [
        [
            _simulated(level)
            for level in simulate(
                experiment.deployment,
                experiment.levels,
                experiment.workload,
                hardware,
                shape,
                seed=seed,
                prompts=experiment.prompts,
            )
        ]
        for seed in seeds
    ]
    return [_means(level) for level in zip(*trials, strict=True)]


def _means(trials: Sequence[Values]) -> Values:
    def mean(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.fmean(known) if known else None

    tpot, ttft, rate, middle, tail = (mean(values) for values in zip(*trials, strict=True))
    assert ttft is not None and rate is not None
    return tpot, ttft, rate, middle, tail


def loss(hardware: Hardware, shape: ModelShape, experiments: Sequence[Measured], seeds: Sequence[int]) -> float:
    """The sum described above, without the pull; infinite where an experiment cannot run at all."""
    total = 0.0
    for experiment in experiments:
        try:
            found = predict(hardware, shape, experiment, seeds)
        except UsageError:
            return math.inf
        for number, (ours, theirs) in enumerate(zip(found, experiment.values, strict=True)):
            importance = FIRST_LEVEL if number == 0 else 1.0
            for weight, value, truth in zip(WEIGHTS, ours, theirs, strict=True):
                if value is None or truth is None:
                    continue
                residual = math.log(value / truth) if value > 0 else 9.0
                total += importance * weight * (math.sqrt(1 + (residual / SCALE) ** 2) - 1)
    return total


def fit(
    start: Hardware,
    shape: ModelShape,
    experiments: Sequence[Measured],
    *,
    seeds: Sequence[int] = (0, 1),
    rounds: int = 12,
    say: Callable[[str], None] = lambda _: None,
) -> Hardware:
    """``start`` with its fitted constants moved to where the experiments are met best."""
    names = [name for name, constant in start.constants.items() if constant.basis == "fitted"]
    origin = {name: start.value(name) for name in names}
    values, steps = dict(origin), dict.fromkeys(names, 0.2)

    def score(trial: dict[str, float]) -> float:
        pull = sum((math.log(trial[name] / origin[name]) / math.log(2)) ** 2 / 2 for name in names if origin[name])
        return loss(start.with_values(trial), shape, experiments, seeds) + 0.4 * pull

    best = score(values)
    for number in range(rounds):
        for name in names:
            for factor in (1 + steps[name], 1 / (1 + steps[name])):
                trial = {**values, name: values[name] * factor}
                found = score(trial)
                if found < best:
                    best, values = found, trial
                    steps[name] = min(steps[name] * 1.4, 0.5)
                    break
            else:
                steps[name] *= 0.5
        say(f"round {number + 1} of {rounds}: {best:.2f}")
        if max(steps.values()) < 0.004:
            break
    return start.with_values({name: float(f"{value:.4g}") for name, value in values.items()})


def coarse(hardware: Hardware) -> Hardware:
    """Every fitted constant as the nearest (in ratio) of 1, 2 and 5 times a power of ten: off by up to 1.58."""

    def rounded(value: float) -> float:
        power = 10.0 ** math.floor(math.log10(value))
        return float(
            f"{min((power * step for step in (1, 2, 5, 10)), key=lambda near: abs(math.log(near / value))):.4g}"
        )

    fitted = {name: at.value for name, at in hardware.constants.items() if at.basis == "fitted" and at.value > 0}
    return hardware.with_values({name: rounded(value) for name, value in fitted.items()})


def compare(
    hardware: Hardware, shape: ModelShape, experiment: Measured, seeds: Sequence[int] = (10, 11, 12, 13)
) -> list[Point]:
    """Predicted beside measured, every level and metric."""
    points = []
    found = predict(hardware, shape, experiment, seeds)
    for level, ours, theirs in zip(experiment.levels, found, experiment.values, strict=True):
        load = name_of(level.load)
        for metric, value, truth in zip(NAMES, ours[:3], theirs[:3], strict=True):
            if value is not None and truth is not None:
                points.append(
                    Point(experiment=experiment.name, load=load, metric=metric, predicted=value, measured=truth)
                )
    return points


def _held_out(
    start: Hardware, shape: ModelShape, experiments: Sequence[Measured], number: int, rounds: int
) -> list[Point]:
    others = [*experiments[:number], *experiments[number + 1 :]]
    return compare(fit(start, shape, others, rounds=rounds), shape, experiments[number])


def cross_validate(
    start: Hardware, shape: ModelShape, experiments: Sequence[Measured], rounds: int = 12, workers: int = 2
) -> list[Point]:
    """Every experiment predicted by a fit to all the others."""
    with ProcessPoolExecutor(workers) as pool:
        futures = [
            pool.submit(_held_out, start, shape, experiments, number, rounds) for number in range(len(experiments))
        ]
        return [point for future in futures for point in future.result()]


def other_kind(hardware: Hardware, experiment: Experiment) -> str | None:
    """What to say where GPUs were measured and the hardware is of CPUs, or the other way round; else None."""
    if (gpus_of(experiment).device == "cpu") == hardware.cpu:
        return None
    measured_on = "GPUs" if hardware.cpu else "engines on CPUs"
    return f"{experiment.name} was measured on {measured_on}, but {hardware.name} is of {hardware.gpu}"


def _rounds(text: str) -> int:
    return 0 if text.strip() == "0" else positive(text)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="python -m pdlab.calibrate",
        description="Fit a hardware file (configs/catalog/) to measured runs, and say how well it predicts.",
        epilog="example: python -m pdlab.calibrate --runs bm_results/* --start h100-vllm-0.11 --out my-cluster.yaml",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--runs", nargs="+", type=Path, required=True, metavar="DIR", help="experiment folders, ours or published"
    )
    parser.add_argument("--start", default="h100-vllm-0.11", help="hardware to start from (default %(default)s)")
    parser.add_argument(
        "--coarse-start",
        action="store_true",
        help="round what is fitted of --start to 1, 2 or 5 times a power of ten first: how much does the start matter?",
    )
    parser.add_argument("--model", help="model that was measured (default: the one that the runs say)")
    parser.add_argument(
        "--prompts",
        choices=("fresh", "repeated"),
        default="fresh",
        help="whether levels repeat the prompts of earlier levels, as the published runs do (default %(default)s)",
    )
    parser.add_argument("--rounds", type=_rounds, default=12, help="rounds of the search (default %(default)s)")
    parser.add_argument("--name", help="name of the new hardware (default: that of --start)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the fitted hardware there")
    parser.add_argument("--cross-validate", action="store_true", help="leave each experiment out once; takes minutes")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    return exit_code(lambda: _run(_parser().parse_args(argv)))


def _shape(model: str | None, experiments: Sequence[Measured]) -> ModelShape:
    models = [model] if model else sorted({experiment.deployment.model for experiment in experiments})
    if len(models) > 1:
        raise UsageError(
            f"the runs are of {' and '.join(models)}; constants are fitted to one model: leave the others out"
        )
    shape = load_model(models[0])
    if shape is None:
        raise UsageError(f"--model {models[0]}: its shape is not in configs/models/; add a file there")
    return shape


def _run(args: argparse.Namespace) -> int:
    start = load_hardware(args.start)
    if args.coarse_start:
        start = coarse(start)
    if args.out is not None:
        check_writable(args.out, "--out")  # before the minutes of a fit, not after
    loaded = [load_experiment(folder) for folder in experiment_folders(args.runs)]
    for text in filter(None, (other_kind(start, experiment) for experiment in loaded)):
        print(f"note: {text}: give --start", file=sys.stderr)
    experiments = [measured(experiment, args.prompts) for experiment in loaded]
    shape = _shape(args.model, experiments)
    if args.cross_validate and len(experiments) < 3:
        raise UsageError(f"--cross-validate needs at least 3 experiments, got {len(experiments)}")

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    fitted = fit(start, shape, experiments, rounds=args.rounds, say=say)
    inside = [point for experiment in experiments for point in compare(fitted, shape, experiment)]
    print("fitted to all:", told(median_errors(inside)))
    print(ranked(rankings(experiments, inside, start.gpus_per_node)))
    error = None
    if args.cross_validate:
        outside = cross_validate(start, shape, experiments, args.rounds)
        print("each left out once:", told(median_errors(outside)))
        print(ranked(rankings(experiments, outside, start.gpus_per_node)))
        print(table(outside))
        found = median_errors(outside)
        error = FitError(
            tpot_percent=round(found["TPOT"], 1),
            ttft_percent=round(found["mean TTFT"], 1),
            requests_per_s_percent=round(found["requests/s"], 1),
            points=len({(point.experiment, point.load) for point in outside}),
            how="each experiment predicted by a fit to the others; medians, without the lowest load of each",
        )
    else:
        print(table(inside))
    if args.out:
        changed = {"name": args.name or start.name, "fitted_on": tuple(e.name for e in experiments), "error": error}
        text = to_yaml(fitted.model_copy(update=changed))
        try:
            args.out.write_text(text, encoding="utf-8")
        except OSError as failure:
            raise StoreError(f"--out {args.out}: cannot be written ({failure.strerror}); choose another") from failure
        say(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
