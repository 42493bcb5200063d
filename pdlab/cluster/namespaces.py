"""Linux namespaces: start PID 1 of new ones, start a process in existing ones, enter a network for a block.

The calls are unshare(2) and setns(2) of libc, because Python has them only since 3.12. They change the calling thread,
for the length of a block. All of them need root.
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

# The flags of <sched.h>, with the names of the files of /proc/PID/ns.
FLAGS = {"net": 0x40000000, "ipc": 0x08000000, "uts": 0x04000000, "pid": 0x20000000, "mnt": 0x00020000}
# The mount namespace is entered last: it replaces the root folder.
ALL = ("net", "ipc", "uts", "mnt")
INSIDE = "PDLAB_HOST"  # set for processes on a host made of namespaces: its name
_PR_SET_PDEATHSIG = 1


def unavailable() -> str | None:
    """Why this process cannot make namespaces; None if it can."""
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
    """Start ``command`` as PID 1 of new PID, network, IPC, UTS and mount namespaces.

    ``options`` are Popen's. When it ends, the kernel ends every process in these namespaces. Raises OSError.
    """
    with _pid_namespace(lambda: _unshare("pid")):
        return subprocess.Popen(command, preexec_fn=lambda: _unshare(*ALL), start_new_session=True, **options)


def spawn_in(
    pid: int, command: Sequence[str], *, dies_with_parent: bool = False, **options: Any
) -> subprocess.Popen[bytes]:
    """Start ``command`` in all namespaces of the process ``pid``; ``options`` are Popen's.

    The result is a child of this process with a number of this PID namespace, so signals, waits and exit codes work as
    for any child. ``dies_with_parent``: it gets SIGTERM when this thread ends. Raises OSError.
    """
    with contextlib.ExitStack() as opened:
        folder = Path.cwd()
        files = {kind: opened.enter_context(_namespace_file(pid, kind)) for kind in FLAGS}

        def enter() -> None:
            for kind in ALL:
                _setns(files[kind], kind)
            # Without such a folder the process stays at the root, where setns puts it.
            with contextlib.suppress(OSError):
                os.chdir(folder)
            if dies_with_parent:
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 15)

        with _pid_namespace(lambda: _setns(files["pid"], "pid")):
            return subprocess.Popen(command, preexec_fn=enter, **options)


@contextlib.contextmanager
def network_of(pid: int | None) -> Iterator[None]:
    """Put this thread, and what it starts, into the network namespace of the process ``pid`` for a block.

    None changes nothing. A socket stays in the namespace in which it was made. Raises OSError.
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
    """Start the block's children in the PID namespace that ``switch`` selects."""
    with _namespace_file(os.getpid(), "pid") as own:
        switch()
        try:
            yield
        finally:
            _setns(own, "pid")


@contextlib.contextmanager
def _namespace_file(pid: int, kind: str) -> Iterator[int]:
    # The thread's own file: a thread may be in another network than its process.
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
