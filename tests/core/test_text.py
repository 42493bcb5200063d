"""What to give in place of a name that is not known; words that a shell reads back."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdlab.core import text as core_text
from pdlab.core.environment import shell_assignments
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
    suggested = choices(word, known)
    assert str(suggested) == text and bool(suggested.near) == text.startswith("did")


VALUES = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=30)


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.from_regex(r"PDLAB_[A-Z]{1,6}", fullmatch=True), VALUES, min_size=1, max_size=4))
def test_bash_reads_assignments_back(variables: dict[str, str]) -> None:
    words = shell_assignments(variables)
    for line in (f"{words} env -0", f"export {words}; env -0"):
        done = subprocess.run(["bash", "-c", line], capture_output=True, timeout=60)
        assert done.returncode == 0, done.stderr
        seen = dict(each.split("=", 1) for each in done.stdout.decode().split("\0") if "=" in each)
        assert {name: seen.get(name) for name in variables} == variables


@pytest.mark.parametrize(
    ("function", "value", "shown"),
    [
        ("ms", 0.01234, "12.3"),
        ("ms", None, "-"),
        ("duration", 90, "90 s"),
        ("byte_size", 12_340_000_000, "12.3 GB"),
        ("byte_size", 999, "999 B"),
        ("byte_size", 999_600, "1000 kB"),
        ("byte_size", 1_572_864, "1.57 MB"),
        ("byte_size", 2_000, "2 kB"),
        ("last_line", "Traceback:\n  error: no room \n\n", "error: no room"),
        ("last_line", " \n", ""),
    ],
)
def test_a_value_is_shown_the_same_everywhere(function: str, value: object, shown: str) -> None:
    assert getattr(core_text, function)(value) == shown


@given(st.text())
def test_what_can_be_printed_is_on_one_line(text: str) -> None:
    shown = core_text.printable(text)
    assert len(shown.splitlines()) <= 1 and "\x1b" not in shown
    assert shown.encode() and shown == core_text.printable(shown) if shown else not text


def test_names_keep_their_letters() -> None:
    assert core_text.printable("5\xa0ms, \N{GREEK SMALL LETTER MU}s") == "5\xa0ms, \N{GREEK SMALL LETTER MU}s"
    assert core_text.printable("a\nb\u2028c\udce9") == "a\\nb\\u2028c\\udce9"
