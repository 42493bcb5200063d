"""Predictions of public points by tabulated steps, every stack by what the others say. See docs/model.md.

One stack is left out at a time, with everything that was fitted: its correction is the prior that the others give, and
the bands are made of the others' errors. Public benchmarks talk to the engine's own server and not to Ray.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pdlab.core.catalog import ModelShape
from pdlab.core.workload import Closed, Level
from pdlab.plan.accuracy import spearman
from pdlab.plan.correction_fit import (
    ERRORS,
    TPOT,
    TTFT,
    WIDE,
    Array,
    CorrectionDistribution,
    LevelSetting,
    Response,
    bounded,
    correction_at,
    correction_of,
    perturbed,
    posterior,
    slopes_at,
)
from pdlab.plan.stack_bands import saturation
from pdlab.plan.stack_prior import (
    LEAST_LIKE,
    SEEN_BY,
    UNSTATED,
    EffectSds,
    ErrorComponents,
    Stack,
    StackFit,
    group_of,
    prior_of,
    unseen,
    version_of,
)
from pdlab.sim.computed_hardware import computed
from pdlab.sim.hardware import Hardware, NodeWires, TableMode
from pdlab.sim.level import figures
from pdlab.sim.simulator import simulate
from pdlab.sim.step_source import Correction
from stack_scores.chance import BandedLevel, PointsInBand, points_in_band, sum_of
from stack_scores.components import StackError, effects_of, error_components, hold_outs, is_represented
from stack_scores.public_points import PublicPoint, throughput

THROUGHPUT = "tokens/s"
METRICS = (TPOT, TTFT, THROUGHPUT)
START = np.zeros(4)  # the correction that responses are of


class PointFigure(NamedTuple):
    """Means of one level, seconds; output tokens/s of the deployment. ``saturated``: a plan that predicts it says that
    it is near saturation, and gives it no band."""

    tpot_s: float
    ttft_s: float
    output_tokens_per_s: float
    saturated: bool = False

    def value(self, metric: str) -> float:
        """Of one of `METRICS`."""
        return {TPOT: self.tpot_s, TTFT: self.ttft_s, THROUGHPUT: self.output_tokens_per_s}[metric]


# Of each GPU: rows do not state the network. NVIDIA's nodes of H100 to GB300 have a ConnectX-7 of 400 Gbit/s, or more,
# for each GPU (data sheets of DGX H100, H200 and B200, and of GB200 and GB300 NVL72).
LINE_GB_PER_S = 50.0


def bare_hardware(stack: Stack, quant: Mapping[str, str] | None = None, mode: TableMode = "SILICON") -> Hardware:
    """Hardware of a stack behind its own server, on nodes with the network of `LINE_GB_PER_S`. Its correction has only
    the time of a sequence. Raises UsageError."""
    hardware = computed(stack.gpu, stack.engine, version_of(stack), quant=quant, mode=mode, bare=True)
    wires = NodeWires(network="rdma", node_gb_per_s=LINE_GB_PER_S * hardware.gpus_per_node)
    hardware = hardware.model_copy(update={"wires": wires})
    return hardware.with_correction(Correction(sequence_us=sequence_us(hardware)))


def sequence_us(hardware: Hardware) -> float:
    """The time of a sequence, of tables."""
    assert hardware.steps is not None
    return hardware.steps.correction.sequence_us


def predict_point(point: PublicPoint, hardware: Hardware, shape: ModelShape, seed: int = 0) -> PointFigure:
    """Raises UsageError where the level cannot run."""
    row = point.row
    level = Level(load=row.load, num_requests=row.num_requests, seed=row.workload.seed)
    (simulated,) = simulate(
        row.deployment, [level], row.workload, hardware, shape, seed=seed, prompts=row.prompts, link=row.link
    )
    tpot_s, ttft_s, _ = figures(simulated)
    assert tpot_s is not None
    saturated = saturation([simulated], hardware, shape, row.deployment) is not None
    return PointFigure(tpot_s, ttft_s, throughput(row, tpot_s, ttft_s), saturated)


def measured_figure(point: PublicPoint) -> PointFigure:
    """What was measured."""
    return PointFigure(point.tpot_s, point.ttft_s, point.output_tokens_per_s)


def setting_of(point: PublicPoint) -> LevelSetting:
    """What the point shares with others of its stack."""
    row = point.row
    assert isinstance(row.load, Closed)
    lengths = f"{row.workload.input_tokens}:{row.workload.output_tokens}"
    return LevelSetting(row.deployment.label, lengths, str(row.load.concurrency))


def response(point: PublicPoint, number: int, hardware: Hardware, shape: ModelShape, theta: Array) -> list[Response]:
    """What a point says: by its TPOT and, where its benchmark is known, by its mean TTFT. Five simulations. Raises
    UsageError where it cannot run."""
    base, *aside = (
        predict_point(point, hardware.with_correction(correction_at(t, sequence_us(hardware))), shape)
        for t in (theta, *perturbed(theta))
    )
    truth = measured_figure(point)
    return [
        Response(
            metric,
            setting_of(point),
            number,
            math.log(truth.value(metric) / base.value(metric)),
            slopes_at(base.value(metric), [each.value(metric) for each in aside]),
            base.value(metric),
            base.saturated,
        )
        for metric in (TPOT, TTFT)
        if metric == TPOT or point.conduct is not None
    ]


Found = Mapping[Stack, Sequence[Response]]  # responses at `START` by stack


class HeldOutStack(NamedTuple):
    """A stack that is left out: its prior by the others, and the error components by the others' errors, by metric.
    ``banded``: whether a plan that knows the others gives it a band."""

    stack: Stack
    unseen: tuple[str, ...]
    prior: CorrectionDistribution
    components: dict[str, ErrorComponents]
    banded: bool

    def half_width(self, metric: str, predicted_s: float = math.inf) -> float | None:
        """Of its 90 % band around that figure, in logarithms; None: it has none. That of tokens/s is the TPOT's, as in
        a plan."""
        components = self.components.get(TPOT if metric == THROUGHPUT else metric)
        if components is None or components.reach is None or not self.banded:
            return None
        return components.half_width(self.unseen, predicted_s)

    def banded_level(self, metric: str, setting: LevelSetting, predicted_s: float) -> BandedLevel:
        """One of its levels, where it has bands."""
        components = self.components[TPOT if metric == THROUGHPUT else metric]
        return BandedLevel(self.stack, self.unseen, setting, components, predicted_s)


class ReferenceStacks(NamedTuple):
    """What is known without those that are left out."""

    found: Found
    fits: list[StackFit]
    effects: tuple[EffectSds, ...]
    components: dict[str, ErrorComponents]

    def of(self, stack: Stack) -> HeldOutStack:
        """One that is none of them."""
        stacks = list(self.found)
        return HeldOutStack(
            stack,
            unseen(stack, stacks),
            prior_of(stack, self.fits, self.effects),
            self.components,
            is_represented(stack, stacks),
        )


def fit_of(stack: Stack, found: Sequence[Response]) -> StackFit:
    """What the stack's own levels say."""
    belief = posterior(WIDE, START, found, ERRORS)
    return StackFit(stack, *belief)


def others_of(found: Found, fits: Mapping[Stack, StackFit] | None = None) -> ReferenceStacks:
    """Of these stacks. ``fits``: theirs, where they are known."""
    own = [fits[stack] if fits else fit_of(stack, values) for stack, values in found.items()]
    effects = effects_of(own)
    return ReferenceStacks(found, own, effects, components_of(found, own, effects))


def left_out(stack: Stack, found: Found) -> HeldOutStack:
    """Nothing of ``stack`` is used, not even for the others' priors."""
    return others_of({each: values for each, values in found.items() if each != stack}).of(stack)


def error_of(response: Response, theta: Array) -> float:
    """The logarithm of measured over predicted by that correction, in a straight line from `START`."""
    return response.residual - float(np.dot(response.slopes, theta - START))


def banded(stacks: Collection[Stack]) -> list[Stack]:
    """Those of which there are `LEAST_LIKE` of the same engine and mode."""
    alike = Counter((stack.engine, stack.mode) for stack in stacks)
    return [stack for stack in stacks if alike[stack.engine, stack.mode] >= LEAST_LIKE]


def stack_error(stack: Stack, response: Response, without: tuple[str, ...], theta: Array) -> StackError:
    """Of one level by that correction."""
    error = error_of(response, theta)
    return StackError(stack, response.setting, without, error, predicted_s_of(response, theta))


def predicted_s_of(response: Response, theta: Array) -> float:
    """By that correction, in a straight line of the logarithm."""
    return response.predicted_s * math.exp(response.residual - error_of(response, theta))


def components_of(found: Found, fits: Sequence[StackFit], effects: Sequence[EffectSds]) -> dict[str, ErrorComponents]:
    """Of TPOT and mean TTFT, from the errors of every stack as the other ones predict it, in each of `hold_outs`: of
    what can have a band. Levels near saturation have none, nor have engines of fewer than `LEAST_LIKE` stacks."""
    errors: dict[str, list[StackError]] = {TPOT: [], TTFT: []}
    for stack in banded(found):
        for without, rest in hold_outs(stack, fits).items():
            theta = bounded(prior_of(stack, rest, effects))
            for each in found[stack]:
                if not each.saturated:
                    errors[each.metric].append(stack_error(stack, each, without, theta))
    return {metric: error_components(metric, each) for metric, each in errors.items() if each}


class GroupScore(NamedTuple):
    """Of a group that was left out whole. ``kind``: what its levels share, of `SEEN_BY` or of `LevelSetting`. By
    metric: ``held``, how many of the points are in the 90 % band, and of how many; ``error``, median absolute, in
    percent."""

    kind: str
    group: str
    stacks: int
    held: dict[str, PointsInBand]
    error: dict[str, float]


def group_scores(found: Found, kinds: Sequence[str] = (*SEEN_BY, *LevelSetting._fields)) -> list[GroupScore]:
    """Every model, GPU and engine version left out, and every parallelism, length and load. Versions that nobody stated
    are one group here. Of a parallelism, a length or a load, the stack that is scored is left out too. Errors are
    those in a straight line from `START`."""
    scores = []
    for kind in [each for each in kinds if each in SEEN_BY]:
        labels = {
            stack: f"{stack.engine} {UNSTATED}"
            if stack.version == UNSTATED and kind == "engine"
            else group_of(stack, kind)
            for stack in found
        }
        for group in sorted(set(labels.values())):
            others = others_of({stack: values for stack, values in found.items() if labels[stack] != group})
            members = [stack for stack in found if labels[stack] == group]
            scores.append(_group_score(kind, group, [(others.of(stack), found[stack]) for stack in members]))
    for kind in [each for each in kinds if each not in SEEN_BY]:
        for group in sorted({getattr(each.setting, kind) for values in found.values() for each in values}, key=natural):
            kept = {
                stack: rest
                for stack, values in found.items()
                if len(rest := [each for each in values if getattr(each.setting, kind) != group]) >= FEWEST_LEFT
            }
            fits = {stack: fit_of(stack, values) for stack, values in kept.items()}
            tested = []
            for stack, values in found.items():
                if of_group := [each for each in values if getattr(each.setting, kind) == group]:
                    rest_of = {each: kept[each] for each in kept if each != stack}
                    if len(rest_of) > 1:
                        tested.append((others_of(rest_of, fits).of(stack), of_group))
            if tested:
                scores.append(_group_score(kind, group, tested))
    return scores


def natural(label: str) -> tuple[int, str]:
    """Order of labels that are numbers."""
    return len(label), label


FEWEST_LEFT = 4  # responses of a stack without the left-out group: fewer say nothing of its correction


def _group_score(kind: str, group: str, tested: Sequence[tuple[HeldOutStack, Sequence[Response]]]) -> GroupScore:
    held, error = {}, {}
    for metric in (TPOT, TTFT):
        errors, inside, levels = [], [], []
        for out, values in tested:
            theta = bounded(out.prior)
            for each in values:
                if each.metric != metric:
                    continue
                errors.append(abs(error_of(each, theta)))
                predicted_s = predicted_s_of(each, theta)
                half = out.half_width(metric, predicted_s)
                if half is not None and not each.saturated:
                    inside.append(errors[-1] <= half)
                    levels.append(out.banded_level(metric, each.setting, predicted_s))
        if levels:
            held[metric] = points_in_band(inside, levels)
        if errors:
            error[metric] = 100 * math.expm1(statistics.median(errors))
    return GroupScore(kind, group, len(tested), held, error)


def shares_of(scores: Sequence[GroupScore]) -> dict[str, dict[str, float]]:
    """By kind and metric: the share of all points in the bands of their groups, where `LEAST_LIKE` groups have some."""
    shares: dict[str, dict[str, float]] = {}
    for kind in dict.fromkeys(score.kind for score in scores):
        for metric in (TPOT, TTFT):
            if len(held := held_of(scores, kind, metric)) >= LEAST_LIKE:
                shares.setdefault(kind, {})[metric] = round(sum_of(held).share, 2)
    return shares


def held_of(scores: Sequence[GroupScore], kind: str, metric: str) -> list[PointsInBand]:
    """Of every group of that kind that has bands."""
    return [score.held[metric] for score in scores if score.kind == kind and metric in score.held]


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


def errors_after(found: Found, others: ReferenceStacks, count: int) -> dict[str, list[StackError]]:
    """By metric the errors of every stack's levels but ``count`` of them, to which its correction was fitted from the
    prior of ``others``, less itself. Levels near saturation are left out: they have no band."""
    errors: dict[str, list[StackError]] = {TPOT: [], TTFT: []}
    for stack, values in found.items():
        prior = prior_of(stack, [fit for fit in others.fits if fit.stack != stack], others.effects)
        taken = spread_levels(values, count)
        theta = bounded(posterior(prior, START, [each for each in values if each.level in taken], ERRORS))
        for each in values:
            if each.level not in taken and not each.saturated:
                errors[each.metric].append(stack_error(stack, each, (), theta))
    return errors


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
    """Of one stack left out. ``ours`` and ``alone`` by metric; ``held``: points within the 90 % band;
    ``rank``: Spearman's correlation of predicted and measured tokens/s per GPU; ``regret``: see `regret`."""

    left_out: HeldOutStack
    points: int
    ours: dict[str, Score]
    alone: dict[str, Score]
    held: dict[str, PointsInBand]
    rank: float | None
    regret: float | None


def score_of(points: Sequence[ScoredPoint], metric: str) -> Score:
    """Of the predictions of some points, by one of `METRICS`."""
    return _score([(each.predicted.value(metric), measured_figure(each.point).value(metric)) for each in points])


def _score(pairs: Sequence[tuple[float, float]]) -> Score:
    errors = [100 * (ours / truth - 1) for ours, truth in pairs]
    return Score(statistics.median(map(abs, errors)), statistics.median(errors))


def scored(out: HeldOutStack, points: Sequence[ScoredPoint]) -> StackScore:
    """Of the points of one stack."""
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
        inside, levels = [], []
        for each in compared:
            value, truth = each.predicted.value(metric), measured_figure(each.point).value(metric)
            predicted_s = math.inf if metric == THROUGHPUT else value
            half = out.half_width(metric, predicted_s)
            if half is not None and not each.predicted.saturated:
                inside.append(abs(math.log(value / truth)) <= half)
                levels.append(out.banded_level(metric, setting_of(each.point), predicted_s))
        if levels:
            held[metric] = points_in_band(inside, levels)
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


def correction_by(out: HeldOutStack, hardware: Hardware) -> Correction:
    """The correction that the others give a left-out stack, which this hardware is of."""
    return correction_of(out.prior, 0, "stacks of public points, this one left out", sequence_us(hardware))
