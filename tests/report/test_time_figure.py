"""One value for the picture file and for the page."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from pdlab.report.time_figure import (
    BELOW,
    HEIGHT,
    LEFT,
    LEGEND_ROW,
    WIDTH,
    Span,
    TimeFigure,
    TimeLine,
    TimePanel,
    draw,
    drawings,
    steps,
)

GAP = [(0.0, 1.0), (1.0, 3.0), (2.0, None), (3.0, 2.0), (4.0, 4.0)]


def figure(**panel: object) -> TimeFigure:
    lines = [TimeLine(GAP, "#0072b2", "a <b> & c"), TimeLine([(2.0, 1.0)], "#d55e00", marks="x")]
    panels = [TimePanel("load", lines, **panel), TimePanel("empty", [TimeLine([], "#000000")])]  # type: ignore[arg-type]
    return TimeFigure(panels, "time", "s", spans=[Span(1.0, 2.0, "1")])


@pytest.mark.parametrize("legend", ["", "above", "best"])
def test_a_drawing_lies_within_its_frame_and_leaves_gaps(legend: str) -> None:
    (drawing,) = drawings(figure(legend=legend))
    root = ET.fromstring(drawing)  # what a label has is escaped
    lines = [[tuple(map(float, p.split(","))) for p in each.attrib["points"].split()] for each in root.iter("polyline")]
    assert [len(line) for line in lines] == [2, 2], "nothing is drawn across what is not known"
    for x, y in (place for line in lines for place in line):
        assert LEFT <= x <= WIDTH and 0 <= y <= HEIGHT - BELOW
    assert lines[0][0][1] > lines[0][1][1] > lines[1][1][1], "more is higher"
    texts = [each.text for each in root.iter("text")]
    assert ("a <b> & c" in texts) == bool(legend) and "load" in texts and "4 s" in texts
    assert float(root.attrib["height"]) == HEIGHT + (LEGEND_ROW if legend else 0)


def test_the_end_of_an_axis_can_be_given() -> None:
    (drawing,) = drawings(figure(top=40.0))
    lowest = min(
        float(p.split(",")[1]) for e in ET.fromstring(drawing).iter("polyline") for p in e.attrib["points"].split()
    )
    assert lowest == pytest.approx((1 - 4 / 40) * (HEIGHT - BELOW), abs=0.1)


def test_values_that_stand_are_steps() -> None:
    assert steps([0.0, 2.0, 5.0], [3.0, 1.0]) == [(0.0, 3.0), (2.0, 3.0), (2.0, 1.0), (5.0, 1.0)]
    assert steps([], []) == steps([1.0], []) == []


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_the_picture_file_has_every_panel(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"p.{kind}"
    draw(figure(legend="above")._replace(title="title"), path)
    assert path.stat().st_size > 1000
    first = path.read_bytes()
    draw(figure(legend="above")._replace(title="title"), path)
    assert path.read_bytes() == first, "the same value gives the same file"


def classes(count: int) -> TimeFigure:
    points = [(place + 0.5, 10.0 ** (place + 1)) for place in range(3)]
    ticks = [(place + 0.5, f"{place:,} to\n{place + 1:,}") for place in range(count)]
    return TimeFigure(
        [TimePanel("TTFT, ms", [TimeLine(points, "#0072b2")], log=True)], "length", "", ticks=ticks, ends=3
    )


def test_a_logarithmic_axis_has_equal_factors_at_equal_heights_and_names_of_places() -> None:
    (drawing,) = drawings(classes(3))
    root = ET.fromstring(drawing)
    ((a, b, c),) = [
        [tuple(map(float, p.split(","))) for p in each.attrib["points"].split()] for each in root.iter("polyline")
    ]
    assert a[1] - b[1] == pytest.approx(b[1] - c[1], abs=0.2) and a[1] - b[1] > 50
    names = {each.text: float(each.attrib["x"]) for each in root.iter("text") if each.text and " to " in each.text}
    assert names == {"0 to 1": a[0], "1 to 2": b[0], "2 to 3": c[0]}
    assert root.attrib["aria-label"] == "TTFT, ms"
    texts = [each.text for each in root.iter("text")]
    assert "9.26" in texts and "0" not in texts, "the axis begins at the least value"


def test_names_of_places_have_room() -> None:
    (drawing,) = drawings(classes(40))
    named = [each.text for each in ET.fromstring(drawing).iter("text") if each.text and " to " in each.text]
    assert 3 < len(named) < 10 and named[0] == "0 to 1"


def test_pictures_stand_beside_each_other(tmp_path: Path) -> None:
    draw(classes(3), tmp_path / "one.svg")
    draw(classes(3), tmp_path / "two.svg", classes(3))
    one, two = ((tmp_path / f"{name}.svg").read_text().count('id="axes_') for name in ("one", "two"))
    assert (one, two) == (1, 2)
