"""Curves as one picture: TPOT and TTFT against load, and throughput against latency.

The only module that knows matplotlib, and it is imported when something is drawn.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pdlab.analysis.comparable import groups, models_text, workloads_text
from pdlab.analysis.curves import Curve, Point, configuration, own, shared_settings
from pdlab.analysis.intervals import Estimate
from pdlab.analysis.ranking import Spot, frontiers, spots
from pdlab.analysis.view import View
from pdlab.core import text as core_text
from pdlab.core.bounds import Metric, Statistic
from pdlab.core.deployment import Pool
from pdlab.core.workload import LoadKind
from pdlab.report import tables
from pdlab.report.highlight import MOST_COLOURED, highlighted, panels
from pdlab.report.label_layout import Box, along, around, fit
from pdlab.report.load_axes import LOAD_AXES
from pdlab.report.scales import (
    LOGARITHMIC,
    latency_is_logarithmic,
    loads_are_logarithmic,
    logarithmic,
    rates_are_logarithmic,
)
from pdlab.report.style import CHOSEN, STYLE_FILE, Style, save, styles, text_color
from pdlab.results.curve_names import PLAIN

# All sizes in inches.
LOAD_PANEL = (3.55, 2.75)
MAIN_PANEL = (8.3, 6.35)
FACET_PANEL = (6.6, 4.6)
FACET_TITLE = 0.45
MARGIN_LEFT, MARGIN_RIGHT, BETWEEN, ABOVE = 0.85, 0.25, 0.95, 1.15
AXIS_LABELS = 0.62
LEGEND_ROW, FOOTNOTE_ROW, CHAR = 0.21, 0.19, 0.082
LEGEND_ROWS = 6
MAX_FOOTNOTES = 12
TITLE_SIZE, LEAST_TITLE_SIZE = 14.0, 9.0  # points
TAIL: Statistic = "p99"

INK, SOFT, FRONTIER = "#222222", "#666666", "#fbeeb0"


class Band(NamedTuple):
    """How far a predicted curve may be off: relative half-widths of its latencies."""

    tpot: float
    ttft: float

    def sides(
        self, positions: Sequence[tuple[float, float, Point]], metric: Metric
    ) -> list[tuple[float, float, float]]:
        """(other axis, low, high) around (other axis, latency, point); higher is a factor, lower its inverse."""
        error = 1 + (self.tpot if metric == "tpot" else self.ttft)
        return [(abscissa, value / error, value * error) for abscissa, value, point in positions if point.valid]


class _Drawn(NamedTuple):
    """Inputs of every panel: curves, their styles, the view, the scales (None: each panel's own),
    bands by curve name."""

    curves: Sequence[Curve]
    styles: Sequence[Style]
    view: View
    log_latency: bool | None
    log_load: bool | None
    bands: Mapping[str, Band]


def draw(
    curves: Sequence[Curve],
    view: View,
    path: Path,
    *,
    log_latency: bool | None = None,
    log_load: bool | None = None,
    bands: Mapping[str, Band] | None = None,
    notes: Sequence[str] | None = None,
    remarks: Sequence[str] = (),
    best: Sequence[str] = (),
) -> None:
    """Write the picture to ``path`` (png, svg or pdf by its suffix). Raises StoreError when it cannot.

    ``bands``: of predicted curves by name, in place of those from repeats; ``notes``: footnotes in place of the
    usual ones; ``remarks``: lines above the footnotes, darker. ``best``: labels that have a colour before others do
    where the curves are too many for all to have one (`pdlab.report.highlight`). ``log_latency`` and ``log_load`` None:
    an axis is logarithmic where one curve or load would press the others together.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    drawn = _Drawn(curves, styles(curves, highlighted(curves, view, best)), view, log_latency, log_load, bands or {})
    facets = panels(curves, view)
    above = _wrapped(remarks)
    footnotes = [*above, *(_footnotes(notes) if notes is not None else usual_footnotes(curves, view))]
    if len(facets) > 1:
        _draw_facets(drawn, facets, best, path, footnotes, len(above))
        return
    kinds = [kind for kind in LOAD_AXES if any(kind in curve.lines() for curve in own(curves))]
    legend = _legend_columns(drawn)
    legend_in = LEGEND_ROW * (max(len(column) for column in legend) + 0.6)
    footnotes_in = FOOTNOTE_ROW * (len(footnotes) + 1)
    columns = [(kind, view.statistic) for kind in kinds]
    # Tails beside the medians; with two kinds of load the picture would grow too wide, the tables have them.
    if len(kinds) == 1 and view.statistic != TAIL and any(_has_tail(curve) for curve in curves):
        columns.append((kinds[0], TAIL))
    left_in = MARGIN_LEFT + len(columns) * (LOAD_PANEL[0] + BETWEEN)
    size = (
        left_in + MAIN_PANEL[0] + MARGIN_RIGHT,
        ABOVE + MAIN_PANEL[1] + AXIS_LABELS + legend_in + footnotes_in,
    )
    with plt.style.context(STYLE_FILE):
        figure = plt.figure(figsize=size)
        try:
            bottom_in = AXIS_LABELS + legend_in + footnotes_in

            def panel(x: float, y: float, width: float, height: float) -> Any:
                return figure.add_axes((x / size[0], y / size[1], width / size[0], height / size[1]))

            for i, (kind, statistic) in enumerate(columns):
                x = MARGIN_LEFT + i * (LOAD_PANEL[0] + BETWEEN)
                shown = drawn._replace(view=view.model_copy(update={"statistic": statistic}))
                _load_panel(panel(x, bottom_in + MAIN_PANEL[1] - LOAD_PANEL[1], *LOAD_PANEL), shown, kind, "tpot")
                _load_panel(panel(x, bottom_in, *LOAD_PANEL), shown, kind, "ttft")
            _main_panel(panel(left_in, bottom_in, *MAIN_PANEL), drawn)
            _legend(panel(MARGIN_LEFT, footnotes_in, size[0] - MARGIN_LEFT - MARGIN_RIGHT, legend_in), legend)
            _write_around(figure, drawn, footnotes, len(above))
            save(figure, path)
        finally:
            plt.close(figure)


def _draw_facets(
    drawn: _Drawn,
    facets: Sequence[tuple[str, tuple[Curve, ...]]],
    best: Sequence[str],
    path: Path,
    footnotes: Sequence[str],
    dark: int,
) -> None:
    """Throughput against latency in a panel for each group, two beside each other, each with a legend of its own."""
    import matplotlib.pyplot as plt

    view = drawn.view
    chosen = highlighted(drawn.curves, view, best)
    each = [drawn._replace(curves=curves, styles=styles(curves, chosen)) for _, curves in facets]
    legends = [_legend_columns(facet) for facet in each]
    legend_in = LEGEND_ROW * (max(len(column) for legend in legends for column in legend) + 0.6)
    rows = (len(facets) + 1) // 2
    row_in = FACET_TITLE + FACET_PANEL[1] + AXIS_LABELS + legend_in
    footnotes_in = FOOTNOTE_ROW * (len(footnotes) + 1)
    size = (2 * (MARGIN_LEFT + FACET_PANEL[0]) + MARGIN_RIGHT, ABOVE - FACET_TITLE + rows * row_in + footnotes_in)
    with plt.style.context(STYLE_FILE):
        figure = plt.figure(figsize=size)
        try:
            for i, ((name, _), facet, legend) in enumerate(zip(facets, each, legends, strict=True)):
                x = MARGIN_LEFT + (i % 2) * (FACET_PANEL[0] + MARGIN_LEFT)
                y = footnotes_in + (rows - 1 - i // 2) * row_in

                def panel(x: float, y: float, width: float, height: float) -> Any:
                    return figure.add_axes((x / size[0], y / size[1], width / size[0], height / size[1]))

                axes = panel(x, y + legend_in + AXIS_LABELS, *FACET_PANEL)
                _main_panel(axes, facet)
                axes.set_title(f"{name}: {core_text.counted(len(facet.curves), 'curve')}")
                _legend(panel(x, y, FACET_PANEL[0], legend_in), legend)
            _write_around(figure, drawn, footnotes, dark)
            save(figure, path)
        finally:
            plt.close(figure)


def _write_around(figure: Any, drawn: _Drawn, footnotes: Sequence[str], dark: int) -> None:
    """Title, subtitle and footnotes, of which the first ``dark`` are darker."""
    width, height = figure.get_size_inches()
    x = MARGIN_LEFT / width
    _narrowed(figure.text(x, 1 - 0.28 / height, _title(drawn), size=TITLE_SIZE, weight="bold", va="top"))
    figure.text(x, 1 - 0.56 / height, _subtitle(drawn), size=9.5, color=SOFT, va="top")
    for i, line in enumerate(footnotes):
        y = FOOTNOTE_ROW * (len(footnotes) + 1 - i - 0.6)
        look = {"color": INK, "weight": "bold"} if i < dark else {"color": SOFT}
        figure.text(x, y / height, line, size=8.2, va="top", **look)


def _has_tail(curve: Curve) -> bool:
    return any(point.ms(metric, TAIL) is not None for point in curve.points for metric in ("ttft", "tpot"))


def _load_panel(axes: Any, drawn: _Drawn, kind: LoadKind, metric: Metric) -> None:
    view = drawn.view.model_copy(
        update={"latency_mode": "token" if metric == "tpot" else "first_token", "use_interactivity": False}
    )
    values: list[float] = []
    drawn_values: list[list[float]] = []
    every: list[tuple[list[tuple[float, float, Point]], Style]] = []
    loads: set[float] = set()
    for curve, style in zip(drawn.curves, drawn.styles, strict=True):
        if curve.published is not None:  # Loads of other systems would stretch the axis.
            continue
        positions = [(p.value, ms, p) for p in curve.lines().get(kind, []) if (ms := p.latency(view)) is not None]
        if curve.name in drawn.bands:
            around_it = drawn.bands[curve.name].sides(positions, metric)
        else:
            load_intervals = [(load, e.interval(view.confidence)) for load, e in _estimates(curve, kind, view)]
            around_it = [(load, side.low, side.high) for load, side in load_intervals if side]
        around_it = [] if style.quiet else around_it
        _band(axes, style.color, [(x, high) for x, _, high in around_it], [(x, low) for x, low, _ in around_it])
        every.append((positions, style))
        values += [ms for _, ms, _ in positions]
        drawn_values.append([ms for _, ms, point in positions if point.valid])
        loads |= {load for load, _, _ in positions}
    name = metric.upper()
    statistic = {"p50": "", "mean": "mean "}.get(view.statistic, f"{view.statistic} ")
    axes.set_title(f"{name} {statistic}against {LOAD_AXES[kind].title}")
    positive = [value for value in values if value > 0]  # a logarithmic axis has no place for 0
    log = bool(positive) and (logarithmic(drawn_values) if drawn.log_latency is None else drawn.log_latency)
    for positions, style in every:
        _plot(axes, [each for each in positions if each[1] > 0 or not log], style, size=4.5)
    axes.set_ylabel(f"{name} {view.statistic}, ms" + (f" ({LOGARITHMIC})" if log else ""))
    axes.yaxis.set_label_coords(-0.16, 0.5)
    axes.set_xlabel(LOAD_AXES[kind].name)
    if not values:
        axes.text(0.5, 0.5, f"no {name} in these runs", transform=axes.transAxes, ha="center", color=SOFT)
        axes.set(xticks=[], yticks=[])
        return
    _scale(axes.yaxis, log, bool(positive) and max(positive) < 6 * min(positive))
    if log:
        axes.set_ylim(min(positive) / 1.25, max(positive) * 1.25)
    else:
        axes.set_ylim(0, max(values) * 1.08 or 1)
    log_load = loads_are_logarithmic(sorted(loads), drawn.log_load)
    if log_load:
        axes.set_xscale("log", base=2)
        axes.set_xlabel(f"{LOAD_AXES[kind].name.removesuffix(')')}; {LOGARITHMIC})")
        axes.xaxis.set_major_formatter(_plain())
    else:
        axes.set_xlim(0, max(loads) * 1.05)
    _load_ticks(axes, sorted(loads), log_load)


def _estimates(curve: Curve, kind: LoadKind, view: View) -> list[tuple[float, Estimate]]:
    """(load, latency) of the valid levels of one kind of load."""
    valid = [point for point in curve.lines().get(kind, []) if point.valid]
    return [(point.value, estimate) for point in valid if (estimate := point.latency_estimate(view))]


def _load_ticks(axes: Any, loads: list[float], log: bool) -> None:
    """Ticks at the measured loads, as many as stand apart."""
    from matplotlib.ticker import FixedLocator, NullLocator

    tick_loads: list[float] = []
    for load in reversed(loads):
        apart = not tick_loads or (tick_loads[-1] / load >= 1.25 if log else tick_loads[-1] - load >= 0.075 * loads[-1])
        if apart:
            tick_loads.append(load)
    axes.xaxis.set_major_locator(FixedLocator(tick_loads[::-1]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(_plain())


def _main_panel(axes: Any, drawn: _Drawn) -> None:
    view = drawn.view
    every = spots(drawn.curves, view)
    positive = [s for s in every if s.x > 0]  # a logarithmic axis has no place for 0
    log_x = bool(positive) and latency_is_logarithmic(drawn.curves, view, drawn.log_latency)
    every = positive if log_x else every
    for curve, style in zip(drawn.curves, drawn.styles, strict=True):
        lines = curve.lines()
        for kind, line in lines.items():
            line_points = {id(point) for point in line}
            thin = kind == "rate" and len(lines) > 1
            positions = [(s.x, s.y, s.point) for s in every if id(s.point) in line_points]
            if curve.name in drawn.bands and view.latency_mode != "chunk":
                metric: Metric = "ttft" if view.latency_mode == "first_token" else "tpot"
                sides = drawn.bands[curve.name].sides([(y, x, point) for x, y, point in positions], metric)
                _band(axes, style.color, [(x, y) for y, x, _ in sides], [(x, y) for y, _, x in sides])
            else:
                if not style.quiet:
                    _main_band(axes, curve, [point for point in line if point.valid], view, style.color)
            _plot(axes, positions, style, size=4 if thin else 6)
    best = frontiers(drawn.curves, view)
    for _, on_it in best:
        ringed = [s for s in on_it if s.x > 0 or not log_x]
        x, y = [s.x for s in ringed], [s.y for s in ringed]
        axes.plot(x, y, lw=9, color=FRONTIER, solid_joinstyle="round", zorder=1.5)
        axes.scatter(x, y, s=125, facecolors="none", edgecolors=INK, lw=1.0, zorder=4)
    per = tables.node_name(drawn.curves, view)
    axes.set_title(f"{view.throughput_metric.capitalize()} throughput against {view.latency_name}")
    scale = f", {LOGARITHMIC}" if log_x else ""
    axes.set_xlabel(f"{view.latency_name} {view.statistic}, {view.latency_unit}  ({_better(view)}{scale})")
    axes.set_ylabel(f"{view.throughput_metric} tokens/s, {'per ' if view.normalized else ''}{per}")
    xs = [s.x for s in every]
    _scale(axes.xaxis, log_x, max(xs) < 6 * min(xs))
    top = max(s.y for s in every)
    log_y = rates_are_logarithmic(drawn.curves, view)
    if log_y:
        _scale(axes.yaxis, True)
        axes.set_ylim(min(s.y for s in every if s.y > 0) / 1.2, top * 1.2)
        axes.set_ylabel(f"{axes.get_ylabel()}  ({LOGARITHMIC})")
    else:
        axes.set_ylim(0, top * 1.08 if top else 1)
    if log_x:
        axes.set_xlim(min(xs) / 1.12, max(xs) * 1.18)
    else:
        pad = 0.06 * (max(xs) - min(xs) or max(xs) or 1)
        # Room for the names at the line ends, which are at high latency, so at low interactivity.
        before, after = (1, 2) if view.lower_is_better else (3, 1)
        axes.set_xlim(max(0, min(xs) - before * pad), max(xs) + after * pad)
    axes.yaxis.set_major_formatter(_plain())
    _write_labels(axes, drawn, every, {id(s.point) for _, ringed in best for s in ringed})


def _main_band(axes: Any, curve: Curve, points: Sequence[Point], view: View, color: str) -> None:
    """Both figures have an interval: from the curve at the better end of both to that at the worse end."""
    better, worse = [], []
    for point in points:
        latency = point.latency_estimate(view)
        x = latency.interval(view.confidence) if latency else None
        y = curve.throughput_estimate(point, view).interval(view.confidence)
        # The scatter within one run does not describe the configuration: the panels at the left show it.
        if x and y and y.basis == "repeats":
            quick, slow = (x.low, x.high) if view.lower_is_better else (x.high, x.low)
            better.append((quick, y.high))
            worse.append((slow, y.low))
    _band(axes, color, better, worse)


def _band(axes: Any, color: str, upper: Sequence[tuple[float, float]], lower: Sequence[tuple[float, float]]) -> None:
    """The area between two sides of a curve, light enough that fourteen of them lie over each other."""
    if len(upper) > 1:
        axes.fill(*zip(*upper, *reversed(lower), strict=True), color=color, alpha=0.11, lw=0, zorder=1.8)


def _plot(axes: Any, positions: Sequence[tuple[float, float, Point]], style: Style, size: float) -> None:
    """A curve: line and markers through the valid points; the others hollow and crossed, off the line. A quiet one is
    thin and behind."""
    if style.quiet:
        shown = [(x, y) for x, y, point in positions if point.valid]
        if shown:
            look = {"color": style.color, "marker": style.marker, "markersize": 2.2, "lw": 0.7, "zorder": 1.9}
            axes.plot(*zip(*shown, strict=True), clip_on=False, **look)
        return
    valid = [(x, y) for x, y, point in positions if point.valid]
    invalid = [(x, y) for x, y, point in positions if not point.valid]
    look = {"color": style.color, "marker": style.marker, "markersize": size, "clip_on": False}
    if valid:
        dashes = (0, style.dashes) if style.dashes else "-"
        edge = {"mfc": "white", "mec": style.color, "mew": 1.2} if style.hollow else {"mec": "white", "mew": 0.7}
        axes.plot(*zip(*valid, strict=True), ls=dashes, lw=0.32 * size, zorder=3, **edge, **look)
    if invalid:
        hollow = {**look, "color": "none", "markersize": 1.6 * size, "mec": style.color, "mfc": "white", "mew": 1.4}
        axes.plot(*zip(*invalid, strict=True), ls="none", zorder=3.1, **hollow)
        axes.plot(*zip(*invalid, strict=True), ls="none", marker="x", ms=0.9 * size, mew=1.2, color=INK, zorder=3.2)


def _write_labels(axes: Any, drawn: _Drawn, every: Sequence[Spot], best: set[int]) -> None:
    """Names at the line ends and requests/s at the points, each where it covers nothing."""
    figure = axes.figure
    figure.canvas.draw()
    renderer, scale = figure.canvas.get_renderer(), figure.dpi / 72
    frame = axes.get_window_extent(renderer)
    inside = Box(frame.x0 + 2, frame.y0 + 2, frame.x1 + 6 * scale, frame.y1)
    where: dict[int, tuple[float, float]] = {id(s.point): tuple(axes.transData.transform((s.x, s.y))) for s in every}
    occupied = [around(where[id(s.point)], (6.5 if id(s.point) in best else 4) * scale) for s in every]
    for curve in drawn.curves:
        for line in curve.lines().values():
            occupied += along([where[id(p)] for p in line if p.valid and id(p) in where], 1.6 * scale)

    def write(text: str, point: Point, gaps: Sequence[float], **look: Any) -> None:
        note = axes.annotate(text, (0, 0), xycoords="figure pixels", annotation_clip=False, zorder=5, **look)
        extent = note.get_window_extent(renderer)
        # A name at a line's end has the line's colour and is long: near to another point it is not read as that one's.
        others = () if "weight" in look else [at for key, at in where.items() if key != id(point)]
        size = (extent.width, extent.height)
        box = fit(where[id(point)], size, occupied, inside, [gap * scale for gap in gaps], others)
        note.remove()
        if box is None:
            return
        occupied.append(Box(box.x0 - scale, box.y0 - scale, box.x1 + scale, box.y1 + scale))
        x, y = where[id(point)]
        spot = next(s for s in every if s.point is point)
        offset = ((box.x0 - x) / scale, (box.y0 - y) / scale)
        axes.annotate(text, (spot.x, spot.y), offset, textcoords="offset points", zorder=5, **look)

    for curve, style in zip(drawn.curves, drawn.styles, strict=True):
        if style.quiet:
            continue
        # One name for both kinds of load: thin and thick tell them apart.
        for line in list(curve.lines().values())[:1]:
            drawable = [p for p in line if p.valid and id(p) in where]
            if drawable:
                write(curve.label, drawable[-1], (9, 14), size=9, weight="bold", color=text_color(style.color))
    looks = {id(c): style for c, style in zip(drawn.curves, drawn.styles, strict=True)}
    spoken = [spot for spot in every if not looks[id(spot.curve)].quiet]
    for spot in sorted(spoken, key=lambda s: id(s.point) not in best):
        text = core_text.number(spot.point.requests_per_s * spot.curve.scale(drawn.view))
        write(text, spot.point, (6, 9, 13), size=7.3, color=text_color(looks[id(spot.curve)].color))
    # A grey curve has no place in the legend: its name is at the frontier, where it is on it and there is room.
    for curve in [each for each in drawn.curves if looks[id(each)].quiet]:
        for point in [p for p in curve.points if id(p) in best][-1:]:
            write(curve.label, point, (9, 14), size=7.3, color=SOFT)


def _legend_columns(drawn: _Drawn) -> list[list[tuple[str, Style | None]]]:
    """Columns of (text, style); a heading has no style. One column per family, long ones continued."""
    families: dict[str, list[tuple[str, Style]]] = {}
    for curve, style in sorted(zip(drawn.curves, drawn.styles, strict=True), key=lambda pair: pair[1].rank):
        if not style.quiet:
            families.setdefault(style.family, []).append((curve.label, style))
    quiet = [style for style in drawn.styles if style.quiet]
    if quiet:
        others = f"{core_text.counted(len(quiet), 'other curve')}, in the tables"
        families.setdefault(CHOSEN, []).append((others, quiet[0]))
    most = MOST_COLOURED + 1 if quiet else LEGEND_ROWS
    columns: list[list[tuple[str, Style | None]]] = []
    for name, entries in families.items():
        for i in range(0, len(entries), most):
            columns.append([(name if i == 0 else "", None), *entries[i : i + most]])
    return columns


def _legend(axes: Any, columns: Sequence[Sequence[tuple[str, Style | None]]]) -> None:
    """The legend as text and line samples, in inches from the top left of its own panel."""
    axes.set_axis_off()
    figure = axes.figure
    box = axes.get_position()
    width, height = box.width * figure.get_figwidth(), box.height * figure.get_figheight()
    axes.set(xlim=(0, width), ylim=(height, 0))
    x = 0.0
    natural = [0.75 + CHAR * max(len(text) for text, _ in column) for column in columns]
    shrink = min(1.0, width / sum(natural))
    for column, column_width in zip(columns, natural, strict=True):
        for row, (text, style) in enumerate(column):
            y = LEGEND_ROW * (row + 0.5)
            if style is None:
                axes.text(x, y, text, va="center", size=8.8, weight="bold", color=SOFT)
                continue
            axes.plot(
                [x + 0.04, x + 0.24, x + 0.44],
                [y] * 3,
                color=style.color,
                ls=(0, style.dashes) if style.dashes else "-",
                marker=style.marker,
                markevery=[1],
                markersize=5.5,
                mfc="white" if style.hollow else style.color,
                mec=style.color if style.hollow else "white",
                mew=1.2 if style.hollow else 0.6,
            )
            axes.text(x + 0.54, y, text, va="center", size=8.8 * max(0.75, shrink), color=INK)
        x += column_width * shrink


def usual_footnotes(curves: Sequence[Curve], view: View) -> list[str]:
    """Footnotes: the terms, and the caveats of a comparison."""
    return [*_wrapped(_glossary(curves, view)), *_footnotes(tables.notes(curves, view))]


def _glossary(curves: Sequence[Curve], view: View) -> list[str]:
    """The terms of this picture, for a reader who has not seen one before."""
    median = " p50: median." if view.statistic == "p50" else ""
    lines = [f"TTFT: time to first token. TPOT: time per output token after the first.{median}"]
    # One deployment of each kind explains the notation.
    kinds = {
        tuple(c.deployment.pools): (configuration(c.deployment), c.deployment.pools)
        for c in reversed(own(curves))
        if c.deployment
    }
    if kinds:
        names = [
            f"{label}: {' and '.join(_replicas(role, pool) for role, pool in pools.items())}"
            for label, pools in reversed(kinds.values())
        ]
        lines.append(f"{'; '.join(names)}. TP: tensor-parallel degree.")
    if ("prefill", "decode") in kinds:
        lines.append(
            "pack: the prefill and decode replicas of a pair share a node; spread: they are on different nodes."
        )
    if any(curve.gpus.device == "cpu" for curve in own(curves)):
        lines[-1] += " Engine rank: a CPU process in place of a GPU."
    return lines


def _replicas(role: str, pool: Pool) -> str:
    noun = "replica, prefill and decode" if role == "collocated" else f"{role} replica"
    return f"{pool.replicas} {noun if pool.replicas == 1 else noun.replace('replica', 'replicas')} (TP {pool.tp})"


def _footnotes(notes: Sequence[str]) -> list[str]:
    if len(notes) > MAX_FOOTNOTES:
        hidden = len(notes) - MAX_FOOTNOTES + 1
        notes = [*notes[: MAX_FOOTNOTES - 1], f"... and {hidden} more: see the tables"]
    return _wrapped(notes)


def _wrapped(notes: Sequence[str]) -> list[str]:
    return [line for note in notes for line in textwrap.wrap(note, 190, subsequent_indent="   ")]


def _narrowed(title: Any) -> None:
    """A title that fits the width of the figure: smaller, and cut where it would be too small to read."""
    figure = title.figure
    frame = figure.bbox.width - MARGIN_RIGHT * figure.dpi

    def excess() -> float:
        return float(title.get_window_extent(figure.canvas.get_renderer()).x1 / frame)

    if excess() > 1:
        title.set_size(max(LEAST_TITLE_SIZE, TITLE_SIZE / excess() ** 1.1))
    while excess() > 1:
        title.set_text(f"{title.get_text().removesuffix('...')[:-4]}...")


def _title(drawn: _Drawn) -> str:
    curves = own(drawn.curves)
    workloads = dict.fromkeys(workloads_text(group.curves) for group in groups(curves, drawn.view))
    lengths = f"{core_text.listed(list(workloads))} tokens (input:output)"
    shared = shared_settings(curves)
    words = [models_text(curves)] if any(curve.model for curve in curves) else []
    words += [" ".join(shared[key] for key in PLAIN if key in shared)]
    return ", ".join([*filter(None, words), lengths])


def _subtitle(drawn: _Drawn) -> str:
    view = drawn.view
    per = tables.node_name(drawn.curves, view)
    rate = f"per {per}" if view.normalized else per
    kinds = {point.kind for curve in own(drawn.curves) for point in curve.points}
    apart = ", for each kind of load by itself" if len(kinds) > 1 else ""
    text = f"Numbers at the points: requests/s, {rate}. "
    several = len(groups(drawn.curves, view)) > 1
    over = "over experiments that may be compared" if several else "over all experiments"
    text += f"Rings and yellow band: Pareto frontier {over}{apart}."
    invalid = any(not point.valid for curve in drawn.curves for point in curve.points)
    text += " Thin lines: by request rate." if any(len(curve.lines()) > 1 for curve in drawn.curves) else ""
    return f"{text} Hollow and crossed: not valid, reasons below." if invalid else text


def _better(view: View) -> str:
    return "left is better" if view.lower_is_better else "right is better"


def _scale(axis: Any, log: bool, narrow: bool = False) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    if log:
        axis._set_axes_scale("log")
        axis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0) if narrow else (1.0, 2.0, 5.0)))
        axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(_plain())


def _plain() -> Any:
    from matplotlib.ticker import FuncFormatter

    return FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1000 else f"{value:g}")
