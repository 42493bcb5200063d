"""A prefill engine that answers queries of its leases when the test lets it, and the clock of all."""

from __future__ import annotations

from collections.abc import Iterator

from support.clock import Clock

from pdlab.guard.lease_queries import CLAIM, RELEASE, Peer, Reply
from pdlab.guard.leases import GRANTED, LeaseAnswer

LEASE_S = 30.0


class Prefill(Clock):
    """Stands for `pdlab.guard.lease_queries.SideChannelClient`, and is its own clock.

    ``verdict``: the answer to each new claim; None: the test calls `answer`. ``offset_s``: of prefill's clock.
    ``rtt_s``: time until an answer arrives.
    """

    def __init__(self, *, verdict: str | None = None, offset_s: float = 0.0, rtt_s: float = 0.0) -> None:
        super().__init__()
        self.verdict = verdict
        self.offset_s = offset_s
        self.rtt_s = rtt_s
        self.queries: list[tuple[int, str, Peer, str, str]] = []
        self.ready: list[Reply] = []
        self.reachable = True
        self.closed = False

    def send(self, *query: int | str | Peer) -> bool:
        self.queries.append(query)  # type: ignore[arg-type]
        if query[1] == CLAIM and self.verdict is not None:
            self.answer(self.verdict)
        return self.reachable

    def replies(self) -> Iterator[Reply]:
        while self.ready:
            yield self.ready.pop(0)

    def close(self) -> None:
        self.closed = True

    def claims(self) -> list[tuple[int, str, Peer, str, str]]:
        return [query for query in self.queries if query[1] == CLAIM]

    def released(self) -> list[str]:
        return [query[3] for query in self.queries if query[1] == RELEASE]

    def answer(self, verdict: str = GRANTED, covered_s: float = LEASE_S) -> None:
        """To the last claim."""
        self.now += self.rtt_s
        clock_s = self.now + self.offset_s - self.rtt_s / 2
        self.ready.append(Reply(self.claims()[-1][0], LeaseAnswer(verdict, covered_s), clock_s))
