"""Which sessions of a workload wait for each other: they are sent by one process, and simulated together."""

from __future__ import annotations

from collections.abc import Collection

from pdlab.traffic.bounded import Latest
from pdlab.traffic.requests import TrafficRequest


class Groups:
    """Sets of sessions with requests that wait for one of another session; each set is named by one of them."""

    def __init__(self) -> None:
        self._parents: dict[str, str] = {}
        self._session_of: dict[str, str] = {}

    def add(self, request: TrafficRequest) -> None:
        """What it waits for must have been added before."""
        self._parents.setdefault(request.session, request.session)
        self._session_of[request.id] = request.session
        for other in request.after:
            self._parents[self.of(request.session)] = self.of(self._session_of[other])

    def of(self, session: str) -> str:
        """The name of a session's group."""
        while self._parents[session] != session:
            session = self._parents[session]
        return session

    @property
    def sessions(self) -> Collection[str]:
        return self._parents.keys()

    @property
    def names(self) -> set[str]:
        return {self.of(session) for session in self._parents}

    @property
    def count(self) -> int:
        return len(self.names)


class _Node:
    """A session's place in its group: ``up`` is another session of the group, None at its head."""

    __slots__ = ("up",)

    def __init__(self) -> None:
        self.up: _Node | None = None

    def head(self) -> _Node:
        node = self
        while node.up is not None:
            node.up = node.up.up or node.up
            node = node.up
        return node


class GroupCount:
    """How many sessions pass, and how many sets of sessions that wait for each other. A session none of whose
    requests waits for another, with as many other sessions between two of them as are remembered, counts as two."""

    def __init__(self) -> None:
        self.sessions = self.groups = 0
        self._of_session: Latest[str, _Node] = Latest()
        self._of_request: Latest[str, _Node] = Latest()

    def add(self, request: TrafficRequest) -> None:
        """What it waits for must be among the latest ones that were added."""
        node = self._of_session.get(request.session)
        if node is None:
            node = _Node()
            self.sessions += 1
            self.groups += 1
        self._of_session[request.session] = self._of_request[request.id] = node
        for other in request.after:
            ours, theirs = node.head(), self._of_request[other].head()
            if ours is not theirs:
                ours.up = theirs
                self.groups -= 1
