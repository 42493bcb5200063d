"""Leases of KV blocks that prefill holds for decode: one lease per finished request. Pure.

Times are seconds of this process's ``time.perf_counter``, the clock of the leases of vLLM's NIXL connector. The engine
core's thread pins and ends leases; the side channel's thread answers questions about them.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

# Key of the lease in vLLM's KV-transfer parameters from prefill to decode.
LEASE_KEY = "pdlab_lease"
GRANTED = "granted"
OLD, EXPIRED, TAKEN, UNKNOWN = "old", "expired", "taken", "unknown"
# Number of ended leases that are kept for answers: more than the prefills that an engine finishes during a lease.
MAX_ENDED = 65_536
FOREVER_S = 1e9


class LeaseAnswer(NamedTuple):
    """Answer to a claim. ``verdict``: `GRANTED`, or why decode must not use the blocks. ``covered_s``: seconds after
    the answer in which the blocks certainly stay unchanged (0: they were unchanged until now)."""

    verdict: str
    covered_s: float = 0.0


@dataclass
class _Lease:
    granted_at: float
    lease_s: float
    expires_at: float
    reader: str | None = None
    lapsed: bool = False
    ended: bool = False


class LeaseBook:
    """The leases of one prefill engine."""

    def __init__(self, engine_id: str, clock: Callable[[], float] = time.perf_counter) -> None:
        self.engine_id = engine_id
        self._clock = clock
        self._lock = threading.Lock()
        self._pinned: dict[str, _Lease] = {}
        self._ended: OrderedDict[str, _Lease] = OrderedDict()
        self._released: set[str] = set()

    @property
    def pinned(self) -> int:
        """Number of requests whose blocks are held."""
        return len(self._pinned)

    def pin(self, request_id: str, lease_s: float) -> dict[str, Any]:
        """Record a finished request whose blocks are held. Returns the value of `LEASE_KEY` for decode."""
        now = self._clock()
        with self._lock:
            self._pinned[request_id] = _Lease(now, lease_s, now + lease_s)
        return {"granted_at": now, "lease_s": float(lease_s)}

    def renew(self, request_ids: Iterable[str], for_s: float) -> None:
        """Record that a heartbeat of decode prolonged these leases to at least ``for_s`` from now."""
        until = self._clock() + for_s
        with self._lock:
            for request_id in request_ids:
                if (lease := self._pinned.get(request_id)) is not None:
                    lease.expires_at = max(lease.expires_at, until)

    def lapse(self, request_ids: Iterable[str]) -> None:
        """Record that a worker let these leases expire: their blocks are freed now or soon."""
        with self._lock:
            for request_id in request_ids:
                lease = self._pinned.get(request_id) or self._ended.get(request_id)
                if lease is not None:
                    lease.lapsed = True

    def end(self, request_ids: Iterable[str]) -> None:
        """Record that the scheduler frees these requests' blocks now. Decode has read them, unless they lapsed."""
        with self._lock:
            for request_id in request_ids:
                lease = self._pinned.pop(request_id, None)
                if lease is None:
                    continue
                lease.ended = True
                self._ended[request_id] = lease
                self._released.discard(request_id)
            while len(self._ended) > MAX_ENDED:
                self._ended.popitem(last=False)

    def claim(self, request_id: str, reader: str) -> LeaseAnswer:
        """Answer a claim of ``reader``, which wants to use the blocks or to confirm a read of them.

        A lease has one reader, because the blocks are freed after the first reader has read them. A lease without a
        claim in its first half is refused and released.
        """
        now = self._clock()
        with self._lock:
            lease = self._pinned.get(request_id) or self._ended.get(request_id)
            if lease is None:
                return LeaseAnswer(UNKNOWN)
            if lease.lapsed:
                return LeaseAnswer(EXPIRED)
            if lease.reader not in (None, reader):
                return LeaseAnswer(TAKEN)
            if lease.ended:
                # The blocks were freed after the read was complete, so the read has the request's content.
                lease.reader = reader
                return LeaseAnswer(GRANTED, FOREVER_S)
            if lease.reader is None and now - lease.granted_at > lease.lease_s / 2:
                self._release(request_id, lease)
                return LeaseAnswer(OLD)
            lease.reader = reader
            return LeaseAnswer(GRANTED, max(0.0, lease.expires_at - now))

    def release(self, request_id: str, reader: str) -> None:
        """Record that ``reader`` will not read the blocks, so that they can be freed."""
        with self._lock:
            lease = self._pinned.get(request_id)
            if lease is not None and lease.reader in (None, reader):
                self._release(request_id, lease)

    def _release(self, request_id: str, lease: _Lease) -> None:
        lease.lapsed = True  # no claim is granted from now on
        self._released.add(request_id)

    def take_released(self) -> set[str]:
        """Requests whose blocks the workers must free. Each request is returned once."""
        if not self._released:
            return set()
        with self._lock:
            released, self._released = self._released, set()
        return released
