"""--help of every command: what it is for on one line, three examples, flags in groups, no markup."""

from __future__ import annotations

import re

import pytest

from pdlab.__main__ import COMMANDS, main

RUNNABLE = re.compile(r"^  (?:sudo )?(?:python |\./run_bm\.sh|make )", re.MULTILINE)


def help_of(words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "100")
    try:
        code = main([*words, "--help"])
    except SystemExit as end:  # of argparse
        code = int(end.code or 0)
    assert code == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


@pytest.mark.parametrize("words", [[name] for name in COMMANDS], ids=" ".join)
def test_help(words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    text = help_of(words, capsys, monkeypatch)
    usage, purpose, *rest = text.split("\n\n")
    assert usage.startswith("usage: ")
    assert purpose.replace("\n", " ").count(". ") == 0, "one sentence says what it is for"
    assert len(purpose) <= 200
    assert len(RUNNABLE.findall(text)) >= 3, "three examples"
    assert not re.search(r"`|\*\*|<[a-z]+>", text), "no markup"
    options = next((part for part in rest if part.startswith("options:")), "")
    flags = re.findall(r"^  (-[^ ,]+)", options, re.MULTILINE)
    assert set(flags) <= {"-h", "--help-all"}, f"every flag is in a group that says what it is about, not so {flags}"


def test_the_sweep_names_what_stands_behind_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = help_of(["bench"], capsys, monkeypatch)
    assert "python -m pdlab experiment" in text and "python -m pdlab ratio" in text
