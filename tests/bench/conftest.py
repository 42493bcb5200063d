"""The oracle server and a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.sweep import WARM, Oracle, start_oracle, start_template

from pdlab.deploy.cpu_engine.tiny_model import build_tokenizer


@pytest.fixture
def oracle() -> Iterator[Oracle]:
    yield from start_oracle()


@pytest.fixture(scope="session")
def shared_oracle() -> Iterator[Oracle]:
    yield from start_oracle()


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(folder, 4096)
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    return folder


@pytest.fixture(scope="session")
def warm_client(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    yield from start_template(tmp_path_factory.mktemp("client"), tokenizer)


@pytest.fixture(scope="module")
def warm_starts(warm_client: None) -> Iterator[None]:
    """`LoadClient` takes load generators that have imported vLLM, unless a test has `cold_start`."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in WARM.items():
            patch.setenv(name, value)
        yield


@pytest.fixture
def cold_start(warm_starts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The load generator is the process that `LoadClient` starts, with its ten seconds of imports."""
    for name in WARM:
        monkeypatch.delenv(name)
