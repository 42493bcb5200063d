"""A figure as a value: rows of panels with lines and blocks. A picture file and a page draw the same one.

`pdlab.report.paper` draws it with matplotlib, and ``assets/figure.js`` as SVG from its JSON. Both place ticks and names
where there is room.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from pdlab.report.scales import LOGARITHMIC

Place = tuple[float, float]
Dashes = tuple[float, ...]
"""Lengths of dashes and gaps, in widths of the line; empty: solid."""
Legend = Literal["", "above", "right", "best", "upper left", "upper right"]
DASHED: Dashes = (3.7, 1.6)
DASH_DOT: Dashes = (6.4, 1.6, 1.0, 1.6)
DOTTED: Dashes = (1.0, 1.65)
BEYOND = 0.05  # of the span of the values, or of half of the highest one if that is more; free above them
LOG_BEYOND = 1.08
ASIDE = 0.01  # of an axis that begins at 0, so that marks on its ends are whole


class Axis(NamedTuple):
    """Its ends, in the unit in ``label``; ``low`` may be above ``high``.

    ``at``: the values with a tick, where there is room. ``ticks``: names of places. Without both, ticks are at round
    values. ``groups``: (place, width, name) below ``ticks``.
    """

    label: str = ""
    low: float = 0.0
    high: float = 1.0
    log: bool = False
    at: Sequence[float] = ()
    ticks: Sequence[tuple[float, str]] = ()
    groups: Sequence[tuple[float, float, str]] = ()


class Line(NamedTuple):
    """``points``: a y of None is a gap. ``label``: its name in the legend; empty: none. ``width`` and ``mark`` (size of
    the marks) in points; a width of 0: only marks. ``marker``: as matplotlib names it; empty: none. ``look`` of marks:
    ``crossed`` is hollow with a cross. ``quiet``: behind the others. ``area``: outline of its intervals. ``reach``: for
    each point the ends of a bar through it."""

    points: Sequence[tuple[float, float | None]]
    color: str
    label: str = ""
    dashes: Dashes = ()
    width: float = 1.3
    marker: str = ""
    mark: float = 6.0
    look: Literal["full", "hollow", "crossed"] = "full"
    quiet: bool = False
    area: Sequence[Place] = ()
    reach: Sequence[Place] = ()


class Block(NamedTuple):
    """A rectangle from ``at`` to ``to``, both (x, y). ``name``: for a reader of a page who points at it. ``text``: in
    its middle. ``hatched``: only in a picture file."""

    at: Place
    to: Place
    color: str
    name: str = ""
    text: str = ""
    edge: str = "#444444"
    hatched: bool = False


class Span(NamedTuple):
    """A part of the x axis that is grey, with a short name above it."""

    begins: float
    ends: float
    name: str = ""


class Label(NamedTuple):
    """A text near a place where it covers nothing. ``gaps``: the distances to try, in points. ``own``: its colour shows
    whose it is, so that it may be nearer to another point."""

    text: str
    at: Place
    gaps: tuple[float, ...]
    size: float
    color: str
    own: bool = False


class PlotPanel(NamedTuple):
    """``frontiers``: lines of points with rings. ``labels``: only in a picture file. ``legend``: place of the legend of
    the lines with a label, in a picture file; empty: none. ``height_in``: inches. ``empty``: shown if no line has a
    point."""

    y: Axis
    x: Axis = Axis()
    lines: Sequence[Line] = ()
    blocks: Sequence[Block] = ()
    spans: Sequence[Span] = ()
    frontiers: Sequence[Sequence[Place]] = ()
    labels: Sequence[Label] = ()
    title: str = ""
    legend: Legend = ""
    height_in: float = 2.0
    empty: str = ""

    @property
    def has_values(self) -> bool:
        """Whether it shows anything above 0."""
        return bool(self.blocks) or any(y for line in self.lines for _, y in line.points)


class Figure(NamedTuple):
    """``rows`` of panels. ``keys``: (name, colour, meaning) of the colours of blocks. ``one_x``: the panels of a column
    share their x axis. ``width_in``: of a picture file, inches."""

    rows: Sequence[Sequence[PlotPanel]]
    title: str = ""
    keys: Sequence[tuple[str, str, str]] = ()
    one_x: bool = False
    width_in: float = 9.0

    def beside(self, other: Figure) -> Figure:
        """Both, the other one at the right; they have as many rows."""
        return self._replace(rows=[[*ours, *theirs] for ours, theirs in zip(self.rows, other.rows, strict=True)])

    def labelled(self, rows: Sequence[Sequence[PlotPanel]]) -> list[list[PlotPanel]]:
        """These rows, of which only the last has the label of a shared x axis."""
        inner = [[panel._replace(x=panel.x._replace(label="")) for panel in row] for row in rows[:-1]]
        return [*(inner if self.one_x else map(list, rows[:-1])), *map(list, rows[-1:])]

    def page(self) -> str:
        """The figure for a page, as JSON; without panels that have no values."""
        rows = [shown for row in self.rows if (shown := [panel for panel in row if panel.has_values])]
        return page_json({"rows": self.labelled(rows), "keys": self.keys})


def rising(
    label: str, lines: Sequence[Line], *, top: float | None = None, log: bool = False, headroom: float = 1.0
) -> Axis:
    """The y axis of these lines: from 0, or logarithmic from the least value. ``top``: its end (None: ``headroom``
    times somewhat more than the highest value)."""
    values = [y for line in lines for _, y in line.points if y is not None]
    positive = [y for y in values if y > 0]
    if log and positive:
        return Axis(f"{label}\n({LOGARITHMIC})", min(positive) / LOG_BEYOND, max(positive) * LOG_BEYOND, log=True)
    if top or not values:
        return Axis(label, high=top or 1.0)
    low, high = min(values), max(values)
    return Axis(label, high=headroom * (high + BEYOND * (max(high - low, high / 2) or 1.1)))


def line_panel(
    label: str, lines: Sequence[Line], *, top: float | None = None, log: bool = False, headroom: float = 1.0,
    legend: Legend = "", height_in: float = 2.0,
) -> PlotPanel:  # fmt: skip
    """These lines over the y axis of `rising`."""
    return PlotPanel(
        rising(label, lines, top=top, log=log, headroom=headroom), lines=lines, legend=legend, height_in=height_in
    )


def stacked(
    panels: Sequence[PlotPanel], label: str, *, title: str = "", spans: Sequence[Span] = (),
    ticks: Sequence[tuple[float, str]] = (), ends: float = 0.0,
) -> Figure:  # fmt: skip
    """Panels one above the other on one x axis from 0 to their last point, or to ``ends`` if that is later. The first
    one has the names of ``spans``."""
    last = [x for panel in panels for line in panel.lines for x, _ in line.points]
    end = max([ends, *last, *(span.ends for span in spans)]) or 1.0
    x = Axis(label, -ASIDE * end, (1 + ASIDE) * end, ticks=ticks)
    unnamed = [span._replace(name="") for span in spans]
    rows = [[panel._replace(x=x, spans=unnamed if row else spans)] for row, panel in enumerate(panels)]
    return Figure(rows, title, one_x=True)


def steps(edges: Sequence[float], values: Sequence[float]) -> list[tuple[float, float | None]]:
    """The points of values that each hold from one edge to the next; there is one more edge than values."""
    return [(edge, value) for i, value in enumerate(values) for edge in (edges[i], edges[i + 1])]


def page_json(value: Any) -> str:
    """JSON that is safe in a script element: it cannot end the element or start another."""
    text = json.dumps(_plain(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def _plain(value: Any) -> Any:
    """As plain JSON values. Floats have six digits: more than any figure here needs, and half the bytes."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, Iterable) and not isinstance(value, str) else value
