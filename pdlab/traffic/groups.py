"""Which sessions of a workload wait for each other: they are sent by one process, and simulated together."""

from __future__ import annotations

from collections.abc import Collection

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
