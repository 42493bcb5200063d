"""What the benchmarks have of their own; mypy reads all of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import chat_model
import pytest

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = sorted((ROOT / "benchmarks").glob("*.py"))
TEXTS = (*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile")))
NAMED = sorted({name for text in TEXTS for name in re.findall(r"(?<!tests/)benchmarks/(\w+\.py)", text.read_text())})


def test_another_file_is_not_taken_for_the_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has the SHA-256 2c26b46b68ffc68f"):
        chat_model.write_checked(b"foo", tmp_path)
    assert not list(tmp_path.iterdir())


def test_there_are_benchmarks() -> None:
    assert len(BENCHMARKS) > 5


def test_the_docs_name_benchmarks() -> None:
    assert len(NAMED) > 20


def outside(path: Path) -> dict[str, str]:
    """An environment in which only the benchmark itself finds pdlab."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HOME": str(path)}


@pytest.mark.parametrize("name", NAMED)
def test_a_benchmark_that_the_docs_name_starts_in_any_folder(name: str, tmp_path: Path) -> None:
    words = [sys.executable, str(ROOT / "benchmarks" / name), "--help"]
    done = subprocess.run(words, cwd=tmp_path, env=outside(tmp_path), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_a_benchmark_finds_pdlab_before_it_imports_it(path: Path) -> None:
    text = path.read_text()
    first = re.search(r"^ *from (pdlab|bare_pair|measured_replays|serving_path)\b", text, re.MULTILINE)
    if first is not None and first[1] == "pdlab":
        assert "sys.path" in text[: first.start()]
