"""The search for an SLO's highest rate: against known truths, and over seeded trials."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import records as made
from support.queues import served

from pdlab.bench import slo_search
from pdlab.bench.slo_search import LevelSample, NextLevel, SloSearchOptions, evaluate, next_step, points
from pdlab.core.findings import Finding, found
from pdlab.core.workload import Level, Open, RunKey, Slo
from pdlab.results import slo as results_slo
from pdlab.results.level_data import LevelData
from pdlab.results.schema import RequestRecord, Run, Validity
from pdlab.results.slo import share_bounds

SLO = Slo(ttft_s=0.2, tpot_s=0.05, quantile=0.95)
SEARCH = SloSearchOptions(slo=SLO)


def drive(measure: Callable[[NextLevel], LevelSample], search: SloSearchOptions = SEARCH) -> list[LevelSample]:
    """Measure until the search is over."""
    samples: list[LevelSample] = []
    while (step := next_of(samples, search)) is not None:
        samples.append(measure(step))
        assert len(samples) <= search.max_points
    return samples


def next_of(
    samples: list[LevelSample], search: SloSearchOptions = SEARCH, guess: float | None = None
) -> NextLevel | None:
    return evaluate(samples, search, label="x", repeat=0, guess_rps=guess).step


def answer(samples: list[LevelSample], search: SloSearchOptions = SEARCH) -> Any:
    return evaluate(samples, search, label="x", repeat=0).answer


@pytest.mark.parametrize(
    ("met", "judged", "low", "high"),
    # Exact: all met: lower bound error ** (1 / n); none met: upper bound 1 - error ** (1 / n).
    [(20, 20, 0.05 ** (1 / 20), 1.0), (0, 20, 0.0, 1 - 0.05 ** (1 / 20)), (0, 0, 0.0, 1.0)],
)
def test_bounds_in_closed_form(met: int, judged: int, low: float, high: float) -> None:
    assert share_bounds(met, judged, 0.95) == pytest.approx((low, high), abs=1e-9)


def test_bounds_of_the_textbook() -> None:
    # Clopper-Pearson, 95 % two-sided: 8 of 10 is (0.4439, 0.9748).
    assert share_bounds(8, 10, 0.975) == pytest.approx((0.4439, 0.9748), abs=1e-4)


@settings(deadline=None)
@given(st.integers(0, 300), st.integers(0, 300))
def test_bounds_hold_the_share(a: int, b: int) -> None:
    met, judged = min(a, b), max(a, b)
    low, high = share_bounds(met, judged, 0.95)
    assert 0 <= low <= (met / judged if judged else 0.5) <= high <= 1


def truth(rate: float) -> float:
    """A known share of requests that meet the SLO: 0.95 at 7.3 requests/s."""
    return 0.95 ** ((rate / 7.3) ** 3)


def trial(seed: int, share: Callable[[float], float], search: SloSearchOptions = SEARCH) -> Any:
    rng = random.Random(seed)

    def measure(step: NextLevel) -> LevelSample:
        judged = int(slo_search.STEADY_SHARE * step.requests)
        met = sum(rng.random() < share(step.rate_rps) for _ in range(judged))
        return LevelSample(rate_rps=step.rate_rps, repeat=0, look=step.look, judged=judged, met=met)

    return answer(drive(measure, search), search)


def test_the_interval_holds_the_truth_at_its_confidence() -> None:
    """Over 200 seeded trials of independent requests; each may miss with 5 %: up to 18 misses have 99.5 %."""
    trials = [trial(seed, truth) for seed in range(200)]
    missed = sum(
        not ((f.low_rps is None or f.low_rps <= 7.3) and (f.high_rps is None or f.high_rps >= 7.3)) for f in trials
    )
    assert missed <= 18
    assert sum(f.low_rps is not None and f.high_rps is not None for f in trials) >= 190


@pytest.mark.parametrize("knee", [0.013, 0.8, 3.0, 250.0])
def test_a_sharp_knee_is_found_to_the_resolution_and_both_ends_are_confirmed(knee: float) -> None:
    search = trial(1, lambda rate: 1.0 if rate <= knee else 0.0)
    assert search.finished and search.low_rps <= knee < search.high_rps
    assert search.high_rps / search.low_rps <= (1 + SEARCH.resolution) * 1.01
    assert f"between {search.low_rps:g} and {search.high_rps:g} requests/s (95% confidence)" in search.detail
    assert {p.rate_rps for p in search.points if p.looks == 2} == {search.low_rps, search.high_rps}


def rate_after(
    samples: list[LevelSample], search: SloSearchOptions = SEARCH, guess: float | None = None
) -> float | None:
    step = next_of(samples, search, guess)
    return None if step is None else step.rate_rps


def test_the_guess_and_the_start_are_where_it_begins() -> None:
    assert rate_after([]) == 1.0
    assert rate_after([], guess=3.14159) == 3.14
    assert rate_after([], SEARCH.model_copy(update={"start_rps": 9.0}), 3.0) == 9.0


def test_from_a_plan_it_goes_in_small_steps_at_first() -> None:
    near = SEARCH.model_copy(update={"start_rps": 10.0, "step": 1.25})
    assert rate_after([sample(10, True)], near) == 12.5
    assert rate_after([sample(10, True), sample(12.5, True)], near) == 19.5
    assert rate_after([sample(10, True), sample(12.5, True), sample(19.5, True)], near) == 39
    assert rate_after([sample(10, False)], near) == 8


def test_a_rate_that_lacks_independent_requests_alone_is_looked_at_again_before_a_lower_one() -> None:
    few, missed = sample(4, True, effective=60.0), sample(8, False)
    assert rate_after([few, missed]) == 4
    again = few.model_copy(update={"look": 1, "effective": 40.0})
    assert rate_after([few, again, missed]) == 4
    assert rate_after([few, again, again.model_copy(update={"look": 2, "effective": 3.0}), missed]) == 2, "not for ever"
    assert rate_after([sample(4, True, met=291), missed]) == 2, "its share would not meet it then either"
    assert rate_after([sample(1, True), few, missed]) == 4, "nor is the gap below it divided"
    beyond = sample(8, True, steady=False, served_rps=3.0)
    assert rate_after([sample(1, True), few, beyond, beyond.model_copy(update={"look": 1})]) == 2


def test_measured_points_are_not_measured_again() -> None:
    def measure(step: NextLevel) -> LevelSample:
        return sample(step.rate_rps, step.rate_rps <= 3, look=step.look)

    first = drive(measure)
    assert rate_after(first) is None
    some = first[:3]
    rest: list[LevelSample] = []
    while (step := next_of(some)) is not None:
        rest.append(measure(step))
        some.append(rest[-1])
    assert rest == first[3:]


def sample(rate: float, fine: bool, **more: Any) -> LevelSample:
    return LevelSample(**{"rate_rps": rate, "repeat": 0, "judged": 300, "met": 300 if fine else 0, **more})


def test_looks_at_a_rate_are_pooled() -> None:
    (pooled,) = points([sample(2, True), sample(2, True, look=1, met=298)], SEARCH)
    assert (pooled.judged, pooled.met, pooled.looks, pooled.verdict) == (600, 598, 2, "meets")


def test_neighbours_that_are_alike_count_for_less() -> None:
    (alike,) = points([sample(2, True, effective=100.7)], SEARCH)
    (alone,) = points([sample(2, True, effective=300.0)], SEARCH)
    assert (alike.verdict, alike.effective, alone.verdict) == ("undecided", 100, "meets")
    assert alike.low < 0.95 < alone.low
    step = next_step([alike], SEARCH)
    assert step is not None and step.rate_rps == 4
    assert step.requests == math.ceil(3 * SEARCH.requests_needed), "the next one is as much longer"
    short = SEARCH.model_copy(update={"longest_s": 200.0})
    step = next_step([alike], short)
    assert step is not None and step.requests == 800


def test_the_error_is_shared_by_all_looks() -> None:
    few, many = (SEARCH.model_copy(update={"max_points": n}) for n in (2, 40))
    assert [points([sample(2, True, judged=110, met=110)], s)[0].verdict for s in (few, many)] == ["meets", "undecided"]


@pytest.mark.parametrize("steady", [None, False])
def test_what_was_not_steady_or_not_checked_never_meets(steady: bool | None) -> None:
    (point,) = points([sample(2, True, steady=steady)], SEARCH)
    assert point.verdict == "undecided"
    step = next_step([point], SEARCH)
    assert step is not None and (step.rate_rps, step.look, step.longer) == (2, 1, 2), "a longer look decides more"
    (missed,) = points([sample(2, False, steady=steady)], SEARCH)
    assert missed.verdict == "misses", "an empty start and a drain only help"


def test_a_longer_look_stands_in_for_one_that_was_not_checked() -> None:
    (point,) = points([sample(2, True, steady=None), sample(2, True, look=1)], SEARCH)
    assert (point.verdict, point.judged, point.looks) == ("meets", 300, 1)
    (drifted,) = points([sample(2, True, steady=False), sample(2, True, look=1)], SEARCH)
    assert drifted.verdict == "undecided"


def test_none_meets_above_what_was_served_where_requests_piled_up() -> None:
    piled = sample(4, True, steady=False, served_rps=2.9)
    low, near, top = points([sample(2, True), sample(3, True, clear=True), piled], SEARCH)
    assert (low.verdict, near.verdict, top.verdict) == ("meets", "undecided", "undecided")
    assert near.reason == "not more than 2.9 requests/s were served at a higher rate" and top.served_rps == 2.9
    search = answer([sample(2, True), sample(3, True), piled, piled.model_copy(update={"look": 1})])
    assert (search.low_rps, search.high_rps, search.best_rps) == (2, 4, 2)
    assert results_slo.bracket_at(search, 0.9) == (2, 4), "and judged again at another confidence"
    far = sample(8, True, steady=False, served_rps=1.0)
    assert points([sample(2, True), piled, far], SEARCH)[0].verdict == "meets", "what a flood serves may be less"


def test_what_is_served_where_requests_pile_up() -> None:
    queue = served(Level(load=Open(rate_rps=14), num_requests=1400, seed=1), 0.1)
    at_least = results_slo.served_rps(queue)
    assert at_least is not None and 9.8 < at_least <= 10.001
    never = LevelData.of([record(0.1, 0.01, error="x")] * 30)
    assert results_slo.served_rps(never) is None


def test_requests_that_pile_up_twice_miss_whatever_the_share() -> None:
    (once,) = points([sample(2, True, steady=False)], SEARCH)
    assert (once.verdict, once.piled_up) == ("undecided", True)
    (twice,) = points([sample(2, True, steady=False), sample(2, True, steady=False, look=1)], SEARCH)
    assert (twice.verdict, twice.piled_up) == ("misses", True)


def test_an_end_that_its_confirmation_contradicts_is_undecided() -> None:
    many = {"judged": 3000, "met": 2940}
    for last, verdict in ((90, "undecided"), (99, "meets")):
        (point,) = points([sample(2, True, **many), sample(2, True, look=1, judged=100, met=last)], SEARCH)
        assert point.low > 0.95 and point.verdict == verdict
    (point,) = points([sample(2, True, judged=3000, met=2700), sample(2, True, look=1, judged=100, met=99)], SEARCH)
    assert point.high < 0.95 and point.verdict == "undecided"


def test_who_misses_alone_is_not_measured_at_lower_rates() -> None:
    assert rate_after([sample(1, False, in_flight=5.0)]) == 0.5
    assert rate_after([sample(1, False, in_flight=5.0), sample(0.5, False, in_flight=0.1)]) is None


def test_a_point_that_cannot_be_judged_ends_the_search() -> None:
    samples = [sample(1, True), sample(2, True, invalid="load generator saturated")]
    assert rate_after(samples) is None
    search = answer(samples)
    assert not search.finished
    assert search.detail.startswith("at least 1 requests/s (95% confidence); the upper end is unknown")
    assert "; 2 requests/s could not be judged (load generator saturated)" in search.detail


def test_nothing_misses_and_nothing_meets() -> None:
    above = answer([sample(1, True), sample(2, True)])
    assert above.detail.startswith("at least 2 requests/s (95% confidence); the upper end is unknown")
    assert above.high_rps is None and not above.finished
    assert answer([sample(1, False)]).detail.startswith("below 1 requests/s (95% confidence)")
    assert answer([sample(1, False, met=285)]).detail.startswith("not known: no rate was decided")


def test_a_rate_that_meets_above_one_that_misses_is_not_believed() -> None:
    search = answer([sample(1, True), sample(2, False), sample(4, True)])
    assert (search.low_rps, search.high_rps, search.best_rps) == (1, 2, 1)


def test_enough_requests_for_the_quantile() -> None:
    for quantile in (0.5, 0.9, 0.95, 0.99):
        search = SloSearchOptions(slo=SLO.model_copy(update={"quantile": quantile}))
        judged = math.floor(slo_search.STEADY_SHARE * search.requests_needed)
        assert share_bounds(judged, judged, 1 - (1 - search.confidence) / 2 / search.max_points)[0] > quantile
    assert SloSearchOptions(slo=SLO, requests=7).requests_needed == 7


def record(ttft_s: float, tpot_s: float, **more: Any) -> RequestRecord:
    return made.record(0.0, ttft_s, tpot_s, 11, **more)


def level_of(records: list[RequestRecord], **validity: Any) -> Run:
    key = RunKey(kind="rate", value=4, look=1)
    return made.run(records, Open(rate_rps=4), count=len(records), key=key, validity=Validity(**validity))


def arriving(count: int, ttft_s: float = 0.1) -> list[RequestRecord]:
    return [made.record(i / 4, ttft_s, 0.01, 11) for i in range(count)]


@pytest.mark.parametrize(
    ("gates", "unchecked", "steady", "usable"),
    [((), {}, True, True), (("steady_state",), {}, False, True), (("failed_requests",), {}, True, True),
     (("few_requests",), {}, None, True), ((), {"steady_state": found("too_few_for_trend")}, None, True),
     (("client_saturation",), {}, True, False), (("kv_transfers", "steady_state"), {}, False, False)],
)  # fmt: skip
def test_levels_become_samples(gates: tuple[str, ...], unchecked: Any, steady: bool | None, usable: bool) -> None:
    records = arriving(40)
    records[20] = records[20].model_copy(update={"first_token_s": records[20].arrival_s + 0.4})
    findings = tuple(Finding(code="made_up", gate=gate, what="why") for gate in gates)
    run = level_of(records, findings=findings, unchecked=unchecked)
    judged = slo_search.sample(run, LevelData.of(records), SLO)
    # Filled after two E2ELs of 0.2 s; the last of 40 arrives at 9.75 s and ends after that.
    assert (judged.judged, judged.met, judged.steady, judged.invalid is None) == (37, 36, steady, usable)
    assert (judged.look, judged.in_flight) == (1, pytest.approx(0.8, rel=0.1))


def test_without_a_window_all_requests_are_judged_and_can_only_miss() -> None:
    records = arriving(40, ttft_s=8.0)
    judged = slo_search.sample(level_of(records), LevelData.of(records), SLO)
    assert (judged.judged, judged.met, judged.steady) == (40, 0, None)


def worst(records: list[RequestRecord], slo: Slo = SLO) -> Any:
    return results_slo.stresses(LevelData.of(records), slo)


def test_independent_requests_count_whole_and_bursts_do_not() -> None:
    rng = random.Random(3)
    alone = worst([record(0.3 if rng.random() < 0.1 else 0.1, 0.01) for _ in range(1000)])
    assert results_slo.effective(alone, 0.95) > 600
    bursts = worst([record(0.3 if i % 200 < 20 else 0.1, 0.01) for i in range(1000)])
    assert results_slo.effective(bursts, 0.95) < 100
    near = worst([record(0.19 if i % 200 < 9 else 0.1, 0.01) for i in range(1000)])
    assert results_slo.effective(near, 0.95) < 300, "none misses, and yet those that are slow come together"
    assert results_slo.effective(worst([record(0.1, 0.01)] * 50), 0.95) == 50
    assert results_slo.effective(worst([]), 0.95) == 0


def test_far_within_a_bound_on_tpot_is_clear_however_alike_neighbours_are() -> None:
    slo = Slo(tpot_s=0.05)

    def wave(middle: float, width: float, slo: Slo = slo) -> Any:
        return worst([record(0.1, middle + width * math.sin(i / 30)) for i in range(400)], slo)

    assert results_slo.clearly_within(wave(0.03, 0.002), slo)
    assert not results_slo.clearly_within(wave(0.045, 0.002), slo), "within, and not by far"
    both = Slo(tpot_s=0.05, ttft_s=9.0)
    assert not results_slo.clearly_within(wave(0.03, 0.002, both), both), "queues have tails"
    assert not results_slo.clearly_within(wave(0.03, 0.002)[:90], slo)
    failed = worst([record(0.1, 0.03)] * 399 + [record(0.1, 0.03, error="x")], slo)
    assert not results_slo.clearly_within(failed, slo)
    (point,) = points([sample(2, True, effective=20.0, clear=True)], SEARCH)
    assert point.verdict == "meets" and point.low < 0.95
    (unsteady,) = points([sample(2, True, effective=20.0, clear=True, steady=None)], SEARCH)
    assert unsteady.verdict == "undecided"


def test_the_autocorrelation_time_of_a_known_process() -> None:
    """AR(1) with coefficient 0.8: (1 + 0.8) / (1 - 0.8) = 9."""
    rng, value, values = np.random.default_rng(1), 0.0, []
    for _ in range(20_000):
        value = 0.8 * value + rng.normal()
        values.append(value)
    assert results_slo.correlation_time(np.array(values)) == pytest.approx(9, rel=0.3)
    assert results_slo.correlation_time(rng.normal(size=20_000)) < 1.8
    assert results_slo.correlation_time(np.ones(100)) == 1


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0.5, 1.0, 2.0, 4.0, 8.0]), st.integers(0, 150)), max_size=8))
def test_no_order_of_points_breaks_it(raw: list[tuple[float, int]]) -> None:
    samples = [LevelSample(rate_rps=rate, repeat=0, look=i, judged=150, met=met) for i, (rate, met) in enumerate(raw)]
    rates = points(samples, SEARCH)
    chosen = next_step(rates, SEARCH)
    assert chosen is None or chosen.look == sum(point.looks for point in rates if point.rate_rps == chosen.rate_rps)
    low, high = results_slo.bracket(rates)
    assert low is None or high is None or low < high
    assert answer(samples).points == tuple(sorted(rates, key=lambda p: p.rate_rps))


def test_the_requested_start_is_measured_although_other_rates_were() -> None:
    search = SloSearchOptions(slo=Slo(ttft_s=0.5), start_rps=3)
    at = [LevelSample(rate_rps=rate, repeat=0, judged=1000, met=1000) for rate in (1.0, 3.0)]
    for samples, rate in ((at[:0], 3.0), (at[:1], 3.0), (at[1:], 6.0), (at, 6.0)):
        step = evaluate(samples, search, label="x", repeat=0).step
        assert step is not None and step.rate_rps == rate


def test_a_finished_search_is_not_opened_again_by_a_start() -> None:
    """It is over where its ends are known or its levels are used up, whether or not the start is among its rates."""
    search = SloSearchOptions(slo=Slo(ttft_s=0.5))
    samples: list[LevelSample] = []
    while (step := evaluate(samples, search, label="x", repeat=0).step) is not None:
        met = 1000 if step.rate_rps < 3 else 0
        samples.append(LevelSample(rate_rps=step.rate_rps, repeat=0, look=step.look, judged=1000, met=met))
    before = evaluate(samples, search, label="x", repeat=0).answer
    assert before.finished
    for start_rps, most in ((17.0, 20), (17.0, len(samples))):
        again = search.model_copy(update={"start_rps": start_rps, "max_points": most})
        state = evaluate(samples, again, label="x", repeat=0)
        assert state.step is None and state.answer.finished, (start_rps, most)
    spent = evaluate(samples[:2], search.model_copy(update={"start_rps": 17.0, "max_points": 2}), label="x", repeat=0)
    assert spent.step is None
