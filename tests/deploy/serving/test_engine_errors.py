"""What vLLM's front end raises becomes an answer with the status of its kind; the server's own failures stay raised."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from pdlab.deploy.serving import engine_errors
from pdlab.deploy.serving.engine_errors import ExplainsErrors, reasoning_tokens


class HarmonyError(RuntimeError):
    """Stands for openai_harmony's."""


class TemplateError(Exception):
    """Stands for jinja2's."""


AFTER_END = HarmonyError("Unexpected token 588 while expecting start token 200006")
NO_FILE = HarmonyError("error downloading or loading vocab file: failed to download or load vocab file")


class Serving:
    """Stands for vLLM's object that answers: its table of statuses, its stream, which has errors within it."""

    def __init__(self, outcome: Any) -> None:
        self.outcome = outcome

    @staticmethod
    def create_error_response(message: Any, err_type: str = "BadRequestError", code: int = 400) -> Any:
        if isinstance(message, Exception):
            named = [kind.__name__ for kind in type(message).__mro__]
            code = 400 if {"ValueError", "TypeError", "TemplateError"} & set(named) else 500
        return SimpleNamespace(error=SimpleNamespace(code=code, message=str(message)))

    async def create_chat_completion(self, request: Any, raw_request: Any = None) -> Any:
        if request == "stream":
            return json.dumps(self.create_error_response(message=self.outcome).error.code)
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


def served(outcome: Any, request: str = "whole") -> Any:
    class Server:
        async def start(self) -> None:
            self.engine = SimpleNamespace(_oai_serving_chat=Serving(outcome))

    class Mixed(ExplainsErrors, Server):
        pass

    async def run() -> Any:
        server = Mixed()
        await server.start()
        return await server.engine._oai_serving_chat.create_chat_completion(request, raw_request=None)

    return asyncio.run(run())


@pytest.mark.parametrize("request_", ["whole", "stream"])
@pytest.mark.parametrize(
    ("error", "says"),
    [
        (AFTER_END, "Unexpected token 588"),
        (AFTER_END, "ignore_eos"),
        (NO_FILE, "o200k_base.tiktoken"),
        (TypeError("'NoneType' object is not iterable"), "not iterable"),
        (TemplateError("roles must alternate"), "roles must alternate"),
    ],
)
def test_what_is_no_fault_of_the_server_is_a_400_with_its_reason(error: Exception, says: str, request_: str) -> None:
    answer = served(error, request_)
    if request_ == "stream":
        assert answer == "400"
    else:
        assert answer.error.code == 400 and says in answer.error.message


@pytest.mark.parametrize("error", [RuntimeError("the engine is dead"), KeyError("x"), asyncio.CancelledError()])
def test_what_is_the_servers_fault_is_raised(error: BaseException) -> None:
    with pytest.raises(type(error)):
        served(error)


def test_an_answer_stays_what_it_is() -> None:
    answer = object()
    assert served(answer) is answer


def test_an_engine_without_vllms_front_end_starts() -> None:
    class Server:
        async def start(self) -> None:
            self.engine = SimpleNamespace()

    asyncio.run(type("Mixed", (ExplainsErrors, Server), {})().start())


class Channels:
    """Stands for openai_harmony's parser: tokens 1 to 9 open a channel of that number, 0 ends it, others are text."""

    def __init__(self) -> None:
        self.current_channel: str | None = None
        self.read: list[int] = []

    def process(self, token: int) -> None:
        if token < 0:
            raise HarmonyError("Unexpected token")
        self.read.append(token)
        if token < 10:
            self.current_channel = {0: None, 1: "analysis"}.get(token, "final")


def test_reasoning_is_counted_once_however_often_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Channels] = []

    def channels() -> Channels:
        made.append(Channels())
        return made[-1]

    monkeypatch.setattr(
        engine_errors.importlib,
        "import_module",
        lambda _: SimpleNamespace(get_streamable_parser_for_assistant=channels),
    )
    parser = type("Parser", (), {})()
    answer = [1, 50, 51, 52, 0, 2, 60, 61, 0, 1, 53, 0]
    counts = [reasoning_tokens(parser, answer[:length]) for length in range(len(answer) + 1)]
    assert counts == [0, 0, 1, 2, 3, 3, 3, 3, 3, 3, 3, 4, 4]
    assert made[0].read == answer, "each token once"
    assert reasoning_tokens(parser, [1, 50]) == 1, "another answer"
    assert reasoning_tokens(type("Parser", (), {})(), [1, 50, -1, 51]) == 1, "up to what is no Harmony"


def test_a_parser_that_counts_itself_is_left_alone() -> None:
    class Counts:
        def count_reasoning_tokens(self) -> int:
            return 7

    class Other:
        pass

    Counts.__module__ = "vllm.parser.harmony"
    for parser in (Counts, Other, None):
        engine_errors.count_reasoning_of(SimpleNamespace(parser_cls=parser))
    assert Counts().count_reasoning_tokens() == 7 and not hasattr(Other, "count_reasoning_tokens")
