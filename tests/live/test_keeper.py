"""kill -9 of a launcher at seeded moments of a real launch: nothing of it is left a moment later.

PDLAB_TEST_KILLS=20 makes the long form of it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes import title

from tests.live.conftest import ROOT, TIMEOUT_S, Stack

KILLS = int(os.environ.get("PDLAB_TEST_KILLS", "3"))
LAUNCH_S = 70.0  # about what a launch takes here; one that is faster is killed while it serves
GONE_S = 90.0


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A temporary folder with a short name, of this test alone."""
    folder = Path(f"/tmp/k{os.getpid()}")
    folder.mkdir()
    yield folder
    folder.rmdir()  # fails where something is left


def left(stack: Stack, place: Path) -> list[str]:
    """Processes that know this cache or temporary folder, files in the latter, and records."""
    cache = stack.folder / "kept"
    marks = (f"PDLAB_CACHE_DIR={cache}", f"TMPDIR={place}")
    found = [str(path) for path in place.iterdir()]
    found += [str(path) for path in (cache / "local.yaml", *(cache / "running").glob("*")) if path.exists()]
    for proc in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if proc.name.isdigit() and int(proc.name) != os.getpid():
                known = (proc / "environ").read_bytes().decode(errors="replace")
                streams = [str((proc / "fd" / number).readlink()) for number in ("1", "2")]
                if any(mark in known for mark in marks) or any(name.startswith(str(place)) for name in streams):
                    found.append(f"{proc.name} {title(int(proc.name))[:100]}")
    return found


def await_nothing(stack: Stack, place: Path) -> None:
    deadline = time.monotonic() + GONE_S
    while what := left(stack, place):
        assert time.monotonic() < deadline, "\n".join(what)
        time.sleep(0.5)


def test_a_launcher_that_is_killed_at_any_moment_leaves_nothing(stack: Stack, place: Path) -> None:
    stack.run("launch_gptoss.py", "--shutdown", "--port", str(stack.port))  # what earlier tests serve takes the cores
    rng = random.Random(15)
    moments = sorted(rng.uniform(0.2, LAUNCH_S) for _ in range(KILLS))
    env = {**stack.env, "PDLAB_CACHE_DIR": str(stack.folder / "kept"), "TMPDIR": str(place)}
    words = ("launch_gptoss.py", "--pd-spread", "--local", "--port", str(stack.port), "--timeout-s", "600")
    for moment_s in moments:
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
        await_nothing(stack, place)
