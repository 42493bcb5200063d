"""--help of every command: what it is for on one line, three examples, flags in groups, no markup."""

from __future__ import annotations

import re
import shlex
from importlib import import_module

import pytest

from pdlab.__main__ import COMMANDS, main
from pdlab.core.commands import SCRIPTS
from pdlab.core.settings import parse, settings_of

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
    assert re.search(r"^examples:$", text, re.MULTILINE)
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


def examples_of(name: str) -> list[tuple[str, list[str]]]:
    """The examples in the help of a command: the command that each runs, and its words."""
    import_module(f"pdlab.cli.{name.replace('-', '_')}")
    scripts = {script.split()[-1]: command for command, script in SCRIPTS.items()}
    found = []
    for line in re.sub(r"\\\n\s*", "", settings_of(name).EXAMPLES).splitlines():
        if not RUNNABLE.match(line) or "make " in line:
            continue
        typed = re.split(r" {3,}| > | && ", re.sub(r"^  (sudo )?", "", line))[0] if " -- " not in line else line.strip()
        words = shlex.split(typed)
        if words[:3] == ["python", "-m", "pdlab"]:
            found.append((words[3], words[4:]))
        elif words[0] == "python":
            found.append((scripts[words[1]], words[2:]))
        else:
            found.append(("bench", words[1:]))
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_the_examples_are_accepted(name: str) -> None:
    examples = examples_of(name)
    assert examples
    for command, words in examples:
        import_module(f"pdlab.cli.{command.replace('-', '_')}")
        parse(settings_of(command), words)
