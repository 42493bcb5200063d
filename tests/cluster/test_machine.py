"""What a machine can give: its limits from made-up control groups, its use from real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from pdlab.cluster import machine

GIB = 2**30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture(autouse=True)
def sixteen_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=12 * GIB, total=16 * GIB))


@pytest.mark.parametrize(
    ("files", "free_gib", "total_gib"),
    [
        ({"proc/self/cgroup": "0::/\n"}, 12, 16),
        (
            {
                "proc/self/cgroup": "0::/box/job\n",
                "sys/fs/cgroup/box/memory.max": f"{8 * GIB}\n",
                "sys/fs/cgroup/box/memory.current": f"{5 * GIB}\n",
                "sys/fs/cgroup/box/memory.stat": f"anon 1\ninactive_file {2 * GIB}\n",
                "sys/fs/cgroup/box/job/memory.max": "max\n",
                "sys/fs/cgroup/box/job/memory.current": f"{5 * GIB}\n",
            },
            5, 8,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/job\n0::/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2**63 - 4096}\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{9 * GIB}\n",
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{4 * GIB}\n",
                "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{1 * GIB}\n",
            },
            3, 4,
        ),
    ],
    ids=["whole machine", "limit of a group above", "control groups of version 1"],
)  # fmt: skip
def test_memory(files: dict[str, str], free_gib: int, total_gib: int, tmp_path: Path) -> None:
    assert machine.memory(write(tmp_path, files)) == (free_gib * GIB, total_gib * GIB)


def test_cores_within_a_quota(tmp_path: Path) -> None:
    root = write(tmp_path, {"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/cpu.max": "50000 100000\n"})
    assert machine.usable_cores(root) == 0.5
    (root / "sys/fs/cgroup/job/cpu.max").write_text("max 100000\n")
    assert machine.usable_cores(root) == len(os.sched_getaffinity(0))


def test_a_kernel_that_counts_nothing_leaves_the_idle_cores_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "cpu_times", lambda: (0.0,) * 10)
    monkeypatch.setattr(psutil, "process_iter", lambda names: iter(()))
    host = machine.observe(tmp_path, observe_s=0)
    assert host.idle_cores is None and host.busy == ()
    assert host.cores == len(os.sched_getaffinity(0)), "no control groups, no quota"


def test_who_uses_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real process that spins and a real one that sleeps; this one is not counted."""
    monkeypatch.setattr(machine, "BUSY_CORES", 0.02)  # what spins gets of a machine that others load
    texts = {"spins": "while True: pass", "sleeps": "import time; time.sleep(600)"}
    children = {name: subprocess.Popen([sys.executable, "-c", text]) for name, text in texts.items()}
    try:
        host = machine.observe(tmp_path, observe_s=2.0)
        deadline = time.monotonic() + 60
        while children["spins"].pid not in {each.pid for each in host.busy} and time.monotonic() < deadline:
            host = machine.observe(tmp_path, observe_s=2.0)
    finally:
        for child in children.values():
            child.kill()
            child.wait()
    (spinning,) = (each for each in host.busy if each.pid == children["spins"].pid)
    assert machine.BUSY_CORES <= spinning.cores <= 1.1 and spinning.name.startswith("python")
    assert {os.getpid(), children["sleeps"].pid}.isdisjoint(each.pid for each in host.busy)
    assert [each.cores for each in host.busy] == sorted((each.cores for each in host.busy), reverse=True)
    assert host.idle_cores is not None and 0 <= host.idle_cores <= host.cores - spinning.cores + 0.1


def test_disk_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    assert machine.disk_free_bytes(tmp_path / "a" / "b") == pytest.approx(machine.disk_free_bytes(tmp_path), rel=0.2)
