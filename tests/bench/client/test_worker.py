"""The load generator's own bookkeeping, without vLLM: how long a place in a closed loop stood empty."""

from __future__ import annotations

import asyncio
import io
import time
from types import SimpleNamespace
from typing import Any

import pytest

from pdlab.bench.client.protocol import ClientAnswer, ClientLevel, merged
from pdlab.bench.client.worker import Meter, _own_lengths, _records
from pdlab.results.schema import RequestRecord


def level(**load: Any) -> ClientLevel:
    fields: dict[str, Any] = {"model": "m", "tokenizer": "t", "input_tokens": 8, "output_tokens": 4, "num_requests": 9}
    return ClientLevel(name="x", base_url="http://h", seed=1, **fields, **load)


def test_a_request_without_an_answer_in_time_is_known_as_such() -> None:
    meter = Meter(level(concurrency=1, request_timeout_s=0.05), io.StringIO())

    async def serve(request: Any, *_: Any) -> Any:
        await asyncio.sleep(request.takes_s)
        return SimpleNamespace(success=False, start_time=time.perf_counter())

    async def run() -> None:
        for name, takes_s in (("hangs", 9.0), ("fails", 0.0)):
            asked = SimpleNamespace(request_id=name, takes_s=takes_s, prompt_len=1)
            await meter.request(serve, asked, None)

    asyncio.run(run())
    assert meter.timed_out == {"hangs"} and meter.failed == 2


def test_lateness_in_a_closed_loop_is_the_time_a_place_stood_empty() -> None:
    meter = Meter(level(concurrency=2), io.StringIO())
    sent: dict[str, float] = {}
    ended: list[float] = []

    async def serve(request: Any, *_: Any) -> Any:
        start = time.perf_counter()
        sent[request.request_id] = start
        await asyncio.sleep(request.takes_s)
        return SimpleNamespace(success=True, start_time=start)

    async def request(name: str, takes_s: float) -> None:
        await meter.request(serve, SimpleNamespace(request_id=name, takes_s=takes_s), None)
        ended.append(time.perf_counter())

    async def run() -> None:
        long = asyncio.create_task(request("long", 0.5))
        await request("short", 0.01)
        await asyncio.sleep(0.2)  # its place stands empty
        await request("third", 0.01)
        await request("fourth", 0.01)
        await long

    before = time.perf_counter()
    asyncio.run(run())
    waited = meter.waited_s
    # The first two are due together; after them each takes the place of the one before it, not of an earlier one.
    assert 0 <= waited["long"] <= sent["long"] - before
    assert sent["short"] - sent["long"] <= waited["short"] <= sent["short"] - before
    assert 0.2 <= sent["third"] - ended[0] <= waited["third"] <= sent["third"] - sent["short"]
    assert sent["fourth"] - ended[1] <= waited["fourth"] <= sent["fourth"] - sent["third"]


def test_a_process_that_begins_late_is_late_by_the_common_schedule() -> None:
    def answer(schedule_s: float) -> ClientAnswer:
        record = RequestRecord(arrival_s=0.0, input_tokens=8, output_tokens=0, error="x", lateness_s=0.001)
        return ClientAnswer(
            name="x", records=(record,), schedule_s=schedule_s, origin_s=schedule_s + 1, started_at="a", finished_at="b"
        )

    whole = merged([answer(10.0), answer(10.3)])
    assert [record.lateness_s for record in whole.records] == [0.001, pytest.approx(0.301)]
    assert whole.schedule_s == 10.0


def test_records_keep_what_was_asked_of_each_request_of_this_process() -> None:
    lengths = tuple((number, 2) for number in range(1, 10))
    own = level(rate_rps=1.0, lengths=lengths).model_copy(update={"part": 1, "parts": 4})
    outputs = [
        SimpleNamespace(start_time=9.0 - k, success=True, ttft=0.1, latency=0.2, prompt_len=2 + 4 * k, itl=[0.1])
        for k in range(2)
    ]
    facts = [
        {"asked": asked, "timed_out": late} for asked, late in zip(_own_lengths(own) or (), (False, True), strict=False)
    ]
    records = _records(outputs, [2, 2], facts)
    assert [record.asked for record in records] == [(6, 2), (2, 2)], "by arrival"
    assert [record.timed_out for record in records] == [True, False], "by arrival"
    assert all(record.asked and record.asked[0] == record.input_tokens for record in records)
    assert _own_lengths(level(rate_rps=1.0)) is None
    plain = _records(outputs, [2, 2], [{}, {}])
    assert "asked" not in plain[0].model_dump(exclude_defaults=True)
