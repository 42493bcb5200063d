"""The oracle at the edge of its pool; that it agrees with vLLM is a contract test."""

from __future__ import annotations

import pytest

from pdlab.traffic.oracle import HitOracle
from pdlab.traffic.prompts import TrafficPrompts
from pdlab.traffic.requests import TrafficRequest


@pytest.mark.parametrize("window", [None, 128])
def test_a_prompt_that_fills_the_pool_hits_what_is_held(window: int | None) -> None:
    """What it hits is in use, and not taken for its new blocks."""
    prompts = TrafficPrompts(16)
    oracle = HitOracle(100, 16, window)
    shared = TrafficRequest("a", "a", (("system", 480),), 1, at_s=0.0)
    longer = TrafficRequest("b", "b", (("system", 480), ("more", 1100)), 1, at_s=1.0)
    hits = [oracle.compute(prompts.of(each)[0]) for each in (shared, longer)]
    assert hits == [0, 480 if window is None else 464]


def test_prompts_are_the_same_where_it_is_known_how_many_go_on_from_each() -> None:
    requests = [
        TrafficRequest("a", "a", (("a", 40),), 20, at_s=0.0),
        TrafficRequest("b", "a", (("b", 9),), 20, parent="a"),
        TrafficRequest("c", "a", (("c", 30),), 5, parent="a"),
        TrafficRequest("d", "a", (("d", 3),), 7, parent="b"),
    ]
    one, other = TrafficPrompts(16), TrafficPrompts(16, remembered=1)
    for request, followers in zip(requests, (2, 1, 0, 0), strict=True):
        assert one.of(request) == other.of(request, followers)
    assert not other._ends and not other._left, "nothing goes on from them any more"
