"""Curves as text: tables raw and per node, and notes on the figures."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pdlab.analysis.comparable import incomparable, length_notes
from pdlab.analysis.curves import Curve, Point, Rate, own
from pdlab.analysis.intervals import Estimate, requests_for
from pdlab.analysis.ranking import FrontierPoint, frontier_points, level_key, order_changes
from pdlab.analysis.view import View
from pdlab.core.bounds import Metric
from pdlab.core.gpu_count import other_count
from pdlab.core.text import Row, listed, number, table


def render(curves: Sequence[Curve], view: View) -> str:
    """Every table and note, as printed; ends without a newline."""
    sections = [
        _experiments(curves),
        _raw(curves, view),
        _per_node(curves, view),
        *(["\n".join(lines)] if (lines := [*notes(curves, view), *tail_notes(curves)]) else []),
    ]
    return "\n\n".join(sections)


def notes(curves: Sequence[Curve], view: View, *, exclusions: bool = True) -> list[str]:
    """Notes on a comparison: windows, repeats, workloads, invalid levels. ``exclusions``: also why repeats are left
    out."""
    points = [point for curve in own(curves) for point in curve.points]
    steady = sum(point.window == "steady" for point in points)
    if steady == len(points):
        window = "Figures: steady window (ramp-up and drain cut off)."
    elif steady == 0:
        window = "Figures: whole run, ramp-up and drain included (the steady window is unknown)."
    else:
        window = f"Figures: steady window in {steady} of {len(points)} levels, whole run in the others."
    lines = [window]
    lines += _repeat_notes(points, 100 * view.confidence)
    lines += _size_notes(curves, view)
    if reason := incomparable(curves, view):
        lines.append(f"{reason[0].upper()}{reason[1:]}: those are not compared.")
    lines += length_notes(curves, view)
    if published := [curve.label for curve in curves if curve.published is not None]:
        lines.append(f"Published elsewhere, shown and not ranked: {'; '.join(published)}.")
    return [
        *_rehearsal_notes(own(curves)),
        *lines,
        *_fresh_notes(own(curves)),
        *invalid_notes(curves, exclusions=exclusions),
    ]


def _repeat_notes(points: Sequence[Point], percent: float) -> list[str]:
    repeats = sorted({point.repeats for point in points})
    lines = []
    if repeats[-1] > 1:
        many = f"{repeats[0]} to {repeats[-1]}" if len(repeats) > 1 else str(repeats[0])
        lines.append(
            f"± and bands: {percent:g} % interval of the mean over {many} repeats (Student's t; each level's scatter "
            "moderated by that of all levels shown)."
        )
    if repeats[0] == 1:
        lines.append("One repeat: small differences are not meaningful.")
        if any(p.repeats == 1 and p.rate_estimate("requests").basis for p in points):
            lines.append(
                f"(±) and bands: {percent:g} % interval of one repeat from the scatter of its requests; the "
                "scatter between starts of the deployment is not included."
            )
    return lines


def _rehearsal_notes(curves: Sequence[Curve]) -> list[str]:
    """One line on all curves whose engines were simulated."""
    names = [curve.label for curve in curves if curve.rehearsed]
    if not names:
        return []
    return [
        "Rehearsed, not measured: engines were simulated in slow time, requests, router and ingress were real "
        f"(hollow markers): {listed(names)}."
    ]


def _fresh_notes(curves: Sequence[Curve]) -> list[str]:
    """One line on all levels that were measured on fresh KV pools."""
    places = []
    for curve in curves:
        fresh = [point.load for point in curve.points if point.fresh]
        if fresh:
            places.append(f"{curve.label} ({'all levels' if len(fresh) == len(curve.points) else ', '.join(fresh)})")
    if not places:
        return []
    return [
        f"On fresh KV pools, whose blocks lie in a row as they no longer do after some minutes: {'; '.join(places)}."
    ]


def tail_notes(curves: Sequence[Curve]) -> list[str]:
    """What a percentile takes, where some repeats had too few requests for theirs."""
    points = [point for curve in own(curves) for point in curve.points]
    had = dict.fromkeys(s for p in points for each in p.samples for values in each.latency_ms.values() for s in values)
    scarce = sorted(statistic for statistic in had if not all(point.carries(statistic) for point in points))
    if not scarce:
        return []
    needs = listed([f"{statistic} takes {requests_for(statistic)}" for statistic in scarce])
    return [f"Percentiles of too few requests are left out (-): {needs} in every repeat of a level."]


def _size_notes(curves: Sequence[Curve], view: View) -> list[str]:
    """Which deployments leave GPUs of their nodes that no copy of them can use, and how they are counted."""
    partial = [c for c in own(curves) if c.gpus.whole is not None and c.gpus.whole > c.gpus.total]
    if not partial or not view.normalized or view.role != "all":
        return []
    names = listed([f"{c.label} ({c.gpus.total} of {c.gpus.whole:.3g})" for c in partial])
    if view.count == "used":
        lines = [f"Per node counts the GPUs used. Nodes are rented whole, and these leave GPUs idle: {names}."]
    else:
        lines = [f"Per node counts whole nodes, of which these leave GPUs idle: {names}."]
    other = other_count(view.count)
    swapped = [f"{lower.label} is above {higher.label}" for higher, lower in order_changes(curves, view)]
    if swapped:
        lines.append(f"With --count-gpus {other} the order by highest throughput differs: {listed(swapped)}.")
    return lines


def invalid_notes(curves: Sequence[Curve], *, exclusions: bool = True) -> list[str]:
    """One line for each level that failed a check, wholly or in some repeats (only with ``exclusions``) or when it was
    first measured."""
    lines = []
    for curve in curves:
        for point in curve.points:
            place, first_reasons = f"{curve.label} at {load_name(point)}", "; ".join(point.first_reasons)
            if point.reasons and not exclusions:
                continue
            if point.reasons:
                outcome = (
                    "not valid"
                    if not point.valid
                    else f"{point.excluded} of {point.repeats + point.excluded} repeats left out"
                )
                outcome += ", measured twice" if first_reasons else ""
                lines.append(
                    f"x {place}: {outcome}: {'; '.join(point.reasons)}"
                    + (f" (first: {first_reasons})" if first_reasons else "")
                )
            elif first_reasons:
                lines.append(f"{place}: measured twice, the first result was not valid: {first_reasons}")
    return lines


def load_name(point: Point) -> str:
    names = {"concurrency": "concurrency {:g}", "rate": "{:g} requests/s", "ramp": "a ramp to {:g} requests/s"}
    return names[point.kind].format(point.value)


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
    if estimate is None or not math.isfinite(estimate.value):  # nothing was served: no token has a price
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


def _experiments(curves: Sequence[Curve]) -> str:
    head = ["curve", "folder", f"{units(curves)}", "prefill", "decode", "input:output", "levels"]
    rows = [
        [
            curve.label,
            curve.name,
            str(curve.gpus.total),
            str(curve.gpus.prefill or "-"),
            str(curve.gpus.decode or "-"),
            curve.workload,
            str(len(curve.points)),
        ]
        for curve in curves
    ]
    return "Experiments\n" + table(head, rows, left=(0, 1, 5))


def _raw(curves: Sequence[Curve], view: View) -> str:
    stats = list(dict.fromkeys([view.statistic, "p99"]))
    latencies: tuple[Metric, ...] = ("ttft", "tpot", "e2el")
    rates: tuple[Rate, ...] = ("requests", "input", "output", "total")
    head = ["curve", "load", "repeats", *(f"{m.upper()} {s}" for m in latencies for s in stats)]
    head += ["requests/s", "input tok/s", "output tok/s", "total tok/s", "window"]
    rows = []
    for curve in curves:
        for point in curve.points:
            rows.append(
                [
                    curve.label,
                    load_cell(point),
                    str(point.repeats),
                    *(figure(point.ms_estimate(m, stat), view.confidence) for m in latencies for stat in stats),
                    *(figure(point.rate_estimate(rate), view.confidence) for rate in rates),
                    point.window,
                ]
            )
    return "Raw, whole deployment (latencies in ms; x: not valid)\n" + table(
        *_informative_columns(head, rows), left=(0,)
    )


def _per_node(curves: Sequence[Curve], view: View) -> str:
    per_node = view.model_copy(update={"normalized": True})
    with_role = [curve for curve in curves if curve.has_role(per_node)]
    frontier = {frontier_point.spot.key: frontier_point for frontier_point in frontier_points(with_role, per_node)}
    gpu_unit = unit(curves)
    rates: tuple[Rate, ...] = ("requests", "input", "output", "total")
    head = ["curve", "load", f"{view.latency_name}, {view.latency_unit}", "requests/s", "input tok/s", "output tok/s"]
    head += ["total tok/s", f"output tok/s per {gpu_unit}", f"input tok/s per prefill {gpu_unit}"]
    head += [f"output tok/s per decode {gpu_unit}", "Pareto"]
    rows = []
    for curve in with_role:
        for point in curve.points:
            factor, gpus = curve.scale(per_node), curve.gpus
            output = point.output_tokens_per_s

            def rate(metric: Rate, point: Point = point, factor: float = factor) -> str:
                return figure(point.rate_estimate(metric).scaled(factor), view.confidence)

            rows.append(
                [
                    curve.label,
                    load_cell(point),
                    figure(point.latency_estimate(view), view.confidence),
                    *(rate(metric) for metric in rates),
                    number(output / gpus.counted(view.count)),
                    number(point.input_tokens_per_s / gpus.prefill if gpus.prefill else None),
                    number(output / gpus.decode if gpus.decode else None),
                    _on_frontier(frontier.get(level_key(curve, point))),
                ]
            )
    several = len({point.kind for curve in with_role for point in curve.points}) > 1
    of = f"{view.throughput_metric} tokens/s{' among levels of its kind of load' if several else ''}"
    legend = f"latency: {view.statistic}; *: on the Pareto frontier of {of}; x: not valid"
    if any(frontier_point.share is not None for frontier_point in frontier.values()):
        legend += "; %: share of bootstrap draws with the point on the frontier"
    return f"Per {node_name(curves, per_node)} ({legend})\n" + table(*_informative_columns(head, rows), left=(0,))


def _on_frontier(frontier_point: FrontierPoint | None) -> str:
    """``*`` on the frontier; with repeats also in which share of the draws: ``* 93%``, or ``12%`` off it."""
    if frontier_point is None or frontier_point.share is None:
        return "*" if frontier_point and frontier_point.on_it else ""
    share = "" if frontier_point.share < 0.05 else f"{100 * frontier_point.share:.0f}%"
    return f"* {share}".rstrip() if frontier_point.on_it else share


def _informative_columns(head: Row, rows: Sequence[Row]) -> tuple[Row, list[Row]]:
    """The table without columns that are unknown throughout."""
    known_columns = [i for i in range(len(head)) if any(row[i] != "-" for row in rows)]
    return [head[i] for i in known_columns], [[row[i] for i in known_columns] for row in rows]


def load_cell(point: Point) -> str:
    """The load, with an x where the level is not valid."""
    return point.load + ("" if point.valid else " x")
