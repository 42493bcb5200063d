"""The report as a file: what stands in it, that nothing in a name becomes markup, that it loads nothing."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from support import folders, published

from pdlab.analysis import curves as analysis
from pdlab.analysis import loading
from pdlab.bench.slo_search import LevelSample, SloSearchOptions, evaluate
from pdlab.cli import viz
from pdlab.core.workload import Slo
from pdlab.results.store import Store

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = "</script><script>window.broken=1</script><img src=x onerror=window.broken=1>\"'&"


class Elements(HTMLParser):
    """Every element with its attributes, and the text of the page outside scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside not in ("script", "style"):
            self.text += data


def payload(text: str) -> Any:
    match = re.search(r'<script type="application/json" id="payload">(.*?)</script>', text, re.DOTALL)
    assert match
    return json.loads(match[1])


def made(paths: list[Path], tmp_path: Path, *words: str) -> str:
    file = tmp_path / "out" / "report.html"
    assert viz.main(["--exps", *map(str, paths), "--report", str(file), *words]) == 0
    return file.read_text(encoding="utf-8")


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    """One clearly faster; one like the first; one level of it not valid, one repeat of another left out."""
    one, two, three = folders.deployments(3)
    reasons = {(16, r): ("5 of 320 requests failed",) for r in range(3)} | {(4, 1): ("prefix cache hits above 2 %",)}
    return [
        folders.write(tmp_path / "a", one, faster=1.0),
        folders.write(tmp_path / "b", two, faster=2.0 * 2),
        folders.write(tmp_path / "c", three, faster=1.0, reasons=reasons),
    ]


def test_what_the_command_line_says(three: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(three, tmp_path)
    out = capsys.readouterr().out.splitlines()
    assert out[0] == f"Report: {tmp_path}/out/report.html"
    assert out[1].endswith(" over 1xTP1 collocated") and out[2].lstrip().startswith("output tokens/s per node (8 GPUs)")
    assert "--at tpot_ms=" in out[-1]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["report.html"]


def test_every_requested_part_is_there(three: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = made(three, tmp_path)
    page = Elements(text).text
    lines = capsys.readouterr().out.splitlines()
    for line in lines[1:-1]:
        for part in line.strip(" ()").split("  "):
            for piece in part.strip().split(": "):
                assert piece in page, "the verdict is what the command line says"
    assert lines[-1] in page, "and how to have a reading at bounds"
    assert page.index("over 1xTP1 collocated") < page.index("TTFT p50") < page.index("Hover or tap")
    assert "Which of 3 configurations of tiny-gptoss" in page
    for folder in three:
        manifest = json.loads((folder / "manifest.json").read_text())
        for command in manifest["commands"]:
            assert command in page
        assert "0123abc" in page and "3 of 3 prompts give the same tokens" in page
    assert "5 of 320 requests failed" in page and "prefix cache hits above 2 %" in page
    assert "1 of 3 repeats" in page
    assert "Nothing wrong was found in 3 folders" in page, "a level that was excluded is no finding"
    assert f"--report {tmp_path}/out/report.html" in page, "the command that made it"


@pytest.mark.parametrize(
    ("statistic", "columns"), [("mean", ["mean", "p50"]), ("p90", ["p90", "p50"]), ("p50", ["p50"])]
)
def test_levels_have_the_statistic_that_the_page_judges_by(
    statistic: str, columns: list[str], three: list[Path], tmp_path: Path
) -> None:
    """These levels have too few requests for a p99."""
    text = made(three, tmp_path, "--stat", statistic)
    table = text[text.index('<section id="levels">') :]
    heads = re.findall(r'<th scope="col">((?:TTFT|TPOT|E2EL) \w+)</th>', table[: table.index("</thead>")])
    assert heads == [f"{metric} {name}" for metric in ("TTFT", "TPOT", "E2EL") for name in columns]


def test_every_level_is_in_the_table_and_in_the_plots(three: list[Path], tmp_path: Path) -> None:
    text = made(three, tmp_path)
    rows = [attrs for tag, attrs in Elements(text).tags if tag == "tr" and "data-curve" in attrs]
    assert len(rows) == 9
    levels = payload(text)["levels"]
    assert len(levels) == 9 and sum(not level["valid"] for level in levels) == 1
    left_out = next(level for level in levels if level["left_out"])
    assert left_out["summary"] == "concurrency 4, 2 repeats (1 more left out), steady window"
    assert left_out["left_out"] == "left out: prefix cache hits above 2 %"
    latencies, rates = left_out["tables"]
    assert latencies[0][0] == "ms" and latencies[2][0] == "TPOT" and "±" in latencies[2][1]
    assert rates[0][0] == "per second" and rates[1][0] == "requests"


def test_figures_in_the_plots_are_those_of_the_analysis(three: list[Path], tmp_path: Path) -> None:
    text = made(three, tmp_path)
    loaded = loading.load(three, {})
    curves = analysis.curves([each.experiment for each in loaded], [each.requests for each in loaded])
    spec = payload(text)
    assert [series["label"] for series in spec["series"]] == [curve.label for curve in curves]
    points = [(curve, point) for curve in curves for point in curve.points]
    for i, (curve, point) in enumerate(points):
        assert spec["columns"]["tpot.p50"][i][0] == pytest.approx(point.ms("tpot", "p50"), rel=1e-5)
        assert spec["columns"]["e2el.p50"][i][0] == pytest.approx(point.ms("e2el", "p50"), rel=1e-5)
        interval = point.rate_estimate("output").interval(0.95)
        assert interval is not None
        whole = pytest.approx([point.output_tokens_per_s, interval.high, interval.low], rel=1e-5)
        assert spec["columns"]["output.whole"][i] == whole
        per_gpu = pytest.approx(point.output_tokens_per_s / curve.gpus.total, rel=1e-5)
        assert spec["columns"]["output.gpu"][i][0] == per_gpu


def test_no_winner_inside_the_noise(tmp_path: Path) -> None:
    one, two, _ = folders.deployments(3)
    same = [folders.write(tmp_path / name, d, noise=0.2) for name, d in (("a", one), ("b", two))]
    page = Elements(made(same, tmp_path, "--gpus-per-node", "4")).text
    assert page.count("no difference resolved") == 3
    page = Elements(made(same, tmp_path, "--at", "tpot_ms=12", "--at", "tpot_ms=12,ttft_ms=900")).text
    assert "no winner is named while TTFT is unbounded" in page and "TTFT unbounded" in page
    assert "the best is" not in page


def test_different_workloads_are_not_compared(tmp_path: Path) -> None:
    published = ROOT / "tests" / "data" / "published"
    paths = [published / name for name in ("demo_itl1000_otl100_mixed_baseline_2xtp2", "demo_itl2000_otl50_1xtp4")]
    page = Elements(made(paths, tmp_path)).text
    assert "1000:100 input:output tokens" in page and "2000:50 input:output tokens" in page
    assert "the best is" not in page


def test_two_models_are_never_in_one_verdict_or_frontier(tmp_path: Path) -> None:
    """Every set of comparable experiments has a heading, verdicts and a choice of its own."""
    models = {"a": "org/small", "b": "org/small", "c": "org/large"}
    named = [
        folders.write(tmp_path / name, each.model_copy(update={"model": models[name]}))
        for name, each in zip(models, folders.deployments(3), strict=True)
    ]
    text = made(named, tmp_path)
    assert [curve["groups"] for curve in payload(text)["series"]] == [[model] for model in models.values()]
    page = Elements(text).text
    one, other, large = (curve["label"] for curve in payload(text)["series"])
    assert f"{one} over {other}" in page or f"{other} over {one}" in page
    assert f"over {large}" not in page and f"{large} over" not in page


def test_a_name_never_becomes_markup(tmp_path: Path) -> None:
    deployment = folders.deployments(1)[0].model_copy(update={"model": HOSTILE})
    folder = folders.write(
        tmp_path / "x <b>&", deployment, reasons={(4, 0): (HOSTILE,)}, commands=(HOSTILE,), label=HOSTILE
    )
    text = made([folder], tmp_path)
    elements = Elements(text)
    assert [tag for tag, _ in elements.tags].count("script") == 2
    assert not {"img", "b"} & {tag for tag, _ in elements.tags}
    assert HOSTILE in elements.text, "it reads as it was written"
    assert payload(text)["levels"][1]["left_out"] == f"left out: {HOSTILE}"


def test_nothing_is_loaded_from_anywhere(three: list[Path], tmp_path: Path) -> None:
    text = made(three, tmp_path)
    elements = Elements(text).tags
    assert not {"link", "iframe", "object", "embed", "img", "base"} & {tag for tag, _ in elements}
    assert not [attrs for _, attrs in elements if "src" in attrs or "srcset" in attrs]
    assert all(str(attrs["href"]).startswith("#") for _, attrs in elements if "href" in attrs)
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", text)
    policy = next(attrs["content"] for tag, attrs in elements if attrs.get("http-equiv"))
    assert policy and "default-src 'none'" in policy


def test_the_same_folders_give_the_same_bytes(three: list[Path], tmp_path: Path) -> None:
    assert made(three, tmp_path) == made(three, tmp_path)


def test_deployments_that_failed_are_listed(three: list[Path], tmp_path: Path) -> None:
    visits = [
        {"deployment": "pd-9", "repeat": 1, "status": "failed", "error": "replica died: out of <memory>"},
        {"deployment": "a", "repeat": 0, "status": "done"},
    ]
    record = {"name": "story", "file": "story.yaml", "experiment": {}, "visits": visits, "commands": ["experiment X"]}
    (tmp_path / ".experiment.json").write_text(json.dumps(record))
    page = Elements(made(three, tmp_path)).text
    assert "pd-9" in page and "repeat 1 of story: failed" in page and "replica died: out of <memory>" in page
    assert "experiment X" in page


def test_answers_to_slos_and_published_tables(three: list[Path], tmp_path: Path) -> None:
    table = tmp_path / "others.csv"
    head = "source,configuration,input_tokens,output_tokens,concurrency,output_tokens_per_s,tpot_p50_ms"
    table.write_text(f"{head}\nA talk,4xTP2,512,64,8,99999,1.5\n")
    words = ("--slo", "ttft_ms=900,tpot_ms=20", "--price-per-gpu-hour", "2", "--published", str(table))
    text = made(three, tmp_path, *words)
    page = Elements(text).text
    assert "Within TTFT <= 900 ms and TPOT <= 20 ms for 95 % of requests" in page
    assert "Cost at 2 per GPU hour" in page and "Best by throughput" in page
    assert "1 published curve, not ranked" in page
    assert [curve["published"] for curve in payload(text)["series"]] == [False, False, False, True]
    verdict = page[: page.index("Plots")]
    assert "99,999" not in verdict and "99999" not in verdict


def test_each_repeat_of_a_search_is_named(three: list[Path], tmp_path: Path) -> None:
    store, slo = Store(three[0]), Slo(ttft_s=0.5)
    for repeat in (0, 1):
        found = [LevelSample(rate_rps=1 + repeat, repeat=repeat, judged=1000, met=1000)]
        store.write_search(evaluate(found, SloSearchOptions(slo=slo), label="x", repeat=repeat).answer)
    page = Elements(made(three, tmp_path)).text
    for title, rate in (("ttft500ms-q0.95", 1), ("ttft500ms-q0.95, repeat 1", 2)):
        assert f", {title}: at least {rate} requests/s" in page


def test_audit_findings_are_in_it(tmp_path: Path) -> None:
    published = ROOT / "tests" / "data" / "published" / "demo_itl1000_otl100_mixed_baseline_2xtp2"
    page = Elements(made([published], tmp_path)).text
    assert "reused prompts" in page or "few prompts" in page
    assert "read them before you rely on a verdict" in page


def test_plots_and_tables_can_be_had_as_well(
    three: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made(three, tmp_path, "--show-tables", "--plot-path", str(tmp_path / "p.png"))
    assert (tmp_path / "p.png").is_file() and "Raw, whole deployment" in capsys.readouterr().out


@pytest.mark.parametrize("remarks", [["Yes & no."], ["Yes & no.", "Nor this: <b>x</b>"]], ids=["one-line", "two-lines"])
def test_remarks_are_in_the_page(remarks: list[str], three: list[Path], tmp_path: Path) -> None:
    words = [word for remark in remarks for word in ("--note", remark)]
    page = Elements(made(three, tmp_path, *words)).text
    assert all(remark in page for remark in remarks)


@pytest.mark.parametrize("words", [("--note", "Measured at night."), ("--slo", "ttft_ms=900,tpot_ms=20")])
def test_a_text_of_one_line_has_a_place(words: tuple[str, str], tmp_path: Path) -> None:
    """A note, and an SLO about which imported levels say nothing, are a title without a table."""
    folder = published.write(tmp_path / "x_1xtp2", {"conc8": published.content()})
    page = Elements(made([folder], tmp_path, *words)).text
    assert ("Measured at night." if words[0] == "--note" else "Within TTFT <= 900 ms and TPOT <= 20 ms") in page
