"""Files that the clients themselves wrote: the table has the figures that the clients gave.

tests/live/test_clients.py made them, and makes them again with PDLAB_UPDATE_GOLDEN=1.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.client_files import EQUAL, KEPT, compared

import pdlab
from pdlab.cli import viz
from pdlab.core.errors import PdlabError, StoreError
from pdlab.results.readers import may_be_read, read_file

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
    kept = json.loads((KEPT / f"{name}.json").read_text())
    own = {float(load): figures for load, figures in kept["figures"].items()}
    compared(KEPT / name, own, EQUAL)


@pytest.mark.parametrize("name", TOOLS)
def test_every_file_is_known_and_levels_come_from_one_kind(name: str) -> None:
    files = [each for each in (KEPT / name).rglob("*") if each.is_file() and may_be_read(each)]
    readings = [read_file(file) for file in files]
    assert {reading.tool for reading in readings if reading.levels} == {TOOLS[name]}
    assert all(reading.levels or reading.skipped for reading in readings)


def test_the_llm_d_reports_of_inference_perf_alone_have_its_figures(tmp_path: Path) -> None:
    for report in (KEPT / "inference-perf").glob("inference-perf.partial.stage_*.yaml"):
        shutil.copy(report, tmp_path / f"conc1_rr{(4, 8)['_1' in report.name]}.yaml")
    kept = json.loads((KEPT / "inference-perf.json").read_text())
    own = {float(load): figures for load, figures in kept["figures"].items()}
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


SPOILT = (None, "x", [], {}, -1, 0, True, [None], {"a": None}, float("nan"), 10**400)


def places(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to the values of a file; of a list those of its first three."""
    items = (
        content.items() if isinstance(content, dict) else enumerate(content[:3]) if isinstance(content, list) else ()
    )
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


@pytest.mark.parametrize("name", TOOLS)
def test_a_file_of_another_form_is_one_line(name: str, tmp_path: Path) -> None:
    """Values of a wrong kind anywhere: the file is read, or refused in one line that names it."""
    chance = random.Random(name)
    files = [file for file in (KEPT / name).rglob("*.json") if read_file(file).levels]
    for number in range(12 if files else 0):
        file = chance.choice(files)
        content = json.loads(file.read_text())
        every = list(places(content))
        *path, last = chance.choice([each for each in every if len(each) <= chance.choice((1, 2, 3, 6))])
        inner = content
        for key in path:
            inner = inner[key]
        inner[last] = chance.choice(SPOILT)
        folder = tmp_path / str(number)
        folder.mkdir()
        for beside in file.parent.iterdir():
            if beside.is_file():
                shutil.copy(beside, folder)
        (folder / file.name).write_text(json.dumps(content))
        try:
            pdlab.load(folder, gpus={folder.name: 2}).levels()
        except PdlabError as error:
            assert "\n" not in str(error) and str(folder) in str(error)


def test_a_part_of_another_form_is_named(tmp_path: Path) -> None:
    level = json.loads(next((KEPT / "genai-bench").glob("D64*.json")).read_text())
    (tmp_path / "a.json").write_text(json.dumps(level | {"aggregated_metrics": 3}))
    with pytest.raises(
        StoreError, match=r"a\.json: it begins as a file of genai-bench, but a part of it has another form"
    ):
        read_file(tmp_path / "a.json")
