"""The figures of curves for the tables, and the facts of the notes below them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from pdlab.analysis.comparable import incomparable, length_notes
from pdlab.analysis.curves import Curve, Point, Rate, rankable, shared_settings
from pdlab.analysis.intervals import Estimate, requests_for
from pdlab.analysis.ranking import FrontierPoint, LevelKey, frontier_points, level_key, order_changes
from pdlab.analysis.view import View
from pdlab.core.bounds import Metric, Statistic
from pdlab.core.gpu_count import Count, other_count
from pdlab.core.rendering import macro
from pdlab.core.text import number
from pdlab.report.section import ASSETS

TABLES = ASSETS / "tables.txt"
LATENCIES: tuple[Metric, ...] = ("ttft", "tpot", "e2el")
RATES: tuple[Rate, ...] = ("requests", "input", "output", "total")


def render(curves: Sequence[Curve], view: View) -> str:
    """Every table and note, as printed; ends without a newline."""
    shown = TableFacts(curves, view)
    per_node = TableFacts(curves, view.model_copy(update={"normalized": True}))
    found = [
        macro(TABLES, "experiments", shown),
        macro(TABLES, "raw", shown),
        macro(TABLES, "per_node", per_node),
    ]
    return "\n\n".join(filter(None, [*found, "\n".join([*notes(curves, view), *tail_notes(curves)])]))


@dataclass(frozen=True)
class TableFacts:
    """Curves in one view, with the values that their tables need."""

    curves: Sequence[Curve]
    view: View

    @property
    def unit(self) -> str:
        return unit(self.curves)

    @property
    def units(self) -> str:
        return units(self.curves)

    @property
    def node(self) -> str:
        return node_name(self.curves, self.view)

    @property
    def rates(self) -> tuple[Rate, ...]:
        return RATES

    @property
    def latencies(self) -> list[tuple[Metric, Statistic]]:
        statistics: list[Statistic] = list(dict.fromkeys([self.view.statistic, "p99"]))
        return [(metric, statistic) for metric in LATENCIES for statistic in statistics]

    @property
    def settings(self) -> list[str]:
        """The keys of the settings that differ between the curves, except one that is their number of GPUs."""
        sizes = [str(curve.gpus.total) for curve in self.curves]
        keys = dict.fromkeys(key for curve in self.curves for key in curve.settings)
        values = {key: [curve.settings.get(key) for curve in self.curves] for key in keys}
        return [key for key, each in values.items() if len(set(each)) > 1 and each != sizes]

    @property
    def shared(self) -> str:
        return shared_text(self.curves)

    @property
    def with_role(self) -> list[Curve]:
        return [curve for curve in self.curves if curve.has_role(self.view)]

    @property
    def several_kinds(self) -> bool:
        return len({point.kind for curve in self.with_role for point in curve.points}) > 1

    @cached_property
    def _frontier(self) -> dict[LevelKey, FrontierPoint]:
        return {each.drawn.key: each for each in frontier_points(self.with_role, self.view)}

    @property
    def has_shares(self) -> bool:
        return any(each.share is not None for each in self._frontier.values())

    def on_frontier(self, curve: Curve, point: Point) -> str:
        """``*`` on the frontier; with repeats also the share of the draws: ``* 93%``, or ``12%`` off it."""
        found = self._frontier.get(level_key(curve, point))
        if found is None or found.share is None:
            return "*" if found and found.on_it else ""
        share = "" if found.share < 0.05 else f"{100 * found.share:.0f}%"
        return f"* {share}".rstrip() if found.on_it else share

    def figure(self, estimate: Estimate | None) -> str:
        return figure(estimate, self.view.confidence)


@dataclass(frozen=True)
class NoteFacts:
    """Caveats for the reader of the figures. ``repeats``: fewest and most of a level. ``partial``: deployments that
    leave GPUs of their nodes idle that no copy can use. ``swapped``: pairs whose order depends on how GPUs are counted.
    ``fresh``: labels measured on fresh KV pools, with the loads; no load: all of them."""

    curves: Sequence[Curve]
    view: View

    @cached_property
    def _points(self) -> list[Point]:
        return [point for curve in rankable(self.curves) for point in curve.points]

    @property
    def levels(self) -> int:
        return len(self._points)

    @property
    def steady(self) -> int:
        return sum(point.window == "steady" for point in self._points)

    @property
    def repeats(self) -> tuple[int, int]:
        many = [point.repeats for point in self._points]
        return min(many), max(many)

    @property
    def percent(self) -> float:
        return 100 * self.view.confidence

    @property
    def one_has_scatter(self) -> bool:
        """Whether a level of one repeat has an interval, from the scatter of its requests."""
        return any(p.repeats == 1 and p.rate_estimate("requests").basis for p in self._points)

    @property
    def rehearsed(self) -> list[str]:
        return [curve.label for curve in rankable(self.curves) if curve.rehearsed]

    @property
    def partial(self) -> list[str]:
        if not self.view.normalized or self.view.role != "all":
            return []
        sizes = [(c.label, c.gpus.total, c.gpus.whole) for c in rankable(self.curves)]
        return [f"{label} ({total} of {whole:.3g})" for label, total, whole in sizes if whole and whole > total]

    @property
    def swapped(self) -> list[str]:
        changes = order_changes(self.curves, self.view)
        return [f"{lower.label} is above {higher.label}" for higher, lower in changes]

    @property
    def other_count(self) -> Count:
        return other_count(self.view.count)

    @property
    def reason(self) -> str | None:
        return incomparable(self.curves, self.view)

    @property
    def length_notes(self) -> list[str]:
        return length_notes(self.curves, self.view)

    @property
    def published(self) -> list[str]:
        return [curve.label for curve in self.curves if curve.published is not None]

    @property
    def fresh(self) -> list[tuple[str, list[str]]]:
        loads = [
            (c.label, [point.load for point in c.points if point.fresh], len(c.points)) for c in rankable(self.curves)
        ]
        return [(label, [] if len(fresh) == every else fresh) for label, fresh, every in loads if fresh]


def notes(curves: Sequence[Curve], view: View, *, exclusions: bool = True) -> list[str]:
    """Notes on a comparison: windows, repeats, workloads, invalid levels. ``exclusions``: also why repeats are left
    out."""
    return macro(TABLES, "notes", NoteFacts(curves, view), exclusions).splitlines()


def tail_notes(curves: Sequence[Curve]) -> list[str]:
    """How many requests a percentile takes, if some repeats had too few for it."""
    points = [point for curve in rankable(curves) for point in curve.points]
    had = dict.fromkeys(s for p in points for each in p.samples for values in each.latency_ms.values() for s in values)
    scarce = sorted(statistic for statistic in had if not all(point.carries(statistic) for point in points))
    return macro(TABLES, "tails", [f"{each} takes {requests_for(each)}" for each in scarce]).splitlines()


def load_name(point: Point) -> str:
    """``concurrency 4``, ``7.5 requests/s``."""
    return macro(TABLES, "load_name", point)


def shared_text(curves: Sequence[Curve]) -> str:
    """``gpu=h200_sxm, precision=fp4``: the settings that all of these curves share; may be empty."""
    return ", ".join(f"{key}={value}" for key, value in shared_settings(curves).items())


def unit(curves: Sequence[Curve]) -> str:
    """Unit of an experiment's size: GPU, or engine rank on a CPU cluster."""
    return " or ".join(dict.fromkeys(curve.gpus.unit for curve in curves))


def units(curves: Sequence[Curve]) -> str:
    return " or ".join(f"{curve_unit}s" for curve_unit in dict.fromkeys(c.gpus.unit for c in curves))


def node_name(curves: Sequence[Curve], view: View) -> str:
    """Unit of normalised throughput: ``node (8 GPUs)``, ``8 engine ranks``, ``whole deployment``."""
    if not view.normalized:
        return "whole deployment"
    size, kind = view.gpus_per_node, unit(curves) if view.gpus_per_node == 1 else units(curves)
    kind = kind if view.role == "all" else f"{view.role} {kind}"
    if all(curve.gpus.device == "cpu" for curve in curves):
        return f"{size} {kind}"
    kind += " of whole nodes" if view.count == "nodes" and view.role == "all" else ""
    return f"node ({size} {kind})"


def figure(estimate: Estimate | None, confidence: float) -> str:
    """``118.0 ±4%`` over repeats, ``118.0 (±4%)`` of one repeat's requests, ``118.0`` with unknown scatter."""
    return " ".join(filter(None, value_and_half(estimate, confidence)))


def value_and_half(estimate: Estimate | None, confidence: float) -> tuple[str, str]:
    """The two parts of a `figure`; the second is empty with unknown scatter."""
    if estimate is None or not math.isfinite(estimate.value):  # infinite: a price without any token served
        return "-", ""
    interval = estimate.interval(confidence)
    if interval is None or not estimate.value:
        return number(estimate.value), ""
    half = f"±{tolerance((interval.high - estimate.value) / abs(estimate.value))}"
    return number(estimate.value), half if estimate.basis == "repeats" else f"({half})"


def tolerance(share: float) -> str:
    """A relative half-width in per cent: ``4%``, ``0.4%``; ``>100%`` for a figure not distinguishable from 0."""
    if share > 1:
        return ">100%"
    return f"{100 * share:.{1 if share < 0.01 else 0}f}%"
