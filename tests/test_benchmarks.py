"""What the benchmarks have of their own; mypy reads all of them."""

from __future__ import annotations

from pathlib import Path

import chat_model
import pytest

BENCHMARKS = sorted((Path(__file__).resolve().parents[1] / "benchmarks").glob("*.py"))


def test_another_file_is_not_taken_for_the_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has the SHA-256 2c26b46b68ffc68f"):
        chat_model.write_checked(b"foo", tmp_path)
    assert not list(tmp_path.iterdir())


def test_there_are_benchmarks() -> None:
    assert len(BENCHMARKS) > 5
