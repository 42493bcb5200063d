"""Decide when a worker drops a failed connection to a prefill engine. Pure.

UCX does not repair a failed connection between two live engines: every later read over it fails, and vLLM keeps using
it. So after a failed read the worker forgets the peer as soon as no read from it is in progress. The next request then
makes a new connection with a handshake.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection

logger = logging.getLogger("vllm.pdlab.guard")

# After this many new connections in a row without a good read the replica reports itself as unhealthy: the cause is not
# a dead connection. Each of them had a good handshake. A failed handshake (a dead or unreachable peer) ends the row.
UNHEALED_AFTER = 3


class PeerBook:
    """Connections of one decode worker, by the engine id of the prefill engine.

    The worker's thread calls all methods; the handshake thread calls only `handshake_failed`. ``counts``: events since
    the caller last cleared it, by names of `pdlab.guard.receives.ACTIONS`.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._failed: set[str] = set()  # peers whose connection must be dropped
        self._forgotten: set[str] = set()  # peers whose next handshake renews a connection
        self._in_a_row: dict[str, int] = {}  # dropped connections since the last good read
        self._unreachable: set[str] = set()

    @property
    def active(self) -> bool:
        """Whether there is a failed or renewed connection, or a count."""
        return bool(self._failed or self._forgotten or self._in_a_row or self.counts)

    def read_failed(self, peer: str) -> None:
        """A read or a notification failed over a connection with a good handshake."""
        self._failed.add(peer)

    def read_ended_well(self, peer: str) -> None:
        """A read ended well. A connection with another failed read is dropped nevertheless."""
        if peer not in self._failed:
            self._end_row(peer)

    def handshake_failed(self, peer: str) -> None:
        """The peer did not answer a handshake, so the connection is not the cause."""
        self._unreachable.add(peer)

    def to_forget(self, busy: Collection[str], known: Collection[str]) -> list[str]:
        """Peers to forget now, each once. ``busy``: with reads in progress. ``known``: with a connection."""
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
