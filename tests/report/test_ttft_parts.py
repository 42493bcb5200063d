"""Parts of TTFT, in the report: the table, the sentences, the pictures and the page."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from support import folders, timelines

from pdlab.core.deployment import Deployment, parse_label
from pdlab.report import paper, ttft_parts
from pdlab.report.build import Report, build_report
from pdlab.report.figure import PlotPanel
from pdlab.report.html import render
from pdlab.report.load import load
from pdlab.report.pictures import draw
from pdlab.report.text import further_sections
from pdlab.results.store import Store
from pdlab.results.timeline import PARTS

LABELS = {"pack": "pd-pack-p1xtp1-d1xtp1", "spread": "pd-spread-p1xtp1-d1xtp1", "alone": "collocated-2xtp1"}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    where = tmp_path_factory.mktemp("timelines")
    made = [
        timelines.write(where / name, Deployment(model="tiny-gptoss", topology=parse_label(label)))
        for name, label in LABELS.items()
    ]
    return build_report(load(*made))


def test_every_load_of_every_curve_is_in_the_text(report: Report) -> None:
    assert {(each.label, each.load) for each in report.parts} == {
        (curve.label, load) for curve in report.curves for load in (4, 16)
    }


def test_the_table_and_a_sentence_for_each_curve(report: Report) -> None:
    (section,) = (each for each in further_sections(report) if each.title.startswith("Parts of TTFT"))
    lines = section.body.splitlines()
    assert sum(line.split()[-1] != "" and " p50 " in line for line in lines) == 6
    sentences = [line for line in lines if "the largest part of TTFT is" in line]
    assert len(sentences) == 3 and sum("the queue in front of prefill" in line for line in sentences) == 3
    assert all("concurrency 16" in line for line in sentences)
    assert not any("Breakdown" in each.title for each in further_sections(report))


def test_a_mark_that_no_part_ends_at_changes_nothing(tmp_path: Path) -> None:
    """Timelines of requests that were preempted may have such a mark. Their parts are those of the others."""
    deployment = Deployment(model="tiny-gptoss", topology=parse_label(LABELS["pack"]))
    plain, marked = (timelines.write(tmp_path / name / "same", deployment, loads=(4,)) for name in ("plain", "marked"))
    store = Store(marked)
    (run,) = store.runs()
    with_mark = [
        each.model_copy(update={"t": {**each.t, "preempted": 1e4 * (number % 2)}})
        for number, each in enumerate(store.timelines(run.key))
    ]
    store.write(run, store.read_records(run.key), with_mark, force=True)
    assert all("preempted" in each.t for each in store.timelines(run.key))
    reports = [build_report(load(folder)) for folder in (plain, marked)]
    assert reports[0].parts and reports[0].parts == reports[1].parts
    texts = [[(each.title, each.body) for each in further_sections(own)] for own in reports]
    assert texts[0] == texts[1] and "Parts of TTFT" in render(reports[1], "viz")


def test_without_timelines_there_is_no_section(tmp_path: Path) -> None:
    folder = folders.write(tmp_path / "old", Deployment(model="tiny-gptoss", topology=parse_label(LABELS["pack"])))
    report = build_report(load(folder))
    assert report.parts == () and not any("Where TTFT" in each.title for each in further_sections(report))
    assert "Parts of TTFT" not in render(report, "viz")
    assert [picture.what for picture in draw(report, tmp_path / "x.svg")] == ["Plot"]


def test_the_picture_has_a_bar_for_each_percentile_and_the_slowest(report: Report, tmp_path: Path) -> None:
    pictures = {picture.what: picture for picture in draw(report, tmp_path / "x.svg")}
    drawn = pictures["Plot of where TTFT went"]
    assert drawn.path.name == "x-ttft.svg" and drawn.left_out == ""
    text = drawn.path.read_text(encoding="utf-8")
    assert "two ways in one: front, call, prefill_server" in text
    for word in ("concurrency 4", "concurrency 16", "p10", "p90", "the slowest 20 at", "prefill"):
        assert word in text, word


@pytest.mark.parametrize(("requests", "percentiles"), [(600, 4), (30, 1)])
def test_no_label_of_the_picture_lies_on_another(
    requests: int, percentiles: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [
        timelines.write(
            tmp_path / name,
            Deployment(model="tiny-gptoss", topology=parse_label(label)),
            loads=(2, 4, 8),
            requests=requests,
        )
        for name, label in LABELS.items()
    ]
    levels = build_report(load(*made)).parts
    assert {len(level.around) for level in levels} == {percentiles}
    overlapping: list[tuple[str, str]] = []

    def look(figure: Any, path: Path) -> None:
        figure.draw_without_rendering()
        for axes in figure.axes:
            texts = [*axes.texts, *axes.get_xticklabels(), *axes.get_yticklabels(), axes.xaxis.label, axes.yaxis.label]
            boxes = [(text.get_text(), text.get_window_extent()) for text in texts if text.get_text()]
            overlapping.extend((one[0], other[0]) for one, other in combinations(boxes, 2) if one[1].overlaps(other[1]))
            assert all(figure.bbox.containsx(box.x0) and figure.bbox.containsx(box.x1) for _, box in boxes)

    monkeypatch.setattr(paper, "save", look)
    paper.draw(ttft_parts.pictured(levels).file, tmp_path / "x.png")
    assert overlapping == []


def bars(panels: Sequence[PlotPanel], side: int) -> dict[tuple[str, float], float]:
    """Where each bar ends whose pieces follow each other from 0. ``side``: 0 if bars go to the right."""
    ends: dict[tuple[str, float], float] = {}
    for panel in panels:
        for block in panel.blocks:
            bar = panel.title, round(block.at[1 - side], 6)
            assert block.at[side] == pytest.approx(ends.get(bar, 0.0)), "begins where the one before ends"
            ends[bar] = block.to[side]
    return ends


def test_the_page_has_bars_whose_pieces_fill_them(report: Report) -> None:
    page = render(report, "viz")
    assert "Three are two ways in one: front, call, prefill_server; each" in page
    assert page.count("the slowest 20") == 3
    spec = ttft_parts.pictured(report.parts)
    (loads,), (slowest,) = spec.loads.rows, spec.slowest.rows
    ends_ms = sorted(1e3 * around.ttft_s for level in report.parts for around in level.around)
    assert sorted(bars(loads, 1).values()) == pytest.approx(ends_ms)
    ends_ms = [1e3 * each.ttft_s for level in report.parts for each in level.slowest if level.load == 16]
    assert sorted(bars(slowest, 0).values()) == pytest.approx(sorted(ends_ms))
    for panel, side in [*((each, 1) for each in loads), *((each, 0) for each in slowest)]:
        assert max(bars([panel], side).values()) <= (panel.x, panel.y)[side].high


def test_every_part_has_a_color_of_its_own() -> None:
    assert set(ttft_parts.COLORS) == {*PARTS, ttft_parts.OTHER}
    assert len(set(ttft_parts.COLORS.values())) == len(ttft_parts.COLORS)


def test_what_is_not_drawn_is_named(report: Report) -> None:
    many = [
        each._replace(label=f"curve {number}", load=float(number)) for number in range(8) for each in report.parts[:1]
    ]
    assert ttft_parts.left_out(many) == " (6 of 8 loads, the slowest of 4 of 8 curves)"
    assert ttft_parts.left_out(report.parts) == ""
