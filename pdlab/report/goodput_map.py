"""The goodput map as a picture: a heat map per configuration, and the best configuration in each cell."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import Any

from pdlab.analysis.goodput_map import GoodputMap
from pdlab.report.style import HUES, lightness, picture

PANEL, COLUMNS = (4.2, 3.3), 3
SIMULATED = "//"
DARK, LIGHT, HALF = "#111111", "#ffffff", 55.0
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
NOBODY = "#eeeeee"


def draw(goodputs: GoodputMap, path: Path, *, title: str, price_per_gpu_hour: float | None = None) -> None:
    """Write the picture (png, svg or pdf). Raises StoreError if it cannot be written."""
    count = len(goodputs.served) + 1
    columns = min(COLUMNS, count)
    rows = math.ceil(count / columns)
    with picture(path, figsize=(PANEL[0] * columns, PANEL[1] * rows + 0.9), layout="constrained") as figure:
        panels = figure.subplots(rows, columns, squeeze=False).ravel()
        _winners(panels[0], goodputs)
        for number, axes in enumerate(panels[1:count]):
            _heat(axes, goodputs, number, price_per_gpu_hour)
        for axes in panels[count:]:
            axes.set_visible(False)
        figure.suptitle(textwrap.fill(title, 50 * columns), fontsize=9)


def _axes(axes: Any, goodputs: GoodputMap, title: str) -> None:
    axes.set_xticks(range(len(goodputs.ttft_s)), [f"{1e3 * bound:g}" for bound in goodputs.ttft_s])
    axes.set_yticks(range(len(goodputs.tpot_s)), [f"{1e3 * bound:g}" for bound in goodputs.tpot_s])
    axes.set_xlim(-0.5, len(goodputs.ttft_s) - 0.5)
    axes.set_ylim(-0.5, len(goodputs.tpot_s) - 0.5)
    axes.set_xlabel("TTFT bound (ms)")
    axes.set_ylabel("TPOT bound (ms)")
    axes.set_title(title, fontsize=8)
    axes.grid(False)


def _tile(axes: Any, column: int, row: int, color: str, text: str, *, simulated: bool) -> None:
    from matplotlib.patches import Rectangle

    at = (column - 0.5, row - 0.5)
    axes.add_patch(Rectangle(at, 1, 1, facecolor=color, edgecolor="white", linewidth=0.6))
    ink = DARK if lightness(color) > HALF else LIGHT
    if simulated:
        faint = Rectangle(at, 1, 1, fill=False, edgecolor=ink, alpha=0.25, linewidth=0, hatch=SIMULATED)
        axes.add_patch(faint)
    back = {"facecolor": color, "edgecolor": "none", "pad": 0.8}
    axes.text(column, row, text, ha="center", va="center", fontsize=6.5, color=ink, bbox=back)


def _heat(axes: Any, goodputs: GoodputMap, number: int, price: float | None) -> None:
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    each = goodputs.served[number]
    # One scale for all, so that panels compare.
    most = max((cell.goodput for cells in goodputs.cells for line in cells for cell in line), default=0.0) or 1.0
    for row, line in enumerate(goodputs.cells[number]):
        for column, cell in enumerate(line):
            color = to_hex(colormaps["cividis"](cell.goodput / most)) if cell.goodput else NOBODY
            text = f"{'≥' if cell.more else ''}{cell.goodput:.2f}" if cell.goodput else "-"
            cost = cell.cost(price, each.output_tokens) if price is not None else None
            text += f"\n{cost:.2f}" if cost is not None else ""
            _tile(axes, column, row, color, text, simulated=each.origin == "simulated")
    _axes(axes, goodputs, f"{LETTERS[number % len(LETTERS)]}: {each.label} ({each.origin})")


def _winners(axes: Any, goodputs: GoodputMap) -> None:
    for row in range(len(goodputs.tpot_s)):
        for column in range(len(goodputs.ttft_s)):
            best = goodputs.winners(row, column)
            if not best:
                _tile(axes, column, row, NOBODY, "-", simulated=False)
                continue
            text = "\n".join(LETTERS[number % len(LETTERS)] for number in best[:3])
            simulated = any(goodputs.served[number].origin == "simulated" for number in best)
            _tile(axes, column, row, HUES[best[0] % len(HUES)], text, simulated=simulated)
    _axes(axes, goodputs, "most goodput per GPU, and those within 5 % of it")
