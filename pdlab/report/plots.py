"""A figure of curves as a picture file: TPOT and TTFT against load, and throughput against latency.

`pdlab.report.curve_figure` decides what is drawn; this module places its panels, legends and lines of text.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pdlab.core import text as core_text
from pdlab.report.curve_figure import CurveFigure, FigureSeries
from pdlab.report.highlight import MOST_COLOURED
from pdlab.report.paper import paint, picture
from pdlab.report.style import CHOSEN, INK, SOFT, Style

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

_Legend = list[list[tuple[str, Style | None]]]


def draw(spec: CurveFigure, path: Path) -> None:
    """Write the picture to ``path`` (png, svg or pdf by its suffix). Raises StoreError if it cannot."""
    legends = [_legend_columns([spec.series[i] for i in spec.drawn(facet)]) for facet in spec.facets]
    legend_in = LEGEND_ROW * (max((len(column) for legend in legends for column in legend), default=0) + 0.6)
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
            paint(axes, spec.shown(panel, stat=stat))
    paint(_axes(figure, left_in, bottom_in, *MAIN_PANEL), spec.shown(main))
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
        title = f"{name}: {core_text.counted(len(spec.drawn(name)), 'curve')}"
        paint(axes, spec.shown(main, name)._replace(title=title))
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
    shrink = min(1.0, width / (sum(natural) or width))
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
