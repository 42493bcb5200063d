"""A report as a value: what a program gets, and that the command line prints the same."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
from support import folders

import pdlab
from pdlab.analysis.curves import per_million_tokens
from pdlab.cli import viz
from pdlab.core.errors import StoreError, UsageError
from pdlab.core.mixes import parse_mixes
from pdlab.core.workload import Workload
from pdlab.report.load import find
from pdlab.results.store import Store

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = ROOT / "tests" / "data" / "published"
COLLOCATED = PUBLISHED / "demo_itl1000_otl100_mixed_baseline_2xtp2"
PACK = PUBLISHED / "demo_itl1000_otl100_mixed_1xtp2-1xtp2"
PREFILL = PUBLISHED / "demo_prefill_only_4xtp1"
TUESDAY = PUBLISHED / "results-of-tuesday"
TABLE = ROOT / "tests" / "data" / "published-table.csv"


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    return [
        folders.write(tmp_path / deployment.label, deployment, faster=1 + 0.2 * i)
        for i, deployment in enumerate(folders.deployments(3))
    ]


@pytest.mark.parametrize("per_role", ["all", "decode"])
def test_the_command_line_prints_the_report(
    per_role: str, three: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--slo", "ttft_ms=900,tpot_ms=90", "--price-per-gpu-hour", "2", "--at", "tpot_ms=30", "--note", "One."]
    words += ["--published", str(TABLE), "--per-role", per_role]
    assert viz.main(["--exps", *map(str, three), *words, "--no-plot"]) == 0
    printed = capsys.readouterr().out
    report = pdlab.build_report(
        pdlab.load(*three),
        pdlab.View.model_validate({"role": per_role}),
        at=["tpot_ms=30"],
        slos=["ttft_ms=900,tpot_ms=90"],
        price_per_gpu_hour=2,
        published=[TABLE],
        remarks=["One."],
    )
    assert pdlab.render_text(report) + "\n" == printed
    assert bool(report.left_out) == (per_role == "decode")


def test_the_facts_are_values(three: list[Path]) -> None:
    report = pdlab.build_report(pdlab.load(*three), at=["tpot_ms=1000"], slos=["ttft_ms=900"], price_per_gpu_hour=2)
    labels = {curve.label for curve in report.curves}
    assert len(labels) == 3 and not report.notes and not report.doubts
    (headline,) = report.comparison.headlines
    against = {headline.reference, *(each.label for each in headline.comparisons)}
    assert len(against) > 1 and against | set(report.comparison.apart) == labels
    assert [[each.kind for each in answers] for answers in report.bounds_rankings] == [["concurrency"]]
    assert {drawn.curve.label for frontier in report.frontiers for drawn in frontier.points} <= labels
    assert [each.loop for each in report.slo_rankings] == ["closed"]
    assert [each.kind for each in report.crossovers] == [None]
    assert len(report.costs) == sum(len(curve.points) for curve in report.curves)
    first = report.costs[0]
    assert first.per_million["input"] == per_million_tokens(
        2, first.curve.gpus.whole or 0, first.point.rate_estimate("input")
    )
    assert pdlab.build_report(pdlab.load(*three)).costs == ()


def test_what_the_view_leaves_open_is_chosen_by_the_results_and_what_it_sets_is_kept() -> None:
    results = pdlab.load(PREFILL)
    report = pdlab.build_report(results)
    assert report.view.latency_mode == "first_token"
    assert [note.code for note in report.notes if note.code != "plot_audited"] == ["other_latency"]
    with pytest.raises(UsageError, match="no level has the p50 of TPOT"):
        pdlab.build_report(results, pdlab.View(latency_mode="token"))


def test_an_slo_reads_the_requests_that_it_needs(three: list[Path]) -> None:
    results = pdlab.load(*three)
    assert not any(each.requests for each in results.loaded), "repeats tell the intervals"
    report = pdlab.build_report(results, slos=["ttft_ms=900"])
    assert all(each.requests for each in report.results.loaded)
    assert {capacity.how for slo_ranking in report.slo_rankings for capacity in slo_ranking.capacities} == {"requests"}
    assert report.results.with_every_request() is report.results


def test_notes_have_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = folders.write(tmp_path / "first", folders.deployments(1)[0])
    second = Path(shutil.copytree(first, tmp_path / "second"))
    report = pdlab.build_report(pdlab.load(first, second))
    assert [note.code for note in report.notes] == ["drawn_once", "plot_audited"]
    assert report.doubts == (report.notes[1].text,) and {each.kind for each in report.findings} == {"identical"}
    assert viz.main(["--exps", str(first), str(second), "--no-plot"]) == 0
    assert capsys.readouterr().err == "".join(f"note: {note.text}\n" for note in report.notes)


def test_levels_are_a_table_with_one_row_per_repeat_and_no_tail_of_few_requests(tmp_path: Path) -> None:
    reasons = {(4, 1): ("made up",)}
    rows = pdlab.load(folders.write(tmp_path / "x", folders.deployments(1)[0], reasons=reasons)).levels()
    assert len(rows) == 9 and len({tuple(row) for row in rows}) == 1
    assert [(row["load"], row["repeat"]) for row in rows if not row["valid"]] == [(4.0, 1)]
    for row in rows:
        completed, mean, p99 = row["completed"], row["ttft_mean_ms"], row["ttft_p99_ms"]
        assert isinstance(completed, int) and isinstance(mean, float) and mean > 1
        assert (p99 is None) == (completed < 500)


def test_gpus_are_given_by_the_name_of_a_folder() -> None:
    assert {row["gpus"] for row in pdlab.load(TUESDAY, gpus={TUESDAY.name: 8}).levels()} == {8}
    with pytest.raises(StoreError, match="--gpus results-of-tuesday=N"):
        pdlab.load(TUESDAY)
    with pytest.raises(UsageError, match=r"no folder of load\(\) is called 'monday'"):
        pdlab.load(TUESDAY, gpus={"monday": 8})


def test_a_folder_that_is_named_twice_is_refused_by_the_name_that_the_caller_knows() -> None:
    with pytest.raises(UsageError, match=r"--audit names .* twice"):
        find([PACK, PACK], "--audit")


def test_pictures_and_page_are_those_of_the_report(three: list[Path], tmp_path: Path) -> None:
    report = pdlab.build_report(pdlab.load(*three))
    made = pdlab.draw(report, tmp_path / "p.svg")
    assert [(each.what, each.path) for each in made] == [("Plot", tmp_path / "p.svg")]
    pdlab.write_html(report, tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert "pdlab.write_html(...)" in page and all(curve.label in page for curve in report.curves)


def test_a_level_over_time_without_a_table_is_in_the_page(tmp_path: Path) -> None:
    """Its section is a title only."""
    store = Store(folders.write(tmp_path / "moving", folders.deployments(1)[0], repeats=1))
    workload = Workload(lengths=parse_mixes("512:64,256:64,every=5"))
    for run in store.load().runs:
        store.write(run.model_copy(update={"workload": workload}), store.read_records(run.key), force=True)
    page = tmp_path / "r.html"
    assert viz.main(["--exps", str(store.folder), "--report", str(page)]) == 0
    assert ": none changed</strong></summary>\n</details>" in page.read_text()


def test_a_wrong_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'laod'"):
        _ = pdlab.laod
    assert all(getattr(pdlab, name) is not None for name in pdlab.__all__)
    assert math.isfinite(float(pdlab.__version__.split(".")[0]))
