"""Linux namespaces: start a process that is PID 1 of new ones, start processes in those of another, visit a network.

The wrappers are thin (unshare(2), setns(2), both through libc, for Python has them since 3.12 only) and
change only the calling thread, for as long as their block lasts. All of it needs root.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

# The flags of <sched.h>, named as the files of /proc/PID/ns are.
FLAGS = {"net": 0x40000000, "ipc": 0x08000000, "uts": 0x04000000, "pid": 0x20000000, "mnt": 0x00020000}
# A process's root folder belongs to its mount namespace, so that one is entered last.
ALL = ("net", "ipc", "uts", "mnt")
INSIDE = "PDLAB_HOST"  # set for processes on a host made of namespaces: its name
_PR_SET_PDEATHSIG = 1


def unavailable() -> str | None:
    """Why this process cannot make namespaces; None when it can."""
    if sys.platform != "linux":
        return f"namespaces are Linux's, this is {sys.platform}"
    if os.geteuid() != 0:
        return "making network namespaces requires root: run it as root (sudo)"
    missing = [kind for kind in FLAGS if not Path(f"/proc/self/ns/{kind}").exists()]
    if missing:
        return f"this kernel has no {', '.join(missing)} namespaces"
    try:
        subprocess.run(["true"], preexec_fn=lambda: _unshare(*FLAGS), check=True)
    except (OSError, subprocess.SubprocessError):
        return "root may not make namespaces here, as in a container without the capability SYS_ADMIN"
    return None


def spawn_init(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start ``command`` as PID 1 of a new PID namespace, with network, IPC, UTS and mount namespaces of its own.

    ``options`` are Popen's. Whatever is started in these namespaces ends with it. Raises OSError.
    """
    with _pid_namespace(lambda: _unshare("pid")):
        return subprocess.Popen(command, preexec_fn=lambda: _unshare(*ALL), start_new_session=True, **options)


def spawn_in(
    pid: int, command: Sequence[str], *, dies_with_parent: bool = False, **options: Any
) -> subprocess.Popen[bytes]:
    """Start ``command`` in all namespaces of the process ``pid``; ``options`` are Popen's.

    It is a child of this process, known here by a number of this PID namespace: signals, waiting and
    its exit code are as for any other. ``dies_with_parent``: SIGTERM when this thread ends. Raises OSError.
    """
    with contextlib.ExitStack() as opened:
        folder = Path.cwd()
        files = {kind: opened.enter_context(_namespace_file(pid, kind)) for kind in FLAGS}

        def enter() -> None:
            for kind in ALL:
                _setns(files[kind], kind)
            # Where there is no such folder it stays at the root, where setns puts it.
            with contextlib.suppress(OSError):
                os.chdir(folder)
            if dies_with_parent:
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 15)

        with _pid_namespace(lambda: _setns(files["pid"], "pid")):
            return subprocess.Popen(command, preexec_fn=enter, **options)


@contextlib.contextmanager
def network_of(pid: int | None) -> Iterator[None]:
    """Within the block this thread, and what it starts, is in the network namespace of the process ``pid``.

    None: it stays where it is. Sockets keep the namespace that they were made in. Raises OSError.
    """
    if pid is None:
        yield
        return
    with _namespace_file(os.getpid(), "net") as own:
        with _namespace_file(pid, "net") as other:
            _setns(other, "net")
        try:
            yield
        finally:
            _setns(own, "net")


@contextlib.contextmanager
def _pid_namespace(switch: Callable[[], None]) -> Iterator[None]:
    """Children that are started in the block are in the PID namespace that ``switch`` switches to."""
    with _namespace_file(os.getpid(), "pid") as own:
        switch()
        try:
            yield
        finally:
            _setns(own, "pid")


@contextlib.contextmanager
def _namespace_file(pid: int, kind: str) -> Iterator[int]:
    # The thread's own, for a thread may be in another network than its process.
    path = f"/proc/thread-self/ns/{kind}" if pid == os.getpid() else f"/proc/{pid}/ns/{kind}"
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield file
    finally:
        os.close(file)


def _unshare(*kinds: str) -> None:
    flags = 0
    for kind in kinds:
        flags |= FLAGS[kind]
    _call("unshare", flags)


def _setns(file: int, kind: str) -> None:
    _call("setns", file, FLAGS[kind])


def _call(name: str, *numbers: int) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*numbers) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
