"""vLLM's statistics for its log, emptied every 10 s.

vLLM's logger keeps the KV connector's figures of every transfer until they are logged. vLLM's own HTTP server does that
while it runs (`vllm.entrypoints.launchers.utils.server_utils.lifespan`); an engine that Ray calls through a handle has
no such server, and would keep 580 bytes for each request at TP 4, for ever. Runs in Ray Serve's replicas, sent there by
value: imports the standard library alone.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

LOG_EVERY_S = 10.0  # vLLM's own VLLM_LOG_STATS_INTERVAL


class EmptiesStats:
    """Mixed into Ray's engine servers."""

    _emptying: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await super().start()  # type: ignore[misc]
        client = getattr(self.engine, "_engine_client", None)  # type: ignore[attr-defined]
        if getattr(client, "log_stats", False) and hasattr(client, "do_log_stats"):
            self._emptying = asyncio.get_running_loop().create_task(empty(client))


async def empty(client: Any, every_s: float = LOG_EVERY_S) -> None:
    """Make vLLM's client log its statistics, and so drop them, until the task is cancelled or the engine is dead.

    If a logger fails, the next call may succeed; without it the memory would grow for ever. The failure is logged
    once."""
    failed = False
    while not getattr(client, "errored", False):
        await asyncio.sleep(every_s)
        try:
            await client.do_log_stats()
        except Exception as error:
            if not failed:
                logging.getLogger("ray.serve").warning("vLLM's statistics are not logged: %r", error)
            failed = True
