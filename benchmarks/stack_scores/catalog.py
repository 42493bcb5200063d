"""configs/errors/public.yaml made from scores: what a plan takes from public stacks (`pdlab.plan.error_catalog`)."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pdlab.core.workload import Closed
from pdlab.plan.correction_fit import TPOT, TTFT
from pdlab.plan.error_catalog import NEAR, CoveredRange, ErrorCatalog, ErrorsAfterLevels, KnownStack
from pdlab.plan.pd_catalog import CommonCorrection, PdCatalog, PdCovered, PdStackName
from pdlab.plan.stack_prior import Stack
from stack_scores.chance import PointsInBand, sum_of
from stack_scores.components import error_components
from stack_scores.pd_points import PdStack, learnt, pd_components, precision_of
from stack_scores.public_points import PublicPoint
from stack_scores.scoring import (
    Found,
    GroupScore,
    ReferenceStacks,
    ScoredPoint,
    StackScore,
    banded,
    errors_after,
    others_of,
    score_of,
    shares_of,
)


def _after(everything: ReferenceStacks, without: Mapping[Stack, ReferenceStacks], count: int) -> ErrorsAfterLevels:
    medians: dict[str, list[float]] = {}
    held: dict[str, list[float]] = {}
    for stack in banded(list(without)):
        others = without[stack]
        theirs = errors_after(_banded_of(others), others, count)
        for metric, own in errors_after({stack: everything.found[stack]}, others, count).items():
            if own:
                parts = error_components(metric, theirs[metric])
                inside = [abs(each.error) <= parts.half_width((), each.predicted_s) for each in own]
                medians.setdefault(metric, []).append(statistics.median(abs(each.error) for each in own))
                held.setdefault(metric, []).append(statistics.fmean(inside))
    return ErrorsAfterLevels(
        components={
            metric: error_components(metric, each)
            for metric, each in errors_after(_banded_of(everything), everything, count).items()
        },
        median_percent={metric: round(100 * statistics.median(each), 1) for metric, each in medians.items()},
        held={metric: round(statistics.fmean(each), 2) for metric, each in held.items()},
        near={metric: sum(NEAR[0] <= share <= NEAR[1] for share in each) for metric, each in held.items()},
    )


def _banded_of(stacks: ReferenceStacks) -> Found:
    """Those whose errors are in bands."""
    return {stack: stacks.found[stack] for stack in banded(stacks.found)}


LEVELS = (1, 2, 3, 4)


def covered(points: Iterable[PublicPoint], weights: Iterable[str]) -> CoveredRange:
    """What these points are of."""
    rows = [point.row for point in points]
    inputs = [row.workload.input_tokens for row in rows]
    outputs = [row.workload.output_tokens for row in rows]
    loads = [row.load.concurrency / row.deployment.gpus for row in rows if isinstance(row.load, Closed)]
    return CoveredRange(
        tp=tuple(sorted({pool.tp for row in rows for pool in row.deployment.pools.values()})),
        weights=tuple(sorted(set(weights))),
        input_tokens=(min(inputs), max(inputs)),
        output_tokens=(min(outputs), max(outputs)),
        in_flight_per_gpu=(min(loads), max(loads)),
    )


def catalog_of(
    found: Found,
    without: Mapping[Stack, ReferenceStacks],
    scores: Sequence[StackScore],
    groups: Sequence[GroupScore],
    points: int,
    of: CoveredRange,
) -> ErrorCatalog:
    """Of all stacks together, for one that is none of them. ``without``: each of them left out; ``groups``: each group
    of them."""
    everything = others_of(found)
    by_stack = {score.left_out.stack: score for score in scores}

    def rounded(values: Iterable[float]) -> tuple[Any, ...]:
        return tuple(round(float(value), 4) for value in values)

    def significant(values: Iterable[float]) -> tuple[Any, ...]:
        return tuple(float(f"{value:.4g}") for value in values)

    return ErrorCatalog(
        points=points,
        stacks=tuple(
            KnownStack(
                **fit.stack._asdict(),
                correction=rounded(fit.mean),
                covariance=tuple(significant(row) for row in fit.covariance),
                points=score.points,
                errors_percent={name: round(each.error, 1) for name, each in score.ours.items()},
                alone_percent={name: round(each.error, 1) for name, each in score.alone.items()},
                held={name: round(each.share, 2) for name, each in score.held.items()},
                unseen=score.left_out.unseen,
            )
            for fit in everything.fits
            for score in [by_stack[fit.stack]]
        ),
        effects=tuple(rounded(each) for each in everything.effects),
        components=everything.components,
        after={count: _after(everything, without, count) for count in LEVELS},
        left_out=shares_of(groups),
        covered=of,
    )


def pd_catalog_of(
    known: Sequence[PdStack],
    groups: Sequence[GroupScore],
    held: Mapping[str, Sequence[PointsInBand]],
    kept: Mapping[Stack, Sequence[ScoredPoint]],
) -> PdCatalog:
    """Of all stacks of P:D together. ``held``: by metric, of every stack left out alone. ``kept``: their points as
    predicted by the others, without those near saturation."""
    scored_points = [each for of_stack in kept.values() for each in of_stack]
    points = [each.point for each in scored_points]
    kinds: set[tuple[str | None, str]] = {(each.stack.engine, precision_of(each.stack)) for each in known}
    kinds |= {(None, precision) for _, precision in kinds}
    asked = sorted(kinds, key=lambda each: (each[0] is None, each[0] or "", each[1]))
    range_of = covered(points, ())
    return PdCatalog(
        points=len(points),
        stacks=tuple(
            PdStackName(
                model=each.stack.model.rsplit(" ", 1)[0],
                precision=precision_of(each.stack),
                gpu=each.stack.gpu,
                engine=each.stack.engine,
                version=each.stack.version,
                errors_percent=_medians(kept.get(each.stack, ())),
            )
            for each in known
        ),
        corrections=tuple(
            CommonCorrection(engine=engine, precision=precision, **_common(engine or "-", precision or "-", known))
            for engine, precision in [*asked, (None, None)]
        ),
        components=pd_components(known),
        median_percent=_medians(scored_points),
        held={metric: round(sum_of(each).share, 2) for metric, each in held.items() if each},
        left_out=shares_of(groups),
        covered=PdCovered(
            input_tokens=range_of.input_tokens,
            output_tokens=range_of.output_tokens,
            in_flight_per_gpu=range_of.in_flight_per_gpu,
            gpus_per_engine={gpu: _largest_engine(gpu, points) for gpu in sorted({each.stack.gpu for each in known})},
        ),
    )


def _largest_engine(gpu: str, points: Sequence[PublicPoint]) -> int:
    """The most GPUs of an engine on that GPU type."""
    pools = [pool for each in points if each.stack.gpu == gpu for pool in each.row.deployment.pools.values()]
    return max((pool.gpus_per_replica for pool in pools), default=1)


def _medians(points: Sequence[ScoredPoint]) -> dict[str, float]:
    """Of TPOT and mean TTFT, in percent."""
    return {metric: round(score_of(points, metric).error, 1) for metric in (TPOT, TTFT)} if points else {}


def _common(engine: str, precision: str, known: Sequence[PdStack]) -> dict[str, float]:
    """The correction of a stack of that engine and precision that is none of them."""
    factor, prefill_factor, path_ms, _ = learnt(Stack(f"- {precision}", "-", engine, "-", "pd"), known)
    return {"factor": factor, "prefill_factor": prefill_factor, "path_ms": path_ms}
