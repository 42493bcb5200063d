"""What counts as a model that is there, in Hugging Face's cache and in a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdlab.cli import weights as command
from pdlab.remote import weights


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A complete snapshot of org/model in a cache of its own; returns its folder."""
    folder = tmp_path / "hub" / "models--org--model" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    refs = tmp_path / "hub" / "models--org--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    names = {"a.weight": "model-1.safetensors", "b.weight": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    for name in names.values():
        (folder / name).write_bytes(b"12345")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.delenv("HUGGINGFACE_HUB_CACHE", raising=False)
    return folder


def test_complete(cached: Path) -> None:
    weight_files = weights.look("org/model")
    assert (weight_files["folder"], weight_files["bytes"], weight_files["missing"]) == (str(cached), 10, [])
    assert weights.look(str(cached))["missing"] == []


@pytest.mark.parametrize("name", ["model-2.safetensors", "config.json"])
def test_a_file_that_the_index_names_is_missing(name: str, cached: Path) -> None:
    (cached / name).unlink()
    assert weights.look("org/model")["missing"] == [name]


def test_a_download_that_broke_off_is_not_there(cached: Path) -> None:
    """The cache links to blobs; one that was not finished has none behind it."""
    (cached / "model-1.safetensors").unlink()
    (cached / "model-1.safetensors").symlink_to(cached / "nowhere")
    assert weights.look("org/model")["missing"] == ["model-1.safetensors"]


def test_no_tokenizer_and_no_weights(cached: Path) -> None:
    for path in cached.iterdir():
        if path.name != "config.json":
            path.unlink()
    assert weights.look("org/model")["missing"] == ["a tokenizer", "*.safetensors"]


def test_nothing_of_it(cached: Path) -> None:
    assert weights.look("org/other")["missing"] == ["everything"]
    assert weights.look("/no/such/folder")["folder"] is None


def test_the_command(cached: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--model", "org/model", "--here"]) == 0
    assert "org/model is there" in capsys.readouterr().out
    (cached / "model-1.safetensors").unlink()
    assert command.main(["--model", "org/model", "--here"]) == 3
    out = capsys.readouterr().out
    assert "MISSING of org/model: model-1.safetensors" in out
    assert "python -m pdlab weights --model org/model --fetch" in out
    assert command.main(["--model", "tiny-gptoss", "--here"]) == 0
    assert command.main(["--model", "nonsense"]) == 2
