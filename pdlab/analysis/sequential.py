"""When enough repeats were measured: a lead is resolved, or it will not be.

The headline's comparison (`pdlab.analysis.headline`) is evaluated after every repeat. The level of each look is chosen
so that all looks together err no more often than stated (`pdlab.analysis.power.LookSchedule`). Stopping early because
nothing will be resolved costs no error: it names no winner.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Literal, NamedTuple

from pdlab.analysis.headline import Figure, Headline, PairComparison, Ratio
from pdlab.analysis.intervals import Comparison, Estimate, compare
from pdlab.analysis.power import LookSchedule
from pdlab.analysis.shrinkage import repeat_variance
from pdlab.core.schema import Frozen

# Probability of a resolution at the last look below which further repeats are a waste.
FUTILE = 0.05
LookOutcome = Literal["lead", "alike", "unresolvable", "open"]
Targets = Mapping[Figure, float]


class LookVerdict(Frozen):
    """One figure of two deployments at one look. ``alike``: the interval excludes any lead of the target's size.
    ``unresolvable``: with 95 % predictive probability neither that nor a lead will be known at the last look."""

    label: str
    reference: str
    figure: Figure
    outcome: LookOutcome
    comparison: Comparison | None


def judge(
    headlines: Sequence[Headline], targets: Targets, looks: LookSchedule, repeats: int, confidence: float
) -> tuple[LookVerdict, ...]:
    """Every comparison of the target figures after that many repeats. They share the error of a look.

    Output tokens/s count only for closed loops; in an open loop they are what arrives.
    """
    ratios = [
        (each, headline, ratio)
        for headline in headlines
        for each in headline.comparisons
        for ratio in each.ratios
        if ratio.figure in targets and (ratio.figure != "throughput" or headline.kind == "concurrency")
    ]
    level = looks.level(confidence)
    return tuple(
        _judged(
            each, headline, ratio, targets[ratio.figure], looks.cap if repeats < looks.cap else 0, level, len(ratios)
        )
        for each, headline, ratio in ratios
    )


def _judged(
    each: PairComparison, headline: Headline, ratio: Ratio, target: float, cap: int, level: float, comparisons: int
) -> LookVerdict:
    first, second = ratio.first, ratio.second
    comparison = compare(first, second, level, comparisons) if first and second else None
    outcome: LookOutcome = "open" if cap else "unresolvable"
    edge = math.log1p(target)
    if comparison is not None and comparison.basis == "repeats" and first and second:
        if comparison.verdict != "not distinguishable":
            outcome = "lead"
        elif -edge <= math.log(max(comparison.low, 1e-300)) and math.log(comparison.high) <= edge:
            outcome = "alike"
        elif cap and _will_resolve(first, second, cap, edge, level, comparisons) < FUTILE:
            outcome = "unresolvable"
    return LookVerdict(
        label=each.label, reference=headline.reference, figure=ratio.figure, outcome=outcome, comparison=comparison
    )


def _will_resolve(first: Estimate, second: Estimate, cap: int, edge: float, level: float, comparisons: int) -> float:
    """Predictive probability that a lead, or its absence beyond ``edge``, is known after ``cap`` repeats.

    With the present scatter the later estimate is normal around the present one. Its variance is the reduction by
    further repeats (Spiegelhalter, Freedman and Blackburn, Controlled Clinical Trials 7, 1986).
    """
    at_cap = compare(_at(first, cap), _at(second, cap), level, comparisons)
    if at_cap is None:
        return 1.0
    half = math.log(at_cap.high / at_cap.ratio)
    middle = math.log(first.value / second.value)
    now, then = (
        math.hypot(*(each.relative_error or 0.0 for each in pair))
        for pair in ((first, second), (_at(first, cap), _at(second, cap)))
    )
    spread = math.sqrt(max(now**2 - then**2, 0.0))
    if not spread:
        return float(abs(middle) > half or abs(middle) < edge - half)
    future = NormalDist(middle, spread)
    lead = 1 - future.cdf(half) + future.cdf(-half)
    alike = future.cdf(edge - half) - future.cdf(half - edge) if edge > half else 0.0
    return min(1.0, lead + alike)


def _at(estimate: Estimate, repeats: int) -> Estimate:
    """The estimate after ``repeats`` repeats with the same scatter."""
    now = (estimate.dof or 1.0) + 1
    error = None if estimate.standard_error is None else estimate.standard_error * math.sqrt(now / repeats)
    return estimate._replace(standard_error=error, dof=float(repeats - 1))


class StartScatter(NamedTuple):
    """Standard deviation from start to start of the logarithm of a figure, and its degrees of freedom."""

    log_sd: float
    dof: int


def scatter(headlines: Sequence[Headline], figure: Figure = "throughput") -> StartScatter | None:
    """Pooled over deployments; None if nothing was repeated."""
    estimates: dict[str, Estimate] = {}
    for headline in headlines:
        for each in headline.comparisons:
            ratio = next(ratio for ratio in each.ratios if ratio.figure == figure)
            for label, estimate in ((each.label, ratio.first), (headline.reference, ratio.second)):
                if estimate is not None and estimate.basis == "repeats":
                    estimates[f"{headline.kind} {label}"] = estimate
    parts = [(repeat_variance(e), e.dof or 0.0) for e in estimates.values()]
    dof = math.fsum(part[1] for part in parts)
    if not dof:
        return None
    return StartScatter(math.sqrt(math.fsum(variance * weight for variance, weight in parts) / dof), round(dof))
