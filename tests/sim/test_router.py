"""Routing as Ray Serve does it: two choices, by what one router remembers."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from statistics import fmean

from pdlab.sim.router import DirectRouter, InTurn, PolicyRouter, ReportedLoad, Router


@dataclass(eq=False)
class Server:
    load: int = 0
    reported_loads: dict[int, ReportedLoad] = field(default_factory=dict)


def test_of_two_the_one_with_fewer_requests_is_taken_and_counts_at_once() -> None:
    servers = [Server(load=3), Server(load=1)]
    router = Router(random.Random(0), 1, 10.0)
    assert router.choose(servers, 0.0) is servers[1] and servers[1].load == 2
    router.leaves(servers[1])
    assert servers[1].load == 1


def test_a_router_does_not_see_requests_end_until_it_asks_again() -> None:
    """One router: what a replica reported at the last request stands for ten seconds, whatever has ended since."""
    servers = [Server(), Server()]
    router = Router(random.Random(1), 1, 10.0)
    for _ in range(6):
        router.choose(servers, 0.0)
    assert [server.load for server in servers] == [3, 3]
    for _ in range(3):
        router.leaves(servers[0])
    servers[1].reported_loads[0] = (2, 0.0)
    assert router.choose(servers, 9.0) is servers[1], "it remembers 3 of the idle one, and 2 of the other"
    assert router.choose(servers, 30.0) is servers[0], "both are asked again"


def test_a_router_that_hears_of_the_end_counts_down_and_no_other_does() -> None:
    servers = [Server(), Server()]
    router = Router(random.Random(1), 2, 10.0)
    for _ in range(6):
        router.choose(servers, 0.0, 0)
    for server in servers:
        server.reported_loads[1] = (3, 0.0)
    for _ in range(3):
        router.leaves(servers[0], 0, 8.0)
    assert servers[0].reported_loads == {0: (0, 8.0), 1: (3, 0.0)}
    assert router.choose(servers, 9.0, 0) is servers[0] and servers[0].load == 1
    servers[1].reported_loads.clear()
    router.leaves(servers[1], 0, 9.0)
    assert servers[1].reported_loads == {}, "it has forgotten the replica: nothing is counted down"


def test_of_two_the_one_that_is_known_is_taken_and_the_other_asked_for_next_time() -> None:
    servers = [Server(load=5), Server(load=0)]
    servers[0].reported_loads[0] = (5, 0.0)
    router = Router(random.Random(2), 1, 10.0)
    assert router.choose(servers, 1.0) is servers[0], "however long its queue"
    assert servers[1].reported_loads[0] == (0, 1.0)
    assert router.choose(servers, 2.0) is servers[1]


def test_one_replica_needs_no_choice() -> None:
    server = Server()
    assert Router(random.Random(0), 16, 10.0).choose([server], 0.0) is server and server.load == 1


def test_a_router_of_its_own_is_asked_and_no_other() -> None:
    servers = [Server(load=5), Server(load=0)]
    servers[0].reported_loads[3] = (0, 0.0)
    router = Router(random.Random(2), 16, 10.0)
    assert router.choose(servers, 1.0, 3) is servers[0], "what router 3 remembers"
    assert set(servers[1].reported_loads) == {3}


def test_in_turn_whatever_the_queues() -> None:
    servers, in_turn = [Server(load=9), Server(), Server()], InTurn()
    assert [in_turn.choose(servers)[0] for _ in range(5)] == [0, 1, 2, 0, 1]
    assert [server.load for server in servers] == [11, 2, 1]


def test_each_router_takes_the_replicas_in_turn_by_itself() -> None:
    """And begins anywhere: Ray's routers know nothing of each other."""
    begun = set()
    for seed in range(30):
        servers, routed = [Server() for _ in range(4)], PolicyRouter("round-robin", random.Random(seed), 2)

        def taken(router: int, routed: PolicyRouter = routed, servers: list[Server] = servers) -> int:
            chosen = routed.choose(servers, None, router)
            assert chosen is not None
            return servers.index(chosen)

        first, other = taken(0), taken(1)
        assert [taken(0) for _ in range(4)] == [(first + step) % 4 for step in (1, 2, 3, 4)]
        assert taken(1) == (other + 1) % 4
        begun.add((first - other) % 4)
    assert begun == {0, 1, 2, 3}


def test_a_request_of_no_session_goes_to_any_replica_whatever_its_queue() -> None:
    servers, routed = [Server(load=1000), Server(), Server()], PolicyRouter("session", random.Random(0), 16)
    for _ in range(600):
        assert routed.choose(servers, None) is not None
    assert all(150 < server.load - before < 250 for server, before in zip(servers, (1000, 0, 0), strict=True))
    homes = {servers.index(routed.choose(servers, "s") or servers[0]) for _ in range(20)}
    assert len(homes) == 1


def longest_queue(memory_s: float) -> float:
    """Mean of the most requests at one of eight replicas, 20 arrivals/s that stay 2 s each."""
    loads = []
    for seed in range(20):
        servers, router = [Server() for _ in range(8)], Router(random.Random(seed), 16, memory_s)
        inside: list[tuple[float, Server]] = []
        for number in range(400):
            now_s = 0.05 * number
            while inside and inside[0][0] <= now_s:
                router.leaves(inside.pop(0)[1])
            inside.append((now_s + 2.0, router.choose(servers, now_s)))
            loads.append(max(server.load for server in servers))
    return fmean(loads)


def test_routers_that_remember_spread_load_worse_than_those_that_ask() -> None:
    """40 in flight on 8 replicas are 5 each."""
    assert 5 < longest_queue(0.0) < 6.3 < 6.8 < longest_queue(10.0)


def test_without_ray_replicas_are_taken_in_turn_and_their_ranks_by_the_rule_of_the_engine() -> None:
    """Two replicas of three ranks, of which the first replica is full."""
    ranks = [Server(load=9) for _ in range(3)] + [Server(load=load) for load in (2, 0, 1)]
    taken = []
    router = DirectRouter(random.Random(0), "least-loaded", 3)
    for _ in range(8):
        taken.append(ranks.index(router.choose(ranks)))
    assert [each // 3 for each in taken] == [0, 1] * 4, "whatever their queues"
    assert taken[1::2] == [4, 4, 5, 3], "the rank with the fewest"
    in_turn = DirectRouter(random.Random(0), "in-turn", 3)
    assert [ranks.index(in_turn.choose(ranks)) for _ in range(6)] == [0, 3, 1, 4, 2, 5]


def test_a_random_rank_does_not_look_at_queues() -> None:
    ranks = [Server(load=1000 * number) for number in range(4)]
    router = DirectRouter(random.Random(3), "random", 4)
    before = [each.load for each in ranks]
    for _ in range(400):
        router.choose(ranks)
    assert all(80 < each.load - old < 120 for each, old in zip(ranks, before, strict=True))
