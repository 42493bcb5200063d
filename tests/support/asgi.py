"""Calls of an ASGI application as a server makes them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from pdlab.core.deployment import RequestLimits
from pdlab.deploy.serving.guard import RequestRules

JSON = ((b"content-type", b"application/json"),)


def exchange(
    app: Callable[..., Any],
    path: str,
    body: bytes = b"",
    *,
    pieces: int = 1,
    method: str = "POST",
    kind: str = "http",
    headers: Iterable[tuple[bytes, bytes]] = JSON,
    root: str = "",
) -> list[dict[str, Any]]:
    """What the application sends to a client whose body arrives in so many ``pieces`` (0: the client has gone)."""
    step = max(1, -(-len(body) // max(pieces, 1)))
    waiting = [body[i : i + step] for i in range(0, len(body), step)] or [b""]
    waiting = waiting if pieces else []
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if not waiting:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": waiting.pop(0), "more_body": bool(waiting)}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": kind, "method": method, "path": root + path, "raw_path": (root + path).encode(), "root_path": root,
        "query_string": b"", "headers": list(headers), "http_version": "1.1", "scheme": "http",
    }  # fmt: skip
    asyncio.run(app(scope, receive, send))
    return sent


def text_of(sent: Iterable[dict[str, Any]]) -> str:
    """The body of an answer."""
    return b"".join(message.get("body", b"") for message in sent).decode()


def request_rules(*, tools: bool = True, **limits: Any) -> RequestRules:
    """The rules of the guard with the launcher's defaults, but those ``limits``."""
    return RequestRules(**RequestLimits.model_construct(**limits).model_dump(), tools=tools)
