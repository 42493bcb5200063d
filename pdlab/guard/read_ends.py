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
READ_ENDS_ADDRESS = "pdlab_read_ends_address"
_LOOPBACK = "127.0.0.1"
_IDS_PER_DATAGRAM = 200  # a request's id is shorter than 100 bytes, and a datagram longer than 60,000
_MAX_DATAGRAM_BYTES = 65535

Address = tuple[int, str]


class PollingWorker(Protocol):
    """Interface of `pdlab.guard.worker.GuardWorker`. ``poll_s``: 0 if it checks only in steps."""

    poll_s: float

    def poll(self) -> None: ...

    def poll_if_due(self) -> bool: ...


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
    def poll_and_wait(condition: Any, timeout_ms: int | None = None) -> None:
        own = _thread.worker
        if own is not None and own.poll_if_due():
            at_most_ms = max(1, int(1e3 * own.poll_s))
            timeout_ms = at_most_ms if timeout_ms is None else min(timeout_ms, at_most_ms)
        wait(condition, timeout_ms)

    SpinCondition.wait = poll_and_wait


def report_ends(address: Address, worker: int, request_ids: Iterable[str]) -> None:
    """Send the ids of requests whose reads by this worker have ended well. Sent once, without an acknowledgement."""
    port, nonce = address
    request_ids = sorted(request_ids)
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for begin in range(0, len(request_ids), _IDS_PER_DATAGRAM):
            message = {"nonce": nonce, "worker": worker, "request_ids": request_ids[begin : begin + _IDS_PER_DATAGRAM]}
            sender.sendto(json.dumps(message).encode(), (_LOOPBACK, port))


class ReadEndReceiver:
    """The receiver in the engine core. A read has ended when all ``workers`` have reported it."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((_LOOPBACK, 0))
        self._socket.setblocking(False)
        # The nonce identifies the engine: a worker of another engine may send to the same port.
        self.address: Address = (self._socket.getsockname()[1], secrets.token_hex(8))
        self._reported_by: dict[str, set[int]] = {}
        self._taken: set[str] = set()

    def take(self) -> set[str]:
        """Requests whose reads have ended on all workers since the last call. Each request is returned once."""
        if (own := _thread.worker) is not None:
            own.poll()  # the engine runs its worker in this process
        ended: set[str] = set()
        with contextlib.suppress(BlockingIOError):
            while True:
                worker, request_ids = self._read(self._socket.recv(_MAX_DATAGRAM_BYTES))
                for request_id in request_ids:
                    reported_by = self._reported_by.setdefault(request_id, set())
                    reported_by.add(worker)
                    if len(reported_by) == self._workers:
                        ended.add(request_id)
        self._taken |= ended
        return ended

    def not_taken(self, request_ids: Iterable[str]) -> set[str]:
        """The requests of a step's output that `take` has not returned."""
        new = set(request_ids)
        for request_id in new:
            self._reported_by.pop(request_id, None)
        taken = new & self._taken
        self._taken -= taken
        return new - taken

    def close(self) -> None:
        self._socket.close()

    def _read(self, message: bytes) -> tuple[int, list[str]]:
        with contextlib.suppress(ValueError, TypeError, KeyError):
            report = json.loads(message)
            if report["nonce"] == self.address[1]:
                return int(report["worker"]), [str(request_id) for request_id in report["request_ids"]]
        return 0, []
