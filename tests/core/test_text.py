"""What to give in place of a name that is not known."""

from __future__ import annotations

import pytest

from pdlab.core.text import choices

MANY = [f"name-{number}" for number in range(20)]


@pytest.mark.parametrize(
    ("word", "known", "text"),
    [
        ("pd-pak", ["pd-pack", "collocated"], "did you mean pd-pack?"),
        ("PD-PACK", ["pd-pack", "collocated"], "did you mean pd-pack?"),
        ("zzz", ["b", "a"], "known are a, b"),
        ("zzz", [], "none are known"),
        ("zzz", MANY, f"known are {', '.join(sorted(MANY)[:8])}, ... (20 in all)"),
    ],
)
def test_choices(word: str, known: list[str], text: str) -> None:
    assert choices(word, known) == text
