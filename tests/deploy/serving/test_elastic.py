"""A fluid pool whose number of engines moves: first transfers before any work, and an end without work."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from support.clock import Clock
from support.role_boards import Quiet, report, roles

from pdlab.deploy.serving.elastic import (
    HEARD_S,
    LEAVES_S,
    MOVING_S,
    RUNNING,
    STEADY_S,
    STOPPING,
    WARM_AGAIN_S,
    WARM_S,
    EngineAdmission,
    Replica,
    ReplicaScaling,
    ReplicasOfPool,
    next_to_stop,
)  # fmt: skip
from pdlab.deploy.serving.role_board import SETTLE_S, SILENT_S
from pdlab.roles.count import CountDecision
from pdlab.roles.policy import Demand
from pdlab.roles.spec import FluidSpec

# --- joining -------------------------------------------------------------------------------------


def founded(*founders: str) -> EngineAdmission:
    made = EngineAdmission(len(founders))
    assert made.look(founders) == []
    assert not any(made.joins(each) for each in founders)
    return made


def test_a_new_engine_takes_work_after_a_transfer_over_every_ordered_pair() -> None:
    made, here = founded("a", "b"), ["a", "b", "c"]
    assert made.joins("c") and made.look(here) == []
    assert made.orders("c", here, 0.0) == ["a", "b"]
    assert made.orders("a", here, 0.0) == made.orders("b", here, 0.0) == ["c"]
    assert made.orders("a", here, 1.0) == [], "it is at it"
    made.transfers_ended("c", {"a": "", "b": ""}, 1.0)
    made.transfers_ended("a", {"c": ""}, 1.0)
    assert made.look(here) == [] and made.joins("c")
    made.transfers_ended("b", {"c": ""}, 1.0)
    assert made.look(here) == ["c"] and not made.joins("c")
    assert [made.orders(each, here, 99.0) for each in here] == [[], [], []]


def test_a_pair_that_fails_is_logged_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    made, here = founded("a", "b"), ["a", "b", "c"]
    made.orders("c", here, 0.0)
    with caplog.at_level(logging.WARNING, "ray.serve"):
        logging.getLogger("ray.serve").propagate = True
        made.transfers_ended("c", {"a": "TimeoutError()", "b": ""}, 5.0)
    assert "no first transfer from a to c" in caplog.text and "TimeoutError()" in caplog.text
    assert made.orders("c", here, 5.0 + WARM_AGAIN_S - 1) == []
    assert made.orders("c", here, 5.0 + WARM_AGAIN_S) == ["a"] and made.joins("c")
    assert made.orders("c", here, 5.0 + WARM_AGAIN_S + WARM_S) == []
    assert made.orders("c", here, 5.0 + 2 * WARM_AGAIN_S + WARM_S) == ["a"], "who does not answer is asked again"


def test_engines_that_are_gone_are_not_waited_for() -> None:
    made = founded("a", "b")
    made.orders("c", ["a", "b", "c"], 0.0)
    made.transfers_ended("c", {"a": ""}, 1.0)
    made.transfers_ended("a", {"c": ""}, 1.0)
    assert made.look(["a", "c"]) == ["c"]
    assert made.look(["c", "d"]) == [] and made.joins("d")
    assert made.look(["d"]) == ["d"], "where there is no other"


def test_two_new_engines_are_warmed_with_each_other_too() -> None:
    made, here = founded("a"), ["a", "c", "d"]
    for new in ("c", "d"):
        assert made.orders(new, here, 0.0) == ["a"]
        made.transfers_ended(new, {"a": ""}, 1.0)
    made.transfers_ended("a", {"c": "", "d": ""}, 1.0)
    assert made.look(here) == ["c"]
    assert made.orders("c", here, 2.0) == ["d"] and made.orders("d", here, 2.0) == ["c"]
    made.transfers_ended("c", {"d": ""}, 3.0)
    made.transfers_ended("d", {"c": ""}, 3.0)
    assert made.look(here) == ["d"]


def test_who_was_silent_for_a_moment_is_warm() -> None:
    made = founded("a", "b")
    made.look(["a"])
    assert not made.joins("b")


def test_where_the_number_is_fixed_nobody_joins() -> None:
    made = EngineAdmission(None)
    made.look(["a"])
    made.knew({"a": "decode"})
    assert not made.joins("b") and made.orders("b", ["a", "b"], 0.0) == []


# --- the number ------------------------------------------------------------------------------------


class Serve:
    """Stands for Ray Serve: what it runs changes when `settle` is called. One node, the head."""

    def __init__(self, *names: str) -> None:
        self.served = ReplicasOfPool(len(names), tuple(Replica(name, RUNNING, "n") for name in names), {}, "n")
        self.targets: list[int] = []
        self.looks = 0
        self.error: Exception | None = None

    async def look(self) -> ReplicasOfPool:
        self.looks += 1
        if self.error is not None:
            raise self.error
        return self.served

    async def set_target(self, replicas: int) -> None:
        self.targets.append(replicas)
        self.served = replace(self.served, target=replicas)

    def state(self, **states: str | None) -> None:
        """Replicas with these states; None: gone."""
        before = {each.name: each for each in self.served.replicas}
        after = {name: Replica(name, state, "n") if state else None for name, state in states.items()}
        self.served = replace(self.served, replicas=tuple(each for each in (before | after).values() if each))


def step(made: ReplicaScaling, clock: Clock, busy: str = "", seconds: float = MOVING_S) -> None:
    clock.now += seconds
    asyncio.run(made.step(lambda name: name not in busy))


def scaling(serve: Serve, clock: Clock) -> ReplicaScaling:
    made = ReplicaScaling(serve, clock)
    step(made, clock)
    assert made.wanted == serve.served.target
    return made


def one_fewer(clock: Clock) -> tuple[Serve, ReplicaScaling]:
    """Three engines serve, and two are wanted."""
    serve = Serve("a", "b", "c")
    made = scaling(serve, clock)
    made.wanted = 2
    return serve, made


def test_one_more_is_asked_for_at_once(clock: Clock) -> None:
    serve = Serve("a", "b")
    made = scaling(serve, clock)
    made.wanted = 3
    step(made, clock)
    step(made, clock)
    assert serve.targets == [3] and not made.leaving


def test_an_engine_ends_what_it_has_before_it_is_stopped(clock: Clock) -> None:
    serve, made = one_fewer(clock)
    step(made, clock, busy="c")
    assert made.leaving == {"c"} and not serve.targets
    for _ in range(20):
        step(made, clock, busy="c")
    assert not serve.targets, "it still decodes"
    step(made, clock)
    assert serve.targets == [2] and made.leaving == {"c"}
    step(made, clock)
    assert serve.targets == [2] and made.leaving == {"c"}, "Ray Serve has not stopped it yet"
    serve.state(c=STOPPING)
    step(made, clock)
    assert made.leaving == {"c"}
    serve.state(c=None)
    step(made, clock)
    assert made.leaving == {"c"}, "the last that it told may still be remembered"
    assert serve.targets == [2] and made.wanted == 2


def test_requests_that_are_on_their_way_are_waited_for(clock: Clock) -> None:
    serve, made = one_fewer(clock)
    step(made, clock)
    step(made, clock, seconds=HEARD_S / 2)
    assert not serve.targets
    step(made, clock, seconds=HEARD_S)
    assert serve.targets == [2]


def test_who_never_ends_is_stopped_all_the_same(clock: Clock) -> None:
    serve, made = one_fewer(clock)
    step(made, clock, busy="c")
    step(made, clock, busy="c", seconds=LEAVES_S)
    assert serve.targets == [2]


def test_an_engine_stays_where_work_comes_back(clock: Clock) -> None:
    serve, made = one_fewer(clock)
    step(made, clock, busy="c")
    made.wanted = 3
    step(made, clock, busy="c")
    assert not made.leaving and not serve.targets


def test_another_one_than_expected_is_stopped(clock: Clock) -> None:
    serve, made = one_fewer(clock)
    step(made, clock)
    step(made, clock, seconds=HEARD_S)
    serve.state(a=STOPPING)
    step(made, clock)
    assert made.leaving == {"a"}


def test_one_that_has_not_started_goes_at_once(clock: Clock) -> None:
    serve = Serve("a", "b", "c")
    serve.state(c="STARTING")
    made = scaling(serve, clock)
    made.wanted = 2
    step(made, clock, busy="abc")
    assert serve.targets == [2] and not made.leaving


def test_a_number_that_somebody_else_sets_is_taken_over(clock: Clock) -> None:
    serve = Serve("a", "b")
    made = scaling(serve, clock)
    serve.served = replace(serve.served, target=4)
    step(made, clock, seconds=STEADY_S)
    assert made.wanted == 4 and not serve.targets


def test_ray_serve_is_seldom_asked_while_nothing_moves(clock: Clock) -> None:
    serve = Serve("a", "b")
    made = scaling(serve, clock)
    for _ in range(20):
        step(made, clock, seconds=0.25)
    assert serve.looks <= 3


def test_the_newest_on_the_emptiest_node_that_is_not_the_head_stops_first() -> None:
    on = {"a": "h", "b": "x", "c": "y", "d": "y", "e": "x"}
    served = ReplicasOfPool(5, tuple(Replica(name, RUNNING, node) for name, node in on.items()), {"y": 1}, "h")
    assert next_to_stop(served) == "e"
    assert next_to_stop(replace(served, others={"x": 1})) == "d"
    assert next_to_stop(replace(served, others={})) == "e", "the node of the older one first"
    assert next_to_stop(replace(served, replicas=served.replicas[:1])) == "a"
    assert next_to_stop(replace(served, replicas=())) is None


# --- the board ---------------------------------------------------------------------------------------


class Elastic(Quiet):
    """One whose number of engines a test sets."""

    def count(self, wanted: int) -> None:
        """As if the policy of the number had decided."""
        assert self._scaling is not None
        self._scaling.wanted = wanted


@pytest.fixture
def serve() -> Serve:
    return Serve("a", "b")


@pytest.fixture
def board(clock: Clock, serve: Serve) -> Iterator[Elastic]:
    made = Elastic(FluidSpec(engines=2, least=2, most=3), clock, serve)
    clock.now += SETTLE_S
    report(made, "a", "b")
    made.decide()
    look(made, clock)
    assert sorted(roles(made).values()) == ["decode", "prefill"]
    yield made


def look(of: Elastic, clock: Clock) -> None:
    clock.now += MOVING_S
    asyncio.run(of._scale())


def join(of: Elastic) -> None:
    """The engine c comes and makes its first transfers."""
    assert report(of, "c") == {"local_below": 0, "warm": ["a", "b"]}
    assert report(of, "a")["warm"] == report(of, "b")["warm"] == ["c"]
    report(of, "a", "b", warmed={"c": ""})
    report(of, "c", warmed={"a": "", "b": ""})


def test_a_new_engine_has_no_role_until_it_is_warm(board: Elastic) -> None:
    before = roles(board)
    report(board, "c")
    assert roles(board) == {**before, "c": "joining"}
    assert board._state().roles["c"] == "joining", "routers know it"
    board.decide()
    assert roles(board)["c"] == "joining"
    with pytest.raises(ValueError, match="1:2 is 3 engines, but 2 engines report"):
        asyncio.run(board.set_split("1:2"))


def test_a_warm_engine_gets_a_role_and_that_is_logged(board: Elastic) -> None:
    join(board)
    assert "joining" not in roles(board).values() and len(roles(board)) == 3
    assert "c has made its first transfers" in asyncio.run(board.decisions())[-1]["reason"]


def test_a_leaving_engine_has_no_role_and_both_kinds_stay(board: Elastic, serve: Serve, clock: Clock) -> None:
    join(board)
    serve.state(c=RUNNING)
    serve.served = replace(serve.served, target=3)
    clock.now += STEADY_S
    report(board, "a", "b", "c")
    look(board, clock)
    asyncio.run(board.set_roles({"a": "decode", "b": "decode", "c": "prefill"}))
    board._by = "auto"
    board.count(2)
    report(board, "c", running=1)
    look(board, clock)
    assert roles(board)["c"] == "leaving" and not serve.targets
    assert sorted(each for name, each in roles(board).items() if name != "c") == ["decode", "prefill"]
    assert any("c leaves" in each["reason"] for each in asyncio.run(board.decisions()))
    for _ in range(5):
        report(board, "a", "b", "c", running=1)
        look(board, clock)
    assert not serve.targets
    report(board, "a", "b", "c")
    look(board, clock)
    assert serve.targets == [2]
    serve.state(c=STOPPING)
    look(board, clock)
    report(board, "a", "b", "c")
    board.decide()
    assert roles(board)["c"] == "leaving"
    serve.state(c=None)
    clock.now += SILENT_S + 1
    report(board, "a", "b")
    look(board, clock)
    board.decide()
    assert sorted(roles(board)) == ["a", "b"]


def test_the_number_follows_the_policy_and_is_told(
    board: Elastic, serve: Serve, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets: list[tuple[int, int]] = []

    def decide(now_s: float, playing: int, wanted: int, load: Any) -> CountDecision:
        targets.append((playing, wanted))
        return CountDecision(3, wanted != 3, "2 -> 3 engines: why")

    monkeypatch.setattr(type(board._count_policy), "decide", lambda self, *args: decide(*args))
    board.decide()
    look(board, clock)
    assert serve.targets == [3] and targets == [(2, 2)]
    looked = asyncio.run(board.look())
    assert looked["count"] == {"wanted": 3, "least": 2, "most": 3, "reason": "2 -> 3 engines: why"}
    assert asyncio.run(board.decisions())[-1]["reason"] == "2 -> 3 engines: why"
    join(board)
    board.decide()
    assert targets[-1] == (3, 3)


def test_an_idle_pool_is_not_loaded_by_what_came_before(board: Elastic, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(board._policy), "demand", lambda self, engines: Demand(9.0, 9.0, 9.0, 1))
    report(board, "a", running=1)
    board.decide()
    assert "2 are loaded 1800%" in asyncio.run(board.look())["count"]["reason"]
    report(board, "a")
    board.decide()
    assert "2 are loaded 0%" in asyncio.run(board.look())["count"]["reason"]


def test_a_number_is_not_changed_while_roles_are_set_by_hand(board: Elastic) -> None:
    asyncio.run(board.set_split("1:1"))
    assert board._scaling is not None
    board._scaling.wanted = 5
    board.decide()
    assert board._scaling.wanted == 5
    assert "set by hand" in asyncio.run(board.look())["count"]["reason"]


def test_a_new_board_knows_who_is_warm_and_who_is_not(board: Elastic, serve: Serve, clock: Clock) -> None:
    report(board, "c")
    new = Elastic(FluidSpec(engines=2, least=2, most=3), clock, serve)
    asyncio.run(asyncio.wait_for(new.follow(board._state().fields, "router"), 5))
    clock.now += SETTLE_S
    assert report(new, "a", "b", "c")["warm"] == ["a", "b"]
    new.decide()
    assert roles(new) == roles(board)
    report(new, "a", "b", warmed={"c": ""})
    report(new, "c", warmed={"a": "", "b": ""})
    assert "joining" not in roles(new).values()


def test_a_controller_that_is_away_changes_nothing(board: Elastic, serve: Serve, clock: Clock) -> None:
    serve.error = RuntimeError("the controller is gone")
    before = roles(board)
    clock.now += STEADY_S
    look(board, clock)
    assert roles(board) == before


def test_a_fixed_number_asks_ray_serve_for_nothing(clock: Clock, serve: Serve) -> None:
    made = Elastic(FluidSpec(roles="1:1"), clock, serve)
    clock.now += SETTLE_S
    report(made, "a", "b")
    look(made, clock)
    report(made, "c")
    assert serve.looks == 0 and "joining" not in roles(made).values()
    assert asyncio.run(made.look())["count"] is None


# --- all of it at random ---------------------------------------------------------------------------------


class World:
    """Engines that come, warm up, fail, leave and die, Ray Serve that starts and stops them, at random by seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.clock = Clock()
        self.serve = Serve("a", "b", "c")
        self.board = Elastic(FluidSpec(engines=3, least=2, most=5), self.clock, self.serve)
        self.made = 0
        self.pairs: set[tuple[str, str]] = set()  # first transfers that were made
        self.founders = {"a", "b", "c"}
        self.clock.now += SETTLE_S

    @property
    def alive(self) -> list[str]:
        return [each.name for each in self.serve.served.replicas if each.state in (RUNNING, STOPPING)]

    def tell(self) -> None:
        for name in self.alive:
            answer = report(self.board, name, running=self.rng.choice((0, 0, 1, 5)))
            outcomes = {}
            for prefill in answer["warm"]:
                outcomes[prefill] = self.rng.choice(("", "", "it failed"))
                if not outcomes[prefill]:
                    self.pairs.add((prefill, name))
            if outcomes:
                report(self.board, name, warmed=outcomes)

    def ray_serve(self) -> None:
        """One step towards the target, or a death."""
        rng, serve = self.rng, self.serve
        by_state = {state: [r.name for r in serve.served.replicas if r.state == state] for state in (RUNNING, STOPPING)}
        starting = [r.name for r in serve.served.replicas if r.state == "STARTING"]
        surplus = len(by_state[RUNNING]) + len(starting) - serve.served.target
        if by_state[STOPPING]:
            serve.state(**{by_state[STOPPING][0]: None})
        elif starting:
            serve.state(**{starting[0]: RUNNING})
        elif surplus < 0:
            self.made += 1
            serve.state(**{f"new{self.made}": "STARTING"})
        elif surplus > 0:  # sometimes another one than expected
            victim = next_to_stop(serve.served) if rng.random() < 0.8 else rng.choice(by_state[RUNNING])
            assert victim is not None
            serve.state(**{victim: STOPPING})
        elif rng.random() < 0.1 and len(by_state[RUNNING]) > 1:
            serve.state(**{rng.choice(by_state[RUNNING]): None})

    def step(self) -> None:
        rng = self.rng
        self.clock.now += MOVING_S
        self.tell()
        if rng.random() < 0.5:
            self.ray_serve()
        if self.board._scaling is not None and self.board._scaling.wanted is not None and rng.random() < 0.1:
            self.board.count(min(max(self.board._scaling.wanted + rng.choice((-1, 1)), 2), 5))
        asyncio.run(self.board._scale())
        self.board.decide()


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_only_warm_engines_work_and_both_kinds_stay(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    decided = type(Elastic(FluidSpec(engines=3, least=2, most=5))._count_policy)
    monkeypatch.setattr(decided, "decide", lambda self, now_s, playing, wanted, load: CountDecision(wanted, False, ""))
    world = World(seed)
    numbers = set()
    worked: set[str] = set()
    for _ in range(150):
        world.step()
        reports = roles(world.board)
        working = {name for name, role in reports.items() if role not in ("joining", "leaving", "none")}
        numbers.add(len(working))
        if len(working) > 1:
            assert {"prefill", "decode"} <= {reports[name] for name in working}, reports
        stopping = {each.name for each in world.serve.served.replicas if each.state == STOPPING}
        assert not (working & stopping & set(world.board._scaling.leaving if world.board._scaling else ()))
        for new in working - worked - world.founders:
            others = (worked & working) - {new}
            missing = {pair for each in others for pair in ((new, each), (each, new))} - world.pairs
            assert not missing, f"{new} works without {missing}"
        worked |= working
        assert all(2 <= targets <= 5 for targets in world.serve.targets)
    assert len(numbers) > 1 and world.made > 0
