"""Conclusions from the curves, as text: SLO picks, crossovers, the breakdown of the TTFT, cost."""

from __future__ import annotations

from collections.abc import Sequence

from pdlab.analysis.comparable import COMPARED_LOADS, Group, groups
from pdlab.analysis.crossovers import Crossovers, Takeover, crossovers
from pdlab.analysis.curves import Curve, ThroughputMetric, View, of_point
from pdlab.analysis.goodput import Capacity, Pick, goodput_at, share_at
from pdlab.analysis.intervals import Interval
from pdlab.analysis.ttft_breakdown import PARTS
from pdlab.core import text
from pdlab.core.bounds import Bounds
from pdlab.core.text import listed, plain
from pdlab.core.workload import LoadKind
from pdlab.report import tables
from pdlab.report.verdicts import LOOPS, SERVED, bracket, lead_factor
from pdlab.results.slo import bounds_text

HOW = {"requests": "requests counted", "percentiles": "each bound at its percentile", "search": "search"}


def slo_text(pick: Pick, curves: Sequence[Curve], view: View) -> str:
    """Table of capacities, and of levels where requests are known."""
    of = "" if pick.group is None else f", {pick.group}"
    paragraphs = [f"Within {bounds_text(pick.slo)}: {SERVED[pick.loop][0]}{of}"]
    members = {*(each.label for each in pick.capacities), *pick.missed, *pick.unknown, *pick.elsewhere}
    curves = [curve for curve in curves if curve.label in members or curve.published is not None]
    if pick.capacities:
        paragraphs[0] += "\n" + _capacities(pick, curves, view)
    if levels := _levels(pick, curves, view):
        paragraphs.append(f"By level (share of requests within the SLO; requests/s within it)\n{levels}")
    return "\n\n".join(paragraphs)


def _capacities(pick: Pick, curves: Sequence[Curve], view: View) -> str:
    per = tables.node_name(curves, view)
    head = [
        "curve",
        f"{view.throughput_metric} tok/s per {per}",
        f"requests/s per {tables.unit(curves)}",
        "the best is",
    ]
    head += ["measured by"]
    rows = []
    for capacity, ranked in zip(pick.capacities, pick.ranking, strict=True):
        ahead = ranked.best_over_it
        lead = "" if ahead is None else lead_factor(ahead)
        rows.append(
            [
                capacity.label,
                _capacity(capacity, view),
                tables.figure(capacity.requests_per_gpu_s, view.confidence),
                lead + ("" if ahead is None or ahead.verdict == "better" else ", not distinguishable"),
                f"search: {bracket(capacity)}" if capacity.searches else HOW[capacity.how],
            ]
        )
    return text.table(head, rows, left=(0, 3, 4))


def _capacity(each: Capacity, view: View) -> str:
    return f"{'>= ' if each.capped else ''}{tables.figure(each.throughput, view.confidence)}"


def _levels(pick: Pick, curves: Sequence[Curve], view: View) -> str | None:
    slo = pick.slo
    unit = tables.unit(curves)
    rows = []
    for curve in curves:
        for point in curve.points:
            share, rate = share_at(point, slo), goodput_at(point, slo)
            if (point.kind == "concurrency") != (pick.loop == "closed"):
                continue
            if share is None or rate is None:
                continue
            rows.append(
                [
                    curve.label,
                    tables.load_cell(point),
                    f"{100 * share.value:.1f} %{_range(share.interval(view.confidence), 100, top=100)}",
                    tables.figure(rate, view.confidence),
                    tables.figure(rate.scaled(1 / curve.gpus.counted(view.count)), view.confidence),
                ]
            )
    head = ["curve", "load", "share within", "good requests/s", f"good requests/s per {unit}"]
    return text.table(head, rows, left=(0,)) if rows else None


def _range(interval: Interval | None, factor: float, top: float) -> str:
    if interval is None:
        return ""
    return f" ({factor * interval.low:.1f} to {min(top, factor * interval.high):.1f})"


def crossover_text(curves: Sequence[Curve], view: View) -> str | None:
    """The best configuration by throughput, with the interval of each change, for each kind of load by itself; None
    without two comparable curves of one kind."""
    return "\n\n".join(text for group in groups(curves, view) for text in _group_crossovers(group, view)) or None


def _group_crossovers(group: Group, view: View) -> list[str]:
    curves = group.curves
    kinds = [kind for kind in COMPARED_LOADS if any(kind in curve.lines() for curve in curves)]
    by_kind = {kind: crossovers([_of_kind(curve, kind) for curve in curves], view) for kind in kinds}
    of = "" if group.name is None else f", {group.name}"
    return [
        _crossovers(comparison, curves, view, (f", {LOOPS[kind]}" if len(kinds) > 1 else "") + of)
        for kind, comparison in by_kind.items()
        if comparison is not None
    ]


def _of_kind(curve: Curve, kind: LoadKind) -> Curve:
    return curve.model_copy(update={"points": tuple(curve.lines().get(kind, []))})


def _crossovers(comparison: Crossovers, curves: Sequence[Curve], view: View, of: str) -> str:
    takeovers = {takeover.throughput: takeover for takeover in comparison.takeovers}
    rows = [
        [
            f"{plain(reign.low)} to {plain(reign.high)}",
            reign.label,
            _taking_over(takeovers.get(reign.low), view),
            listed(reign.rivals) if reign.rivals else "",
        ]
        for reign in comparison.reigns
    ]
    best = "lowest" if view.lower_is_better else "highest"
    per = tables.node_name(curves, view)
    latency, rate = f"{best} {view.statistic} {view.latency_name}", f"{view.throughput_metric} tokens/s per {per}"
    title = f"Best by throughput{of}: {latency}, {rate}"
    head = [
        "throughput",
        "best",
        f"takes over ({100 * view.confidence:g} % interval)",
        "not distinguishable over most of it",
    ]
    return f"{title}\n{text.table(head, rows, left=(0, 1, 2, 3))}"


def _taking_over(change: Takeover | None, view: View) -> str:
    if change is None:
        return ""
    if change.kind == "ends":
        return f"{change.before} was measured up to here"
    low = "?" if change.low is None else plain(change.low)
    high = "?" if change.high is None else plain(change.high)
    return f"from {change.before} at {plain(change.throughput)} ({low} to {high})" + (
        "" if change.clear else ", not clear"
    )


def split_text(curves: Sequence[Curve]) -> str | None:
    """The breakdown of the mean TTFT, in ms; None without engine metrics."""
    rows = []
    for curve in curves:
        for (_, value), breakdown in sorted(curve.splits.items()):
            cells = [
                _range_text(part.low_s, part.high_s) if (part := getattr(breakdown, name)) else "-" for name in PARTS
            ]
            rest_cell = _range_text(breakdown.rest_low_s, breakdown.rest_high_s)
            rows.append([curve.label, f"{value:g}", text.number(1000 * breakdown.ttft_s), *cells, rest_cell])
    if not rows:
        return None
    head = ["prefill engine", "its queue", "its prefill", "decode engine", "KV transfer", "its queue", "its first step"]
    title = (
        "Breakdown of the mean TTFT, whole run, in ms (engines' own metrics, ranges if Ray keeps only the buckets of "
        "a histogram; rest: front end, network, streaming)"
    )
    return f"{title}\n{text.table(['curve', 'load', 'TTFT mean', *head, 'rest'], rows, left=(0,))}"


def _range_text(low_s: float | None, high_s: float | None) -> str:
    """In ms: a figure, or the ends between which it is."""
    low, high = (None if end is None else text.number(1000 * end) for end in (low_s, high_s))
    if low == high:
        return low or "-"
    if high is None:
        return f"> {low}"
    return f"< {high}" if low is None or low_s == 0 else f"{low} to {high}"


def cost_text(curves: Sequence[Curve], view: View, price_per_gpu_hour: float, at: Sequence[Bounds] = ()) -> str:
    """Cost per million tokens by level; the cheapest valid level within each of ``at`` is marked: without a bound it is
    always one of those at which users wait longest."""
    kinds: tuple[ThroughputMetric, ...] = ("output", "input", "total")
    rows, values, group_numbers = [], [], []
    within: list[list[bool]] = []
    number = {curve.label: i for i, group in enumerate(groups(curves, view)) for curve in group.curves}
    for curve in curves:
        for point in curve.points:
            costs = [of_point(curve, point, kind, price_per_gpu_hour, view.count) for kind in kinds]
            rows.append(
                [
                    curve.label,
                    tables.load_cell(point),
                    tables.figure(point.latency_estimate(view), view.confidence),
                    *(tables.figure(cost, view.confidence) for cost in costs),
                ]
            )
            ranked = point.valid and curve.published is None
            group_numbers.append(number.get(curve.label))
            values.append(costs[kinds.index(view.throughput_metric)].value)
            within.append([ranked and bounds.hold(point) for bounds in at])
    head = ["curve", "load", f"{view.latency_name}, {view.latency_unit}", *(f"per M {kind} tokens" for kind in kinds)]
    for column, bounds in enumerate(at):
        cheapest: dict[int | None, float] = {}
        for its, value, held in zip(group_numbers, values, within, strict=True):
            if held[column]:
                cheapest[its] = min(value, cheapest.get(its, value))
        for row, its, value, held in zip(rows, group_numbers, values, within, strict=True):
            row.append("*" if held[column] and value == cheapest[its] else "")
        head.append(f"lowest at {bounds.label}")
    on_gpus = any(curve.gpus.device == "gpu" for curve in curves)
    of = "the whole deployment" if not on_gpus else "whole nodes" if view.count == "nodes" else "the GPUs used"
    marks = f"; *: lowest of the {view.throughput_metric} tokens within the bounds" if at else ""
    title = f"Cost at {price_per_gpu_hour:g} per {tables.unit(curves)} hour (paid for {of}{marks})"
    return f"{title}\n{text.table(head, rows, left=(0,))}"
