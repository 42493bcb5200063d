"""docs/your-model.md, followed to the letter: its commands and its file, with a small model in the folder's place."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from pdlab.__main__ import COMMANDS, main
from pdlab.cli.models import row
from pdlab.core.catalog import catalogue, resolve_model
from pdlab.core.commands import SCRIPTS
from tests.core.test_model_config import QWEN_MOE, folder

PAGE = Path(__file__).resolve().parents[2] / "docs" / "your-model.md"
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
MODEL = "/models/my-model"
SERVING = "--cluster"  # without it a launch starts engines, as tests/live/test_architectures.py does


def words_of(line: str) -> list[str]:
    """The words for `pdlab.__main__.main` of a command as the page types it."""
    python, *words = shlex.split(line.replace("\\\n", " "))  # shlex keeps the line end that a shell drops
    assert python == "python"
    if words[:2] == ["-m", "pdlab"]:
        return words[2:]
    (command,) = [name for name, script in SCRIPTS.items() if script.split()[-1] == words[0]]
    return [command, *words[1:]]


def test_step_by_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    model = folder(tmp_path / "my-model", {**QWEN_MOE, "num_attention_heads": 8, "num_key_value_heads": 4,
                                          "max_position_embeddings": 40960})  # fmt: skip
    monkeypatch.chdir(tmp_path)
    kinds = [kind for kind, _ in BLOCKS]
    assert kinds == ["sh", "sh", "sh", "yaml", "sh", "sh"]
    for kind, text in BLOCKS:
        if kind == "yaml":
            (tmp_path / "my-model.yaml").write_text(text.replace(MODEL, model))
            continue
        words = words_of(text.strip().replace(MODEL, model))
        assert words[0] in COMMANDS
        if words[0] == "launch" and SERVING not in words:
            continue
        assert main(words) == 0, capsys.readouterr().err
    text = capsys.readouterr().out
    assert "tool_call_parser: hermes" in text and "max_model_len: 4096" in text
    shape, source = resolve_model("my-model.yaml")
    assert shape is not None and shape.name == "my-model" and source == model


def test_the_table_of_sizes_has_what_the_command_prints() -> None:
    """Of the models whose config.json is in configs/models/; the others' files are not part of the project."""
    page = (PAGE.parent / "models.md").read_text(encoding="utf-8")
    rows = {cells[0]: cells for line in page.splitlines() if len(cells := line.strip("| ").split(" | ")) >= 6}
    for shape in catalogue():
        if shape.hf_id is not None:
            _, counted, weights, kv, beyond, *_ = row(shape)
            name, in_page, _, *others = rows[shape.hf_id]
            assert (in_page, *others[:3]) == (counted, weights, kv, beyond), name
