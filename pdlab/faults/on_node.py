"""Find and signal processes of a node.

Sent to the nodes by value: imports only the standard library, `pdlab.remote` and psutil, which Ray installs. A process
is identified by its number and its start time (`pdlab.remote.kernel_files.started_ticks`).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from typing import Any

from pdlab.remote.kernel_files import boot_id, inherited, namespace, started_ticks, state

RAYLET = "raylet"
PREPARATION_S = 0.3  # delay of a signal that may hit this actor, so that the actor can answer first

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


def survey(mark: str | None, ports: bool = True) -> dict[str, Any]:
    """Processes of this node: descendants of its raylet, and those with ``mark`` (``NAME=VALUE``) in the environment.

    Returns ``raylet``: its number, None if this process is not its descendant. ``own``: the number of this process.
    ``processes``: number -> parent, start time in ticks, title, resident bytes, and its listening TCP ports (empty
    without ``ports``). ``space``: identifies the machine and container of these process numbers.
    """
    import psutil

    own = psutil.Process()
    raylet = next((process for process in (own, *own.parents()) if process.name() == RAYLET), None)
    chosen = set() if raylet is None else {raylet, *raylet.children(recursive=True)}
    if mark is not None:
        chosen |= {process for process in psutil.process_iter() if _has_mark(process.pid, mark)}
    facts = {process.pid: _facts(process, ports) for process in sorted(chosen, key=lambda process: process.pid)}
    return {
        "space": f"{boot_id()} {namespace('pid')}",
        "raylet": None if raylet is None else raylet.pid,
        "own": own.pid,
        "processes": {pid: fact for pid, fact in facts.items() if fact is not None},
    }


def _has_mark(pid: int, mark: str) -> bool:
    with contextlib.suppress(OSError):  # it has ended, or belongs to another user
        return inherited(pid, mark)
    return False


def _facts(process: Any, ports: bool) -> dict[str, Any] | None:
    """None for a process that has ended."""
    import psutil

    with contextlib.suppress(psutil.Error), process.oneshot():
        if (started := started_ticks(process.pid)) is None:
            return None
        return {
            "parent": process.ppid(),
            "started": started,
            "title": " ".join(process.cmdline()).strip(),
            "rss_bytes": process.memory_info().rss,
            "ports": _listening(process) if ports else [],
        }
    return None


def send(processes: list[tuple[int, int]], number: int) -> list[int]:
    """Send a signal to every (number, start time) that still exists; returns the numbers that got it."""
    hit = []
    for pid, started in processes:
        with contextlib.suppress(OSError):
            handle = os.pidfd_open(pid)
            try:
                if started_ticks(pid) == started:
                    signal.pidfd_send_signal(handle, number)
                    hit.append(pid)
            finally:
                os.close(handle)
    return hit


def states(processes: list[tuple[int, int]]) -> list[str | None]:
    """The state letter of every (number, start time) as in /proc; None for one that has ended."""
    return [state(pid) if started_ticks(pid) == started else None for pid, started in processes]


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
    return pid, started_ticks(pid) or 0


def run(command: list[str]) -> str:
    """Standard output of a short command. Raises OSError with its error output if it fails."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30)
    if done.returncode:
        reason = " ".join((done.stderr or done.stdout).split())
        raise OSError(f"`{' '.join(command)}` fails: {reason or f'exit code {done.returncode}'}")
    return done.stdout


def _listening(process: Any) -> list[int]:
    """TCP ports on which the process listens."""
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        found = process.net_connections("tcp")
        return sorted({each.laddr.port for each in found if each.status == psutil.CONN_LISTEN})
    return []


class NodeActor:
    """A Ray actor on a node: with it an act does not need the start of a process."""

    survey, send, states = staticmethod(survey), staticmethod(send), staticmethod(states)
    send_later, run = staticmethod(send_later), staticmethod(run)
