"""Asynchronous scheduling on vLLM's CPU backend, which switches it off, and a note of what each engine core runs.

For `ttft_pairs.py`: `decode_flags` of a launch. The worker is a process of its own, as on GPUs, so that a step is
scheduled while another one is computed; where scheduler and worker are one process, as `--local` has them, the
scheduler waits for the model. `asynchronous_cpu_worker.py` prepares that process.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pdlab.deploy.cpu_engine import prefork
from pdlab.deploy.serving.vllm_names import ENGINE_CORE

NOTES = "PDLAB_BENCHMARK_NOTES"  # the folder of the engine cores' notes
CPU_PLATFORM = "vllm.platforms.cpu"


class EngineNote(NamedTuple):
    """Of one engine core: the classes of its scheduler and of its executor, and the steps that it has in flight."""

    scheduler: str
    executor: str
    steps_in_flight: int

    def __str__(self) -> str:
        return f"{self.scheduler}, {self.executor}, steps in flight: {self.steps_in_flight}"


ASYNCHRONOUS = EngineNote("GuardAsyncScheduler", "MultiprocExecutor", 2)
SYNCHRONOUS = EngineNote("GuardSyncScheduler", "MultiprocExecutor", 1)


def decode_flags(notes: Path) -> list[str]:
    """Flags for decode engines with a worker process that schedule asynchronously, if async_scheduling is not false.
    Their cores leave notes in that folder."""
    variables = {prefork.AT_START: "benchmarks.asynchronous_cpu", NOTES: str(notes)}
    # vLLM has the worker in the core's process only without it.
    variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    found = [f"--d-env={name}={value}" for name, value in variables.items()]
    return [*found, "--d-engine-arg=worker_extension_cls=benchmarks.asynchronous_cpu_worker.Extension"]


def read_notes(notes: Path) -> list[EngineNote]:
    return [EngineNote(**json.loads(path.read_text())) for path in sorted(notes.glob("*.json"))]


def at_start() -> None:
    """See `pdlab.deploy.cpu_engine.prefork`, whose place this module takes: the engine core is a fork of this process,
    and has what is changed here."""
    if any(Path(word).name == prefork.WORKER for word in sys.orig_argv[1:]):
        keep_asynchronous(importlib.import_module(CPU_PLATFORM).CpuPlatform)
        leave_note(importlib.import_module(ENGINE_CORE).EngineCore, Path(os.environ[NOTES]))
        prefork.fork_after(prefork.ENGINE)


def keep_asynchronous(platform: Any) -> None:
    """Let the platform's check of an engine's settings leave ``async_scheduling`` as it was configured."""
    check = platform.check_and_update_config

    def check_the_rest(cls: Any, vllm_config: Any) -> None:
        configured = vllm_config.scheduler_config.async_scheduling
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = configured

    platform.check_and_update_config = classmethod(check_the_rest)


def leave_note(core: Any, notes: Path) -> None:
    """Have every engine core write an `EngineNote` when it is made."""
    make = core.__init__

    @functools.wraps(make)
    def make_and_note(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        note = EngineNote(type(self.scheduler).__name__, type(self.model_executor).__name__, self.batch_queue_size)
        with tempfile.NamedTemporaryFile("w", dir=notes, suffix=".json", delete=False) as file:
            json.dump(note._asdict(), file)

    core.__init__ = make_and_note
