"""The goodput map as a figure: the best configurations in each cell, and a heat map of each of these."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from pdlab.analysis.goodput_map import ALIKE, GoodputMap
from pdlab.core.text import counted
from pdlab.report.figure import Axis, Block, Figure, PlotPanel
from pdlab.report.paper import quiet_import
from pdlab.report.style import hue

PANEL, COLUMNS = (4.2, 3.6), 3  # inches
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
LETTERS_ABREAST = 4  # in a cell
NOBODY = "#eeeeee"
Tile = tuple[str, str, bool]
"""Colour, text, and whether it is simulated."""


def figure(
    goodputs: GoodputMap, *, title: str, price_per_gpu_hour: float | None = None, always: Collection[str] = ()
) -> Figure:
    """A configuration has a heat map and a letter if it is among the winners of a cell, or measured, or if its label is
    in ``always``. ``price_per_gpu_hour``: cells also have the cost per million output tokens."""
    winners = goodputs.winners_anywhere
    drawn = [
        number
        for number, each in enumerate(goodputs.served)
        if number in winners or each.origin == "measured" or each.label in always
    ]
    letters = {number: letter(place) for place, number in enumerate(drawn)}
    heats = [_heat(goodputs, number, letters[number], price_per_gpu_hour) for number in drawn]
    panels = [_winners(goodputs, letters), *heats]
    rows = [panels[first : first + COLUMNS] for first in range(0, len(panels), COLUMNS)]
    return Figure(rows, title, width_in=PANEL[0] * len(rows[0]))


def letter(place: int) -> str:
    """A to Z, then AA to AZ, and so on."""
    before, last = divmod(place, len(LETTERS))
    return (letter(before - 1) if before else "") + LETTERS[last]


def _panel(goodputs: GoodputMap, title: str, tile: Callable[[int, int], Tile]) -> PlotPanel:
    blocks = []
    for row in range(len(goodputs.tpot_s)):
        for column in range(len(goodputs.ttft_s)):
            color, text, simulated = tile(row, column)
            at, to = (column - 0.5, row - 0.5), (column + 0.5, row + 0.5)
            blocks.append(Block(at, to, color, text=text, edge="#ffffff", hatched=simulated))
    x, y = _bounds("TTFT", goodputs.ttft_s), _bounds("TPOT", goodputs.tpot_s)
    return PlotPanel(y, x, blocks=blocks, title=title, height_in=PANEL[1])


def _bounds(name: str, bounds_s: Sequence[float]) -> Axis:
    ticks = [(place, f"{1e3 * bound_s:g}") for place, bound_s in enumerate(bounds_s)]
    return Axis(f"{name} bound (ms)", -0.5, len(bounds_s) - 0.5, ticks=ticks)


def _heat(goodputs: GoodputMap, number: int, name: str, price: float | None) -> PlotPanel:
    with quiet_import():
        from matplotlib import colormaps
        from matplotlib.colors import to_hex

    each = goodputs.served[number]
    # One scale for all, so that panels compare.
    most = max((cell.goodput for cells in goodputs.cells for line in cells for cell in line), default=0.0) or 1.0

    def tile(row: int, column: int) -> Tile:
        cell = goodputs.cells[number][row][column]
        color = to_hex(colormaps["cividis"](cell.goodput / most)) if cell.goodput else NOBODY
        text = f"{'≥' if cell.more else ''}{cell.goodput:.2f}" if cell.goodput else "-"
        cost = cell.cost(price, each.output_tokens) if price is not None else None
        return color, text + (f"\n{cost:.2f}" if cost is not None else ""), each.origin == "simulated"

    return _panel(goodputs, f"{name}: {each.label} ({each.origin})", tile)


def _winners(goodputs: GoodputMap, letters: dict[int, str]) -> PlotPanel:
    """Colours are of the first ones of cells."""
    cells = [(row, column) for row in range(len(goodputs.tpot_s)) for column in range(len(goodputs.ttft_s))]
    first = sorted({best[0] for cell in cells if (best := goodputs.winners(*cell))})

    def tile(row: int, column: int) -> Tile:
        best = goodputs.winners(row, column)
        if not best:
            return NOBODY, "-", False
        most = goodputs.cells[best[0]][row][column].goodput
        here = {number: goodputs.cells[number][row][column].goodput for number in best}
        names = [("" if here[number] >= (1 - ALIKE) * most else "≥") + letters[number] for number in best]
        lines = [names[i : i + LETTERS_ABREAST] for i in range(0, len(names), LETTERS_ABREAST)]
        simulated = any(goodputs.served[number].origin == "simulated" for number in best)
        return hue(first.index(best[0])), "\n".join(map(" ".join, lines)), simulated

    of = counted(len(goodputs.served), "configuration")
    or_more = ", and ≥ those that may have more" if any("≥" in tile(*cell)[1] for cell in cells) else ""
    return _panel(goodputs, f"most goodput per GPU of {of},\nthen those within 5 % of it{or_more}", tile)
