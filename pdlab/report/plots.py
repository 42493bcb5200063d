"""A figure of curves as a picture file: TPOT and TTFT against load, and throughput against latency.

`pdlab.report.curve_figure` decides what is drawn; this module places it on the paper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pdlab.core import text as core_text
from pdlab.report.curve_figure import CurveFigure, CurvePanel, FigureSeries, SeriesLine, ShownPanel
from pdlab.report.highlight import MOST_COLOURED
from pdlab.report.label_layout import Box, along, around, fit
from pdlab.report.style import CHOSEN, Style, picture

# All sizes in inches.
LOAD_PANEL = (3.55, 2.75)
MAIN_PANEL = (8.3, 6.35)
FACET_PANEL = (6.6, 4.6)
FACET_TITLE = 0.45
MARGIN_LEFT, MARGIN_RIGHT, BETWEEN, ABOVE = 0.85, 0.25, 0.95, 1.15
AXIS_LABELS = 0.62
LEGEND_ROW, FOOTNOTE_ROW, CHAR = 0.21, 0.19, 0.082
LEGEND_ROWS = 6
TITLE_SIZE, LEAST_TITLE_SIZE = 14.0, 9.0  # points

INK, SOFT, FRONTIER = "#222222", "#666666", "#fbeeb0"

_Legend = list[list[tuple[str, Style | None]]]


def draw(spec: CurveFigure, path: Path) -> None:
    """Write the picture to ``path`` (png, svg or pdf by its suffix). Raises StoreError if it cannot."""
    legends = [_legend_columns([spec.series[i] for i in spec.members(facet)]) for facet in spec.facets]
    legend_in = LEGEND_ROW * (max(len(column) for legend in legends for column in legend) + 0.6)
    footnotes_in = FOOTNOTE_ROW * (len(spec.remarks) + len(spec.footnotes) + 1)
    with picture(path) as figure:
        if len(spec.facets) > 1:
            _facets(figure, spec, legends, legend_in, footnotes_in)
        else:
            _one(figure, spec, legends[0], legend_in, footnotes_in)
        _write_around(figure, spec)


def _one(figure: Any, spec: CurveFigure, legend: _Legend, legend_in: float, footnotes_in: float) -> None:
    """Latencies against load at the left, a column for each statistic and two panels above each other."""
    main, *loads = spec.panels
    columns = [(pair, stat) for pair in zip(loads[::2], loads[1::2], strict=True) for stat in spec.beside]
    left_in = MARGIN_LEFT + len(columns) * (LOAD_PANEL[0] + BETWEEN)
    bottom_in = AXIS_LABELS + legend_in + footnotes_in
    figure.set_size_inches(left_in + MAIN_PANEL[0] + MARGIN_RIGHT, ABOVE + MAIN_PANEL[1] + bottom_in)
    for i, (pair, stat) in enumerate(columns):
        for panel, y in zip(pair, (bottom_in + MAIN_PANEL[1] - LOAD_PANEL[1], bottom_in), strict=True):
            axes = _axes(figure, MARGIN_LEFT + i * (LOAD_PANEL[0] + BETWEEN), y, *LOAD_PANEL)
            axes.yaxis.set_label_coords(-0.16, 0.5)
            _panel(axes, spec, panel, spec.shown(panel, stat=stat))
    _panel(_axes(figure, left_in, bottom_in, *MAIN_PANEL), spec, main, spec.shown(main))
    width = figure.get_figwidth() - MARGIN_LEFT - MARGIN_RIGHT
    _legend(_axes(figure, MARGIN_LEFT, footnotes_in, width, legend_in), legend)


def _facets(figure: Any, spec: CurveFigure, legends: Sequence[_Legend], legend_in: float, footnotes_in: float) -> None:
    """Throughput against latency in a panel per group, two beside each other, each with its own legend."""
    main = spec.panels[0]
    rows = (len(spec.facets) + 1) // 2
    row_in = FACET_TITLE + FACET_PANEL[1] + AXIS_LABELS + legend_in
    figure.set_size_inches(
        2 * (MARGIN_LEFT + FACET_PANEL[0]) + MARGIN_RIGHT, ABOVE - FACET_TITLE + rows * row_in + footnotes_in
    )
    for i, (name, legend) in enumerate(zip(spec.facets, legends, strict=True)):
        x = MARGIN_LEFT + (i % 2) * (FACET_PANEL[0] + MARGIN_LEFT)
        y = footnotes_in + (rows - 1 - i // 2) * row_in
        axes = _axes(figure, x, y + legend_in + AXIS_LABELS, *FACET_PANEL)
        _panel(axes, spec, main, spec.shown(main, name))
        axes.set_title(f"{name}: {core_text.counted(len(spec.members(name)), 'curve')}")
        _legend(_axes(figure, x, y, FACET_PANEL[0], legend_in), legend)


def _axes(figure: Any, x: float, y: float, width: float, height: float) -> Any:
    across, up = figure.get_size_inches()
    return figure.add_axes((x / across, y / up, width / across, height / up))


def _write_around(figure: Any, spec: CurveFigure) -> None:
    """Title, subtitle and footnotes; remarks are darker."""
    width, height = figure.get_size_inches()
    x = MARGIN_LEFT / width
    _narrowed(figure.text(x, 1 - 0.28 / height, spec.title, size=TITLE_SIZE, weight="bold", va="top"))
    figure.text(x, 1 - 0.56 / height, spec.subtitle, size=9.5, color=SOFT, va="top")
    lines = [*spec.remarks, *spec.footnotes]
    for i, line in enumerate(lines):
        y = FOOTNOTE_ROW * (len(lines) + 1 - i - 0.6)
        look = {"color": INK, "weight": "bold"} if i < len(spec.remarks) else {"color": SOFT}
        figure.text(x, y / height, line, size=8.2, va="top", **look)


def _panel(axes: Any, spec: CurveFigure, panel: CurvePanel, shown: ShownPanel) -> None:
    axes.set_title(shown.title)
    axes.set_xlabel(shown.x.log_label if shown.log_x else shown.x.label)
    axes.set_ylabel(shown.y.log_label if shown.log_y else shown.y.label)
    if not shown.at:
        name = shown.x.name if panel.main else shown.y.name
        axes.text(0.5, 0.5, f"no {name} in these runs", transform=axes.transAxes, ha="center", color=SOFT)
        axes.set(xticks=[], yticks=[])
        return
    xs, ys = ([place[side] for place in shown.at.values()] for side in (0, 1))
    sides = (
        (axes.xaxis, axes.set_xlim, shown.x, xs, shown.log_x),
        (axes.yaxis, axes.set_ylim, shown.y, ys, shown.log_y),
    )
    for axis, set_limits, of, values, log in sides:
        _scale(axis, log, max(values) < 6 * min(values))
        set_limits(*of.limits(values, log))
        if of.at_values:
            _ticks_at(axis, sorted({*values}), log)
    for line in shown.lines:
        style = spec.series[line.series].style
        if outline := spec.band(shown, line):
            # Light enough for fourteen overlapping areas.
            axes.fill(*zip(*outline, strict=True), color=style.color, alpha=0.11, lw=0, zorder=1.8)
        _plot(axes, line, shown.at, style)
    for on_it in shown.frontiers:
        x, y = ([shown.at[level][side] for level in on_it] for side in (0, 1))
        axes.plot(x, y, lw=9, color=FRONTIER, solid_joinstyle="round", zorder=1.5)
        axes.scatter(x, y, s=125, facecolors="none", edgecolors=INK, lw=1.0, zorder=4)
    if panel.main:
        _write_labels(axes, spec, shown)


def _ticks_at(axis: Any, values: list[float], log: bool) -> None:
    """Ticks at these values, except where they would be too close."""
    from matplotlib.ticker import FixedLocator, NullLocator

    ticks: list[float] = []
    for value in reversed(values):
        if not ticks or (ticks[-1] / value >= 1.25 if log else ticks[-1] - value >= 0.075 * values[-1]):
            ticks.append(value)
    axis.set_major_locator(FixedLocator(ticks[::-1]))
    axis.set_minor_locator(NullLocator())


def _plot(axes: Any, line: SeriesLine, at: Mapping[int, tuple[float, float]], style: Style) -> None:
    """Line and marks through the joined levels; the others hollow and crossed. A quiet line is thin and behind."""
    joined, off = ([at[level] for level in levels if level in at] for levels in (line.joined, line.off))
    look = {"color": style.color, "marker": style.marker, "markersize": line.mark, "clip_on": False}
    if joined and style.quiet:
        axes.plot(*zip(*joined, strict=True), lw=0.7, zorder=1.9, **look)
    elif joined:
        dashes = (0, style.dashes) if style.dashes else "-"
        edge = {"mfc": "white", "mec": style.color, "mew": 1.2} if style.hollow else {"mec": "white", "mew": 0.7}
        axes.plot(*zip(*joined, strict=True), ls=dashes, lw=0.32 * line.mark, zorder=3, **edge, **look)
    if off:
        hollow = {"color": "none", "markersize": 1.6 * line.mark, "mec": style.color, "mfc": "white", "mew": 1.4}
        axes.plot(*zip(*off, strict=True), ls="none", zorder=3.1, **{**look, **hollow})
        cross = {"marker": "x", "ms": 0.9 * line.mark, "mew": 1.2, "color": INK}
        axes.plot(*zip(*off, strict=True), ls="none", zorder=3.2, **cross)


def _write_labels(axes: Any, spec: CurveFigure, shown: ShownPanel) -> None:
    """Names at the line ends and notes at the levels, each where it covers nothing."""
    figure, best = axes.figure, {level for on_it in shown.frontiers for level in on_it}
    figure.canvas.draw()
    renderer, scale = figure.canvas.get_renderer(), figure.dpi / 72
    frame = axes.get_window_extent(renderer)
    inside = Box(frame.x0 + 2, frame.y0 + 2, frame.x1 + 6 * scale, frame.y1)
    where = {level: tuple(axes.transData.transform(place)) for level, place in shown.at.items()}
    occupied = [around(at, (6.5 if level in best else 4) * scale) for level, at in where.items()]
    for line in shown.lines:
        occupied += along([where[level] for level in line.joined if level in where], 1.6 * scale)

    def write(text: str, level: int, gaps: Sequence[float], **look: Any) -> None:
        note = axes.annotate(text, (0, 0), xycoords="figure pixels", annotation_clip=False, zorder=5, **look)
        extent = note.get_window_extent(renderer)
        # A name at a line's end is long and has the line's colour, so it is not read as that of a near point.
        others = () if "weight" in look else [at for key, at in where.items() if key != level]
        size = (extent.width, extent.height)
        box = fit(where[level], size, occupied, inside, [gap * scale for gap in gaps], others)
        note.remove()
        if box is None:
            return
        occupied.append(Box(box.x0 - scale, box.y0 - scale, box.x1 + scale, box.y1 + scale))
        x, y = where[level]
        offset = ((box.x0 - x) / scale, (box.y0 - y) / scale)
        axes.annotate(text, shown.at[level], offset, textcoords="offset points", zorder=5, **look)

    # One name for both kinds of load: their lines differ in width.
    first: dict[int, SeriesLine] = {}
    for line in shown.lines:
        first.setdefault(line.series, line)
    for line in first.values():
        series = spec.series[line.series]
        placed = [level for level in line.joined if level in where]
        if placed and not series.style.quiet:
            write(series.label, placed[-1], (9, 14), size=9, weight="bold", color=series.ink)
    of = {level: spec.series[spec.levels[level].series] for level in where}
    for level in sorted(where, key=lambda level: level not in best):
        if not of[level].style.quiet:
            write(spec.levels[level].note, level, (6, 9, 13), size=7.3, color=of[level].ink)
    # A grey curve is not in the legend: its name is beside its point on the frontier, if there is room.
    last = {spec.levels[level].series: level for level in sorted(best) if of[level].style.quiet}
    for number in sorted(last):
        write(spec.series[number].label, last[number], (9, 14), size=7.3, color=SOFT)


def _legend_columns(members: Sequence[FigureSeries]) -> _Legend:
    """Columns of (text, style); a heading has no style. One column per family, long ones continued."""
    families: dict[str, list[tuple[str, Style]]] = {}
    for each in sorted(members, key=lambda each: each.style.rank):
        if not each.style.quiet:
            families.setdefault(each.style.family, []).append((each.label, each.style))
    quiet = [each.style for each in members if each.style.quiet]
    if quiet:
        others = f"{core_text.counted(len(quiet), 'other curve')}, in the tables"
        families.setdefault(CHOSEN, []).append((others, quiet[0]))
    most = MOST_COLOURED + 1 if quiet else LEGEND_ROWS
    columns: _Legend = []
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


def _narrowed(title: Any) -> None:
    """Fits a title to the width of the figure: smaller, then cut when it would be too small to read."""
    figure = title.figure
    frame = figure.bbox.width - MARGIN_RIGHT * figure.dpi

    def excess() -> float:
        return float(title.get_window_extent(figure.canvas.get_renderer()).x1 / frame)

    if excess() > 1:
        title.set_size(max(LEAST_TITLE_SIZE, TITLE_SIZE / excess() ** 1.1))
    while excess() > 1:
        title.set_text(f"{title.get_text().removesuffix('...')[:-4]}...")


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
