"""The embedded model's tokenizer and its place in the cache; the weights are proven in tests/live."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from pdlab.core.catalog import ModelShape, resolve_model
from pdlab.deploy.cpu_engine import tiny_model
from pdlab.deploy.cpu_engine.tiny_model import build_tokenizer, ensure_tiny_model

TEXT = "badel ki\nNumbers 12345, \N{EURO SIGN} and emoji \N{GRINNING FACE}; Item 7 has code 8123."


def built(folder: Path, vocab: int) -> bytes:
    folder.mkdir()
    build_tokenizer(folder, vocab)
    return (folder / "tokenizer.json").read_bytes()


def tiny_shape() -> ModelShape:
    shape, source = resolve_model("tiny-gptoss")
    assert shape is not None and source is None
    return shape


class TestTokenizer:
    @pytest.mark.parametrize("vocab", [512, 1024])
    def test_exact_vocabulary(self, vocab: int, tmp_path: Path) -> None:
        from tokenizers import Tokenizer

        built(tmp_path / "a", vocab)
        tokenizer = Tokenizer.from_file(str(tmp_path / "a" / "tokenizer.json"))
        assert tokenizer.get_vocab_size() == vocab
        assert sorted(tokenizer.get_vocab().values()) == list(range(vocab))

    def test_the_models_vocabulary(self, tmp_path: Path) -> None:
        vocab = tiny_shape().vocab
        assert len(json.loads(built(tmp_path / "a", vocab))["model"]["vocab"]) == vocab

    def test_the_same_bytes_every_time(self, tmp_path: Path) -> None:
        assert built(tmp_path / "a", 700) == built(tmp_path / "b", 700)

    def test_takes_any_text_and_gives_it_back(self, tmp_path: Path) -> None:
        from tokenizers import Tokenizer

        built(tmp_path / "a", 600)
        tokenizer = Tokenizer.from_file(str(tmp_path / "a" / "tokenizer.json"))
        assert tokenizer.decode(tokenizer.encode(TEXT).ids) == TEXT

    def test_end_of_text_is_the_models(self, tmp_path: Path) -> None:
        """The model's configuration calls token 0 the end."""
        built(tmp_path / "a", 600)
        model = json.loads((tmp_path / "a" / "tokenizer.json").read_text())
        assert model["model"]["vocab"]["<|endoftext|>"] == 0
        config = json.loads((tmp_path / "a" / "tokenizer_config.json").read_text())
        assert config["eos_token"] == config["pad_token"] == "<|endoftext|>"


class TestEnsure:
    """With weights that cost nothing."""

    def test_built_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        times: list[Path] = []

        def weights(folder: Path, _: ModelShape) -> None:
            times.append(folder)
            (folder / "model.safetensors").write_text("x")

        monkeypatch.setattr(tiny_model, "_build_weights", weights)
        first = ensure_tiny_model(tiny_shape(), tmp_path)
        assert ensure_tiny_model(tiny_shape(), tmp_path) == first
        assert len(times) == 1
        assert {path.name for path in first.iterdir()} == {
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        }

    def test_another_shape_is_another_model(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A YAML file that was edited must not be served from the cache of what it said before."""
        monkeypatch.setattr(tiny_model, "_build_weights", lambda *_: None)
        shape = tiny_shape()
        edited = shape.model_copy(update={"config": {**shape.config, "num_hidden_layers": shape.layers + 2}})
        assert ensure_tiny_model(edited, tmp_path) != ensure_tiny_model(shape, tmp_path)

    def test_two_at_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        times: list[Path] = []

        def weights(folder: Path, _: ModelShape) -> None:
            times.append(folder)
            assert folder.name.endswith(".part"), "not where readers look"
            time.sleep(0.1)

        monkeypatch.setattr(tiny_model, "_build_weights", weights)
        threads = [threading.Thread(target=ensure_tiny_model, args=(tiny_shape(), tmp_path)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(times) == 1

    def test_a_failed_build_leaves_nothing_that_looks_complete(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def weights(*_: object) -> None:
            raise OSError("disk full")

        monkeypatch.setattr(tiny_model, "_build_weights", weights)
        with pytest.raises(OSError, match="disk full"):
            ensure_tiny_model(tiny_shape(), tmp_path)
        monkeypatch.setattr(tiny_model, "_build_weights", lambda *_: None)
        folder = ensure_tiny_model(tiny_shape(), tmp_path)
        assert (folder / "tokenizer.json").exists()
        assert [path for path in folder.parent.iterdir() if not path.name.startswith(".")] == [folder]
