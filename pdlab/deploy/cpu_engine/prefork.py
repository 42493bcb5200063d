"""Fork an engine core from its replica's process, before that process becomes a Ray worker, so that vLLM is imported
once.

In a Ray actor vLLM may not fork, for Ray's threads hold locks and sockets that a child would inherit, and so it
starts its engine core as a new interpreter, which imports vLLM again: seconds of CPU per engine. Here the replica's
process imports vLLM before it imports anything of Ray's and has one thread, forks a child that waits, and goes on to
become Ray's worker; vLLM's engine core is then started in the waiting child, with the arguments, environment and
output that a new interpreter would get.

`pdlab/cluster/site/sitecustomize.py` calls `at_start` where `AT_START` in the environment names this module. Every
process of an engine loads it, so it imports only the standard library and names.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import io
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from multiprocessing import context, popen_spawn_posix, process, reduction, resource_tracker, spawn
from pathlib import Path
from typing import Any, NoReturn

from pdlab.deploy.serving.vllm_names import ASYNC_LLM, ENGINE_CORE

AT_START = "PDLAB_AT_START"
WORKER = "default_worker.py"  # of Ray
ENGINE = (ASYNC_LLM, ENGINE_CORE)
PR_SET_PDEATHSIG = 1
PID_BYTES = 8

_waiting: list[socket.socket] = []
_util: Any = importlib.import_module("multiprocessing.util")


def at_start() -> None:
    """Called at the start of every process that has `AT_START`; only Ray's workers are replicas."""
    script = next((word for word in sys.orig_argv[1:] if word.endswith(".py")), "")
    if Path(script).name == WORKER:
        keep_title_settable()
        importlib.import_module("pdlab.deploy.cpu_engine.engine_template").become_fork()
        fork_after(ENGINE)


def keep_title_settable() -> None:
    """Have `setproctitle` find the title's place, here and in forks. Call it before any import of vLLM.

    It finds the place by the environment that the process started with. Imports of vLLM write variables again, and
    Ray orders them at random: after a write to the first one, no title can be set (`tests/contract/test_faults.py`).
    """
    importlib.import_module("setproctitle").getproctitle()


def fork_after(modules: Sequence[str]) -> None:
    """Import these modules and fork a child that waits for one process to run. Needs a process with one thread."""
    for module in modules:
        importlib.import_module(module)
    gc.freeze()  # what both have stays shared: no collection writes to it
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    if os.fork() == 0:
        ours.close()
        _wait(theirs, parent)
    theirs.close()
    _waiting.append(ours)


def use_in(module: Any) -> None:
    """Make processes of ``module.get_mp_context()`` start in the waiting child if there is one, else as before."""
    ordinary = module.get_mp_context
    module.get_mp_context = lambda: _Context(ordinary())


class _Context:
    """A context of multiprocessing whose processes are `ForkedProcess`."""

    def __init__(self, ordinary: Any) -> None:
        self._ordinary = ordinary

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ordinary, name)

    @staticmethod
    def Process(*args: Any, **kwargs: Any) -> ForkedProcess:
        return ForkedProcess(*args, **kwargs)


class ForkedProcess(context.SpawnProcess):
    """A process that the waiting child becomes; without one a new interpreter."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        return _Popen(process_obj)


class _Popen(popen_spawn_posix.Popen):
    """As multiprocessing starts a new interpreter, with the waiting child in its place."""

    _fds: list[int]

    def _launch(self, process_obj: Any) -> None:
        if not _waiting:
            super()._launch(process_obj)  # type: ignore[misc]
            return
        about = spawn.get_preparation_data(process_obj._name)
        for key in ("init_main_from_path", "init_main_from_name"):
            about.pop(key, None)  # Ray's worker script, which defines nothing
        buffer = io.BytesIO()
        pickle.dump(dict(os.environ), buffer)
        context.set_spawning_popen(self)
        try:
            reduction.dump(about, buffer)
            reduction.dump(process_obj, buffer)
        finally:
            context.set_spawning_popen(None)
        # Arguments with open files are for a new interpreter, which inherits them under their numbers.
        if self._fds or not self._hand_over(buffer.getbuffer()):
            super()._launch(process_obj)  # type: ignore[misc]

    def _hand_over(self, data: memoryview) -> bool:
        """False when the child is gone."""
        parent_r, child_w = os.pipe()  # its other end closes with the child: the sentinel
        child_r, parent_w = os.pipe()  # and this one is open in the child while we live
        read, write = os.pipe()
        out, err = (os.dup(number) for number in (1, 2))
        tracker: Any = resource_tracker.getfd()
        with _waiting.pop() as child, os.fdopen(write, "wb") as pipe:
            try:
                socket.send_fds(child, [b"1"], [read, child_r, child_w, tracker, out, err])
                answer = child.recv(PID_BYTES)
            except OSError:
                answer = b""
            for fd in (read, child_r, child_w, out, err):
                os.close(fd)
            if len(answer) < PID_BYTES:
                _util.close_fds(parent_r, parent_w)
                return False
            pipe.write(data)
        self.pid = int.from_bytes(answer, "little")
        self.sentinel = parent_r
        self.finalizer = _util.Finalize(self, _util.close_fds, (parent_r, parent_w))
        return True


def _wait(end: socket.socket, parent: int) -> NoReturn:
    """What the child does: wait for what to run, and end with its parent."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        word, fds, _, _ = socket.recv_fds(end, 1, 6) if os.getppid() == parent else (b"", [], 0, None)
        code = _run(end, fds) if word else 0
    except BaseException:
        traceback.print_exc()
    finally:
        _util._flush_std_streams()
        os._exit(code)


def _run(end: socket.socket, fds: list[int]) -> int:
    """As multiprocessing's `spawn_main`. Returns the exit code."""
    read, child_r, _child_w, tracker, out, err = fds
    end.sendall(os.getpid().to_bytes(PID_BYTES, "little"))
    end.close()
    for number, fd in ((1, out), (2, err)):
        os.dup2(fd, number)
        os.close(fd)
    resource_tracker._resource_tracker._fd = tracker  # type: ignore[attr-defined]
    myself: Any = process.current_process()
    with os.fdopen(read, "rb") as pipe:
        environment = pickle.load(pipe)
        os.environ.clear()
        os.environ.update(environment)
        myself._inheriting = True
        try:
            spawn.prepare(pickle.load(pipe))
            child: Any = pickle.load(pipe)
        finally:
            del myself._inheriting
    code: int = child._bootstrap(parent_sentinel=child_r)
    return code
