"""What public points of P:D need beside their rows: what these do not state, and a correction. And their bands.

**Unstated.** Recipes of TensorRT-LLM limit the sequences of a decode engine (``max_batch_size``), and a prompt waits
for one of them. `with_batch_limits` has two rules for that limit. A benchmark sends several prompts for each request
in flight, and the first burst weighs the more in its mean TTFT the fewer they are. `WAYS` has all that is tried.

**Correction.** A stack is corrected by what the other stacks have in common (`PdCorrection`): nothing of the left-out
stack is used. The way in which a benchmark ran is learnt in the same way.

**Bands** are made of the errors of stacks that were left out in this way, as those of collocated stacks.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from pdlab.core.catalog import ModelShape
from pdlab.core.deployment import Disaggregated
from pdlab.core.workload import Closed
from pdlab.plan.correction_fit import TPOT, TTFT, Array, LevelSetting
from pdlab.plan.stack_prior import SEEN_BY, ErrorComponents, Stack, group_of, unseen
from pdlab.sim.hardware import Hardware
from pdlab.sim.step_source import SEQUENCE_US, Correction
from stack_scores.chance import BandedLevel, points_in_band
from stack_scores.components import StackError, error_components, hold_outs, is_represented
from stack_scores.public_points import PublicPoint
from stack_scores.scoring import GroupScore, PointFigure, banded, measured_figure, predict_point, setting_of

BATCH_LIMITED = "trtllm"
FACTORS = (1.0, 1.5, 2.0)  # of prefill, that are simulated; figures are linear between them
MOST_LEARNT_FROM = 1024  # requests in flight: points with more take most of the time
TRIED_FACTORS = tuple(1 + step / 10 for step in range(11))
TRIED_PATH_MS = tuple(range(10, 311, 20))
FEWEST_ALIKE = 2  # stacks that say what stacks of their kind have in common
FAR = math.log(2)  # an error of a factor of two or more counts as that

BatchRule = Literal["sweep", "load"]
BATCH_RULES: tuple[BatchRule, ...] = ("sweep", "load")
PROMPTS = (10, 5)  # for each request in flight


class Way(NamedTuple):
    """How a benchmark of P:D ran: the rule for batches of decode, and prompts for each request in flight."""

    batches: BatchRule
    prompts: int


WAYS = tuple(Way(rule, prompts) for prompts in PROMPTS for rule in BATCH_RULES)


def as_run(points: Sequence[PublicPoint], way: Way) -> tuple[PublicPoint, ...]:
    """The points of one stack, run in that way."""
    return tuple(
        each._replace(row=each.row._replace(num_requests=way.prompts * _load(each)))
        for each in with_batch_limits(points, way.batches)
    )


def with_batch_limits(points: Sequence[PublicPoint], rule: BatchRule) -> tuple[PublicPoint, ...]:
    """The points of one stack with ``max_num_seqs`` of their decode engines.

    A benchmark of TensorRT-LLM sends as many requests as the engines have sequences, or some more. Its CUDA graphs have
    batches of powers of two. So an engine with tensor parallel attention has the largest one that is not above its
    share of the requests in flight. It is the share of the most load of that deployment and these lengths (``sweep``: a
    recipe ran them all), or of the point's own load (``load``: each load had a recipe). With attention ranks, and of
    other engines, no limit is assumed.
    """
    most: dict[tuple[str, ...], int] = {}
    for point in points:
        most[point.row.sweep] = max(most.get(point.row.sweep, 0), _load(point))
    return tuple(_limited(each, most[each.row.sweep] if rule == "sweep" else _load(each)) for each in points)


def _load(point: PublicPoint) -> int:
    assert isinstance(point.row.load, Closed)
    return point.row.load.concurrency


def _limited(point: PublicPoint, load: int) -> PublicPoint:
    topology = point.row.deployment.topology
    if point.stack.engine != BATCH_LIMITED or not isinstance(topology, Disaggregated) or topology.decode.dp > 1:
        return point
    share = max(load // topology.decode.replicas, 1)
    limit = {**topology.decode.engine_kwargs, "max_num_seqs": 1 << (share.bit_length() - 1)}
    decode = topology.decode.model_copy(update={"engine_kwargs": limit})
    return point._replace(row=point.row._replace(deployment=point.row.deployment.with_topology(decode=decode)))


class PdCorrection(NamedTuple):
    """``factor``, ``prefill_factor``: of the tables' times of decode and prefill. ``path_ms``: of a request to prefill
    and from there to decode, besides the KV transfer. ``way``: how its benchmark ran."""

    factor: float
    prefill_factor: float
    path_ms: float
    way: Way = WAYS[0]

    def of(self, hardware: Hardware) -> Hardware:
        """The hardware with this correction."""
        correction = Correction(sequence_us=SEQUENCE_US, factor=self.factor, prefill_factor=self.prefill_factor)
        return hardware.with_values({"pd_overhead_ms": self.path_ms}).with_correction(correction)


class PdResponse(NamedTuple):
    """One point, measured, and simulated without a path for each of `FACTORS`."""

    setting: LevelSetting
    measured: PointFigure
    simulated: tuple[PointFigure, ...]

    def figure_s(self, metric: str, prefill_factor: float, path_ms: float = 0.0) -> float:
        """TPOT or mean TTFT with that correction of prefill, seconds."""
        index = next(i for i, end in enumerate(FACTORS[1:]) if prefill_factor <= end)
        share = (prefill_factor - FACTORS[index]) / (FACTORS[index + 1] - FACTORS[index])
        low_s, high_s = (each.value(metric) for each in self.simulated[index : index + 2])
        return low_s + share * (high_s - low_s) + path_ms / 1e3

    def error(self, metric: str, prefill_factor: float, path_ms: float = 0.0) -> float:
        """The logarithm of predicted over measured."""
        return math.log(self.figure_s(metric, prefill_factor, path_ms) / self.measured.value(metric))

    def is_saturated(self, prefill_factor: float) -> bool:
        """Whether the simulation with the next larger of `FACTORS` is near saturation."""
        return next(
            each.saturated for end, each in zip(FACTORS, self.simulated, strict=True) if prefill_factor <= end + 1e-9
        )


class PdStack(NamedTuple):
    """The points of a stack in each of `WAYS`. ``losses``: by way the mean error of its TTFTs for each of
    `TRIED_FACTORS` and `TRIED_PATH_MS`, as logarithms up to `FAR`."""

    stack: Stack
    responses: Mapping[Way, Sequence[PdResponse]]
    losses: Mapping[Way, Array]

    @classmethod
    def of(cls, stack: Stack, responses: Mapping[Way, Sequence[PdResponse]]) -> PdStack:
        """``responses``: at least one in each way."""
        return cls(stack, responses, {way: _losses(values) for way, values in responses.items()})


def _losses(values: Sequence[PdResponse]) -> Array:
    figures_s = np.array([[each.figure_s(TTFT, factor) for factor in TRIED_FACTORS] for each in values])
    measured_s = np.array([each.measured.ttft_s for each in values])
    whole_s = figures_s[:, :, None] + np.array(TRIED_PATH_MS) / 1e3
    errors: Array = np.minimum(np.abs(np.log(whole_s / measured_s[:, None, None])), FAR).mean(axis=0)
    return errors


def pd_response(point: PublicPoint, hardware: Hardware, shape: ModelShape) -> PdResponse | None:
    """Raises UsageError where the point cannot run. None: it has too many requests in flight."""
    if _load(point) > MOST_LEARNT_FROM:
        return None
    simulated = (predict_point(point, PdCorrection(1.0, factor, 0.0).of(hardware), shape) for factor in FACTORS)
    return PdResponse(setting_of(point), measured_figure(point), tuple(simulated))


def learnt(stack: Stack, known: Sequence[PdStack]) -> PdCorrection:
    """What other stacks than ``stack`` have in common: those of its engine and precision, or else of its precision, or
    else all. The way, prefill's factor and the path have the least mean error of a stack's TTFTs, each stack counted
    once. Decode's factor takes away the median over stacks of their median error of TPOT."""
    others = [each for each in known if each.stack != stack]
    kinds = ((stack.engine, precision_of(stack)), (None, precision_of(stack)), (None, None))
    for engine, precision in kinds:
        alike = [
            each
            for each in others
            if engine in (None, each.stack.engine) and precision in (None, precision_of(each.stack))
        ]
        if len(alike) >= FEWEST_ALIKE:
            break
    losses = np.array([[each.losses[way] for each in alike] for way in WAYS]).mean(axis=1)
    way_at, factor_at, path_at = np.unravel_index(int(np.argmin(losses)), losses.shape)
    way, prefill_factor = WAYS[way_at], TRIED_FACTORS[factor_at]
    too_long = statistics.median(
        statistics.median(each.error(TPOT, prefill_factor) for each in one.responses[way]) for one in alike
    )
    return PdCorrection(round(math.exp(-too_long), 2), prefill_factor, TRIED_PATH_MS[path_at], way)


def precision_of(stack: Stack) -> str:
    """The format of its weights, the last word of its model."""
    return stack.model.split()[-1]


# --- bands --------------------------------------------------------------------------------------


class PdBand(NamedTuple):
    """Of a stack that is none of those whose errors make the band, by metric. ``banded``: whether it has one."""

    unseen: tuple[str, ...]
    components: Mapping[str, ErrorComponents]
    banded: bool


LevelErrors = dict[int, dict[str, StackError]]  # number of a point -> metric -> its error


def _errors(each: PdStack, without: tuple[str, ...], correction: PdCorrection) -> LevelErrors:
    """Of its points that are not near saturation."""
    found: LevelErrors = {}
    for number, response in enumerate(each.responses[correction.way]):
        if response.is_saturated(correction.prefill_factor):
            continue
        found[number] = {}
        for metric, scale, path_ms in ((TPOT, correction.factor, 0.0), (TTFT, 1.0, correction.path_ms)):
            figure_s = scale * response.figure_s(metric, correction.prefill_factor, path_ms)
            error = math.log(response.measured.value(metric) / figure_s)
            found[number][metric] = StackError(each.stack, response.setting, without, error, figure_s)
    return found


def pd_components(known: Sequence[PdStack]) -> dict[str, ErrorComponents]:
    """Of TPOT and mean TTFT, from the errors of every stack as the other ones predict it, in each of `hold_outs`. A
    point counts that is near saturation in none of them."""
    found: dict[str, list[StackError]] = {TPOT: [], TTFT: []}
    with_band = set(banded([each.stack for each in known]))
    for each in known:
        if each.stack not in with_band:
            continue
        ways = [
            _errors(each, without, learnt(each.stack, rest))
            for without, rest in hold_outs(each.stack, known).items()
            if len(rest) >= FEWEST_ALIKE
        ]
        for number in set.intersection(*map(set, ways)) if ways else ():
            for errors in ways:
                for metric, error in errors[number].items():
                    found[metric].append(error)
    return {metric: error_components(metric, errors) for metric, errors in found.items() if errors}


def band_by(stack: Stack, known: Sequence[PdStack]) -> PdBand:
    """Of a stack by others; it is left out where it is among them."""
    others = [each for each in known if each.stack != stack]
    stacks = [each.stack for each in others]
    return PdBand(unseen(stack, stacks), pd_components(others), is_represented(stack, stacks))


def pd_group_scores(known: Sequence[PdStack]) -> list[GroupScore]:
    """Every model, GPU and engine version left out."""
    scores = []
    for kind in SEEN_BY:
        for group in sorted({group_of(each.stack, kind) for each in known}):
            members = [each for each in known if group_of(each.stack, kind) == group]
            others = [each for each in known if group_of(each.stack, kind) != group]
            stacks = [each.stack for each in others]
            if len(others) < FEWEST_ALIKE:
                continue
            components = pd_components(others)
            held, off = {}, {}
            by_stack = [
                (_errors(each, unseen(each.stack, stacks), learnt(each.stack, others)), each.stack) for each in members
            ]
            for metric in (TPOT, TTFT):
                inside: list[bool] = []
                levels: list[BandedLevel] = []
                for errors, stack in by_stack:
                    if metric in components and is_represented(stack, stacks):
                        for each in (of_level[metric] for of_level in errors.values()):
                            half = components[metric].half_width(each.unseen, each.predicted_s)
                            if math.isfinite(half):
                                inside.append(abs(each.error) <= half)
                                levels.append(
                                    BandedLevel(stack, each.unseen, each.setting, components[metric], each.predicted_s)
                                )
                if levels:
                    held[metric] = points_in_band(inside, levels)
                every = [
                    100 * abs(math.expm1(-of_level[metric].error))
                    for errors, _ in by_stack
                    for of_level in errors.values()
                ]
                if every:
                    off[metric] = statistics.median(every)
            scores.append(GroupScore(kind, group, len(members), held, off))
    return scores
