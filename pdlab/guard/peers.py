"""Connections to prefill engines over which reads fail: when a worker gives one up, and what comes of the next. Pure.

UCX does not mend a connection between two engines that both live: once it has failed, every later read over it fails,
and vLLM uses it for as long as it knows the engine. So a peer from which a read failed is forgotten as soon as none of
its reads goes on, and the next request shakes hands with it again.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection

logger = logging.getLogger("vllm.pdlab.guard")

# So many connections in a row, each made by a handshake that the peer answered, and over none of them a read that ended
# well: then the fault is no dead connection, and the replica says that it is unhealthy. A peer that has died, or that
# the network does not reach, answers no handshake and ends the row.
UNHEALED_AFTER = 3


class PeerBook:
    """Prefill engines, by their engine ids, as one decode worker reads from them.

    The worker's thread calls it; the thread of handshakes calls `handshake_failed` alone. ``counts`` holds what
    happened since it was last emptied, by names of `pdlab.guard.receives.ACTIONS`.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._failed: set[str] = set()  # their connection is to be given up
        self._forgotten: set[str] = set()  # their next handshake renews a connection
        self._in_a_row: dict[str, int] = {}  # connections given up since the last read that ended well
        self._unreachable: set[str] = set()

    @property
    def active(self) -> bool:
        """Whether there is anything to look after, or to count."""
        return bool(self._failed or self._forgotten or self._in_a_row or self.counts)

    def read_failed(self, peer: str) -> None:
        """A read or a notification failed over a connection that a handshake had made."""
        self._failed.add(peer)

    def read_ended_well(self, peer: str) -> None:
        """What was read is there. A connection over which another read has failed is given up all the same."""
        if peer not in self._failed:
            self._end_row(peer)

    def handshake_failed(self, peer: str) -> None:
        """The peer does not answer: what is broken is not the connection."""
        self._unreachable.add(peer)

    def to_forget(self, busy: Collection[str], known: Collection[str]) -> list[str]:
        """Peers to forget now, each once. ``busy``: reads from them go on; ``known``: there is something to forget."""
        while self._unreachable:
            self._end_row(self._unreachable.pop())
        for peer in [peer for peer in self._forgotten if peer in known]:
            self._forgotten.discard(peer)
            self.counts["handshakes_renewed"] += 1
            logger.warning("prefill engine %s: a new connection, because reads over the last one failed", peer)
        forget = [peer for peer in self._failed if peer not in busy]
        self._failed.difference_update(forget)
        forget = [peer for peer in forget if peer in known]
        for peer in forget:
            self._forgotten.add(peer)
            self._in_a_row[peer] = self._in_a_row.get(peer, 0) + 1
            if self._in_a_row[peer] == UNHEALED_AFTER:
                self.counts["unhealed"] += 1
                logger.error("prefill engine %s: no read ended well over %s connections", peer, UNHEALED_AFTER)
        return forget

    def _end_row(self, peer: str) -> None:
        if self._in_a_row.pop(peer, 0) >= UNHEALED_AFTER:
            self.counts["healed"] += 1
