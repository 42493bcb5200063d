"""Plans and what a seed makes of them; the dry run's text against a stored one."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults.test_kinds import PAIR
from hypothesis import given
from hypothesis import strategies as st
from support import golden

from pdlab.faults.kinds import KINDS
from pdlab.faults.plan import FOLDER, FaultPlan, describe, load_plan, schedule

GOLDEN = Path(__file__).parent / "golden"
SHIPPED = sorted(path.stem for path in FOLDER.glob("*.yaml"))
plans = st.builds(
    FaultPlan,
    faults=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=6).map(tuple) | st.just(("all",)),
    rounds=st.integers(1, 3),
    seed=st.integers(0, 1000),
    warm_s=st.floats(0, 60),
    every_s=st.floats(1, 60),
    spread=st.floats(0, 0.99),
)


def test_in_slow_time_leases_and_limits_are_longer_and_ray_is_not() -> None:
    plan = FaultPlan(faults=("kill_raylet",), lease_s=30, limit_s=60, hold_s=5, recover_s=100)
    slowed = plan.slowed(4.0)
    assert (slowed.lease_s, slowed.limit_s) == (120, 240)
    assert slowed.model_copy(update={"lease_s": 30, "limit_s": 60}) == plan


def test_what_is_shipped() -> None:
    assert SHIPPED == ["all", "ingress", "nodes", "replicas", "short", "soak", "workers"]
    soak = load_plan("soak")
    assert (soak.duration_s, soak.concurrency, soak.every_s) == (1200, 8, 30)
    assert len(schedule(soak, PAIR).due) == 40, "twenty minutes, a fault every 30 s, the first after 20 s"
    assert load_plan("all").faults == ("all",)
    assert "kill_prefill_before_read" in load_plan("short").faults


@pytest.mark.property
@given(plans)
def test_a_schedule(plan: FaultPlan) -> None:
    made = schedule(plan, PAIR)
    assert made == schedule(plan, PAIR), "by the seed alone"
    names = list(KINDS) if plan.faults == ("all",) else plan.faults
    possible = [name for name in names if name not in made.impossible]
    assert len(made.due) == plan.rounds * len(possible)
    assert {due.kind.name for due in made.due} == set(possible)
    assert set(made.impossible) | set(possible) == set(names)
    times = [due.at_s for due in made.due]
    assert times == sorted(times)
    for place, at_s in enumerate(times):
        assert plan.warm_s + place * plan.every_s - 0.001 <= at_s <= plan.warm_s + (place + 1) * plan.every_s + 0.001
    assert all(0 <= due.draw < 1 for due in made.due)


@pytest.mark.property
@given(plans, st.floats(61, 600))
def test_a_soak_has_each_kind_about_as_often(plan: FaultPlan, duration_s: float) -> None:
    soak = FaultPlan.model_validate({**plan.model_dump(), "rounds": 1, "duration_s": duration_s, "warm_s": 5.0})
    made = schedule(soak, PAIR)
    assert all(5.0 <= due.at_s < duration_s for due in made.due)
    names = list(KINDS) if soak.faults == ("all",) else list(soak.faults)
    possible = {name: names.count(name) for name in names if name not in made.impossible}
    rounds = [sum(due.kind.name == name for due in made.due) / weight for name, weight in possible.items()]
    assert not rounds or max(rounds) - min(rounds) <= 1, "seeded order, every kind once before one comes again"


def test_another_seed_is_another_schedule() -> None:
    soak = load_plan("soak")
    other = soak.model_copy(update={"seed": 1})
    assert [due.kind.name for due in schedule(soak, PAIR).due] != [due.kind.name for due in schedule(other, PAIR).due]


def test_nothing_possible_is_no_fault() -> None:
    made = schedule(FaultPlan(faults=("link_down",)), PAIR)
    assert made.due == () and set(made.impossible) == {"link_down"}


@pytest.mark.golden
@pytest.mark.parametrize("name", SHIPPED)
def test_the_dry_run(name: str) -> None:
    plan = load_plan(name)
    replicas: dict[str, int] = {str(role): count for role, count in PAIR.replicas.items()}
    pair = (
        PAIR._replace(parts=PAIR.parts | {("prefill", "worker"), ("decode", "worker")}) if name == "workers" else PAIR
    )
    text = describe(plan, schedule(plan, pair), "pd-spread-p1xtp1-d1xtp1 at http://127.0.0.1:8000", replicas) + "\n"
    golden.compare(text, GOLDEN / f"{name}.txt")
