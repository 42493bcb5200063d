"""Spans and vLLM's own: the engine argument, the header that joins them, and that nothing is made of other requests."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator

import pytest
from contract.conftest import printed, quietly
from contract.test_builders import builder_of, deployments_of, rendered
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support.collector import Collector, collecting

from pdlab.core.deployment import Deployment, Serving, parse_label
from pdlab.deploy.engine_arguments import known_arguments
from pdlab.deploy.serve_config import traces_env
from pdlab.deploy.serving.traces import REQUEST_ID, SpanMaker, sampled

pytestmark = pytest.mark.usefixtures("import_warnings_aside")


def test_vllm_has_the_engine_argument_and_the_protocols() -> None:
    assert known_arguments()["otlp_traces_endpoint"] == {"types": ["None", "str"]}
    fields = inspect.signature(quietly("vllm.engine.arg_utils").AsyncEngineArgs).parameters
    assert "otlp_traces_endpoint" in fields
    otel = quietly("vllm.tracing.otel")
    assert otel.is_otel_available()
    for endpoint in ("grpc://127.0.0.1:4317", "http://127.0.0.1:4318/v1/traces"):
        env = traces_env(endpoint, "decode")
        with pytest.MonkeyPatch.context() as patch:
            for name, text in env.items():
                patch.setenv(name, text)
            exporter = otel.get_span_exporter(endpoint)
        kind = "grpc" if endpoint.startswith("grpc") else "http"
        assert f".{kind}." in type(exporter).__module__
        assert (exporter._timeout if kind == "grpc" else exporter._client._timeout) == 3
        exporter.shutdown()


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_vllms_span_is_below_the_requests_or_is_not_made(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    tracing = quietly("vllm.tracing")
    traces = SpanMaker(share)
    begun = traces.begin("r-1", None, None)
    # As vLLM's server, its input and its output processor do.
    context = tracing.extract_trace_context(tracing.extract_trace_headers({**begun.headers, "other": "1"}))
    tracing.instrument_manual("llm_request", 1, attributes={}, context=context, kind=tracing.SpanKind.SERVER)
    traces.end(begun, {"path": "local", "try": 0, "t": {"first_byte": 1.0}}, 2.0)
    spans = {span.name: span for span in memory.get_finished_spans()}
    if not share:
        assert spans == {}
        return
    own, root = spans["llm_request"], spans["pdlab.request"]
    assert own.parent is not None and root.context is not None and own.context is not None
    assert own.parent.span_id == root.context.span_id and own.context.trace_id == root.context.trace_id
    assert tracing.SpanAttributes.GEN_AI_REQUEST_ID == REQUEST_ID


@pytest.mark.usefixtures("ray_llm", "no_cluster")
@pytest.mark.parametrize("label", ["collocated-1xtp1", "pd-spread-p1xtp1-d1xtp1", "pd-fluid-2xtp1"])
@pytest.mark.parametrize("endpoint", [None, "grpc://127.0.0.1:4317"])
def test_every_engine_server_is_told_the_share(label: str, endpoint: str | None) -> None:
    serving = Serving(otlp_endpoint=endpoint, otlp_sample=0.25)
    case = rendered(Deployment(topology=parse_label(label), model="tiny-gptoss", serving=serving), "local-2")
    classes = [each.func_or_class for each in deployments_of(builder_of(case.app)(case.app.args))]
    engines = [each for each in classes if hasattr(each, "marks_reads")]
    assert len(engines) == (2 if label.startswith("pd-spread") else 1)
    assert [each.traced for each in engines] == [None if endpoint is None else 0.25] * len(engines)


def test_the_process_of_the_replica_has_vllms_provider() -> None:
    """The spans here go to it; it has a queue of its own."""
    assert "init_tracer(" in inspect.getsource(quietly("vllm.v1.engine.async_llm").AsyncLLM.__init__)
    init = inspect.getsource(quietly("vllm.tracing.otel").init_otel_tracer)
    assert "BatchSpanProcessor(" in init and "set_tracer_provider(" in init


def test_vllms_server_reads_the_header_from_the_request() -> None:
    serving = quietly("vllm.entrypoints.generate.base.serving")
    assert "extract_trace_headers(headers)" in inspect.getsource(serving)
    for name in ("completion", "chat_completion"):
        module = quietly(f"vllm.entrypoints.openai.{name}.serving")
        assert "_get_trace_headers(raw_request.headers)" in inspect.getsource(module)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as server:
        yield server


REPLICA = """
import sys
from pdlab.deploy.serving.traces import SpanMaker
from vllm.tracing import SpanKind, extract_trace_context, init_tracer, instrument_manual
init_tracer("vllm.llm_engine", sys.argv[1])
traces = SpanMaker(0.5)
for number in range(40):
    begun = traces.begin(f"r-{number}", None, None)
    context = extract_trace_context(begun.headers)
    instrument_manual("llm_request", 1, attributes={"n": number}, context=context, kind=SpanKind.SERVER)
    traces.end(begun, {"path": "local", "try": 0, "t": {"first_byte": 1.0}}, 2.0)
"""


def test_a_collector_gets_both_in_one_trace(collector: Collector) -> None:
    """In a process whose provider vLLM sets up, as in a replica; the spans are sent when it ends."""
    env = {**os.environ, **traces_env(collector.endpoint, "decode")}
    printed(REPLICA, collector.endpoint, env=env)
    chosen = {f"r-{number}" for number in range(40) if sampled(f"r-{number}", 0.5)}
    assert {service for service, _ in collector.spans} == {"pdlab-decode"}
    spans = [span for _, span in collector.spans]
    roots = [span for span in spans if span.name == "pdlab.request"]
    ids = {each.value.string_value for span in roots for each in span.attributes if each.key == REQUEST_ID}
    assert ids == chosen and 5 < len(chosen) < 35
    for name in ("llm_request", "pdlab.tokens"):
        below = [(span.trace_id, span.parent_span_id) for span in spans if span.name == name]
        assert sorted(below) == sorted((span.trace_id, span.span_id) for span in roots)
