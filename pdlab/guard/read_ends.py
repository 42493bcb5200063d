"""Report the ends of KV reads to decode's scheduler before the output of a step.

vLLM's workers check for ends when a step starts, and the scheduler gets them with the output of that step. That is one
step later, or two with asynchronous scheduling. Here the same thread of a worker also checks while it waits for the
next step, with the same calls, and sends a datagram to the engine core. The output of a step reports every end too. So
a lost datagram, or a worker on another machine, costs only one step.
"""

from __future__ import annotations

import contextlib
import functools
import json
import secrets
import socket
import threading
from collections.abc import Iterable
from typing import Any, Protocol

from pdlab.guard.vllm_names import SpinCondition

POLL_KEY = "pdlab_poll_s"
# Field of vLLM's connector metadata with the address for the datagrams.
ENDS_ADDRESS = "pdlab_tell_at"
_HERE = "127.0.0.1"
_NAMES_AT_ONCE = 200  # a request's name is shorter than 100 bytes, and a datagram longer than 60,000
_BYTES = 65535

Address = tuple[int, str]


class PollingWorker(Protocol):
    """Interface of `pdlab.guard.worker.GuardWorker`. ``poll_s``: 0 if it checks only in steps."""

    poll_s: float

    def look(self) -> None: ...

    def check_if_due(self) -> bool: ...


class _Thread(threading.local):
    worker: PollingWorker | None = None


_thread = _Thread()


def register_worker(worker: PollingWorker) -> None:
    """Register this thread as the one that runs the worker's steps: only this thread calls its NIXL."""
    _thread.worker = worker
    wait = SpinCondition.wait
    if worker.poll_s <= 0 or hasattr(wait, "__wrapped__"):
        return

    @functools.wraps(wait)
    def look_and_wait(condition: Any, timeout_ms: int | None = None) -> None:
        own = _thread.worker
        if own is not None and own.check_if_due():
            at_most_ms = max(1, int(1e3 * own.poll_s))
            timeout_ms = at_most_ms if timeout_ms is None else min(timeout_ms, at_most_ms)
        wait(condition, timeout_ms)

    SpinCondition.wait = look_and_wait


def report_ends(address: Address, worker: int, names: Iterable[str]) -> None:
    """Send the names of requests whose reads by this worker have ended well. Sent once, without an acknowledgement."""
    port, word = address
    told = sorted(names)
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for begin in range(0, len(told), _NAMES_AT_ONCE):
            message = {"word": word, "worker": worker, "names": told[begin : begin + _NAMES_AT_ONCE]}
            sender.sendto(json.dumps(message).encode(), (_HERE, port))


class ReadEndReceiver:
    """The receiver in the engine core. A read has ended when all ``workers`` have reported it."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((_HERE, 0))
        self._socket.setblocking(False)
        # The word identifies the engine: a worker of another engine may send to the same port.
        self.address: Address = (self._socket.getsockname()[1], secrets.token_hex(8))
        self._told: dict[str, set[int]] = {}
        self._handed_on: set[str] = set()

    def take(self) -> set[str]:
        """Requests whose reads have ended on all workers since the last call. Each request is returned once."""
        if (own := _thread.worker) is not None:
            own.look()  # the engine runs its worker in this process
        ended: set[str] = set()
        with contextlib.suppress(BlockingIOError):
            while True:
                worker, names = self._read(self._socket.recv(_BYTES))
                for name in names:
                    told = self._told.setdefault(name, set())
                    told.add(worker)
                    if len(told) == self._workers:
                        ended.add(name)
        self._handed_on |= ended
        return ended

    def not_taken(self, names: Iterable[str]) -> set[str]:
        """The requests of a step's output that `take` has not returned."""
        new = set(names)
        for name in new:
            self._told.pop(name, None)
        known = new & self._handed_on
        self._handed_on -= known
        return new - known

    def close(self) -> None:
        self._socket.close()

    def _read(self, message: bytes) -> tuple[int, list[str]]:
        with contextlib.suppress(ValueError, TypeError, KeyError):
            told = json.loads(message)
            if told["word"] == self.address[1]:
                return int(told["worker"]), [str(name) for name in told["names"]]
        return 0, []
