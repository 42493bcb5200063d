"""Groups of sessions that wait for each other: one process sends them, and they are simulated together."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from pdlab.traffic.bounded import LatestKeys
from pdlab.traffic.requests import TrafficRequest


class Groups:
    """Sets of sessions with requests that wait for one of another session; ``count``: how many. Sessions are numbered
    as they come, and a number is all that is kept of one. A session none of whose requests waits for another, with as
    many other sessions between two of them as are remembered, counts as two."""

    def __init__(self) -> None:
        self.count = 0
        self._heads = array("i")  # of each session an earlier one of its group; of a group's first one itself
        self._of_session: LatestKeys[str, int] = LatestKeys()
        self._of_request: LatestKeys[str, int] = LatestKeys()

    def add(self, request: TrafficRequest) -> int:
        """Returns the number of its session. What it waits for must be among the latest ones that were added."""
        number = self._of_session.get(request.session)
        if number is None:
            number = len(self._heads)
            self._heads.append(number)
            self.count += 1
        self._of_session[request.session] = self._of_request[request.id] = number
        for other in request.after:
            first, later = sorted((self._head(number), self._head(self._of_request[other])))
            if first != later:
                self._heads[later] = first
                self.count -= 1
        return number

    @property
    def sessions(self) -> int:
        return len(self._heads)

    def ranks(self) -> Sequence[int]:
        """Of every session the number of its group; groups are numbered in the order of their first sessions."""
        ranks, groups = array("i"), 0
        for number in range(len(self._heads)):
            head = self._head(number)
            ranks.append(groups if head == number else ranks[head])
            groups += head == number
        return ranks

    def _head(self, number: int) -> int:
        heads = self._heads
        while heads[number] != number:
            heads[number] = heads[heads[number]]
            number = heads[number]
        return number
