"""Spans in OpenTelemetry's own exporter to memory: names, parents, times, which requests, and what clients may send."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support.asgi import exchange

from pdlab.deploy.serving.timeline import SendsTimeline, TimelineMiddleware
from pdlab.deploy.serving.traces import REQUEST_ID, ParentSpan, SpanMaker, sampled, span_times
from pdlab.results.timeline import PARTS

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
PD: dict[str, Any] = {
    "v": 1, "id": "r-1", "path": "pd", "try": 1, "d_id": "d-1", "p_id": "p-1", "role_d": "D", "role_p": "P",
    "p": {"total": 15.0, "queue": 4.0, "prefill": 9.0},
    "wire": [[0, 52, 60, 800.0, 64, 1], [1, 55, 66, 900.0, 64, 2]],
    "t": {
        "call": 10, "answer": 30, "queued": 40, "admitted": 50, "posted": 52, "seen": 66, "reported": 70, "usable": 80,
        "scheduled": 90, "first": 100, "first_byte": 110, "second_byte": 120,
    },
}  # fmt: skip


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Where the spans of this process go."""
    exporter = InMemorySpanExporter()
    provide(monkeypatch, lambda provider: provider.add_span_processor(SimpleSpanProcessor(exporter)))
    return exporter


def provide(monkeypatch: pytest.MonkeyPatch, prepare: Callable[[TracerProvider], None]) -> TracerProvider:
    provider = TracerProvider(shutdown_on_exit=False)
    prepare(provider)
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    return provider


def by_name(memory: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in memory.get_finished_spans()}


def ms(root: ReadableSpan, span: ReadableSpan) -> tuple[float, float]:
    assert root.start_time is not None and span.start_time is not None and span.end_time is not None
    return (span.start_time - root.start_time) / 1e6, (span.end_time - root.start_time) / 1e6


def header_of(span: ReadableSpan) -> str:
    """The header by which another span is below this one, which is sampled."""
    assert span.context is not None and span.context.trace_flags.sampled
    return f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-{span.context.trace_flags:02x}"


def test_the_spans_of_a_request_are_its_parts(memory: InMemorySpanExporter) -> None:
    traces = SpanMaker(1.0)
    begun = traces.begin("r-1", None, None)
    traces.end(begun, PD, 500.0)
    spans = by_name(memory)
    root = spans.pop("pdlab.request")
    assert root.parent is None and root.kind is trace.SpanKind.SERVER and ms(root, root) == (0, 500)
    assert {name: ms(root, span) for name, span in spans.items()} == {
        "pdlab.server": (0, 10), "pdlab.call": (10, 30), "pdlab.submit": (30, 40), "pdlab.admission": (40, 50),
        "pdlab.post": (50, 52), "pdlab.transfer": (52, 66), "pdlab.step_lag": (66, 70), "pdlab.guard": (70, 80),
        "pdlab.wait": (80, 90), "pdlab.first_step": (90, 100), "pdlab.out": (100, 110), "pdlab.tokens": (110, 500),
    }  # fmt: skip
    assert all(span.parent == root.context for span in spans.values())
    assert {name.removeprefix("pdlab.") for name in spans} - {"tokens"} <= set(PARTS)
    assert dict(spans["pdlab.call"].attributes or {}) == {
        "pdlab.prefill.total_ms": 15, "pdlab.prefill.queue_ms": 4, "pdlab.prefill.prefill_ms": 9,
    }  # fmt: skip
    assert dict(spans["pdlab.transfer"].attributes or {}) == {
        "pdlab.kv.bytes": 128, "pdlab.kv.reads": 3, "pdlab.kv.nixl_ms": 0.9,
    }  # fmt: skip
    assert dict(root.attributes or {}) == {
        REQUEST_ID: "r-1", "pdlab.path": "pd", "pdlab.calls": 1, "pdlab.answered": True, "pdlab.prefill.replica": "P",
        "pdlab.decode.replica": "D", "pdlab.prefill.request_id": "p-1", "pdlab.decode.request_id": "d-1",
    }  # fmt: skip
    assert begun.headers == {"traceparent": header_of(root)}


def test_an_early_token_has_the_parts_of_the_second_behind_it() -> None:
    early = {**PD, "early": True, "t": {**PD["t"], "first_byte": 31, "second_byte": 115}}
    times = [(name, begin, end) for name, begin, end in span_times(early, 500.0)]
    assert times[:4] == [("server", 0, 10), ("call", 10, 30), ("out", 30, 31), ("tokens", 31, 500)]
    assert times[4:6] == [("submit", 31, 40), ("admission", 40, 50)] and times[-1] == ("out", 100, 115)


DISORDERED = ["server", "call", "first_step", "out", "tokens"]


@pytest.mark.parametrize(
    ("marks", "ended_ms", "names"),
    [
        ({}, 5.0, []),
        ({"call": 10, "failed": 20}, 30.0, ["server", "failed_calls"]),
        ({"call": 10, "answer": 5, "first": 900, "first_byte": 40}, 50.0, DISORDERED),
        ({"first_byte": 60}, 50.0, ["out", "tokens"]),
    ],
)  # fmt: skip
def test_times_nest_whatever_was_marked(marks: dict[str, float], ended_ms: float, names: list[str]) -> None:
    times = list(span_times({**PD, "t": marks}, ended_ms))
    assert [each.name for each in times] == names
    ends = [0.0, *(each.end_ms for each in times)]
    assert [each.begin_ms for each in times] == ends[:-1] and max(ends) <= ended_ms and ends == sorted(ends)


def test_which_requests_are_sampled_follows_from_their_ids() -> None:
    ids = [f"cmpl-{number}" for number in range(20_000)]
    chosen = {name for name in ids if sampled(name, 0.05)}
    assert chosen == {name for name in ids if sampled(name, 0.05)} and 850 <= len(chosen) <= 1150
    assert chosen < {name for name in ids if sampled(name, 0.2)}, "a larger share has those of a smaller one"
    assert not any(sampled(name, 0.0) for name in ids) and all(sampled(name, 1.0) for name in ids)
    # The same in every process: Python's own hash is not.
    # `printf r-1 | sha256sum` begins with a5fa777a3dc67268: 0.648 of 2^64.
    assert sampled("r-1", 0.649) and not sampled("r-1", 0.648)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_clients_trace_is_gone_on_with(memory: InMemorySpanExporter, share: float) -> None:
    traces = SpanMaker(share)
    begun = traces.begin("r-1", PARENT, "vendor=1")
    traces.end(begun, PD, 500.0)
    _, trace_id, span_id, flags = begun.headers["traceparent"].split("-")
    assert trace_id == "4bf92f3577b34da6a3ce929d0e0e4736" and begun.headers["tracestate"] == "vendor=1"
    if not share:
        assert (span_id, flags) == ("00f067aa0ba902b7", "00") and not memory.get_finished_spans()
        return
    root = by_name(memory)["pdlab.request"]
    assert root.parent is not None and f"{root.parent.span_id:016x}" == "00f067aa0ba902b7"
    assert begun.headers["traceparent"] == header_of(root)


def test_a_client_that_does_not_sample_is_not_sampled(memory: InMemorySpanExporter) -> None:
    begun = SpanMaker(1.0).begin("r-1", PARENT[:-1] + "0", None)
    assert begun.span is None and begun.headers == {"traceparent": PARENT[:-1] + "0"}


@pytest.mark.parametrize(
    "header",
    [
        "", "x" * 10_000, "00-" + "0" * 32 + "-00f067aa0ba902b7-01", PARENT.replace("00f067aa0ba902b7", "0" * 16),
        PARENT.upper(), PARENT + "-00", PARENT + "\r\nx: y", "ff" + PARENT[2:], "00-é" + PARENT[4:],
    ],
)  # fmt: skip
def test_what_is_no_traceparent_is_not_handed_on(memory: InMemorySpanExporter, header: str) -> None:
    assert ParentSpan.of(header) is None
    begun = SpanMaker(0.0).begin("r-1", header, "vendor=1")
    assert set(begun.headers) == {"traceparent"} and ParentSpan.of(begun.headers["traceparent"]) is not None
    assert begun.headers["traceparent"].endswith("-00")


@pytest.mark.parametrize("name", ["\ud800", "a\x00b\r\nc", "<script>", "é" * 128, "", "'; drop table"])
def test_hostile_ids_are_text_that_can_be_sent(memory: InMemorySpanExporter, name: str) -> None:
    traces = SpanMaker(1.0)
    traces.end(traces.begin(name, None, None), {**PD, "p_id": name, "d_id": None}, 500.0)
    root = by_name(memory)["pdlab.request"]
    texts = [value for value in (root.attributes or {}).values() if isinstance(value, str)]
    assert texts and all(text.isprintable() and text.encode() for text in texts)
    assert not any(name in span for span in by_name(memory) if name)
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

    assert len(encode_spans(memory.get_finished_spans()).SerializeToString()) > 500


class Broken(SpanExporter):
    def __init__(self) -> None:
        self.calls = 0

    def export(self, spans: Any) -> Any:
        self.calls += 1
        raise OSError("nobody is there")


@pytest.mark.filterwarnings("ignore")
def test_an_exporter_that_fails_costs_spans_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    exporter = Broken()
    processor = BatchSpanProcessor(exporter, max_queue_size=64, max_export_batch_size=32, schedule_delay_millis=60_000)
    provider = provide(monkeypatch, lambda provider: provider.add_span_processor(processor))
    traces = SpanMaker(1.0)
    with caplog.at_level(logging.CRITICAL):
        for number in range(100):  # 1,300 spans for a queue of 64
            traces.end(traces.begin(f"r-{number}", None, None), PD, 500.0)
    assert len(processor._batch_processor._queue) <= 64
    provider.shutdown()
    assert exporter.calls > 0


def test_a_fault_of_opentelemetrys_fails_no_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(trace, "get_tracer", lambda name: SimpleNamespace(start_span=broken))
    begun = SpanMaker(1.0).begin("r-1", None, None)
    assert begun.span is None and begun.headers["traceparent"].endswith("-00")
    begun.span = SimpleNamespace(is_recording=broken)
    SpanMaker(1.0).end(begun, PD, 1.0)
    assert [record.message for record in caplog.records] == ["a request has no spans: RuntimeError('broken')"] * 2


@dataclasses.dataclass
class Raw:
    """As Ray's `RawRequestInfo`."""

    headers: dict[str, str] = dataclasses.field(default_factory=dict)


class Plain:
    """Stands for Ray's engine server; keeps the headers that its engine is given."""

    def __init__(self) -> None:
        self.given: list[dict[str, str]] = []

    async def start(self) -> None:
        self.engine = SimpleNamespace(_engine_client=SimpleNamespace(
            output_processor=SimpleNamespace(add_request=None), engine_core=SimpleNamespace(get_output_async=None)
        ))  # fmt: skip

    async def completions(self, request: Any, raw: Any = None) -> Any:
        self.given.append(dict(raw.headers))
        if request.fails:
            raise ValueError("refused")

        async def stream() -> Any:
            yield "data: {1}\n\n"
            yield "data: [DONE]\n\n"

        return stream()


class Server(SendsTimeline, Plain):
    traced = 1.0


async def answer(server: Any, raw: Raw, *, fails: bool = False, **more: Any) -> list[Any]:
    if server._book is None:
        await server.start()
    stream = await server.completions(SimpleNamespace(fails=fails, **more), raw)
    return [item async for item in stream]


def test_through_a_handle_the_engine_gets_the_requests_span(memory: InMemorySpanExporter) -> None:
    server, raw = Server(), Raw({"x-request-id": "r-1", "traceparent": PARENT, "a": "b"})
    asyncio.run(answer(server, raw))
    spans = by_name(memory)
    root, given = spans["pdlab.request"], server.given[0]
    assert "pdlab.tokens" in spans and given["traceparent"] == header_of(root)
    assert raw.headers["traceparent"] == PARENT and (given["a"], given["x-request-id"]) == ("b", "r-1")
    assert (root.attributes or {})[REQUEST_ID] == "r-1"


def test_prefill_hands_on_decodes_span_and_makes_none(memory: InMemorySpanExporter) -> None:
    server = Server()
    raw = Raw({"traceparent": PARENT})
    asyncio.run(answer(server, raw, kv_transfer_params={"do_remote_decode": True}))
    assert server.given == [{"traceparent": PARENT}] and not memory.get_finished_spans()


def test_a_request_that_fails_has_its_span(memory: InMemorySpanExporter) -> None:
    with pytest.raises(ValueError, match="refused"):
        asyncio.run(answer(Server(), Raw({"x-request-id": "r-1"}), fails=True))
    (root,) = memory.get_finished_spans()
    assert root.name == "pdlab.request" and (root.attributes or {})["pdlab.answered"] is False


def test_without_an_endpoint_headers_are_left_as_they_are(memory: InMemorySpanExporter) -> None:
    server = type("Quiet", (Server,), {"traced": None})()
    asyncio.run(answer(server, Raw({"traceparent": "anything"})))
    assert server.given == [{"traceparent": "anything"}] and not memory.get_finished_spans()


def test_with_direct_streaming_the_header_is_replaced_where_http_arrives(memory: InMemorySpanExporter) -> None:
    seen: list[dict[bytes, bytes]] = []
    server: Any = Server()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert len({key.lower() for key, _ in scope["headers"]}) == len(scope["headers"])
        seen.append(dict(scope["headers"]))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    asyncio.run(server.start())
    headers = ((b"x-request-id", b"r-1"), (b"Traceparent", b"\xff\xfe"), (b"tracestate", b"a=1"))
    exchange(TimelineMiddleware(app, server), "/v1/completions", headers=headers)
    root = by_name(memory)["pdlab.request"]
    assert root.parent is None and seen[0].keys() == {b"x-request-id", b"traceparent"}
    assert seen[0][b"traceparent"].decode() == header_of(root)
