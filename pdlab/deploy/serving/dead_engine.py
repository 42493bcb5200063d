"""A replica whose engine core has died ends itself, so that Ray Serve replaces it. Until then other replicas answer.

Ray Serve checks health every 10 s and acts on the third bad answer. Until then such a replica answers requests with
errors, some only half a minute after the death, when it is stopped. No new replica is started meanwhile. Runs in Ray
Serve's replicas, sent there by value: imports the standard library and its neighbours.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, MutableMapping
from typing import Any

from pdlab.deploy.serving.guard import App, Receive, Refused, Send, refuse

POLL_S = 0.2
# For the requests that were in the engine: vLLM ends each with an error as soon as it sees the death.
ANSWERS_S = 0.2
EXIT_CODE = 1
# "Too early" (RFC 8470): nothing of the request was begun here. HAProxy sends such a request to another replica
# (pdlab.deploy.serving_path). One that was in the engine as it died is not sent on: it may be what killed it.
ELSEWHERE = 425


class StopsWithEngine:
    """Mixed into Ray's engine servers."""

    _end: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await super().start()  # type: ignore[misc]
        client = getattr(self.engine, "_engine_client", None)  # type: ignore[attr-defined]
        if hasattr(client, "errored"):
            self._end = asyncio.get_running_loop().create_task(end_with(client))

    async def __serve_build_asgi_app__(self) -> Any:
        """Of replicas that answer HTTP themselves: with direct streaming."""
        app: Any = await super().__serve_build_asgi_app__()  # type: ignore[misc]
        client = getattr(self.engine, "_engine_client", None)  # type: ignore[attr-defined]
        if hasattr(client, "errored"):
            app.middleware_stack = None  # vLLM builds it at once; it is made again at the first request
            app.add_middleware(RefusesWhenDead, client=client)
        return app

    async def __del__(self) -> None:
        if self._end is not None:  # from here on Ray ends the engine
            self._end.cancel()
        await super().__del__()  # type: ignore[misc]


class RefusesWhenDead:
    """Answers `ELSEWHERE` to requests that arrive after vLLM's ``client`` has found its engine core dead."""

    def __init__(self, app: App, client: Any) -> None:
        self.app = app
        self.client = client

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not self.client.errored:
            await self.app(scope, receive, send)
            return
        message = "this replica's engine has died before it had the request: send it again"
        await refuse(scope, Refused(ELSEWHERE, message, "InternalServerError"), send)


async def end_with(client: Any, end: Callable[[int], Any] = os._exit, answers_s: float = ANSWERS_S) -> None:
    """End this process some time after vLLM's ``client`` has found its engine core dead."""
    while not client.errored:
        await asyncio.sleep(POLL_S)
    log = logging.getLogger("ray.serve")
    log.error("the engine core has died: this replica ends, and Ray Serve replaces it")
    await asyncio.sleep(answers_s)
    for handler in log.handlers:  # they buffer
        handler.flush()
    end(EXIT_CODE)
