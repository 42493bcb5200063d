"""What prefill knows of the KV blocks that it holds for decode: one lease per finished request. Pure.

Times are seconds of this process's ``time.perf_counter``, the clock that vLLM's NIXL connector stamps leases with. The
engine core's thread pins and ends leases, the thread of the side channel answers questions about them.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

# The key in vLLM's KV-transfer parameters under which prefill tells decode of the lease.
LEASE_KEY = "pdlab_lease"
GRANTED = "granted"
OLD, EXPIRED, TAKEN, UNKNOWN = "old", "expired", "taken", "unknown"
# Leases that have ended and are still answered for; more prefills than an engine finishes in any lease.
REMEMBERED = 65_536
FOREVER_S = 1e9


class LeaseAnswer(NamedTuple):
    """``verdict``: `GRANTED`, or why the blocks must not be used. ``covered_s``: how long, from the moment of the
    answer on, they certainly stay what they are (0: only up to now)."""

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
        self._given_back: set[str] = set()

    @property
    def pinned(self) -> int:
        """Requests whose blocks are held."""
        return len(self._pinned)

    def pin(self, request_id: str, lease_s: float) -> dict[str, Any]:
        """A request has finished and its blocks are held. Returns what decode is told under `LEASE_KEY`."""
        now = self._clock()
        with self._lock:
            self._pinned[request_id] = _Lease(now, lease_s, now + lease_s)
        return {"granted_at": now, "lease_s": float(lease_s)}

    def renew(self, request_ids: Iterable[str], for_s: float) -> None:
        """A heartbeat of decode has prolonged these leases, by at least so much from now on."""
        until = self._clock() + for_s
        with self._lock:
            for request_id in request_ids:
                if (lease := self._pinned.get(request_id)) is not None:
                    lease.expires_at = max(lease.expires_at, until)

    def lapse(self, request_ids: Iterable[str]) -> None:
        """A worker has let these leases expire: their blocks are about to be freed, or are freed already."""
        with self._lock:
            for request_id in request_ids:
                lease = self._pinned.get(request_id) or self._ended.get(request_id)
                if lease is not None:
                    lease.lapsed = True

    def end(self, request_ids: Iterable[str]) -> None:
        """The scheduler frees these requests' blocks now, read by decode unless `lapse` said otherwise."""
        with self._lock:
            for request_id in request_ids:
                lease = self._pinned.pop(request_id, None)
                if lease is None:
                    continue
                lease.ended = True
                self._ended[request_id] = lease
                self._given_back.discard(request_id)
            while len(self._ended) > REMEMBERED:
                self._ended.popitem(last=False)

    def claim(self, request_id: str, reader: str) -> LeaseAnswer:
        """``reader`` wants to use the blocks, or has read them and wants to know that they were still the request's.

        One reader per lease: the blocks are freed when the first one has read them. A lease that nobody has claimed in
        its first half is refused, and given back.
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
                # Freed because all of it had been read: what was read is the request's.
                lease.reader = reader
                return LeaseAnswer(GRANTED, FOREVER_S)
            if lease.reader is None and now - lease.granted_at > lease.lease_s / 2:
                self._give_back(request_id, lease)
                return LeaseAnswer(OLD)
            lease.reader = reader
            return LeaseAnswer(GRANTED, max(0.0, lease.expires_at - now))

    def give_back(self, request_id: str, reader: str) -> None:
        """``reader`` will not read the blocks: they may be freed."""
        with self._lock:
            lease = self._pinned.get(request_id)
            if lease is not None and lease.reader in (None, reader):
                self._give_back(request_id, lease)

    def _give_back(self, request_id: str, lease: _Lease) -> None:
        lease.lapsed = True  # nobody is granted what is on its way to the pool
        self._given_back.add(request_id)

    def take_given_back(self) -> set[str]:
        """Requests whose blocks the workers are to free, each once."""
        if not self._given_back:
            return set()
        with self._lock:
            given_back, self._given_back = self._given_back, set()
        return given_back
