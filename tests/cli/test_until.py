"""``--until`` from the command line: what a dry run says, what is refused, when an experiment ends."""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import folders

from pdlab.analysis import sequential
from pdlab.bench.experiment import run as experiment_run
from pdlab.bench.experiment.run import RunOptions, run
from pdlab.bench.experiment.schedule import PlannedVisit, Schedule, make_schedule
from pdlab.cli import experiment, viz
from pdlab.cli.until import Stopping, comparisons, parse_until
from pdlab.results.store import read_record, record_notes

FILE: dict[str, Any] = {
    "name": "x",
    "where": {"local": 2},
    "deployments": [{"name": "a", "label": "collocated-2xtp1"}, {"name": "b", "label": "pd-pack-p1xtp1-d1xtp1"}],
    "workloads": [{"input_tokens": 512, "output_tokens": 64}],
    "loads": [{"concurrency": [1, 4]}],
    "repeats": 3,
}


Go = Callable[[str, int], tuple[Stopping, list[tuple[str, int]]]]


def write(folder: Path, **changes: Any) -> str:
    path = folder / "x.yaml"
    path.write_text(yaml.safe_dump({**FILE, **changes}))
    return str(path)


def test_what_cannot_be_resolved_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opened = write(tmp_path, loads=[{"rate_rps": [2.0]}])
    assert experiment.main([opened, "--dry-run", "--until", "lead=5%"]) == 2
    assert "in closed loops, and this experiment has none; give ttft=20%" in capsys.readouterr().err
    assert experiment.main([opened, "--dry-run", "--until", "ttft=20%"]) == 0
    alone = write(tmp_path, deployments=FILE["deployments"][:1])
    assert experiment.main([alone, "--dry-run", "--until", "lead=5%"]) == 2
    assert "no workload runs on two deployments" in capsys.readouterr().err


def test_a_dry_run_says_what_it_can_see(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = write(tmp_path), ["--out", str(tmp_path / "bm")]
    assert experiment.main([path, "--dry-run", *out]) == 0
    plain = capsys.readouterr().out
    found = re.search(
        r"detectable: with 3 repeats a difference of (\S+) % in output tokens/s, (\S+) % in TTFT p50 and (\S+) % in "
        "TPOT p50 between two deployments",
        plain,
    )
    assert found and float(found[2]) < float(found[1]) < float(found[3])
    assert (
        "if starts scatter by 12 %, 10 % and 17 % (assumed from levels measured on CPUs; the scatter of this machine "
        "was not measured)" in plain
    )
    assert experiment.main([path, "--dry-run", *out, "--until", "lead=5%", "--max-repeats", "6"]) == 0
    until = capsys.readouterr().out
    assert "3 to 6 repeats" in until and "shared by 4 looks" in until
    assert "a difference of 5 % in output tokens/s would take about" in until and "--max-repeats" in until
    alone = write(tmp_path, deployments=FILE["deployments"][:1])
    assert experiment.main([alone, "--dry-run", *out]) == 0
    assert "detectable:" not in capsys.readouterr().out


def test_a_dry_run_names_only_figures_that_tell_deployments_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Open loops have the throughput that arrives, and answers of one token have no TPOT."""
    opened = write(
        tmp_path,
        where={"cluster": "p5.48xlarge-x2"},
        deployments=[{"config": "collocated-1xtp8"}, {"config": "collocated-2xtp4"}],
        workloads=[{"input_tokens": 512, "output_tokens": 1}],
        loads=[{"rate_rps": [2.0]}],
        repeats=1,
    )
    assert experiment.main([opened, "--dry-run", "--out", str(tmp_path / "bm")]) == 0
    text = capsys.readouterr().out
    # (1.96 + 0.84) * sqrt(2) standard deviations of 8.49 %.
    assert "with 1 repeat a difference of 40 % in TTFT p50 between two deployments" in text
    assert "if starts scatter by 8.5 % (assumed from published H100 runs on different days" in text


def test_what_was_measured_in_the_folder_counts_figure_by_figure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The planted noise is on all figures alike, far from what is assumed."""
    measured(monkeypatch, tmp_path, 1.0, 0.01)("lead=5%", 4)
    capsys.readouterr()
    again = ["--dry-run", "--resume", "--out", str(tmp_path / "bm"), "--until", "lead=5%", "--max-repeats", "4"]
    assert experiment.main([str(tmp_path / "x.yaml"), *again]) == 0
    text = capsys.readouterr().out
    found = re.search(r"if starts scatter by (\S+) %, (\S+) % and (\S+) % \(measured in \S+, \d+ degrees of", text)
    assert found and all(float(each) < 4 for each in found.groups()), text


def test_every_workload_is_a_comparison_of_its_own(tmp_path: Path) -> None:
    more = [
        {"name": "one", "input_tokens": 8, "output_tokens": 8},
        {"name": "two", "input_tokens": 9, "output_tokens": 8},
    ]
    assert comparisons(make_schedule(write(tmp_path))) == 1
    assert comparisons(make_schedule(write(tmp_path, workloads=more))) == 2


def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, faster: float, noise: float) -> Go:
    """Visits that write made-up levels in place of starting anything."""
    visits: list[tuple[str, int]] = []

    def visit(number: int, planned: PlannedVisit, plan: Schedule, options: RunOptions, keeper: Any, *rest: Any) -> None:
        name = planned.configuration.name
        visits.append((name, planned.repeat))
        shutil.rmtree(options.out / plan.file.name / name, ignore_errors=True)
        folders.write(
            options.out / plan.file.name / name,
            planned.configuration.deployment,
            loads=(1, 4),
            repeats=planned.repeat + 1,
            faster=faster if name == "b" else 1.0,
            noise=noise,
        )
        keeper.update(number, status="done")

    monkeypatch.setattr(experiment_run, "_visit", visit)
    monkeypatch.setattr(experiment_run._Launcher, "stop", lambda self: None)

    def go(until: str, cap: int) -> tuple[Stopping, list[tuple[str, int]]]:
        path = write(tmp_path)
        parsed = parse_until(until, make_schedule(path).file, cap)
        plan = make_schedule(path, repeats=cap)
        stopping = Stopping(parsed, plan, tmp_path / "bm" / "x")
        run(plan, RunOptions(out=tmp_path / "bm", resume=True), io.StringIO(), enough=stopping)
        return stopping, visits

    return go


def test_it_ends_where_the_lead_is_resolved_and_the_record_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stopping, visits = measured(monkeypatch, tmp_path, 2.0, 0.01)("lead=5%", 6)
    assert {repeat for _, repeat in visits} == {0, 1, 2}
    record = read_record(tmp_path / "bm" / "x")
    assert record and record.stopped == "--until lead=5%, after 3 of at most 6 repeats"
    assert [visit.status for visit in record.visits] == ["done"] * 6, "what was not needed is not left to do"
    text = stopping.text()
    assert text.startswith("--until lead=5%: 3 repeats; 95 % for all comparisons and all 4 looks together\n")
    assert "P1xTP1 D1xTP1 pack over 2xTP1 collocated, output tokens/s 2.0" in text and text.endswith(": resolved")
    assert viz.main(["--exps", str(tmp_path / "bm" / "x"), "--no-plot", "--no-show-tables"]) == 0
    assert "ended by --until lead=5%, after 3 of at most 6 repeats" in capsys.readouterr().err


def test_without_a_resolution_it_goes_on_to_the_cap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    go = measured(monkeypatch, tmp_path, 1.03, 0.04)
    monkeypatch.setattr(sequential, "FUTILE", 0.0)
    stopping, visits = go("lead=1%", 5)
    assert {repeat for _, repeat in visits} == set(range(5))
    assert "repeats_by_result" not in [note.code for note in record_notes(tmp_path / "bm" / "x")]
    assert stopping(5) is not None and "not resolved, and further repeats would not resolve it" in stopping.text()
