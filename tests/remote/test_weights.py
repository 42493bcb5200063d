"""What counts as a model that is there, in Hugging Face's cache and in a folder."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from pdlab.cli import weights as command
from pdlab.remote import weights

HEADER = {"__metadata__": {"format": "pt"}, "a": {"dtype": "U8", "shape": [2, 3], "data_offsets": [0, 6]}}


def safetensors(header: object = HEADER, data: bytes = b"123456") -> bytes:
    """A file of that format: the header's length, the header, the tensors' bytes."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A complete snapshot of org/model in a cache of its own; returns its folder."""
    folder = tmp_path / "hub" / "models--org--model" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    refs = tmp_path / "hub" / "models--org--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    (folder / "config.json").write_text('{"model_type": "gpt_oss"}')
    (folder / "tokenizer.json").write_text("{}")
    names = {"a.weight": "model-1.safetensors", "b.weight": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    for name in names.values():
        (folder / name).write_bytes(safetensors())
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.delenv("HUGGINGFACE_HUB_CACHE", raising=False)
    return folder


def test_complete(cached: Path) -> None:
    weight_files = weights.local_weights("org/model")
    assert (weight_files["folder"], weight_files["bytes"], weight_files["missing"]) == (
        str(cached),
        2 * len(safetensors()),
        [],
    )
    assert weight_files["broken"] == {}
    assert weights.local_weights(str(cached))["missing"] == []


@pytest.mark.parametrize("name", ["model-2.safetensors", "config.json"])
def test_a_file_that_the_index_names_is_missing(name: str, cached: Path) -> None:
    (cached / name).unlink()
    assert weights.local_weights("org/model")["missing"] == [name]


def test_a_download_that_broke_off_is_not_there(cached: Path) -> None:
    """The cache links to blobs; one that was not finished has none behind it."""
    (cached / "model-1.safetensors").unlink()
    (cached / "model-1.safetensors").symlink_to(cached / "nowhere")
    assert weights.local_weights("org/model")["missing"] == ["model-1.safetensors"]


WHOLE = safetensors()
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (WHOLE[:-1], f"truncated: {len(WHOLE) - 1} bytes, {len(WHOLE)} by its header"),
        (WHOLE + b"0", f"too long: {len(WHOLE) + 1} bytes, {len(WHOLE)} by its header"),
        (WHOLE[:20], "truncated"),
        (b"", "not a safetensors file"),
        (b"12345", "not a safetensors file"),
        (b"\xff" * 64, "not a safetensors file"),
        (safetensors([1, 2]), "not a safetensors file"),
        (safetensors({"a": {"dtype": "U8"}}), "not a safetensors file"),
        (POINTER, "a pointer of Git LFS"),
    ],
)
def test_weights_that_no_engine_can_load(content: bytes, why: str, cached: Path) -> None:
    (cached / "model-2.safetensors").write_bytes(content)
    found = weights.local_weights("org/model")
    assert list(found["broken"]) == ["model-2.safetensors"] and found["missing"] == []
    assert found["broken"]["model-2.safetensors"].startswith(why)


def test_files_that_the_safetensors_library_wrote_are_whole(cached: Path) -> None:
    numpy, library = pytest.importorskip("numpy"), pytest.importorskip("safetensors.numpy")
    tensors = {"a": numpy.arange(5, dtype="float32"), "b": numpy.zeros((2, 3), dtype="uint8")}
    library.save_file(tensors, cached / "model-1.safetensors", metadata={"format": "pt"})
    assert weights.local_weights("org/model")["broken"] == {}


@pytest.mark.parametrize("content", ["", "{", "{}", "[]", "null", '{"hidden_size": 8}'])
def test_a_config_that_says_no_model(content: str, cached: Path) -> None:
    (cached / "config.json").write_text(content)
    assert list(weights.local_weights("org/model")["broken"]) == ["config.json"]


def test_the_command_names_a_broken_file(cached: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (cached / "model-1.safetensors").write_bytes(WHOLE[:-2])
    assert command.main(["--model", "org/model", "--here"]) == 3
    assert "BROKEN of org/model: model-1.safetensors: truncated" in capsys.readouterr().out


def test_no_tokenizer_and_no_weights(cached: Path) -> None:
    for path in cached.iterdir():
        if path.name != "config.json":
            path.unlink()
    assert weights.local_weights("org/model")["missing"] == ["a tokenizer", "*.safetensors"]


def test_nothing_of_it(cached: Path) -> None:
    assert weights.local_weights("org/other")["missing"] == ["everything"]
    assert weights.local_weights("/no/such/folder")["folder"] is None


def test_the_command(cached: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--model", "org/model", "--here"]) == 0
    assert "org/model is there" in capsys.readouterr().out
    (cached / "model-1.safetensors").unlink()
    assert command.main(["--model", "org/model", "--here"]) == 3
    out = capsys.readouterr().out
    assert "MISSING of org/model: model-1.safetensors" in out
    assert "python -m pdlab weights --model org/model --here --fetch" in out
    assert command.main(["--model", str(cached), "--here"]) == 3
    out = capsys.readouterr().out
    assert f"copy the model's files to {cached} on the node" in out and "--fetch" not in out
    assert command.main(["--model", "tiny-gptoss", "--here"]) == 0
    assert command.main(["--model", "nonsense"]) == 2
