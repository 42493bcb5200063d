"""PID 1 of a host made of namespaces: ``namespace_init.py NAME FOLDER OWNER``. Imports nothing of pdlab.

OWNER marks the process; `pdlab.cluster.two_hosts.strays` finds it by this word. The process gives the host its name
and its own /proc, /sys (where UCX looks for NICs), /dev/shm and /etc/hosts. It prints ``ready`` and waits for a line on
standard input. If the input ends without a line, its parent died: it ends, and the kernel ends everything in its
namespaces. After the line it only reaps child processes, until SIGTERM.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
from pathlib import Path

MS_BIND, MS_MOVE, MS_REC, MS_PRIVATE = 4096, 8192, 16384, 1 << 18


def mount(source: str, target: str, kind: str | None = None, flags: int = 0) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    words = [word.encode() if word is not None else None for word in (source, target, kind)]
    if libc.mount(*words, ctypes.c_ulong(flags), None) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"mount {source} on {target}: {os.strerror(error)}")


def furnish(name: str, folder: Path) -> None:
    """Mount the host's own file systems. ``folder`` has the file ``hosts`` and an empty folder ``NAME``."""
    mount("none", "/", flags=MS_REC | MS_PRIVATE)
    mount("proc", "/proc", "proc")
    mount("tmpfs", "/dev/shm", "tmpfs")
    sys_mount = str(folder / name)
    mount("sysfs", sys_mount, "sysfs")
    cgroups = Path("/sys/fs/cgroup")
    if cgroups.is_dir():  # Ray reads its memory limit there
        with contextlib.suppress(OSError):
            mount(str(cgroups), f"{sys_mount}/fs/cgroup", flags=MS_BIND | MS_REC)
    mount(sys_mount, "/sys", flags=MS_MOVE)
    mount(str(folder / "hosts"), "/etc/hosts", flags=MS_BIND)
    socket.sethostname(name)


def reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def main() -> None:
    # The kernel does not deliver signals without a handler to PID 1. The handlers only wake the loop below.
    woken, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(wake)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    furnish(sys.argv[1], Path(sys.argv[2]))
    print("ready", flush=True)
    watched = [woken, 0]
    while True:
        readable, _, _ = select.select(watched, [], [])
        if woken in readable:
            if signal.SIGTERM in os.read(woken, 512):
                return
            reap()
        if 0 in readable:
            if not os.read(0, 512):
                return
            watched.remove(0)
            for stream in (0, 1, 2):  # keep no terminal or pipe open
                os.dup2(os.open(os.devnull, os.O_RDWR), stream)


if __name__ == "__main__":
    main()
