"""Stopping after as many repeats as resolve a lead: how often it errs, and when it gives up, over seeded trials."""

from __future__ import annotations

import numpy as np
import pytest

from pdlab.analysis.headline import Headline, LeftOut, PairComparison, Ratio
from pdlab.analysis.intervals import Array, compare, of_repeats
from pdlab.analysis.power import LookSchedule
from pdlab.analysis.sequential import LookVerdict, judge, scatter

LOOKS = LookSchedule(first=3, cap=12)
TRIALS = 300


def headline(first: Array, second: Array) -> Headline:
    one, two = of_repeats(first.tolist()), of_repeats(second.tolist())
    ratio = Ratio(figure="throughput", comparison=compare(one, two, 0.95), first=one, second=two)
    each = PairComparison(
        label="pd",
        reference="base",
        loads=(1,),
        per_gpu=False,
        left_out=LeftOut(),
        repeats=(len(first), len(second)),
        ratios=(ratio,),
    )
    return Headline(kind="concurrency", reference="base", confidence=0.95, comparisons=(each,))


def stopped(rng: np.random.Generator, ratio: float, sd: float, target: float = 0.05) -> tuple[LookVerdict, int]:
    first = ratio * np.exp(rng.normal(0, sd, LOOKS.cap))
    second = np.exp(rng.normal(0, sd, LOOKS.cap))
    for repeats in range(LOOKS.first, LOOKS.cap + 1):
        looks = [headline(first[:repeats], second[:repeats])]
        (each,) = judge(looks, {"throughput": target}, LOOKS, repeats, 0.95)
        if each.outcome != "open":
            return each, repeats
    raise AssertionError("the last look leaves nothing open")


@pytest.mark.parametrize("sd", [0.01, 0.05])
def test_equals_are_distinguished_in_at_most_five_per_cent_of_the_stopped_experiments(sd: float) -> None:
    rng = np.random.default_rng([61, round(100 * sd)])
    outcomes = [stopped(rng, 1.0, sd)[0].outcome for _ in range(TRIALS)]
    assert outcomes.count("lead") <= 0.05 * TRIALS + 8  # binomial, 99 %
    if sd == 0.01:
        assert outcomes.count("alike") > 0.8 * TRIALS, "that there is no lead of 5 % is a result too"


def test_at_the_stop_the_interval_holds_the_truth_however_often_was_looked() -> None:
    rng = np.random.default_rng(62)
    held = 0
    for _ in range(TRIALS):
        each, _ = stopped(rng, 1.08, 0.04)
        assert each.comparison
        held += each.comparison.low <= 1.08 <= each.comparison.high
    assert held >= 0.95 * TRIALS - 8


def test_a_clear_lead_stops_early_and_a_small_one_goes_on() -> None:
    rng = np.random.default_rng(63)
    clear = [stopped(rng, 1.4, 0.03) for _ in range(50)]
    small = [stopped(rng, 1.06, 0.03) for _ in range(50)]
    assert all(each.outcome == "lead" for each, _ in clear)
    assert np.mean([n for _, n in clear]) < 5 < np.mean([n for _, n in small])


def test_what_no_number_of_repeats_within_the_cap_resolves_is_given_up_before_it() -> None:
    rng = np.random.default_rng(64)
    results = [stopped(rng, 1.0, 0.3) for _ in range(100)]
    assert sum(each.outcome == "unresolvable" for each, _ in results) > 90
    assert np.mean([n for _, n in results]) < LOOKS.cap


def test_an_open_loop_has_no_lead_in_output_tokens() -> None:
    first = np.array([1.0, 1.1, 1.2])
    opened = headline(first, first).model_copy(update={"kind": "rate"})
    assert judge([opened], {"throughput": 0.05}, LOOKS, 3, 0.95) == ()
    assert judge([opened], {"ttft": 0.05}, LOOKS, 3, 0.95) == (), "and no other figure is made up"


def test_scatter_is_pooled_over_deployments() -> None:
    rng = np.random.default_rng(65)
    compared = headline(np.exp(rng.normal(0, 0.08, 400)), np.exp(rng.normal(0, 0.02, 400)))
    pooled = scatter([compared])
    assert pooled is not None
    assert pooled[0] == pytest.approx((0.08**2 / 2 + 0.02**2 / 2) ** 0.5, rel=0.1) and pooled[1] == 798
    assert scatter([]) is None
