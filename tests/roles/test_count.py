"""How many engines a fluid pool wants: up and down with what is to be done, and never to and fro."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdlab.roles.count import DOWN_BELOW, UP_ABOVE, CountDecision, CountPolicy, load_of
from pdlab.roles.policy import Demand
from pdlab.roles.spec import FluidSpec

LOOK_S = 0.5
SPEC = FluidSpec(engines=2, least=2, most=6)


@dataclass
class Pool:
    """Engines that start some time after they are wanted, and stop some time after they are not."""

    policy: CountPolicy
    wanted: int
    start_s: float = 20.0
    now_s: float = 0.0
    changed_s: float = -math.inf

    @property
    def playing(self) -> int:
        started = self.now_s - self.changed_s >= self.start_s
        return self.wanted if started else self.wanted - 1

    def run(self, seconds: float, work: float, jitter: float = 0.0, seed: int = 0) -> list[CountDecision]:
        """The changes while there is so much ``work``, in engines, at random within a share of ``jitter``."""
        rng, changes = random.Random(seed), []
        for _ in range(int(seconds / LOOK_S)):
            self.now_s += LOOK_S
            work_now = work * (1 + jitter * rng.uniform(-1, 1))
            decision = self.policy.decide(self.now_s, self.playing, self.wanted, lambda n, w=work_now: w / n)
            if decision.engines > self.wanted:
                self.changed_s = self.now_s
            self.wanted = decision.engines
            changes += [decision] if decision.changed else []
        return changes


def pool(wanted: int = 2, policy: CountPolicy | None = None) -> Pool:
    return Pool(policy or CountPolicy(SPEC, settle_s=0.0), wanted)


def test_more_work_than_all_can_do_starts_one_engine_after_another() -> None:
    made = pool()
    assert not made.run(9, work=3.0)
    (first,) = made.run(3, work=3.0)
    assert first.engines == 3 and first.reason == "2 -> 3 engines: 2 are loaded 150%, more than 90% for 10 s"
    assert not made.run(20, work=3.0), "the next one only once this one works"
    (second,) = made.run(15, work=3.0)
    assert second.engines == 4 and second.reason.startswith("3 -> 4 engines: 3 are loaded 100%")
    assert not made.run(600, work=3.0), "four are loaded 75 %, three would be 100 %"


def test_a_burst_starts_nothing() -> None:
    made = pool()
    for _ in range(20):
        assert not made.run(8, work=5.0) + made.run(1, work=1.0)


def test_engines_that_are_not_needed_stop_one_after_another() -> None:
    made = pool(wanted=4)
    (first,) = made.run(121, work=0.5)
    assert first.engines == 3 and first.reason == "4 -> 3 engines: 3 would be loaded 17%, less than 60% for 120 s"
    (second,) = made.run(121, work=0.5)
    assert second.engines == 2
    assert not made.run(600, work=0.0), "never fewer than the least"


def test_a_pause_is_no_reason_to_stop_one() -> None:
    made = pool(wanted=3)
    for _ in range(10):
        assert not made.run(100, work=0.0) + made.run(1, work=2.4)


def test_a_launch_is_checked_with_the_engines_that_it_began_with() -> None:
    made = pool(wanted=3, policy=CountPolicy(FluidSpec(engines=3, least=2, most=6)))
    assert not made.run(599, work=0.0)
    assert [each.engines for each in made.run(10, work=0.0)] == [2]


def test_a_number_that_another_has_set_comes_within_bounds() -> None:
    decided = CountPolicy(SPEC, settle_s=0.0).decide(0.0, 9, 9, lambda engines: 0.5)
    assert decided == CountDecision(8, True, "9 -> 8 engines: 2 to 6 are allowed")
    assert CountPolicy(SPEC, settle_s=0.0).decide(0.0, 1, 1, lambda engines: None).engines == 2


def test_what_is_not_known_changes_nothing() -> None:
    decided = CountPolicy(SPEC, settle_s=0.0).decide(0.0, 3, 3, lambda engines: None)
    assert decided == CountDecision(3, False, "3 engines stay: rates are not known yet")


def test_an_engine_that_never_starts_is_wanted_no_longer_than_its_work_is_there() -> None:
    made = pool(wanted=3)
    made.start_s, made.changed_s = math.inf, 0.0
    assert made.playing == 2 and not made.run(300, work=3.0)
    (change,) = made.run(121, work=0.3)
    assert change.engines == 2


@pytest.mark.property
@settings(max_examples=60, deadline=None)
@given(st.integers(2, 6), st.floats(0.0, 7.0), st.floats(0.0, 0.18), st.integers(0, 2**32 - 1))
def test_a_stationary_load_gets_one_number_and_keeps_it(begins: int, work: float, jitter: float, seed: int) -> None:
    made = pool(wanted=begins)
    changes = [each.engines for each in made.run(1500, work, jitter, seed)]
    assert len(changes) <= 4 and changes in (sorted(changes), sorted(changes, reverse=True)), "one way alone"
    assert all(abs(b - a) == 1 for a, b in zip([begins, *changes], changes, strict=False)), "one step at a time"
    assert 2 <= made.wanted <= 6
    assert not made.run(600, work, jitter, seed + 1) or jitter, "and stays"
    lightest = work * (1 - jitter) / made.wanted
    assert lightest <= UP_ABOVE or made.wanted == 6
    heaviest_of_fewer = work * (1 + jitter) / (made.wanted - 1)
    assert heaviest_of_fewer >= DOWN_BELOW * (1 - jitter) or made.wanted == 2


def test_the_load_is_that_of_the_best_split() -> None:
    demand = Demand(prefill=1.0, staying=0.0, coming=2.0, decoding=2)
    assert load_of(demand, 3, 1, 1, idle=False) == pytest.approx(1.0)
    assert load_of(demand, 4, 1, 1, idle=False) == pytest.approx(1.0), "2:2 and 1:3 are both limited by one kind"
    assert load_of(demand, 6, 1, 1, idle=False) == pytest.approx(0.5)
    assert load_of(demand, 1, 1, 1, idle=False) == math.inf
    assert load_of(None, 3, 1, 1, idle=True) == 0.0
    assert load_of(None, 3, 1, 1, idle=False) is None
