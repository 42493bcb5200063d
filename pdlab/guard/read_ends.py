"""The ends of reads, told to decode's scheduler without waiting for the output of a step.

vLLM's workers look for them when a step is launched, and the scheduler hears of it with that step's output: one step
later, two with asynchronous scheduling. Here the same thread of a worker looks, by the same calls, also while it waits
for the next step, and tells the engine core by a datagram. Every end comes once more with a step's output, as vLLM has
it: a datagram that is lost, and a worker on another machine, cost that step and nothing else.
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
# The field of vLLM's connector metadata that says where workers tell it.
TELL_AT = "pdlab_tell_at"
_HERE = "127.0.0.1"
_NAMES_AT_ONCE = 200  # a request's name is shorter than 100 bytes, and a datagram longer than 60,000
_BYTES = 65535

Address = tuple[int, str]


class LooksForEnds(Protocol):
    """`pdlab.guard.worker.GuardWorker`. ``poll_s``: 0 where it looks in steps only."""

    poll_s: float

    def look(self) -> None: ...

    def look_if_due(self) -> bool: ...


class _Thread(threading.local):
    worker: LooksForEnds | None = None


_thread = _Thread()


def works_here(worker: LooksForEnds) -> None:
    """This thread runs the worker's steps, and no other one asks its NIXL."""
    _thread.worker = worker
    wait = SpinCondition.wait
    if worker.poll_s <= 0 or hasattr(wait, "__wrapped__"):
        return

    @functools.wraps(wait)
    def look_and_wait(condition: Any, timeout_ms: int | None = None) -> None:
        own = _thread.worker
        if own is not None and own.look_if_due():
            at_most_ms = max(1, int(1e3 * own.poll_s))
            timeout_ms = at_most_ms if timeout_ms is None else min(timeout_ms, at_most_ms)
        wait(condition, timeout_ms)

    SpinCondition.wait = look_and_wait


def tell(address: Address, worker: int, names: Iterable[str]) -> None:
    """This worker has read for these requests, whose blocks are written. Sent once; lost where nobody listens."""
    port, word = address
    told = sorted(names)
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for begin in range(0, len(told), _NAMES_AT_ONCE):
            message = {"word": word, "worker": worker, "names": told[begin : begin + _NAMES_AT_ONCE]}
            sender.sendto(json.dumps(message).encode(), (_HERE, port))


class EndsHeard:
    """In the engine core. A read has ended when each of ``workers`` has told so."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((_HERE, 0))
        self._socket.setblocking(False)
        # The word is the engine's: a worker of another one, on another machine, may have the same port told.
        self.address: Address = (self._socket.getsockname()[1], secrets.token_hex(8))
        self._told: dict[str, set[int]] = {}
        self._handed_on: set[str] = set()

    def take(self) -> set[str]:
        """Requests whose reads have ended since, by the word of all workers; each once."""
        if (own := _thread.worker) is not None:
            own.look()  # the engine has no processes of workers
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
        """Of the requests that a step's output tells of, those that were not among the taken ones."""
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
