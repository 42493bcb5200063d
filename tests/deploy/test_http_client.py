"""Every kind of answer and failure that the HTTP client tells apart, with and without a stream."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from support.web import reply, web_server

from pdlab.cluster.local_nodes import hold_port
from pdlab.deploy import http_client
from pdlab.deploy.http_client import NoAnswer, NotStreamed

EVENTS = 'data: {"a": 1}\n\n: a comment\n\ndata: {"b":\r\ndata: "\u00e9"}\r\n\r\n'


def answering(
    code: int, body: bytes, kind: str = "application/json", cut: bool = False
) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(call: BaseHTTPRequestHandler) -> None:
        call.rfile.read(int(call.headers["content-length"] or 0))
        reply(call, body, code, content_type=kind, content_length=len(body) + (10 if cut else 0))

    return answer


def read_stream(url: str, asynchronous: bool) -> list[Any]:
    async def read() -> list[Any]:
        async with (
            http_client.async_client() as client,
            http_client.streamed_async(client, url, {"stream": True}, "k" * 20) as events,
        ):
            return [event async for event in events]

    if asynchronous:
        return asyncio.run(read())
    with http_client.streamed(url, {"stream": True}, "k" * 20, 5.0) as events:
        return list(events)


def test_json_goes_out_and_comes_back_with_the_key() -> None:
    seen: list[tuple[str, str | None, Any]] = []

    def answer(call: BaseHTTPRequestHandler) -> None:
        body = json.loads(call.rfile.read(int(call.headers["content-length"] or 0)) or b"null")
        seen.append((call.path, call.headers["authorization"], body))
        answering(200, b'{"x": "\xc3\xa9"}')(call) if body is None else call.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n[1]")

    with web_server(answer) as url:
        assert http_client.complete(url, {"prompt": "\u00e9"}, "k" * 20, 5.0) == [1]
        assert http_client.get_json(f"{url}/-/routes", 5.0) == {"x": "\u00e9"}
    assert seen == [("/v1/completions", f"Bearer {'k' * 20}", {"prompt": "\u00e9"}), ("/-/routes", None, None)]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_requests_are_not_logged(asynchronous: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Ray's drivers show what the root logger gets from level INFO on."""
    http_client._client.cache_clear()
    with (
        caplog.at_level(logging.INFO),
        web_server(answering(200, b"data: [DONE]\n\n", "text/event-stream")) as url,
    ):
        assert read_stream(url, asynchronous) == [None]
    assert not caplog.records


@pytest.mark.parametrize("asynchronous", [False, True])
def test_events_of_a_stream(asynchronous: bool) -> None:
    """Line ends of either kind, comments, and data over several lines; an event that breaks off is none."""
    body = (EVENTS + "data: [DONE]\n\ndata: {}").encode()
    with web_server(answering(200, body, "text/event-stream; charset=utf-8")) as url:
        assert read_stream(url, asynchronous) == [{"a": 1}, {"b": "\u00e9"}, None]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("answer", "kind", "code", "detail"),
    [
        (answering(200, b"{}"), NotStreamed, None, "application/json, not text/event-stream"),
        (answering(400, b'{"no":\n 1}', "text/event-stream"), NoAnswer, 400, '{"no": 1}'),
        (answering(503, b""), NoAnswer, 503, "Service Unavailable"),
        (answering(200, b"data: {}}\n\n", "text/event-stream"), NoAnswer, None, "not JSON"),
        (answering(200, b"data: {}\n\n", "text/event-stream", cut=True), NoAnswer, None, "peer closed"),
        (lambda call: None, NoAnswer, None, "disconnected"),
    ],
)
def test_what_is_no_stream(
    answer: Callable[[BaseHTTPRequestHandler], None], kind: type, code: int | None, detail: str, asynchronous: bool
) -> None:
    with web_server(answer) as url, pytest.raises(NoAnswer) as caught:
        read_stream(url, asynchronous)
    assert (type(caught.value), caught.value.code, caught.value.timed_out) == (kind, code, False)
    assert detail in caught.value.detail and "\n" not in str(caught.value)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe"])
def test_what_is_no_json(body: bytes) -> None:
    with web_server(answering(200, body)) as url, pytest.raises(NoAnswer) as caught:
        http_client.get_json(url, 5.0)
    assert caught.value.code is None


def test_nobody_there_and_nothing_in_time_differ() -> None:
    held, port = hold_port()
    with held, pytest.raises(NoAnswer) as refused:
        http_client.get(f"http://127.0.0.1:{port}", 5.0)
    assert (refused.value.detail, refused.value.timed_out) == ("Connection refused", False)
    leave = threading.Event()
    with web_server(lambda call: bool(leave.wait(10)) and None) as url:
        try:
            with pytest.raises(NoAnswer) as late:
                http_client.get(url, 0.2)
        finally:
            leave.set()
    assert late.value.timed_out


@pytest.mark.parametrize("url", ["http://[::1", "ftp://x/", "nowhere", "http://x y/"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(NoAnswer):
        http_client.get(url, 5.0)


def test_a_restarted_server_is_asked_over_a_new_connection() -> None:
    ports: list[int] = []

    def answer(call: BaseHTTPRequestHandler) -> None:
        call.protocol_version = "HTTP/1.1"
        ports.append(call.client_address[1])
        answering(200, b"x")(call)

    with web_server(answer) as url:
        assert [http_client.get(url, 5.0) for _ in range(2)] == ["x", "x"]
    assert len(set(ports)) == 2


def test_a_proxy_that_cannot_be_used_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    http_client._client.cache_clear()
    try:
        with pytest.raises(NoAnswer):
            http_client.get("http://192.0.2.1", 0.2)
    finally:
        http_client._client.cache_clear()
