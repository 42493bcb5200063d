"""vLLM at less cost in the process that answers requests: less CPU for each token and step, and no growing memory.

- vLLM looks up an environment variable for every token that it sends, and parses it each time. Its engine core keeps
  the variables from its start on (`vllm.envs.enable_envs_cache`); the process that answers requests does not.
- vLLM records several metrics for every step of an engine, and one for every token. Ray's Python layer checks all
  labels of a metric each time, and merges them with defaults. The labels stay the same: the first time is enough. A
  gauge that is set to its own value again within `AGAIN_S` is left as it is.
- vLLM's logger keeps the KV connector's figures of every transfer until they are logged. vLLM's own HTTP server logs
  them while it runs (`vllm.entrypoints.launchers.utils.server_utils.lifespan`). An engine that Ray calls through a
  handle has no such server: it would keep 580 bytes for each request at TP 4, for ever.

Runs in Ray Serve's replicas, sent there by value: imports the standard library and its neighbours.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import time
from collections.abc import Callable
from typing import Any

from pdlab.deploy.serving.vllm_names import ENVIRONMENT, RAY_METRICS

LOG_EVERY_S = 10.0  # vLLM's own VLLM_LOG_STATS_INTERVAL
# Ray drops a gauge that nobody has set for two exports, the shortest of which are a second apart.
AGAIN_S = 0.25
_KEPT = "pdlab_kept"


class CostsLess:
    """Mixed into Ray's engine servers. From the start of the engine on, changed variables have no effect."""

    async def start(self) -> None:
        try:
            record_at_less_cost(importlib.import_module(RAY_METRICS))
        except (ImportError, AttributeError) as error:  # another vLLM: records as before
            logging.getLogger("ray.serve").warning("vLLM's metrics are recorded as Ray does it: %r", error)
        await super().start()  # type: ignore[misc]
        try:
            environment: Any = importlib.import_module(ENVIRONMENT)
            environment.enable_envs_cache()
        except (ImportError, AttributeError) as error:  # another vLLM: reads them as before
            logging.getLogger("ray.serve").warning("vLLM's variables are read again and again: %r", error)


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


def record_at_less_cost(wrappers: Any) -> None:
    """Change the classes of vLLM's module that stand for Prometheus's. Raises AttributeError for another version."""
    changed = []
    for kind, name, make in (
        (wrappers.RayGaugeWrapper, "set", _setting),
        (wrappers.RayCounterWrapper, "inc", _counting),
        (wrappers.RayHistogramWrapper, "observe", _adding),
    ):
        changed.append((kind, name, make(getattr(kind, name))))
    for kind, name, method in changed:
        setattr(kind, name, method)


def _counting(checked: Callable[[Any, float], None]) -> Callable[..., None]:
    """Of a counter, which ignores 0: most of those that vLLM counts in a step are 0."""
    add = _adding(checked)

    def count(self: Any, value: float = 1.0) -> None:
        if value:
            add(self, value)

    return count


def _adding(checked: Callable[[Any, float], None]) -> Callable[..., None]:
    """Of a counter or a histogram. A counter refuses values below 0: ``checked`` takes those."""

    def add(self: Any, value: float = 1.0) -> None:
        kept = self.__dict__.get(_KEPT)
        if kept is None or value <= 0:
            checked(self, value)
            if value:
                _keep(self)
        else:
            kept[0](value, tags=kept[1])

    return add


def _setting(checked: Callable[[Any, float], None]) -> Callable[[Any, float], None]:
    def set_to(self: Any, value: float) -> None:
        now = time.monotonic()
        kept = self.__dict__.get(_KEPT)
        if kept is None:
            checked(self, value)
            kept = _keep(self)
        elif value == kept[2] and now - kept[3] < AGAIN_S:
            return
        else:
            kept[0](value, tags=kept[1])
        if kept is not None:
            kept[2:] = [value, now]

    return set_to


def _keep(wrapper: Any) -> list[Any] | None:
    """How a metric with these labels is recorded without a look at them, and the last value and its time. None: it has
    no labels yet, or Ray records nothing of it."""
    metric = wrapper.metric
    if not wrapper._is_labeled or metric._metric is None:
        return None
    kept = [metric._metric.record, {**metric._default_tags, **wrapper._tags}, None, 0.0]
    wrapper.__dict__[_KEPT] = kept
    return kept
