"""A picture over time, or over classes, as a value: panels of lines, one above the other, on one axis.

`draw` writes it as a picture file and `drawings` as SVG for the page, which works without a script.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pdlab.core import text as core_text
from pdlab.report.style import picture, text_color

Dash = Literal["solid", "dashed", "dashdot", "dotted"]
SVG_DASHES: dict[Dash, str] = {"solid": "", "dashed": "5 3", "dashdot": "7 2 2 2", "dotted": "2 2"}
WIDTH_IN = 9.0
GREY = "#bbb"
# A drawing in a page, in pixels.
WIDTH, HEIGHT, LEFT, BELOW, LEGEND_ROW, CHAR = 640, 170, 58, 26, 15, 6.4


class TimeLine(NamedTuple):
    """``points``: (time, value); a value of None is a gap. ``label``: its name in the legend; empty: none. ``marks``:
    circles or crosses in place of a line."""

    points: Sequence[tuple[float, float | None]]
    color: str
    label: str = ""
    dash: Dash = "solid"
    width: float = 1.3
    marks: Literal["", "o", "x"] = ""


class TimePanel(NamedTuple):
    """``name``: of its axis, with the unit. ``top``: end of that axis (None: from the values). ``log``: logarithmic,
    from the least value. ``height_in``: in a picture file, inches. ``legend``: its place, for the lines with a label.
    """

    name: str
    lines: Sequence[TimeLine]
    top: float | None = None
    log: bool = False
    height_in: float = 2.0
    legend: Literal["", "above", "best", "upper left", "upper right"] = ""


class Span(NamedTuple):
    """A time that is grey in every panel, with a short name above the first."""

    begins: float
    ends: float
    name: str = ""


class TimeFigure(NamedTuple):
    """``time_name``: below the axis of time; ``unit``: of the time. ``headroom``: the axes extend beyond the highest
    value by this factor. ``ticks``: names of places on the axis of time, in place of times. ``ends``: least end of that
    axis."""

    panels: Sequence[TimePanel]
    time_name: str
    unit: str
    title: str = ""
    spans: Sequence[Span] = ()
    headroom: float = 1.0
    ticks: Sequence[tuple[float, str]] = ()
    ends: float = 0.0

    def end(self, panel: TimePanel) -> float:
        """The end of the panel's axis; by default a twentieth of the span above the highest value."""
        values = [y for line in panel.lines for _, y in line.points if y is not None]
        if panel.top or not values:
            return panel.top or 1.0
        low, high = min(values), max(values)
        return self.headroom * (high + 0.05 * (high - low or 1.1 * high or 1.1))


def steps(edges: Sequence[float], values: Sequence[float]) -> list[tuple[float, float | None]]:
    """The points of values that each hold from one edge to the next; there is one more edge than values."""
    return [(edge, value) for i, value in enumerate(values) for edge in (edges[i], edges[i + 1])]


def draw(spec: TimeFigure, path: Path, *beside: TimeFigure) -> None:
    """Write the picture (png, svg or pdf by the suffix of ``path``). Raises StoreError.

    ``beside``: further figures to the right, each with as many panels.
    """
    heights = [panel.height_in for panel in spec.panels]
    with picture(path, figsize=(WIDTH_IN, sum(heights)), layout="constrained") as figure:
        grid = figure.subplots(len(heights), 1 + len(beside), sharex="col", squeeze=False, height_ratios=heights)
        for column, each in enumerate((spec, *beside)):
            _column(grid[:, column], each)


def _column(every: Any, spec: TimeFigure) -> None:
    for axes, panel in zip(every, spec.panels, strict=True):
        _panel(axes, panel, spec)
    for span in spec.spans:
        place = {"xycoords": ("data", "axes fraction"), "fontsize": 7, "ha": "left", "va": "bottom"}
        every[0].annotate(span.name, (span.begins, 1.0), **place)
    every[-1].set_xlabel(spec.time_name)
    if spec.ticks:
        every[-1].set_xticks(*zip(*spec.ticks, strict=True), fontsize=7)
    if spec.title:
        every[0].set_title(spec.title, fontsize=9, pad=14)


def _panel(axes: Any, panel: TimePanel, spec: TimeFigure) -> None:
    for line in panel.lines:
        ys = [math.nan if y is None else y for _, y in line.points]
        look = {"marker": line.marks, "linestyle": "none"} if line.marks else {"linestyle": line.dash}
        label = line.label or None
        axes.plot([x for x, _ in line.points], ys, color=line.color, linewidth=line.width, label=label, **look)
    for span in spec.spans:
        axes.axvspan(span.begins, span.ends, color=GREY, alpha=0.5, lw=0)
    if panel.log:
        _logarithmic(axes)
    else:
        axes.set_ylim(0, spec.end(panel))
    axes.set_ylabel(panel.name)
    labels = [line.label for line in panel.lines if line.label]
    if panel.legend and labels:
        above = panel.legend == "above"
        place = {"loc": "lower left", "bbox_to_anchor": (0, 1)} if above else {"loc": panel.legend}
        columns = {"ncols": 3, "fontsize": 7} if panel.legend == "upper left" else {"fontsize": 8}
        axes.legend(frameon=False, **place, **columns)


def _logarithmic(axes: Any) -> None:
    from matplotlib.ticker import LogFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(LogFormatter())
    axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.7)))


def drawings(spec: TimeFigure) -> list[str]:
    """Each panel as SVG for a page; panels without a value above 0 are left out."""
    times = [x for panel in spec.panels for line in panel.lines for x, _ in line.points]
    ends = max([spec.ends, *times, *(span.ends for span in spec.spans)])
    return [drawing for panel in spec.panels if ends > 0 and (drawing := _drawing(panel, spec, ends))]


def _drawing(panel: TimePanel, spec: TimeFigure, ends: float) -> str:
    values = [y for line in panel.lines for _, y in line.points if y is not None]
    if not values or not (panel.top or max(values) > 0):
        return ""
    least = min((y for y in values if y > 0), default=0.0) / 1.08 if panel.log else 0.0
    most = spec.end(panel)
    floor = HEIGHT - BELOW

    def across(x: float) -> float:
        return LEFT + min(1.0, x / ends) * (WIDTH - LEFT - 8)

    def at(x: float, y: float) -> tuple[float, float]:
        part = math.log(max(y, least) / least) / math.log(most / least) if least else y / most
        return across(x), (1 - part) * floor

    spans = []
    for span in spec.spans:
        begins, wide = across(span.begins), max(1.0, across(span.ends) - across(span.begins))
        look = f'height="{floor}" fill="{GREY}" opacity="0.5"'
        spans.append(f'<rect x="{begins:.1f}" y="0" width="{wide:.1f}" {look}/>')
    marks = [
        f'<path d="M{LEFT},0V{floor}H{WIDTH - 8}" fill="none" stroke="#999"/>',
        f'<text x="{LEFT - 6}" y="11" text-anchor="end">{core_text.plain(most)}</text>',
        f'<text x="{LEFT - 6}" y="{floor}" text-anchor="end">{core_text.plain(least)}</text>',
        f'<text x="{LEFT + 8}" y="11">{escape(" ".join(panel.name.split()))}</text>',
        *_svg_ticks(spec, ends, across),
    ]
    lines = [part for line in panel.lines for part in _svg_line(line, at)]
    names, rows = _svg_legend([line for line in panel.lines if line.label] if panel.legend else [])
    height = HEIGHT + rows * LEGEND_ROW
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" font-size="11" '
        f'fill="currentColor" aria-label="{escape(_over(panel, spec))}">'
        f"{''.join([*spans, *marks, *lines, *names])}</svg>"
    )


def _over(panel: TimePanel, spec: TimeFigure) -> str:
    return " ".join(panel.name.split()) + ("" if spec.ticks else " over time")


def _svg_ticks(spec: TimeFigure, ends: float, across: Callable[[float], float]) -> Iterator[str]:
    """The names below the axis that have room, or its begin and end."""
    y = HEIGHT - 8
    if not spec.ticks:
        yield f'<text x="{LEFT}" y="{y}">0</text>'
        yield f'<text x="{WIDTH - 8}" y="{y}" text-anchor="end">{core_text.plain(ends)} {spec.unit}</text>'
        return
    names = [" ".join(name.split()) for _, name in spec.ticks]
    wide = CHAR * (2 + max(map(len, names)))
    each = math.ceil(wide * len(names) / (WIDTH - LEFT))
    for (x, _), name in list(zip(spec.ticks, names, strict=True))[::each]:
        yield f'<text x="{across(x):.1f}" y="{y}" text-anchor="middle">{escape(name)}</text>'


def _svg_line(line: TimeLine, at: Any) -> Iterator[str]:
    if line.marks:
        for x, y in ((x, y) for x, y in line.points if y is not None):
            across, down = at(x, y)
            shape = "m-3,-3l6,6m0,-6l-6,6" if line.marks == "x" else "m-3,0a3,3 0 1 0 6,0a3,3 0 1 0 -6,0"
            yield f'<path d="M{across:.1f},{down:.1f}{shape}" fill="none" stroke="{line.color}"/>'
        return
    dash = f' stroke-dasharray="{SVG_DASHES[line.dash]}"' if SVG_DASHES[line.dash] else ""
    look = f'fill="none" stroke="{line.color}" stroke-width="{1.2 * line.width:.1f}"{dash}'
    for run in _without_gaps(line.points):
        places = " ".join("{:.1f},{:.1f}".format(*at(x, y)) for x, y in run)
        yield f'<polyline {look} points="{places}"/>'


def _without_gaps(points: Sequence[tuple[float, float | None]]) -> Iterator[list[tuple[float, float]]]:
    run: list[tuple[float, float]] = []
    for x, y in points:
        if y is not None:
            run.append((x, y))
        elif run:
            yield run
            run = []
    if run:
        yield run


def _svg_legend(lines: Sequence[TimeLine]) -> tuple[list[str], int]:
    """The labels below a drawing, and their number of rows."""
    texts, across, row = [], float(LEFT), 0
    for line in lines:
        wide = CHAR * (len(line.label) + 2)
        if across > LEFT and across + wide > WIDTH:
            across, row = float(LEFT), row + 1
        y = HEIGHT - 8 + (row + 1) * LEGEND_ROW
        texts.append(f'<text x="{across:.0f}" y="{y}" fill="{text_color(line.color)}">{escape(line.label)}</text>')
        across += wide
    return texts, row + 1 if texts else 0
