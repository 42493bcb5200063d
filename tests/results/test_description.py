"""What people state of result files: by flags, and in a file that `pdlab describe --write` writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import published

from pdlab.cli import describe, viz
from pdlab.core.errors import StoreError, UsageError
from pdlab.results.description import DESCRIPTION, description_for, of_flags
from pdlab.results.published_folders import load_experiments
from pdlab.results.store import MANIFEST


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """Two ratios, a folder each, whose size nothing gives."""
    for ratio in ("1p3d", "2p2d"):
        published.write(tmp_path / "study" / ratio, {f"conc{n}": published.content(n) for n in (4, 8)})
    return tmp_path / "study"


def edited(file: Path, changes: dict[str, str]) -> None:
    text = file.read_text()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    file.write_text(text)


def test_a_described_folder_is_read_by_its_description(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(StoreError, match="add viz"):
        load_experiments(study)
    assert describe.main([str(study), "--write"]) == 0
    assert "2 curves, 2 of unknown size" in capsys.readouterr().out
    first = "- match: 1p3d/*\n  deployment:"
    second = "- match: 2p2d/*\n  deployment:\n  gpus:\n  label:"
    edited(
        study / DESCRIPTION,
        {
            first: f"{first} pd-pack-p1xtp2-d3xtp2",
            second: "- match: 2p2d/*\n  deployment:\n  gpus: 4\n  label: two and two",
        },
    )
    found = {each.label: each.manifest for each in load_experiments(study)}
    assert sorted(manifest.gpus or 0 for manifest in found.values()) == [4, 8]
    assert found["two and two"].gpus == 4
    (deployed,) = [manifest.deployment for manifest in found.values() if manifest.deployment]
    assert deployed.label == "pd-pack-p1xtp2-d3xtp2"
    assert describe.main([str(study), "--write"]) == 2, "it is not written over what was corrected"
    assert describe.main([str(study), "--write", "--force"]) == 0
    assert {each.manifest.gpus for each in load_experiments(study)} == {4, 8}, "what was stated is kept"


def test_patterns_of_flags(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--exps", str(study), "--no-plot", "--gpus", "1p3d=8", "2p2d/*=4", "--label", "1p3d=one and three"]
    assert viz.main(words) == 0
    out = capsys.readouterr().out
    assert "one and three" in out
    assert viz.main([*words, "--label", "9p9d=none"]) == 2
    assert "9p9d" in capsys.readouterr().err


def test_the_first_entry_that_fits_counts() -> None:
    entries = of_flags({"*": 2, "a/b*": 8}, {"b.json": "b"})
    stated = description_for(Path("x"), Path("a/b.json"), entries)
    assert (stated.gpus, stated.label) == (8, "b")
    assert description_for(Path("x"), Path("c.json"), entries).gpus == 2


def test_files_that_are_no_results_are_skipped(study: Path) -> None:
    (study / "1p3d" / "notes.json").write_text(json.dumps({"by": "hand"}))
    with pytest.raises(StoreError, match=r"notes\.json"):
        load_experiments(study, 8)
    (study / DESCRIPTION).write_text("results:\n- {match: notes.json, skip: true}\n")
    assert len(load_experiments(study, 8)) == 2


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("results:\n- {match: a, gpus: 0}\n", "gpus"),
        ("results:\n- {match: a, deployment: pd}\n", "pd"),
        ("results:\n- {match: a, deployment: pd-fluid-8xtp2}\n", "its roles move"),
        ("results:\n- {matches: a}\n", "matches"),
    ],
)
def test_a_faulty_description_is_one_line(study: Path, text: str, named: str) -> None:
    (study / DESCRIPTION).write_text(text)
    with pytest.raises(UsageError, match=named) as refused:
        load_experiments(study)
    assert "\n" not in str(refused.value) and DESCRIPTION in str(refused.value)


def test_what_pdlab_measured_describes_itself(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    assert describe.main([str(tmp_path)]) == 2


def content_of(folder: Path) -> dict[str, Any]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


def test_what_only_describes_writes_nothing(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = content_of(study)
    assert describe.main([str(study)]) == 0
    out, err = capsys.readouterr()
    assert "--write" in err and str(study / DESCRIPTION) in err
    assert out.count("- match: ") == 2 and "vllm bench serve: 2 levels, concurrency 4 to 8" in out
    assert content_of(study) == before
    (study / DESCRIPTION).write_text(out)
    assert describe.main([str(study)]) == 0 and capsys.readouterr().out == out, "a file that is there is no obstacle"
    assert describe.main([str(study), "--force"]) == 2 and "--write" in capsys.readouterr().err


def test_a_folder_of_measured_folders_is_named_with_the_next_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("pack", "spread"):
        (tmp_path / name).mkdir()
        (tmp_path / name / MANIFEST).write_text("{}")
    assert describe.main([str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "pack and spread" in line and f"--exps {tmp_path}" in line
