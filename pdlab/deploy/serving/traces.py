"""OpenTelemetry spans of a request: the parts of its timeline, joined with those that vLLM makes itself.

vLLM's engine arguments set up the process's tracer provider: a batch processor with a bounded queue and its own thread.
The spans here go to the same provider, so that an endpoint that does not answer costs spans and no request. vLLM makes
a span (``llm_request``) for every request, unless its ``traceparent`` marks the trace as not sampled. So every request
gets a ``traceparent``, and this module decides by the request id which requests are sampled. Runs in Ray Serve's
replicas, sent there by value: imports the standard library and its neighbours, and OpenTelemetry where an endpoint is
set.
"""

from __future__ import annotations

import hashlib
import logging
import random
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pdlab.marks.request_parts import after_early, intervals

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
ROOT, CHILD = "pdlab.request", "pdlab."
# From the first byte sent to the end of the answer.
TOKENS = "tokens"
REQUEST_ID = "gen_ai.request.id"  # as vLLM's own span has it
_SAMPLED = 1
_MOST_STATE_CHARS = 512
# https://www.w3.org/TR/trace-context/#traceparent-header, version 00
_PARENT = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")


def sampled(request_id: str, share: float) -> bool:
    """Whether a request with that id belongs to the ``share`` (0 to 1) that gets spans. The result is the same
    everywhere and at any time. Without an id chance decides.
    """
    if not request_id:
        return random.random() < share
    digest = hashlib.sha256(request_id.encode("utf-8", "replace")).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


class ParentSpan(NamedTuple):
    """A client's span, of its ``traceparent``."""

    trace_id: int
    span_id: int
    sampled: bool

    @classmethod
    def of(cls, header: str | None) -> ParentSpan | None:
        """The parent of a header's value. None: there is no header, or it is not in the W3C's form."""
        found = _PARENT.fullmatch(header or "")
        return found and cls(int(found[1], 16), int(found[2], 16), bool(int(found[3], 16) & _SAMPLED))


class SpanTime(NamedTuple):
    """A span below the request's: milliseconds since the request reached the server."""

    name: str
    begin_ms: float
    end_ms: float


def span_times(record: Mapping[str, Any], ended_ms: float) -> Iterator[SpanTime]:
    """The spans of a timeline as the server writes it: each within 0 and ``ended_ms``, the end of the answer.

    If the first token was sent early, the parts after it are those of the second token.
    """
    marks: Mapping[str, float] = record["t"]
    first_ms = min(max(0.0, marks.get("first_byte", ended_ms)), ended_ms)
    for _, name, begin_ms, end_ms in intervals(record, first_ms):
        yield SpanTime(name, begin_ms, end_ms)
    if "first_byte" not in marks:
        return
    yield SpanTime(TOKENS, first_ms, ended_ms)
    if record.get("early") and "second_byte" in marks:
        second_ms = min(max(first_ms, marks["second_byte"]), ended_ms)
        for _, name, begin_ms, end_ms in intervals(after_early(record), second_ms, first_ms):
            yield SpanTime(name, begin_ms, end_ms)


class RequestTrace:
    """The trace of one request. ``headers``: headers for its engines. ``span``: None: the request is not sampled."""

    def __init__(self, headers: dict[str, str], span: Any = None, began_ns: int = 0) -> None:
        self.headers = headers
        self.span = span
        self._began_ns = began_ns

    def at_ns(self, ms: float) -> int:
        """The wall clock, in ns, that many milliseconds after the start of the request."""
        return self._began_ns + round(1e6 * ms)


class SpanMaker:
    """Makes the spans of the requests of one replica. ``share``: of the requests. Raises ImportError where
    OpenTelemetry is not installed."""

    def __init__(self, share: float) -> None:
        from opentelemetry import trace

        self._share = share
        self._api = trace
        self._tracer = trace.get_tracer("pdlab")

    def begin(self, request_id: str, parent: str | None, state: str | None) -> RequestTrace:
        """A request has arrived, with those headers of the trace context. Never makes the request fail."""
        above = ParentSpan.of(parent)
        kept = {TRACESTATE: state} if above and state and _may_be_kept(state) else {}
        if (above is None or above.sampled) and sampled(request_id, self._share):
            try:
                return self._begun(above, request_id, kept)
            except Exception as error:
                logging.getLogger("ray.serve").warning("a request has no spans: %r", error)
        trace_id, span_id = (above.trace_id, above.span_id) if above else (_some_id(128), _some_id(64))
        return RequestTrace({TRACEPARENT: _header(trace_id, span_id, 0), **kept})

    def _begun(self, above: ParentSpan | None, request_id: str, kept: dict[str, str]) -> RequestTrace:
        from opentelemetry.context import Context

        api, context = self._api, Context()
        if above:
            client = api.SpanContext(
                above.trace_id, above.span_id, is_remote=True, trace_flags=api.TraceFlags(_SAMPLED)
            )
            context = api.set_span_in_context(api.NonRecordingSpan(client), context)
        began_ns = time.time_ns()
        attributes = {REQUEST_ID: _text(request_id)} if request_id else {}
        span = self._tracer.start_span(ROOT, context, api.SpanKind.SERVER, attributes, start_time=began_ns)
        own = span.get_span_context()
        if not own.is_valid:  # nobody has set a provider up
            raise RuntimeError("OpenTelemetry has no tracer provider in this process")
        return RequestTrace({TRACEPARENT: _header(own.trace_id, own.span_id, own.trace_flags), **kept}, span, began_ns)

    def end(self, trace: RequestTrace, record: Mapping[str, Any], ended_ms: float) -> None:
        """The request has been answered ``ended_ms`` after it arrived, or its client has gone. Never raises."""
        if trace.span is None:
            return
        try:
            if trace.span.is_recording():
                self._end(trace, record, max(0.0, ended_ms))
        except Exception as error:
            logging.getLogger("ray.serve").warning("a request has no spans: %r", error)

    def _end(self, trace: RequestTrace, record: Mapping[str, Any], ended_ms: float) -> None:
        from opentelemetry.context import Context

        context = self._api.set_span_in_context(trace.span, Context())
        for each in span_times(record, ended_ms):
            more = {"call": _of_call, "transfer": _of_transfer}.get(each.name, _nothing)(record)
            begin_ns, end_ns = trace.at_ns(each.begin_ms), trace.at_ns(each.end_ms)
            child = self._tracer.start_span(f"{CHILD}{each.name}", context, attributes=more, start_time=begin_ns)
            child.end(end_ns)
        trace.span.set_attributes(_of_request(record))
        trace.span.end(trace.at_ns(ended_ms))


def _of_request(record: Mapping[str, Any]) -> dict[str, Any]:
    texts = {
        "pdlab.path": record["path"],
        "pdlab.incomplete": record.get("err"),
        "pdlab.prefill.replica": record.get("role_p"),
        "pdlab.decode.replica": record.get("role_d"),
        "pdlab.prefill.request_id": record.get("p_id"),
        "pdlab.decode.request_id": record.get("d_id"),
    }
    attributes: dict[str, Any] = {name: _text(text) for name, text in texts.items() if text}
    attributes |= {"pdlab.calls": record["try"], "pdlab.answered": "first_byte" in record["t"]}
    return attributes | ({"pdlab.early": True} if record.get("early") else {})


def _of_call(record: Mapping[str, Any]) -> dict[str, Any]:
    """The durations that prefill reported; its clock is another machine's."""
    p = record.get("p") or {}
    return {f"pdlab.prefill.{name}_ms": float(p[name]) for name in ("total", "queue", "prefill") if name in p}


def _of_transfer(record: Mapping[str, Any]) -> dict[str, Any]:
    wire = record.get("wire") or ()
    return {
        "pdlab.kv.bytes": sum(read[4] for read in wire),
        "pdlab.kv.reads": sum(read[5] for read in wire),
        "pdlab.kv.nixl_ms": max((read[3] / 1e3 for read in wire), default=0.0),
    }


def _nothing(record: Mapping[str, Any]) -> dict[str, Any]:
    return {}


def _may_be_kept(state: str) -> bool:
    return len(state) <= _MOST_STATE_CHARS and state.isascii() and state.isprintable()


def _text(value: object) -> str:
    """What a client or another server wrote, as every exporter can send it."""
    return "".join(char if char.isprintable() else "?" for char in str(value))


def _header(trace_id: int, span_id: int, flags: int) -> str:
    return f"00-{trace_id:032x}-{span_id:016x}-{flags & 0xFF:02x}"


def _some_id(bits: int) -> int:
    return random.getrandbits(bits) or 1
