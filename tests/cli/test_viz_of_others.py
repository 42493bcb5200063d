"""viz.py on files that others wrote, with whatever they lack: shown, or one line."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import folders, published

from pdlab.analysis import goodput
from pdlab.analysis.curves import curves
from pdlab.analysis.loading import load
from pdlab.analysis.view import View
from pdlab.cli import viz
from pdlab.core.workload import parse_slo

PACK = Path(__file__).parents[2] / "bm_results" / "local-pack-vs-spread" / "pack"


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = viz.main(list(words))
    out, err = capsys.readouterr()
    return code, out, err


def without(*keys: str) -> dict[str, dict[str, Any]]:
    return {f"conc{n}": published.content(n, **dict.fromkeys(keys)) for n in (8, 16)}


@pytest.mark.parametrize(
    ("lacks", "title"),
    [
        (["median_ttft_ms", "median_tpot_ms"], "TPOT mean"),
        (["mean_ttft_ms", "mean_tpot_ms"], "TPOT p50"),
        (["mean_tpot_ms", "median_tpot_ms"], "TTFT p50"),
        (["mean_ttft_ms", "median_ttft_ms"], "TPOT p50"),
        (["mean_tpot_ms", "median_tpot_ms", "median_ttft_ms"], "TTFT mean"),
    ],
)
def test_a_level_is_shown_without_what_it_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lacks: list[str], title: str
) -> None:
    folder = published.write(tmp_path / "x_1xtp2", without(*lacks))
    code, out, err = shown(capsys, "--exps", str(folder), "--no-plot")
    assert code == 0
    assert title in out.split("Raw,")[1].splitlines()[1]
    assert ("is shown" in err) is ("median_tpot_ms" in lacks)


def test_a_level_without_an_answer_has_the_workload_of_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = {f"conc{n}": published.content(n, duration=20 * n * 4.2 / n) for n in (8, 16, 32)}
    one = published.write(tmp_path / "a_2xtp4", whole)
    for failed in whole:
        other = published.write(tmp_path / failed / "b_4xtp2", {**whole, failed: published.unanswered(int(failed[4:]))})
        code, out, _ = shown(capsys, "--exps", str(one), str(other), "--no-plot")
        assert code == 0 and "prefill-only" not in out and "Mean lengths differ" not in out
        assert out.count(" 1000:101 ") == 2, "in the table of experiments"
        assert "4xTP2 collocated over 2xTP4 collocated" in out and "left out: 1 load valid in only one" in out
        assert "not valid: " in out and "requests failed" in out


@pytest.mark.parametrize("name", ["b_4xtp2", "b_itl1000_otl101_4xtp2"])
def test_a_folder_without_an_answer_is_of_no_other_workload(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = published.write(tmp_path / "a_2xtp4", {"conc8": published.content(8)})
    none = published.write(tmp_path / name, {"conc8": published.unanswered(8)})
    code, out, err = shown(capsys, "--exps", str(none), "--no-plot")
    assert (code, out) == (2, "") and "no request was answered in any level" in err
    code, out, _ = shown(capsys, "--exps", str(good), str(none), "--no-plot")
    assert code == 0 and "prefill-only" not in out and "different workloads" not in out
    assert (" unknown " in out) is (name == "b_4xtp2")


def test_what_is_asked_for_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = published.write(tmp_path / "x_1xtp2", without("median_ttft_ms", "median_tpot_ms"))
    code, _, err = shown(capsys, "--exps", str(folder), "--no-plot", "--stat", "p50", "--latency-mode", "token")
    assert (code, err.startswith("error: no level has the p50 of TPOT")) == (2, True)
    folder = published.write(tmp_path / "y_1xtp2", without(*published.content()))
    assert shown(capsys, "--exps", str(folder), "--no-plot")[0] == 2


def test_goodput_and_audit_have_one_rule_for_a_client_that_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two levels with the same latencies, the one whose client stopped gives no goodput, and the audit says why."""
    p95 = {"p95_ttft_ms": 100.0, "p95_tpot_ms": 40.0}
    free = published.content(8, **p95, request_rate=2.0, max_concurrency=64)
    held = published.content(16, **p95, request_rate=20.0, max_concurrency=16)
    slo, served = parse_slo("ttft_ms=2000,tpot_ms=50", 0.95), {}
    for name, files in {"both": {"a": free, "b": held}, "free": {"a": free}}.items():
        folder = published.write(tmp_path / f"{name}_1xtp2", files)
        (curve,) = curves([each.experiment for each in load([folder], {})])
        (slo_ranking,) = goodput.slo_rankings([curve], slo, View())
        served[name] = slo_ranking.capacities[0].throughput.value
        code, out, _ = shown(capsys, "--audit", str(folder))
        assert (code, "the client stopped at 16 in flight" in out) == (3, name == "both")
    assert served["both"] == served["free"] > 0


def test_two_folders_of_one_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(published.write(tmp_path / side / "results", {"conc8": published.content()})) for side in "ab"]

    def sizes(*gpus: str) -> list[str]:
        words = ["--exps", *paths, "--no-plot", *(word for each in gpus for word in ("--gpus", each))]
        code, out, err = shown(capsys, *words)
        assert code == 0, err
        table = out.split("Raw,")[0].splitlines()
        return [line.split()[-5] for line in table if line.startswith("results")]

    assert sizes("a/results=2", "b/results=4") == ["2", "4"]
    assert sizes(f"{paths[0]}=2", "results=4") == ["2", "4"]
    assert sizes("results=4", "b/results=2") == ["4", "2"]
    code, _, err = shown(capsys, "--exps", *paths, "--no-plot", "--gpus", "c/results=2")
    assert code == 2 and "c/results" in err


def test_a_report_reads_what_a_plot_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = published.write(tmp_path / "of-tuesday", {"conc8": published.content(), "b": published.content(16)})
    report = tmp_path / "report.html"
    assert shown(capsys, "--exps", str(folder), "--gpus", "of-tuesday=8", "--report", str(report))[0] == 0
    assert "nothing can be normalised" not in report.read_text()


def test_several_curves_of_one_folder_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {"a": published.content(), "b": published.content(total_input_tokens=160 * 4000)}
    code, out, err = shown(capsys, "--exps", str(published.write(tmp_path / "x_1xtp2", files)), "--no-plot")
    assert code == 0 and "holds 2 curves" in err
    assert "1xTP2 collocated (1000:101)" in out and "1xTP2 collocated (4000:101)" in out
    assert "2 repeats" not in out


KEYS = [*published.content(), "ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps", "tag", "median_ttft"]
KEYS += [f"{statistic}_{metric}_ms" for statistic in ("mean", "median", "p95") for metric in ("itl", "e2el")]
VALUES: list[Any] = [None, "", "x", "1.5", "inf", "linear", [], [1], {}, {"a": 1}, True, False]
VALUES += [float("nan"), float("inf"), -1, 0, 2, 3.5, 1e308, 10**400, -0.0, "a" * 300, "é\n\x00"]
GONE = object()
PLACES = ("conc8", "conc16_rr2", "b")
changes = st.dictionaries(
    st.tuples(st.sampled_from(PLACES), st.sampled_from(KEYS)), st.sampled_from([*VALUES, GONE]), max_size=6
)
FUZZ = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def answered(capsys: pytest.CaptureFixture[str], folders: list[Path], report: Path) -> None:
    """Every command answers, and refuses in one line."""
    names = [str(folder) for folder in folders]
    bounds = ["--slo", "ttft_ms=2000,tpot_ms=50", "--at", "tpot_ms=50"]
    for words in (
        ["--exps", *names, "--no-plot", *bounds],
        ["--audit", *names],
        ["--exps", *names, "--report", report],
    ):
        code, out, err = shown(capsys, *map(str, words))
        assert code in (0, 2, 3), err
        if code == 2:
            assert err.splitlines()[-1].startswith("error: ") and not out


@pytest.mark.property
@given(changes)
@FUZZ
def test_no_file_of_others_is_a_traceback(capsys: pytest.CaptureFixture[str], changed: dict[Any, Any]) -> None:
    files = {
        "conc8": published.content(),
        "conc16_rr2": published.content(16, request_rate=2.0),
        "b": published.content(32),
    }
    for (stem, key), value in changed.items():
        files[stem] = {**files[stem], key: value}
        if value is GONE:
            del files[stem][key]
    with tempfile.TemporaryDirectory() as place:
        folder = published.write(Path(place) / "x_itl1000_otl101_1xtp2", files)
        answered(capsys, [folder], Path(place) / "report.html")


def places(value: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The ways to every value in JSON data."""
    if not isinstance(value, dict):
        return [way] if way else []
    return [*([way] if way else []), *(each for key in value for each in places(value[key], (*way, key)))]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    place = tmp_path_factory.mktemp("measured")
    made = folders.deployments(2)
    return [folders.write(place / name, each, repeats=1) for name, each in zip("ab", made, strict=True)]


@pytest.mark.property
@given(st.data())
@FUZZ
def test_no_file_of_ours_is_a_traceback(
    capsys: pytest.CaptureFixture[str], measured: list[Path], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = shutil.copytree(measured[0], Path(place) / "a")
        for _ in range(data.draw(st.integers(1, 3))):
            file = folder / data.draw(st.sampled_from(sorted(path.name for path in folder.glob("*.json"))))
            whole = json.loads(file.read_text())
            *way, key = data.draw(st.sampled_from(places(whole)))
            inner = whole
            for step in way:
                inner = inner[step]
            value = data.draw(st.sampled_from([*VALUES, GONE]))
            inner[key] = value
            if value is GONE:
                del inner[key]
            if whole:
                file.write_text(json.dumps(whole))
        answered(capsys, [folder, measured[1]], Path(place) / "report.html")


@pytest.mark.parametrize(
    ("way", "value"),
    [
        (("steady", "itl", "mean_s"), float("inf")),  # no JSON for the report
        (("steady", "tpot", "mean_s"), 1e308),  # no number of milliseconds
        (("key", "look"), 1),  # requests of some levels alone, and too few for the percentile of the others
    ],
)
def test_once_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], measured: list[Path], way: tuple[str, ...], value: Any
) -> None:
    folder = shutil.copytree(measured[0], tmp_path / "a")
    whole = json.loads((folder / "concurrency4.json").read_text())
    *outer, last = way
    inner = whole
    for step in outer:
        inner = inner[step]
    inner[last] = value
    (folder / "concurrency4.json").write_text(json.dumps(whole))
    answered(capsys, [folder, measured[1]], tmp_path / "report.html")


def test_a_percentile_of_too_few_requests_gives_no_goodput(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = published.content(4, p95_ttft_ms=100.0, p95_tpot_ms=40.0)
    folder = published.write(tmp_path / "x_1xtp2", {"a": few})
    code, out, _ = shown(capsys, "--exps", str(folder), "--no-plot", "--slo", "ttft_ms=2000,tpot_ms=50")
    assert code == 0 and "not known" in out.splitlines()[-1]


def test_tokens_that_nobody_got_have_no_price(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = published.write(tmp_path / "x_1xtp2", {"conc8": published.content(total_output_tokens=0)})
    assert viz.main(["--exps", str(folder), "--no-plot", "--price-per-gpu-hour", "2"]) == 0
    *_, output, of_input, _ = capsys.readouterr().out.partition("Cost at 2")[2].splitlines()[3].split()
    assert output == "-" and float(of_input) > 0


def test_a_label_is_the_name_of_a_curve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (
        published.write(tmp_path / name, {"conc8": published.content(8, duration=duration_s)})
        for name, duration_s in (("a_1xtp2", 80.0), ("b_1xtp2", 90.0))
    )
    code, out, _ = shown(
        capsys, "--exps", str(first), str(second), "--no-plot", "--label", "a_1xtp2=old wire", "b_1xtp2=new\nwire"
    )
    rows = out.split("levels\n")[1].splitlines()[1:3]
    assert code == 0
    assert [row.split("  ")[0] for row in rows] == ["old wire", r"new\nwire"]
    assert "a_1xtp2" in rows[0] and "1xTP2 collocated" not in out


def test_a_label_is_the_name_of_a_curve_of_pdlab(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = shown(capsys, "--exps", str(PACK), "--no-plot", "--label", "pack=one box")
    assert code == 0
    assert "one box" in out and "P1xTP1 D1xTP1 pack" not in out


@pytest.mark.parametrize("name", ["two\nlines_1xtp2", "two\u2028lines_1xtp2", "latin\udce9_1xtp2", "$\\frac{$_1xtp2"])
def test_any_name_of_a_folder_can_be_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    folder = published.write(tmp_path / name, {"conc8": published.content(8, model_id="a\u2028$\\frac{$\x1b[1m")})
    words = ["--exps", str(folder), "--note", "$\\frac{$", "--plot-path", str(tmp_path / "plot.png")]
    code, out, err = shown(capsys, *words, "--show-tables", "--report", str(tmp_path / "page.html"))
    assert (code, "\x1b" in out + err) == (0, False)
    assert "<html" in (tmp_path / "page.html").read_text(encoding="utf-8")
