"""Files that the clients themselves wrote: the table has the figures that the clients gave.

tests/live/test_clients.py made them, and makes them again with PDLAB_UPDATE_GOLDEN=1.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.client_files import EQUAL, KEPT, compared

from pdlab.cli import viz
from pdlab.results.readers import SUFFIXES, read_file

NAMES = sorted(path.stem for path in KEPT.glob("*.json"))
TOOLS = {
    "aiperf": "AIPerf",
    "evalscope": "evalscope perf",
    "genai-bench": "genai-bench",
    "guidellm": "guidellm",
    "inference-perf": "inference-perf",
    "sglang": "SGLang bench_serving",
    "vllm": "vllm bench serve",
    "vllm-sweep": "vllm bench serve",
}


def test_there_are_files_of_every_client_that_runs_here() -> None:
    assert set(NAMES) == set(TOOLS)


@pytest.mark.parametrize("name", TOOLS)
def test_our_table_has_the_figures_of_the_client(name: str) -> None:
    told = json.loads((KEPT / f"{name}.json").read_text())
    own = {float(load): figures for load, figures in told["figures"].items()}
    compared(KEPT / name, own, EQUAL)


@pytest.mark.parametrize("name", TOOLS)
def test_every_file_is_known_and_levels_come_from_one_kind(name: str) -> None:
    files = [each for each in (KEPT / name).rglob("*") if each.suffix in SUFFIXES]
    readings = [read_file(file) for file in files]
    assert {reading.tool for reading in readings if reading.levels} == {TOOLS[name]}
    assert all(reading.levels or reading.skipped for reading in readings)


def test_the_llm_d_reports_of_inference_perf_alone_have_its_figures(tmp_path: Path) -> None:
    for report in (KEPT / "inference-perf").glob("inference-perf.partial.stage_*.yaml"):
        shutil.copy(report, tmp_path / f"conc1_rr{(4, 8)['_1' in report.name]}.yaml")
    told = json.loads((KEPT / "inference-perf.json").read_text())
    own = {float(load): figures for load, figures in told["figures"].items()}
    assert {read_file(file).tool for file in tmp_path.iterdir()} == {"llm-d benchmark report"}
    compared(tmp_path, own, EQUAL)


def test_the_table_of_the_docs_is_what_these_files_give(capsys: pytest.CaptureFixture[str]) -> None:
    folders = sorted(str(KEPT / name) for name in TOOLS)
    gpus = [f"{name}=2" for name in TOOLS]
    assert viz.main(["--exps", *folders, "--no-plot", "--gpus", *gpus]) == 0
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    page = (KEPT.parents[2] / "docs" / "results-of-others.md").read_text()
    rows = [line.split() for line in page.splitlines()]
    shown = [row for row in rows if row and row[0] in TOOLS and row[1] in ("2", "4", "4/s", "8/s")]
    assert len(shown) == 2 * len(TOOLS)
    for row in shown:
        assert any(all(cell in rest for cell in row) for line in printed if (rest := iter(line))), row
