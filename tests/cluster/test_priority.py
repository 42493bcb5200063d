"""Niceness of processes that answer requests, and of those that compute."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pdlab.cluster.priority import set_niceness

PROGRAM = """
import os, threading
from pathlib import Path
from pdlab.cluster.priority import set_niceness
done = threading.Event()
threading.Thread(target=done.wait, daemon=True).start()
set_niceness({0})
print(*(os.getpriority(os.PRIO_PROCESS, int(thread.name)) for thread in Path("/proc/self/task").iterdir()))
print(os.popen("nice").read().strip())
done.set()
"""


def run(niceness: int) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(niceness)], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.split()


def test_all_threads_and_children_get_the_niceness() -> None:
    higher = min(os.getpriority(os.PRIO_PROCESS, 0) + 1, 19)
    assert run(higher) == [str(higher)] * 3


def test_where_the_kernel_forbids_it_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbid(*_: int) -> None:
        raise PermissionError

    own = os.getpriority(os.PRIO_PROCESS, 0)
    monkeypatch.setattr(os, "setpriority", forbid)
    set_niceness(own - 1)
    assert os.getpriority(os.PRIO_PROCESS, 0) == own


def test_a_process_that_has_ended_is_left_out() -> None:
    set_niceness(0, 2**22 + 1)
