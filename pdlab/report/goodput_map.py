"""The goodput map as a figure: a heat map per configuration, and the best configuration in each cell."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdlab.analysis.goodput_map import GoodputMap
from pdlab.report.figure import Axis, Block, Figure, PlotPanel
from pdlab.report.paper import quiet_import
from pdlab.report.style import HUES

PANEL, COLUMNS = (4.2, 3.6), 3  # inches
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
NOBODY = "#eeeeee"
Tile = tuple[str, str, bool]
"""Colour, text, and whether it is simulated."""


def figure(goodputs: GoodputMap, *, title: str, price_per_gpu_hour: float | None = None) -> Figure:
    """``price_per_gpu_hour``: cells also have the cost per million output tokens."""
    heats = [_heat(goodputs, number, price_per_gpu_hour) for number in range(len(goodputs.served))]
    panels = [_winners(goodputs), *heats]
    rows = [panels[first : first + COLUMNS] for first in range(0, len(panels), COLUMNS)]
    return Figure(rows, title, width_in=PANEL[0] * len(rows[0]))


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


def _heat(goodputs: GoodputMap, number: int, price: float | None) -> PlotPanel:
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

    return _panel(goodputs, f"{LETTERS[number % len(LETTERS)]}: {each.label} ({each.origin})", tile)


def _winners(goodputs: GoodputMap) -> PlotPanel:
    def tile(row: int, column: int) -> Tile:
        best = goodputs.winners(row, column)
        if not best:
            return NOBODY, "-", False
        text = "\n".join(LETTERS[number % len(LETTERS)] for number in best[:3])
        return HUES[best[0] % len(HUES)], text, any(goodputs.served[number].origin == "simulated" for number in best)

    return _panel(goodputs, "most goodput per GPU, and those within 5 % of it", tile)
