"""debug/test_nixl_connector_ray.py on Ray nodes of this machine, as a user runs it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.processes import wait_for

# tests/live/test_first_hour.py checks transfers on Ray, tests/transfer/rank/test_real_nixl.py plants faults.
pytestmark = [pytest.mark.live, pytest.mark.long]

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--num-layers", "4", "--block-len-bytes", "16384", "--blocks", "16,64", "--random-blocks", "--timeout-s", "40")


class Done(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def folder() -> Iterator[Path]:
    """Cache and temporary folder of a check, with a short name: Ray's sockets lie in it."""
    path = Path(tempfile.mkdtemp(prefix="kv-"))
    (path / "tmp").mkdir()
    yield path
    shutil.rmtree(path)


def command(cache: Path, *words: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PDLAB_CACHE_DIR": str(cache), "TMPDIR": str(cache / "tmp")}
    env.pop("RAY_ADDRESS", None)
    return subprocess.Popen(
        [sys.executable, str(ROOT / "debug/test_nixl_connector_ray.py"), *words], env=env, cwd=cache, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def run(cache: Path, *words: str) -> Done:
    process = command(cache, *words)
    out, err = process.communicate(timeout=300)
    print(out, err)
    return Done(process.returncode, out, err)


def nothing_is_left(folder: Path) -> None:
    """Ray's agents end a moment after their node: on a loaded machine, seconds after."""
    wait_for(lambda: not left_of(folder), why=lambda: left_of(folder))


def left_of(folder: Path) -> list[str]:
    """Processes and files that a check left: what it starts inherits its folder, or writes into it."""
    left_over = [str(path) for path in (folder / "tmp").iterdir()]
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            ours = f"PDLAB_CACHE_DIR={folder}".encode() in (path / "environ").read_bytes()
            if ours or str((path / "fd/1").readlink()).startswith(str(folder)):
                left_over.append((path / "cmdline").read_bytes().decode(errors="replace"))
    return left_over


def test_pack_and_everything_it_writes(folder: Path) -> None:
    out, plot = folder / "out.json", folder / "plot.png"
    words = ("--local", "--backends", "UCX,MOONCAKE")
    done = run(folder, *words, *SMALL, "--json", str(out), "--plot", str(plot))
    assert "pack over cma/memory, zero-copy" in done.out and "every word exact" in done.out
    assert "CANNOT RUN: MOONCAKE: plugin" in done.out
    assert done.code == 5, "one backend ran, the other could not"
    data: dict[str, Any] = json.loads(out.read_text())
    first, second = data["runs"]
    assert first["wire"]["lanes"][0]["transport"] == "cma" and first["findings"] == []
    assert {first["hosts"]["prefill"]["name"], first["hosts"]["decode"]["name"]} == {os.uname().nodename}
    assert second["error"]["kind"] == "plugin" and data["exit_code"] == 5
    assert data["environment"]["versions"]["nixl"] and plot.stat().st_size > 5000
    nothing_is_left(folder)


def test_spread_is_on_two_nodes_and_a_planted_fault_ends_with_4(folder: Path) -> None:
    done = run(folder, "--local", "--strategy", "spread", *SMALL, "--plant-fault", "swap-blocks")
    assert done.code == 4
    assert done.out.splitlines()[-1].startswith("CORRUPT: swapped blocks")
    assert "First: decode rank 0, layer 0" in done.out
    assert "Ray nodes of this spread are on one host" in done.out
    nothing_is_left(folder)


def ranks_of(folder: Path) -> list[int]:
    """Process ids of the actors, prefill's first."""
    left_over = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            ours = str((path / "fd/1").readlink()).startswith(str(folder))
            if ours and b"RankActor" in (path / "cmdline").read_bytes():
                left_over.append(int(path.name))
    return sorted(left_over)


def test_a_rank_that_hangs_is_named_and_ended(folder: Path) -> None:
    process = command(folder, "--local", *SMALL[:6], "--repeats", "100000", "--timeout-s", "10")
    wait_for(lambda: len(ranks_of(folder)) >= 2)
    time.sleep(4)  # transfers are on their way by then; if not, it hangs in the handshake and is named as well
    os.kill(ranks_of(folder)[0], signal.SIGSTOP)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 5
    lines = [line for line in out.splitlines() if line.startswith("CANNOT RUN: UCX: timeout:")]  # Ray may speak before
    assert lines and "does not answer: it hangs" in lines[0]
    nothing_is_left(folder)


def test_ended_by_a_signal_it_leaves_nothing(folder: Path) -> None:
    process = command(folder, "--local", *SMALL, "--repeats", "500")
    wait_for(lambda: ranks_of(folder))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=300)
    assert process.returncode != 0
    nothing_is_left(folder)
