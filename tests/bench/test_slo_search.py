"""The search for an SLO's highest rate: against known truths, and over seeded trials."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdlab.bench import slo_search
from pdlab.bench.slo_search import Sample, Search, next_rate, points, result
from pdlab.core.workload import Open, RunKey, Slo, Workload
from pdlab.results import slo as results_slo
from pdlab.results.schema import RequestRecord, Run, SloPoint, Summary, Validity
from pdlab.results.slo import share_bounds

SLO = Slo(ttft_s=0.2, tpot_s=0.05, quantile=0.95)
SEARCH = Search(slo=SLO)


def drive(measure: Callable[[float], Sample], search: Search = SEARCH, guess: float | None = None) -> list[Sample]:
    """Measure until the search is over."""
    samples: list[Sample] = []
    while (rate := next_rate(points(samples, search), search, guess)) is not None:
        samples.append(measure(rate))
        assert len(samples) <= search.max_points
    return samples


def answer(samples: list[Sample], search: Search = SEARCH) -> Any:
    return result(points(samples, search), search, label="x", repeat=0)


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


def trial(seed: int, share: Callable[[float], float], search: Search = SEARCH) -> Any:
    rng = random.Random(seed)

    def measure(rate: float) -> Sample:
        judged = int(slo_search.STEADY_SHARE * search.requests_needed)
        return Sample(
            rate_rps=rate, repeat=0, judged=judged, met=sum(rng.random() < share(rate) for _ in range(judged))
        )

    return answer(drive(measure, search), search)


def test_the_interval_holds_the_truth_at_its_confidence() -> None:
    """Over 200 seeded trials; each may miss with 5 %: up to 18 misses have a probability of 99.5 %."""
    found = [trial(seed, truth) for seed in range(200)]
    missed = sum(
        not ((f.low_rps is None or f.low_rps <= 7.3) and (f.high_rps is None or f.high_rps >= 7.3)) for f in found
    )
    assert missed <= 18
    assert sum(f.low_rps is not None and f.high_rps is not None for f in found) >= 190


@pytest.mark.parametrize("knee", [0.013, 0.8, 3.0, 250.0])
def test_a_sharp_knee_is_found_to_the_resolution(knee: float) -> None:
    found = trial(1, lambda rate: 1.0 if rate <= knee else 0.0)
    assert found.finished and found.low_rps <= knee < found.high_rps
    assert found.high_rps / found.low_rps <= (1 + SEARCH.resolution) * 1.01
    assert f"between {found.low_rps:g} and {found.high_rps:g} requests/s (95% confidence)" in found.detail


def test_the_guess_and_the_start_are_where_it_begins() -> None:
    assert next_rate((), SEARCH) == 1.0
    assert next_rate((), SEARCH, 3.14159) == 3.14
    assert next_rate((), SEARCH.model_copy(update={"start_rps": 9.0}), 3.0) == 9.0


def test_measured_points_are_not_measured_again() -> None:
    first = drive(lambda rate: sample(rate, rate <= 3))
    assert next_rate(points(first, SEARCH), SEARCH) is None
    some = first[:3]
    rest: list[float] = []
    while (rate := next_rate(points(some, SEARCH), SEARCH)) is not None:
        rest.append(rate)
        some.append(sample(rate, rate <= 3))
    assert rest == [found.rate_rps for found in first[3:]]


def sample(rate: float, fine: bool, **more: Any) -> Sample:
    return Sample(**{"rate_rps": rate, "repeat": 0, "judged": 150, "met": 150 if fine else 0, **more})


def test_repeats_of_a_rate_are_pooled() -> None:
    (pooled,) = points([sample(2, True), sample(2, True, repeat=1, met=148)], SEARCH)
    assert (pooled.judged, pooled.met, pooled.repeats, pooled.verdict) == (300, 298, (0, 1), "meets")


def test_requests_that_pile_up_miss_whatever_the_share() -> None:
    (point,) = points([sample(2, True, unsustained=True)], SEARCH)
    assert (point.verdict, point.reason) == ("misses", "requests piled up")


def test_a_point_that_cannot_be_judged_ends_the_search() -> None:
    samples = [sample(1, True), sample(2, True, invalid="load generator saturated")]
    assert next_rate(points(samples, SEARCH), SEARCH) is None
    found = answer(samples)
    assert not found.finished
    assert found.detail == "not known: 2 requests/s could not be judged (load generator saturated)"


def test_nothing_misses_and_nothing_meets() -> None:
    assert answer([sample(1, True), sample(2, True)]).detail.startswith("at least 2 requests/s (95% confidence)")
    assert answer([sample(1, False)]).detail.startswith("below 1 requests/s (95% confidence)")
    assert answer([sample(1, False, met=140, judged=150)]).detail.startswith("not known: no rate was decided")


def test_a_rate_that_meets_above_one_that_misses_is_not_believed() -> None:
    found = answer([sample(1, True), sample(2, False), sample(4, True)])
    assert (found.low_rps, found.high_rps, found.best_rps) == (1, 2, 1)


def test_enough_requests_for_the_quantile() -> None:
    for quantile in (0.5, 0.9, 0.95, 0.99):
        search = Search(slo=SLO.model_copy(update={"quantile": quantile}))
        judged = math.floor(slo_search.STEADY_SHARE * search.requests_needed)
        assert share_bounds(judged, judged, 1 - (1 - search.confidence) / 2)[0] > quantile
    assert Search(slo=SLO, requests=7).requests_needed == 7


def record(ttft_s: float, tpot_s: float, tokens: int = 11, **more: Any) -> RequestRecord:
    finish_s = ttft_s + (tokens - 1) * tpot_s
    fields = {"arrival_s": 0.0, "first_token_s": ttft_s, "finish_s": finish_s, "input_tokens": 1}
    return RequestRecord(**{**fields, "output_tokens": tokens, **more})


@pytest.mark.parametrize(
    ("request_", "slo", "expected"),
    [
        (record(0.2, 0.05), SLO, True),
        (record(0.201, 0.05), SLO, False),
        (record(0.2, 0.051), SLO, False),
        (record(0.2, 0.05, error="x"), SLO, False),
        (record(0.2, 0.0, tokens=1), SLO, True),
        (record(0.2, 0.05), Slo(e2el_s=0.7), True),
        (record(0.2, 0.05), Slo(e2el_s=0.69), False),
    ],
)
def test_a_request_meets_every_bound_or_not(request_: RequestRecord, slo: Slo, expected: bool) -> None:
    assert results_slo.meets(request_, slo) is expected


@pytest.mark.parametrize(
    ("gates", "unsustained", "usable"),
    [((), False, True), (("steady_state",), True, True), (("failed_requests",), False, True),
     (("client_saturation",), False, False), (("kv_transfers", "steady_state"), True, False)],
)  # fmt: skip
def test_levels_become_samples(gates: tuple[str, ...], unsustained: bool, usable: bool) -> None:
    whole = Summary(duration_s=10, completed=20, requests_per_s=2, input_tokens_per_s=200, output_tokens_per_s=10)
    run = Run(
        origin="measured", label="x", key=RunKey(kind="rate", value=4), workload=Workload(), load=Open(rate_rps=4),
        num_requests=20, completed=20, failed=0, whole=whole, validity=Validity(reasons=gates, failed_gates=gates),
    )  # fmt: skip
    found = slo_search.sample(run, [record(0.1, 0.01), record(0.3, 0.01)], SLO)
    assert (found.judged, found.met, found.unsustained, found.invalid is None) == (2, 1, unsustained, usable)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0.5, 1.0, 2.0, 4.0, 8.0]), st.integers(0, 150)), max_size=8))
def test_no_order_of_points_breaks_it(raw: list[tuple[float, int]]) -> None:
    samples = [Sample(rate_rps=rate, repeat=i, judged=150, met=met) for i, (rate, met) in enumerate(raw)]
    found = points(samples, SEARCH)
    chosen = next_rate(found, SEARCH)
    assert chosen is None or chosen not in [point.rate_rps for point in found]
    low, high = results_slo.bracket(found)
    assert low is None or high is None or low < high
    assert answer(samples).points == tuple(sorted(found, key=lambda p: p.rate_rps))


def test_points_are_values() -> None:
    (point,) = points([sample(2, True)], SEARCH)
    assert SloPoint.model_validate_json(point.model_dump_json()) == point
