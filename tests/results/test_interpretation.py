"""`viz.py --dry-run`: how result folders are interpreted, also those that cannot be plotted yet."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from support import folders, published

from pdlab.cli import viz
from pdlab.results.description import DESCRIPTION, Stated
from pdlab.results.interpretation import interpret


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """Two ratios, a folder each, whose size nothing gives, and a file that is no level."""
    for tokens, ratio in enumerate(("1p3d", "2p2d")):
        files = {f"conc{n}": published.content(n, total_output_tokens=20 * n * (101 + tokens)) for n in (4, 8)}
        published.write(tmp_path / "study" / ratio, files)
    table = "Scenario,Division,Units,Result\nOffline,Closed,Tokens/s,1\n"
    (tmp_path / "study" / "2p2d" / "mlperf.csv").write_text(table)
    return tmp_path / "study"


def shown(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = viz.main(list(map(str, words)))
    return (code, *capsys.readouterr())


def test_the_flags_that_it_prints_are_enough(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, "--exps", study, "--no-plot")[0] == 2
    code, out, _ = shown(capsys, "--exps", study, "--dry-run")
    assert code == 0
    flags = re.findall(r"--gpus \S+", out)
    assert len(flags) == 2
    words = shlex.split(" ".join(flags).replace("=N", "=8"))
    code, out, _ = shown(capsys, "--exps", study, "--dry-run", *words)
    assert code == 0 and "--gpus" not in out
    assert shown(capsys, "--exps", study, "--no-plot", *words)[0] == 0


def test_what_is_found(study: Path) -> None:
    found = interpret(study)
    (reason,) = found.skipped
    assert "MLPerf" in reason and found.skipped[reason] == (Path("2p2d/mlperf.csv"),)
    assert [(each.part, each.matches, each.files, each.tools, len(each.runs)) for each in found.curves] == [
        ("1p3d", ("1p3d/*",), 2, ("vllm bench serve",), 2),
        ("2p2d", ("2p2d/*",), 2, ("vllm bench serve",), 2),
    ]
    assert {(each.model, each.loads, each.gpus) for each in found.curves} == {
        ("org/model-a", "concurrency 4 to 8", None)
    }


def test_the_name_of_the_folder_and_its_description_give_the_size(tmp_path: Path, study: Path) -> None:
    named = published.write(tmp_path / "x_1xtp2-3xtp2", {"conc4": published.content(4)})
    (curve,) = interpret(named).curves
    assert (curve.gpus, curve.deployment, curve.flags) == (8, "pd-pack-p1xtp2-d3xtp2", None)
    (study / DESCRIPTION).write_text(
        "results:\n- {match: 1p3d/*, gpus: 8, label: one}\n- {match: mlperf*, skip: true}\n"
    )
    found = interpret(study)
    assert [(each.gpus, each.label) for each in found.curves] == [(8, "one"), (None, None)]
    assert [each.gpus for each in interpret(study, Stated(16)).curves] == [16, 16]


def test_ours_and_a_folder_without_levels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (deployment, *_) = folders.deployments(2)
    ours = folders.write(tmp_path / "ours", deployment, repeats=1)
    other = tmp_path / "other"
    other.mkdir()
    (other / "experiment_metadata.json").write_text(json.dumps({"benchmark_version": "1"}))
    code, out, _ = shown(capsys, "--exps", ours, other, "--dry-run")
    assert code == 0
    assert " pdlab " in out and "other: no levels" in out and "genai-bench" in out


@pytest.mark.parametrize("words", [["--no-plot"], ["--at", "tpot_ms=9"], ["--report", "x.html"]])
def test_it_draws_nothing(words: list[str], study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = shown(capsys, "--exps", study, "--dry-run", *words)
    assert code == 2 and words[0] in err
