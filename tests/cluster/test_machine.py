"""What a machine can give, read from made-up /proc and /sys."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pdlab.cluster import machine

GIB = 2**30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = f"MemTotal:       {16 * GIB // 1024} kB\nMemFree:  1 kB\nMemAvailable:   {12 * GIB // 1024} kB\n"


def test_memory_of_the_whole_machine(tmp_path: Path) -> None:
    root = write(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/\n"})
    assert machine.memory(root) == (12 * GIB, 16 * GIB)


def test_memory_within_the_limit_of_a_group_above(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/box/job\n",
        "sys/fs/cgroup/box/memory.max": f"{8 * GIB}\n",
        "sys/fs/cgroup/box/memory.current": f"{5 * GIB}\n",
        "sys/fs/cgroup/box/memory.stat": f"anon 1\ninactive_file {2 * GIB}\n",
        "sys/fs/cgroup/box/job/memory.max": "max\n",
        "sys/fs/cgroup/box/job/memory.current": f"{5 * GIB}\n",
    }
    assert machine.memory(write(tmp_path, files)) == (5 * GIB, 8 * GIB)


def test_memory_under_control_groups_of_version_1(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "4:memory:/job\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2**63 - 4096}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{9 * GIB}\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{4 * GIB}\n",
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{1 * GIB}\n",
    }
    assert machine.memory(write(tmp_path, files)) == (3 * GIB, 4 * GIB)


def test_cores_within_a_quota(tmp_path: Path) -> None:
    root = write(tmp_path, {"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/cpu.max": "50000 100000\n"})
    assert machine.usable_cores(root) == 0.5
    (root / "sys/fs/cgroup/job/cpu.max").write_text("max 100000\n")
    assert machine.usable_cores(root) == len(os.sched_getaffinity(0))


def test_nothing_readable_is_unknown(tmp_path: Path) -> None:
    host = machine.look(tmp_path, observe_s=0)
    assert host.memory_free_bytes is None and host.memory_bytes is None and host.load_average is None
    assert host.idle_cores is None and host.busy == ()


def test_who_uses_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = os.sysconf("SC_CLK_TCK")

    def stat(pid: int, name: str, used_s: float) -> None:
        fields = ["S", *["0"] * 10, str(int(used_s * ticks)), "0", *["0"] * 30]
        write(tmp_path, {f"proc/{pid}/stat": f"{pid} ({name}) {' '.join(fields)}\n"})

    def later(seconds: float) -> None:
        stat(7, "busy) loop", 101.5)
        stat(8, "quiet", 50.01)
        stat(9, "new", 70)
        clock[0] += seconds

    clock = [1000.0]
    stat(7, "busy) loop", 100)
    stat(8, "quiet", 50)
    monkeypatch.setattr(machine.time, "sleep", later)
    monkeypatch.setattr(machine.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: {0, 1})
    host = machine.look(tmp_path, observe_s=2.0)
    assert [(each.pid, each.name) for each in host.busy] == [(7, "busy) loop")]
    assert host.busy[0].cores == pytest.approx(0.75)
    assert host.idle_cores == pytest.approx(2 - 0.75 - 0.005, abs=0.01)


def test_disk_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    assert machine.disk_free_bytes(tmp_path / "a" / "b") == pytest.approx(machine.disk_free_bytes(tmp_path), rel=0.2)
