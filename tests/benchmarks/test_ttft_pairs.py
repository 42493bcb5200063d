"""Pairs of rounds against servers of this process, and engines whose scheduler is noted."""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import asynchronous_cpu
import pytest
import ttft_pairs
from aiohttp import web
from asynchronous_cpu import ASYNCHRONOUS, SYNCHRONOUS
from support.timelines import PD_MS, pd

from pdlab.deploy.serving.timeline import COMMENT


async def served(step_lag_ms: float, text: str) -> tuple[web.AppRunner, str]:
    """A server whose requests wait that long for decode's scheduler."""

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny"}]})

    async def complete(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        timeline = pd(1, 0.0, dict.fromkeys(PD_MS, 0.5) | {"step_lag": step_lag_ms})
        line = timeline.model_copy(update={"arrival_s": None, "ttft_s": None}).line()
        usage = '"usage": {"completion_tokens": 2}'
        await asyncio.sleep(0.02)  # longer than the parts
        await answer.prepare(request)
        for piece in (
            f'data: {{"choices": [{{"text": "{text}"}}]}}',
            f'data: {{"choices": [{{"text": "b"}}], {usage}}}',
            *([f"{COMMENT.strip()} {line}"] if ttft_pairs.HEADER in request.headers else []),
            "data: [DONE]",
        ):
            await answer.write(f"{piece}\n\n".encode())
        return answer

    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.post("/v1/completions", complete)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


async def compared(args: argparse.Namespace) -> None:
    one, sooner = await served(1.0, "a")
    other, later = await served(4.0, "c")
    try:
        await ttft_pairs.measure(args, [ttft_pairs.Kind("polling", sooner), ttft_pairs.Kind("waiting", later)], None)
    finally:
        await one.cleanup()
        await other.cleanup()


def test_each_kind_has_its_own_server_and_its_parts_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"requests": 3, "concurrency": 2, "itl": 4, "otl": 2, "texts": 2, "vocabulary": 100, "seed": 0}
    asyncio.run(compared(argparse.Namespace(what="kv-poll", pairs=4, **sizes)))
    printed = capsys.readouterr().out
    assert "polling: step_lag p50 ms 1.0000 (" in printed and "waiting: step_lag p50 ms 4.0000 (" in printed
    assert "polling - waiting: step_lag p50 ms -3.0000 (-3.0000 to -3.0000: 95 %, 4 turns)" in printed
    assert "polling / waiting: TTFT p50 s " in printed and "polling / waiting: tokens/s " in printed
    assert "costs at most" not in printed, "that is the question of a timeline"
    assert "2 of 2 texts differ" in printed


def test_a_kind_that_is_not_what_its_name_states_is_refused() -> None:
    ttft_pairs.check_schedulers({"asynchronous": [ASYNCHRONOUS], "synchronous": [SYNCHRONOUS, SYNCHRONOUS]})
    in_one_process = ASYNCHRONOUS._replace(executor="UniProcExecutor")
    for wrong in ([SYNCHRONOUS], [ASYNCHRONOUS, SYNCHRONOUS], [in_one_process], []):
        with pytest.raises(SystemExit, match="asynchronous: decode is to have GuardAsyncScheduler"):
            ttft_pairs.check_schedulers({"asynchronous": wrong, "synchronous": [SYNCHRONOUS]})


@pytest.mark.parametrize("setting", [True, False, None])
def test_the_platform_leaves_the_scheduler_and_checks_the_rest(setting: bool | None) -> None:
    class Platform:
        @classmethod
        def check_and_update_config(cls, config: Any) -> None:
            config.scheduler_config.async_scheduling = False
            config.checked = cls

    config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=setting), checked=None)
    asynchronous_cpu.keep_asynchronous(Platform)
    Platform.check_and_update_config(config)
    assert config.scheduler_config.async_scheduling is setting and config.checked is Platform


def test_engine_cores_leave_notes_of_what_they_run(tmp_path: Path) -> None:
    class GuardAsyncScheduler: ...

    class MultiprocExecutor: ...

    class Core:
        def __init__(self, steps: int) -> None:
            self.scheduler, self.model_executor, self.batch_queue_size = (
                GuardAsyncScheduler(),
                MultiprocExecutor(),
                steps,
            )

    asynchronous_cpu.leave_note(Core, tmp_path)
    assert [Core(2).batch_queue_size, Core(2).batch_queue_size] == [2, 2]
    assert asynchronous_cpu.read_notes(tmp_path) == [ASYNCHRONOUS, ASYNCHRONOUS]


def test_two_deployments_have_records_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for before in ("/mine", None):
        monkeypatch.delenv("PDLAB_CACHE_DIR", raising=False)
        if before:
            monkeypatch.setenv("PDLAB_CACHE_DIR", before)
        with ttft_pairs.records_in(tmp_path):
            assert os.environ["PDLAB_CACHE_DIR"] == str(tmp_path)
        assert os.environ.get("PDLAB_CACHE_DIR") == before


@pytest.mark.parametrize(
    "words", [["kv-poll"], ["scheduler"], ["early-token", "--launch"], ["scheduler", "--launch", "--asynchronous"]]
)
def test_what_launches_is_known_before_anything_is_launched(words: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit) as raised:
        ttft_pairs.main(words)
    assert raised.value.code == 2 and "goes with" in capsys.readouterr().err
