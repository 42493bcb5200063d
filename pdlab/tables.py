"""Curves as text: tables raw and per node, notes on what the figures are, and the plain reading."""

from __future__ import annotations

from collections.abc import Sequence

from pdlab.analysis import Curve, Point, View
from pdlab.compare import Reading, frontier, reading

Row = Sequence[str]


def render(curves: Sequence[Curve], view: View) -> str:
    """Every table and note, as printed; ends without a newline."""
    parts = [
        _experiments(curves),
        _raw(curves, view),
        _per_node(curves, view),
        *(["\n".join(lines)] if (lines := notes(curves)) else []),
    ]
    return "\n\n".join(parts)


def sentence(curves: Sequence[Curve], view: View) -> str:
    """One plain sentence: who gives most at a common latency, or why nobody can be named."""
    found = reading(curves, view)
    if found is None:
        return "No valid level to compare."
    if reason := incomparable(curves):
        return f"No winner can be named: {reason}."
    sizes = sorted({curve.gpus.total for curve in curves})
    if not view.normalized and len(sizes) > 1:
        counts = ", ".join(map(str, sizes))
        return (
            f"No winner can be named: the deployments have different sizes ({counts} {units(curves)}); normalise them."
        )
    return _say(found, curves, view)


def notes(curves: Sequence[Curve]) -> list[str]:
    """What a reader must know before comparing: windows, repeats, workloads, invalid levels."""
    points = [point for curve in curves for point in curve.points]
    steady = sum(point.window == "steady" for point in points)
    if steady == len(points):
        window = "Figures: steady window (ramp-up and drain cut off)."
    elif steady == 0:
        window = "Figures: whole run, ramp-up and drain included (no steady window is known)."
    else:
        window = f"Figures: steady window in {steady} of {len(points)} levels, whole run in the others."
    lines = [window]
    if all(point.repeats == 1 for point in points):
        lines.append("One repeat: small differences are not meaningful.")
    if reason := incomparable(curves):
        lines.append(f"{reason[0].upper()}{reason[1:]}: not comparable.")
    return lines + invalid_notes(curves)


def incomparable(curves: Sequence[Curve]) -> str | None:
    """Why these experiments do not measure the same thing; None when they do."""
    workloads = {curve.workload for curve in curves}
    if len(workloads) > 1:
        return f"the experiments have different workloads ({', '.join(sorted(workloads))}; input:output tokens)"
    if len({curve.gpus.device for curve in curves}) > 1:
        return "some experiments ran on GPUs and some on CPU engine ranks"
    return None


def invalid_notes(curves: Sequence[Curve]) -> list[str]:
    """One line for each level that failed a check, wholly or in some repeats."""
    lines = []
    for curve in curves:
        for point in curve.points:
            if not point.reasons:
                continue
            what = (
                "not valid"
                if not point.valid
                else f"{point.excluded} of {point.repeats + point.excluded} repeats left out"
            )
            lines.append(f"x {curve.label} at {load_name(point)}: {what}: {'; '.join(point.reasons)}")
    return lines


def load_name(point: Point) -> str:
    return f"{point.value:g} requests/s" if point.kind == "rate" else f"concurrency {point.value:g}"


def unit(curves: Sequence[Curve]) -> str:
    """What an experiment's size is counted in: GPU, or engine rank on a CPU cluster."""
    return " or ".join(dict.fromkeys(curve.gpus.unit for curve in curves))


def units(curves: Sequence[Curve]) -> str:
    return " or ".join(f"{curve_unit}s" for curve_unit in dict.fromkeys(c.gpus.unit for c in curves))


def node_name(curves: Sequence[Curve], view: View) -> str:
    """What throughput is given per: ``node (8 GPUs)``, ``8 engine ranks``, ``whole deployment``."""
    if not view.normalized:
        return "whole deployment"
    size, kind = view.gpus_per_node, unit(curves) if view.gpus_per_node == 1 else units(curves)
    if all(curve.gpus.device == "cpu" for curve in curves):
        return f"{size} {kind}"
    return f"node ({size} {kind})"


def number(value: float | None) -> str:
    """As many decimals as a measured figure deserves; ``-`` for what is not known."""
    if value is None:
        return "-"
    size = abs(value)
    return f"{value:.{3 if size < 1 else 2 if size < 10 else 1 if size < 1000 else 0}f}"


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
    head = ["curve", "load", "repeats", *(f"{m} {s}" for m in ("TTFT", "TPOT", "E2EL") for s in stats)]
    head += ["requests/s", "input tok/s", "output tok/s", "total tok/s", "window"]
    rows = []
    for curve in curves:
        for point in curve.points:
            rows.append(
                [
                    curve.label,
                    _load(point),
                    str(point.repeats),
                    *(number(point.ms(metric, stat)) for metric in ("ttft", "tpot", "e2el") for stat in stats),
                    number(point.requests_per_s),
                    number(point.input_tokens_per_s),
                    number(point.output_tokens_per_s),
                    number(point.tokens_per_s("total")),
                    point.window,
                ]
            )
    return "Raw, whole deployment (latencies in ms; x: not valid)\n" + table(*_known(head, rows), left=(0,))


def _per_node(curves: Sequence[Curve], view: View) -> str:
    per_node = view.model_copy(update={"normalized": True})
    best = {(id(spot.curve), id(spot.point)) for spot in frontier(curves, per_node)}
    one = unit(curves)
    head = ["curve", "load", f"{view.latency_name}, {view.latency_unit}", "requests/s", "input tok/s", "output tok/s"]
    head += ["total tok/s", f"output tok/s per {one}", f"input tok/s per prefill {one}"]
    head += [f"output tok/s per decode {one}", "Pareto"]
    rows = []
    for curve in curves:
        for point in curve.points:
            factor, gpus = curve.scale(per_node), curve.gpus
            rows.append(
                [
                    curve.label,
                    _load(point),
                    number(point.latency(view)),
                    number(point.requests_per_s * factor),
                    number(point.input_tokens_per_s * factor),
                    number(point.output_tokens_per_s * factor),
                    number(point.tokens_per_s("total") * factor),
                    number(point.output_tokens_per_s / gpus.total),
                    number(point.input_tokens_per_s / gpus.prefill if gpus.prefill else None),
                    number(point.output_tokens_per_s / gpus.decode if gpus.decode else None),
                    "*" if (id(curve), id(point)) in best else "",
                ]
            )
    legend = f"latency: {view.statistic}; *: on the Pareto frontier of {view.throughput_metric} tokens/s; x: not valid"
    return f"Per {node_name(curves, per_node)} ({legend})\n" + table(*_known(head, rows), left=(0,))


def _known(head: Row, rows: Sequence[Row]) -> tuple[Row, list[Row]]:
    """The table without the columns in which nothing is known."""
    kept = [i for i in range(len(head)) if any(row[i] != "-" for row in rows)]
    return [head[i] for i in kept], [[row[i] for i in kept] for row in rows]


def _load(point: Point) -> str:
    return point.load + ("" if point.valid else " x")


def table(head: Row, rows: Sequence[Row], left: Sequence[int] = ()) -> str:
    """Aligned columns under a rule; the columns of ``left`` are left-aligned, the others right."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]

    def line(row: Row) -> str:
        cells = (
            cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join(cells).rstrip()

    return "\n".join([line(head), "  ".join("-" * width for width in widths), *(line(row) for row in rows)])


def _say(found: Reading, curves: Sequence[Curve], view: View) -> str:
    sign = "<=" if view.lower_is_better else ">="
    statistic = {"mean": "mean", "p50": "median"}.get(view.statistic, view.statistic)
    where = f"At {statistic} {view.latency_name} {sign} {_plain(found.bound)} {view.latency_unit}"
    rate = f"{view.throughput_metric} tokens/s per {node_name(curves, view)}"
    if not view.normalized:
        rate = f"{view.throughput_metric} tokens/s, whole deployment"
    (best, most), *others = found.ranking
    allowed = f"{found.noise * 100:.2g} %"
    doubt = (
        f"one repeat: differences below {allowed} are not meaningful"
        if found.single_repeat
        else f"repeats differ by up to {allowed}"
    )
    if not others:
        text = f"{where}, {best} gives about {_plain(most)} {rate}"
        text += "; it is the only one that is that fast" if found.missed else ""
    elif len(found.tied) > 1:
        tied = [f"{best} (about {_plain(most)} {rate})", *(label for label in found.tied if label != best)]
        text = f"{where} no winner can be named: {_list(tied)} are too close ({doubt})"
    else:
        second, less = others[0]
        ahead = f"{(most / less - 1) * 100:.0f} % above" if less else "ahead of"
        text = f"{where} the best is {best} with about {_plain(most)} {rate}, {ahead} {second} ({doubt})"
    if found.missed and others:
        text += f"; not reached by {_list(found.missed)}"
    capped = [label for label in found.capped if label != best]
    if capped:
        text += f"; {_list(capped)} might give more: nothing was measured at higher load"
    return text + "."


def _plain(value: float) -> str:
    return f"{float(f'{value:.3g}'):,g}" if value < 1e5 else f"{value:,.0f}"


def _list(labels: Sequence[str]) -> str:
    if len(labels) > 4:
        return f"{', '.join(labels[:3])} and {len(labels) - 3} others"
    return " and ".join(filter(None, [", ".join(labels[:-1]), labels[-1]]))
