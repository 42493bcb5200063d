"""One process that has imported vLLM, of which the replicas of CPU engines are forked: vLLM is imported once for all.

The launcher starts it when it starts local Ray nodes (`pdlab.cluster.local_nodes`), and it ends with them. A Ray worker
that becomes a replica requests a fork of it before it imports anything large. The fork takes over the worker's command,
environment, folder and output, and goes on as the worker: Ray identifies a worker by what registers, not by what it
started. The process that Ray started waits for the fork, and the template ends a fork whose worker's process is gone.

Where there is no such process, or where the worker's environment differs in a variable that vLLM may read when it is
imported, the worker imports vLLM itself. Imports only the standard library and names.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from pdlab.deploy.cpu_engine import prefork
from pdlab.deploy.serving.ray_names import RAYLET
from pdlab.deploy.serving.vllm_names import RAY_UTILS

SOCKET = "PDLAB_ENGINE_TEMPLATE"  # the path of its socket, in the environment of the nodes' processes
# Of Ray, of UCX and NIXL, which the template has not loaded, and which node it is (`pdlab.cluster.loopback`).
MAY_DIFFER = ("RAY_", "UCX_", "NIXL_", "PDLAB_NODE", "SPT_NOENV")
# Its C++ part reads the worker's environment when it is imported: the template does without, a fork imports it.
RAY = "ray"
WAIT_S = 300.0  # for a template that still imports, on a busy machine
_PEER = struct.Struct("3i")


class Worker(NamedTuple):
    """What the fork takes over: words of the command, environment, folder."""

    command: tuple[str, ...]
    environment: dict[str, str]
    folder: str


def main() -> None:
    """Import vLLM and serve forks until somebody ends this process; a fork returns when its worker's script has."""
    os.environ["SPT_NOENV"] = "1"  # Ray gives it to its workers: their titles leave the environment as it is
    before = dict(os.environ)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.environ[SOCKET])
        listener.listen(64)
        _import()
        worker, fds = _serve(listener, before)
    _go_on(worker, fds)


def _import() -> None:
    prefork.keep_title_settable()
    modules: Any = sys.modules
    modules[RAY] = None
    for module in prefork.ENGINE:
        importlib.import_module(module)
    del modules[RAY]
    if importlib.import_module("psutil").Process().num_threads() > 1:
        raise SystemExit("something of vLLM started a thread at its import: no process can be forked of this one")
    gc.freeze()  # what forks share stays shared: no collection writes to it


def _serve(listener: socket.socket, before: Mapping[str, str]) -> tuple[Worker, list[int]]:
    """Fork for every worker that requests it and has the environment of ``before``; returns in each fork."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks leave no zombies
    forks: dict[int, int] = {}  # by pidfds: a worker's process, its fork
    while True:
        ready, _, _ = select.select([listener.fileno(), *forks], [], [])
        for ended in forks.keys() & ready:
            _end(ended, forks.pop(ended))
        if listener.fileno() not in ready:
            continue
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError, ValueError):
            worker, fds = _receive(connection)
            asking = os.pidfd_open(_peer(connection))
            differ = differing(before, worker.environment)
            pid = -1 if differ else os.fork()
            if pid == 0:
                for fd in (asking, *forks, *forks.values()):
                    os.close(fd)
                return worker, fds
            for fd in fds:
                os.close(fd)
            if differ:
                print("not forked, for the environment differs:", *differ, flush=True)
                os.close(asking)
                continue
            forks[asking] = os.pidfd_open(pid)
            connection.sendall(pid.to_bytes(prefork.PID_BYTES, "little"))


def become_fork() -> None:
    """In a worker: have a fork of the template go on as this process, and end with it. Returns where none can."""
    path = os.environ.get(SOCKET)
    if not path:
        return
    worker = Worker(tuple(sys.orig_argv), dict(os.environ), str(Path.cwd()))
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(WAIT_S)
        connection.connect(path)
        socket.send_fds(connection, [b"1"], [0, 1, 2])
        connection.sendall(json.dumps(worker).encode())
        connection.shutdown(socket.SHUT_WR)
        answer = connection.recv(prefork.PID_BYTES)
        if len(answer) == prefork.PID_BYTES:
            _wait_for(int.from_bytes(answer, "little"))


def differing(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Names of the variables in which two environments differ, but those that are read after the fork."""
    names = {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}
    return sorted(name for name in names if not name.startswith(MAY_DIFFER))


def _receive(connection: socket.socket) -> tuple[Worker, list[int]]:
    _, fds, _, _ = socket.recv_fds(connection, 1, 3)
    with connection.makefile("rb") as file:
        command, environment, folder = json.loads(file.read())
    return Worker(tuple(command), environment, folder), fds


def _peer(connection: socket.socket) -> int:
    """The process at the other end."""
    pid: int = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))[0]
    return pid


def _end(worker: int, fork: int) -> None:
    """End the fork of a worker's process that has ended; one that is stopped, too."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(fork, signal.SIGKILL)
    os.close(worker)
    os.close(fork)


def _wait_for(pid: int) -> NoReturn:
    with contextlib.suppress(ProcessLookupError):
        fork = os.pidfd_open(pid)
        signal.signal(signal.SIGTERM, lambda *_: signal.pidfd_send_signal(fork, signal.SIGTERM))
        select.select([fork], [], [])
    os._exit(0)


def _go_on(worker: Worker, fds: Sequence[int]) -> None:
    """Run the worker's script in this fork, as its interpreter would have."""
    os.setsid()  # raylets end a worker's whole process group
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(worker.folder)
    os.environ.clear()
    os.environ.update(worker.environment)
    script = next(number for number, word in enumerate(worker.command) if word.endswith(prefork.WORKER))
    sys.orig_argv = list(worker.command)
    sys.argv = list(worker.command[script:])
    sys.path[0] = str(Path(sys.argv[0]).parent)
    importlib.import_module("numpy.random").seed()
    if RAY_UTILS in sys.modules:
        importlib.reload(sys.modules[RAY_UTILS])
        # Ray's own looks for the place by the environment that the process started with.
        raylet: Any = importlib.import_module(RAYLET)
        raylet.setproctitle = importlib.import_module("setproctitle").setproctitle
    prefork.fork_after(prefork.ENGINE)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
