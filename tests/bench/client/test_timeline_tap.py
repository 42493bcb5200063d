"""Timelines are found in what vLLM's request functions read, and what these read is not changed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pdlab.bench.client.ended import EndedRequest, timeline_of
from pdlab.bench.client.protocol import ClientAnswer, merged
from pdlab.bench.client.timeline_tap import TappedSession
from pdlab.deploy.serving.timeline import HEADER
from pdlab.results.timeline import RequestTimeline

STREAM = b'data: {"a": ": pdla"}\n\ndata: {"b": ": pdlab {}"}\n\n: pdlab {"v":1,"t":{}}\n\ndata: [DONE]\n\n'


class Session:
    """As aiohttp's: one answer, in pieces."""

    def __init__(self, pieces: list[bytes], headers: dict[str, str]) -> None:
        self.pieces, self.headers, self.closed, self.status = pieces, headers, False, 200
        self.content = self

    def post(self, **_: Any) -> Any:
        return self

    async def __aenter__(self) -> Any:
        return self

    async def __aexit__(self, *_: Any) -> None:
        self.closed = True

    async def iter_any(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            yield piece


def read(pieces: list[bytes], headers: dict[str, str] | None = None) -> tuple[bytes, list[str]]:
    found: list[str] = []
    session = Session(pieces, headers or {})

    async def run() -> bytes:
        async with TappedSession(session, found.append).post(url="x") as response:
            assert response.status == 200
            return b"".join([piece async for piece in response.content.iter_any()])

    text = asyncio.run(run())
    assert session.closed
    return text, found


@pytest.mark.parametrize("size", range(1, len(STREAM) + 1))
def test_a_comment_is_found_however_the_answer_is_cut(size: int) -> None:
    pieces = [STREAM[at : at + size] for at in range(0, len(STREAM), size)]
    assert read(pieces) == (STREAM, ['{"v":1,"t":{}}'])


def test_a_header_is_found_and_other_comments_are_not() -> None:
    assert read([b"{}"], {HEADER: "{}"}) == (b"{}", ["{}"])
    assert read([b": ping\n\ndata: 1\n\n"])[1] == []


def read_timeline(start_s: float, text: str | None, *, ok: bool = True) -> RequestTimeline | None:
    ended = EndedRequest(start_s, 0.5, 1.0, ok, 8, 4, (), "", None, False, None, {}, text, None)
    return timeline_of(ended, origin_s=2.0)


def test_timelines_have_the_clients_times_and_unreadable_ones_are_left_out() -> None:
    good = '{"v":1,"id":"x","path":"collocated","t":{"first_byte":400.0}}'
    one = read_timeline(3.0, good)
    assert (
        read_timeline(2.0, None) is None
        and read_timeline(2.5, '{"v":2}') is None
        and read_timeline(2.6, good, ok=False) is None
    )
    assert one is not None and (one.arrival_s, one.ttft_s) == (1.0, 0.5)
    assert sum(part.seconds for part in one.parts()) == pytest.approx(0.5)


NAMED = '"v":1,"id":"x","path":"pd"'


@pytest.mark.parametrize(
    "text",
    [
        "no JSON", "[]", "7", "null", "[" * 100_000,
        f'{{{NAMED},"t":{{"first_byte":NaN}}}}', f'{{{NAMED},"t":{{"first_byte":1e999}}}}',
        f'{{{NAMED},"t":{{"first_byte":1}},"p":{{"total":Infinity}}}}',
        f'{{{NAMED},"t":{{"first_byte":1}},"wire":[[0,NaN,1,1,1,1]]}}',
    ],
)  # fmt: skip
def test_unreadable_timelines_lose_no_request(text: str) -> None:
    """Whatever server is measured: a level's records are not lost for it, and what is kept can be read again."""
    assert read_timeline(2.0, text) is None


def test_timelines_of_several_processes_are_on_one_clock() -> None:
    def answer(origin_s: float) -> ClientAnswer:
        timeline = RequestTimeline(id="x", path="local", t={"first_byte": 1.0}, arrival_s=0.25, ttft_s=0.1)
        fields = {"started_at": "", "finished_at": "", "records": (), "timelines": (timeline,), "origin_s": origin_s}
        return ClientAnswer.model_validate({"name": "x", **fields})

    assert [each.arrival_s for each in merged([answer(8.0), answer(7.0)]).timelines] == [0.25, 1.25]
