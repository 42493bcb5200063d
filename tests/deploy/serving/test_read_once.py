"""The process that answers requests keeps vLLM's variables from the start of its engine on."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from pdlab.deploy.serving.read_once import ReadsVariablesOnce
from pdlab.deploy.serving.vllm_names import ENVIRONMENT


class Server:
    def __init__(self, events: list[str]) -> None:
        self.events = events

    async def start(self) -> None:
        self.events.append("engine")


class Reads(ReadsVariablesOnce, Server): ...


def started(monkeypatch: pytest.MonkeyPatch, **environment: Any) -> list[str]:
    events: list[str] = []
    own = {name: lambda value=value: events.append(value) for name, value in environment.items()}
    monkeypatch.setitem(sys.modules, ENVIRONMENT, SimpleNamespace(**own))  # type: ignore[arg-type]
    asyncio.run(Reads(events).start())
    return events


def test_variables_are_kept_once_the_engine_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    assert started(monkeypatch, enable_envs_cache="kept") == ["engine", "kept"]


def test_another_vllm_reads_them_as_before(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert started(monkeypatch) == ["engine"]
    assert "read again and again" in caplog.text
