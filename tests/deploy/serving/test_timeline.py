"""Marks of a request on a clock that the test moves, and how the timeline reaches whoever asked for it."""

from __future__ import annotations

import asyncio
import functools
import json
import pickle
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support.asgi import exchange, text_of
from support.clock import Clock
from support.ray_metrics import Metrics

from pdlab.deploy.serving import timeline
from pdlab.deploy.serving.timeline import (
    FIELD,
    HEADER,
    IDS_KEY,
    TIMES_KEY,
    RequestTiming,
    SendsTimeline,
    StreamsPast,
    TimelineHeader,
    TimelineMiddleware,
    TimingBook,
    current,
    listen,
    unpacked,
)
from pdlab.marks.engine_marks import boot_id
from pdlab.marks.request_parts import MARKS
from pdlab.results.timeline import RequestTimeline

ASKS = ((HEADER.encode(), b"1"), (b"x-request-id", b"r-1"), (b"content-type", b"application/json"))
QUIET = ASKS[1:]
PREFILLED = {"total": 15.0, "queue": 4.0, "prefill": 9.0}
AT_ONCE = dict.fromkeys(PREFILLED, 0.0)


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


@pytest.fixture
def timing(clock: Clock) -> RequestTiming:
    return RequestTiming(wanted=True, request_id="r-1", clock=clock)


def test_a_request_whose_kv_cache_moved(timing: RequestTiming, clock: Clock) -> None:
    timing.orchestrated = True
    clock.now += 0.010
    timing.called()
    clock.now += 0.020
    timing.answered(PREFILLED | {"id": "p-1", "replica": "P", "no": 1})
    timing.engine_ids.append("d-1")
    for name, at in (("queued", 100.04), ("scheduled", 100.09), ("first", 100.10)):
        timing.event(name, at)
    timing.receive(100.05, 100.07, 100.08, "read")
    own = boot_id()
    timing.reads += [(1, 100.055, 100.066, 900.0, 64, 1, own), (0, 100.052, 100.060, 800.0, 64, 1, own)]
    clock.now = 100.11
    timing.chunk()
    clock.now = 100.5
    timing.chunk()
    parsed = RequestTimeline.model_validate(json.loads(json.dumps(timing.record("D", guarded=True))))
    assert parsed.whole and parsed.path == "pd" and parsed.disorder_s == 0 and parsed.attempt == 1
    assert parsed.t == {
        "call": 10, "answer": 30, "queued": 40, "admitted": 50, "posted": 52, "seen": 66, "reported": 70, "usable": 80,
        "scheduled": 90, "first": 100, "first_byte": 110, "second_byte": 500,
    }  # fmt: skip
    assert (parsed.id, parsed.d_id, parsed.p_id, parsed.role_d, parsed.role_p) == ("r-1", "d-1", "p-1", "D", "P")
    assert parsed.p == {"total": 15, "queue": 4, "prefill": 9}
    assert [tuple(read) for read in parsed.wire] == [(0, 52, 60, 800, 64, 1), (1, 55, 66, 900, 64, 1)]


@pytest.mark.parametrize(
    ("admitted", "decided", "outcome", "expected"),
    [
        (100.05, 110.05, "anew", {"admission": 10, "lost_read": 10_000}),  # a read past its deadline
        (100.05, 100.09, "anew", {"admission": 10, "lost_read": 40}),
        (100.06, 105.06, "refused", {"admission": 20, "lost_read": 5000}),  # prefill did not answer
        (None, 105.06, "refused", {"admission": 5020, "lost_read": 0}),  # refused at once, when decode had room
    ],
)
def test_a_prompt_that_decode_computes_has_the_time_that_was_lost_before(
    timing: RequestTiming,
    clock: Clock,
    admitted: float | None,
    decided: float,
    outcome: str,
    expected: dict[str, float],
) -> None:
    timing.orchestrated = True
    timing.called()
    timing.answered(AT_ONCE)
    timing.engine_ids.append("d-1")
    timing.event("queued", 100.04)
    timing.receive(admitted, decided - 0.01 if outcome == "anew" else None, decided, outcome)
    if outcome == "anew":  # its end may be seen before the decision, or after it
        timing.read(0, 100.051, decided + 0.02, 900.0, 64, 1, boot_id())
    timing.event("scheduled", decided + 0.003)
    timing.event("first", decided + 0.053)
    clock.now = decided + 0.054
    timing.chunk()
    parsed = RequestTimeline.model_validate(json.loads(json.dumps(timing.record("D", guarded=True))))
    assert parsed.path == "recomputed" and parsed.whole and parsed.disorder_s == 0
    assert len(parsed.wire) == (outcome == "anew"), "its bytes were moved"
    parts = {name: round(1e3 * seconds, 6) for name, seconds in parsed.parts()}
    after = {"wait": 3, "recompute": 50, "out": 1}
    assert {name: ms for name, ms in parts.items() if ms and name != "submit"} == {
        name: ms for name, ms in {**expected, **after}.items() if ms
    }
    older = parsed.model_copy(update={"t": {name: at for name, at in parsed.t.items() if name != "given_up"}})
    assert not older.whole, "the next part contains what was lost"


def cached_or_lost(timing: RequestTiming, clock: Clock, outcome: str | None) -> RequestTimeline:
    """A request of PD whose engine was given it after 40 ms; a step later there was an outcome, or none."""
    timing.orchestrated = True
    timing.called()
    timing.answered(AT_ONCE)
    timing.engine_ids.append("d-1")
    timing.event("queued", 100.04)
    if outcome is not None:
        timing.receive(None, None, 100.09, outcome)
    timing.event("scheduled", 100.0901)
    timing.event("first", 100.1)
    clock.now = 100.11
    timing.chunk()
    return RequestTimeline.model_validate(json.loads(json.dumps(timing.record("D", guarded=True))))


def test_nothing_was_read_only_if_the_guard_reported_it(timing: RequestTiming, clock: Clock) -> None:
    parsed = cached_or_lost(timing, clock, "cached")
    assert parsed.path == "cached" and parsed.whole and parsed.disorder_s == 0 and "given_up" not in parsed.t
    parts = {name: round(1e3 * seconds, 6) for name, seconds in parsed.parts()}
    assert (parts["admission"], parts["wait"], parts["first_step"]) == (50, 0.1, 9.9)


@pytest.mark.parametrize("read", [True, False])
def test_a_request_whose_marks_of_the_core_were_lost_is_not_whole(
    timing: RequestTiming, clock: Clock, read: bool
) -> None:
    if read:
        timing.read(0, 100.05, 100.07, 900.0, 64, 1, boot_id())
    parsed = cached_or_lost(timing, clock, None)
    assert parsed.path == "pd" and not parsed.whole and parsed.err == "the KV guard reported no outcome"


def test_reads_of_another_machines_clock_do_not_make_marks(timing: RequestTiming) -> None:
    timing.orchestrated, timing.prefilled = True, True
    timing.event("first", 100.1)
    timing.receive(100.05, 100.07, 100.08, "read")
    timing.reads.append((0, 7.0, 7.5, 1.0, 64, 1, "another"))
    parsed = timing.record("D", guarded=True)
    assert "posted" not in parsed["t"] and parsed["err"] == "the reads were on other machines"


@pytest.mark.parametrize(
    ("remote_ms", "local_ms", "seen", "transfer"),
    [
        (100, 10, 155, 100),  # the longest read is of the other machine
        (5, 10, 65, 10),
        (400, 10, 170, 115),  # posted before the first one here: it has ended when the scheduler has the news
    ],
)
def test_a_read_of_another_machines_clock_has_its_duration(
    timing: RequestTiming, clock: Clock, remote_ms: float, local_ms: float, seen: float, transfer: float
) -> None:
    timing.orchestrated, timing.prefilled, timing.times = True, True, AT_ONCE
    timing.receive(100.05, 100.17, 100.18, "read")
    for name, at in (("call", 100.01), ("answer", 100.02), ("queued", 100.03), ("scheduled", 100.19), ("first", 100.2)):
        timing.event(name, at)
    timing.read(0, 7.0, 7.0 + remote_ms / 1e3, 1.0, 64, 1, "another")
    timing.read(1, 100.055, 100.055 + local_ms / 1e3, 1.0, 64, 1, boot_id())
    clock.now = 100.21
    timing.chunk()
    parsed = RequestTimeline.model_validate(json.loads(json.dumps(timing.record("D", guarded=True))))
    assert [read[:3] for read in parsed.wire] == [(0, 55, 55 + remote_ms), (1, 55, 55 + local_ms)]
    assert parsed.err is None and parsed.t["seen"] == seen
    assert parsed.whole and parsed.disorder_s == 0
    parts = {name: round(1e3 * seconds, 6) for name, seconds in parsed.parts()}
    assert (parts["post"], parts["transfer"], parts["step_lag"]) == (5, transfer, 170 - seen)


@pytest.mark.parametrize(
    ("orchestrated", "prefilled", "outcome", "path"),
    [
        (False, False, None, "collocated"),
        (True, False, None, "local"),
        (True, True, None, "pd"),
        (True, True, "cached", "cached"),
        (True, True, "read", "pd"),
        (True, True, "anew", "recomputed"),
        (True, True, "refused", "recomputed"),
    ],
)
def test_paths(timing: RequestTiming, orchestrated: bool, prefilled: bool, outcome: str | None, path: str) -> None:
    timing.orchestrated, timing.prefilled, timing.outcome = orchestrated, prefilled, outcome
    assert timing.path == path


def test_what_cannot_be_told_is_said(timing: RequestTiming) -> None:
    assert timing.record("", guarded=True)["err"] == "the engine reported no events"
    timing.orchestrated = timing.prefilled = True
    timing.event("first", 100.1)
    assert timing.record("", guarded=False)["err"] == "without the KV guard reads have no marks"
    assert timing.record("", guarded=True)["err"] == "the KV guard reported no outcome"
    timing.engine_ids += ["a", "b"]
    assert timing.record("", guarded=True)["err"] == "several sequences"
    timing.second_request = True
    assert timing.record("", guarded=True)["err"] == "decode got a second request"


def test_two_machines_that_do_not_know_their_boot_have_two_clocks(
    timing: RequestTiming, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline, "boot_id", lambda: "")
    monkeypatch.setattr(timeline, "_machine", {})
    timing.orchestrated, timing.prefilled = True, True
    timing.event("first", 100.1)
    timing.receive(100.05, 100.07, 100.08, "read")
    timing.read(0, 7.0, 7.5, 1.0, 64, 1, "")
    parsed = timing.record("D", guarded=True)
    assert "posted" not in parsed["t"] and parsed["err"] == "the reads were on other machines"


@pytest.mark.parametrize("durations", [{"total": 15.0}, {"total": 15.0, "prefill": 9.0}, {}, None])
def test_an_answer_of_prefill_without_its_engines_durations_says_so(
    timing: RequestTiming, clock: Clock, durations: dict[str, float] | None
) -> None:
    """With vLLM's disable_log_stats the engine that prefills reports no events."""
    timing.orchestrated = True
    timing.called()
    timing.answered(durations)
    timing.engine_ids.append("d-1")
    timing.event("queued", 100.04)
    timing.receive(None, None, 100.09, "cached")
    timing.event("scheduled", 100.0901)
    timing.event("first", 100.1)
    clock.now = 100.11
    timing.chunk()
    sent = timing.record("D", guarded=True)
    assert sent["err"] == "prefill's engine reported no events"
    assert not RequestTimeline.model_validate(sent).whole


HOSTILE = "x\r\nset-cookie: a\n\ndata: [DONE]\n\n\x00\x7fé" + 20_000 * "y"


def test_a_clients_id_of_its_request_cannot_end_a_line_nor_fill_a_header(clock: Clock) -> None:
    timing = RequestTiming(wanted=True, request_id=HOSTILE, clock=clock)
    timing.engine_ids.append(f"cmpl-{HOSTILE}-12345678")
    timing.answered(timing.durations("P"))
    value = timeline.header_value(timing.record("D", guarded=True))
    assert len(value) < 1500 and value.isascii() and b"\n" not in value and b"\r" not in value
    parsed = json.loads(value)
    assert parsed["d_id"].endswith("y-12345678") and parsed["p_id"] == parsed["d_id"] and len(parsed["id"]) == 128


def test_a_header_is_no_longer_than_clients_take(timing: RequestTiming) -> None:
    """64 sequences, 8 ranks each: an answer whose header is too long is refused whole by its client."""
    timing.event("first", 100.1)
    for number in range(512):
        timing.read(number % 8, 100.05, 100.06 + number / 1e5, 900.123, 123_456_789, 16, boot_id())
    whole = timing.record("D", guarded=True)
    assert len(whole["wire"]) == 512 and len(timeline._json(whole)) > 8190
    parsed = json.loads(timeline.header_value(whole))
    assert parsed["wire"] == [] and parsed["err"] == "too long a header" and parsed["t"] == whole["t"]
    assert len(timeline.header_value(whole)) < 4096


@pytest.mark.parametrize(
    "stats",
    [
        {timeline.CORE: [["r"]]},
        {timeline.WIRE: [["r", 1, 2]]},
        {timeline.WIRE: [7]},
        {timeline.CORE: 7},
        7,
    ],
)
def test_what_another_guard_says_does_not_end_the_engine(clock: Clock, stats: Any) -> None:
    book = TimingBook()
    book._timings["r"] = RequestTiming(wanted=True, clock=clock)
    outputs = SimpleNamespace(outputs=[], scheduler_stats=SimpleNamespace(kv_connector_stats=stats))
    book.take(outputs)
    assert book._failed and not book._timings["r"].reads


def event(name: str, at: float) -> Any:
    return SimpleNamespace(type=SimpleNamespace(name=name), timestamp=at)


class Engine:
    """vLLM's client and its engine core: a step of 10 ms is running; then the request is queued, taken up and has a
    token, 1 ms apart."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.sent = asyncio.Queue[Any]()
        self.added: list[str] = []
        self.output_processor = SimpleNamespace(add_request=self.add)
        self.engine_core = SimpleNamespace(get_output_async=self.sent.get)
        self.stats: dict[str, Any] | None = None

    def add(self, request: Any, prompt: str | None) -> None:
        self.added.append(request.request_id)
        at = self.clock()
        events = [event("QUEUED", at + 0.010), event("SCHEDULED", at + 0.011), event("SCHEDULED", at + 0.5)]
        output = SimpleNamespace(request_id=request.request_id, events=events, new_token_ids=[7])
        other = SimpleNamespace(request_id="other", events=None, new_token_ids=[8])
        scheduler_stats = SimpleNamespace(kv_connector_stats=self.stats)
        self.sent.put_nowait(
            SimpleNamespace(outputs=[other, output], timestamp=at + 0.012, scheduler_stats=scheduler_stats)
        )

    async def generate(self, name: str) -> None:
        self.output_processor.add_request(SimpleNamespace(request_id=name, prompt_token_ids=[5, 6]), None)
        await self.engine_core.get_output_async()


def test_marks_are_taken_out_of_the_statistics_before_anybody_keeps_them() -> None:
    book, engine = TimingBook(), Engine()
    listen(engine, book)
    plain: dict[str, Any] = {
        "transfer_duration": [1.0],
        timeline.CORE: [["r", 1, 2, 3, "read"]],
        timeline.WIRE: [["r"]],
    }
    for stats in (plain, {"NixlConnector": {"data": dict(plain)}}):
        engine.stats = stats
        asyncio.run(engine.generate("r"))
        kept = stats.get("NixlConnector", {}).get("data", stats)
        assert kept == {"transfer_duration": [1.0]}


@pytest.mark.parametrize("tokens", [[[7], []], [[], [7]], [[7], [8]]], ids=["after", "before", "beside"])
def test_only_the_events_that_end_a_part_are_marks(clock: Clock, tokens: list[list[int]]) -> None:
    """A preempted request has another event, also after its first token while another request waits for its own."""
    book, own = TimingBook(), RequestTiming(wanted=True, clock=clock)
    book._timings["r"], book._without_first = own, {"r", "other"}
    names = (["QUEUED", "SCHEDULED"], ["PREEMPTED", "SCHEDULED", "ONE_OF_A_LATER_VLLM"])
    for number, (new, events) in enumerate(zip(tokens, names, strict=True)):
        at = 101.0 + number
        output = SimpleNamespace(request_id="r", events=[event(name, at) for name in events], new_token_ids=new)
        book.take(SimpleNamespace(outputs=[output], timestamp=at + 0.5, scheduler_stats=None))
    first = 101.5 if tokens[0] else 102.5
    assert own.marks == {"queued": 101.0, "scheduled": 101.0, "first": first} and not book._failed
    assert own.marks.keys() <= MARKS.keys()


def test_a_request_that_nobody_times_is_only_passed_on() -> None:
    book, engine = TimingBook(), Engine()
    listen(engine, book)
    asyncio.run(engine.generate("r"))
    assert engine.added == ["r"] and not book._timings


class Plain:
    """Stands for Ray's engine server."""

    def __init__(self, engine: Engine) -> None:
        self.vllm = engine
        self.seen: list[RequestTiming | None] = []

    async def start(self) -> None:
        self.engine = SimpleNamespace(_engine_client=self.vllm)

    async def completions(self, request: Any, raw: Any = None) -> AsyncIterator[Any]:
        async def stream() -> AsyncIterator[Any]:
            await self.vllm.generate(f"cmpl-{request.name}")
            self.seen.append(current())
            for item in request.items:
                yield item

        return stream()

    chat = completions


class Server(SendsTimeline, Plain): ...


async def answer(server: Any, items: Iterable[Any], headers: dict[str, str] | None, **more: Any) -> list[Any]:
    if server._book is None:
        await server.start()
    raw = None if headers is None else SimpleNamespace(headers=headers)
    stream = await server.completions(SimpleNamespace(name="r", items=items, **more), raw)
    return [item async for item in stream]


STREAM = ["data: {1}\n\n", "data: {2}\n\n", "data: [DONE]\n\n"]


@pytest.mark.parametrize("batched", [False, True])
def test_through_a_handle_a_stream_has_one_comment_before_its_end(batched: bool) -> None:
    server = Server(Engine())
    items = [STREAM[:1], STREAM[1:]] if batched else STREAM
    sent = asyncio.run(answer(server, items, {HEADER: "1", "x-request-id": "r-9"}))
    text = "".join("".join(item) for item in sent)
    first, parsed, end = text.partition(": pdlab ")[0], text.partition(": pdlab ")[2].split("\n\n")[0], text[-14:]
    assert first == "".join(STREAM[:2]) and end == STREAM[2]
    record = RequestTimeline.model_validate_json(parsed)
    assert record.whole and (record.id, record.d_id, record.path) == ("r-9", "cmpl-r", "collocated")
    assert record.t["first"] - record.t["queued"] == pytest.approx(12, abs=1) and "first_byte" in record.t
    assert not server._book._timings, "forgotten"


@pytest.mark.parametrize("headers", [None, {}, {HEADER: "0"}, {HEADER: "true"}])
def test_who_does_not_ask_is_not_told(headers: dict[str, str] | None) -> None:
    server = Server(Engine())
    assert asyncio.run(answer(server, list(STREAM), headers)) == STREAM
    whole = SimpleNamespace(choices=[])
    asyncio.run(answer(server, [whole], headers))
    assert not hasattr(whole, FIELD)


def test_prefill_tells_decode_durations_and_no_client() -> None:
    server = Server(Engine())
    item = SimpleNamespace(choices=[], kv_transfer_params={"remote_request_id": "cmpl-r"})
    asyncio.run(answer(server, [item], {HEADER: "1"}, kv_transfer_params={"do_remote_decode": True}))
    parsed = item.kv_transfer_params.pop(TIMES_KEY)
    assert (parsed["id"], parsed["prefill"]) == ("cmpl-r", 1.0) and parsed["total"] >= 0
    assert parsed["queue"] == pytest.approx(11, abs=1), "with the step that was running"
    assert item.kv_transfer_params == {"remote_request_id": "cmpl-r"} and not hasattr(item, FIELD)


def test_prefill_tells_decode_token_ids_where_it_wants_them() -> None:
    server = Server(Engine())
    item = SimpleNamespace(choices=[], kv_transfer_params={"remote_request_id": "cmpl-r"})
    wants = {"do_remote_decode": True, IDS_KEY: True}
    asyncio.run(answer(server, [item], None, kv_transfer_params=wants))
    prompt_ids, first_ids = item.kv_transfer_params.pop(IDS_KEY)
    assert (unpacked(prompt_ids), unpacked(first_ids)) == ([5, 6], [7]) and len(prompt_ids) == 8


def test_requests_beside_one_another_have_their_own_timings() -> None:
    server = Server(Engine())

    async def run() -> list[Any]:
        await server.start()
        return await asyncio.gather(
            *(answer(server, list(STREAM), {HEADER: "1", "x-request-id": f"r-{number}"}) for number in range(5))
        )

    ids = [json.loads(sent[-1].split(": pdlab ")[1].split("\n\n")[0])["id"] for sent in asyncio.run(run())]
    assert ids == [f"r-{number}" for number in range(5)] and len(set(map(id, server.seen))) == 5


def application(server: Any, messages: list[dict[str, Any]]) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        stream = await server.completions(SimpleNamespace(name="r", items=[]), None)
        assert [item async for item in stream] == []
        for message in messages:
            await send(dict(message))

    asyncio.run(server.start())
    return TimelineMiddleware(app, server)


def start(kind: bytes, status: int = 200) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]}


def body(text: str) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text.encode(), "more_body": True}


def test_with_direct_streaming_the_timing_begins_where_http_does() -> None:
    server = Server(Engine())
    app = application(server, [start(b"text/event-stream; charset=utf-8"), *map(body, STREAM)])
    text = text_of(exchange(app, "/v1/completions", headers=ASKS))
    parsed = RequestTimeline.model_validate_json(text.split(": pdlab ")[1].split("\n\n")[0])
    assert parsed.id == "r-1" and parsed.d_id == "cmpl-r" and {"first_byte", "second_byte"} <= parsed.t.keys()
    assert text.endswith("\n\ndata: [DONE]\n\n") and text.count(": pdlab") == 1
    assert text_of(exchange(app, "/v1/completions", headers=QUIET)) == "".join(STREAM)
    assert not server._book._timings and current() is None


def test_pieces_of_a_stream_pass_the_middlewares_between() -> None:
    server, seen = Server(Engine()), list[Any]()

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        for message in (start(b"text/event-stream"), *map(body, STREAM), {"type": "http.response.body"}):
            await send(dict(message))

    async def between(scope: Any, receive: Any, send: Any) -> None:
        async def look(message: Any) -> None:
            seen.append(message)
            await send(message)

        await StreamsPast(stream)(scope, receive, look)

    asyncio.run(server.start())
    sent = exchange(TimelineMiddleware(between, server), "/v1/completions", headers=QUIET)
    assert text_of(sent) == "".join(STREAM) and len(sent) == len(STREAM) + 2
    assert [message["type"] for message in seen] == ["http.response.start", "http.response.body"]
    seen.clear()
    assert text_of(exchange(between, "/v1/completions", headers=QUIET)) == "".join(STREAM)
    assert len(seen) == len(STREAM) + 2


def test_an_answer_that_is_not_streamed_has_a_header() -> None:
    server = Server(Engine())
    app = application(server, [start(b"application/json"), body("{}")])
    headers = dict(exchange(app, "/v1/chat/completions", headers=ASKS)[0]["headers"])
    assert RequestTimeline.model_validate_json(headers[HEADER.encode()]).d_id == "cmpl-r"
    assert HEADER.encode() not in dict(exchange(app, "/v1/chat/completions", headers=QUIET)[0]["headers"])
    failed = application(server, [start(b"application/json", 400), body("{}")])
    assert HEADER.encode() not in dict(exchange(failed, "/v1/completions", headers=ASKS)[0]["headers"])


def test_what_the_client_was_told_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    server, counted = Server(Engine()), list[dict[str, Any]]()
    app = application(server, [start(b"text/event-stream"), *map(body, STREAM)])
    monkeypatch.setattr(server._counts, "add", lambda record, **how: counted.append(record))
    sent = exchange(app, "/v1/completions", headers=ASKS)
    parsed = json.loads(text_of(sent).partition(": pdlab ")[2].split("\n\n")[0])
    assert json.loads(json.dumps(counted)) == [parsed]


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("direct", [True, False])
def test_an_answer_that_is_not_streamed_counts_until_its_first_token(
    direct: bool, streamed: bool, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first token is made after 12 ms. The first piece is sent after 30 ms, the whole answer after 5 s."""
    metrics, sent_after_s = Metrics(), 0.030 if streamed else 5.0
    monkeypatch.setitem(sys.modules, "ray.util.metrics", metrics)
    monkeypatch.setattr(timeline, "RequestTiming", functools.partial(RequestTiming, clock=clock))
    server = Server(Engine(clock))

    def pieces() -> Iterator[Any]:
        clock.now += sent_after_s
        yield from STREAM if streamed else [SimpleNamespace(choices=[])]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        stream = await server.completions(SimpleNamespace(name="r", items=pieces()), None)
        assert [item async for item in stream]
        await send(start(b"text/event-stream" if streamed else b"application/json"))
        await send(body(STREAM[-1]) if streamed else body("{}"))

    if direct:
        asyncio.run(server.start())
        sent = exchange(TimelineMiddleware(app, server), "/v1/completions", headers=ASKS)
        text = (
            text_of(sent).split(": pdlab ")[1].split("\n\n")[0]
            if streamed
            else dict(sent[0]["headers"])[HEADER.encode()]
        )
        record = json.loads(text)
    else:
        last = asyncio.run(answer(server, pieces(), {HEADER: "1"}))[-1]
        record = json.loads(last.split(": pdlab ")[1].split("\n\n")[0]) if streamed else getattr(last, FIELD)
    client = RequestTimeline.model_validate(record | {"ttft_s": sent_after_s})
    assert sum(part.seconds for part in client.parts()) == pytest.approx(sent_after_s)
    assert dict(client.parts())["out"] == pytest.approx(sent_after_s - 0.012)
    server._counts.publish()
    assert metrics.of("pdlab_ttft_seconds") == pytest.approx(0.030 if streamed else 0.012)
    assert metrics.of("pdlab_ttft_seconds", part="out") == pytest.approx(0.018 if streamed else 0)
    assert metrics.of("pdlab_ttft_requests") == 1
    assert [value for part, value in metrics.observed if part == "total"] == [
        pytest.approx(0.030 if streamed else 0.012)
    ]


def test_an_ingress_makes_a_header_of_the_field() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(start(b"application/json"))
        await send({"type": "http.response.body", "body": json.dumps({"a": "é", FIELD: {"v": 1}}).encode()})

    sent = exchange(TimelineHeader(app), "/v1/completions", headers=ASKS)
    headers = dict(sent[0]["headers"])
    assert json.loads(headers[HEADER.encode()]) == {"v": 1} and json.loads(text_of(sent)) == {"a": "é"}
    assert int(headers[b"content-length"]) == len(text_of(sent).encode())
    assert FIELD in text_of(exchange(TimelineHeader(app), "/v1/completions", headers=QUIET)), "as it came"


def test_the_context_travels_as_a_new_one() -> None:
    made = pickle.loads(pickle.dumps(timeline._context))
    assert made is not timeline._context and made.get() is None
