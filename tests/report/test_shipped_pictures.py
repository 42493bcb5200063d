"""The pictures and the page in docs/ that come from shipped results are what today's renderer makes of them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
from matplotlib.image import imread

from pdlab.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = {
    match: path
    for path in sorted((ROOT / "docs").glob("*.md"))
    for match in re.findall(r"^python viz\.py ((?:.*\\\n)*.*--plot-path docs/.*)$", path.read_text(), re.M)
}


def test_the_pages_have_such_commands() -> None:
    assert {path.name for path in COMMANDS.values()} == {"experiment.md", "two-hosts.md"}


@pytest.mark.golden
@pytest.mark.parametrize("words", COMMANDS, ids=[path.stem for path in COMMANDS.values()])
def test_the_command_on_the_page_makes_the_shipped_files(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    there = words.replace("\\\n", " ").replace("docs/", f"{tmp_path}/")
    assert main(["viz", *shlex.split(there)]) == 0
    made = sorted(tmp_path.iterdir())
    assert made
    for file in made:
        shipped = ROOT / "docs" / file.name
        if file.suffix == ".html":
            file.write_text(file.read_text(encoding="utf-8").replace(f"{tmp_path}/", "docs/"), encoding="utf-8")
        if os.environ.get("PDLAB_UPDATE_GOLDEN") == "1":
            shutil.copyfile(file, shipped)
        elif file.suffix == ".html":
            assert file.read_text(encoding="utf-8") == shipped.read_text(encoding="utf-8"), "run `make golden`"
        else:
            now, before = imread(file), imread(shipped)
            assert now.shape == before.shape and abs(now - before).max() < 0.02, f"{shipped}: run `make golden`"
