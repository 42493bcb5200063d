"""Fluid pools in the simulator: fixed roles are a disaggregated deployment, moving ones lose nothing."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdlab.core.catalog import load_model
from pdlab.core.deployment import Deployment, Fluid, Pool, parse_label
from pdlab.core.lengths import parse_lengths
from pdlab.core.workload import Closed, Level, Load, Open, Workload
from pdlab.roles.observed import ObservedPool, Role
from pdlab.roles.policy import RoleDecision
from pdlab.sim.fluid import Controller
from pdlab.sim.hardware import load_hardware
from pdlab.sim.level import SimulatedLevel, figures, records
from pdlab.sim.simulator import simulate

HARDWARE = load_hardware("h100-vllm-0.11")
SHAPE = load_model("gpt-oss-120b")
WORKLOAD = Workload(input_tokens=2000, output_tokens=100)


def run(
    topology: str | Fluid,
    load: Load,
    requests: int = 120,
    *,
    workload: Workload = WORKLOAD,
    seed: int = 0,
    controller: Controller | None = None,
    link: str | None = "srd",
) -> SimulatedLevel:
    assert SHAPE is not None
    deployment = Deployment(topology=parse_label(topology) if isinstance(topology, str) else topology)
    level = Level(load=load, num_requests=requests, seed=0)
    (done,) = simulate(
        deployment,
        [level],
        workload,
        HARDWARE,
        SHAPE,
        seed=seed,
        controller=controller,
        link=link,  # type: ignore[arg-type]
    )
    return done


@dataclass
class Shuffled:
    """New roles at every look, at random."""

    random: random.Random
    looks: list[ObservedPool] = field(default_factory=list)

    def decide(self, observed: ObservedPool) -> RoleDecision:
        self.looks.append(observed)
        names = [each.engine for each in observed.engines]
        self.random.shuffle(names)
        prefill = self.random.randint(1, len(names) - 1)
        roles: dict[str, Role] = {name: "prefill" if at < prefill else "decode" for at, name in enumerate(names)}
        return RoleDecision(prefill, len(names) - prefill, True, "shuffled", roles)


@pytest.mark.parametrize("load", [Closed(concurrency=12), Open(rate_rps=6)])
def test_one_engine_of_each_role_is_the_disaggregated_deployment_of_two(load: Load) -> None:
    fluid, spread = run("pd-fluid-2xtp2-p1d1", load), run("pd-spread-p1xtp2-d1xtp2", load)
    assert records(fluid) == records(spread)
    assert fluid.transferred_bytes == spread.transferred_bytes > 0
    assert [(split.prefill, split.decode) for split in fluid.splits] == [(1, 1)]


@pytest.mark.parametrize("load", [Closed(concurrency=24), Open(rate_rps=12)])
@pytest.mark.parametrize(("prefill", "decode"), [(1, 3), (3, 1), (2, 2)])
def test_a_fixed_split_serves_as_the_disaggregated_deployment_of_it(load: Load, prefill: int, decode: int) -> None:
    """But for routing: a fluid pool's routers know all loads, those of the other know few."""
    fluid = figures(run(f"pd-fluid-{prefill + decode}xtp2-p{prefill}d{decode}", load, 400))
    spread = figures(run(f"pd-spread-p{prefill}xtp2-d{decode}xtp2", load, 400))
    assert fluid.requests_per_s == pytest.approx(spread.requests_per_s, rel=0.06)
    assert fluid.tpot_s == pytest.approx(spread.tpot_s, rel=0.06)
    assert fluid.ttft_s < 1.1 * spread.ttft_s


def test_requests_to_decode_are_spread_evenly() -> None:
    done = run("pd-fluid-6xtp2-p2d4", Open(rate_rps=30), 300)
    busiest = max(done.busy.values())
    assert 0 < busiest <= 1
    tpots = sorted((end - first) / 99 for end, first in zip(done.finish_s, done.first_token_s, strict=True))
    assert tpots[int(0.95 * len(tpots))] < 1.5 * tpots[len(tpots) // 2]


@pytest.mark.property
@settings(max_examples=15, deadline=None)
@given(st.integers(2, 6), st.floats(5, 60), st.integers(0, 2**32 - 1))
def test_roles_that_change_at_every_look_lose_no_request_and_no_memory(engines: int, rps: float, seed: int) -> None:
    controller = Shuffled(random.Random(seed))
    pool = Fluid(pool=Pool(replicas=engines, tp=2))
    done = run(pool, Open(rate_rps=rps), 80, seed=seed, controller=controller)
    for record in records(done):
        assert record.finish_s is not None and record.first_token_s is not None
        assert record.arrival_s < record.first_token_s < record.finish_s
    assert all(arrived > prefilled for arrived, prefilled in zip(done.kv_arrived_s, done.prefill_end_s, strict=True)), (
        "every request moved: none is decoded where it was prefilled"
    )
    last = controller.looks[-1]
    assert [(each.running, each.waiting_prompt_tokens, each.kv_used_share) for each in last.engines] == [
        (0, 0, 0.0)
    ] * engines
    looks = controller.looks
    assert sum(each.prefilled_tokens for look in looks for each in look.engines) == 80 * 2000
    assert sum(count.requests for look in looks for count in look.window.prompts.values()) == 80
    assert sum(count.tokens for look in looks for count in look.window.answers.values()) == 80 * 100
    assert sum(each.generated_tokens for look in looks for each in look.engines) == 80 * 100
    assert sum(len(look.window.ttft_s) for look in looks) == sum(len(look.window.tpot_s) for look in looks) == 80


def test_the_same_seed_gives_the_same_requests_and_decisions() -> None:
    pool = Fluid(pool=Pool(replicas=6, tp=2), slo_ttft_s=2.0, slo_tpot_s=0.012)
    first, second = (run(pool, Open(rate_rps=15), 300) for _ in range(2))
    assert records(first) == records(second)
    assert first.splits == second.splits


def share_within(done: SimulatedLevel, ttft_s: float, tpot_s: float, after_s: float) -> float:
    judged = [each for each in records(done) if each.arrival_s >= after_s]
    assert judged
    kept = 0
    for each in judged:
        assert each.first_token_s is not None and each.finish_s is not None
        tpot = (each.finish_s - each.first_token_s) / (each.output_tokens - 1)
        kept += each.first_token_s - each.arrival_s <= ttft_s and tpot <= tpot_s
    return kept / len(judged)


def test_roles_follow_a_mix_that_no_fixed_split_serves() -> None:
    workload = Workload(lengths=parse_lengths("mixes:5000:250@23,1000:1000@16.5,every=40"))
    shares = {}
    for roles in ("auto", "1:7", "2:6", "3:5", "4:4"):
        pool = Fluid(pool=Pool(replicas=8, tp=2), roles=roles, slo_ttft_s=2.0, slo_tpot_s=0.012)
        done = run(pool, Open(rate_rps=1), 2500, workload=workload)
        shares[roles] = share_within(done, 2.0, 0.012, 20)
    fixed = max(share for roles, share in shares.items() if roles != "auto")
    assert shares["auto"] > 1.15 * fixed, shares


def test_a_mix_that_moves_is_the_same_for_every_deployment_and_seed() -> None:
    workload = Workload(lengths=parse_lengths("mixes:500:25@2,100:100,every=5"))
    level = Level(load=Open(rate_rps=4), num_requests=100, seed=0)
    arrivals = workload.arrivals(level)
    for topology, seed in (("pd-spread-p1xtp2-d1xtp2", 0), ("pd-fluid-2xtp2", 7), ("collocated-1xtp2", 3)):
        done = run(topology, Open(rate_rps=4), 100, workload=workload, seed=seed)
        assert tuple(zip(done.arrival_s, done.input_tokens, done.output_tokens, strict=True)) == arrivals


def test_short_prompts_stay_where_they_are_decoded() -> None:
    pool = Fluid(pool=Pool(replicas=4, tp=2), roles="1:3", prefill_locally_below=2001)
    local = run(pool, Open(rate_rps=10))
    assert local.transferred_bytes == 0 and not any(local.kv_arrived_s)
    moved = run(pool.model_copy(update={"prefill_locally_below": 2000}), Open(rate_rps=10))
    assert moved.transferred_bytes > 0 and all(moved.kv_arrived_s)


def test_auto_keeps_short_prompts_where_prefill_is_behind() -> None:
    pool = Fluid(pool=Pool(replicas=4, tp=2), p_min=1, d_min=3, prefill_locally_below="auto")
    workload = Workload(input_tokens=4000, output_tokens=20)
    auto = run(pool, Open(rate_rps=14), 300, workload=workload)
    never = run(pool.model_copy(update={"prefill_locally_below": None}), Open(rate_rps=14), 300, workload=workload)
    assert 0 < auto.transferred_bytes < never.transferred_bytes
    assert sum(auto.first_token_s) < sum(never.first_token_s)


def test_two_engines_of_a_node_use_its_nvlink() -> None:
    """Four engines of TP2 are a node; over the network a prompt takes longer."""
    within = run("pd-fluid-2xtp2-p1d1", Closed(concurrency=1), 4, link=None)
    network = run("pd-fluid-2xtp2-p1d1", Closed(concurrency=1), 4, link="srd")
    assert sum(within.first_token_s) < sum(network.first_token_s)
    alone = run("pd-fluid-5xtp2-p3d2", Closed(concurrency=1), 40, link=None)
    moved = {round(b - a, 4) for a, b in zip(alone.prefill_end_s, alone.kv_arrived_s, strict=True)}
    assert len(moved) == 2, "one of the two that decode is on the node of those that prefill"
