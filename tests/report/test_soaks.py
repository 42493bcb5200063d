"""A load over time: in the tables, in a picture of its own, in the report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import folders
from support import records as made

from pdlab.analysis.loading import Loaded
from pdlab.cli import viz
from pdlab.core.workload import Open
from pdlab.report import soaks
from pdlab.report.timelines import MOST
from pdlab.results.level_data import LevelData
from pdlab.results.schema import Run
from pdlab.results.soak import soak
from pdlab.results.store import Store


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three levels, of which the first was held for 30 minutes and got slower."""
    path = folders.write(tmp_path / "one", folders.deployments(1)[0], repeats=1)
    run = next(Store(path).runs())
    sent = [made.record(i / 2, 0.2, 0.01 * (1 + i / 3600), 11) for i in range(3600)]
    held = run.model_copy(update={"soak": soak(LevelData.of(sent), Open(rate_rps=2), 1800), "pool_age": 0.1})
    Store(path).write(held, Store(path).read_records(run.key), force=True)
    return path


def run_of(folder: Path) -> Run:
    return next(Store(folder).runs())


def test_viz_prints_and_draws_it(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert viz.main(["--exps", str(folder), "--plot-path", str(tmp_path / "out" / "p.svg")]) == 0
    output = capsys.readouterr().out
    assert (
        "Over time: 1xTP1 collocated at concurrency 1, 30 minutes: TTFT the same" in output and "TPOT longer" in output
    )
    rows = [line for line in output.splitlines() if line.strip().startswith(("0 to 1 ", "28 to 29 "))]
    assert len(rows) == 2, "every second minute of 30"
    assert (tmp_path / "out" / "p-over-time.svg").read_text().count("<path") > 20
    assert "Measured on fresh KV pools" in output and "1xTP1 collocated (1)." in output


def test_nothing_of_it_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folders.write(tmp_path / "one", folders.deployments(1)[0], repeats=1)
    assert viz.main(["--exps", str(path), "--plot-path", str(tmp_path / "out" / "p.png")]) == 0
    printed = capsys.readouterr().out
    assert "Over time" not in printed and "fresh KV pools" not in printed
    assert not list((tmp_path / "out").glob("*over-time*"))


def test_the_report_has_a_drawing_of_each_latency(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    assert viz.main(["--exps", str(folder), "--report", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert '<section id="soaks">' in text and text.count('<div class="figure">') == 1
    assert "TPOT longer in the last third" in text


def test_longer_is_higher_in_the_figure(folder: Path) -> None:
    (tpot,), _ = soaks.figure([soaks.SoakRun("x", run_of(folder))]).rows
    assert [len(line.points) for line in tpot.lines] == [30, 30]
    heights = [y for _, y in tpot.lines[0].points if y is not None]
    assert heights == sorted(heights) and len(heights) == 30


def test_what_is_not_known_is_not_drawn(folder: Path) -> None:
    run = run_of(folder)
    assert run.soak
    bare = [window.model_copy(update={"tpot": None}) for window in run.soak.windows]
    each = soaks.SoakRun("x", run.model_copy(update={"soak": run.soak.model_copy(update={"windows": tuple(bare)})}))
    ((shown,),) = json.loads(soaks.figure([each]).page())["rows"]
    assert "TTFT, ms" in shown["y"]["label"]
    assert soaks.section(each).text.splitlines()[3].split()[4:6] == ["-", "-"]


def test_soaks_of_one_picture_have_colours_and_names_of_their_own(folder: Path) -> None:
    run = run_of(folder)
    many = [soaks.SoakRun(f"curve {number}", run) for number in range(9)]
    tpot = soaks.figure(many).rows[0][0]
    named = [line for line in tpot.lines if line.label]
    assert len({line.color for line in named}) == len(named) == MOST
    again = run.model_copy(update={"key": run.key.model_copy(update={"repeat": 1})})
    loaded = Loaded(folder, Store(folder).load().model_copy(update={"runs": (run, again)}), {})
    assert [each.label.partition(", ")[2] for each in soaks.held([("x", loaded)])] == ["repeat 1", "repeat 2"]
