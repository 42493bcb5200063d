"""A replica whose engine core has died ends itself, so that Ray Serve replaces it.

Ray Serve asks for health every 10 s and believes the third bad answer. Until then such a replica answers what it is
sent with errors, some of them only when it is stopped, half a minute after the death, and no other one is started. Runs
in Ray Serve's replicas, sent there by value: imports the standard library alone.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Any

POLL_S = 0.05
# For the requests that were in the engine: vLLM ends each with an error as soon as it sees the death.
ANSWERS_S = 0.2
EXIT_CODE = 1


class EndsWithEngine:
    """Mixed into Ray's engine servers."""

    _end: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await super().start()  # type: ignore[misc]
        client = getattr(self.engine, "_engine_client", None)  # type: ignore[attr-defined]
        if hasattr(client, "errored"):
            self._end = asyncio.get_running_loop().create_task(end_with(client))

    async def __del__(self) -> None:
        if self._end is not None:  # from here on Ray ends the engine
            self._end.cancel()
        await super().__del__()  # type: ignore[misc]


async def end_with(client: Any, end: Callable[[int], Any] = os._exit, answers_s: float = ANSWERS_S) -> None:
    """End this process some time after vLLM's ``client`` has found its engine core dead."""
    while not client.errored:
        await asyncio.sleep(POLL_S)
    log = logging.getLogger("ray.serve")
    log.error("the engine core has died: this replica ends, for Ray Serve to replace it")
    await asyncio.sleep(answers_s)
    for handler in log.handlers:  # they buffer
        handler.flush()
    end(EXIT_CODE)
