"""The figures of a report's plots, as ``report.js`` reads them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from pdlab.analysis.comparable import groups, workloads_text
from pdlab.analysis.curves import METRICS, Curve, Point, Rate
from pdlab.analysis.view import View
from pdlab.report import tables
from pdlab.report.load_axes import LOAD_AXES
from pdlab.report.scales import LOGARITHMIC, SPAN
from pdlab.report.style import styles, text_color

RATES: tuple[Rate, ...] = ("requests", "input", "output", "total")
STATISTICS = ("mean", "p50", "p90", "p95", "p99")


def figures(
    curves: Sequence[Curve], view: View, *, log_latency: bool, chosen: Collection[str] | None = None
) -> dict[str, Any]:
    """All that the script draws, as plain values; its first view is ``view``; ``chosen``: see `styles`."""
    known_statistics = {s for c in curves for p in c.points for values in p.latency_ms.values() for s in values}
    group_of = _groups(curves, view)
    return {
        "view": {
            "latency": "interactivity" if view.use_interactivity else view.latency_mode,
            "chunk": view.chunk_size,
            "stat": view.statistic,
            "rate": view.throughput_metric,
            "per": ("gpu" if view.gpus_per_node == 1 else "node") if view.normalized else "whole",
            "nodeGpus": view.gpus_per_node,
            "log": log_latency,
            "span": SPAN,
            "logName": LOGARITHMIC,
        },
        "unit": tables.unit(curves) if view.role == "all" else f"{view.role} {tables.unit(curves)}",
        "node": tables.node_name(curves, view.model_copy(update={"normalized": True})),
        "loads": {kind: axis._asdict() for kind, axis in LOAD_AXES.items()},
        "stats": [stat for stat in STATISTICS if stat in known_statistics],
        "curves": [
            {
                "label": curve.label,
                "name": curve.name,
                "family": style.family,
                "rank": style.rank,
                "color": style.color,
                "ink": text_color(style.color),
                "marker": style.marker,
                **({"quiet": True} if style.quiet else {}),
                "dashes": style.dashes,
                "gpus": curve.counted(view) if view.normalized else curve.gpus.counted(view.count),
                "published": curve.published is not None,
                "device": curve.gpus.device,
                "group": group_of[curve.label],
                "facts": _size(curve),
                "points": [_point(point, view.confidence) for point in curve.points],
            }
            for curve, style in zip(curves, styles(curves, chosen), strict=True)
        ],
    }


def _groups(curves: Sequence[Curve], view: View) -> dict[str, str]:
    """Label -> name of the curves that it may be compared with; those of published tables have their workload's."""
    named = {
        curve.label: group.name or workloads_text(group.curves)
        for group in groups(curves, view.model_copy(update={"normalized": True}))
        for curve in group.curves
    }
    of_workload = {curve.workload: named[curve.label] for curve in curves if curve.label in named}
    return {curve.label: named.get(curve.label) or of_workload.get(curve.workload, curve.workload) for curve in curves}


def _size(curve: Curve) -> str:
    gpus = curve.gpus
    unit = gpus.unit + ("" if gpus.total == 1 else "s")
    roles = f" ({gpus.prefill} prefill, {gpus.decode} decode)" if gpus.prefill else ""
    return f"{gpus.total} {unit}{roles}, {curve.workload} tokens"


def _point(point: Point, confidence: float) -> dict[str, Any]:
    """``l``: metric -> statistic -> ms; ``r``: rates per second, whole deployment; ``li``, ``ri``: their intervals."""
    rates = {rate: point.rate_estimate(rate) for rate in RATES}
    latencies = {m: {s: point.ms_estimate(m, s) for s in STATISTICS if point.ms(m, s) is not None} for m in METRICS}
    return {
        "k": point.kind,
        "v": point.value,
        "ok": point.valid,
        "why": point.reasons,
        "n": point.repeats,
        "x": point.excluded,
        "w": point.window,
        "r": {rate: _short(estimate.value) for rate, estimate in rates.items()},
        "ri": _intervals(rates, confidence),
        "l": {m: {s: _short(e.value) for s, e in known.items() if e} for m, known in latencies.items() if known},
        "li": {m: widths for m, known in latencies.items() if (widths := _intervals(known, confidence))},
    }


def _intervals(estimates: Any, confidence: float) -> dict[str, tuple[float, float]]:
    intervals = {name: estimate.interval(confidence) for name, estimate in estimates.items()}
    return {
        name: (_short(interval.low), _short(interval.high))
        for name, interval in intervals.items()
        if interval is not None
    }


def _short(value: float) -> float:
    """Six digits: more than anything here is worth, and half the bytes."""
    return float(f"{value:.6g}")
