"""Health rules that vLLM lacks: an engine core that has work and takes no step is unhealthy, and so is one that cannot
read KV cache from a living prefill engine.

vLLM's own health check detects a dead engine core, but not a stopped or hanging one. The engine core sends statistics
with every step, so the replica sees every step. The statistics also have the counts of the KV guard's workers. Runs in
Ray Serve's replicas, sent there by value: imports only the standard library.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

# Ray Serve checks every 10 s and replaces a replica after three bad answers in a row: a step may take longer than this.
STEP_LIMIT_S = 10.0


# What the KV guard counts in the statistics of a step (`pdlab.guard.receives.ACTIONS`, `pdlab.guard.peers`).
UNHEALED, HEALED = "pdlab_guard_unhealed", "pdlab_guard_healed"
# An attribute of what `on_outputs` puts in place: one more coroutine for each message is enough.
_TAKERS = "pdlab_output_takers"


def connector_stats(outputs: Any) -> list[dict[str, Any]]:
    """The KV connector's statistics in a message of the engine core; with several connectors those of each, in vLLM's
    own nesting.
    """
    stats = getattr(getattr(outputs, "scheduler_stats", None), "kv_connector_stats", None)
    if not stats:
        return []
    return [stats, *(part["data"] for part in stats.values() if isinstance(part, dict) and "data" in part)]


class StepWatch:
    """When the engine core last sent something, and since which check it has had work."""

    def __init__(self, unfinished: Callable[[], int], clock: Callable[[], float] = time.monotonic) -> None:
        self._unfinished = unfinished
        self._clock = clock
        self._last = clock()
        self._busy_since: float | None = None
        self._unhealed = 0

    def step(self, outputs: Any = None) -> None:
        """The engine core has sent something: vLLM's ``EngineCoreOutputs``."""
        self._last = self._clock()
        for counted in connector_stats(outputs):
            self._unhealed += sum(counted.get(UNHEALED) or ()) - sum(counted.get(HEALED) or ())

    def check(self) -> None:
        """Raises RuntimeError if there was work at two checks, and between them no step for longer than the limit; and
        if the KV guard has found connections to prefill engines that new handshakes do not heal."""
        if self._unhealed > 0:
            raise RuntimeError(
                f"{self._unhealed} connections to prefill engines fail again after each new handshake: no KV cache is "
                "read over them"
            )
        now, unfinished = self._clock(), self._unfinished()
        if not unfinished:
            self._busy_since = None
            return
        if self._busy_since is None:
            self._busy_since = now
        without_s = now - max(self._last, self._busy_since)
        if without_s > STEP_LIMIT_S:
            raise RuntimeError(f"the engine core has {unfinished} requests and took no step for {without_s:.0f} s")


class WatchesSteps:
    """Mixed into Ray's engine servers."""

    _step_watch: StepWatch | None = None

    async def start(self) -> None:
        await super().start()  # type: ignore[misc]
        try:
            self._step_watch = watch(self.engine._engine_client)  # type: ignore[attr-defined]
        except AttributeError as error:  # another vLLM or Ray: serves all the same, as without this class
            logging.getLogger("ray.serve").warning("the engine core's steps are not watched: %r", error)

    async def check_health(self) -> None:
        await super().check_health()  # type: ignore[misc]
        if self._step_watch is not None:
            self._step_watch.check()


def watch(client: Any) -> StepWatch | None:
    """Watch every message that vLLM's client gets from its engine core. None: the engine sends no statistics."""
    if not client.log_stats:
        return None
    steps = StepWatch(client.output_processor.get_num_unfinished_requests)
    on_outputs(client, steps.step)
    return steps


def on_outputs(client: Any, take: Callable[[Any], None]) -> None:
    """Call ``take`` with every message that vLLM's client gets from its engine core: ``EngineCoreOutputs``. Raises
    AttributeError for another version of vLLM."""
    receive = client.engine_core.get_output_async
    if (takers := getattr(receive, _TAKERS, None)) is not None:
        takers.append(take)
        return
    takers = [take]

    async def get_output() -> Any:
        outputs = await receive()
        for each in takers:
            each(outputs)
        return outputs

    setattr(get_output, _TAKERS, takers)
    client.engine_core.get_output_async = get_output
