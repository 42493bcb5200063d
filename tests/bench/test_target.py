"""The message about a server that answers wrongly, and what cannot be its tokenizer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from support.launched import running
from support.web import body_of, reply, web_server

from pdlab.bench.target import PROBE, completion_error, require_answering, resolve_target
from pdlab.core.errors import BenchError, UsageError
from pdlab.core.workload import Workload
from pdlab.deploy.cpu_engine.tiny_model import build_tokenizer
from pdlab.deploy.endpoint import save_running


@pytest.fixture
def broken() -> Iterator[str]:
    """HTTP 500 to everything."""
    with web_server(lambda call: call.send_error(500)) as url:
        yield url


def test_a_server_that_answers_500_is_reported_as_such(broken: str) -> None:
    with pytest.raises(BenchError, match=r"no longer answers: the running level is not kept \(.*answers HTTP 500"):
        require_answering(broken)
    with pytest.raises(UsageError, match=r"/v1/models answers HTTP 500; is the deployment ready"):
        resolve_target(broken, workload=Workload(), name="x")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere/at/all", "no such folder"),
        ("./nowhere", "no such folder"),
        ("~/nowhere", "no such folder"),
        ("an id with spaces", "no such folder"),
        ("", "a folder without a tokenizer"),
        ("a" * 5000, "cannot be read"),
    ],
)
def test_what_cannot_be_a_tokenizer_is_reported_before_any_request(
    name: str, message: str, broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=f"--tokenizer .*{message}"):
        resolve_target(broken, workload=Workload(), name="x", tokenizer=name)


def test_a_folder_with_a_tokenizer_and_an_id_are_left_to_the_loader(broken: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    for name in (str(tmp_path), "gpt2", "org/name"):
        with pytest.raises(UsageError, match="answers HTTP 500"):
            resolve_target(broken, workload=Workload(), name="x", tokenizer=name)


@contextlib.contextmanager
def served(counted: object) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server of the model ``m`` that counts so many tokens in every prompt, and the requests that it gets."""
    bodies: list[dict[str, Any]] = []

    def answer(call: BaseHTTPRequestHandler) -> None:
        content: object = {"data": [{"id": "m"}]}
        if call.command == "POST":
            bodies.append({**body_of(call), "key": call.headers.get("authorization")})
            content = {"choices": [{"text": " x"}], "usage": {"prompt_tokens": counted}}
        reply(call, content)

    with web_server(answer) as url:
        yield url, bodies


def tokens_of_probe(tokenizer: Path) -> int:
    return len(tokenizers.Tokenizer.from_file(str(tokenizer / "tokenizer.json")).encode(PROBE).ids)


@pytest.mark.parametrize("off", [-400, -3, 3, 400])
def test_a_tokenizer_that_counts_otherwise_than_the_server_is_another_models(off: int, tokenizer: Path) -> None:
    count = tokens_of_probe(tokenizer)
    with served(count + off) as (url, bodies), pytest.raises(UsageError) as refused:
        resolve_target(url, workload=Workload(), name="x", tokenizer=str(tokenizer))
    assert f"makes {count} tokens of a text for which m at {url} counts {count + off}" in str(refused.value)
    assert [each["max_tokens"] for each in bodies] == [1]  # and nothing else is sent


@pytest.mark.parametrize("off", [-2, 0, 1, 2, None])
def test_special_tokens_around_a_text_and_a_server_that_does_not_count_are_no_fault(
    off: int | None, tokenizer: Path
) -> None:
    counted = None if off is None else tokens_of_probe(tokenizer) + off
    with served(counted) as (url, _):
        assert resolve_target(url, workload=Workload(), name="x", tokenizer=str(tokenizer)).tokenizer == str(tokenizer)


@pytest.mark.parametrize("vocabulary", [1024, 4096])
def test_a_tokenizer_is_compared_with_the_published_one_without_a_request(
    vocabulary: int, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDLAB_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "other").mkdir()
    build_tokenizer(tmp_path / "other", vocabulary)
    with served(1) as (url, bodies):
        save_running(running(url, tokenizer=str(tokenizer), gpus=1))
        if vocabulary == 4096:  # the same one in another folder
            resolve_target(url, workload=Workload(), tokenizer=str(tmp_path / "other"))
        else:
            with pytest.raises(
                UsageError, match=r"its vocabulary \(1024 tokens\) is not that of .*; leave --tokenizer"
            ):
                resolve_target(url, workload=Workload(), tokenizer=str(tmp_path / "other"))
    assert bodies == []


def test_a_damaged_tokenizer_is_reported_before_the_load_generator_starts(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with served(1) as (url, _), pytest.raises(UsageError, match=r"tokenizer\.json cannot be read"):
        resolve_target(url, workload=Workload(), name="x", tokenizer=str(tmp_path))


def test_the_completion_that_is_checked_is_sent_with_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDLAB_API_KEY", "k" * 32)
    with served(1) as (url, bodies):
        completion_error(url, "m")
    assert [each["key"] for each in bodies] == [f"Bearer {'k' * 32}"]
