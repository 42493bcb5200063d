"""What this machine can give right now: cores and who uses them, memory, disk; limits of its control group included.

What cannot be read is None. ``root`` of each function is where /proc and /sys lie.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

LOOK_S = 1.0
BUSY_CORES = 0.2


class Process(NamedTuple):
    """A process and the cores that it used on average while the machine was observed."""

    pid: int
    name: str
    cores: float


class Machine(NamedTuple):
    """``cores`` that this process may use, ``idle_cores`` of them unused while observed; bytes of memory that can be
    had without swapping, and in all; ``busy``: the processes that used most, descending."""

    cores: float
    idle_cores: float | None
    memory_free_bytes: int | None
    memory_bytes: int | None
    load_average: float | None
    busy: tuple[Process, ...] = ()


def look(root: Path = Path("/"), observe_s: float = LOOK_S) -> Machine:
    """Observe this machine for ``observe_s`` seconds."""
    before, idle_before_s = _cpu_seconds(root), _idle_seconds(root)
    began = time.monotonic()
    time.sleep(observe_s)
    elapsed_s = max(time.monotonic() - began, 1e-3)
    after, idle_after_s = _cpu_seconds(root), _idle_seconds(root)
    every = [
        Process(pid, name, (used_s - before[pid, name]) / elapsed_s)
        for (pid, name), used_s in after.items()
        if (pid, name) in before and pid != os.getpid()
    ]
    busy = sorted((each for each in every if each.cores >= BUSY_CORES), key=lambda each: -each.cores)
    cores = usable_cores(root)
    free, total = memory(root)
    # By what is not used of our cores, and by what is idle: other containers' processes cannot be seen.
    idle = [cores - sum(each.cores for each in every)] if after else []
    if idle_before_s is not None and idle_after_s is not None:
        idle.append((idle_after_s - idle_before_s) / elapsed_s)
    return Machine(
        cores=cores,
        idle_cores=max(0.0, min(idle)) if idle else None,
        memory_free_bytes=free,
        memory_bytes=total,
        load_average=_load_average(root),
        busy=tuple(busy),
    )


def usable_cores(root: Path = Path("/")) -> float:
    """Cores that this process may run on, or fewer where its control group has a quota."""
    cores = float(len(os.sched_getaffinity(0)))
    for folder in _control_groups(root, "cpu"):
        quota, _, period = (_text(folder / "cpu.max") or "").partition(" ")
        quota = quota or _text(folder / "cpu.cfs_quota_us") or ""
        period = period or _text(folder / "cpu.cfs_period_us") or ""
        if quota.isdigit() and period.isdigit():
            cores = min(cores, int(quota) / int(period))
    return cores


class Memory(NamedTuple):
    """Bytes: what can be had without swapping, and in all; None: not known."""

    free: int | None
    total: int | None


def memory(root: Path = Path("/")) -> Memory:
    """Of this machine, within the limits of the control groups."""
    known = _counts(root / "proc/meminfo")
    free, total = (1024 * known[name] if name in known else None for name in ("MemAvailable:", "MemTotal:"))
    for folder in _control_groups(root, "memory"):
        limit = _text(folder / "memory.max") or _text(folder / "memory.limit_in_bytes") or ""
        used = _text(folder / "memory.current") or _text(folder / "memory.usage_in_bytes") or ""
        if not limit.isdigit() or not used.isdigit() or int(limit) >= (total or 1 << 60):
            continue
        stat = _counts(folder / "memory.stat")
        cache = stat.get("total_inactive_file", stat.get("inactive_file", 0))  # it gives way
        left = max(0, int(limit) - int(used) + cache)
        free, total = left if free is None else min(free, left), int(limit)
    return Memory(free, total)


def disk_free_bytes(path: Path) -> int | None:
    """Free bytes where ``path`` is, or will be."""
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def _control_groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's control group and of those above it, of version 2 and of version 1."""
    mounted = root / "sys/fs/cgroup"
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = mounted / controller if controllers else mounted
        folder = top / path.lstrip("/")
        yield folder
        while folder != top and top in folder.parents:
            folder = folder.parent
            yield folder


def _counts(path: Path) -> dict[str, int]:
    """Lines of a name and a whole number."""
    lines = (line.split() for line in (_text(path) or "").splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def _idle_seconds(root: Path) -> float | None:
    """Seconds in which a core had nothing to do, of all cores together, waiting for a disk included."""
    words = (_text(root / "proc/stat") or "").split("\n")[0].split()
    return sum(map(int, words[4:6])) / os.sysconf("SC_CLK_TCK") if len(words) > 5 and any(map(int, words[1:])) else None


def _cpu_seconds(root: Path) -> Mapping[tuple[int, str], float]:
    """(pid, name) -> CPU seconds of every process that can be seen."""
    seconds = {}
    ticks = os.sysconf("SC_CLK_TCK")
    for folder in (root / "proc").glob("[0-9]*"):
        head, _, tail = (_text(folder / "stat") or "").rpartition(")")
        fields = tail.split()
        if len(fields) > 12:
            seconds[int(folder.name), head.partition("(")[2]] = (int(fields[11]) + int(fields[12])) / ticks
    return seconds


def _load_average(root: Path) -> float | None:
    words = (_text(root / "proc/loadavg") or "").split()
    try:
        return float(words[0])
    except (IndexError, ValueError):
        return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None
