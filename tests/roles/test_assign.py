"""Who changes its role."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlab.roles.assign import assign, first_split
from pdlab.roles.observed import EngineLoad, Role

LOADS = st.lists(
    st.tuples(st.sampled_from(["prefill", "decode", "draining"]), st.integers(0, 9), st.integers(0, 40)), min_size=2
)


def engines(*loads: tuple[Role, int, int]) -> list[EngineLoad]:
    return [EngineLoad(f"e{index}", *load) for index, load in enumerate(loads)]


@pytest.mark.property
@given(LOADS, st.data())
def test_as_many_prefill_as_asked_and_no_more_change_than_needed(
    loads: list[tuple[Role, int, int]], data: st.DataObject
) -> None:
    pool = engines(*loads)
    prefill = data.draw(st.integers(1, len(pool) - 1))
    opened = data.draw(st.integers(1, prefill))
    before = sum(each.role != "decode" for each in pool)
    roles = assign(pool, prefill, most_running=5, opened=opened)
    assert set(roles) == {each.engine for each in pool}
    assert sum(role != "decode" for role in roles.values()) == prefill
    assert sum(role == "prefill" for role in roles.values()) >= opened
    changed = [each for each in pool if (roles[each.engine] == "decode") != (each.role == "decode")]
    assert len(changed) == abs(prefill - before)
    for each in pool:
        if roles[each.engine] == "draining":
            assert each.running > 5 and each.role != "prefill"


def test_those_change_that_lose_least() -> None:
    pool = engines(("decode", 0, 30), ("decode", 0, 10), ("decode", 0, 20), ("prefill", 0, 0))
    assert assign(pool, 2, most_running=10) == {"e0": "decode", "e1": "prefill", "e2": "decode", "e3": "prefill"}
    pool = engines(("prefill", 5000, 0), ("prefill", 100, 0), ("draining", 0, 30), ("decode", 0, 10))
    assert assign(pool, 2)["e2"] == "decode", "what drains decodes most, and has stopped nothing yet"
    assert assign(pool, 1) == {"e0": "prefill", "e1": "decode", "e2": "decode", "e3": "decode"}


def test_an_engine_drains_and_then_prefills() -> None:
    pool = engines(("decode", 0, 30), ("decode", 0, 20), ("prefill", 0, 0))
    assert assign(pool, 2, most_running=3)["e1"] == "draining"
    assert (
        assign(engines(("decode", 0, 30), ("draining", 0, 4), ("prefill", 0, 0)), 2, most_running=3)["e1"] == "draining"
    )
    assert (
        assign(engines(("decode", 0, 30), ("draining", 0, 3), ("prefill", 0, 0)), 2, most_running=3)["e1"] == "prefill"
    )


def test_where_prompts_wait_those_with_fewest_requests_stop_draining() -> None:
    pool = engines(("draining", 0, 30), ("draining", 0, 20), ("prefill", 0, 0), ("decode", 0, 40))
    assert assign(pool, 3, opened=2) == {"e0": "draining", "e1": "prefill", "e2": "prefill", "e3": "decode"}


@pytest.mark.parametrize(
    ("engines", "p_min", "d_min", "split"), [(8, 1, 1, (4, 4)), (2, 1, 1, (1, 1)), (8, 6, 1, (6, 2)), (8, 1, 7, (1, 7))]
)
def test_the_first_split_is_half_within_the_bounds(
    engines: int, p_min: int, d_min: int, split: tuple[int, int]
) -> None:
    assert first_split(engines, p_min, d_min) == split
