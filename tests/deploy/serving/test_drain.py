"""A replica that stops waits for its KV blocks, and not for ever."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from pdlab.deploy.serving import drain
from pdlab.deploy.serving.drain import DrainsBeforeStop, drained


def engine(*free: bool | Exception) -> Any:
    """Whose blocks are free as said, the last answer over and over."""
    answers: list[bool | Exception] = []

    async def reset_prefix_cache() -> bool:
        answers.append(free[min(len(answers), len(free) - 1)])
        if isinstance(answers[-1], Exception):
            raise answers[-1]
        return answers[-1]

    return SimpleNamespace(_engine_client=SimpleNamespace(reset_prefix_cache=reset_prefix_cache), answers=answers)


@pytest.fixture(autouse=True)
def stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "_application_goes", lambda: False)


def test_nothing_held_is_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "_application_goes", lambda: pytest.fail("the controller was asked for nothing"))
    held = engine(True)
    assert asyncio.run(drained(held, 60, poll_s=60)) is True
    assert len(held.answers) == 1


def test_it_waits_until_the_blocks_are_read() -> None:
    held = engine(False, False, True)
    assert asyncio.run(drained(held, 60, poll_s=0.001)) is True
    assert len(held.answers) == 3


def test_blocks_that_nobody_reads_do_not_hold_it_for_ever() -> None:
    assert asyncio.run(drained(engine(False), 0.05, poll_s=0.001)) is False


def test_an_application_that_goes_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "_application_goes", lambda: True)
    held = engine(False)
    assert asyncio.run(drained(held, 3600, poll_s=3600)) is False
    assert len(held.answers) == 1


def test_a_dead_engine_does_not_hold_it() -> None:
    assert asyncio.run(drained(engine(RuntimeError("EngineDeadError")), 3600)) is False
    assert asyncio.run(drained(None, 3600)) is True, "it never started"


def test_an_engine_that_does_not_answer_does_not_hold_it_for_ever() -> None:
    async def never() -> bool:
        await asyncio.sleep(3600)
        return True

    hung = SimpleNamespace(_engine_client=SimpleNamespace(reset_prefix_cache=never))
    assert asyncio.run(drained(hung, 0.05)) is False


async def test_rays_own_end_comes_behind_it() -> None:
    ends: list[str] = []
    held = engine(True)

    class Server:
        async def __del__(self) -> None:
            ends.append("ended")

    class Mixed(DrainsBeforeStop, Server):
        kv_drain_s = 1.0

    server: Any = SimpleNamespace(engine=held, kv_drain_s=1.0)
    mixed = Mixed()
    mixed.engine = server.engine  # type: ignore[attr-defined]
    await mixed.__del__()
    Mixed.__del__ = Server.__del__ = lambda self: None  # type: ignore[assignment, method-assign]
    assert ends == ["ended"] and len(held.answers) == 1
