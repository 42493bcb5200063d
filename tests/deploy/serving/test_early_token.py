"""Prefill's first token ahead of decode's answer: when it may be sent, and that the answer behind it is whole."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict

from pdlab.deploy.serving import prefill_call
from pdlab.deploy.serving.early_token import (
    DropsSentText,
    EarlyToken,
    SentTextMismatch,
    counted,
    early_token,
    first_token,
    going_on,
)
from pdlab.deploy.serving.prefill_call import CallsPrefill
from pdlab.deploy.serving.timeline import RequestTiming

LONGEST = 100
PROMPT = [5, 6, 7]


class Request(BaseModel):
    """As vLLM's, with the fields that matter here."""

    model_config = ConfigDict(extra="allow")

    prompt: Any = None
    stream: bool | None = False
    stream_options: Any = None
    max_tokens: int | None = 16
    temperature: float | None = None
    n: int = 1
    logprobs: int | None = None
    echo: bool | None = False
    suffix: str | None = None
    stop: Any = []
    stop_token_ids: list[int] | None = []
    min_tokens: int = 0
    presence_penalty: float | None = 0.0
    repetition_penalty: float | None = None
    bad_words: list[str] = []
    logit_bias: dict[str, float] | None = None
    response_format: Any = None
    return_token_ids: bool | None = None
    ignore_eos: bool = False
    kv_transfer_params: Any = None


def request(**changes: Any) -> Request:
    return Request(**{"prompt": "ba", "stream": True, "temperature": 0.0, "max_tokens": 8, **changes})


def answer(text: str = " ufo", **changes: Any) -> Any:
    choice = {"text": text, "finish_reason": "length", **changes}
    return SimpleNamespace(id="cmpl-x", created=7, model="m", choices=[SimpleNamespace(**choice)])


def test_a_greedy_streamed_completion_has_an_early_token() -> None:
    early = early_token(request(), answer(), LONGEST, PROMPT, [9])
    assert early is not None and (early.text, early.token_id, early.prompt_ids) == (" ufo", 9, (5, 6, 7))
    chunk = json.loads(early.chunk.removeprefix("data: "))
    assert (chunk["id"], chunk["created"], chunk["model"], chunk["object"]) == ("cmpl-x", 7, "m", "text_completion")
    assert chunk["choices"][0]["text"] == " ufo" and chunk["choices"][0]["finish_reason"] is None


@pytest.mark.parametrize(
    "changes",
    [
        {"repetition_penalty": 1.0}, {"ignore_eos": True}, {"logprobs": None}, {"stop": []}, {"stop": None}, {"n": 1},
        {"prompt": PROMPT}, {"seed": 3}, {"top_p": 0.5}, {"stream_options": SimpleNamespace(include_usage=True)},
    ],
)  # fmt: skip
def test_what_leaves_the_token_as_it_is(changes: dict[str, Any]) -> None:
    assert early_token(request(**changes), answer(), LONGEST, PROMPT, [9]) is not None
    assert first_token(request(**changes), answer(), LONGEST, PROMPT, [9]) == 9


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": None}, {"temperature": 0.7}, {"temperature": -1.0}, {"max_tokens": 1},
        {"max_tokens": None}, {"n": 2}, {"logprobs": 0}, {"logprobs": 3}, {"echo": True}, {"suffix": "x"},
        {"stop": ["u"]}, {"stop": "u"}, {"stop_token_ids": [4]}, {"min_tokens": 1}, {"presence_penalty": 0.5},
        {"bad_words": ["x"]}, {"logit_bias": {"5": 1.0}}, {"response_format": {"type": "json_object"}},
        {"prompt": ["a", "b"]}, {"prompt": [[1], [2]]}, {"prompt": None},
        {"vllm_xargs": {"x": 1}}, {"max_tokens": LONGEST - 2},
    ],
)  # fmt: skip
def test_what_falls_back(changes: dict[str, Any]) -> None:
    assert first_token(request(**changes), answer(), LONGEST, PROMPT, [9]) is None
    assert early_token(request(**changes), answer(), LONGEST, PROMPT, [9]) is None


@pytest.mark.parametrize("given", [answer(finish_reason="stop"), SimpleNamespace(choices=[]), SimpleNamespace(error=1)])
def test_answers_of_prefill_that_have_none(given: Any) -> None:
    assert first_token(request(), given, LONGEST, PROMPT, [9]) is None
    assert early_token(request(), given, LONGEST, PROMPT, [9]) is None


@pytest.mark.parametrize(
    ("changes", "given"),
    [
        ({"stream": False}, answer()),
        ({"return_token_ids": True}, answer()),
        ({"return_token_ids": False}, answer()),
        ({"stream_options": SimpleNamespace(continuous_usage_stats=True)}, answer()),
        ({}, answer("")),
        ({}, answer("\ufffd")),
    ],
)
def test_what_decode_may_be_handed_and_the_client_may_not(changes: dict[str, Any], given: Any) -> None:
    assert early_token(request(**changes), given, LONGEST, PROMPT, [9]) is None
    assert first_token(request(**changes), given, LONGEST, PROMPT, [9]) == 9


class Chat(Request):
    """As vLLM's."""

    messages: list[Any] = []
    max_completion_tokens: int | None = None
    max_tokens: int | None = None
    tools: list[Any] | None = None
    tool_choice: str | None = "none"
    reasoning_effort: str | None = None


@pytest.mark.parametrize(
    ("changes", "token"),
    [
        ({}, 9), ({"max_tokens": 2}, 9), ({"max_tokens": 1}, None), ({"max_completion_tokens": 1}, None),
        ({"max_completion_tokens": LONGEST - 3}, 9), ({"max_completion_tokens": LONGEST - 2}, None),
        ({"reasoning_effort": "low"}, 9), ({"temperature": 1.0}, None), ({"tools": [1]}, None),
        ({"tools": [], "tool_choice": "none"}, 9), ({"response_format": {"type": "json_object"}}, None),
    ],
)  # fmt: skip
def test_chat_may_be_handed_its_first_token(changes: dict[str, Any], token: int | None) -> None:
    sent_request = Chat(**{"messages": [{"role": "user", "content": "ba"}], "temperature": 0.0, **changes})
    assert first_token(sent_request, answer(), LONGEST, PROMPT, [9]) == token


def test_chat_as_long_as_the_context_has_room_for_a_second_token() -> None:
    sent_request = Chat(messages=[{"role": "user", "content": "ba"}], temperature=0.0)
    assert first_token(sent_request, answer(), len(PROMPT) + 2, PROMPT, [9]) == 9
    assert first_token(sent_request, answer(), len(PROMPT) + 1, PROMPT, [9]) is None


@pytest.mark.parametrize(("prompt_ids", "token_ids"), [([], [9]), (PROMPT, []), (PROMPT, [9, 9])])
def test_ids_that_prefill_did_not_tell(prompt_ids: list[int], token_ids: list[int]) -> None:
    assert early_token(request(), answer(), LONGEST, prompt_ids, token_ids) is None


def event(text: str, finish: str | None = None) -> str:
    return f"data: {json.dumps({'choices': [{'index': 0, 'text': text, 'finish_reason': finish}]})}\n\n"


USAGE = (
    f"data: {json.dumps({'choices': [], 'usage': {'prompt_tokens': 4, 'completion_tokens': 2, 'total_tokens': 6}})}\n\n"
)
DONE = "data: [DONE]\n\n"


def texts(sent: list[Any]) -> str:
    flat = [each for item in sent for each in (item if isinstance(item, list) else [item])]
    data = [part.removeprefix("data: ") for each in flat for part in each.split("\n\n") if part]
    chunks = [json.loads(each) for each in data if each != "[DONE]"]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"])


@given(st.text(min_size=1, max_size=6), st.text(max_size=10), st.data())
def test_the_begin_is_left_out_however_decode_cuts_its_text(begin: str, end: str, data: st.DataObject) -> None:
    whole = begin + end
    cuts = sorted(data.draw(st.sets(st.integers(1, len(whole)), max_size=5)) | {0, len(whole)})
    pieces = [whole[a:b] for a, b in pairwise(cuts)]
    as_list = data.draw(st.booleans())
    rest, sent = DropsSentText(begin), []
    for piece in [*map(event, pieces), event("", "length"), USAGE, DONE]:
        kept = rest.rest([piece] if as_list else piece)
        sent += [] if kept is None else [kept]
    assert texts(sent) == end and rest.done
    assert sent[-1] in (DONE, [DONE])


@pytest.mark.parametrize("other", [event(" wan"), event(" u", "stop"), event("", "stop"), USAGE, DONE])
def test_another_begin_is_seen(other: str) -> None:
    with pytest.raises(SentTextMismatch):
        DropsSentText(" ufo").rest(other)


def test_an_error_is_passed_on() -> None:
    failed = 'data: {"error": {"message": "no"}}\n\n'
    assert DropsSentText(" ufo").rest(failed) == failed
    error = SimpleNamespace(error="no")
    assert DropsSentText(" ufo").rest(error) is error


class Decode(CallsPrefill):
    """A decode server that makes these texts of the request, and of the one that goes on."""

    def __init__(self, first: list[str], again: list[str]) -> None:
        self.first, self.again, self.closed = first, again, list[str]()

    async def stream(self, name: str, items: list[str]) -> AsyncIterator[Any]:
        try:
            for item in items:
                await asyncio.sleep(0)
                yield item
        finally:
            self.closed.append(name)

    async def anew(self) -> Any:
        return self.stream("again", self.again)

    def answer(self, early: EarlyToken) -> AsyncIterator[Any]:
        return self._after_early(early, self.stream("first", self.first), self.anew)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    counts: list[str] = []
    monkeypatch.setattr(prefill_call, "count", counts.append)
    return counts


def sent_by(decode: Decode) -> list[Any]:
    early = early_token(request(), answer(), LONGEST, PROMPT, [9])
    assert early is not None

    async def run() -> list[Any]:
        return [item async for item in decode.answer(early)]

    return asyncio.run(run())


def test_the_client_has_the_token_once_and_then_the_rest(events: list[str]) -> None:
    decode = Decode([event(" ufo"), event(" wan"), event("", "length"), USAGE, DONE], [])
    assert texts(sent_by(decode)) == " ufo wan" and events == ["early"] and decode.closed == ["first"]


def test_where_decode_takes_another_token_it_is_asked_to_go_on_from_prefills(
    events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    timing = RequestTiming(wanted=True)
    monkeypatch.setattr(prefill_call, "current", lambda: timing)
    decode = Decode([event(" gi"), event(" gi"), DONE], [event(" wan"), event("", "length"), USAGE, DONE])
    sent = sent_by(decode)
    assert timing.early and timing.second_request
    assert texts(sent) == " ufo wan" and events == ["early", "early_again"] and decode.closed == ["first", "again"]
    usage = json.loads(sent[-2].removeprefix("data: "))["usage"]
    assert usage == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}


def test_the_request_that_goes_on() -> None:
    early = early_token(request(), answer(), LONGEST, PROMPT, [9])
    assert early is not None
    sent_request = request(kv_transfer_params={"do_remote_prefill": True})
    anew = going_on(sent_request, early)
    assert (anew.prompt, anew.max_tokens, anew.kv_transfer_params) == ([5, 6, 7, 9], 7, None)
    assert sent_request.max_tokens == 8
    assert counted(event('"usage"')) == event('"usage"'), "a text that the model wrote"


def test_decode_begins_behind_the_token(events: list[str]) -> None:
    """A client that goes away before has nothing of decode's to be ended."""
    decode = Decode([event(" ufo"), event(" wan"), DONE], [])
    early = early_token(request(), answer(), LONGEST, PROMPT, [9])
    assert early is not None

    async def run(items: int) -> list[str]:
        stream = decode.answer(early)
        assert await stream.__anext__() == [early.chunk]
        for _ in range(items):
            await stream.__anext__()
        await stream.aclose()  # type: ignore[attr-defined]
        return decode.closed

    assert asyncio.run(run(0)) == []
    assert asyncio.run(run(1)) == ["first"]


async def test_a_client_that_goes_away_while_decode_says_nothing_ends_it(events: list[str]) -> None:
    decode = Decode([], [])
    early = early_token(request(), answer(), LONGEST, PROMPT, [9])
    assert early is not None

    async def silent() -> AsyncIterator[Any]:
        try:
            await asyncio.Event().wait()
            yield
        finally:
            decode.closed.append("silent")

    stream = decode._after_early(early, silent(), decode.anew)
    await stream.__anext__()
    asking = asyncio.ensure_future(stream.__anext__())
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert decode.closed == ["silent"] and events == ["early"]


def engine_of(**model: Any) -> Any:
    return SimpleNamespace(_engine_client=SimpleNamespace(model_config=SimpleNamespace(**model)))


def test_a_request_does_not_fail_where_the_engine_has_other_fields() -> None:
    decode = Decode([], [])
    decode.engine = SimpleNamespace()  # type: ignore[attr-defined]
    assert decode._where_exact(first_token, request(), answer(), PROMPT, [9]) is None
    decode.engine = engine_of(max_model_len=LONGEST, has_inner_state=False)  # type: ignore[attr-defined]
    assert decode._where_exact(first_token, request(), answer(), PROMPT, [9]) == 9
    assert (
        decode._where_exact(first_token, request(), SimpleNamespace(choices=[SimpleNamespace()]), PROMPT, [9]) is None
    )


def test_where_prefill_leaves_out_the_last_token_of_a_prompt_its_answer_is_not_the_first() -> None:
    """As vLLM has it for Mamba."""
    decode = Decode([], [])
    decode.engine = engine_of(max_model_len=LONGEST, has_inner_state=True)  # type: ignore[attr-defined]
    assert decode._where_exact(early_token, request(), answer(), PROMPT, [9]) is None
