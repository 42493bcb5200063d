"""What public points of P:D need beside their rows: the batch of decode engines, and a correction.

**Batches.** Recipes of TensorRT-LLM limit the sequences of a decode engine (``max_batch_size``), and a prompt waits for
one of them. Rows do not state the limit. `with_batch_limits` has the rule for it.

**Correction.** A stack is corrected by what the other stacks have in common (`PdCorrection`): nothing of the left-out
stack is used.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pdlab.core.catalog import ModelShape
from pdlab.core.deployment import Disaggregated
from pdlab.core.workload import Closed
from pdlab.plan.correction_fit import TPOT, TTFT
from pdlab.plan.stack_prior import Stack
from pdlab.sim.hardware import Hardware
from pdlab.sim.step_source import SEQUENCE_US, Correction
from stack_scores.public_points import PublicPoint
from stack_scores.scoring import PointFigure, measured_figure, predict_point

BATCH_LIMITED = "trtllm"
FACTORS = (1.0, 1.5, 2.0)  # of prefill, that are simulated; figures are linear between them
MOST_LEARNT_FROM = 1024  # requests in flight: points with more take most of the time
TRIED_FACTORS = tuple(1 + step / 10 for step in range(11))
TRIED_PATH_MS = tuple(range(10, 311, 20))
FEWEST_ALIKE = 2  # stacks that say what stacks of their kind have in common
FAR = math.log(2)  # an error of a factor of two or more counts as that


def with_batch_limits(points: Sequence[PublicPoint]) -> tuple[PublicPoint, ...]:
    """The points of one stack with ``max_num_seqs`` of their decode engines.

    An engine of TensorRT-LLM with tensor parallel attention has the largest power of two of sequences that is not above
    its share of the requests in flight, at the most load of that deployment and these lengths. Its CUDA graphs have
    batches of powers of two, and a benchmark measures an engine up to its limit. With attention ranks, and of other
    engines, no limit is assumed.
    """
    most: dict[tuple[str, ...], int] = {}
    for point in points:
        most[point.row.sweep] = max(most.get(point.row.sweep, 0), _load(point))
    return tuple(_limited(point, most[point.row.sweep]) for point in points)


def _load(point: PublicPoint) -> int:
    assert isinstance(point.row.load, Closed)
    return point.row.load.concurrency


def _limited(point: PublicPoint, most_load: int) -> PublicPoint:
    topology = point.row.deployment.topology
    if point.stack.engine != BATCH_LIMITED or not isinstance(topology, Disaggregated) or topology.decode.dp > 1:
        return point
    share = max(most_load // topology.decode.replicas, 1)
    limit = {**topology.decode.engine_kwargs, "max_num_seqs": 1 << (share.bit_length() - 1)}
    decode = topology.decode.model_copy(update={"engine_kwargs": limit})
    return point._replace(row=point.row._replace(deployment=point.row.deployment.with_topology(decode=decode)))


class PdCorrection(NamedTuple):
    """``factor``, ``prefill_factor``: of the tables' times of decode and prefill. ``path_ms``: of a request to prefill
    and from there to decode, besides the KV transfer."""

    factor: float
    prefill_factor: float
    path_ms: float

    def of(self, hardware: Hardware) -> Hardware:
        """The hardware with this correction."""
        correction = Correction(sequence_us=SEQUENCE_US, factor=self.factor, prefill_factor=self.prefill_factor)
        return hardware.with_values({"pd_overhead_ms": self.path_ms}).with_correction(correction)


class PdResponse(NamedTuple):
    """One point, measured, and simulated without a path for each of `FACTORS`."""

    measured: PointFigure
    simulated: tuple[PointFigure, ...]

    def error(self, metric: str, prefill_factor: float, path_ms: float = 0.0) -> float:
        """The logarithm of predicted over measured, of TPOT or mean TTFT."""
        index = next(i for i, end in enumerate(FACTORS[1:]) if prefill_factor <= end)
        share = (prefill_factor - FACTORS[index]) / (FACTORS[index + 1] - FACTORS[index])
        low_s, high_s = (each.value(metric) for each in self.simulated[index : index + 2])
        return math.log((low_s + share * (high_s - low_s) + path_ms / 1e3) / self.measured.value(metric))


def pd_response(point: PublicPoint, hardware: Hardware, shape: ModelShape) -> PdResponse | None:
    """Raises UsageError where the point cannot run. None: it has too many requests in flight."""
    if _load(point) > MOST_LEARNT_FROM:
        return None
    simulated = (predict_point(point, PdCorrection(1.0, factor, 0.0).of(hardware), shape) for factor in FACTORS)
    return PdResponse(measured_figure(point), tuple(simulated))


def learnt(stack: Stack, found: Mapping[Stack, Sequence[PdResponse]]) -> PdCorrection:
    """What other stacks than ``stack`` have in common: those of its engine and precision, or else of its precision, or
    else all. Prefill's factor and the path have the least mean error of a stack's TTFTs, each stack counted once.
    Decode's factor takes away the median over stacks of their median error of TPOT."""
    others = {each: values for each, values in found.items() if each != stack and values}
    kinds = ((stack.engine, precision_of(stack)), (None, precision_of(stack)), (None, None))
    for engine, precision in kinds:
        alike = [
            values
            for each, values in others.items()
            if engine in (None, each.engine) and precision in (None, precision_of(each))
        ]
        if len(alike) >= FEWEST_ALIKE:
            break

    def loss(tried: tuple[float, int]) -> float:
        return statistics.fmean(
            statistics.fmean(min(abs(each.error(TTFT, *tried)), FAR) for each in values) for values in alike
        )

    prefill_factor, path_ms = min(itertools.product(TRIED_FACTORS, TRIED_PATH_MS), key=loss)
    too_long = statistics.median(
        statistics.median(each.error(TPOT, prefill_factor) for each in values) for values in alike
    )
    return PdCorrection(round(math.exp(-too_long), 2), prefill_factor, path_ms)


def precision_of(stack: Stack) -> str:
    """The format of its weights, the last word of its model."""
    return stack.model.split()[-1]
