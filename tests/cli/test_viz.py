"""viz.py from its command line: tables, pictures, bad input."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import folders, golden

from pdlab.analysis import curves as analysis
from pdlab.analysis.view import View
from pdlab.bench import slo_search
from pdlab.bench.slo_search import LevelSample, SloSearchOptions
from pdlab.cli import viz
from pdlab.core.deployment import Disaggregated, Pool
from pdlab.core.workload import Slo
from pdlab.report import captions, paper
from pdlab.report.label_layout import Box, along, around, fit
from pdlab.results.schema import ExperimentRecord, VisitRecord
from pdlab.results.store import Store, experiment_folders, write_record

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = ROOT / "tests" / "data" / "published"
GOLDEN = Path(__file__).parent / "golden"
REFERENCE = ROOT.parent / "shared" / "reference" / "measured-h100"

COLLOCATED = str(PUBLISHED / "demo_itl1000_otl100_mixed_baseline_2xtp2")
PACK = str(PUBLISHED / "demo_itl1000_otl100_mixed_1xtp2-1xtp2")
SPREAD = str(PUBLISHED / "demo_itl1000_otl100_mixed_1xtp4-1xtp4-spread-ucx120")
RATES = str(PUBLISHED / "demo_itl2000_otl50_1xtp4")
PREFILL = str(PUBLISHED / "demo_prefill_only_4xtp1")
TUESDAY = str(PUBLISHED / "results-of-tuesday")
TABLE = ROOT / "tests" / "data" / "published-table.csv"


@pytest.mark.golden
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("three", ["--exps", COLLOCATED, PACK, SPREAD]),
        ("interactivity-total", ["--exps", COLLOCATED, PACK, "--use-interactivity", "--throughput-metric", "total"]),
        ("chunk-raw", ["--exps", COLLOCATED, SPREAD, "--latency-mode", "chunk", "--no-use-normalized"]),
        ("rates", ["--exps", RATES, "--stat", "mean", "--gpus-per-node", "4"]),
        ("prefill-only", ["--exps", PREFILL, "--latency-mode", "first_token", "--throughput-metric", "input"]),
        ("stated-gpus", ["--exps", TUESDAY, "--gpus", "results-of-tuesday=8"]),
        (
            "answers",
            [
                *("--exps", COLLOCATED, PACK, SPREAD, "--slo", "tpot_ms=12", "--slo", "ttft_ms=200,tpot_ms=20"),
                *("--slo-quantile", "0.5", "--price-per-gpu-hour", "2.5", "--published", str(TABLE)),
                *("--at", "tpot_ms=12", "--at", "tpot_ms=12,ttft_ms=110"),
            ],
        ),
        ("per-decode-gpu", ["--exps", COLLOCATED, PACK, SPREAD, "--per-role", "decode", "--gpus-per-node", "1"]),
    ],
)
def test_tables(name: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert viz.main([*words, "--no-plot"]) == 0
    out, err = capsys.readouterr()
    # The made-up files break Little's law, which the audit finds.
    assert [line for line in err.splitlines() if not line.startswith("note: the audit has findings")] == []
    golden.compare(out, GOLDEN / f"{name}.txt")


@pytest.mark.parametrize(
    "words",
    [
        ["--exps", COLLOCATED, PACK, SPREAD],
        ["--exps", COLLOCATED, PACK, "--log-latency", "--log-concurrency", "--stat", "mean"],
        ["--exps", COLLOCATED, RATES, "--use-interactivity"],
        ["--exps", PREFILL, "--latency-mode", "first_token", "--log-latency"],
        ["--exps", COLLOCATED, "--latency-mode", "chunk", "--chunk-size", "4", "--log-latency"],
        ["--exps", TUESDAY, "--gpus", "results-of-tuesday=8", "--no-use-normalized"],
        ["--exps", COLLOCATED, PACK, "--published", str(TABLE), "--per-role", "all"],
    ],
    ids=["three", "log", "rates-and-concurrency", "prefill-only", "chunk", "one-point", "published"],
)
def test_pictures(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "plot.png"
    assert viz.main([*words, "--plot-path", str(path), "--no-show-tables"]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"Plot: {path}"
    assert not [line for line in lines if "Raw" in line]


@pytest.mark.parametrize(("kind", "magic"), [("svg", b"<?xml"), ("pdf", b"%PDF"), ("png", b"\x89PNG")])
def test_formats(kind: str, magic: bytes, tmp_path: Path) -> None:
    words = ["--exps", COLLOCATED, "--no-show-tables", "--format", kind, "--plot-path"]
    for name in ("a", "b"):
        assert viz.main([*words, str(tmp_path / name)]) == 0
    first, second = ((tmp_path / f"{name}.{kind}").read_bytes() for name in ("a", "b"))
    assert first.startswith(magic)
    assert first == second


def test_everything_that_is_invalid_is_shown_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "x_1xtp1"
    shutil.copytree(TUESDAY, folder)
    file = folder / "conc4.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_prompts": 50}))
    assert viz.main(["--exps", str(folder), "--plot-path", str(tmp_path / "p.png")]) == 0
    out = capsys.readouterr().out
    assert "not valid: 10 of 50 requests failed" in out
    assert out.endswith("No valid level to compare.\n")


def test_a_note_stands_under_the_tables_and_makes_room_in_the_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heights = []
    for words in ([], ["--note", "Not measured: pd-pack: no memory", "--note", "Second line"]):
        path = tmp_path / f"{len(words)}.png"
        assert viz.main(["--exps", COLLOCATED, *words, "--plot-path", str(path)]) == 0
        heights.append(int.from_bytes(path.read_bytes()[20:24], "big"))
    assert "\n\nNot measured: pd-pack: no memory\nSecond line\n\n" in capsys.readouterr().out
    assert heights[1] > heights[0]


def test_footnotes_explain_the_terms_and_every_invalid_level(tmp_path: Path) -> None:
    """However many terms are explained, the reasons of invalid levels are not cut off for them."""
    made = folders.deployments(3)
    invalid = {(load, 0): (f"reason {load}",) for load in (1, 4, 16)}
    paths = [
        folders.write(tmp_path / deployment.label, deployment, repeats=1, reasons=invalid) for deployment in made[:2]
    ]
    curves = analysis.curves([Store(path).load() for path in paths])
    text = "\n".join(captions.usual_footnotes(curves, View()))
    assert "TTFT: time to first token. TPOT: time per output token after the first. p50: median." in text
    assert "1xTP1 collocated: 1 replica, prefill and decode (TP 1)" in text
    assert "P1xTP2 D1xTP2 spread: 1 prefill replica (TP 2) and 1 decode replica (TP 2)" in text
    assert "pack: the prefill and decode replicas of a pair share a node" in text
    assert text.count("not valid: reason") == 6


def test_published_h100_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not REFERENCE.is_dir():
        pytest.skip("the published H100 results are not beside this checkout (../shared/reference/measured-h100)")
    folders = [str(path) for path in sorted(REFERENCE.iterdir()) if path.is_dir()]
    assert viz.main(["--exps", *folders, "--plot-path", str(tmp_path / "h100.png")]) == 0
    assert "different workloads" in capsys.readouterr().out


def test_labels_never_cover_what_is_there() -> None:
    inside = Box(0, 0, 100, 100)
    taken = [around((50, 50), 4), *along([(50, 50), (100, 50)], 2)]
    box = fit((50, 50), (30, 10), taken, inside, (6,))
    assert box is not None
    assert box.within(inside)
    assert not any(box.hits(other) for other in taken)
    assert fit((50, 50), (30, 10), [inside], inside, (6, 12)) is None
    assert fit((50, 50), (300, 10), [], inside, (6,)) is None


def test_a_label_is_nowhere_nearer_to_another_point_than_to_its_own() -> None:
    inside, anchor, other = Box(0, 0, 100, 100), (50, 50), (66, 50)
    free = fit(anchor, (10, 10), [], inside, (6,))
    assert free is not None and free.distance(other) < free.distance(anchor)  # to the right, beside the other
    box = fit(anchor, (10, 10), [], inside, (6,), [other])
    assert box is not None and box.distance(other) >= box.distance(anchor) > 0
    crowd = [(x, y) for x in range(40, 61, 4) for y in range(40, 61, 4)]
    assert fit(anchor, (10, 10), [], inside, (6,), crowd) is None


@pytest.mark.parametrize("words", [["--no-plot", "--slo", "ttft_ms=900"], ["--report", "report.html"]])
@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "is empty (0 bytes)"), (gzip.compress(b""), "holds 0 requests, its level completed 80")],
    ids=["no-bytes", "no-lines"],
)
def test_an_empty_file_of_requests_is_one_line(
    content: bytes,
    message: str,
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = folders.write(tmp_path / "one", folders.deployments(1)[0], repeats=1)
    (folder / "concurrency4.records.json.gz").write_bytes(content)
    assert viz.main(["--exps", str(folder), *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1
    assert message in err and "concurrency4.records.json.gz" in err and "restore it, or delete it" in err
    assert not (tmp_path / "report.html").exists()


def test_what_was_searched_for_is_answered_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, _, _, two = folders.deployments(4)
    made = [folders.write(tmp_path / name, each) for name, each in (("one", one), ("two", two))]
    store, slo = Store(made[1]), Slo(ttft_s=0.5, quantile=0.9)
    search = SloSearchOptions(slo=slo, requests=400)
    samples = [LevelSample(rate_rps=r, repeat=0, judged=400, met=met) for r, met in ((70.0, 396), (77.0, 240))]
    store.write_search(slo_search.result(slo_search.points(samples, search), search, label="two", repeat=0))
    assert viz.main(["--exps", *map(str, made), "--no-plot"]) == 0
    out = capsys.readouterr().out
    assert "Within TTFT <= 500 ms for 90 % of requests, by goodput of open loops, " in out
    assert "not measured at constant request rates: " in out
    assert "search: between 70 and 77 requests/s (95 % confidence)" in out
    assert "Within TTFT <= 500 ms for 90 % of requests, by capacity of closed loops, no winner can be named: " in out
    assert "requests counted" in out, "the other was not searched: its requests are read and counted"
    assert viz.main(["--exps", *map(str, made), "--no-plot", "--slo", "ttft_ms=400"]) == 0
    out = capsys.readouterr().out
    assert "search" not in out and "TTFT <= 400 ms for 95 %" in out, "only what is asked for"


def test_the_folder_of_a_whole_experiment_stands_for_what_was_measured_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "whole"
    for deployment in folders.deployments(3):
        folders.write(root / deployment.label, deployment)
    *measured, unmeasured = sorted(root.iterdir())
    for level in Store(unmeasured).levels():
        level.unlink()
    visit = VisitRecord(deployment="x", repeat=0, status="failed", error="no")
    write_record(root, ExperimentRecord(name="whole", file="w.yaml", experiment={}, visits=(visit,)))
    assert experiment_folders([root, tmp_path]) == [*measured, tmp_path]
    assert viz.main(["--exps", str(root), "--no-plot"]) == 0
    at_once = capsys.readouterr().out
    assert viz.main(["--exps", *map(str, measured), "--no-plot"]) == 0
    assert capsys.readouterr().out == at_once
    assert viz.main(["--audit", str(root)]) in (0, 3)
    assert "2 folders" in capsys.readouterr().out
    assert viz.main(["--exps", str(root), str(measured[0]), "--no-plot"]) == 2
    assert "twice" in capsys.readouterr().err


def test_what_an_experiments_file_asks_is_answered_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "whole"
    made = [folders.write(root / deployment.label, deployment) for deployment in folders.deployments(2)]
    bounds = {"at": ["tpot_ms=90,ttft_ms=900", "tpot_p50_ms=90.0,ttft_p50_ms=900", "e2el_ms=7000"]}
    write_record(root, ExperimentRecord(name="whole", file="w.yaml", experiment=bounds, visits=()))
    for exps in ([root], made):
        assert viz.main(["--exps", *map(str, exps), "--no-plot", "--report", str(tmp_path / "r.html")]) == 0
        out = capsys.readouterr().out
        assert out.count("At TPOT p50 <= 90 ms and TTFT p50 <= 900 ms ") == 1 and "At E2EL p50 <= 7,000 ms " in out
        assert "give them, for example --at" not in out
        assert "At E2EL p50 &lt;= 7,000 ms" in (tmp_path / "r.html").read_text()
    assert viz.main(["--exps", str(root), "--no-plot", "--at", "tpot_ms=5"]) == 0
    assert "E2EL p50 <=" not in capsys.readouterr().out, "what is given takes the place of it"
    bounds = {"at": ["tpot=90"]}
    write_record(root, ExperimentRecord(name="whole", file="w.yaml", experiment=bounds, visits=()))
    assert viz.main(["--exps", str(root), "--no-plot"]) == 2
    error = capsys.readouterr().err
    assert f"{root}, at: tpot=90: 'tpot=90' is no bound" in error and error.count("\n") == 1


def test_an_unfinished_experiment_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "whole"
    for deployment in folders.deployments(2):
        folders.write(root / deployment.label, deployment)
    names = sorted(path.name for path in root.iterdir())
    visits = [VisitRecord(deployment=name, repeat=0, status="done") for name in names]
    visits.append(VisitRecord(deployment="third", repeat=0, status="planned"))

    def record(*kept: VisitRecord) -> None:
        measured = {name: (name,) for name in [*names, "third"][: len(kept)]}
        write_record(
            root, ExperimentRecord(name="whole", file="w.yaml", experiment={}, folders=measured, visits=tuple(kept))
        )

    record(*visits)
    for words in (["--exps", str(root), "--no-plot"], ["--audit", str(root)]):
        assert viz.main(words) in (0, 3)
        note = capsys.readouterr().err
        assert note == f"note: {root} is not finished: 1 planned of 3 visits; nothing is measured of third\n"
    record(*visits[:2])
    assert viz.main(["--exps", str(root), "--no-plot"]) == 0
    assert not capsys.readouterr().err
    (root / names[0] / "manifest.json").unlink()
    assert viz.main(["--exps", str(root), "--no-plot"]) == 2
    assert f"{names[0]}: manifest.json is missing" in capsys.readouterr().err
    assert viz.main(["--audit", str(root)]) == 3
    assert "manifest.json is missing" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("invalid", "why"), [(False, "its higher loads were not measured"), (True, "its higher loads are not valid")]
)
def test_no_winner_over_a_deployment_without_its_higher_loads(
    invalid: bool, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With all of its levels the two are not distinguishable."""
    for name in ("pack", "spread"):
        shutil.copytree(ROOT / "bm_results" / "local-pack-vs-spread" / name, tmp_path / name)
    finding = {"code": "client_lag", "gate": "client_saturation", "what": "client: late"}
    for path in (tmp_path / "spread").glob("concurrency[48]*.json"):
        if invalid:
            level = json.loads(path.read_text())
            path.write_text(json.dumps(level | {"validity": {"findings": [finding]}}))
        else:
            path.unlink()
            path.with_name(f"{path.stem}.records.json.gz").unlink()
    words = ["--exps", str(tmp_path / "pack"), str(tmp_path / "spread"), "--no-plot", "--no-show-tables"]
    assert viz.main([*words, "--at", "tpot_ms=10,ttft_ms=200", "--slo", "ttft_ms=200,tpot_ms=10"]) == 0
    answers = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("At ", "Within "))]
    assert len(answers) == 2
    for answer in answers:
        assert "no winner can be named: P1xTP1 D1xTP1 pack gives about" in answer
        assert f"P1xTP1 D1xTP1 spread gives at least 1,210 ({why})" in answer


def test_an_audit_draws_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["--report", str(tmp_path / "x.html")],
        ["--plot-path", str(tmp_path / "x.png")],
        ["--slo", "ttft_ms=1"],
    ):
        assert viz.main(["--audit", COLLOCATED, *words]) == 2
        error = capsys.readouterr().err
        assert f"error: {words[0]} does nothing with --audit" in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def copies(tmp_path: Path) -> list[Path]:
    """An experiment, a copy of it, the same files under another configuration's name, and one of its own."""
    one, _, _, other = folders.deployments(4)
    first = folders.write(tmp_path / "first", one, repeats=1)
    second = Path(shutil.copytree(first, tmp_path / "second"))
    renamed = Path(shutil.copytree(first, tmp_path / "renamed"))
    manifest = Store(renamed).read_manifest()
    pool = Pool(replicas=1, tp=one.gpus, pp=1)
    changed = one.model_copy(update={"topology": Disaggregated(prefill=pool, decode=pool, placement="pack")})
    Store(renamed).write_manifest(
        manifest.model_copy(update={"deployment": changed, "label": changed.label, "gpus": changed.gpus})
    )
    return [first, second, renamed, folders.write(tmp_path / "other", other, repeats=1)]


def test_identical_results_are_drawn_once_with_both_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, _, other = copies(tmp_path)
    path = tmp_path / "plot.png"
    assert viz.main(["--exps", str(first), str(second), str(other), "--plot-path", str(path)]) == 0
    out, err = capsys.readouterr()
    assert "note: identical results are drawn once: 1xTP1 collocated (first = second)\n" in err
    assert "1xTP1 collocated (second)" not in out
    audit = "note: the audit has findings that make a plot of these folders wrong (identical)"
    assert f"{audit}: python viz.py --audit {first}" in err and err.count("\n") == 2


def test_the_same_files_under_another_name_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, _, renamed, _ = copies(tmp_path)
    assert viz.main(["--exps", str(first), str(renamed), "--no-plot"]) == 0
    err = capsys.readouterr().err
    assert "the audit has findings that make a plot of these folders wrong (identical, contradiction)" in err
    assert viz.main(["--audit", str(first), str(renamed)]) == 3
    out = capsys.readouterr().out
    assert "one of the two curves belongs to another configuration: it ran on" in out and "is a copy" not in out


def test_many_folders_are_named_by_what_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = copies(tmp_path)
    fifth = shutil.copytree(made[0], tmp_path / "a fifth")
    assert viz.main(["--exps", *map(str, made), str(fifth), "--no-plot"]) == 0
    err = capsys.readouterr().err
    assert "python viz.py --audit DIR... with these folders lists them" in err


def test_nothing_is_said_of_sound_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = [folders.write(tmp_path / each.label, each) for each in folders.deployments(3)]
    assert viz.main(["--exps", *map(str, made), "--no-plot"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("faster", "words", "log"),
    [
        (0.02, [], True),
        (0.02, ["--no-log-latency"], False),
        (1.1, [], False),
        (1.1, ["--log-latency"], True),
        (0.02, ["--latency-mode", "chunk"], True),
        (0.02, ["--use-interactivity"], False),
    ],
)
def test_one_slow_curve_makes_the_latency_axis_logarithmic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faster: float, words: list[str], log: bool
) -> None:
    """And the axis says so."""
    one, _, two = folders.deployments(3)
    made = [folders.write(tmp_path / "a", one, repeats=1), folders.write(tmp_path / "b", two, repeats=1, faster=faster)]
    drawn: list[str] = []
    monkeypatch.setattr(paper, "save", lambda figure, _: drawn.extend(axes.get_xlabel() for axes in figure.axes))
    assert viz.main(["--exps", *map(str, made), *words, "--plot-path", str(tmp_path / "p.png")]) == 0
    (main_axis,) = [label for label in drawn if "is better" in label]
    assert ("log scale" in main_axis) is log


def test_a_home_that_cannot_be_written_to_is_not_remarked_on(tmp_path: Path) -> None:
    """matplotlib wants to keep its list of fonts there. A file stands in its way, even for root."""
    home = tmp_path / "home"
    home.write_text("no folder")
    mine = {name: value for name, value in os.environ.items() if name not in ("MPLCONFIGDIR", "XDG_CONFIG_HOME")}
    mine |= {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}
    done = subprocess.run(
        [
            sys.executable,
            "viz.py",
            "--exps",
            "bm_results/local-pack-vs-spread/pack",
            "--plot-path",
            str(tmp_path / "a.png"),
        ],
        cwd=Path(__file__).resolve().parents[2],
        env=mine,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
