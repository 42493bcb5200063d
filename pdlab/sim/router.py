"""Routing of requests to the replicas of a simulated deployment. Times in seconds."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import Protocol, TypeVar


class Replica(Protocol):
    """``load`` requests are at the replica, ``known_load`` as the router knows; ``news``: when it learns of ends."""

    load: int
    known_load: int
    news: deque[float]


R = TypeVar("R", bound=Replica)


class Router:
    """Chooses of two random replicas the one with fewer requests, as far as the router knows: it learns of the end
    of a request ``news_s`` later."""

    def __init__(self, rng: random.Random, news_s: float) -> None:
        self.random, self.news_s = rng, news_s

    def choose(self, replicas: Sequence[R], now_s: float) -> R:
        """The replica for a prompt; it counts there from now on."""
        chosen = replicas[0] if len(replicas) == 1 else self._two_choices(replicas, now_s)
        chosen.load += 1
        chosen.known_load += 1
        return chosen

    def leaves(self, replica: Replica, now_s: float) -> None:
        """A request has ended at the replica."""
        replica.load -= 1
        replica.news.append(now_s + self.news_s)

    def _two_choices(self, replicas: Sequence[R], now_s: float) -> R:
        first_index = int(self.random.random() * len(replicas))
        second_index = int(self.random.random() * (len(replicas) - 1))
        second_index += second_index >= first_index
        replica_a, replica_b = replicas[first_index], replicas[second_index]
        for replica in (replica_a, replica_b):
            while replica.news and replica.news[0] <= now_s:
                replica.news.popleft()
                replica.known_load -= 1
        if replica_a.known_load == replica_b.known_load:
            return replica_a if self.random.random() < 0.5 else replica_b
        return replica_a if replica_a.known_load < replica_b.known_load else replica_b
