"""Comparison of curves: Pareto frontier, throughput within latency bounds, and which differences are significant."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Literal, NamedTuple

import numpy as np

from pdlab.analysis.bootstrap import DrawnLine, LevelFigure, line
from pdlab.analysis.comparable import COMPARED_LOADS, groups, workloads_of
from pdlab.analysis.curves import Curve, Point
from pdlab.analysis.intervals import (
    Between,
    Comparison,
    Estimate,
    compare_between,
    is_tail,
    requests_for,
    undecided,
)
from pdlab.analysis.power import ScatteredFigure, single_repeat_sd
from pdlab.analysis.shrinkage import moderate_all
from pdlab.analysis.view import View
from pdlab.core.bounds import Bound, Bounds
from pdlab.core.errors import UsageError
from pdlab.core.gpu_count import other_count
from pdlab.core.schema import Frozen
from pdlab.core.text import counted, listed
from pdlab.core.workload import LoadKind
from pdlab.results.metrics import student_t

# The ends of a figure at a level of confidence.
EndsAt = Callable[[float], Between]


Beyond = Literal["unmeasured", "invalid", "unjudged", "search"]
"""What is known of the loads above those that were judged: there are none; some are not valid; they lack a bounded
figure; or a search found no rate that misses the SLO."""


LevelKey = tuple[str, LoadKind, float]
"""Label of the curve, kind of load, load: a level among all curves that are compared."""


def level_key(curve: Curve, point: Point) -> LevelKey:
    return curve.label, point.kind, point.value


class DrawnPoint(NamedTuple):
    """A drawable point of a curve: ``x`` latency or interactivity, ``y`` throughput, in the view's units."""

    curve: Curve
    point: Point
    x: float
    y: float

    @property
    def key(self) -> LevelKey:
        return level_key(self.curve, self.point)


class Frontier(NamedTuple):
    """The best points of one kind of load, of experiments that may be compared, by increasing x."""

    kind: LoadKind
    points: list[DrawnPoint]


class FrontierPoint(NamedTuple):
    """A point, whether it is on the frontier, and in which share of the draws (None: the scatter is unknown)."""

    drawn: DrawnPoint
    on_it: bool
    share: float | None


def drawn_points(all_curves: Sequence[Curve], view: View) -> list[DrawnPoint]:
    """Every point with that latency, invalid ones included."""
    drawable = []
    for curve in all_curves:
        for point in curve.points:
            x = point.latency(view)
            if x is not None:
                drawable.append(DrawnPoint(curve, point, x, curve.throughput(point, view)))
    return drawable


def require_latency(all_curves: Sequence[Curve], view: View) -> None:
    """Raises UsageError if no point has the latency of the view."""
    if drawn_points(all_curves, view):
        return
    latency = f"{view.statistic} of {view.latency_name}"
    points = [point for curve in all_curves for point in curve.points]
    if not any(point.requests_per_s > 0 for point in points):
        names = listed([curve.name for curve in all_curves])
        raise UsageError(f"no request was answered in any level of {names}: nothing can be compared; measure again")
    if any(point.latency_ms for point in points):
        workloads = [workload for curve in all_curves for workload in workloads_of(curve)]
        only_prefill = workloads and all(workload.sent_output_tokens == 1 for workload in workloads)
        why = " (prefill-only runs have no TPOT)" if only_prefill else ""
        if is_tail(view.statistic) and any(s.latency(view) is not None for point in points for s in point.samples):
            needed = counted(requests_for(view.statistic), "request")
            why = f" ({view.statistic} takes {needed} in every repeat of a level)"
        raise UsageError(f"no level has the {latency}; choose another --stat or --latency-mode{why}")
    reasons = listed(list(dict.fromkeys(reason for point in points for reason in point.reasons)))
    raise UsageError(f"no level has any latency: {reasons or 'the files have none'}; measure them again")


def pareto(points: Sequence[tuple[float, float]], lower_x_is_better: bool = True) -> list[int]:
    """Indexes of the points that no other beats, by increasing x; higher y is better.

    A point is beaten by one that is at least as good in both and better in one. Equal points are both kept.
    """
    sign = 1.0 if lower_x_is_better else -1.0
    order = sorted(range(len(points)), key=lambda i: (sign * points[i][0], -points[i][1]))
    front: list[int] = []
    for i in order:
        if not front or points[i][1] > points[front[-1]][1] or points[i] == points[front[-1]]:
            front.append(i)
    return sorted(front, key=lambda i: (points[i][0], i))


def frontiers(all_curves: Sequence[Curve], view: View) -> list[Frontier]:
    """The Pareto frontiers over experiments that may be compared, one for each kind of load; only valid points."""
    return [
        Frontier(kind, [valid[i] for i in pareto([(s.x, s.y) for s in valid], view.lower_is_better)])
        for group in groups(all_curves, view)
        for kind, valid in _valid_points(group.curves, view).items()
    ]


def _valid_points(all_curves: Sequence[Curve], view: View) -> dict[LoadKind, list[DrawnPoint]]:
    """By kind of load, of those that are compared: closed and open loops are not compared with each other."""
    points_by_kind: dict[LoadKind, list[DrawnPoint]] = {}
    for drawn in drawn_points(all_curves, view):
        if drawn.point.valid and drawn.point.kind in COMPARED_LOADS:
            points_by_kind.setdefault(drawn.point.kind, []).append(drawn)
    return points_by_kind


def frontier_points(all_curves: Sequence[Curve], view: View) -> list[FrontierPoint]:
    """Every valid point, and how often the draws have it on its frontier (`frontiers`)."""
    points = []
    for group in groups(all_curves, view):
        for kind, valid in _valid_points(group.curves, view).items():
            best = set(pareto([(s.x, s.y) for s in valid], view.lower_is_better))
            share = _shares(group.curves, kind, view)
            points += [FrontierPoint(drawn, i in best, share.get(drawn.key)) for i, drawn in enumerate(valid)]
    return points


def _shares(all_curves: Sequence[Curve], kind: LoadKind, view: View) -> dict[LevelKey, float]:
    """Level of that kind of load -> share of draws in which no other such point beats it; empty without repeats."""
    lines = [(curve, [p for p in curve.lines().get(kind, []) if p.valid]) for curve in all_curves]
    if not any(point.repeats > 1 for _, points in lines for point in points):
        return {}
    keys: list[LevelKey] = []
    drawn: list[DrawnLine] = []
    for curve, points in lines:
        usable = [p for p in points if p.latency(view) is not None]
        curve_line = line_of(curve, usable, view)
        if curve_line:
            keys += [level_key(curve, point) for point in usable]
            drawn.append(curve_line)
    # A curve whose repeats do not scatter has one draw; it is used for all.
    draws = max(len(curve_line.y) - 1 for curve_line in drawn)
    x, y = (
        np.concatenate([np.broadcast_to(each, (draws, each.shape[1])) for each in figures], axis=1)
        for figures in (
            [curve_line.x[1:, :, 0] for curve_line in drawn],
            [curve_line.y[1:] for curve_line in drawn],
        )
    )
    order = np.argsort(x, axis=1, kind="stable")
    sorted_y = np.take_along_axis(y, order, axis=1)
    highest = np.maximum.accumulate(sorted_y, axis=1)
    shares = np.zeros(x.shape[1])
    np.add.at(shares, order.ravel(), (sorted_y >= highest).ravel())
    return {key: float(share) / len(x) for key, share in zip(keys, shares, strict=True)}


def order_changes(all_curves: Sequence[Curve], view: View) -> list[tuple[Curve, Curve]]:
    """Pairs whose order by highest throughput depends on how GPUs are counted: (above, below) in the view's count."""
    other = view.model_copy(update={"count": other_count(view.count)})
    return [
        (first, second) if sign > 0 else (second, first)
        for group in groups(all_curves, view)
        for first, second in combinations(group.curves, 2)
        for kind in first.lines().keys() & second.lines().keys()
        if (sign := _over(first, second, kind, view)) * _over(first, second, kind, other) < 0
    ]


def _over(first: Curve, second: Curve, kind: LoadKind, view: View) -> float:
    """The highest throughput of the first minus that of the second; 0 if one has no valid level."""
    most = [
        max((curve.throughput(point, view) for point in curve.lines()[kind] if point.valid), default=None)
        for curve in (first, second)
    ]
    return 0.0 if None in most else (most[0] or 0.0) - (most[1] or 0.0)


def line_of(curve: Curve, points: Sequence[Point], view: View) -> DrawnLine | None:
    """Throughput (y) against latency (x, lower is better in every view) with draws; points must be valid and known."""
    sign = 1.0 if view.lower_is_better else -1.0
    return line(
        curve,
        points,
        [
            LevelFigure(
                lambda p: p.latency_estimate(view),
                lambda p: [s.latency(view) or 0.0 for s in p.samples],
                view.latency_metrics,
            )
        ],
        _rates(view),
        sign,
        curve.scale(view),
    )


def lines_of(curve: Curve, view: View) -> list[DrawnLine]:
    """One per kind of load that has a valid level with that latency."""
    usable = [[p for p in ps if p.valid and p.latency(view) is not None] for ps in curve.lines().values()]
    return [curve_line for points in usable if (curve_line := line_of(curve, points, view))]


class OpenEnd(Frozen):
    """The highest valid load of a configuration is within the bounds, so its throughput within them may be higher than
    measured.

    ``beyond``: why it is not known. ``ceiling``: its throughput at a rate above its capacity, which is the most that it
    may reach; None: without a known limit.
    """

    beyond: Beyond
    ceiling: Estimate | None = None


def open_end(curve: Curve, points: Sequence[Point], judged: Sequence[Point], view: View) -> OpenEnd | None:
    """Of a line of levels. ``judged``: those of them that were compared with the bounds, by load.

    None for a replay without a higher speed: its requests are the load, so there is no higher one to measure.
    """
    highest = judged[-1]
    higher = [point for point in points if point.value > highest.value]
    if not higher:
        return None if highest.kind == "replay" else OpenEnd(beyond="unmeasured")
    over = [point.rate_estimate(view.throughput_metric) for point in higher if point.above_capacity]
    # Each of them is what it served with a queue, so the most of them is what it may reach.
    ceiling = max(over, key=lambda each: each.value).scaled(curve.scale(view)) if over else None
    return OpenEnd(beyond="unjudged" if all(point.valid for point in higher) else "invalid", ceiling=ceiling)


class WithinBounds(NamedTuple):
    """The highest throughput of a line of levels within bounds."""

    estimate: Estimate
    end: OpenEnd | None


def throughput_within(curve: Curve, points: Sequence[Point], bounds: Bounds, view: View) -> WithinBounds | None:
    """None if no valid level is known to be within.

    Between two neighbouring valid levels the curve is straight; it is never extended beyond what was measured.
    """
    figures = [_bounded(bound) for bound in bounds.bounds]
    judged = [point for point in points if point.valid and bounds.known(point)]
    drawn = line(
        curve,
        judged,
        figures,
        _rates(view),
        y_factor=curve.scale(view),
    )
    limits = np.array([[bound.ms for bound in bounds.bounds]])
    estimate = drawn.estimates(drawn.reach(limits))[0] if drawn else None
    if drawn is None or estimate is None:
        return None
    return WithinBounds(estimate, open_end(curve, points, judged, view) if drawn.open_ended(limits[0]) else None)


def _bounded(bound: Bound) -> LevelFigure:
    return LevelFigure(
        lambda p: p.ms_estimate(bound.metric, bound.statistic),
        lambda p: [s.ms(bound.metric, bound.statistic) or 0.0 for s in p.samples],
        (bound.metric,),
    )


def _rates(view: View) -> LevelFigure:
    metric = view.throughput_metric
    return LevelFigure(
        lambda p: p.rate_estimate(metric), lambda p: [s.tokens_per_s(metric) for s in p.samples], ("throughput",)
    )


class Ranked(Frozen):
    """One configuration at the bound. ``best_over_it``: the first of the ranking over this one (None for the first
    itself). All of these comparisons together hold at the level of confidence. ``end``: its throughput may be higher
    than ``estimate``, which scatter cannot bound: the comparison is then undecided, unless a ceiling decides it."""

    label: str
    estimate: Estimate
    best_over_it: Comparison | None = None
    end: OpenEnd | None = None

    @property
    def tied(self) -> bool:
        """Whether it is not distinguishable from the best."""
        return self.best_over_it is None or self.best_over_it.verdict != "better"

    @property
    def at_least(self) -> bool:
        """Whether it is behind the best only as far as it was measured."""
        return self.best_over_it is not None and self.tied and self.end is not None


class BoundsRanking(Frozen):
    """The comparison within latency bounds, of the levels of one kind of load, best first.

    ``group``: distinguishes these experiments from others that they may not be compared with. ``single_repeat``: a
    scatter between repeats is assumed, not measured. ``missed``: meet the bounds at no level. ``unsure``: the same, but
    the bounds are within the noise of one of their levels, whose throughput is
    not clearly below the best. ``unknown``: no level has every bounded figure. ``invalid``: no level is valid.
    """

    bounds: Bounds
    kind: LoadKind
    group: str | None = None
    ranking: tuple[Ranked, ...]
    single_repeat: bool
    missed: tuple[str, ...] = ()
    unsure: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    invalid: tuple[str, ...] = ()

    @property
    def tied(self) -> tuple[str, ...]:
        """Labels that are not distinguishable from the best, the best included."""
        return tuple(ranked.label for ranked in self.ranking if ranked.tied)


class LabelledEstimate(NamedTuple):
    """``estimate``: a figure of the configuration ``label``."""

    label: str
    estimate: Estimate


def rank(
    estimates: Sequence[LabelledEstimate],
    confidence: float,
    searched: Mapping[str, EndsAt] | None = None,
    ends: Mapping[str, OpenEnd] | None = None,
) -> tuple[Ranked, ...]:
    """Highest first, each compared with the first; the comparisons share the error (Bonferroni).

    ``searched``: the ends of figures known by searches, by label. ``ends``: of figures that may be higher than
    measured, by label.
    """
    ordered = sorted(estimates, key=lambda each: -each.estimate.value)
    if not ordered:
        return ()
    (best, most), *challengers = ordered
    brackets, open_ends = searched or {}, ends or {}
    level = 1 - (1 - confidence) / max(1, len(challengers))

    def known(label: str, estimate: Estimate) -> Between:
        return brackets[label](level) if label in brackets else Between.of(estimate)

    def ahead_of(label: str, value: Estimate) -> Comparison:
        pair = known(best, most), known(label, value)
        if label in open_ends:
            return _ahead_of_open(*pair, open_ends[label].ceiling, confidence, len(challengers))
        return _compared(lead_over(*pair, confidence, len(challengers)), most, value, confidence)

    return (
        Ranked(label=best, estimate=most, end=open_ends.get(best)),
        *(
            Ranked(label=label, estimate=value, best_over_it=ahead_of(label, value), end=open_ends.get(label))
            for label, value in challengers
        ),
    )


def _ahead_of_open(
    best: Between, candidate: Between, ceiling: Estimate | None, confidence: float, comparisons: int
) -> Comparison:
    """The best over one that may give more: the lead is known only if the best is also ahead of the ceiling."""
    unknown = undecided(_ratio(best, candidate), confidence)
    if ceiling is None:
        return unknown
    least, most = (lead_over(best, each, confidence, comparisons) for each in (Between.of(ceiling), candidate))
    # The ceiling may be below what was measured within the bounds.
    if least is None or most is None or least.verdict != "better" or most.verdict != "better":
        return unknown
    return most.model_copy(update={"low": min(least.low, most.low)})


def lead_over(best: Between, candidate: Between, confidence: float, comparisons: int = 1) -> Comparison | None:
    """Best over candidate; None if it is not known."""
    # If the best is at its edge, another start might not reach it. A second at its edge can only be worse.
    return None if best.edge else compare_between(best, candidate, confidence, comparisons)


def _compared(comparison: Comparison | None, best: Estimate, candidate: Estimate, confidence: float) -> Comparison:
    # Without a comparison the scatter is unknown, a figure is 0, or the best is at its edge.
    return comparison or undecided(_ratio(best, candidate), confidence)


def _ratio(numerator: Estimate | Between, denominator: Estimate | Between) -> float:
    return numerator.value / denominator.value if denominator.value else float("inf")


def bounds_rankings(all_curves: Sequence[Curve], bounds: Bounds, view: View) -> list[BoundsRanking]:
    """The configuration with the highest throughput within the bounds, for each kind of load and comparable group.

    There is none for a kind without a valid level, nor for ramps.
    """
    answers = []
    for group in groups(all_curves, view):
        lines = [(curve, kind, points) for curve in group.curves for kind, points in curve.lines().items()]
        for kind in dict.fromkeys(kind for _, kind, _ in lines if kind in COMPARED_LOADS):
            of_kind = [(curve, points) for curve, its_kind, points in lines if its_kind == kind]
            answers.append(_reading(of_kind, kind, group.name, bounds, view))
    return [each for each in answers if each is not None]


def _reading(
    lines: Sequence[tuple[Curve, Sequence[Point]]], kind: LoadKind, group: str | None, bounds: Bounds, view: View
) -> BoundsRanking | None:
    def limited(point: Point) -> list[Limited]:
        return [Limited(point.ms_estimate(b.metric, b.statistic), b.ms, (b.metric,)) for b in bounds.bounds]

    measured = [(curve, valid) for curve, points in lines if (valid := [point for point in points if point.valid])]
    if not measured:
        return None
    known = [(curve, usable) for curve, valid in measured if (usable := [p for p in valid if bounds.known(p)])]
    every = {curve.label: points for curve, points in lines}
    found = [throughput_within(curve, every[curve.label], bounds, view) for curve, _ in known]
    estimates = moderate_all([within.estimate if within else None for within in found])
    values = [
        LabelledEstimate(curve.label, value)
        for (curve, _), value in zip(known, estimates, strict=True)
        if value is not None
    ]
    ends = {curve.label: within.end for (curve, _), within in zip(known, found, strict=True) if within and within.end}
    ranking = rank(values, view.confidence, ends=ends)
    beyond = [item for item, value in zip(known, estimates, strict=True) if value is None]
    unsure = tuple(
        curve.label
        for curve, points in beyond
        if ranking and may_reach(curve, points, limited, view, Between.of(ranking[0].estimate))
    )
    answered = {curve.label for curve, _ in known}
    return BoundsRanking(
        bounds=bounds,
        kind=kind,
        group=group,
        ranking=ranking,
        single_repeat=any(ranked.estimate.basis == "assumed" for ranked in ranking),
        missed=tuple(curve.label for curve, _ in beyond if curve.label not in unsure),
        unsure=unsure,
        unknown=tuple(curve.label for curve, _ in measured if curve.label not in answered),
        invalid=tuple(curve.label for curve, points in lines if not any(point.valid for point in points)),
    )


class Limited(NamedTuple):
    """A figure of a level that must be at most ``limit``; None: unknown. ``scatters``: as in `LevelFigure`."""

    figure: Estimate | None
    limit: float
    scatters: tuple[ScatteredFigure, ...]


def may_reach(
    curve: Curve, points: Sequence[Point], limited: Callable[[Point], Sequence[Limited]], view: View, best: Between
) -> bool:
    """Whether the limits are within the noise of a level of the curve, at a throughput that is not clearly below the
    best. Noise contains the scatter between starts."""
    return any(
        all(_may_hold(curve, each, view) for each in limited(point)) and _may_serve(curve, point, view, best)
        for point in points
    )


def _may_hold(curve: Curve, limited: Limited, view: View) -> bool:
    if limited.figure is None:
        return False
    sure = with_starts(limited.figure, single_repeat_sd(curve.gpus.device, *limited.scatters))
    half = student_t((1 + view.confidence) / 2, sure.dof or math.inf) * (sure.standard_error or 0.0)
    return sure.value - half <= limited.limit


def _may_serve(curve: Curve, point: Point, view: View, best: Between) -> bool:
    rate = point.rate_estimate(view.throughput_metric).scaled(curve.scale(view))
    rate = with_starts(rate, single_repeat_sd(curve.gpus.device, "throughput"))
    comparison = lead_over(best, Between.of(rate), view.confidence)
    return comparison is None or comparison.verdict != "better"


def with_starts(estimate: Estimate, start_sd: float) -> Estimate:
    """With the scatter from start to start: the repeats' own, or an assumed one."""
    if estimate.basis == "repeats":
        return estimate
    error = math.hypot(estimate.relative_error or 0.0, start_sd) * abs(estimate.value)
    return estimate._replace(standard_error=error, dof=math.inf, basis="assumed")
