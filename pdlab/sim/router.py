"""Which replica of a simulated deployment a request goes to, and what the router knows of them. Times in seconds."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import Literal, Protocol, TypeVar

Routing = Literal["two-choices", "round-robin", "prefix"]
PREFIX_SLACK = 2  # requests by which a replica with the prompt may be busier than the idlest


class Cache(Protocol):
    def hit(self, prompt: int, tokens: float) -> float: ...


class Replica(Protocol):
    """``load`` requests are at it; ``known_load`` as far as the router knows, which ``news`` will tell it later."""

    load: int
    known_load: int
    news: deque[float]

    @property
    def cache(self) -> Cache: ...


R = TypeVar("R", bound=Replica)


class Router:
    """Chooses by ``routing`` (see `pdlab.sim.simulator`); it learns ``news_s`` after the end of a request that it has
    ended.
    """

    def __init__(self, routing: Routing, rng: random.Random, news_s: float) -> None:
        self.routing, self.random, self.news_s = routing, rng, news_s
        self.turns: dict[int, int] = {}

    def choose(self, replicas: Sequence[R], prompt: int, tokens: float, now_s: float) -> R:
        """The replica for a prompt; it counts there from now on."""
        if len(replicas) == 1:
            chosen = replicas[0]
        elif self.routing == "round-robin":
            turn = self.turns.get(id(replicas), 0)
            self.turns[id(replicas)] = turn + 1
            chosen = replicas[turn % len(replicas)]
        else:
            chosen = self._two_choices(replicas, now_s)
            if self.routing == "prefix":
                chosen = _with_prefix(replicas, prompt, tokens) or chosen
        chosen.load += 1
        chosen.known_load += 1
        return chosen

    def leaves(self, replica: Replica, now_s: float) -> None:
        """A request is done there."""
        replica.load -= 1
        replica.news.append(now_s + self.news_s)

    def _two_choices(self, replicas: Sequence[R], now_s: float) -> R:
        first = int(self.random.random() * len(replicas))
        second = int(self.random.random() * (len(replicas) - 1))
        second += second >= first
        one, other = replicas[first], replicas[second]
        for replica in (one, other):
            while replica.news and replica.news[0] <= now_s:
                replica.news.popleft()
                replica.known_load -= 1
        if one.known_load == other.known_load:
            return one if self.random.random() < 0.5 else other
        return one if one.known_load < other.known_load else other


def _with_prefix(replicas: Sequence[R], prompt: int, tokens: float) -> R | None:
    idlest = min(replica.load for replica in replicas)
    holding = [
        replica for replica in replicas if replica.cache.hit(prompt, tokens) and replica.load <= idlest + PREFIX_SLACK
    ]
    return min(holding, key=lambda replica: replica.load, default=None)
