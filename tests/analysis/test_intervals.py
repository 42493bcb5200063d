"""Intervals cover the truth as often as stated, over seeded trials; verdicts err no more often than they may."""

from __future__ import annotations

import math

import numpy as np
import pytest
from support.queues import md1_tail

from pdlab.analysis.intervals import (
    MIN_BEYOND,
    SURE_BEYOND,
    Array,
    Comparison,
    Estimate,
    compare,
    multipliers,
    of_repeats,
    of_requests,
    resample,
)
from pdlab.results.metrics import student_t

TRIALS = 200
LEVEL = 0.95
# Of 200 trials at a true rate of 95 %, 183 or more cover with a probability of 98.5 % (binomial), so
# fewer means that the interval is too narrow; more than 198 has a probability of 0.2 %, so it is too wide.
# The seeds are fixed: the outcome never changes by chance.
LEAST, MOST = 183, 198


@pytest.mark.parametrize("repeats", [2, 3, 5, 10])
@pytest.mark.parametrize("shape", ["normal", "lognormal"])
def test_the_mean_over_repeats_is_covered_at_the_stated_rate(repeats: int, shape: str) -> None:
    rng = np.random.default_rng([1, repeats, len(shape)])
    drawn = {"normal": rng.normal(100, 8, (TRIALS, repeats)), "lognormal": rng.lognormal(0, 0.2, (TRIALS, repeats))}
    truth = {"normal": 100.0, "lognormal": math.exp(0.02)}[shape]
    covered = sum(interval.holds(truth) for row in drawn[shape] if (interval := of_repeats(list(row)).interval(LEVEL)))
    assert LEAST <= covered <= MOST


def test_a_percentile_bootstrap_of_three_repeats_would_not() -> None:
    """Why Student's t: the textbook bootstrap, on the same data, covers far less than stated."""
    rng = np.random.default_rng(7)
    covered = 0
    for row in rng.normal(100, 8, (TRIALS, 3)):
        means = rng.choice(row, (1000, 3)).mean(axis=1)
        low, high = np.quantile(means, [0.025, 0.975])
        covered += low <= 100 <= high
    assert covered < 0.85 * TRIALS


def test_requests_within_one_run_are_covered_though_neighbours_are_alike() -> None:
    """An autocorrelated series, as latencies in a closed loop are: mean and percentiles of its distribution."""
    rng = np.random.default_rng(11)
    hits = {"mean": 0, "p50": 0, "p90": 0}
    truth = {"mean": 0.0, "p50": 0.0, "p90": 1.2816}
    for _ in range(TRIALS):
        values = _autocorrelated(rng, 600, 0.6)
        estimates = of_requests(values, (50, 90), least=16)
        for name in hits:
            interval = _signed(estimates[name])
            hits[name] += interval[0] <= truth[name] <= interval[1]
    assert min(hits.values()) >= LEAST - 6, hits  # 20 blocks of 30: a few per cent short of independence


def _autocorrelated(rng: np.random.Generator, count: int, rho: float) -> Array:
    noise = rng.normal(0, math.sqrt(1 - rho**2), count)
    values = np.empty(count)
    values[0] = rng.normal()
    for i in range(1, count):
        values[i] = rho * values[i - 1] + noise[i]
    return values


def _signed(estimate: Estimate) -> tuple[float, float]:
    """The interval without the cut at 0 that latencies and rates have."""
    assert estimate.standard_error is not None and estimate.dof is not None
    half = student_t((1 + LEVEL) / 2, estimate.dof) * estimate.standard_error
    return estimate.value - half, estimate.value + half


def test_tails_and_short_runs_have_no_error_rather_than_a_wrong_one() -> None:
    values = np.random.default_rng(0).normal(10, 1, 200)
    estimates = of_requests(values, (50, 99), least=8)
    assert estimates["p50"].basis == "requests"
    assert estimates["p99"].standard_error is None, "two requests lie beyond it"
    assert of_requests(values, (50,), least=64)["p50"].standard_error is None, "three blocks"
    assert estimates["p99"].interval(LEVEL) is None


@pytest.mark.parametrize(
    ("utilisation", "beyond", "least", "worst_error"),
    [
        # With one or two requests beyond it in each repeat a tail is a quarter too low, and its interval misses it.
        (0.7, 5 / 3, None, None),
        (0.7, MIN_BEYOND, None, 0.12),
        (0.7, SURE_BEYOND, 0.9, 0.05),
        (0.85, SURE_BEYOND, 0.8, 0.12),
    ],
)
def test_the_tail_of_a_queue_is_covered_where_its_sample_carries_it(
    utilisation: float, beyond: float, least: float | None, worst_error: float | None
) -> None:
    """Three repeats of an M/D/1 queue, whose slow requests come in bursts: not independent draws."""
    for quantile in (0.9, 0.99):
        ratios = md1_tail(utilisation, quantile, round(beyond / (1 - quantile)), 3, TRIALS, seed=3)
        held = sum(interval.holds(1.0) for row in ratios if (interval := of_repeats(row).interval(LEVEL))) / TRIALS
        error = float(np.mean(ratios)) - 1
        if worst_error is None:
            assert held < 0.85 and error < -0.12
        else:
            assert abs(error) <= worst_error
        assert least is None or held >= least


@pytest.mark.parametrize("repeats", [2, 3, 5])
def test_equal_configurations_are_distinguished_no_more_often_than_stated(repeats: int) -> None:
    rng = np.random.default_rng([3, repeats])
    wrong = 0
    for _ in range(TRIALS):
        comparison = _compared(rng.normal(100, 5, repeats), rng.normal(100, 10, repeats))
        wrong += comparison.verdict != "not distinguishable"
    assert wrong <= TRIALS - LEAST


def test_a_real_difference_is_found_and_its_size_covered() -> None:
    rng = np.random.default_rng(5)
    comparisons = [_compared(rng.normal(130, 4, 3), rng.normal(100, 4, 3)) for _ in range(TRIALS)]
    assert sum(each.verdict == "better" for each in comparisons) > 0.95 * TRIALS
    assert sum(each.low <= 1.3 <= each.high for each in comparisons) >= LEAST
    assert not any(each.verdict == "worse" for each in comparisons)


def _compared(first: Array, second: Array) -> Comparison:
    comparison = compare(of_repeats(list(first)), of_repeats(list(second)), LEVEL)
    assert comparison is not None
    return comparison


def test_several_comparisons_for_one_statement_share_the_error() -> None:
    a, b = of_repeats([120, 124, 122]), of_repeats([100, 110, 105])
    alone, among = compare(a, b, LEVEL), compare(a, b, LEVEL, comparisons=10)
    assert alone and among
    assert among.low < alone.low < alone.ratio < alone.high < among.high
    assert (alone.verdict, among.verdict) == ("better", "not distinguishable")


def test_what_has_no_scatter_is_not_compared() -> None:
    assert compare(Estimate(value=1), of_repeats([1, 2]), LEVEL) is None
    assert of_repeats([3.0]).interval(LEVEL) is None
    edge = Estimate(value=2, standard_error=math.inf, dof=2, basis="repeats")
    comparison = compare(edge, of_repeats([1, 1.1]), LEVEL)
    assert comparison and (comparison.verdict, comparison.low, comparison.high) == ("not distinguishable", 0, math.inf)


def test_draws_have_the_standard_error_and_the_correlation_of_the_repeats() -> None:
    values = np.array([[10.0, 30.0], [11.0, 33.0], [13.0, 39.0]])
    drawn = resample(values, multipliers((1,), 20_000, 3))
    assert drawn.std(axis=0) == pytest.approx(values.std(axis=0, ddof=1) / math.sqrt(3), rel=0.03)
    assert drawn.mean(axis=0) == pytest.approx(values.mean(axis=0), rel=0.01)
    assert np.corrcoef(drawn.T)[0, 1] == pytest.approx(1)


def test_the_same_seed_draws_the_same() -> None:
    assert np.array_equal(multipliers((1, 2), 5, 3), multipliers((1, 2), 5, 3))
    assert not np.array_equal(multipliers((1, 2), 5, 3), multipliers((1, 3), 5, 3))
