"""What acts on processes of a node. Sent to the nodes by value: it imports only the standard library, and psutil.

A process is named by its number and its start time (clock ticks since boot, field 22 of /proc/PID/stat), so that a
number that was given again is never signalled. psutil has that time only in seconds of a clock that may be set.
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
PREPARATION_S = 0.3  # so that whoever ordered it has the answer before its own process is hit
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

# A process of its own, so that what is stopped goes on in time whatever becomes of the one that stopped it. Takes, as
# JSON: processes, signals with the seconds to wait before each.
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


# Forks once more, so that the watcher is nobody's child and no node's process: a node that is killed does not take it
# along. Says the watcher's number.
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
    """Acts on one node; a Ray actor that is pinned there, so that an act needs no process to be started for it."""

    def survey(self, mark: str | None, ports: bool) -> dict[str, Any]:
        return survey(mark, ports)

    def send(self, processes: list[tuple[int, int]], number: int) -> list[int]:
        return send(processes, number)

    def send_later(self, processes: list[tuple[int, int]], signals: list[tuple[float, int]]) -> tuple[int, int]:
        return send_later(processes, signals)

    def run(self, command: list[str]) -> str:
        return run(command)


def survey(mark: str | None, ports: bool = True) -> dict[str, Any]:
    """Processes of this node: all below its raylet, and those with ``mark`` (``NAME=VALUE``) in their environment.

    ``raylet``: its number, None where this process is not a child of one. ``own``: the number of this process.
    ``processes``: number -> parent, start time in ticks, title, resident bytes, TCP ports on which it listens (none
    without ``ports``). ``space``: tells this set of process numbers from those of other machines and containers.
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
    """Send a signal to every (number, start time) that is still that process; returns the numbers that were hit."""
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
    """Have a process of its own send each signal, so many seconds after the one before; returns that process's number
    and start time at once: whoever ends it takes the order back."""
    order = json.dumps({"processes": processes, "signals": signals})
    command = [sys.executable, "-I", "-S", "-c", SENDER, order, WATCHER]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True, env={},
        cwd="/",
    )  # fmt: skip
    pid = int(done.stdout)
    return pid, started_at(pid) or 0


def run(command: list[str]) -> str:
    """What a short command prints. Raises OSError with its complaint where it fails."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30)
    if done.returncode:
        complaint = " ".join((done.stderr or done.stdout).split())
        raise OSError(f"`{' '.join(command)}` fails: {complaint or f'exit code {done.returncode}'}")
    return done.stdout


def started_at(pid: int) -> int | None:
    """Start time in clock ticks since boot; None: there is no such process, or it has ended and is not yet reaped."""
    fields = _stat(pid)
    return None if fields is None or fields[0] == "Z" else int(fields[19])


def _stat(pid: int) -> list[str] | None:
    """Fields 3 and on of /proc/PID/stat."""
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
