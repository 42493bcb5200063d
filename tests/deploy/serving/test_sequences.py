"""One request per sequence, and one answer from theirs, as an engine alone numbers and counts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from pydantic import BaseModel

from pdlab.deploy.serving.sequences import events, for_one_engine, join, split


class Request(BaseModel):
    prompt: Any = None
    n: int = 1
    seed: int | None = None
    request_id: str = "given"
    prompt_logprobs: int | None = None
    use_beam_search: bool = False
    echo: bool = False
    logprobs: int | None = None
    max_tokens: int | None = 16
    temperature: float | None = None


class Chat(BaseModel):
    n: int | None = 1
    seed: int | None = None
    request_id: str = "given"
    prompt_logprobs: int | None = None
    use_beam_search: bool = False
    echo: bool = False
    logprobs: bool | None = False
    max_tokens: int | None = None
    temperature: float | None = None


class Choice(BaseModel):
    index: int
    text: str


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int | None = 0
    total_tokens: int = 0


class Whole(BaseModel):
    id: str
    choices: list[Choice]
    usage: Usage


class Broken(BaseModel):
    message: str


@pytest.mark.parametrize("prompt", ["text", [1, 2, 3], ["text"], [[1, 2]], [], None])
def test_one_sequence_stays_as_it_is(prompt: Any) -> None:
    request = Request(prompt=prompt)
    assert split(request, "id")[0] is request


def test_prompts_times_n_in_the_order_of_choices() -> None:
    parts = split(Request(prompt=["a", "b"], n=3, seed=5), "id")
    assert [(part.prompt, part.n, part.seed) for part in parts] == [
        ("a", 1, 5), ("a", 1, 6), ("a", 1, 7), ("b", 1, 5), ("b", 1, 6), ("b", 1, 7),
    ]  # fmt: skip
    assert len({part.request_id for part in parts}) == 6


def test_token_ids() -> None:
    assert [part.prompt for part in split(Request(prompt=[[1, 2], [3]]), "id")] == [[1, 2], [3]]
    assert [part.prompt for part in split(Request(prompt=[1, 2], n=2), "id")] == [[1, 2], [1, 2]]


def test_chat_has_no_prompt() -> None:
    parts = split(Chat(n=2, seed=1), "id")
    assert [(part.n, part.seed) for part in parts] == [(1, 1), (1, 2)]
    assert len(split(Chat(n=None), "id")) == 1


@pytest.mark.parametrize(
    ("request_", "whole"),
    [
        (Request(prompt="a"), False),
        (Request(prompt="a", echo=True), False),
        (Request(prompt="a", logprobs=1), False),
        (Request(prompt="a", echo=True, logprobs=0), True),
        (Request(prompt="a", prompt_logprobs=0), True),
        (Request(prompt="a", use_beam_search=True), True),
        (Request(prompt="a", max_tokens=0), True),
        (Chat(), False),
        (Chat(echo=True, logprobs=True), False),
        (Chat(prompt_logprobs=1), True),
        (Chat(n=2, temperature=0.0), True),
        (Chat(n=2, temperature=0.5), False),
        (Request(prompt=["a", "b"], temperature=0.0), False),
    ],
)
def test_what_one_engine_has_to_answer_whole(request_: Any, whole: bool) -> None:
    assert for_one_engine(request_) is whole


def joined(
    streams: list[Callable[[], AsyncIterator[Any]]],
    n: int = 1,
    closed: list[int] | None = None,
    take: int | None = None,
) -> list[Any]:
    async def run() -> list[Any]:
        parts: list[Any] = []
        answer = join([make() for make in streams], n, lambda item: isinstance(item, Broken), "id")
        async for item in answer:
            parts.append(item)
            if take is not None and len(parts) >= take:
                await answer.aclose()  # type: ignore[attr-defined]
                break
        return parts

    return asyncio.run(run())


def texts(*items: Any, after: float = 0.0) -> Callable[[], AsyncIterator[Any]]:
    async def stream() -> AsyncIterator[Any]:
        for item in items:
            await asyncio.sleep(after)
            yield item

    return stream


def chunk(number: int, text: str, **more: Any) -> str:
    choices = [{"index": 0, "text": text}] if text else []
    return f"data: {json.dumps({'id': f'cmpl-id-{number}', 'choices': choices, **more})}\n\n"


def test_whole_answers() -> None:
    parts = [
        Whole(
            id=f"cmpl-id-{i}",
            choices=[Choice(index=0, text=f"t{i}")],
            usage=Usage(prompt_tokens=10 + i // 2, completion_tokens=i),
        )
        for i in range(4)
    ]
    # The first part answers last.
    streams = [texts(part, after=0.02 if i == 0 else 0.0) for i, part in enumerate(parts)]
    (whole,) = joined(streams, n=2)
    assert whole.id == "cmpl-id"
    assert [(c.index, c.text) for c in whole.choices] == [(0, "t0"), (1, "t1"), (2, "t2"), (3, "t3")]
    # Two prompts of 10 and 11 tokens, each counted once.
    assert whole.usage == Usage(prompt_tokens=21, completion_tokens=6, total_tokens=27)


def test_streams() -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    streams = [
        texts([chunk(i, "a") + chunk(i, "b")], [chunk(i, "", usage=usage)], ["data: [DONE]\n\n"], after=0.001 * i)
        for i in range(3)
    ]
    sent = events(joined(streams))
    assert sent[-1] == "[DONE]" and sent.count("[DONE]") == 1
    chunks = [json.loads(event) for event in sent[:-1]]
    assert {chunk["id"] for chunk in chunks} == {"cmpl-id"}
    for index in range(3):
        assert [c["text"] for one in chunks for c in one["choices"] if c["index"] == index] == ["a", "b"]
    usages = [one["usage"] for one in chunks if "usage" in one]
    assert usages == [{"prompt_tokens": 15, "completion_tokens": 6, "total_tokens": 21}]
    assert chunks[-1]["choices"] == []


def test_a_stream_of_several_says_nothing_of_one() -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    details = {"completion_tokens_details": {"reasoning_tokens": 1}}
    metrics = {"metrics": {"time_to_first_token_ms": 1.0}}
    streams = [texts(chunk(i, "a"), chunk(i, "", usage={**usage, **details}, **metrics)) for i in range(2)]
    last = json.loads(events(joined(streams, n=2))[-2])
    assert last["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
    assert "metrics" not in last


def test_a_stream_without_usage_ends_without_usage() -> None:
    sent = events(joined([texts(chunk(i, "a"), "data: [DONE]\n\n") for i in range(2)]))
    assert len(sent) == 3 and all("usage" not in event for event in sent)


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_an_error_of_one_part_is_the_answer_to_all(wrong: int) -> None:
    streams = [texts(chunk(i, "a"), "data: [DONE]\n\n") for i in range(3)]
    streams[wrong] = texts(Broken(message="too long"), after=0.01)
    assert joined(streams) == [Broken(message="too long")]


def test_an_engine_that_fails_in_the_middle_of_a_stream_ends_it() -> None:
    for broken in (Broken(message="gone"), [Broken(message="gone")]):
        stream = joined(
            [texts([chunk(0, "a")], broken, after=0.01), texts([chunk(1, "a")], [chunk(1, "b")], after=0.1)]
        )
        assert stream[-1] == Broken(message="gone")


def test_an_error_in_the_middle_of_a_stream_is_passed_on() -> None:
    error_event = 'data: {"error": {"message": "gone"}}\n\n'
    sent = events(joined([texts(chunk(0, "a"), error_event), texts(chunk(1, "a"))]))
    assert {"error": {"message": "gone"}} in [json.loads(event) for event in sent[:-1]]


def test_what_a_part_raises_is_raised() -> None:
    async def stream() -> AsyncIterator[Any]:
        yield chunk(0, "a")
        raise RuntimeError("the engine is dead")

    with pytest.raises(RuntimeError, match="the engine is dead"):
        joined([stream, texts(chunk(1, "a"))])


@pytest.mark.parametrize("begun", [True, False])
async def test_a_client_that_goes_away_ends_every_part(begun: bool) -> None:
    ended: list[int] = []

    def part(number: int) -> Callable[[], AsyncIterator[Any]]:
        async def stream() -> AsyncIterator[Any]:
            try:
                if not begun and number == 1:
                    await asyncio.sleep(60)
                while True:
                    yield chunk(number, "a")
                    await asyncio.sleep(0.001)
            finally:
                ended.append(number)

        return stream

    answer = join([part(0)(), part(1)()], 1, lambda _: False, "id")
    if begun:
        async for _ in answer:
            break
        await answer.aclose()  # type: ignore[attr-defined]
    else:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(anext(answer), 0.05)
    assert sorted(ended) == [0, 1]
