"""Processes of a deployment on local Ray nodes, by what they are."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil


def title(pid: int) -> str:
    """A process's command line; empty for one that is gone."""
    with contextlib.suppress(psutil.Error):
        return " ".join(psutil.Process(pid).cmdline())
    return ""


def environment(pid: int) -> dict[str, str]:
    """A process's environment, as it started with; empty for one that is gone."""
    with contextlib.suppress(psutil.Error):
        return dict(psutil.Process(pid).environ())
    return {}


def alive(pid: int) -> bool:
    """Whether a process runs: a zombie does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def eventually(condition: Callable[[], object], within_s: float = 30.0) -> bool:
    """Whether the condition holds before that time is over."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def wait_for(
    condition: Callable[[], object], within_s: float = 150.0, why: Callable[[], object] = lambda: "timed out"
) -> None:
    """Wait until the condition holds; fails with ``why`` once that time is over."""
    assert eventually(condition, within_s), why()


def with_children(pid: int) -> list[int]:
    """A process and all that it has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    return [pid]


def replicas(nodes: Any, role: str) -> list[int]:
    """The processes of that role's Ray Serve replicas ("Prefill", "Decode"), by their numbers."""
    from pdlab.cluster import local_nodes

    return [pid for pid in local_nodes.processes(nodes) if f"ServeReplica:pdlab:{role}" in title(pid)]


def replica_process(nodes: Any, role: str, name: str) -> int:
    """The process of the Ray Serve replica of that name: its lines of log begin with the name."""
    (pid,) = [
        pid
        for pid in replicas(nodes, role)
        if any(f" {name} -- " in log.read_text() for log in Path(nodes.temp_dir).rglob(f"worker-*-{pid}.err"))
    ]
    return pid


def send(pid: int, number: signal.Signals) -> None:
    """Signal a process and its children."""
    for each in with_children(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, number)


def failing_program(message: str, logs: Path | None = None) -> str:
    """Python that fails as a command of pdlab does, and prints something behind its error."""
    return (
        "from pathlib import Path\n"
        "from pdlab.core import errors, exit_code, failure\n"
        "def work():\n"
        f"    error = errors.DeployError({message!r})\n"
        f"    failure.attach_logs(error, {f'Path({str(logs)!r})' if logs else None})\n"
        "    raise error\n"
        "code = exit_code.exit_code(work)\n"
        "print('bye')\n"
        "raise SystemExit(code)\n"
    )
