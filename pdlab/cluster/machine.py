"""Free cores, memory and disk of this machine, and facts of its processes.

The limits of the control group are included. An unknown value is None. ``root``: folder whose /proc and /sys have the
control groups, which psutil lacks. It has the other facts here.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pdlab.remote.kernel_files import opened, read

LOOK_S = 1.0
BUSY_CORES = 0.2
# In the command line of vLLM's engine cores and workers as long as they have no title. `setproctitle` sets none in a
# process that changed the first variable of its environment, and Ray orders a worker's environment at random.
SPAWNED = "from multiprocessing.spawn import spawn_main"


class BusyProcess(NamedTuple):
    """A process and the cores that it used on average while the machine was observed."""

    pid: int
    name: str
    cores: float


class Machine(NamedTuple):
    """``cores``: usable by this process; ``idle_cores``: unused ones during the observation. ``memory_free_bytes``:
    available without swapping; ``memory_bytes``: in total. ``busy``: processes with the most CPU use, descending."""

    cores: float
    idle_cores: float | None
    memory_free_bytes: int | None
    memory_bytes: int | None
    load_average: float | None
    busy: tuple[BusyProcess, ...] = ()


def observe(root: Path = Path("/"), observe_s: float = LOOK_S) -> Machine:
    """Observe this machine for ``observe_s`` seconds."""
    before, idle_before_s = _cpu_seconds(), _idle_seconds()
    began = time.monotonic()
    time.sleep(observe_s)
    elapsed_s = max(time.monotonic() - began, 1e-3)
    after, idle_after_s = _cpu_seconds(), _idle_seconds()
    every = [
        BusyProcess(process.pid, process.info["name"], (used_s - before[process]) / elapsed_s)
        for process, used_s in after.items()
        if process in before and process.pid != os.getpid()
    ]
    busy = sorted((each for each in every if each.cores >= BUSY_CORES), key=lambda each: -each.cores)
    cores = usable_cores(root)
    free, total = memory(root)
    # The lower of two figures: processes of other containers are not visible, but their CPU use is.
    idle = [cores - sum(each.cores for each in every)] if after else []
    if idle_before_s is not None and idle_after_s is not None:
        idle.append((idle_after_s - idle_before_s) / elapsed_s)
    return Machine(
        cores=cores,
        idle_cores=max(0.0, min(idle)) if idle else None,
        memory_free_bytes=free,
        memory_bytes=total,
        load_average=os.getloadavg()[0],
        busy=tuple(busy),
    )


def usable_cores(root: Path = Path("/")) -> float:
    """Cores that this process may run on, limited by the quota of its control group."""
    cores = float(len(os.sched_getaffinity(0)))
    for folder in _control_groups(root, "cpu"):
        quota, _, period = (read(folder / "cpu.max") or "").partition(" ")
        quota = quota or read(folder / "cpu.cfs_quota_us") or ""
        period = period or read(folder / "cpu.cfs_period_us") or ""
        if quota.isdigit() and period.isdigit():
            cores = min(cores, int(quota) / int(period))
    return cores


class FreeMemory(NamedTuple):
    """Bytes available without swapping, and in total."""

    free: int
    total: int


def memory(root: Path = Path("/")) -> FreeMemory:
    """Memory of this machine, within the limits of the control groups."""
    import psutil

    whole = psutil.virtual_memory()
    free, total = whole.available, whole.total
    for folder in _control_groups(root, "memory"):
        limit = read(folder / "memory.max") or read(folder / "memory.limit_in_bytes") or ""
        used = read(folder / "memory.current") or read(folder / "memory.usage_in_bytes") or ""
        if not limit.isdigit() or not used.isdigit() or int(limit) >= total:
            continue
        stat = _counts(folder / "memory.stat")
        cache = stat.get("total_inactive_file", stat.get("inactive_file", 0))  # the kernel frees it on demand
        left = max(0, int(limit) - int(used) + cache)
        free, total = min(free, left), int(limit)
    return FreeMemory(free, total)


def disk_free_bytes(path: Path) -> int | None:
    """Free bytes of the file system that has, or will have, ``path``."""
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def writes_below(pid: int, folder: str, *, through_any: bool = False) -> bool:
    """Whether standard output or error of the process is a file in ``folder``; with ``through_any``: any open file."""
    numbers = () if through_any else (1, 2)
    return any(target.startswith(f"{folder}/") for target in opened(pid, *numbers))


def command_line(pid: int) -> list[str]:
    """The words of the process's command; empty if it is gone."""
    import psutil

    with contextlib.suppress(psutil.Error):
        return list(psutil.Process(pid).cmdline())
    return []


def _control_groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's control group and its parents, of versions 2 and 1."""
    mounted = root / "sys/fs/cgroup"
    for line in (read(root / "proc/self/cgroup") or "").splitlines():
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
    """Name -> whole number, from lines of the form ``NAME NUMBER``."""
    lines = (line.split() for line in (read(path) or "").splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def _idle_seconds() -> float | None:
    """Idle seconds of all cores, with waits for a disk. None if the kernel does not count them (some sandboxes)."""
    import psutil

    times = psutil.cpu_times()
    return float(times.idle + times.iowait) if any(times) else None


def _cpu_seconds() -> dict[Any, float]:
    """psutil's process, with its name in ``info`` -> CPU seconds, for every visible process."""
    import psutil

    found = {process: process.info["cpu_times"] for process in psutil.process_iter(["name", "cpu_times"])}
    return {process: times.user + times.system for process, times in found.items() if times is not None}
