"""The picture of goodput over bounds: who wins a cell is named, and has a heat map and a colour of its own."""

from __future__ import annotations

from itertools import combinations

import pytest

from pdlab.analysis.goodput_map import Cell, GoodputMap, RateSweep
from pdlab.report import goodput_map as picture
from pdlab.report.goodput_map import LETTERS, figure
from pdlab.report.style import HUES, hue


def mapped(*rows: list[float], origin: str = "simulated") -> GoodputMap:
    """One configuration for each list, with its goodput at growing TTFT bounds. Labels: c0, c1, ..."""
    served = tuple(RateSweep(f"c{i}", origin, 8, 250.0, ()) for i in range(len(rows)))  # type: ignore[arg-type]
    bounds = tuple(0.1 * (1 + i) for i in range(len(rows[0])))
    return GoodputMap(bounds, (0.01,), 0.9, served, tuple((tuple(map(Cell, row)),) for row in rows))


def titles(goodputs: GoodputMap, **options: object) -> list[str]:
    return [panel.title for row in figure(goodputs, title="", **options).rows for panel in row]  # type: ignore[arg-type]


def test_who_wins_a_cell_or_is_as_good_has_a_heat_map() -> None:
    goodputs = mapped([4.0, 1.0], [1.0, 3.0], [1.0, 2.9], [2.0, 2.0])
    winners, *heats = titles(goodputs)
    assert "of 4 configurations" in winners, "the one without a heat map is among them"
    assert heats == ["A: c0 (simulated)", "B: c1 (simulated)", "C: c2 (simulated)"]
    assert titles(goodputs, always={"c3"})[-1] == "D: c3 (simulated)"
    assert len(titles(mapped([4.0], [1.0], origin="measured"))) == 3, "what was measured is drawn in any case"
    assert [block.text for block in figure(goodputs, title="").rows[0][0].blocks] == ["A", "B C"]


def test_a_cell_names_everyone_who_is_as_good() -> None:
    (tile,) = figure(mapped(*([1.0 - 0.001 * i] for i in range(28))), title="").rows[0][0].blocks
    assert tile.text.split() == [*LETTERS, "AA", "AB"]


@pytest.mark.parametrize("losers", [0, 3])
def test_each_winner_has_a_colour_of_its_own(losers: int) -> None:
    """Also those whose numbers are far apart."""
    count = 2 * len(HUES)
    rows = [[0.1] * count] * losers + [[1.0 if i == j else 0.2 for j in range(count)] for i in range(count)]
    colors = [block.color for block in figure(mapped(*rows), title="").rows[0][0].blocks]
    assert len({*colors}) == count
    if losers:
        assert colors == [block.color for block in figure(mapped(*rows[losers:]), title="").rows[0][0].blocks]


def test_more_colours_than_hues() -> None:
    parts = [[int(hue(i)[k : k + 2], 16) for k in (1, 3, 5)] for i in range(3 * len(HUES))]
    assert [hue(i) for i in range(len(HUES))] == [each.lower() for each in HUES]
    assert min(sum(abs(a - b) for a, b in zip(*pair, strict=True)) for pair in combinations(parts, 2)) > 30


def test_letters_go_on_after_z() -> None:
    assert [picture.letter(place) for place in (0, 25, 26, 51, 52)] == ["A", "Z", "AA", "AZ", "BA"]
