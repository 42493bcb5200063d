"""The HTTP client for OpenAI servers, Ray Serve's routes and metrics pages, with httpx2.

Only the load generator of a sweep has another client, vLLM's own (`pdlab.bench.client.worker`). Each request opens a
new connection, so that no request is lost with a restarted server.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import AsyncIterator, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pdlab.core import api_key
from pdlab.deploy.serving.events import DONE

if TYPE_CHECKING:
    import httpx2

SHOWN_CHARS = 300
EVENT_STREAM = "text/event-stream"
_SHOWN_BYTES = 10 * SHOWN_CHARS


class NoAnswer(Exception):
    """A request that failed. ``code``: the HTTP status, None if there was no whole answer. ``detail``: the message of
    the server or the connection. ``timed_out``: nothing arrived within the time limit.
    """

    def __init__(self, url: str, code: int | None, detail: str, *, timed_out: bool = False) -> None:
        text = " ".join(detail.split())[:SHOWN_CHARS]
        super().__init__(f"got no answer from {url} ({text})" if code is None else f"got HTTP {code}: {text}")
        self.code, self.detail, self.timed_out = code, text, timed_out


class NotStreamed(NoAnswer):
    """The answer to a request with ``stream`` is no stream of events but a ``content_type``."""

    def __init__(self, url: str, content_type: str) -> None:
        super().__init__(url, None, f"{content_type}, not {EVENT_STREAM}")
        self.content_type = content_type


def get(url: str, timeout_s: float, key: str | None = None) -> str:
    """The body at ``url``. ``timeout_s`` is for each step: connect, and each read. ``key``: the endpoint's API key.
    Raises NoAnswer."""
    with _opened("GET", url, timeout_s, key) as response:
        return response.read().decode()


def get_json(url: str, timeout_s: float, key: str | None = None) -> Any:
    """The JSON value at ``url``. Raises NoAnswer."""
    return _parsed(url, get(url, timeout_s, key))


def complete(base_url: str, request: dict[str, Any], key: str | None, timeout_s: float) -> Any:
    """The JSON answer to a completion ``request``. Raises NoAnswer."""
    url = _completions(base_url)
    with _opened("POST", url, timeout_s, key, request) as response:
        return _parsed(url, response.read().decode())


@contextlib.contextmanager
def streamed(base_url: str, request: dict[str, Any], key: str | None, timeout_s: float) -> Iterator[Iterator[Any]]:
    """The events of a completion ``request`` with ``stream``, None for [DONE]. Raises NoAnswer, NotStreamed."""
    import httpx2

    url = _completions(base_url)
    with _opened("POST", url, timeout_s, key, request) as response:
        _require_stream(url, response)
        yield (_event(url, event.data) for event in httpx2.EventSource(response))


@contextlib.asynccontextmanager
async def streamed_async(
    client: httpx2.AsyncClient, base_url: str, request: dict[str, Any], key: str | None
) -> AsyncIterator[AsyncIterator[Any]]:
    """As `streamed`, without a time limit, by a client of `async_client`."""
    import httpx2

    url = _completions(base_url)
    with _failures(url):
        async with client.stream("POST", url, json=request, headers=api_key.header(key), timeout=None) as response:
            if not response.is_success:
                raise _refusal(url, response, await response.aread())
            _require_stream(url, response)
            yield (_event(url, event.data) async for event in httpx2.EventSource(response))


def async_client() -> httpx2.AsyncClient:
    """A client for many requests at once, in one event loop. Raises NoAnswer."""
    import httpx2

    with _failures("the proxy of the environment"):
        return httpx2.AsyncClient(**_settings())


@lru_cache(maxsize=1)
def _client() -> httpx2.Client:
    """One for the process, since to make one takes 50 ms (certificates, for https)."""
    import httpx2

    return httpx2.Client(**_settings())


def _settings() -> dict[str, Any]:
    """Of both clients. The library logs each request at level INFO, which Ray shows in its drivers."""
    import httpx2

    for name in ("httpx2", "httpcore2"):
        logging.getLogger(name).setLevel(logging.WARNING)
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
    return {"limits": limits, "headers": {"connection": "close"}, "follow_redirects": True}


@contextlib.contextmanager
def _opened(
    method: str, url: str, timeout_s: float, key: str | None, body: dict[str, Any] | None = None
) -> Iterator[httpx2.Response]:
    with (
        _failures(url),
        _client().stream(method, url, json=body, headers=api_key.header(key), timeout=timeout_s) as response,
    ):
        if not response.is_success:
            raise _refusal(url, response, response.read())
        yield response


@contextlib.contextmanager
def _failures(url: str) -> Iterator[None]:
    """The library's failures within the block are raised as NoAnswer."""
    import httpx2

    try:
        yield
    except (httpx2.HTTPError, httpx2.InvalidURL, ImportError, OSError, ValueError) as error:  # a proxy may be unusable
        raise NoAnswer(url, None, _reason(error), timed_out=isinstance(error, httpx2.TimeoutException)) from error


def _reason(error: BaseException) -> str:
    """The operating system's words, if the failure came from it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return str(error) or type(error).__name__


def _refusal(url: str, response: httpx2.Response, body: bytes) -> NoAnswer:
    text = body[:_SHOWN_BYTES].decode(errors="replace")
    return NoAnswer(url, response.status_code, text if text.strip() else response.reason_phrase)


def _require_stream(url: str, response: httpx2.Response) -> None:
    content_type = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != EVENT_STREAM:
        raise NotStreamed(url, content_type or "an answer without a content type")


def _event(url: str, data: str) -> Any:
    return None if data == DONE else _parsed(url, data)


def _parsed(url: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise NoAnswer(url, None, f"not JSON ({error}): {text}") from error


def _completions(base_url: str) -> str:
    return f"{base_url}/v1/completions"
