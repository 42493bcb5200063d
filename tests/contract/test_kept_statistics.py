"""What vLLM keeps of every KV transfer for its log: vLLM's own client, its task that reads the engine core's messages,
and its loggers. Only the engine core is a stand-in, which sends messages and makes no tokens."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
from contract.conftest import quietly
from contract.test_kv_guard import connector, guard_scheduler, vllm_config  # noqa: F401

from pdlab.deploy.serving import vllm_costs
from pdlab.deploy.serving.timeline import TimingBook, listen
from pdlab.deploy.serving.vllm_costs import EmptiesStats
from pdlab.marks.engine_marks import CORE, WIRE

pytestmark = pytest.mark.usefixtures("import_warnings_aside")

STATS = {
    "vLLM's": ("vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats", "NixlKVConnectorStats"),
    "the guard's": ("pdlab.guard.metrics", "GuardStats"),
}
EVERY_S = 0.001
ROUNDS = 3


class Core:
    """Sends what it is given, one message after another."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[Any] = asyncio.Queue()
        self.resources = SimpleNamespace(engine_dead=False)

    async def get_output_async(self) -> Any:
        return await self.messages.get()

    def shutdown(self, **_: Any) -> None: ...


@asynccontextmanager
async def client_of(config: Any) -> AsyncIterator[Any]:
    """vLLM's client as Ray's engine makes it, while its task runs."""
    llm = quietly("vllm.v1.engine.async_llm").AsyncLLM
    loggers, wrappers = quietly("vllm.v1.metrics.loggers"), quietly("vllm.v1.metrics.ray_wrappers")
    client = llm.__new__(llm)
    client.engine_core, client.log_stats, client.output_handler = Core(), True, None
    client.renderer = SimpleNamespace(mm_processor_cache=None, stat_mm_cache=lambda: None, shutdown=lambda: None)
    client.output_processor = SimpleNamespace(add_request=None, update_scheduler_stats=lambda stats: None)
    client.logger_manager = loggers.StatLoggerManager(
        config, engine_idxs=[0], custom_stat_loggers=[wrappers.RayPrometheusStatLogger]
    )
    listen(client, TimingBook())
    client._run_output_handler()
    try:
        yield client
    finally:
        client.output_handler.cancel()
        with suppress(asyncio.CancelledError):
            await client.output_handler


async def transfer(client: Any, stats_of: type[Any], number: int) -> None:
    """The message of a step in which one KV cache has arrived; ends when vLLM has recorded it."""
    telemetry = SimpleNamespace(xferDuration=900, postDuration=10, totalBytes=4096, descCount=8)
    stats = stats_of()
    stats.record_transfer(telemetry)
    if CORE in stats.data:
        stats.data[CORE].append((f"r{number}", "admitted", 1.0))
        stats.data[WIRE].append((f"r{number}", 0, 1.0, 2.0, 900.0, 4096))
    engine, scheduler = quietly("vllm.v1.engine"), quietly("vllm.v1.metrics.stats")
    core, recorded = client.engine_core.messages, asyncio.Event()
    client.output_processor.update_scheduler_stats = lambda stats: recorded.set()
    core.put_nowait(
        engine.EngineCoreOutputs(scheduler_stats=scheduler.SchedulerStats(kv_connector_stats=stats.data), timestamp=1.0)
    )
    await recorded.wait()
    await asyncio.sleep(0)


def kept(client: Any) -> int:
    """Values in the lists that vLLM's loggers have put together of the transfers."""
    count = 0
    for adapter in client.logger_manager.stat_loggers:
        for logger in getattr(adapter, "per_engine_stat_loggers", {}).values():
            together = logger.kv_connector_logging.transfer_stats_accumulator
            count += 0 if together is None else sum(map(len, together.data.values()))
    return count


@pytest.mark.parametrize("whose", STATS)
def test_what_vllm_keeps_of_transfers_grows_until_it_is_told_to_log(
    whose: str, vllm_config: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture  # noqa: F811
) -> None:  # fmt: skip
    caplog.set_level(logging.INFO, "vllm")  # engines' level: below it vLLM has no logger of statistics
    monkeypatch.setattr(vllm_costs.empty, "__defaults__", (EVERY_S,))
    module, name = STATS[whose]
    stats_of = getattr(quietly(module), name)

    class Server:
        def __init__(self, client: Any) -> None:
            self.engine = SimpleNamespace(_engine_client=client)

        async def start(self) -> None: ...

    class Empties(EmptiesStats, Server): ...

    async def run() -> None:
        async with client_of(vllm_config) as client:
            grown = []
            for number in range(ROUNDS * 10):
                await transfer(client, stats_of, number)
                grown.append(kept(client))
            # Duration, posting, bytes and descriptors of each: what vLLM keeps where nobody tells it to log.
            assert grown == [4 * (number + 1) for number in range(ROUNDS * 10)]
            server = Empties(client)
            await server.start()
            for number in range(ROUNDS):
                await transfer(client, stats_of, number)
                while kept(client):
                    await asyncio.sleep(EVERY_S)
            assert not client.output_handler.done() and not server._emptying.done()
            server._emptying.cancel()
            await transfer(client, stats_of, 0)
            await asyncio.sleep(5 * EVERY_S)
            assert kept(client) == 4, "nothing else empties it"

    asyncio.run(asyncio.wait_for(run(), 30))


def test_vllms_client_knows_whether_it_logs() -> None:
    """What `EmptiesStats` looks for before it begins."""
    llm = quietly("vllm.v1.engine.async_llm").AsyncLLM
    assert "self.log_stats = log_stats or " in inspect.getsource(llm.__init__)
    assert isinstance(inspect.getattr_static(llm, "errored"), property)
