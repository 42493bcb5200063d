"""A figure as a picture file, by matplotlib: every file that pdlab draws has its looks from here."""

from __future__ import annotations

import io
import logging
import math
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pdlab.core.errors import WriteError
from pdlab.core.files import replace
from pdlab.report.figure import Axis, Block, Figure, Line, PlotPanel
from pdlab.report.label_layout import Box, along, around, fit
from pdlab.report.section import ASSETS
from pdlab.report.style import INK, SOFT, lightness

FRONTIER, SHADE = "#fbeeb0", "#bbbbbb"
DARK, LIGHT, HALF = "#111111", "#ffffff", 55.0  # texts on blocks; CIE L* of their colours
NARROW = 8.0  # times the low end of an axis
STYLE_FILE = ASSETS / "pdlab.mplstyle"
TICK_SIZE, GROUP_SIZE, PANEL_TITLE_SIZE = 7.0, 6.5, 8.0  # points
GROUP_CHARS_PER_IN, LEAST_GROUP_CHARS = 16.5, 6


@contextmanager
def quiet_import() -> Iterator[None]:
    """matplotlib is imported without its remarks: where the home folder is read-only it takes a temporary folder, and
    its list of fonts is made anew."""
    logger = logging.getLogger("matplotlib")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def picture(path: Path, **figure_options: Any) -> Iterator[Any]:
    """A new matplotlib figure in pdlab's style, written to ``path`` (png, svg or pdf by its suffix) at the end.

    Raises WriteError if it cannot be written.
    """
    with quiet_import():
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

    with plt.style.context(STYLE_FILE):
        figure = plt.figure(**figure_options)
        try:
            yield figure
            save(figure, path)
        finally:
            plt.close(figure)


def save(figure: Any, path: Path) -> None:
    """Write a matplotlib figure (png, svg or pdf by the suffix) in one step. Raises WriteError if it cannot."""
    kind = path.suffix.lower().removeprefix(".")
    # Dates would make two pictures of the same data differ.
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    picture = io.BytesIO()
    figure.savefig(picture, format=kind, metadata=metadata)
    try:
        replace(path, picture.getvalue())
    except WriteError as error:
        raise WriteError(f"plot {error}; or choose another file") from error


def draw(spec: Figure, path: Path) -> None:
    """Write the figure (png, svg or pdf by the suffix of ``path``). Raises WriteError if it cannot be written."""
    title_size = PANEL_TITLE_SIZE if sum(map(len, spec.rows)) > 1 else None
    heights = [max(panel.height_in for panel in row) for row in spec.rows]
    with picture(path, figsize=(spec.width_in, sum(heights)), layout="constrained") as figure:
        grid = _grid(figure, spec, heights)
        for every, panels in zip(grid, spec.labelled(spec.rows), strict=True):
            for axes, panel in zip(every, panels, strict=False):
                paint(axes, panel, title_size)
            for axes in every[len(panels) :]:
                axes.set_visible(False)
        if spec.title:
            figure.suptitle(textwrap.fill(spec.title, int(15 * spec.width_in)), fontsize=9)
        if spec.keys:
            _keys(figure, spec.keys)


def _grid(figure: Any, spec: Figure, heights: Sequence[float]) -> Sequence[Any]:
    """Axes by row. Rows of other lengths than the first have columns of their own."""
    widths = [len(row) for row in spec.rows]
    if widths[0] == max(widths) and not spec.keys:
        return figure.subplots(  # type: ignore[no-any-return]
            len(widths), widths[0], sharex="col" if spec.one_x else False, squeeze=False, height_ratios=heights
        )
    parts = figure.subfigures(len(widths), 1, height_ratios=heights, squeeze=False)[:, 0]
    return [part.subplots(1, width, squeeze=False)[0] for part, width in zip(parts, widths, strict=True)]


def _keys(figure: Any, keys: Sequence[tuple[str, str, str]]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=color, label=name, edgecolor="#444444", linewidth=0.4) for name, color, _ in keys]
    figure.legend(handles=handles, loc="outside right center", frameon=False, fontsize=8, reverse=True)


def paint(axes: Any, panel: PlotPanel, title_size: float | None = None) -> None:
    """Draw a panel. ``title_size``: in points (None: that of the style)."""
    if panel.title:
        axes.set_title(panel.title, **({"fontsize": title_size} if title_size else {}))
    axes.set_xlabel(panel.x.label)
    axes.set_ylabel(panel.y.label)
    if panel.empty and not any(line.points for line in panel.lines):
        axes.text(0.5, 0.5, panel.empty, transform=axes.transAxes, ha="center", color=SOFT)
        axes.set(xticks=[], yticks=[])
        return
    for axis, set_ends, of in ((axes.xaxis, axes.set_xlim, panel.x), (axes.yaxis, axes.set_ylim, panel.y)):
        _scale(axis, of)
        set_ends(of.low, of.high)
    for span in panel.spans:
        axes.axvspan(span.begins, span.ends, color=SHADE, alpha=0.5, lw=0)
        place = {"xycoords": ("data", "axes fraction"), "fontsize": TICK_SIZE, "ha": "left", "va": "bottom"}
        axes.annotate(span.name, (span.begins, 1.0), **place)
    for block in panel.blocks:
        _block(axes, block)
    if panel.blocks:
        axes.grid(visible=False, axis="x" if panel.x.ticks else "both")
        axes.grid(visible=False, axis="y" if panel.y.ticks else "x")
    if panel.x.groups:
        _groups(axes, panel.x)
    for line in panel.lines:
        _line(axes, line)
    for points in panel.frontiers:
        x, y = zip(*points, strict=True)
        axes.plot(x, y, lw=9, color=FRONTIER, solid_joinstyle="round", zorder=1.85)
        axes.scatter(x, y, s=125, facecolors="none", edgecolors=INK, lw=1.0, zorder=4)
    if panel.labels:
        _labels(axes, panel)
    if panel.legend and any(line.label for line in panel.lines):
        _legend(axes, panel.legend)


def _scale(axis: Any, of: Axis) -> None:
    from matplotlib.ticker import AutoLocator, FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

    if of.log:
        axis._set_axes_scale("log")
        narrow = of.high < NARROW * of.low
        subs = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0) if narrow else (1.0, 2.0, 5.0)
        axis.set_major_locator(AutoLocator() if of.high < 2 * of.low else LogLocator(subs=subs))
        axis.set_minor_formatter(NullFormatter())
    if of.ticks:
        axis.set_ticks(*zip(*of.ticks, strict=True), fontsize=TICK_SIZE if len(of.ticks) < 12 else TICK_SIZE - 1)
        return
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1000 else f"{value:g}"))
    if of.at:
        axis.set_major_locator(FixedLocator(_apart(of)))
        axis.set_minor_locator(NullLocator())


def _apart(of: Axis) -> list[float]:
    """The values with a tick, except where they would be too close."""
    values = sorted(of.at)
    ticks: list[float] = []
    for value in reversed(values):
        if not ticks or (ticks[-1] / value >= 1.25 if of.log else ticks[-1] - value >= 0.075 * values[-1]):
            ticks.append(value)
    return ticks[::-1]


def _groups(axes: Any, of: Axis) -> None:
    """Names below those of the ticks, which are turned; each has the room up to the next."""
    axes.tick_params(axis="x", rotation=90)
    inches = axes.get_window_extent().width / axes.figure.dpi
    below = {"xytext": (0, -26), "textcoords": "offset points", "xycoords": ("data", "axes fraction")}
    for at, width, name in of.groups:
        chars = int(GROUP_CHARS_PER_IN * inches * width / (of.high - of.low))
        text = "\n".join(textwrap.wrap(name, max(chars, LEAST_GROUP_CHARS)))
        look = {"ha": "center", "va": "top", "fontsize": GROUP_SIZE, "annotation_clip": False}
        axes.annotate(text, (at, 0), **below, **look)


def _block(axes: Any, block: Block) -> None:
    from matplotlib.patches import Rectangle

    (x, y), (right, top) = block.at, block.to
    size, wide = (right - x, top - y), 0.3 if not block.text else 0.6
    axes.add_patch(Rectangle(block.at, *size, facecolor=block.color, edgecolor=block.edge, linewidth=wide))
    ink = DARK if lightness(block.color) > HALF else LIGHT
    if block.hatched:
        axes.add_patch(Rectangle(block.at, *size, fill=False, edgecolor=ink, alpha=0.25, linewidth=0, hatch="//"))
    if block.text:
        back = {"facecolor": block.color, "edgecolor": "none", "pad": 0.8}
        look = {"ha": "center", "va": "center", "fontsize": 6.5, "color": ink, "bbox": back}
        axes.text((x + right) / 2, (y + top) / 2, block.text, **look)


def _line(axes: Any, line: Line) -> None:
    """Line and marks. A quiet line is behind; a crossed mark is larger, hollow and with a cross."""
    if line.area:
        # Light enough for fourteen overlapping areas.
        axes.fill(*zip(*line.area, strict=True), color=line.color, alpha=0.11, lw=0, zorder=1.8)
    if not line.points:
        return
    x, y = zip(*((x, math.nan if y is None else y) for x, y in line.points), strict=True)
    look: dict[str, Any] = {"color": line.color, "marker": line.marker, "ms": line.mark, "clip_on": not line.marker}
    look |= {"lw": line.width, "ls": (0, line.dashes) if line.dashes else "-", "zorder": 1.9 if line.quiet else 3}
    if not line.width:
        look["ls"] = "none"
    if line.label:
        look["label"] = line.label
    if line.look == "crossed":
        look |= {
            "ms": 1.6 * line.mark,
            "mec": line.color,
            "mfc": "white",
            "mew": 1.4,
            "zorder": 1.91 if line.quiet else 3.1,
        }
    elif line.look == "hollow":
        look |= {"mfc": "white", "mec": line.color, "mew": 1.2}
    elif not line.quiet and line.marker != "x":
        look |= {"mec": "white", "mew": 0.7}
    axes.plot(x, y, **look)
    if line.look == "crossed":
        cross = line.color if line.quiet else INK
        axes.plot(
            x,
            y,
            ls="none",
            zorder=1.92 if line.quiet else 3.2,
            marker="x",
            ms=0.9 * line.mark,
            mew=1.2,
            color=cross,
            clip_on=True,
        )
    if line.reach:
        ends = [[abs(value - end[side]) for value, end in zip(y, line.reach, strict=True)] for side in (0, 1)]
        axes.errorbar(x, y, yerr=ends, fmt="none", ecolor=line.color, capsize=3)


def _legend(axes: Any, where: str) -> None:
    place: dict[str, Any] = {"loc": where, "fontsize": 8}
    if where == "above":
        place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "fontsize": 8}
    elif where == "right":
        place = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0)}
    elif where == "upper left":
        place |= {"ncols": 3, "fontsize": 7}
    axes.legend(frameon=False, **place)


def _labels(axes: Any, panel: PlotPanel) -> None:
    """Each label where it covers nothing; earlier ones first."""
    figure = axes.figure
    figure.canvas.draw()
    renderer, scale = figure.canvas.get_renderer(), figure.dpi / 72
    frame = axes.get_window_extent(renderer)
    inside = Box(frame.x0 + 2, frame.y0 + 2, frame.x1 + 6 * scale, frame.y1)
    ringed = {place for points in panel.frontiers for place in points}
    lines = [[(x, y) for x, y in line.points if y is not None] for line in panel.lines]
    where = {place: tuple(axes.transData.transform(place)) for line in lines for place in line}
    occupied = [around(at, (6.5 if place in ringed else 4) * scale) for place, at in where.items()]
    for line, points in zip(panel.lines, lines, strict=True):
        if line.width:
            occupied += along([where[place] for place in points], 1.6 * scale)
    for label in panel.labels:
        look = {"size": label.size, "color": label.color, "zorder": 5} | ({"weight": "bold"} if label.own else {})
        note = axes.annotate(label.text, (0, 0), xycoords="figure pixels", annotation_clip=False, **look)
        extent = note.get_window_extent(renderer)
        note.remove()
        x, y = where[label.at]
        others = () if label.own else [each for place, each in where.items() if place != label.at]
        gaps = [gap * scale for gap in label.gaps]
        box = fit((x, y), (extent.width, extent.height), occupied, inside, gaps, others)
        if box is not None:
            occupied.append(Box(box.x0 - scale, box.y0 - scale, box.x1 + scale, box.y1 + scale))
            offset = ((box.x0 - x) / scale, (box.y0 - y) / scale)
            axes.annotate(label.text, label.at, offset, textcoords="offset points", **look)
