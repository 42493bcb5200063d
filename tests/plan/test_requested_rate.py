"""A plan for a requested rate: the fewest GPUs that serve it, however many more GPUs are planned."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.plans import HARDWARE, MODEL, nodes, scenario

from pdlab.core.deployment import Deployment, parse_label
from pdlab.core.workload import Workload
from pdlab.plan import planner
from pdlab.plan.facts import ranking_text, verdict
from pdlab.plan.planned_nodes import planned_nodes
from pdlab.plan.planner import Candidate, Plan, evaluate, plan, pool_replicas
from pdlab.plan.scenario import Scenario
from pdlab.plan.traffic import mean_workload, trace_of_file


def answer(under: Scenario, rate_rps: float, gpus: int) -> tuple[str, float, float]:
    """(code of the verdict, GPUs of the best PD deployment, GPUs of the best collocated one) with ``gpus`` planned."""
    view = planned_nodes(HARDWARE, gpus, None, spread=False)
    made = plan(replace(under, gaps=False), MODEL, view, gpus, rate_rps=rate_rps)
    best = [made.best_candidate(collocated=each) for each in (False, True)]
    assert all(each is not None and each.best is not None for each in best), gpus
    return verdict(made, under).code, *(each.total_gpus for each in best if each is not None)


@pytest.mark.parametrize(
    ("tokens", "rate_rps", "bounds_s", "gpus"),
    [
        ((5000, 250), 2.0, {"ttft_s": 2.0, "tpot_s": 0.012}, (4, 5, 8, 16, 64)),
        ((5000, 250), 4.0, {"ttft_s": 2.0, "tpot_s": 0.012}, (6, 8, 16)),
        ((5000, 250), 5.0, {"e2el_s": 4.0}, (6, 7, 16)),
        ((10000, 500), 1.0, {"ttft_s": 2.0, "tpot_s": 0.01}, (7, 8, 12, 32)),
        ((12000, 1), 0.2, {"ttft_s": 1.0, "tpot_s": 0.008}, (4, 8, 32)),
        # Two nodes do not serve it by collocated engines of TP 2, and no whole number of nodes is the fewest.
        ((5000, 250), 12.7, {"ttft_s": 2.0, "tpot_s": 0.012}, (20, 24)),
    ],
)
def test_whether_pd_saves_gpus_is_the_same_with_more_planned(
    tokens: tuple[int, int], rate_rps: float, bounds_s: dict[str, float], gpus: tuple[int, ...]
) -> None:
    under = scenario(Workload(input_tokens=tokens[0], output_tokens=tokens[1]), **bounds_s)
    answers = {planned: answer(under, rate_rps, planned) for planned in gpus}
    assert len(set(answers.values())) == 1, answers


@pytest.mark.parametrize(
    ("tokens", "rates_rps"), [((5000, 250), (7.0, 7.5, 9.0, 9.8)), ((10000, 500), (3.5, 4.0))], ids=str
)
def test_a_higher_rate_takes_no_fewer_gpus(tokens: tuple[int, int], rates_rps: tuple[float, ...]) -> None:
    """A deployment that serves a rate serves lower ones too."""
    under = scenario(Workload(input_tokens=tokens[0], output_tokens=tokens[1]), ttft_s=2.0, tpot_s=0.012)
    taken = [answer(under, rate_rps, 32)[1:] for rate_rps in rates_rps]
    for each in zip(*taken, strict=True):
        assert list(each) == sorted(each)


def test_the_same_of_recorded_requests(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 500 * number, "input_length": 5000, "output_length": 250} for number in range(400)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    trace = trace_of_file(path)
    under = replace(scenario(mean_workload(trace), ttft_s=2.0, tpot_s=0.012), trace=trace)
    assert len({answer(under, trace.rate_rps, planned) for planned in (4, 8, 32)}) == 1


@given(number=st.integers(1, 300), node_replicas=st.sampled_from([1, 2, 4, 8]))
def test_pools_have_the_replicas_asked_for_and_are_smaller_than_two_nodes(number: int, node_replicas: int) -> None:
    each = pool_replicas(number, node_replicas)
    assert number % each == 0 and each < 2 * node_replicas
    if number < 2 * node_replicas and number % node_replicas:
        assert each == number
    if number % node_replicas == 0:
        assert each == node_replicas


@pytest.mark.parametrize("fewest", [1, 2, 7, 8, 23, 60, 64, 65])
@pytest.mark.parametrize("matched_rps", [0.5, 1.0, 3.0, 30.0])
@pytest.mark.parametrize("label", ["collocated-8xtp1", "pd-pack-p1xtp4-d1xtp4"])
def test_the_fewest_are_found_wherever_the_search_begins(
    monkeypatch: pytest.MonkeyPatch, label: str, matched_rps: float, fewest: int
) -> None:
    """Whatever rate matching says. 65 are more than there are: the result is all 64, which miss the SLO."""
    under, deployment = scenario(ttft_s=2.0), Deployment(topology=parse_label(label))
    outcome = under.outcome(Deployment(topology=parse_label("collocated-1xtp4")), under.at_rate(1.0))

    def serves(self: Scenario, deployment: Deployment, load: object, stays_s: float = 0.0) -> object:
        number = round(30.0 / load.value)  # type: ignore[attr-defined]
        if deployment.mode == "collocated":
            number *= deployment.pools["collocated"].replicas
        return replace(outcome, load=load, meets=number >= fewest)

    monkeypatch.setattr(Scenario, "outcome", serves)
    copies, replicas = (8, 8) if deployment.mode == "collocated" else (64, 0)
    sized = replace(
        planner.sized_deployment(under, deployment),
        copies=copies,
        matched_rps=matched_rps,
        node_replicas=replicas,
        replica_rps=matched_rps,
    )
    found = evaluate(under, sized, 512, rate_rps=30.0)
    number = found.copies * (found.deployment.pools["collocated"].replicas if replicas else 1)
    assert number == min(fewest, 64) and (found.best is not None) is (fewest <= 64)


def test_fewer_gpus_rank_before_a_larger_share_within_the_slo(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that meet the SLO serve the rate: 96 % on 10 GPUs are worth more than all requests on 10.25."""
    under = scenario(ttft_s=2.0)
    small, large = (Deployment(topology=parse_label(each)) for each in ("collocated-2xtp2", "collocated-1xtp4"))
    outcome = under.outcome(small, under.at_rate(1.0))

    def candidate(deployment: Deployment, share: float, gpus: float) -> Candidate:
        result = replace(outcome, good_share=share, meets=True)
        return Candidate(deployment, 1, (result,), result, gpus)

    made = {"collocated-2xtp2": candidate(small, 0.96, 10.0), "collocated-1xtp4": candidate(large, 1.0, 10.25)}
    monkeypatch.setattr(
        planner,
        "evaluate",
        lambda _, sized, *args, **more: made.get(sized.deployment.label) or made["collocated-1xtp4"],
    )
    ranked: Plan = plan(under, MODEL, nodes(1), 4, rate_rps=1.0)
    assert ranked.candidates[0].total_gpus == 10.0


TPOT_S = 0.012  # bound of `sized`, whose errors are 7 % in 90 % of cases: the model's 3.5 %, and the chance of arrivals


def sized(label: str, gpus: float, stress: float, too_few: tuple[float, float] | None = None) -> Candidate:
    """A candidate for a rate whose requests all have ``stress`` times the bound of TPOT. ``too_few``: GPUs and stress
    of the next smaller number."""
    under, deployment = scenario(ttft_s=2.0, tpot_s=TPOT_S), Deployment(topology=parse_label(label))
    outcome = under.outcome(deployment, under.at_rate(1.0))
    columns = (np.full(100, 0.1), np.full(100, stress * TPOT_S), np.full(100, 0.1 + 249 * stress * TPOT_S))
    result = replace(outcome, columns=columns, stress=stress, meets=stress <= 1, good_share=float(stress <= 1))
    smaller = None if too_few is None else sized(label, *too_few)
    return Candidate(deployment, 1, (result,), result if stress <= 1 else None, gpus, too_few=smaller)


PD, BASE = "pd-pack-p1xtp1-d1xtp2", "collocated-2xtp2"


@pytest.mark.parametrize(
    ("candidates", "code", "doubt"),
    [
        ([(PD, 3, 0.9), (BASE, 4, 0.9)], "fewer_gpus", None),
        ([(PD, 3, 0.99), (BASE, 4, 0.9)], "unclear", None),
        ([(PD, 3, 0.95), (BASE, 4, 0.9)], "unclear", None),  # the model's errors leave it, other arrivals do not
        ([(PD, 3, 0.99), (PD, 3, 0.9), (BASE, 4, 0.9)], "fewer_gpus", None),
        ([(PD, 3, 0.9), (BASE, 4, 0.99)], "fewer_gpus", None),  # it takes more GPUs, if the errors are against it
        ([(PD, 3, 0.9), (BASE, 4, 0.9, (3, 1.02))], "unclear", 3),
        ([(PD, 3, 0.9), (BASE, 4, 0.9, (3, 1.2))], "fewer_gpus", None),
        ([(PD, 2, 0.9), (BASE, 4, 0.9, (3, 1.02))], "fewer_gpus", None),
        ([(PD, 3, 0.9), (BASE, 4, 0.9), (BASE, 3, 1.02)], "unclear", 3),
        ([(BASE, 3, 0.9), (PD, 4, 0.9)], "more_gpus", None),
        ([(BASE, 3, 0.99), (PD, 4, 0.9)], "unclear", None),
        ([(BASE, 3, 0.9), (PD, 4, 0.9, (3, 1.02))], "unclear", 3),
        ([(BASE, 3, 0.9), (PD, 4, 0.9, (3, 1.2))], "more_gpus", None),
        ([(PD, 4, 0.9), (BASE, 4, 0.9)], "same_gpus", None),
        ([(PD, 4, 0.99), (BASE, 4, 0.9)], "same_gpus", None),
        ([(PD, 4, 0.9), (BASE, 4, 0.99)], "unclear", None),
        ([(PD, 4, 0.9, (3, 1.02)), (BASE, 4, 0.9)], "unclear", 3),
    ],
)
def test_which_side_takes_fewer_gpus_is_said_only_beyond_the_errors(
    candidates: list[tuple[str, float, float]], code: str, doubt: float | None
) -> None:
    under = scenario(ttft_s=2.0, tpot_s=TPOT_S)
    made = Plan(tuple(sized(*each) for each in candidates), len(candidates), under.slo, 1.0, gpus=4)
    found = verdict(made, under)
    assert (found.code, found.in_doubt.total_gpus if found.in_doubt else None) == (code, doubt)
    text = ranking_text(made, under, nodes(1))
    assert ("PD does not clearly pay here: within the uncertainty. 1 requests/s take " in text) is (code == "unclear")
    assert ("on 3 GPUs misses the SLO by less than the errors of the model" in text) is (doubt is not None)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_rate_at_the_limit_of_both_kinds_has_one_verdict_by_every_seed(seed: int) -> None:
    """Which of them serves 6 requests/s on 7 or 8 GPUs is a matter of the arrivals."""
    under = replace(scenario(ttft_s=2.0, tpot_s=0.012), seed=seed)
    assert answer(under, 6.0, 8)[0] == "unclear"


def test_the_next_smaller_number_that_misses_the_slo_is_kept() -> None:
    under = scenario(ttft_s=2.0, tpot_s=0.012)
    unit = replace(planner.sized_deployment(under, Deployment(topology=parse_label(PD))), copies=8)
    found = evaluate(under, unit, 24, rate_rps=8.0)
    assert found.best and found.too_few and not found.too_few.best
    assert (found.too_few.copies, found.too_few.total_gpus) == (found.copies - 1, found.total_gpus - 3)
    assert evaluate(under, unit, 24, rate_rps=0.5).too_few is None, "one copy serves it"
