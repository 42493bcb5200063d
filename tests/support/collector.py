"""A collector that takes OpenTelemetry's spans by HTTP."""

from __future__ import annotations

import gzip
import importlib
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Collector(ThreadingHTTPServer):
    """Its `endpoint` is what exporters are told."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Takes)
        self.bodies: list[bytes] = []
        self.endpoint = f"http://127.0.0.1:{self.server_port}/v1/traces"

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


class Takes(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Collector) and self.path == "/v1/traces"
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.bodies.append(gzip.decompress(body) if self.headers["content-encoding"] else body)
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        """No words."""


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that listens until the block ends."""
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
