"""What the benchmarks have of their own; mypy reads all of them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

BENCHMARKS = sorted((Path(__file__).resolve().parents[1] / "benchmarks").glob("*.py"))


def test_another_file_is_not_taken_for_the_vocabulary(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("chat_model", BENCHMARKS[0].parent / "chat_model.py")
    assert spec is not None and spec.loader is not None
    chat_model = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(chat_model)
    with pytest.raises(ValueError, match="has the SHA-256 2c26b46b68ffc68f"):
        chat_model.write_checked(b"foo", tmp_path)
    assert not list(tmp_path.iterdir())


def test_there_are_benchmarks() -> None:
    assert len(BENCHMARKS) > 5
