"""The figure of curves: what both renderers draw, decided once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from support.curves import many, one

from pdlab.analysis.curves import Curve
from pdlab.analysis.ranking import frontier_points, frontiers
from pdlab.analysis.view import View
from pdlab.report.curve_figure import Band, ColumnAxis, curve_figure
from pdlab.report.style import GREY

LONG = [one("far", 1, 2000), one("farther", 2, 2000)]


@pytest.mark.parametrize("view", [View(), View(latency_mode="first_token"), View(use_interactivity=True)])
def test_each_group_has_the_frontier_of_the_analysis(view: View) -> None:
    curves = [*many(3), *LONG]
    spec = curve_figure(curves, view)
    main = spec.panels[0]
    columns = [spec.columns[side.of(spec.chosen).column] for side in (main.x, main.y)]
    levels = {(level.series, level.load): number for number, level in enumerate(spec.levels)}
    expected = []
    for each in frontiers(curves, view):
        keys = [(curves.index(drawn.curve), f"concurrency {drawn.point.value:g}") for drawn in each.points]
        expected.append(sorted(tuple((column[levels[key]] or (0.0,))[0] for column in columns) for key in keys))
    assert len(expected) == 2
    assert sorted(map(sorted, spec.shown(main).frontiers)) == sorted(expected)


def test_what_a_reader_may_choose_is_what_the_view_would_have_shown() -> None:
    """The page's choice of another latency and another count has the figures and axes of that view."""
    curves = [*many(3), *LONG]
    page = curve_figure(curves, View(), every=True)
    view = View(use_interactivity=True, gpus_per_node=1)
    other = curve_figure(curves, view)
    here = page.shown(page.panels[0], latency="interactivity", per="gpu")
    there = other.shown(other.panels[0])
    places = [[line.points for line in panel.lines] for panel in (here, there)]
    assert (places[0], here.frontiers, here.x) == (places[1], there.frontiers, there.x)
    assert here.y.label == "output tokens/s, per GPU" and there.y.label == "output tokens/s, per node (1 GPU)"


def test_invalid_levels_stand_off_the_line_and_published_curves_off_the_loads() -> None:
    first, second = many(2)
    points = (first.points[0], first.points[1].model_copy(update={"valid": False}), *first.points[2:])
    published = second.model_copy(update={"published": "A talk"})
    spec = curve_figure([first.model_copy(update={"points": points}), published], View())
    main, tpot, ttft = spec.panels
    assert [(line.joined, line.off) for line in main.lines] == [((0, 2, 3), (1,)), ((4, 5, 6, 7), ())]
    assert [line.series for line in (*tpot.lines, *ttft.lines)] == [0, 0]
    assert {level for each in spec.rivals for level in each} == {0, 2, 3}


def test_a_predicted_band_is_a_factor_of_the_latency() -> None:
    two = one("a", 1)
    two = two.model_copy(update={"points": two.points[:2]})  # of 7 and 8 ms
    spec = curve_figure([two], View(), bands={"a": Band(0.25, 1.0)})
    main, tpot, _ = (spec.shown(panel) for panel in spec.panels)
    assert tpot.lines[0].area == [(1, 5.6), (4, 6.4), (4, 10.0), (1, 8.75)]
    rates = [y for _, y in main.lines[0].points]
    assert main.lines[0].area == [(5.6, rates[0]), (6.4, rates[1]), (10.0, rates[1]), (8.75, rates[0])]


def test_one_run_has_no_band_of_throughput() -> None:
    spec = curve_figure(many(1), View())
    for panel in spec.panels:
        assert spec.shown(panel).lines[0].area == []


@pytest.mark.parametrize(
    ("log", "zero", "ends"), [(True, True, (5.0, 30.0)), (False, True, (0.0, 22.0)), (False, False, (8.0, 21.0))]
)
def test_ends_of_an_axis(log: bool, zero: bool, ends: tuple[float, float]) -> None:
    axis = ColumnAxis("c", "n", "l", "ll", zero=zero, shares=(0.2, 0.1), factors=(2.0, 1.5))
    assert axis.limits([10.0, 20.0, 15.0], log) == pytest.approx(ends)


def test_the_page_has_plain_values_of_six_digits() -> None:
    page = json.loads(curve_figure(many(2), View(), every=True).page())
    assert [series["label"] for series in page["series"]] == ["c0", "c1"]
    assert page["columns"]["output.gpu"][1] == [25.0] and page["chosen"]["latency"] == "token"
    axis = page["panels"][0]["x"]["axes"]["token.p50"]
    assert axis["column"] == "tpot.p50" and len(page["columns"]["tpot.p50"]) == len(page["levels"])


def without(curve: Curve, metric: str, statistic: str | None = None) -> Curve:
    """The curve without a latency, or without one statistic of it."""

    def rest(latency_ms: Mapping[str, Mapping[str, float]]) -> dict[str, Mapping[str, float]]:
        kept = {name: values for name, values in latency_ms.items() if name != metric or statistic}
        return {
            name: {each: ms for each, ms in values.items() if name != metric or each != statistic}
            for name, values in kept.items()
        }

    points = [
        point.model_copy(
            update={
                "latency_ms": rest(point.latency_ms),
                "samples": tuple(
                    each.model_copy(update={"latency_ms": rest(each.latency_ms)}) for each in point.samples
                ),
            }
        )
        for point in curve.points
    ]
    return curve.model_copy(update={"points": tuple(points)})


def test_a_curve_without_the_latency_is_named_and_not_counted() -> None:
    first, second, third = many(3)
    spec = curve_figure([first, without(second, "tpot"), without(without(third, "tpot"), "ttft")], View())
    assert spec.drawn() == [0, 1], "the second one has a TTFT"
    note = next(line for line in spec.footnotes if line.startswith("Without"))
    assert note == "Without TPOT p50 in the files, so not in the panel of throughput: c1; c2."
    assert not any("Without" in line for line in curve_figure(many(3), View()).footnotes)
    fourth = [*many(4), without(LONG[0], "tpot"), *LONG[1:], *many(3, 3000, "x")]
    spec = curve_figure(fourth, View())
    assert [len(spec.drawn(facet)) for facet in spec.facets] == [4, 3, 1]


def test_the_note_says_which_statistic_shows_a_curve() -> None:
    first, second = many(2)
    mean: dict[str, Any] = {"latency_ms": {"tpot": {"mean": 9.0}}}
    levels = [
        each.model_copy(update=mean | {"samples": tuple(one.model_copy(update=mean) for one in each.samples)})
        for each in second.points
    ]
    curves = [first, second.model_copy(update={"points": tuple(levels)})]
    assert any("c1 (--stat mean shows it)." in line for line in curve_figure(curves, View()).footnotes)
    assert not any("--stat" in line for line in curve_figure(curves, View(), notes=["n"]).footnotes)


def test_invalid_levels_of_grey_curves_are_grey_crosses() -> None:
    curves = many(18)
    failed = tuple(point.model_copy(update={"valid": False, "reasons": ("planted",)}) for point in curves[0].points)
    spec = curve_figure([curves[0].model_copy(update={"points": failed}), *curves[1:]], View())
    crossed = [line for line in spec.shown(spec.panels[0]).lines if line.look == "crossed"]
    assert [(line.color, line.quiet, len(line.points)) for line in crossed] == [(GREY, True, 4)]
    assert 0 in spec.drawn() and "Hollow and crossed" in spec.subtitle


def test_a_ramp_has_no_frontier() -> None:
    """Its figures are means over several rates: they are compared with nothing."""
    ramps = [
        each.model_copy(update={"points": tuple(p.model_copy(update={"kind": "ramp"}) for p in each.points)})
        for each in many(2)
    ]
    spec = curve_figure(ramps, View())
    assert spec.shown(spec.panels[0]).frontiers == [] and "frontier" not in spec.subtitle
    assert frontiers(ramps, View()) == [] and frontier_points(ramps, View()) == []
    spec = curve_figure([*ramps, *many(3)[2:]], View())
    assert {spec.levels[level].series for each in spec.rivals for level in each} == {2}
    assert "frontier" in spec.subtitle
