"""An HTTP server of a test's own, what its answers are written with, and a client."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any


@contextmanager
def web_server(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """A server on a free port of this machine; gives its URL. ``answer`` writes the answer to a request."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        def do_POST(self) -> None:
            answer(self)

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 128  # with the library's 5, the kernel resets some of many connections at once

    with Server(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_port}"
        finally:
            http.shutdown()
            thread.join()


def body_of(call: BaseHTTPRequestHandler) -> Any:
    """The JSON body of a request, which can be read once."""
    return json.loads(call.rfile.read(int(call.headers["content-length"])))


def reply(call: BaseHTTPRequestHandler, body: bytes | object, status: int = 200, **headers: object) -> None:
    """Write an answer of one piece: ``body`` as it is if it is bytes, as JSON else. ``_`` in ``headers`` is ``-``."""
    call.send_response(status)
    for name, value in headers.items():
        call.send_header(name.replace("_", "-"), str(value))
    call.end_headers()
    call.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())


def fetch(
    url: str, body: dict[str, Any] | bytes | None = None, *, key: str | None = None, timeout_s: float = 60,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> tuple[int, str]:  # fmt: skip
    """Status and text of an answer, of a POST where there is a body. Raises OSError without an answer."""
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    sent = {"content-type": "application/json", **headers} | ({"authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, sent), timeout=timeout_s) as answer:
            return int(answer.status), answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
