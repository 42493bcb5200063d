"""One value for the picture file and for the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdlab.report import paper
from pdlab.report.figure import DASHED, Axis, Block, Figure, Line, PlotPanel, Span, page_json, rising, stacked, steps

GAP = [(0.0, 1.0), (1.0, 3.0), (2.0, None), (3.0, 2.0), (4.0, 4.0)]
LINES = [Line(GAP, "#0072b2", "a <b> & c", DASHED), Line([(2.0, 1.0)], "#d55e00", marker="x", width=0)]


def figure() -> Figure:
    panels = [PlotPanel(rising("load", LINES), lines=LINES, legend="above"), PlotPanel(rising("none", []))]
    return stacked(panels, "time, s", title="title", spans=[Span(1.0, 2.0, "1")])


def test_the_panels_of_a_figure_share_their_axis_of_time() -> None:
    (first,), (second,) = figure().rows
    assert first.x == second.x and first.x.low == pytest.approx(-0.04) and first.x.high == pytest.approx(4.04)
    assert ([span.name for span in first.spans], [span.name for span in second.spans]) == (["1"], [""])
    assert [each.x.label for (each,) in figure().labelled(figure().rows)] == ["", "time, s"]


@pytest.mark.parametrize(
    ("options", "ends"),
    [
        ({}, (0.0, 4.15)),
        ({"top": 40.0}, (0.0, 40.0)),
        ({"headroom": 2.0}, (0.0, 8.3)),
        ({"log": True}, (1 / 1.08, 4.32)),
    ],
)
def test_the_ends_of_an_axis(options: dict[str, float], ends: tuple[float, float]) -> None:
    axis = rising("load", LINES, **options)  # type: ignore[arg-type]
    assert (axis.low, axis.high) == pytest.approx(ends) and axis.log == ("log" in options)
    assert rising("none", []).high == 1.0 and rising("flat", [Line([(0.0, 0.0)], "#000000")]).high > 0


def test_the_page_has_no_panel_without_values_and_no_markup() -> None:
    text = figure().page()
    ((panel,),) = json.loads(text)["rows"]
    assert panel["y"]["label"] == "load" and panel["lines"][0]["points"] == [list(each) for each in GAP]
    assert panel["x"]["label"] == "time, s", "the last that is shown has it"
    assert "<" not in text and "&" not in text and panel["lines"][0]["label"] == "a <b> & c"
    assert page_json({"x": 1 / 3}) == '{"x":0.333333}'


def test_values_that_stand_are_steps() -> None:
    assert steps([0.0, 2.0, 5.0], [3.0, 1.0]) == [(0.0, 3.0), (2.0, 3.0), (2.0, 1.0), (5.0, 1.0)]
    assert steps([], []) == steps([1.0], []) == []


def bars() -> Figure:
    blocks = [Block((0.0, row - 0.4), (2.0, row + 0.4), "#4292c6", "prefill", "2", hatched=True) for row in range(3)]
    y = Axis("request", 2.6, -0.6, ticks=[(row, f"r{row}") for row in range(3)])
    ratios = [(10.0, 1.0), (20.0, 8.0)]
    line = Line(ratios, "#0072b2", "p50", marker="o", look="hollow", reach=[(0.5, 2.0), (7.0, 9.0)])
    panels = [
        PlotPanel(y, Axis("ms", high=3.0), blocks=blocks),
        PlotPanel(rising("ratio", [line]), Axis("MB", 5, 40, True)),
    ]
    return Figure([panels, [panels[1]._replace(lines=[line], title="t", legend="right")]], keys=[("a", "#4292c6", "A")])


@pytest.mark.parametrize("made", [figure(), bars(), figure().beside(figure())], ids=["lines", "bars", "beside"])
@pytest.mark.parametrize("kind", ["png", "svg"])
def test_the_picture_file(made: Figure, kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"p.{kind}"
    paper.draw(made, path)
    assert path.stat().st_size > 1000
    first = path.read_bytes()
    paper.draw(made, path)
    assert path.read_bytes() == first, "the same value gives the same file"
    if kind == "svg":
        assert first.count(b'id="axes_') == sum(map(len, made.rows))


@pytest.mark.parametrize("heights", [(0.5, 0.5), (0.5, 0.5 + 1e-16, 0.5 - 1e-12), (10.0, 9.9)])
def test_a_flat_line_is_whole_below_the_top(heights: tuple[float, ...]) -> None:
    """A line is 1.3 points wide, a panel some 140 high: half of the line takes 0.5 % of it."""
    axis = rising("load", [Line(list(enumerate(heights)), "#000000")])
    assert 1.01 * max(heights) < axis.high < 1.1 * max(heights)


def test_a_logarithmic_axis_is_called_so() -> None:
    assert rising("TTFT, ms", LINES, log=True).label == "TTFT, ms\n(log scale)"
    assert rising("TTFT, ms", LINES).label == "TTFT, ms"
