"""An engine core's steps on a clock that the test moves, and what vLLM's client is watched by."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from pdlab.deploy.serving.step_watch import STEP_LIMIT_S, StepWatch, WatchesSteps, on_outputs, watch


class Engine:
    def __init__(self) -> None:
        self.now = 100.0
        self.requests = 0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def steps(engine: Engine) -> StepWatch:
    return StepWatch(lambda: engine.requests, engine)


def test_without_work_no_step_is_needed(engine: Engine, steps: StepWatch) -> None:
    for _ in range(5):
        engine.now += 1000
        steps.check()


def test_work_that_came_after_an_idle_time_has_the_whole_limit(engine: Engine, steps: StepWatch) -> None:
    engine.now += 1000
    engine.requests = 1
    steps.check()
    engine.now += STEP_LIMIT_S
    steps.check()
    engine.now += 0.1
    with pytest.raises(RuntimeError, match="1 requests and took no step for 10 s"):
        steps.check()


def test_steps_keep_it_healthy_and_bring_it_back(engine: Engine, steps: StepWatch) -> None:
    engine.requests = 3
    for _ in range(10):
        steps.check()
        engine.now += STEP_LIMIT_S - 0.1
        steps.step()
    engine.now += STEP_LIMIT_S + 1
    with pytest.raises(RuntimeError):
        steps.check()
    steps.step()
    steps.check()
    engine.requests = 0
    engine.now += 1000
    steps.check()
    engine.requests = 1
    steps.check()


def sent(**counted: list[int]) -> Any:
    """What vLLM's engine core sends after a step in which the guard's workers counted that."""
    return SimpleNamespace(scheduler_stats=SimpleNamespace(kv_connector_stats={"num_failed_transfers": [], **counted}))


def test_connections_that_new_handshakes_do_not_heal_are_unhealthy_until_they_are_healed(steps: StepWatch) -> None:
    steps.step(sent(pdlab_guard_handshakes_renewed=[1]))
    steps.check()
    steps.step(sent(pdlab_guard_unhealed=[1, 1]))
    steps.step(SimpleNamespace(scheduler_stats=None))
    steps.step(SimpleNamespace(scheduler_stats=SimpleNamespace(kv_connector_stats=None)))
    with pytest.raises(RuntimeError, match="2 connections to prefill engines"):
        steps.check()
    steps.step(sent(pdlab_guard_healed=[1]))
    with pytest.raises(RuntimeError, match="1 connections"):
        steps.check()
    steps.step(sent(pdlab_guard_healed=[1]))
    steps.check()
    several = {"NixlConnector": {"data": {"pdlab_guard_unhealed": [1]}}, "OffloadingConnector": {"data": {}}}
    steps.step(SimpleNamespace(scheduler_stats=SimpleNamespace(kv_connector_stats=several)))
    with pytest.raises(RuntimeError, match="1 connections"):
        steps.check()


def client(*, log_stats: bool = True) -> Any:
    async def get_output_async() -> str:
        return "outputs"

    return SimpleNamespace(
        log_stats=log_stats,
        output_processor=SimpleNamespace(get_num_unfinished_requests=lambda: 1),
        engine_core=SimpleNamespace(get_output_async=get_output_async),
    )


def test_the_clients_messages_are_passed_on_and_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[StepWatch, str]] = []
    monkeypatch.setattr(StepWatch, "step", lambda self, outputs: seen.append((self, outputs)))
    vllm = client()
    steps = watch(vllm)
    assert steps is not None
    assert asyncio.run(vllm.engine_core.get_output_async()) == "outputs"
    assert seen == [(steps, "outputs")]


def test_several_that_hear_take_one_coroutine_in_their_order() -> None:
    vllm, heard = client(), list[tuple[int, Any]]()
    on_outputs(vllm, lambda outputs: heard.append((1, outputs)))
    placed = vllm.engine_core.get_output_async
    on_outputs(vllm, lambda outputs: heard.append((2, outputs)))
    assert vllm.engine_core.get_output_async is placed
    assert asyncio.run(placed()) == "outputs" and heard == [(1, "outputs"), (2, "outputs")]


def test_an_engine_that_sends_no_statistics_cannot_be_watched() -> None:
    assert watch(client(log_stats=False)) is None


class Server:
    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.calls = 0

    async def start(self) -> None: ...

    async def check_health(self) -> None:
        self.calls += 1


class Watched(WatchesSteps, Server): ...


def test_a_replica_asks_both(monkeypatch: pytest.MonkeyPatch) -> None:
    def unhealthy(_: StepWatch) -> None:
        raise RuntimeError("no step")

    async def run() -> int:
        server = Watched(SimpleNamespace(_engine_client=client()))
        await server.check_health()
        await server.start()
        await server.check_health()
        monkeypatch.setattr(StepWatch, "check", unhealthy)
        with pytest.raises(RuntimeError, match="no step"):
            await server.check_health()
        return server.calls

    assert asyncio.run(run()) == 3


async def test_another_vllm_serves_without(caplog: pytest.LogCaptureFixture) -> None:
    server = Watched(SimpleNamespace(_engine_client=SimpleNamespace()))
    await server.start()
    await server.check_health()
    assert "steps are not watched" in caplog.text
