"""Which configuration is best at which throughput, and where the best one changes.

At a throughput y a configuration offers its lowest latency at y or more. Below its lowest level it offers that level's
latency, though the true one may be lower. Between two neighbouring valid levels its curve is straight; above its
highest throughput it offers nothing. The best at y has the lowest latency.

The interval of a crossing is Fieller's: the throughputs around it at which the two are not distinguishable. If it
extends to the end of what both have measured, that end of the interval is unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from pdlab.analysis.bootstrap import DrawnLine
from pdlab.analysis.comparable import COMPARED_LOADS, groups
from pdlab.analysis.curves import Curve, rankable
from pdlab.analysis.intervals import Array, Estimate, compare
from pdlab.analysis.ranking import lines_of
from pdlab.analysis.shrinkage import moderate_all
from pdlab.analysis.view import View
from pdlab.core.schema import Frozen
from pdlab.core.workload import LoadKind

STEPS = 120


class BestRange(Frozen):
    """``label`` is the best from ``low`` to ``high`` throughput. ``rivals`` are not distinguishable from it over most
    of that range."""

    label: str
    low: float
    high: float
    rivals: tuple[str, ...] = ()


class BestChange(Frozen):
    """At ``throughput``, ``after`` becomes better than ``before``; the interval is from ``low`` to ``high``.

    None: on that side the two are not distinguishable up to the end of the measurement. ``kind``: the curves cross, or
    ``before`` ends there at its highest measured throughput.
    """

    before: str
    after: str
    kind: Literal["crosses", "ends"]
    throughput: float
    low: float | None = None
    high: float | None = None

    @property
    def clear(self) -> bool:
        """Whether ``before`` is better on one side and ``after`` on the other, beyond the noise."""
        return self.kind == "crosses" and self.low is not None and self.high is not None


class MeasuredEnd(Frozen):
    """``throughput``: the highest of the valid levels of ``label``, below that of another."""

    label: str
    throughput: float


class Crossovers(Frozen):
    """The best configuration by increasing throughput, and its changes. ``ends``: configurations that offer nothing at
    the highest throughputs, because they were not measured there, or do not reach them."""

    reigns: tuple[BestRange, ...]
    takeovers: tuple[BestChange, ...]
    ends: tuple[MeasuredEnd, ...] = ()


class GroupCrossovers(NamedTuple):
    """The crossovers of the ``curves`` of one comparable group in one kind of load.

    ``kind``: None if the group was measured in only one kind. ``group``: see `pdlab.analysis.comparable.Group`.
    """

    group: str | None
    kind: LoadKind | None
    curves: Sequence[Curve]
    crossovers: Crossovers


class _GridLatency(NamedTuple):
    """One configuration's latency over the grid; None where it was not measured."""

    label: str
    latency: list[Estimate | None]


def group_crossovers(curves: Sequence[Curve], view: View) -> list[GroupCrossovers]:
    """Those of each group and each kind of load in it with two configurations to compare."""
    found = []
    for group in groups(curves, view):
        kinds = [kind for kind in COMPARED_LOADS if any(kind in curve.lines() for curve in group.curves)]
        for kind in kinds:
            of_kind = [
                curve.model_copy(update={"points": tuple(curve.lines().get(kind, []))}) for curve in group.curves
            ]
            if (comparison := crossovers(of_kind, view)) is not None:
                named = kind if len(kinds) > 1 else None
                found.append(GroupCrossovers(group.name, named, group.curves, comparison))
    return found


def crossovers(curves: Sequence[Curve], view: View) -> Crossovers | None:
    """The best configuration at every measured throughput; None without two configurations to compare.

    Latencies and throughputs are the view's. With a single repeat in any level the scatter between repeats is assumed,
    see `pdlab.analysis.bootstrap`.
    """
    own_curves = rankable(curves)
    if sum(any(p.valid and p.latency(view) is not None for p in curve.points) for curve in own_curves) < 2:
        return None  # before the draws, which take most of the time
    curve_lines = [(curve.label, lines_of(curve, view)) for curve in own_curves]
    curve_lines = [(label, its_lines) for label, its_lines in curve_lines if its_lines]
    if len(curve_lines) < 2:
        return None
    ends = [_range(line) for _, its_lines in curve_lines for line in its_lines]
    low, high = min(end[0] for end in ends), max(end[1] for end in ends)
    # The highest throughput of every curve is on the grid, so that a step cuts none short.
    grid = np.unique(np.concatenate([np.linspace(low, high, STEPS), np.array([end[1] for end in ends])]))
    columns = [
        moderate_all(column) for column in zip(*(_offer(its_lines, grid) for _, its_lines in curve_lines), strict=True)
    ]
    offers = [_GridLatency(label, [column[i] for column in columns]) for i, (label, _) in enumerate(curve_lines)]
    best = [_best(offers, g) for g in range(len(grid))]
    pieces = _pieces(best)
    # Between the last piece before a change and the first after it; no takeover across an unmeasured range.
    changes = {
        i: _takeover(offers, a, b, last_step, grid, view)
        for i, ((a, _, last_step), (b, following, _)) in enumerate(pairwise(pieces))
        if following == last_step + 1
    }
    reigns = tuple(
        BestRange(
            label=offers[leader].label,
            low=changes[i - 1].throughput if i - 1 in changes else float(grid[first_step]),
            high=changes[i].throughput if i in changes else float(grid[last_step]),
            rivals=_rivals(offers, leader, first_step, last_step, view),
        )
        for i, (leader, first_step, last_step) in enumerate(pieces)
    )
    tops = {label: max(_range(line)[1] for line in its_lines) for label, its_lines in curve_lines}
    return Crossovers(
        reigns=reigns,
        takeovers=tuple(changes.values()),
        ends=tuple(MeasuredEnd(label=label, throughput=top) for label, top in tops.items() if top < high),
    )


def _range(line: DrawnLine) -> tuple[float, float]:
    return float(line.y[0].min()), float(line.y[0].max())


def _offer(lines: Sequence[DrawnLine], grid: Array) -> list[Estimate | None]:
    """The lowest latency of any of the lines at each throughput of the grid."""
    lowest: list[Estimate | None] = [None] * len(grid)
    for line in lines:
        reached = -line.mirrored().reach(-grid)
        for g, estimate in enumerate(line.estimates(reached)):
            if estimate is None:
                continue
            rival = lowest[g]
            if rival is None or estimate.value < rival.value:
                lowest[g] = estimate
    return lowest


def _best(offers: Sequence[_GridLatency], g: int) -> int | None:
    values = [(offer.latency[g], i) for i, offer in enumerate(offers)]
    return min(((value.value, i) for value, i in values if value), default=(0.0, None))[1]


def _pieces(best: Sequence[int | None]) -> list[tuple[int, int, int]]:
    """(leader, first, last) of every stretch of the grid with one best."""
    pieces: list[tuple[int, int, int]] = []
    for g, leader in enumerate(best):
        if leader is None:
            continue
        if pieces and pieces[-1][0] == leader and pieces[-1][2] == g - 1:
            pieces[-1] = (leader, pieces[-1][1], g)
        else:
            pieces.append((leader, g, g))
    return pieces


def _is_better(offers: Sequence[_GridLatency], leader: int, rival: int, g: int, view: View) -> bool:
    """Whether ``leader`` is better than ``rival`` beyond the noise at that throughput."""
    latency, rival_latency = offers[leader].latency[g], offers[rival].latency[g]
    if latency is None or rival_latency is None:
        return rival_latency is None
    if latency.edge:
        return False
    # Interactivity is stored negated, so the magnitudes compare in reverse.
    higher, lower = (rival_latency, latency) if view.lower_is_better else (_positive(latency), _positive(rival_latency))
    comparison = compare(higher, lower, view.confidence)
    return comparison is not None and comparison.verdict == "better"


def _positive(estimate: Estimate) -> Estimate:
    return estimate._replace(value=abs(estimate.value))


def _rivals(
    offers: Sequence[_GridLatency], leader: int, first_step: int, last_step: int, view: View
) -> tuple[str, ...]:
    rivals = []
    for rival, offer in enumerate(offers):
        steps = [g for g in range(first_step, last_step + 1) if offer.latency[g] is not None]
        close = sum(not _is_better(offers, leader, rival, g, view) for g in steps) if rival != leader else 0
        if close and close > (last_step - first_step + 1) / 2:
            rivals.append(offer.label)
    return tuple(rivals)


def _takeover(offers: Sequence[_GridLatency], a: int, b: int, last_step: int, grid: Array, view: View) -> BestChange:
    before, after = offers[a], offers[b]
    if before.latency[last_step + 1] is None:
        return BestChange(before=before.label, after=after.label, kind="ends", throughput=float(grid[last_step]))

    def first_clear(steps: range, leader: int, rival: int) -> float | None:
        measured = (g for g in steps if before.latency[g] is not None and after.latency[g] is not None)
        return next((float(grid[g]) for g in measured if _is_better(offers, leader, rival, g, view)), None)

    return BestChange(
        before=before.label,
        after=after.label,
        kind="crosses",
        throughput=_crossing(before, after, last_step, grid),
        low=first_clear(range(last_step, -1, -1), a, b),
        high=first_clear(range(last_step + 1, len(grid)), b, a),
    )


def _crossing(before: _GridLatency, after: _GridLatency, last_step: int, grid: Array) -> float:
    """Where the straight lines between two steps of the grid cross."""
    gaps = []
    for g in (last_step, last_step + 1):
        latency_before, latency_after = before.latency[g], after.latency[g]
        assert latency_before is not None and latency_after is not None
        gaps.append(latency_after.value - latency_before.value)
    span = gaps[0] - gaps[1]
    share = gaps[0] / span if span else 0.5
    return float(grid[last_step] + (grid[last_step + 1] - grid[last_step]) * share)
