"""Curves against each other: Pareto frontier, throughput at a latency bound, and how far repeats allow a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from pdlab.analysis import Curve, Point, View
from pdlab.errors import UsageError
from pdlab.spec import Frozen

# Repeats of one configuration on different days differ by about 5 % (median), so twice that is common.
SINGLE_REPEAT_NOISE = 0.10


class Spot(NamedTuple):
    """A drawable point of a curve: ``x`` latency or interactivity, ``y`` throughput, as the view shows them."""

    curve: Curve
    point: Point
    x: float
    y: float


def spots(all_curves: Sequence[Curve], view: View) -> list[Spot]:
    """Every point that can be drawn, invalid ones included; a point without that latency cannot."""
    found = []
    for curve in all_curves:
        for point in curve.points:
            x = point.latency(view)
            if x is not None:
                found.append(Spot(curve, point, x, curve.throughput(point, view)))
    return found


def require_latency(all_curves: Sequence[Curve], view: View) -> None:
    """Raises UsageError when no point has the latency that the view asks for."""
    if not spots(all_curves, view):
        what = f"{view.statistic} of {view.latency_name}"
        raise UsageError(
            f"no level has the {what}; choose another --stat or --latency-mode (prefill-only runs have no TPOT)"
        )


def pareto(points: Sequence[tuple[float, float]], lower_x_is_better: bool = True) -> list[int]:
    """Indexes of the points that no other beats, by increasing x; higher y is better.

    A point is beaten by one that is at least as good in both and better in one; equal points
    are both kept.
    """
    sign = 1.0 if lower_x_is_better else -1.0
    order = sorted(range(len(points)), key=lambda i: (sign * points[i][0], -points[i][1]))
    kept: list[int] = []
    for i in order:
        if not kept or points[i][1] > points[kept[-1]][1] or points[i] == points[kept[-1]]:
            kept.append(i)
    return sorted(kept, key=lambda i: (points[i][0], i))


def frontier(all_curves: Sequence[Curve], view: View) -> list[Spot]:
    """The Pareto frontier over all experiments, valid points only, by increasing x."""
    valid = [spot for spot in spots(all_curves, view) if spot.point.valid]
    return [valid[i] for i in pareto([(s.x, s.y) for s in valid], view.lower_is_better)]


def throughput_at(curve: Curve, view: View, bound: float) -> float | None:
    """Highest throughput that meets the latency bound; None when no valid point does.

    Between two neighbouring valid levels the curve is taken as straight; it is never extended beyond
    what was measured. ``bound`` is an upper bound, or a lower one for interactivity.
    """
    sign = 1.0 if view.lower_is_better else -1.0
    best: float | None = None
    for line in curve.lines().values():
        path = [
            (sign * s.x, s.y) for s in spots([curve.model_copy(update={"points": tuple(line)})], view) if s.point.valid
        ]
        found = [y for x, y in path if x <= sign * bound]
        for (x0, y0), (x1, y1) in pairwise(path):
            if min(x0, x1) < sign * bound < max(x0, x1):
                found.append(y0 + (y1 - y0) * (sign * bound - x0) / (x1 - x0))
        best = max([*found, *([] if best is None else [best])], default=None)
    return best


class Reading(Frozen):
    """The comparison at one latency bound: ``ranking`` is (label, throughput), best first.

    ``noise`` is the relative difference that the repeats do not allow to tell apart,
    ``single_repeat`` says that it is assumed, not measured; ``missed`` meet the bound nowhere,
    ``capped`` stop below it, so their throughput may be higher than their sweep shows.
    """

    bound: float
    ranking: tuple[tuple[str, float], ...]
    noise: float
    single_repeat: bool
    missed: tuple[str, ...] = ()
    capped: tuple[str, ...] = ()

    @property
    def tied(self) -> tuple[str, ...]:
        """Labels that cannot be told from the best, the best included."""
        best = self.ranking[0][1]
        return tuple(label for label, value in self.ranking if value >= best * (1 - self.noise))


def reading(all_curves: Sequence[Curve], view: View) -> Reading | None:
    """Who gives most throughput at a latency that they share; None when no point is valid.

    The bound is the geometric middle of the range that all curves cover; where there is none,
    the median latency of the frontier.
    """
    by_curve = [(curve, [s.x for s in spots([curve], view) if s.point.valid]) for curve in all_curves]
    measured = [(curve, xs) for curve, xs in by_curve if xs]
    if not measured:
        return None
    low, high = max(min(xs) for _, xs in measured), min(max(xs) for _, xs in measured)
    middle = (low * high) ** 0.5 if low <= high else median(s.x for s in frontier(all_curves, view))
    bound = _two_digits(middle, low, high) if low <= high else _two_digits(middle, 0, float("inf"))
    values = [(curve.label, throughput_at(curve, view, bound)) for curve, _ in measured]
    ranking = tuple(sorted([(n, v) for n, v in values if v is not None], key=lambda item: -item[1]))
    if not ranking:
        return None
    noises = [p.noise.get(name, 0.0) for c, _ in measured for p in c.points if p.valid for name in _noisy(view)]
    single = any(p.repeats < 2 for c, _ in measured for p in c.points if p.valid)
    slowest = max if view.lower_is_better else min
    sign = 1.0 if view.lower_is_better else -1.0
    return Reading(
        bound=bound,
        ranking=ranking,
        noise=max([SINGLE_REPEAT_NOISE, *noises] if single else noises),
        single_repeat=single,
        missed=tuple(label for label, value in values if value is None),
        capped=tuple(curve.label for curve, xs in measured if sign * slowest(xs) < sign * bound),
    )


def _noisy(view: View) -> tuple[str, ...]:
    """The figures whose noise moves a curve of this view."""
    latencies = {"token": ("tpot",), "first_token": ("ttft",), "chunk": ("ttft", "tpot")}
    return ("requests", *latencies[view.latency_mode])


def _two_digits(value: float, low: float, high: float) -> float:
    """The value to two significant digits where that stays within [low, high]."""
    rounded = float(f"{value:.2g}")
    return rounded if low <= rounded <= high else value
