"""Rates without queues, beside the simulator that has queues, routers and transfers."""

from __future__ import annotations

import pytest
from support.plans import HARDWARE, MODEL, SHAPE, nodes, scenario

from pdlab.core.deployment import Deployment, parse_label
from pdlab.core.workload import Closed, Level, Open, Workload
from pdlab.plan.candidates import engine_shapes, shortlist
from pdlab.plan.planner import evaluate
from pdlab.plan.rate_matching import RateMatcher, unit_of
from pdlab.sim.kv_transfer import link_of
from pdlab.sim.level import columns
from pdlab.sim.simulator import simulate


def served(label: str, workload: Workload, load: Closed | Open, prompts: int) -> tuple[float, float]:
    """(requests/s, mean TPOT in seconds) of new prompts."""
    deployment = Deployment(topology=parse_label(label))
    level = Level(load=load, num_requests=prompts, seed=0)
    (done,) = simulate(deployment, [level], workload, HARDWARE, SHAPE, prompts="fresh", scattered=True)
    return len(done.finish_s) / done.duration_s, float(columns(done).tpot_s.mean())


@pytest.mark.parametrize("tokens", [500, 3000, 5000, 8000, 12_000])
@pytest.mark.parametrize("label", ["pd-spread-p1xtp4-d1xtp8", "pd-spread-p1xtp1-d1xtp4"])
def test_prefill_that_is_never_idle_fills_its_steps(label: str, tokens: int) -> None:
    """Prompts are split between steps: 5,000 tokens are not the 61 % of a step of 8,192 that one whole prompt has."""
    workload = Workload(input_tokens=tokens, output_tokens=2)
    unit = unit_of(Deployment(topology=parse_label(label)))
    rps, _ = served(label, workload, Closed(concurrency=128), 1500)
    assert rps == pytest.approx(RateMatcher(HARDWARE, SHAPE, workload).prefill(unit.prefill), rel=0.02)


@pytest.mark.parametrize(
    ("label", "tokens", "load"),
    [
        ("pd-spread-p8xtp4-d1xtp4", 1000, Closed(concurrency=64)),
        ("pd-spread-p8xtp4-d1xtp4", 5000, Closed(concurrency=48)),
        ("pd-spread-p8xtp4-d1xtp2", 5000, Closed(concurrency=16)),
        ("pd-pack-p4xtp1-d1xtp4", 5000, Open(rate_rps=3)),  # blocks of different TP never merge
        ("pd-pack-p1xtp4-d1xtp4", 5000, Open(rate_rps=4)),
        ("pd-pack-p2xtp2-d1xtp2", 2000, Open(rate_rps=6)),
    ],
)
def test_decode_by_its_tpot(label: str, tokens: int, load: Closed | Open) -> None:
    """The requests/s at the TPOT that a load has, where prefill is not the limit. Long stalls bring the equal requests
    of a closed loop in step, which rate matching ignores."""
    workload = Workload(input_tokens=tokens, output_tokens=250)
    deployment = Deployment(topology=parse_label(label))
    rps, tpot_s = served(label, workload, load, 800)
    matcher, unit = RateMatcher(HARDWARE, SHAPE, workload), unit_of(deployment)
    assert unit.decode is not None
    matched = matcher.rates(unit.prefill, unit.decode, 1.002 * tpot_s, link_of(deployment)).decode_rps
    assert rps == pytest.approx(matched, rel=0.08)


@pytest.mark.parametrize(("tokens", "rate"), [(1000, 8), (1000, 12), (5000, 3), (5000, 5)])
def test_collocated_by_its_tpot(tokens: int, rate: float) -> None:
    """Under Poisson arrivals. In a closed loop equal requests run in step, which rate matching ignores."""
    workload = Workload(input_tokens=tokens, output_tokens=250)
    rps, tpot_s = served("collocated-1xtp4", workload, Open(rate_rps=rate), 600)
    unit = unit_of(Deployment(topology=parse_label("collocated-1xtp4")))
    assert rps == pytest.approx(RateMatcher(HARDWARE, SHAPE, workload).collocated(unit.prefill, tpot_s)[0], rel=0.08)


def test_a_wire_that_is_too_slow_limits_the_rate() -> None:
    workload = Workload()
    slow = HARDWARE.with_values({"srd_gb_per_s": 0.1})
    unit = unit_of(Deployment(topology=parse_label("pd-spread-p1xtp4-d1xtp4")))
    fast_rps, slow_rps = (RateMatcher(each, SHAPE, workload).serves(unit, 0.02, "srd").rps for each in (HARDWARE, slow))
    moves_rps = 4 * 0.1e9 / (5000 * 73_728)
    assert moves_rps < fast_rps and slow_rps == pytest.approx(moves_rps)


def test_the_shortlist_has_the_units_that_serve_most() -> None:
    """Copies of scattered blocks hold the decode engines of packs. Packs took all places by rates without this time,
    and the best of them serves less than the spread deployment."""
    asked = scenario(tpot_s=0.012, ttft_s=1.0, workload=Workload(input_tokens=2000, output_tokens=500))
    shapes = engine_shapes(HARDWARE, SHAPE, 16, asked.workload)
    matcher = RateMatcher(HARDWARE, SHAPE, asked.workload, ttft_s=1.0)
    chosen = shortlist(matcher, MODEL, nodes(2), 16, shapes, 0.012).deployments
    per_gpu = {}
    for sized in chosen:
        candidate = evaluate(asked, sized, 16)
        per_gpu[sized.deployment.label] = candidate.capacity_per_gpu or 0.0
    packs = [value for label, value in per_gpu.items() if label.startswith("pd-pack")]
    assert max(per_gpu.values()) > 1.2 * max(packs, default=0.0)


def test_an_answer_of_one_token_has_no_tpot() -> None:
    """A stall of some 150 ms is longer than any bound on TPOT."""
    unit = unit_of(Deployment(topology=parse_label("pd-pack-p1xtp1-d1xtp2")))
    one, bound = Workload(input_tokens=12_000, output_tokens=1), 0.008
    assert RateMatcher(HARDWARE, SHAPE, one).serves(unit, bound).rps > 1
