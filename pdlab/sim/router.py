"""Routing of requests to the replicas of a simulated deployment, as Ray Serve does it. Times in seconds.

Every replica of the ingress has its own router. A router draws two random replicas and takes the one whose queue is
shorter in its memory. A replica reports its queue when the router polls it or sends it a request. If the router
remembers neither replica, or if Ray's time limit for its memory has passed, it polls both. If it remembers only one, it
takes that one, however long its queue, and polls the other one for the next time (`_select_from_candidate_replicas` of
Ray Serve's request router). Many routers, or few requests, thus spread load almost at random.

Since Ray 2.55 routers also count down when one of their requests ends (``decrement_queue_len_cache``), and in P:D the
ingress' router chooses the decode replica, which calls prefill with a router of its own. With direct streaming, which
came with these versions, the answering replica is the next one in turn, whatever its queue (Ray Serve LLM's
`RoundRobinRouter`).

A pool may have a policy of its own (`PolicyRouter`): each of its routers takes the replicas in turn, or all of them
know the replica of a session. Without Ray replicas are taken in turn, and the engine chooses the rank (`DirectRouter`).
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from pdlab.core.deployment import Routing
from pdlab.sim.engine_host import RankRule

# The number of requests in a replica's last report to a router, and its time. A plain tuple, because every request
# makes one.
ReportedLoad = tuple[int, float]


class RoutedReplica(Protocol):
    """A replica with ``load`` requests. ``reported_loads``: router -> the load that it remembers."""

    load: int
    reported_loads: dict[int, ReportedLoad]


R = TypeVar("R", bound=RoutedReplica)


class Router:
    """``count`` routers, each with a memory of ``memory_s`` seconds. A request comes to a random router."""

    def __init__(self, rng: random.Random, count: int, memory_s: float) -> None:
        self.random, self.count, self.memory_s = rng, count, memory_s

    def choose(self, replicas: Sequence[R], now_s: float, router: int | None = None) -> R:
        """The replica for a prompt, which counts in its load from now on. ``router``: of the prompt (None: any)."""
        count = len(replicas)
        if count == 1:
            chosen = replicas[0]
            chosen.load += 1
            return chosen
        drawn, memory_s = self.random.random, self.memory_s
        if router is None:
            router = int(drawn() * self.count)
        first_index = int(drawn() * count)
        second_index = int(drawn() * (count - 1))
        second_index += second_index >= first_index
        replica_a, replica_b = replicas[first_index], replicas[second_index]
        reported_a, reported_b = replica_a.reported_loads.get(router), replica_b.reported_loads.get(router)
        known_a = reported_a[0] if reported_a is not None and now_s - reported_a[1] < memory_s else None
        known_b = reported_b[0] if reported_b is not None and now_s - reported_b[1] < memory_s else None
        if known_a is None and known_b is None:
            takes_a = replica_a.load <= replica_b.load
        else:
            takes_a = known_b is None or (known_a is not None and known_a <= known_b)
        chosen, other, known = (replica_a, replica_b, known_b) if takes_a else (replica_b, replica_a, known_a)
        if known is None:  # the other one is polled
            other.reported_loads[router] = (other.load, now_s)
        chosen.load += 1
        chosen.reported_loads[router] = (chosen.load, now_s)
        return chosen

    def leaves(self, replica: RoutedReplica, router: int | None = None, now_s: float = 0.0) -> None:
        """A request has ended at the replica. ``router``: the router that counts it down (None: none does)."""
        replica.load -= 1
        if router is not None and (known := self._known(replica, router, now_s)) is not None:
            replica.reported_loads[router] = (max(known - 1, 0), now_s)

    def _known(self, replica: RoutedReplica, router: int, now_s: float) -> int | None:
        """The load that the router remembers; None: it remembers none, or its memory is too old."""
        reported = replica.reported_loads.get(router)
        return reported[0] if reported is not None and now_s - reported[1] < self.memory_s else None


class PolicyRouter:
    """``count`` routers with a policy of the pool (`pdlab.core.deployment.Pool.routing`) other than power of two."""

    def __init__(self, routing: Routing, rng: random.Random, count: int) -> None:
        self.routing, self.random, self.count = routing, rng, count
        self._turns: dict[int, int] = {}  # router -> its next turn; the first one is random (`RoundRobinRouter`)

    @classmethod
    def of(cls, routing: Routing, rng: random.Random, count: int) -> PolicyRouter | None:
        """None: power of two choices, which `Router` makes."""
        return None if routing == "power-of-two" else cls(routing, rng, count)

    def choose(self, replicas: Sequence[R], session: str | None, router: int | None = None) -> R:
        """The replica for a prompt of a session (None: of none), which counts in its load from now on. ``router``: of
        the prompt (None: any)."""
        if self.routing == "round-robin":
            chosen = self._in_turn(replicas, self.random.randrange(self.count) if router is None else router)
        elif session is not None:
            chosen = replicas[of_session(range(len(replicas)), session)]
        else:  # Ray hashes the request's own id then
            chosen = self.random.choice(replicas)
        chosen.load += 1
        return chosen

    def _in_turn(self, replicas: Sequence[R], router: int) -> R:
        turn = self._turns.get(router)
        if turn is None:
            turn = self.random.randrange(len(replicas))
        self._turns[router] = turn + 1
        return replicas[turn % len(replicas)]


def of_session(replicas: Iterable[int], session: str) -> int:
    """The replica number of a session, with equal chances, by rendezvous hashing. A new or removed replica moves only
    its own sessions."""
    return max(replicas, key=lambda index: hashlib.blake2b(f"{index} {session}".encode()).digest())


class DirectRouter:
    """Replicas of ``ranks`` engines (DP ranks) in turn, whatever their queues, and of a replica the rank that the rule
    of its engine takes (`pdlab.sim.hardware.DirectRouting`)."""

    def __init__(self, rng: random.Random, rule: RankRule, ranks: int) -> None:
        self.random, self.rule, self.ranks = rng, rule, ranks
        self._chosen = 0

    def choose(self, engines: Sequence[R], session: str | None = None, router: int | None = None) -> R:
        """The engine for a prompt, which counts in its load from now on. ``engines``: those of all replicas, in order.
        Neither the session nor the router matters."""
        ranks = self.ranks
        turn, replica = divmod(self._chosen, len(engines) // ranks)
        self._chosen += 1
        if self.rule == "random":
            rank = self.random.randrange(ranks)
        elif self.rule == "in-turn":
            rank = turn % ranks
        else:
            loads = [each.load for each in engines[replica * ranks : (replica + 1) * ranks]]
            rank = loads.index(min(loads))
        chosen = engines[replica * ranks + rank]
        chosen.load += 1
        return chosen


class InTurn:
    """Direct streaming's choice of the replica that answers: one after the other."""

    def __init__(self) -> None:
        self._chosen = 0

    def choose(self, replicas: Sequence[R]) -> tuple[int, R]:
        """The index and the replica for a prompt, which counts in its load from now on."""
        index = self._chosen % len(replicas)
        self._chosen += 1
        replicas[index].load += 1
        return index, replicas[index]
