"""A replica that is to stop keeps its engine until nobody needs the KV blocks that it holds.

Ray Serve waits only for a replica's requests. Prefill's requests end before decode has read their KV blocks. If the
engine stops then, decode's read fails. Runs in Ray Serve's replicas, sent there by value: imports
only the standard library.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import time
from typing import Any

from pdlab.deploy.serving.elastic import value_of

POLL_S = 0.5


class DrainsBeforeStop:
    """Mixed into Ray's engine servers of prefill and decode: Ray calls ``__del__`` once, when their requests have
    ended, and stops the replica when it returns."""

    kv_drain_s: float

    async def __del__(self) -> None:
        try:
            await drained(getattr(self, "engine", None), self.kv_drain_s)
        finally:
            await super().__del__()  # type: ignore[misc]


async def drained(engine: Any, limit_s: float, poll_s: float = POLL_S) -> bool:
    """Wait until the engine holds no KV block, at most ``limit_s`` seconds. True: it holds none.

    Returns at once if the whole application stops, because then no engine reads. vLLM resets its prefix cache only when
    no block is held, and returns whether it did. The lost cache is of no use in an engine that ends.
    """
    client = getattr(engine, "_engine_client", None)
    if client is None:
        return True
    deadline = time.monotonic() + limit_s
    waited = False
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            if await asyncio.wait_for(client.reset_prefix_cache(), left_s):
                return True
            if await asyncio.wait_for(asyncio.to_thread(_application_goes), left_s):
                return False
        except Exception as error:  # a dead engine holds nothing that could be read
            logging.getLogger("ray.serve").warning("the replica stops without a look at its KV blocks: %r", error)
            return False
        if not waited:
            logging.getLogger("ray.serve").warning(
                "the replica waits until its KV blocks are read or their lease ends, %.0f s at most", limit_s
            )
            waited = True
        await asyncio.sleep(min(poll_s, max(0.0, deadline - time.monotonic())))
    logging.getLogger("ray.serve").warning("the replica stops with KV blocks held for %.0f s", limit_s)
    return False


def _application_goes() -> bool:
    serve: Any = importlib.import_module("ray.serve")
    name = serve.get_replica_context().app_name
    known = serve.status().applications.get(name)
    return known is None or value_of(known.status) == "DELETING"
