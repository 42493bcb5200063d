"""The load generator's own bookkeeping, without vLLM: how long a place in a closed loop stood empty."""

from __future__ import annotations

import asyncio
import io
import time
import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest
from support.client_levels import client_level

from pdlab.bench.client.protocol import ClientAnswer, merged
from pdlab.bench.client.worker import Meter, _own_lengths
from pdlab.core.workload import Closed, Open
from pdlab.results.schema import RequestRecord


def answered(start_s: float, **changes: Any) -> Any:
    """What vLLM's request function returns."""
    fields: dict[str, Any] = {"success": True, "start_time": start_s, "ttft": 0.1, "latency": 0.2, "prompt_len": 8}
    fields |= {"output_tokens": 4, "itl": [0.1], "error": "", "generated_text": ""}
    return SimpleNamespace(**fields | changes)


def records_of(meter: Meter) -> list[RequestRecord]:
    return sorted((each for part in meter.ended.parts() for each in part.records), key=lambda each: each.arrival_s)


async def test_a_request_without_an_answer_in_time_is_marked() -> None:
    meter = Meter(client_level(load=Closed(concurrency=1), request_timeout_s=0.05), io.StringIO())

    async def serve(request: Any, *_: Any) -> Any:
        await asyncio.sleep(request.takes_s)
        return answered(time.perf_counter(), success=False, error="HTTP 500")

    for name, takes_s in (("hangs", 9.0), ("fails", 0.0)):
        request = SimpleNamespace(request_id=name, takes_s=takes_s, prompt_len=1)
        meter.keep(name, await meter.request(serve, request, None))
    assert meter.ended.failed == meter.ended.count == 2 and not meter.timed_out and not meter.waited_s
    hangs, fails = records_of(meter)
    assert (hangs.timed_out, fails.timed_out) == (True, False)
    assert hangs.error == "no complete answer within 0.05 s" and fails.error == "HTTP 500"
    assert fails.lateness_s is not None and fails.lateness_s < 0.05


async def test_lateness_in_a_closed_loop_is_the_time_a_place_stood_empty() -> None:
    meter = Meter(client_level(load=Closed(concurrency=2)), io.StringIO())
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

    before = time.perf_counter()
    long = asyncio.create_task(request("long", 0.5))
    await request("short", 0.01)
    await asyncio.sleep(0.2)  # its place stands empty
    await request("third", 0.01)
    await request("fourth", 0.01)
    await long
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


def test_records_keep_the_requested_tokens_of_each_request_of_this_process() -> None:
    lengths = tuple((number, 2) for number in range(1, 10))
    own = client_level(load=Open(rate_rps=1.0), lengths=lengths).model_copy(update={"part": 1, "parts": 4})
    assert _own_lengths(own) == [(2, 2), (6, 2)] and _own_lengths(client_level(load=Open(rate_rps=1.0))) is None
    meter = Meter(own, io.StringIO())
    for start_s, requested in zip((9.0, 8.5), _own_lengths(own) or (), strict=True):
        meter.keep(str(start_s), answered(start_s), due_s=start_s - 7.0, requested=requested)
    meter.keep("plain", answered(8.0), due_s=0.75)
    records = records_of(meter)
    assert [(record.arrival_s, record.requested) for record in records] == [(0.0, None), (0.5, (6, 2)), (1.0, (2, 2))]
    # The schedule began at 7.0, by the two that were sent then and not a quarter of a second later.
    assert [record.lateness_s for record in records] == [0.25, 0.0, 0.0] and meter.ended.schedule_s == 7.0
    assert "requested" not in records[0].model_dump(exclude_defaults=True)


def test_what_waited_for_others_is_late_by_them() -> None:
    meter = Meter(client_level(load=Open(rate_rps=1.0)), io.StringIO())
    meter.keep("root", answered(8.0), due_s=1.0)
    meter.keep("next", answered(9.0), due_s=1.0, waited=True, lateness_s=0.125)
    meter.keep("unsent", answered(9.5, success=False, error="not sent"), due_s=1.0, waited=True)
    assert [record.lateness_s for record in records_of(meter)] == [0.0, 0.125, None]


def test_tokens_that_the_server_does_not_report_are_counted_in_the_text() -> None:
    def tokenizer(text: str, **_: Any) -> Any:
        return SimpleNamespace(input_ids=text.split())

    meter = Meter(client_level(load=Closed(concurrency=1)), io.StringIO(), tokenizer)
    meter.keep("reported", answered(1.0, generated_text="a b c"))
    meter.keep("not reported", answered(2.0, output_tokens=None, generated_text="a b c"))
    meter.keep("failed", answered(3.0, output_tokens=None, success=False))
    assert [record.output_tokens for record in records_of(meter)] == [4, 3, 0]


def test_what_has_ended_is_not_kept_in_memory() -> None:
    meter = Meter(client_level(load=Closed(concurrency=1)), io.StringIO())
    gaps_s = [0.001 * number for number in range(200)]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(2000):
            meter.keep(f"r{number}", answered(float(number), itl=[*gaps_s]))
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 100_000, "the gaps of one request take 1,600 bytes"
    records = records_of(meter)
    assert [record.arrival_s for record in records] == [float(number) for number in range(2000)]
    assert all(record.itl_s == tuple(round(gap_s, 6) for gap_s in gaps_s) for record in records)
