"""What vLLM keeps for its log does not grow with the requests."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from pdlab.deploy.serving import log_stats
from pdlab.deploy.serving.log_stats import EmptiesStats, empty


class Client:
    """vLLM's client: what it keeps, and how often it was told to log."""

    log_stats = True

    def __init__(self, *, fails: int = 0) -> None:
        self.kept, self.logged, self.errored, self.fails = 0, 0, False, fails

    async def do_log_stats(self) -> None:
        if self.fails:
            self.fails -= 1
            raise OSError("no log")
        self.kept, self.logged = 0, self.logged + 1
        self.errored = self.logged == 3


def test_it_is_emptied_until_the_engine_is_dead() -> None:
    client = Client()
    asyncio.run(asyncio.wait_for(empty(client, 0.001), 10))
    assert client.logged == 3


def test_after_a_log_that_failed_it_is_emptied_again(caplog: pytest.LogCaptureFixture) -> None:
    client = Client(fails=2)
    asyncio.run(asyncio.wait_for(empty(client, 0.001), 10))
    assert client.logged == 3 and client.kept == 0
    assert len([each for each in caplog.records if "not logged" in each.message]) <= 1


class Server:
    def __init__(self, client: Any) -> None:
        self.engine = SimpleNamespace(_engine_client=client)

    async def start(self) -> None: ...


class Empties(EmptiesStats, Server): ...


def test_an_engine_server_empties_what_its_client_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_stats.empty, "__defaults__", (0.001,))
    client = Client()

    async def run() -> None:
        await Empties(client).start()
        while client.logged < 2:
            client.kept += 1
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(run(), 10))
    assert client.kept < 100
    quiet = Client()
    quiet.log_stats = False
    assert asyncio.run(started(Empties(quiet))) is None and asyncio.run(started(Empties(None))) is None


async def started(server: Any) -> Any:
    await server.start()
    return server._emptying
