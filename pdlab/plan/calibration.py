"""Fit the free constants of a hardware file to measured runs; `python -m pdlab calibrate --help`.

Every level of every experiment is simulated as it was measured: with the same counts, order and repeated or fresh
prompts. A residual r is the logarithm of a simulated figure over the measured one. The figures are mean TPOT, mean TTFT
and requests/s. If they are known, the median and the 99th percentile of ITL are figures too: they
distinguish decode steps from steps with prefill.

The loss is the sum of sqrt(1 + (r / 0.04)^2) - 1. It is quadratic up to 4 % and linear beyond, so that an outlier has
little weight. A weak pull keeps each constant near its start value: a factor of two counts as a residual of 4 %.

The fit takes Gauss-Newton steps in the logarithms of all constants at once. Several constants have similar effects, and
would not move one at a time. The simulator has jumps (one request more or less in a step). So a derivative is the slope
over a tenth to either side, as a mean over fixed seeds.

Cross-validation leaves out one whole experiment at a time, and predicts it by a fit to the other experiments.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdlab.analysis.audit.content_rules import impossible_figures
from pdlab.analysis.curves import gpus_of
from pdlab.core.catalog import ModelShape
from pdlab.core.commands import BENCH
from pdlab.core.errors import StoreError, UsageError
from pdlab.core.nodes import GpuLink
from pdlab.core.text import counted, listed
from pdlab.core.workload import Level, LoadKind, Open
from pdlab.plan.accuracy import METRICS, LevelFigures, MeasuredSweep, PredictedPoint, name_of
from pdlab.plan.extrapolation import Platform, in_flight_per_gpu
from pdlab.plan.prediction_intervals import SEEDS, scatter
from pdlab.results.schema import Experiment, Run
from pdlab.sim.argument_effects import SIMULATED, unknown_effects
from pdlab.sim.hardware import FitDomain, Hardware, Speculation
from pdlab.sim.kv_transfer import depends_on_age
from pdlab.sim.level import SimulatedLevel, Trace, figures, gaps
from pdlab.sim.simulator import Prompts

# Of TPOT, TTFT, requests/s, median and p99 ITL. The repeats of TTFT differ more, and percentiles jump.
WEIGHTS = (1.0, 0.4, 1.0, 0.3, 0.25)
FIRST_LEVEL_WEIGHT = 0.2  # without a warm-up, the first level has handshakes and compilation
SCALE = 0.04  # residual up to which the loss is quadratic
PULL = 0.4
IMPOSSIBLE_RESIDUAL = 9.0  # residual of a figure that is not above 0
SLOPE_STEP = 0.1  # in a constant's logarithm: its effect is large beside the simulator's jumps
LONGEST_STEP = 0.5  # of one constant's logarithm
STEP_SHARES = 1.0, 0.5, 0.25  # shares of a step that are tried
LEAST_GAIN = 0.01  # of a step, as a share of the loss
IMPOSSIBLE = "with impossible figures"
EARLY = "with early tokens (--early-token), whose TTFT lacks the hand-over to decode"
SATURATED = 0.8  # served share of the offered rate; below, the client's limit on requests in flight sets the TTFT


def measured_sweep(
    experiment: Experiment, prompts: Prompts | None, trace: Trace | None = None, *, fitted: bool = False
) -> MeasuredSweep:
    """The levels of an experiment that can be predicted, with their figures.

    Open-loop levels far below their offered rate are left out. ``prompts``: of closed loops (None: repeated if others
    measured them, as in the published runs, else fresh); open loops have fresh prompts. ``trace``: the requests that
    the experiment replayed. ``fitted``: constants are fitted to the levels, so those with impossible figures,
    speculative decoding or early tokens are left out too. Raises StoreError if the experiment does not record its
    deployment, or if its lengths come from a file, which is not kept.
    """
    manifest = experiment.manifest
    if manifest.deployment is None:
        raise StoreError(
            f"{experiment.name}: its deployment is not recorded, so it cannot be simulated; "
            f"measure it with {BENCH}, which records it"
        )
    early = fitted and manifest.early_tokens
    left_out = [EARLY if early else _left_out(run, fitted=fitted) for run in experiment.runs]
    runs = [run for run, reason in zip(experiment.runs, left_out, strict=True) if reason is None]
    if not runs:
        reasons = Counter(reason for reason in left_out if reason is not None)
        words = listed([f"{count} {reason}" for reason, count in reasons.items()])
        raise StoreError(f"{experiment.name}: none of its levels can be predicted ({words}); measure other levels")
    levels = tuple(
        Level(
            load=run.load,
            repeat=run.key.repeat,
            look=run.key.look,
            num_requests=run.num_requests,
            seed=run.seed or 0,
        )
        for run in runs
    )
    try:
        if trace is None:
            runs[0].workload.draw(levels[0].model_copy(update={"num_requests": 1}))
    except UsageError as error:
        raise StoreError(f"{experiment.name}: cannot be simulated: {error}") from error
    cluster = None if manifest.on_local_nodes else manifest.cluster
    assumed: Prompts = "repeated" if manifest.origin == "imported" else "fresh"
    closed = not isinstance(runs[0].load, Open)
    return MeasuredSweep(
        name=experiment.name,
        deployment=manifest.deployment,
        workload=runs[0].workload,
        levels=levels,
        values=tuple(_values(run) for run in runs),
        prompts=prompts or assumed if closed else "fresh",
        trace=trace,
        nodes=tuple(cluster.engine_nodes) if cluster is not None else (),
        ray_version=manifest.versions.get("ray"),
        warmed=manifest.origin == "measured",  # sweeps of pdlab begin with a warm-up
        launched=manifest.origin != "imported",
        speculation=_speculation(runs),
        doubts=tuple(_doubts(experiment, left_out)),
        assumed=closed and prompts is None and manifest.origin == "imported" and len(runs) > 1,
    )


def _speculation(runs: Sequence[Run]) -> Speculation | None:
    """The speculative decoding of the levels, as a mean over them; None: none, or unknown. A file that does not count
    guesses has the fewest that give its accepted tokens."""
    each = [run.speculation for run in runs if run.speculation is not None]
    known = [one.accepted_tokens for one in each if one.accepted_tokens is not None]
    if not known:
        return None
    accepted = statistics.fmean(known)
    guessed = [one.guessed_tokens for one in each if one.guessed_tokens is not None]
    least = max(math.ceil(accepted) - 1, 1)
    return Speculation(
        acceptance_length=accepted, draft_tokens=max(round(statistics.fmean(guessed)) if guessed else 0, least)
    )


def assumed_prompts(sweeps: Sequence[MeasuredSweep]) -> str | None:
    """A sentence about the sweeps whose prompts are assumed; None: there are none."""
    names = [each.name for each in sweeps if each.assumed]
    if not names:
        return None
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"{names[0]}{more}: simulated as if every level repeated the prompts of smaller levels, as with one --seed for "
        "all levels; if each level had its own prompts, give --prompts fresh"
    )


def _doubts(experiment: Experiment, left_out: Sequence[str | None]) -> Iterator[str]:
    """The levels that are left out or have impossible figures, and why, as sentences."""
    if experiment.manifest.early_tokens:
        yield (
            f"{experiment.name} was measured with --early-token: its TTFT lacks the hand-over to decode, and its TPOT "
            "has it; in the predictions TTFT has it"
        )
    of_load = Counter((run.key.kind, run.key.value) for run in experiment.runs)
    gone: Counter[tuple[LoadKind, float, str]] = Counter()
    for run, reason in zip(experiment.runs, left_out, strict=True):
        if reason is not None:
            why = impossible_figures(run) if reason == IMPOSSIBLE else ""
            gone[run.key.kind, run.key.value, reason + (f" ({why})" if why else "")] += 1
    for run, reason in zip(experiment.runs, left_out, strict=True):
        kind, value = run.key.kind, run.key.value
        for words in [each for each in gone if each[:2] == (kind, value)]:
            out, of = gone.pop(words), of_load[kind, value]
            some = "" if out == of else f"{out} of {counted(of, 'repeat')} of "
            verb = "is" if out == of or out == 1 else "are"
            yield f"{experiment.name}, {some}{name_of(run.load)} {verb} left out: {words[2]}"
        if reason is not None:
            continue
        level = f"{experiment.name}, {name_of(run.load)}" + (f", repeat {run.key.repeat + 1}" if run.key.repeat else "")
        if why := impossible_figures(run):
            yield f"{level} has impossible figures ({why})"
        if run.speculation is not None and run.speculation.accepted_tokens is None:
            yield f"{level} has speculative decoding of unknown tokens per step: give --acceptance-length"


def _left_out(run: Run, *, fitted: bool) -> str | None:
    """Why a level is neither fitted nor predicted; None: it is."""
    if not run.validity.valid:
        return "not valid"
    if _mean_ttft_s(run) is None:
        return "without a mean TTFT"
    if fitted and run.speculation is not None:
        return "with speculative decoding, whose draft takes time in every step"
    if fitted and impossible_figures(run):
        return IMPOSSIBLE
    if isinstance(run.load, Open) and run.whole.requests_per_s < SATURATED * run.workload.mean_rps(run.load):
        return f"saturated: below {SATURATED:.0%} of the requests/s that were offered"
    return None


def _mean_ttft_s(run: Run) -> float | None:
    return run.whole.ttft.mean_s if run.whole.ttft is not None else None


def _values(run: Run) -> LevelFigures:
    summary, ttft_s = run.whole, _mean_ttft_s(run)
    assert ttft_s is not None
    tpot_s = summary.tpot.mean_s if summary.tpot else None
    itl = summary.itl.percentiles_s if summary.itl else {}
    if tpot_s is not None and itl.get("p50", 0.0) < tpot_s / 2:
        itl = {}  # chunks of several tokens: their gaps are not the engine's steps
    return LevelFigures(
        tpot_s,
        ttft_s,
        summary.requests_per_s,
        itl.get("p50"),
        itl.get("p99"),
    )


def _simulated(level: SimulatedLevel) -> LevelFigures:
    itl = gaps(level)
    return LevelFigures(*figures(level), *((itl.percentiles_s["p50"], itl.percentiles_s["p99"]) if itl else ()))


def predict(
    hardware: Hardware, shape: ModelShape, experiment: MeasuredSweep, seeds: Sequence[int]
) -> list[LevelFigures]:
    """Predictions of `MeasuredSweep.values`, as means over the seeds. Raises UsageError if the experiment cannot
    run."""
    return [_means(level) for level in zip(*_trials(hardware, shape, experiment, seeds), strict=True)]


def _trials(
    hardware: Hardware,
    shape: ModelShape,
    experiment: MeasuredSweep,
    seeds: Sequence[int],
    scattered: bool | None = None,
) -> list[list[LevelFigures]]:
    """The predictions of every level by each seed: a list for each seed."""
    return [
        [_simulated(level) for level in experiment.simulated(hardware, shape, seed=seed, scattered=scattered)]
        for seed in seeds
    ]


def _means(trials: Sequence[LevelFigures]) -> LevelFigures:
    def mean(values: Sequence[float | None]) -> float | None:
        known_values = [value for value in values if value is not None]
        return statistics.fmean(known_values) if known_values else None

    tpot, ttft, rate, middle, tail = (mean(values) for values in zip(*trials, strict=True))
    assert ttft is not None and rate is not None
    return LevelFigures(tpot, ttft, rate, middle, tail)


class FigureSlopes(NamedTuple):
    """The residuals of one experiment, and their slopes. ``residuals``, shape (n, 2): the weight, and the logarithm of
    predicted over measured, of every known figure. ``slopes``, shape (n, constants): the change of these logarithms
    with the logarithm of each fitted constant."""

    residuals: NDArray[np.float64]
    slopes: NDArray[np.float64]


def residuals(
    hardware: Hardware, shape: ModelShape, experiment: MeasuredSweep, seeds: Sequence[int]
) -> NDArray[np.float64]:
    """`FigureSlopes.residuals`. Raises UsageError if the experiment cannot run."""
    rows = []
    for number, (predicted, measured) in enumerate(
        zip(predict(hardware, shape, experiment, seeds), experiment.values, strict=True)
    ):
        level_weight = 1.0 if number or experiment.warmed else FIRST_LEVEL_WEIGHT
        for weight, value, truth in zip(WEIGHTS, predicted, measured, strict=True):
            if value is not None and truth is not None:
                rows.append((level_weight * weight, math.log(value / truth) if value > 0 else IMPOSSIBLE_RESIDUAL))
    return np.array(rows)


def fitted_names(hardware: Hardware) -> list[str]:
    """The names of the constants that a fit changes."""
    return [name for name, each in hardware.constants.items() if each.basis == "fitted" and each.value > 0]


def slopes(
    hardware: Hardware, shape: ModelShape, experiment: MeasuredSweep, seeds: Sequence[int] = SEEDS
) -> FigureSlopes:
    """The residuals of an experiment, and their slopes over `SLOPE_STEP` to either side of each fitted constant. Raises
    UsageError if the experiment cannot run."""

    def residuals_at(name: str, factor: float) -> NDArray[np.float64]:
        changed = hardware.with_values({name: hardware.value(name) * factor})
        return residuals(changed, shape, experiment, seeds)[:, 1]

    each = [
        (residuals_at(name, math.exp(SLOPE_STEP)) - residuals_at(name, math.exp(-SLOPE_STEP))) / (2 * SLOPE_STEP)
        for name in fitted_names(hardware)
    ]
    return FigureSlopes(residuals(hardware, shape, experiment, seeds), np.array(each).T)


def _loss(weighted: NDArray[np.float64], moved: NDArray[np.float64]) -> float:
    """The loss of the module's docstring. ``moved``: logarithms of the constants over their start values."""
    weight, residual = weighted.T
    pull = PULL / 2 * float((moved**2).sum()) / math.log(2) ** 2
    return float((weight * (np.sqrt(1 + (residual / SCALE) ** 2) - 1)).sum()) + pull


def fit(
    start: Hardware,
    shape: ModelShape,
    experiments: Sequence[MeasuredSweep],
    *,
    seeds: Sequence[int] = SEEDS,
    rounds: int = 12,
    print_line: Callable[[str], None] = lambda _: None,
    known: Sequence[FigureSlopes] | None = None,
) -> Hardware:
    """``start`` with its fitted constants set to the values that fit the experiments best. ``rounds``: the most rounds
    of the search. ``print_line``: gets a line about each round. ``known``: the `slopes` of the experiments at the
    start, if they are known already. Raises UsageError if an experiment cannot run."""
    names = fitted_names(start)
    origin = np.array([start.value(name) for name in names])

    def at(moved: NDArray[np.float64]) -> Hardware:
        return start.with_values(dict(zip(names, map(float, origin * np.exp(moved)), strict=True)))

    def weighted_residuals(moved: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.concatenate([residuals(at(moved), shape, experiment, seeds) for experiment in experiments])

    def better_state(state: _FitState, slopes: NDArray[np.float64]) -> _FitState | None:
        """A state with a lower loss along the step from ``state``; None if there is none."""
        step = _gauss_newton(state.residuals, slopes, state.moved)
        for share in STEP_SHARES:
            moved = state.moved + share * step
            try:
                trial = weighted_residuals(moved)
            except UsageError:  # a KV pool that holds no request any more
                continue
            if (loss := _loss(trial, moved)) < (1 - LEAST_GAIN) * state.loss:
                return _FitState(moved, trial, loss)
        return None

    state = _FitState(np.zeros(len(names)), np.empty((0, 2)), math.inf)
    for number in range(rounds if names else 0):
        of_experiments = (
            known if known and not number else [slopes(at(state.moved), shape, each, seeds) for each in experiments]
        )
        weighted, all_slopes = (np.concatenate(parts) for parts in zip(*of_experiments, strict=True))
        state, before = _FitState(state.moved, weighted, _loss(weighted, state.moved)), state.loss
        while better := better_state(state, all_slopes):
            state = better
        print_line(f"round {number + 1} of {rounds}: {state.loss:.2f}")
        if state.loss > (1 - LEAST_GAIN) * before:
            break
    fitted = at(state.moved)
    return fitted.with_values({name: float(f"{fitted.value(name):.4g}") for name in names})


class _FitState(NamedTuple):
    """Logarithms of the constants over their start values, with their residuals and their loss."""

    moved: NDArray[np.float64]
    residuals: NDArray[np.float64]
    loss: float


def _gauss_newton(
    weighted: NDArray[np.float64], slopes: NDArray[np.float64], moved: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The step to the minimum of the loss if residuals were linear, at most `LONGEST_STEP` for each constant."""
    weight, residual = weighted.T
    weight = weight / np.sqrt(1 + (residual / SCALE) ** 2) / SCALE**2
    pull = PULL / math.log(2) ** 2
    curvature = slopes.T @ (weight[:, None] * slopes) + pull * np.eye(len(moved))
    step = np.linalg.solve(curvature, -(slopes.T @ (weight * residual) + pull * moved))
    clipped: NDArray[np.float64] = np.clip(step, -LONGEST_STEP, LONGEST_STEP)
    return clipped


def rounded_start(hardware: Hardware) -> Hardware:
    """Every fitted constant becomes 1, 2 or 5 times a power of ten, the nearest in ratio: off by up to 1.58 times."""

    def rounded(value: float) -> float:
        power = 10.0 ** math.floor(math.log10(value))
        return float(
            f"{min((power * step for step in (1, 2, 5, 10)), key=lambda near: abs(math.log(near / value))):.4g}"
        )

    return hardware.with_values({name: rounded(hardware.value(name)) for name in fitted_names(hardware)})


def compare(
    hardware: Hardware, shape: ModelShape, experiment: MeasuredSweep, seeds: Sequence[int] = (10, 11, 12, 13)
) -> list[PredictedPoint]:
    """Predicted and measured figures of every level and metric. Raises UsageError if the experiment cannot run."""
    points = []
    by_level = list(zip(*_trials(hardware, shape, experiment, seeds), strict=True))
    merged: list[LevelFigures | None] = [None] * len(by_level)
    if depends_on_age(experiment.deployment, hardware, shape):
        merged_trials = _trials(hardware, shape, experiment, seeds, scattered=False)
        merged = [_means(trials) for trials in zip(*merged_trials, strict=True)]
    for level, trials, if_merged, measured in zip(experiment.levels, by_level, merged, experiment.values, strict=True):
        predicted = _means(trials)
        for number, metric in enumerate(METRICS):
            value, truth = predicted[number], measured[number]
            if value is None or truth is None:
                continue
            of_seeds = [known for trial in trials if (known := trial[number]) is not None]
            points.append(
                PredictedPoint(
                    experiment=experiment.name,
                    load=name_of(level.load),
                    metric=metric,
                    predicted=value,
                    measured=truth,
                    scatter=scatter(of_seeds, None if if_merged is None else if_merged[number]),
                )
            )
    return points


def _held_out(
    start: Hardware,
    shape: ModelShape,
    experiments: Sequence[MeasuredSweep],
    number: int,
    rounds: int,
    known: Sequence[FigureSlopes],
) -> list[PredictedPoint]:
    training_set, of_training = ([*some[:number], *some[number + 1 :]] for some in (experiments, known))
    fitted = fit(start, shape, training_set, rounds=rounds, known=of_training)
    return compare(fitted, shape, experiments[number])


def cross_validate(
    start: Hardware, shape: ModelShape, experiments: Sequence[MeasuredSweep], rounds: int = 12, workers: int = 2
) -> list[PredictedPoint]:
    """Every experiment, predicted by a fit to all the other experiments in ``workers`` processes."""
    with ProcessPoolExecutor(workers) as pool:
        count = len(experiments)
        known = list(pool.map(slopes, [start] * count, [shape] * count, experiments)) if rounds else []
        futures = [pool.submit(_held_out, start, shape, experiments, number, rounds, known) for number in range(count)]
        return [point for future in futures for point in future.result()]


def loads_in_flight(sweep: MeasuredSweep) -> list[float]:
    """The requests in flight per GPU of every level. A level without TPOT has answers of one token, so that its E2EL is
    its TTFT."""
    after_first = sweep.workload.mean_tokens.output - 1
    return [
        in_flight_per_gpu(
            level.load,
            sweep.deployment.gpus,
            figures.requests_per_s,
            figures.ttft_s + (figures.tpot_s or 0.0) * after_first,
        )
        for level, figures in zip(sweep.levels, sweep.values, strict=True)
    ]


def unlike_arguments(hardware: Hardware, shape: ModelShape, sweeps: Sequence[MeasuredSweep]) -> str | None:
    """How runs, and the runs of the hardware's measured levels, differ in engine arguments whose effect is not
    simulated; None: in none."""
    of = {each.name: set(unknown_effects(hardware, each.deployment, shape.kv_dtype)) for each in sweeps}
    if hardware.fit is not None and hardware.steps is not None and hardware.steps.correction.fitted_levels:
        of[hardware.name] = set(hardware.fit.engine_arguments)
    for name, arguments in of.items():
        for other, others in of.items():
            lacks = sorted(each for each in arguments - others if each.partition("=")[0] not in SIMULATED)
            if lacks:
                return f"{name} has {', '.join(lacks)}, which is not simulated, and {other} has not"
    return None


def fit_domain(
    sweeps: Sequence[MeasuredSweep],
    shape: ModelShape,
    made_on: Platform,
    networks: Sequence[str],
    engine_arguments: Sequence[str] = (),
    gpu_link: GpuLink | None = None,
) -> FitDomain:
    """The range of these runs, which are all of one model, one GPU type and one vLLM version. ``made_on``: GPU type and
    vLLM version. ``networks``: the networks that KV cache crossed. ``engine_arguments``,
    ``gpu_link``: as of `FitDomain`."""
    assert made_on.gpu is not None and made_on.version is not None
    pools = [pool for sweep in sweeps for pool in sweep.deployment.pools.values()]
    means = [sweep.workload.mean_tokens for sweep in sweeps]
    longest = [sweep.workload.longest for sweep in sweeps]
    loads = [load for sweep in sweeps for load in loads_in_flight(sweep)]

    def ends(sides: Sequence[Sequence[float]], side: int) -> tuple[int, int]:
        return round(min(each[side] for each in sides)), round(max(each[side] for each in sides))

    return FitDomain(
        model=shape.name,
        numbers=shape.numbers,
        formats=shape.formats,
        gpu=made_on.gpu,
        version=made_on.version,
        modes=tuple(sorted({sweep.deployment.mode for sweep in sweeps})),
        tp=tuple(sorted({pool.tp for pool in pools})),
        pp=tuple(sorted({pool.pp for pool in pools})),
        dp=tuple(sorted({pool.dp for pool in pools})),
        expert_parallel=tuple(sorted({pool.expert_parallel for pool in pools})),
        networks=tuple(sorted(set(networks))),
        gpu_link=gpu_link,
        input_tokens=ends([*means, *longest], 0),
        output_tokens=ends([*means, *longest], 1),
        in_flight_per_gpu=(float(f"{min(loads):.3g}"), float(f"{max(loads):.3g}")),
        engine_arguments=tuple(sorted(set(engine_arguments))),
    )


def device_mismatch(hardware: Hardware, experiment: Experiment) -> str | None:
    """A warning if GPUs were measured and the hardware file is for CPUs, or vice versa, or if another engine was
    measured; else None."""
    engine = hardware.steps.engine if hardware.steps is not None else "vllm"
    others = sorted({run.engine for run in experiment.runs if run.engine not in (None, engine)})
    if others:
        return f"{experiment.name} was measured on {' and '.join(others)}, but {hardware.name} describes {engine}"
    if (gpus_of(experiment).device == "cpu") == hardware.cpu:
        return None
    measured_on = "GPUs" if hardware.cpu else "engines on CPUs"
    return f"{experiment.name} was measured on {measured_on}, but {hardware.name} describes {hardware.gpu}"
