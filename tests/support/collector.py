"""A collector that takes OpenTelemetry's spans by HTTP."""

from __future__ import annotations

import gzip
import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

from support.web import reply, web_server


class Collector:
    """What exporters send to its ``endpoint``."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.endpoint = ""

    @property
    def spans(self) -> list[tuple[str, Any]]:
        """Each with the name of its service."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            service = importlib.import_module("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
        found = []
        for body in list(self.bodies):
            for resource in service.ExportTraceServiceRequest.FromString(body).resource_spans:
                names = {each.key: each.value.string_value for each in resource.resource.attributes}
                found += [(names["service.name"], span) for scope in resource.scope_spans for span in scope.spans]
        return found

    def take(self, call: BaseHTTPRequestHandler) -> None:
        assert (call.command, call.path) == ("POST", "/v1/traces")
        body = call.rfile.read(int(call.headers["content-length"]))
        self.bodies.append(gzip.decompress(body) if call.headers["content-encoding"] else body)
        reply(call, b"", content_type="application/x-protobuf", content_length=0)


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that listens until the block ends."""
    collector = Collector()
    with web_server(collector.take) as url:
        collector.endpoint = f"{url}/v1/traces"
        yield collector
