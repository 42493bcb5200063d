"""Where a request's time goes, asked of a decode engine of two ranks: completions and chat, streamed or not, several
sequences; and the same requests as OpenTelemetry spans in a collector, joined with vLLM's."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from support import timed
from support.collector import Collector, collecting

from pdlab.core.catalog import require_shape
from pdlab.results.timeline import RequestTimeline
from tests.live.conftest import Stack

pytestmark = pytest.mark.long

MODEL = "tiny-llama"  # a gpt-oss answers no chat without OpenAI's vocabulary
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SENT_WITHIN_S = 90.0  # a replica sends its spans every 5 s, and this machine may have other work
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Served(NamedTuple):
    """A PD deployment that sends the spans of all requests to a collector."""

    stack: Stack
    collector: Collector

    def ask(self, route: str = COMPLETIONS, **more: Any) -> Any:
        return timed.ask(self.stack.url, route, **{"model": MODEL, **more})


@pytest.fixture(scope="module")
def served(stack: Stack) -> Iterator[Served]:
    template = stack.folder / "template.jinja"
    template.write_text(TEMPLATE)
    with collecting() as collector:
        words = ("--model", MODEL, "--d-tp", "2", "--engine-arg", f"chat_template={template}")
        done = stack.launch("--pd-spread", *words, "--otlp-endpoint", collector.endpoint, "--otlp-sample", "1")
        assert done.code == 0
        yield Served(stack, collector)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_two_ranks_read_and_the_parts_are_the_clients_ttft(served: Served, route: str, stream: bool) -> None:
    timelines = [served.ask(route, stream=stream) for _ in range(5)]
    timed.check(timelines, "pd")
    for each in timelines:
        assert [read.rank for read in each.wire] == [0, 1]
        first, second = each.wire
        assert first.bytes == second.bytes > 0, "each rank reads half of the KV heads"
        assert each.t["posted"] == min(first.posted_ms, second.posted_ms)
        assert each.t["seen"] == max(first.seen_ms, second.seen_ms)


def test_the_bytes_are_those_of_the_prompt(served: Served) -> None:
    """The oracle is the model's shape. Blocks move whole."""
    shape = require_shape(MODEL)
    rng = random.Random(5)
    per_token = 2 * 2 * shape.kv_heads * shape.head_dim * shape.layers
    for tokens in (100, 1000, 4000):
        timeline = served.ask(stream=True, prompt=[rng.randrange(300, 1000) for _ in range(tokens)])
        timed.check([timeline], "pd")
        read = sum(each.bytes for each in timeline.wire)
        assert (tokens - 1) * per_token <= read <= (tokens + 128) * per_token


SEVERAL = {
    "two prompts": {"prompt": ["ba " * 50, "wan " * 60]},
    "two choices": {"n": 2, "temperature": 1.0},
    "two choices of two prompts": {"prompt": ["ufo " * 50, "gi " * 60], "n": 2, "temperature": 1.0},
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("name", SEVERAL)
def test_several_sequences_have_one_timeline_that_says_so(served: Served, name: str, stream: bool) -> None:
    """It is not whole, so that no report counts it; its parts are the client's TTFT all the same."""
    body: dict[str, Any] = dict(SEVERAL[name])
    if "prompt" in body:  # new ones, so that none is in a prefix cache
        body["prompt"] = [f"{random.random()} {each}" for each in body["prompt"]]
    timeline = served.ask(stream=stream, **body)
    assert timeline.err == "several sequences" and not timeline.whole
    assert timeline.path == "pd"
    assert sum(part.seconds for part in timeline.parts()) == pytest.approx(timeline.ttft_s, abs=2e-4)
    assert all(part.seconds >= 0 for part in timeline.parts())
    assert len(timeline.wire) == 2 * len(body.get("prompt", [1])) * body.get("n", 1), "two ranks for each sequence"


class Traced(NamedTuple):
    """The spans of one request: the root, what is directly below it by name, and vLLM's own by service."""

    root: Any
    parts: dict[str, Any]
    engines: dict[str, Any]


def traced(collector: Collector, request_id: str) -> Traced | None:
    """None: they are not all there yet."""
    spans = collector.spans
    named = [span for _, span in spans if span.name == "pdlab.request"]
    roots = [span for span in named if attribute(span, "gen_ai.request.id") == request_id]
    if len(roots) != 1:
        return None
    below = [(service, span) for service, span in spans if span.parent_span_id == roots[0].span_id]
    assert all(span.trace_id == roots[0].trace_id for _, span in below)
    engines = {service: span for service, span in below if span.name == "llm_request"}
    parts = {span.name: span for _, span in below if span.name != "llm_request"}
    assert len(engines) + len(parts) == len(below), "each once"
    return Traced(roots[0], parts, engines) if len(engines) == 2 and "pdlab.tokens" in parts else None


def attribute(span: Any, name: str) -> Any:
    values = [each.value for each in span.attributes if each.key == name]
    return getattr(values[0], values[0].WhichOneof("value")) if values else None


def wait_for(collector: Collector, request_id: str) -> Traced:
    deadline = time.monotonic() + SENT_WITHIN_S
    while (found := traced(collector, request_id)) is None:
        assert time.monotonic() < deadline, sorted({span.name for _, span in collector.spans})
        time.sleep(1)
    return found


@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_a_requests_spans_are_its_timeline_and_join_vllms(served: Served, route: str) -> None:
    request_id = f"spans-of{route.replace('/', '-')}"
    timeline: RequestTimeline = served.ask(route, stream=True, headers={"x-request-id": request_id})
    timed.check([timeline], "pd")
    root, parts, engines = wait_for(served.collector, request_id)
    assert set(engines) == {"pdlab-prefill", "pdlab-decode"}
    assert attribute(root, "pdlab.path") == "pd" and attribute(root, "pdlab.decode.request_id") == timeline.d_id
    assert attribute(parts["pdlab.transfer"], "pdlab.kv.bytes") == sum(read.bytes for read in timeline.wire)
    # One after the other from the request's arrival to the end of its answer.
    ordered = sorted(parts.values(), key=lambda span: (span.start_time_unix_nano, span.end_time_unix_nano))
    assert ordered[0].start_time_unix_nano == root.start_time_unix_nano and ordered[-1].name == "pdlab.tokens"
    assert ordered[-1].end_time_unix_nano == root.end_time_unix_nano
    for before, after in pairwise(ordered):
        assert abs(after.start_time_unix_nano - before.end_time_unix_nano) <= 1
    until_first_ms = (parts["pdlab.tokens"].start_time_unix_nano - root.start_time_unix_nano) / 1e6
    assert until_first_ms == pytest.approx(timeline.t["first_byte"], abs=0.01)
    # vLLM's begin by the same wall clock here. Prefill ran within its call, decode behind it.
    call, decode, prefill = parts["pdlab.call"], engines["pdlab-decode"], engines["pdlab-prefill"]
    slack_ns = 5_000_000
    assert call.start_time_unix_nano - slack_ns <= prefill.start_time_unix_nano
    assert prefill.end_time_unix_nano <= call.end_time_unix_nano + slack_ns
    assert call.end_time_unix_nano - slack_ns <= decode.start_time_unix_nano
    assert decode.end_time_unix_nano <= root.end_time_unix_nano + slack_ns


def test_a_clients_trace_is_gone_on_with_or_left_alone(served: Served) -> None:
    """`traceparent` that is sampled, and one that is not, which neither pdlab nor vLLM makes a span of."""
    parents = {flag: f"00-{TRACE[:-2]}{flag}-{PARENT}-{flag}" for flag in ("00", "01")}
    for flag in ("00", "01"):  # the one that is awaited comes last
        served.ask(stream=True, headers={"x-request-id": f"client-{flag}", "traceparent": parents[flag]})
    root = wait_for(served.collector, "client-01").root
    assert root.trace_id.hex() == parents["01"].split("-")[1] and root.parent_span_id.hex() == PARENT
    time.sleep(6)  # a batch later
    traces = [span.trace_id.hex() for _, span in served.collector.spans]
    assert traces.count(parents["01"].split("-")[1]) > 10
    assert parents["00"].split("-")[1] not in traces
