"""Find and signal processes of a node. Sent to the nodes by value: imports only the standard library and psutil.

A process is identified by its number and its start time (clock ticks since boot, field 22 of /proc/PID/stat), because
the kernel reuses numbers. psutil has this time only in seconds of a clock that may be set.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

RAYLET = "raylet"
PREPARATION_S = 0.3  # delay of a signal that may hit this actor, so that the actor can answer first
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

# Runs in its own process, so that a stopped process continues also if this actor ends. Its argument is JSON: processes,
# and signals with the seconds to wait before each.
WATCHER = """
import contextlib, json, os, signal, sys, time
order = json.loads(sys.argv[1])
def started(pid):
    with open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rsplit(b")", 1)[1].split()[19])
for wait_s, number in order["signals"]:
    time.sleep(wait_s)
    for pid, start in order["processes"]:
        with contextlib.suppress(OSError, IndexError, ValueError):
            handle = os.pidfd_open(pid)
            try:
                if started(pid) == start:
                    signal.pidfd_send_signal(handle, number)
            finally:
                os.close(handle)
"""


# Forks, so that the watcher is not a child of a node's process and survives the kill of a node. Prints its number.
SENDER = """
import os, sys
pid = os.fork()
if pid:
    print(pid)
else:
    os.setsid()
    os.dup2(0, 1)
    exec(sys.argv[2])
"""


class NodeActor:
    """A Ray actor on a node: with it an act does not need the start of a process."""

    def survey(self, mark: str | None, ports: bool) -> dict[str, Any]:
        return survey(mark, ports)

    def send(self, processes: list[tuple[int, int]], number: int) -> list[int]:
        return send(processes, number)

    def send_later(self, processes: list[tuple[int, int]], signals: list[tuple[float, int]]) -> tuple[int, int]:
        return send_later(processes, signals)

    def run(self, command: list[str]) -> str:
        return run(command)


def survey(mark: str | None, ports: bool = True) -> dict[str, Any]:
    """Processes of this node: descendants of its raylet, and those with ``mark`` (``NAME=VALUE``) in the environment.

    Returns ``raylet``: its number, None if this process is not its descendant. ``own``: the number of this process.
    ``processes``: number -> parent, start time in ticks, title, resident bytes, and its listening TCP ports (empty
    without ``ports``). ``space``: identifies the machine and container of these process numbers.
    """
    table = _table()
    raylet = next((pid for pid in _ancestors(os.getpid(), table) if table[pid]["name"] == RAYLET), None)
    chosen = {raylet, *_below(raylet, table)} if raylet is not None else set()
    if mark is not None:
        chosen |= {pid for pid in table if mark.encode() in _environment(pid)}
    return {
        "space": f"{_text('/proc/sys/kernel/random/boot_id').strip()} {_link('/proc/self/ns/pid')}",
        "raylet": raylet,
        "own": os.getpid(),
        "processes": {
            pid: {key: table[pid][key] for key in ("parent", "started", "title", "rss_bytes")}
            | {"ports": _listening(pid) if ports else []}
            for pid in sorted(chosen & set(table))
        },
    }


def send(processes: list[tuple[int, int]], number: int) -> list[int]:
    """Send a signal to every (number, start time) that still exists; returns the numbers that got it."""
    hit = []
    for pid, started in processes:
        with contextlib.suppress(OSError):
            handle = os.pidfd_open(pid)
            try:
                if started_at(pid) == started:
                    signal.pidfd_send_signal(handle, number)
                    hit.append(pid)
            finally:
                os.close(handle)
    return hit


def send_later(processes: list[tuple[int, int]], signals: list[tuple[float, int]]) -> tuple[int, int]:
    """Start a process that sends each signal this many seconds after the previous one.

    Returns the number and start time of that process at once; its end cancels the signals.
    """
    order = json.dumps({"processes": processes, "signals": signals})
    command = [sys.executable, "-I", "-S", "-c", SENDER, order, WATCHER]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True, env={},
        cwd="/",
    )  # fmt: skip
    pid = int(done.stdout)
    return pid, started_at(pid) or 0


def run(command: list[str]) -> str:
    """Standard output of a short command. Raises OSError with its error output if it fails."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30)
    if done.returncode:
        complaint = " ".join((done.stderr or done.stdout).split())
        raise OSError(f"`{' '.join(command)}` fails: {complaint or f'exit code {done.returncode}'}")
    return done.stdout


def started_at(pid: int) -> int | None:
    """Start time in clock ticks since boot; None for a process that does not exist or is a zombie."""
    fields = _stat(pid)
    return None if fields is None or fields[0] == "Z" else int(fields[19])


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the third on."""
    text = _text(f"/proc/{pid}/stat")
    return text.rsplit(")", 1)[1].split() if ")" in text else None


def _table() -> dict[int, dict[str, Any]]:
    table = {}
    for path in Path("/proc").iterdir():
        if not path.name.isdigit():
            continue
        pid = int(path.name)
        fields = _stat(pid)
        if fields is None or fields[0] == "Z":
            continue
        table[pid] = {
            "parent": int(fields[1]),
            "started": int(fields[19]),
            "rss_bytes": int(fields[21]) * PAGE_BYTES,
            "name": _text(f"/proc/{pid}/comm").strip(),
            "title": _text(f"/proc/{pid}/cmdline").replace("\0", " ").strip(),
        }
    return table


def _ancestors(pid: int, table: dict[int, dict[str, Any]]) -> list[int]:
    line = []
    while pid in table and pid not in line:
        line.append(pid)
        pid = table[pid]["parent"]
    return line


def _below(top: int, table: dict[int, dict[str, Any]]) -> set[int]:
    return {pid for pid in table if pid != top and top in _ancestors(pid, table)}


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _listening(pid: int) -> list[int]:
    """TCP ports on which the process listens."""
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        found = psutil.Process(pid).net_connections("tcp")
        return sorted({each.laddr.port for each in found if each.status == psutil.CONN_LISTEN})
    return []


def _link(path: str) -> str:
    try:
        return str(Path(path).readlink())
    except OSError:
        return ""


def _text(path: str) -> str:
    try:
        return Path(path).read_bytes().decode(errors="replace")
    except OSError:
        return ""
