"""Spans and vLLM's own: the engine argument, the header that joins them, and that nothing is made of other requests."""

from __future__ import annotations

import inspect

import pytest
from contract.conftest import quietly
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pdlab.deploy.engine_arguments import known
from pdlab.deploy.serve_config import traces_env
from pdlab.deploy.serving.traces import REQUEST_ID, Traces

pytestmark = pytest.mark.usefixtures("import_warnings_aside")


def test_vllm_has_the_engine_argument_and_the_protocols() -> None:
    assert known()["otlp_traces_endpoint"] == {"types": ["None", "str"]}
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
    traces = Traces(share)
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
