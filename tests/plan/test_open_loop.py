"""Goodput under Poisson arrivals: where long runs lose the SLO, and never above what is served."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.plans import HARDWARE, SHAPE, scenario

from pdlab.analysis.goodput_map import RateSweep, cell
from pdlab.core.deployment import Deployment, Pool, parse_label
from pdlab.core.gpu_count import DEFAULT_COUNT
from pdlab.core.lengths import Uniform
from pdlab.core.workload import Closed, Level, Open, Slo, Workload
from pdlab.plan import open_loop, planner
from pdlab.plan.pictures import simulated_sweeps
from pdlab.plan.planner import Candidate, Plan, evaluate, sized_deployment, under_poisson
from pdlab.plan.rate_matching import RateMatcher
from pdlab.plan.scenario import Scenario, judged
from pdlab.results.slo import stresses
from pdlab.sim.level import columns
from pdlab.sim.simulator import simulate


def goodput_of(under: Scenario, label: str) -> tuple[float, float]:
    """(goodput, closed loop's capacity) of one copy, requests/s."""
    deployment = Deployment(topology=parse_label(label))
    candidate = under_poisson(under, evaluate(under, sized_deployment(under, deployment), deployment.gpus))
    assert candidate.goodput_rps is not None and candidate.closed is not None
    return candidate.goodput_rps, candidate.closed.requests_per_s


@pytest.mark.parametrize("label", ["collocated-2xtp4", "pd-spread-p3xtp1-d1xtp4"])
def test_it_is_where_a_long_run_with_other_arrivals_loses_the_slo(label: str) -> None:
    bounded = scenario(ttft_s=2.0, tpot_s=0.012)
    goodput_rps, _ = goodput_of(bounded, label)

    def share(factor: float) -> float:
        level = Level(load=Open(rate_rps=factor * goodput_rps), num_requests=5000, seed=11)
        deployment = Deployment(topology=parse_label(label))
        (done,) = simulate(deployment, [level], bounded.workload, HARDWARE, SHAPE, seed=11, scattered=True)
        return float((stresses(columns(done), bounded.slo)[1000:4500] <= 1).mean())

    assert share(0.9) >= bounded.slo.quantile > share(1.12)


def test_a_bound_that_queues_do_not_touch_is_met_no_further_than_what_is_served() -> None:
    """TPOT of PD does not grow with the queue before prefill: without a bound on TTFT any rate would meet it."""
    bounded = scenario(tpot_s=0.1)
    goodput_rps, _ = goodput_of(bounded, "pd-spread-p1xtp2-d1xtp4")
    prefill_rps = RateMatcher(HARDWARE, SHAPE, Workload()).prefill(Pool(tp=2))
    assert 0.8 * prefill_rps < goodput_rps < 1.1 * prefill_rps


def test_what_meets_at_no_rate_has_none() -> None:
    bounded = scenario(ttft_s=0.05)
    deployment = Deployment(topology=parse_label("collocated-1xtp4"))
    candidate = under_poisson(bounded, evaluate(bounded, sized_deployment(bounded, deployment), 4))
    assert (candidate.goodput_rps, candidate.served_per_gpu, candidate.best, candidate.loop) == (0, 0, None, "open")
    assert open_loop.goodput(bounded, deployment, 8.0, 1.0)[0] == 0


def test_goodput_is_of_varied_lengths_and_of_the_gpus_counted() -> None:
    """Six GPUs of a node of eight: those used are counted, unless the whole node is asked for; the map counts alike."""
    workload = Workload(lengths=Uniform(low=0.6, high=1.0))
    bounded = replace(scenario(ttft_s=2.0, tpot_s=0.012), workload=workload, count="nodes")
    deployment = Deployment(topology=parse_label("collocated-3xtp2"))
    candidate = under_poisson(bounded, evaluate(bounded, sized_deployment(bounded, deployment), 8))
    assert candidate.goodput_rps and candidate.capacity_rps and candidate.rates
    assert candidate.served_per_gpu == pytest.approx(candidate.goodput_rps / 8)
    assert candidate.capacity_per_gpu == pytest.approx(candidate.capacity_rps / 8)
    for outcome in candidate.rates:
        level = outcome.level
        assert list(zip(level.input_tokens, level.output_tokens, strict=True)) == list(workload.draw(level.level))
        assert outcome.output_tokens_per_s == pytest.approx(outcome.requests_per_s * workload.mean_tokens[1])
    used = replace(bounded, count=DEFAULT_COUNT)
    outcomes = candidate.outcomes[:1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "ladder", lambda *_: outcomes)
        assert evaluate(used, sized_deployment(used, deployment), 8).total_gpus == 6
    served = open_loop.under_rates(bounded, deployment, 1.0, 8.0)
    assert (served.gpus, served.output_tokens) == (8, workload.mean_tokens[1])


def test_answers_of_one_token_have_no_tpot() -> None:
    workload = Workload(input_tokens=500, output_tokens=2, lengths=Uniform(low=0.5, high=1.0))
    bounded = replace(scenario(tpot_s=0.1), workload=workload)
    outcome = bounded.outcome(Deployment(topology=parse_label("collocated-1xtp4")), Closed(concurrency=8))
    part = outcome.level.output_tokens[judged(outcome.level)]
    known = [tpot_s for tpot_s, tokens in zip(outcome.columns[1], part, strict=True) if tokens > 1]
    assert 0 < len(known) < len(part) and outcome.tpot_s == pytest.approx(np.mean(known))


def test_a_level_is_judged_once_it_has_filled_and_before_it_drains() -> None:
    bounded = scenario(tpot_s=0.1)
    deployment = Deployment(topology=parse_label("collocated-1xtp4"))
    quick, slow = (
        bounded if tokens == 250 else replace(bounded, workload=Workload(output_tokens=tokens))
        for tokens in (250, 4000)
    )
    parts = []
    for each in (quick, slow):
        level = each.outcome(deployment, Open(rate_rps=4.0), stays_s=30.0).level
        part = judged(level)
        stay_s = np.subtract(level.finish_s, level.arrival_s)
        assert part.start == len(level.arrival_s) // 2 or level.arrival_s[part.start] >= 2 * np.percentile(stay_s, 95)
        parts.append((part.start / len(level.arrival_s), part.stop / len(level.arrival_s)))
    assert parts[0][0] == pytest.approx(0.2)
    assert parts[1][0] > parts[0][0] and parts[1][1] < parts[0][1]
    closed = bounded.outcome(deployment, Closed(concurrency=8)).level
    assert judged(closed) == slice(8, len(closed.arrival_s) - 8)


@pytest.mark.parametrize(
    ("label", "concurrency", "off"),
    [
        ("collocated-1xtp8", 64, 0.03),
        ("collocated-1xtp8", 128, 0.03),
        ("collocated-8xtp1", 64, 0.05),
        ("collocated-4xtp2", 32, 0.05),
        ("pd-spread-p1xtp8-d1xtp8", 48, 0.05),
        ("pd-pack-p1xtp1-d1xtp2", 32, 0.03),
    ],
)
def test_a_closed_loop_serves_what_it_serves_in_the_long_run(label: str, concurrency: int, off: float) -> None:
    """Completions per second over 33 of 40 waves, from the end of one wave to the end of another."""
    under, deployment = scenario(), Deployment(topology=parse_label(label))
    level = Level(load=Closed(concurrency=concurrency), num_requests=40 * concurrency, seed=7)
    (long,) = simulate(deployment, [level], under.workload, HARDWARE, SHAPE, seed=7, scattered=True)
    ends_s = np.sort(long.finish_s)
    served_rps = 33 * concurrency / (ends_s[38 * concurrency - 1] - ends_s[5 * concurrency - 1])
    assert under.outcome(deployment, Closed(concurrency=concurrency)).requests_per_s == pytest.approx(
        served_rps, rel=off
    )


@pytest.mark.parametrize("label", ["collocated-2xtp4", "collocated-1xtp8", "pd-spread-p3xtp2-d1xtp4"])
@pytest.mark.parametrize("concurrency", [1, 7, 32, 100])
def test_figures_of_a_closed_loop_keep_littles_law(label: str, concurrency: int) -> None:
    """Requests in flight are the rate times TTFT and the steps after the first token."""
    outcome = scenario().outcome(Deployment(topology=parse_label(label)), Closed(concurrency=concurrency))
    stays_s = outcome.ttft_s + (scenario().workload.output_tokens - 1) * outcome.tpot_s
    assert outcome.requests_per_s * stays_s == pytest.approx(concurrency, rel=1e-6)


def with_sweep(under: Scenario, label: str) -> tuple[Candidate, RateSweep]:
    """A deployment by its goodput, and its sweep for the map."""
    deployment = Deployment(topology=parse_label(label))
    candidate = under_poisson(under, evaluate(under, sized_deployment(under, deployment), 8))
    (sweep,) = simulated_sweeps(Plan((candidate,), 1, under.slo, None, gpus=8), under, ())
    return candidate, sweep


@pytest.mark.parametrize("label", ["pd-pack-p1xtp4-d2xtp2", "pd-pack-p1xtp2-d1xtp2"])
def test_the_map_and_the_ranking_have_one_goodput_at_the_bounds_of_the_slo(label: str) -> None:
    bounded = replace(scenario(ttft_s=2.0, tpot_s=0.012), gaps=False)
    candidate, sweep = with_sweep(bounded, label)
    assert cell(sweep, bounded.slo).goodput == pytest.approx(candidate.served_per_gpu, rel=0.03)


@pytest.mark.parametrize("label", ["collocated-8xtp1", "pd-pack-p1xtp2-d2xtp1"])
def test_no_bound_is_so_loose_that_the_map_has_more_than_is_served(label: str) -> None:
    """An overloaded level is within bounds of 40 s and 200 ms, because it ends."""
    loose = Slo(ttft_s=40.0, tpot_s=0.2)
    candidate, sweep = with_sweep(replace(scenario(ttft_s=10.0, tpot_s=0.05), gaps=False), label)
    level = Level(load=Closed(concurrency=1200), num_requests=6000, seed=3)
    (full,) = simulate(candidate.deployment, [level], Workload(), HARDWARE, SHAPE, seed=3, scattered=True)
    served_rps = 3600 / float(np.diff(np.sort(full.finish_s)[[1199, 4799]])[0])
    assert cell(sweep, loose).goodput * candidate.deployment.gpus <= 1.08 * served_rps
    assert not cell(sweep, loose).more
