"""Predictions of public points by tabulated steps, every stack by what the others say. See docs/model.md.

One stack is left out at a time, with everything that was fitted: its correction is the prior that the others give, and
the bands are made of the others' errors. Public benchmarks talk to the engine's own server and not to Ray.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pdlab.core.catalog import ModelShape
from pdlab.core.workload import Closed, Level
from pdlab.plan.accuracy import spearman
from pdlab.plan.correction_fit import (
    Array,
    CorrectionDistribution,
    ErrorSds,
    Response,
    Setting,
    correction_of,
    posterior,
)
from pdlab.plan.public_points import UNSTATED, PublicPoint, Stack, throughput
from pdlab.plan.stack_prior import (
    EffectSds,
    ErrorComponents,
    StackError,
    StackFit,
    effects_of,
    error_components,
    prior_of,
    unseen,
)
from pdlab.sim.computed_hardware import computed
from pdlab.sim.hardware import Hardware, TableMode
from pdlab.sim.level import figures
from pdlab.sim.simulator import simulate
from pdlab.sim.step_source import NO_CORRECTION, Correction

TPOT, TTFT, THROUGHPUT = METRICS = ("TPOT", "mean TTFT", "tokens/s")
ASIDE = (0.3, 0.1, 0.2, 2.0)  # of host_ms, ln factor, ln prefill_factor and sync_us, for slopes
START = np.zeros(len(ASIDE))
# What is believed of a stack that stands alone, and of its levels' errors, before any other is looked at.
WIDE = CorrectionDistribution(np.array([0.5, 0.0, 0.2, 3.0]), np.diag(np.square([1.5, 0.15, 0.5, 5.0])))
ERRORS = {
    TPOT: ErrorSds(level=4, parallelism=3, lengths=3, load=2),
    TTFT: ErrorSds(level=12, parallelism=5, lengths=6, load=6),
}


class PointFigure(NamedTuple):
    """Means of one level, seconds; output tokens/s of the deployment."""

    tpot_s: float
    ttft_s: float
    output_tokens_per_s: float

    def value(self, metric: str) -> float:
        """Of one of `METRICS`."""
        return {TPOT: self.tpot_s, TTFT: self.ttft_s, THROUGHPUT: self.output_tokens_per_s}[metric]


def bare_hardware(stack: Stack, quant: Mapping[str, str] | None = None, mode: TableMode = "SILICON") -> Hardware:
    """Hardware of a stack behind its own server; its correction is none. Raises UsageError."""
    version = None if stack.version == UNSTATED else stack.version
    hardware = computed(stack.gpu, stack.engine, version, quant=quant, mode=mode, bare=True)
    return with_correction(hardware, NO_CORRECTION)


def with_correction(hardware: Hardware, correction: Correction) -> Hardware:
    """The hardware, whose steps are tables, with that correction."""
    assert hardware.steps is not None
    return hardware.model_copy(update={"steps": hardware.steps.model_copy(update={"correction": correction})})


def at(theta: Array) -> Correction:
    """The correction of (host_ms, ln factor, ln prefill_factor, sync_us)."""
    return Correction(
        host_ms=max(float(theta[0]), 0.0),
        factor=math.exp(float(theta[1])),
        prefill_factor=math.exp(float(theta[2])),
        sync_us=max(float(theta[3]), 0.0),
    )


def predict_point(point: PublicPoint, hardware: Hardware, shape: ModelShape, seed: int = 0) -> PointFigure:
    """Raises UsageError where the level cannot run."""
    row = point.row
    level = Level(load=row.load, num_requests=row.num_requests, seed=row.workload.seed)
    (simulated,) = simulate(
        row.deployment, [level], row.workload, hardware, shape, seed=seed, prompts=row.prompts, link=row.link
    )
    tpot_s, ttft_s, _ = figures(simulated)
    assert tpot_s is not None
    return PointFigure(tpot_s, ttft_s, throughput(row, tpot_s, ttft_s))


def measured_figure(point: PublicPoint) -> PointFigure:
    """What was measured."""
    return PointFigure(point.tpot_s, point.ttft_s, point.output_tokens_per_s)


def setting_of(point: PublicPoint) -> Setting:
    """What the point shares with others of its stack."""
    row = point.row
    assert isinstance(row.load, Closed)
    lengths = f"{row.workload.input_tokens}:{row.workload.output_tokens}"
    return Setting(row.deployment.label, lengths, str(row.load.concurrency))


def slopes_at(base: float, aside: Sequence[float]) -> tuple[float, float, float, float]:
    """Of the logarithm of a figure, from its values `ASIDE` of each parameter."""
    host, factor, prefill, sync = (math.log(value / base) / step for value, step in zip(aside, ASIDE, strict=True))
    return host, factor, prefill, sync


def perturbed(theta: Array) -> list[Array]:
    """The corrections aside of one."""
    return [theta + np.eye(len(ASIDE))[index] * step for index, step in enumerate(ASIDE)]


def response(point: PublicPoint, number: int, hardware: Hardware, shape: ModelShape, theta: Array) -> list[Response]:
    """What a point says: by its TPOT and, where its benchmark is known, by its mean TTFT. Five simulations. Raises
    UsageError where it cannot run."""
    base, *aside = (predict_point(point, with_correction(hardware, at(t)), shape) for t in (theta, *perturbed(theta)))
    truth = measured_figure(point)
    return [
        Response(
            metric,
            setting_of(point),
            number,
            math.log(truth.value(metric) / base.value(metric)),
            slopes_at(base.value(metric), [each.value(metric) for each in aside]),
        )
        for metric in (TPOT, TTFT)
        if metric == TPOT or point.conduct is not None
    ]


# --- leaving a stack out --------------------------------------------------------------------------


class HeldOutStack(NamedTuple):
    """A stack that is left out: its prior by the others, and the error components by the others' errors, by metric."""

    stack: Stack
    unseen: tuple[str, ...]
    prior: CorrectionDistribution
    components: dict[str, ErrorComponents]


def fit_of(stack: Stack, found: Sequence[Response]) -> StackFit:
    """What the stack's own levels say."""
    belief = posterior(WIDE, START, found, ERRORS)
    return StackFit(stack, belief.mean, np.sqrt(np.diag(belief.covariance)))


def left_out(stack: Stack, found: Mapping[Stack, Sequence[Response]]) -> HeldOutStack:
    """``found``: responses at `START` by stack. Nothing of ``stack`` is used, not even for the others' priors."""
    others = {each: values for each, values in found.items() if each != stack}
    fits = [fit_of(each, values) for each, values in others.items()]
    effects = effects_of(fits)
    return HeldOutStack(
        stack,
        unseen(stack, list(others)),
        prior_of(stack, fits, effects),
        components_of(others, fits, effects),
    )


def components_of(
    found: Mapping[Stack, Sequence[Response]], fits: Sequence[StackFit], effects: Sequence[EffectSds]
) -> dict[str, ErrorComponents]:
    """Of TPOT and mean TTFT, from the errors of every stack as the other ones predict it."""
    errors: dict[str, list[StackError]] = {TPOT: [], TTFT: []}
    for stack, values in found.items():
        rest = [fit for fit in fits if fit.stack != stack]
        theta = prior_of(stack, rest, effects).mean
        without = unseen(stack, [fit.stack for fit in rest])
        for each in values:
            error = each.residual - float(np.dot(each.slopes, theta - START))
            errors[each.metric].append(StackError(stack, each.setting, without, error))
    return {metric: error_components(metric, each) for metric, each in errors.items() if each}


def spread_levels(found: Sequence[Response], count: int, seed: int = 0) -> set[int]:
    """Numbers of so many levels, each as different from those before it in TP, lengths and load as there is."""
    settings = {each.level: each.setting for each in found}
    numbers = sorted(settings)
    random.Random(seed).shuffle(numbers)
    taken: list[int] = []
    while numbers and len(taken) < count:

        def alike(number: int) -> int:
            return sum(
                one == other for known in taken for one, other in zip(settings[number], settings[known], strict=True)
            )

        taken.append(min(numbers, key=alike))
        numbers.remove(taken[-1])
    return set(taken)


def errors_after(
    found: Mapping[Stack, Sequence[Response]], fits: Sequence[StackFit], effects: Sequence[EffectSds], count: int
) -> dict[str, list[StackError]]:
    """By metric the errors of every stack's levels but ``count`` of them, to which its correction was fitted from the
    other stacks' prior."""
    errors: dict[str, list[StackError]] = {TPOT: [], TTFT: []}
    for stack, values in found.items():
        prior = prior_of(stack, [fit for fit in fits if fit.stack != stack], effects)
        taken = spread_levels(values, count)
        theta = posterior(prior, START, [each for each in values if each.level in taken], ERRORS).mean
        for each in values:
            if each.level not in taken:
                error = each.residual - float(np.dot(each.slopes, theta - START))
                errors[each.metric].append(StackError(stack, each.setting, (), error))
    return errors


# --- scores ---------------------------------------------------------------------------------------


class ScoredPoint(NamedTuple):
    """One point of a left-out stack; ``alone``: what the tables' own estimator says, None: nothing."""

    point: PublicPoint
    predicted: PointFigure
    alone: PointFigure | None = None


class Score(NamedTuple):
    """Errors in percent: median absolute, and median with its sign."""

    error: float
    bias: float


class StackScore(NamedTuple):
    """Of one stack left out. ``ours`` and ``alone`` by metric; ``held``: share of points within the 90 % band;
    ``rank``: Spearman's correlation of predicted and measured tokens/s per GPU; ``regret``: see `regret`."""

    left_out: HeldOutStack
    points: int
    ours: dict[str, Score]
    alone: dict[str, Score]
    held: dict[str, float]
    rank: float | None
    regret: float | None


def score_of(points: Sequence[ScoredPoint], metric: str) -> Score:
    """Of the predictions of some points, by one of `METRICS`."""
    return _score([(each.predicted.value(metric), measured_figure(each.point).value(metric)) for each in points])


def _score(pairs: Sequence[tuple[float, float]]) -> Score:
    errors = [100 * (ours / truth - 1) for ours, truth in pairs]
    return Score(statistics.median(map(abs, errors)), statistics.median(errors))


def scored(out: HeldOutStack, points: Sequence[ScoredPoint], *, banded: bool = True) -> StackScore:
    """Of the points of one stack. ``banded``: False where a plan gives no band to what it is."""
    known = [each for each in points if each.point.conduct is not None]
    ours, alone, held = {}, {}, {}
    for metric in METRICS:
        compared = points if metric == TPOT else known
        pairs = [(each.predicted.value(metric), measured_figure(each.point).value(metric)) for each in compared]
        if not pairs:
            continue
        ours[metric] = _score(pairs)
        theirs = [
            (each.alone.value(metric), measured_figure(each.point).value(metric)) for each in compared if each.alone
        ]
        if theirs:
            alone[metric] = _score(theirs)
        if metric in out.components and out.components[metric].reach is not None and banded:
            half = out.components[metric].half_width(out.unseen)
            held[metric] = statistics.fmean(abs(math.log(value / truth)) <= half for value, truth in pairs)
    return StackScore(out, len(points), ours, alone, held, rank_of(known), regret(known))


class PerGpu(NamedTuple):
    """Output tokens/s per GPU of one point."""

    predicted: float
    measured: float


def per_gpu(each: ScoredPoint) -> PerGpu:
    """Of one point."""
    gpus, measured = each.point.row.deployment.gpus, measured_figure(each.point)
    return PerGpu(each.predicted.output_tokens_per_s / gpus, measured.output_tokens_per_s / gpus)


def rank_of(points: Sequence[ScoredPoint]) -> float | None:
    """Spearman's correlation of predicted and measured tokens/s per GPU; None: too few points, or all alike."""
    return spearman(*zip(*map(per_gpu, points), strict=True)) if len(points) > 2 else None


BEYOND = 1.1  # times a TPOT target: a choice that is slower than that has failed


def regret(points: Sequence[ScoredPoint]) -> float | None:
    """Share of the best tokens/s per GPU that the predicted choice loses, the mean over lengths; None: nothing to
    choose.

    Of the points of equal lengths (other TP, other load) those within a TPOT target are allowed, the median of the
    measured ones; a choice that measured more than `BEYOND` times the target loses all.
    """
    by_lengths: dict[str, list[ScoredPoint]] = {}
    for each in points:
        by_lengths.setdefault(setting_of(each.point).lengths, []).append(each)
    losses = []
    for members in by_lengths.values():
        if len({each.point.row.deployment.label for each in members}) < 2:
            continue
        target_s = statistics.median(each.point.tpot_s for each in members)

        allowed = [each for each in members if each.predicted.tpot_s <= target_s]
        best = max(per_gpu(each).measured for each in members if each.point.tpot_s <= target_s)
        if not allowed:
            losses.append(1.0)
            continue
        chosen = max(allowed, key=lambda each: per_gpu(each).predicted)
        kept = per_gpu(chosen).measured if chosen.point.tpot_s <= BEYOND * target_s else 0.0
        losses.append(max(1 - kept / best, 0.0))
    return statistics.fmean(losses) if losses else None


def lost_by_ratio(points: Sequence[ScoredPoint]) -> list[float]:
    """Share of the best tokens/s per GPU that the predicted P:D ratio loses (0: it is the best one), of every workload
    with several: points of equal lengths and of the same two kinds of engines. A ratio is as good as its best point,
    for each was measured at loads of its own."""
    workloads: dict[tuple[str, ...], dict[tuple[int, ...], list[PerGpu]]] = {}
    for each in points:
        pools = each.point.row.deployment.pools.values()
        workload = (setting_of(each.point).lengths, *(pool.one_replica.label for pool in pools))
        ratios = workloads.setdefault(workload, {})
        ratios.setdefault(tuple(pool.replicas for pool in pools), []).append(per_gpu(each))
    losses = []
    for ratios in workloads.values():
        if len(ratios) > 1:
            best = [PerGpu(*map(max, zip(*found, strict=True))) for found in ratios.values()]
            losses.append(1 - max(best).measured / max(each.measured for each in best))
    return losses


def correction_by(out: HeldOutStack) -> Correction:
    """The correction that the others give a left-out stack."""
    return correction_of(out.prior, 0, "stacks of public points, this one left out")
