"""Which frames the relay loses, and that it goes on after a word of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdlab.cluster.link_relay import DROP_FILE, FrameLoss


def test_none_without_a_word(tmp_path: Path) -> None:
    for losses in (FrameLoss(None), FrameLoss(str(tmp_path))):
        losses.read()
        assert not any(losses.lost() for _ in range(1000))


@pytest.mark.parametrize(
    ("text", "low", "high"), [("0.2\n", 0.15, 0.25), ("1", 1, 1), ("7", 1, 1), ("-1", 0, 0), ("x", 0, 0)]
)
def test_a_share_of_them(text: str, low: float, high: float, tmp_path: Path) -> None:
    losses = FrameLoss(str(tmp_path))
    (tmp_path / DROP_FILE).write_text(text)
    assert not losses.lost(), "not read yet"
    losses.read()
    assert low <= sum(losses.lost() for _ in range(2000)) / 2000 <= high
    (tmp_path / DROP_FILE).unlink()
    losses.read()
    assert not any(losses.lost() for _ in range(1000))
