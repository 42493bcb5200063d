"""Decode's receives of KV blocks from prefill: one receive per request, from its arrival to a verdict.

Reads are one-sided: a read of blocks that prefill has given to another request ends well, with the KV cache of the
other request. So decode claims the lease when the request arrives and while the blocks are read. It uses the KV cache
only if prefill confirms that the blocks belonged to the request until the end of the read. The request waits for the
answer only if the read is faster. Pure, but for the queries. Times are seconds of ``time.perf_counter``.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from pdlab.guard.lease_queries import CLAIM, RELEASE, Peer, Reply
from pdlab.guard.leases import GRANTED, LEASE_KEY, UNKNOWN

# Name of a counter -> its description on the metrics page.
ACTIONS = {
    "receives": "KV receives that the guard watched.",
    "recomputed": "Requests whose prompt decode computed instead of using KV cache from prefill, for any reason.",
    "refused": "Receives refused before a read: the lease was old or over, prefill was silent, or reads from it hang.",
    "failed_reads": "Reads that failed; the prompt was computed on decode.",
    "stale": "Reads of blocks that no longer belonged to the request, as prefill answered; decode computed the prompt.",
    "unconfirmed": "Reads that prefill did not confirm within the deadline; the prompt was computed on decode.",
    "deadlines": "Reads that did not end within the deadline; their blocks are kept until they do.",
    "errors": "Requests that failed because the blocks of reads past their deadline left no room for them.",
    "cancels_reported": "Cancelled requests that were reported to prefill, so that it frees their blocks.",
    "handshakes_renewed": "Connections to a prefill engine that were replaced after a failed read.",
    "unhealed": "Prefill engines, by decode worker, with no good read over several new connections.",
    "healed": "Unhealed prefill engines from which a read ended well later, or that answered no handshake any more.",
    "reported_early": "Reads whose end decode detected without waiting for the output of a step.",
    "reused": "Requests whose first token was prefill's, which decode did not compute again.",
    "given_back": "Leases that prefill ended early because decode does not read the blocks.",
}
# A measured offset of prefill's clock is valid for this time; the clocks of two hosts drift by far less than a lease.
OFFSET_VALID_S = 60.0
# Decode does not read from a prefill engine that did not answer until it answers, and not from one with a read past its
# deadline until this read ends. After this time one request tries again.
AVOID_PEER_S = 60.0
# A query without an answer is forgotten after this time.
QUERY_TIMEOUT_S = 120.0


class LeaseClient(Protocol):
    """Interface of `pdlab.guard.lease_queries.SideChannelClient`."""

    def send(self, query_id: int, kind: str, peer: Peer, remote_request_id: str, reader: str) -> bool: ...

    def replies(self) -> Iterator[Reply]: ...

    def close(self) -> None: ...


class Admission(Enum):
    """The decision on a request that could be scheduled now."""

    READ = "read"
    WAIT = "wait"
    REFUSE = "refuse"


class Outcome(Enum):
    """The decision on a request whose read has ended. ``RECOMPUTE``: compute its prompt."""

    USE = "use"
    WAIT = "wait"
    RECOMPUTE = "recompute"


class _State(Enum):
    ARRIVED = 1
    READING = 2
    READ = 3


@dataclass
class _Receive:
    peer: Peer
    remote_request_id: str
    arrived_at: float
    lease_fresh: bool = False  # certainly in its first half
    peer_avoided: bool = False
    state: _State = _State.ARRIVED
    queried_at: float | None = None  # time of the open query
    verdict: str | None = None
    covered_until: float = float("-inf")
    confirmed: bool = False
    deadline_at: float = float("inf")
    read_at: float = float("inf")


class ReceiveBook:
    """The receives of one decode engine.

    ``reader``: the engine's name in claims. ``deadline_s``: of a read. ``counts``: events since the caller last cleared
    it, by the names of `ACTIONS`. ``failed``: requests with a failed read, until all their reads have ended.
    """

    def __init__(
        self,
        client: LeaseClient,
        *,
        reader: str,
        deadline_s: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.deadline_s = deadline_s
        self.counts: Counter[str] = Counter()
        self._client = client
        self._reader = reader
        self._clock = clock
        self._query_ids = itertools.count(1)
        self._open_queries: dict[int, tuple[str, Peer, float]] = {}
        self._receives: dict[str, _Receive] = {}
        self._reading: dict[str, float] = {}  # deadlines, the earliest first
        self._read: dict[str, None] = {}
        self._clock_offsets: dict[Peer, tuple[float, float]] = {}
        self._late: dict[str, Peer] = {}  # reads in progress past their deadline
        self._hung_since: dict[Peer, float] = {}
        self._silent_since: dict[Peer, float] = {}
        self.failed: set[str] = set()

    @property
    def active(self) -> bool:
        """Whether there is a receive or an open query."""
        return bool(self._receives or self._open_queries)

    def arrived(self, request_id: str, params: Mapping[str, Any]) -> None:
        """A request with transfer parameters arrived: claim its lease."""
        now = self._clock()
        receive, granted_at, lease_s = _parsed(params, now)
        self._receives[request_id] = receive
        if receive.verdict is not None:
            return
        peer = receive.peer
        receive.peer_avoided = self._is_avoided(self._hung_since, peer) or self._is_avoided(self._silent_since, peer)
        offset = self._clock_offsets.get(peer)
        if offset is not None and now - offset[1] < OFFSET_VALID_S:
            receive.lease_fresh = now + offset[0] - granted_at < lease_s / 2
        self._claim(request_id, receive)

    def admission(self, request_id: str) -> Admission:
        """Whether the request's blocks may be read. A refused receive is forgotten."""
        receive = self._receives.get(request_id)
        if receive is None:
            return Admission.READ
        if receive.verdict is None and receive.queried_at is not None:
            self._read_replies()
        if not receive.peer_avoided:
            if receive.verdict == GRANTED or (receive.verdict is None and receive.lease_fresh):
                return Admission.READ
            if receive.verdict is None and self._clock() - receive.arrived_at < self.deadline_s:
                return Admission.WAIT
            if receive.verdict is None:
                self._silent_since.setdefault(receive.peer, self._clock())
        self._count_recomputed("refused")
        self._release(request_id, receive)
        self.drop(request_id)
        return Admission.REFUSE

    def awaits_answer(self, request_id: str) -> bool:
        """Whether the request waits for prefill's answer, and not for free blocks."""
        receive = self._receives.get(request_id)
        return receive is not None and receive.state is _State.ARRIVED and receive.verdict is None

    def admitted(self, request_id: str) -> None:
        """The read begins, and its deadline is set."""
        receive = self._receives.get(request_id)
        if receive is None:
            return
        self.counts["receives"] += 1
        receive.state = _State.READING
        receive.deadline_at = self._clock() + self.deadline_s
        self._reading[request_id] = receive.deadline_at
        if receive.queried_at is None and receive.covered_until < receive.deadline_at:
            self._claim(request_id, receive)

    def read_ended(self, request_id: str) -> Outcome:
        """All workers' reads for this request have ended; ``failed`` has the request if one failed."""
        receive = self._receives.get(request_id)
        if request_id in self.failed:
            self.failed.discard(request_id)
            self._count_recomputed("failed_reads")
            if receive is not None:
                self._release(request_id, receive)
                self.drop(request_id)
            return Outcome.RECOMPUTE
        if receive is None:
            return Outcome.USE
        receive.state = _State.READ
        receive.read_at = self._clock()
        self._reading.pop(request_id, None)
        self._read[request_id] = None
        if self._open_queries:
            self._read_replies()
        return self._outcome(request_id, receive)

    def settled(self) -> Iterator[tuple[str, Outcome]]:
        """(request, outcome) of receives with an ended read and a known outcome, which is never `Outcome.WAIT`."""
        if self._open_queries:
            self._read_replies()
        for request_id in list(self._read):
            outcome = self._outcome(request_id, self._receives[request_id])
            if outcome is not Outcome.WAIT:
                yield request_id, outcome

    def overdue(self) -> Iterator[str]:
        """Requests with a read in progress past its deadline. Their receives are forgotten; keep their blocks."""
        now = self._clock()
        while self._reading:
            request_id, deadline_at = next(iter(self._reading.items()))
            if now < deadline_at:
                return
            self._count_recomputed("deadlines")
            if (receive := self._receives.get(request_id)) is not None:
                self._late[request_id] = receive.peer
                self._hung_since[receive.peer] = now
            self.drop(request_id)
            yield request_id

    def late_read_ended(self, request_id: str) -> None:
        """A read past its deadline has ended, well or not."""
        peer = self._late.pop(request_id, None)
        if peer is not None and peer not in self._late.values():
            self._hung_since.pop(peer, None)

    def waiting(self) -> Iterable[str]:
        """Requests with an ended read that wait for prefill's answer."""
        return tuple(self._read)

    def cancelled(self, request_id: str, params: Mapping[str, Any]) -> None:
        """A request ended before its blocks were read: release them."""
        receive = self._receives.get(request_id) or _parsed(params, self._clock())[0]
        if receive.verdict is None or receive.verdict == GRANTED:
            self._release(request_id, receive)
            self.counts["cancels_reported"] += 1
        self.drop(request_id)

    def drop(self, request_id: str) -> None:
        """Forget a receive."""
        self._receives.pop(request_id, None)
        self._reading.pop(request_id, None)
        self._read.pop(request_id, None)
        self.failed.discard(request_id)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _is_avoided(self, since: dict[Peer, float], peer: Peer) -> bool:
        """Whether decode must not read from the peer. Every `AVOID_PEER_S` one request may."""
        if peer not in since:
            return False
        if self._clock() - since[peer] < AVOID_PEER_S:
            return True
        since[peer] = self._clock()
        return False

    def _outcome(self, request_id: str, receive: _Receive) -> Outcome:
        if receive.verdict == GRANTED and (receive.confirmed or receive.read_at <= receive.covered_until):
            self.drop(request_id)
            return Outcome.USE
        if receive.verdict not in (None, GRANTED):
            self._count_recomputed("stale")
        elif self._clock() >= receive.deadline_at:
            self._count_recomputed("unconfirmed")
            self._release(request_id, receive)
        else:
            if receive.queried_at is None:
                self._claim(request_id, receive)
            return Outcome.WAIT
        self.drop(request_id)
        return Outcome.RECOMPUTE

    def _claim(self, request_id: str, receive: _Receive) -> None:
        query_id, now = next(self._query_ids), self._clock()
        receive.queried_at = now
        reader = f"{self._reader}/{request_id}"
        if self._client.send(query_id, CLAIM, receive.peer, receive.remote_request_id, reader):
            self._open_queries[query_id] = (request_id, receive.peer, now)

    def _release(self, request_id: str, receive: _Receive) -> None:
        if receive.verdict in (None, GRANTED):
            self._client.send(0, RELEASE, receive.peer, receive.remote_request_id, f"{self._reader}/{request_id}")

    def _read_replies(self) -> None:
        now = self._clock()
        for reply in self._client.replies():
            query = self._open_queries.pop(reply.query_id, None)
            if query is None:
                continue
            request_id, peer, queried_at = query
            self._silent_since.pop(peer, None)
            if reply.answer.verdict != UNKNOWN:
                self._update_clock_offset(peer, reply.clock_s - queried_at, now)
            receive = self._receives.get(request_id)
            if receive is None or receive.queried_at != queried_at:
                continue
            receive.queried_at = None
            receive.verdict = reply.answer.verdict
            if receive.verdict == GRANTED:
                receive.covered_until = max(receive.covered_until, queried_at + reply.answer.covered_s)
                receive.confirmed = queried_at >= receive.read_at
        while self._open_queries:
            query_id, (_, _, queried_at) = next(iter(self._open_queries.items()))
            if now - queried_at < QUERY_TIMEOUT_S:
                break
            del self._open_queries[query_id]

    def _update_clock_offset(self, peer: Peer, offset_s: float, now: float) -> None:
        """Keep the lowest upper bound on the offset of prefill's clock: prefill answered after the query was sent."""
        known = self._clock_offsets.get(peer)
        if known is None or offset_s <= known[0] or now - known[1] >= OFFSET_VALID_S / 2:
            self._clock_offsets.pop(peer, None)
            self._clock_offsets[peer] = (offset_s, now)
            while len(self._clock_offsets) > 1024:
                self._clock_offsets.pop(next(iter(self._clock_offsets)))

    def _count_recomputed(self, action: str) -> None:
        self.counts[action] += 1
        self.counts["recomputed"] += 1


def _parsed(params: Mapping[str, Any], now: float) -> tuple[_Receive, float, float]:
    """(receive, time of the lease's grant by prefill's clock, length of the lease in seconds).

    The verdict is `UNKNOWN` without a valid lease: prefill has no guard, or a client made up the parameters.
    """
    lease = params.get(LEASE_KEY)
    try:
        granted_at, lease_s = float(lease["granted_at"]), float(lease["lease_s"])  # type: ignore[index]
        peer = Peer(str(params["remote_host"]), int(params["remote_port"]), str(params["remote_engine_id"]))
        return _Receive(peer, str(params["remote_request_id"]), now), granted_at, lease_s
    except (KeyError, TypeError, ValueError):
        return _Receive(Peer("", 0, ""), "", now, verdict=UNKNOWN), 0.0, 0.0
