"""kill -9 of a launcher at seeded moments of a real launch: nothing of it is left a moment later."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from support.long import LONG
from support.processes import environment, title

from tests.live.conftest import ROOT, TIMEOUT_S, Stack

pytestmark = pytest.mark.long
KILLS = 20 if LONG else 1
LAUNCH_S = 70.0  # about what a launch takes here; one that is faster is killed while it serves
GONE_S = 90.0


def folders() -> set[str]:
    """Of Ray nodes, whosever they are. HAProxy's sockets lie in them, and their paths may have no character more, so
    that they cannot be put into a folder of this test."""
    return {str(path) for path in Path(tempfile.gettempdir()).glob("pdlab-*")}


def left(stack: Stack, before: set[str]) -> list[str]:
    """Processes that know this cache folder, or write to a folder of its nodes; those folders, and records."""
    cache = stack.folder / "kept"
    found = [str(path) for path in (cache / "local.yaml", *(cache / "running").glob("*")) if path.exists()]
    processes = {pid: environment(pid) for pid in psutil.pids()}
    others = {env["TMPDIR"].removesuffix("/t") for env in processes.values()
              if "TMPDIR" in env and env.get("PDLAB_CACHE_DIR") != str(cache)}  # fmt: skip
    fresh = folders() - before - others
    for pid, env in processes.items():
        streams = []
        with contextlib.suppress(OSError):
            streams = [str(Path(f"/proc/{pid}/fd/{number}").readlink()) for number in ("1", "2")]
        ours = env.get("PDLAB_CACHE_DIR") == str(cache) or any(s.startswith(f"{f}/") for s in streams for f in fresh)
        if ours and pid != os.getpid():
            found.append(f"{pid} {title(pid)[:100]}")
    return [*found, *sorted(fresh)]


def await_nothing(stack: Stack, before: set[str]) -> None:
    deadline = time.monotonic() + GONE_S
    while what := left(stack, before):
        assert time.monotonic() < deadline, "\n".join(what)
        time.sleep(0.5)


def test_a_launcher_that_is_killed_at_any_moment_leaves_nothing(stack: Stack) -> None:
    stack.shutdown()  # what earlier tests serve takes the cores
    rng = random.Random(15)
    moments = sorted(rng.uniform(0.2, LAUNCH_S) for _ in range(KILLS))
    env = {**stack.env, "PDLAB_CACHE_DIR": str(stack.folder / "kept")}
    words = ("launch_gptoss.py", "--pd-spread", "--local", "--port", str(stack.port), "--timeout-s", "600")
    for moment_s in moments:
        before = folders()
        launcher = subprocess.Popen(
            stack.command(*words), cwd=ROOT, env=env, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        time.sleep(moment_s)
        assert launcher.poll() is None, launcher.stderr.read() if launcher.stderr else ""
        os.kill(launcher.pid, signal.SIGKILL)
        launcher.wait(TIMEOUT_S)
        assert launcher.stderr is not None
        print(f"killed after {moment_s:.1f} s, at: {launcher.stderr.read().splitlines()[-1:]}")
        launcher.stderr.close()
        await_nothing(stack, before)
