"""Figures on records made by hand, where every number can be worked out on paper; and every gate."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from support import records as made

from pdlab.core.workload import Closed, Open, Workload
from pdlab.results import metrics
from pdlab.results.level_data import LevelData
from pdlab.results.schema import RequestRecord

WORKLOAD = Workload(input_tokens=100, output_tokens=5)


def request(arrival_s: float, ttft_s: float = 1.0, gaps: tuple[float, ...] = (0.25,) * 4, **more: Any) -> RequestRecord:
    usual = {"finish_s": arrival_s + ttft_s + sum(gaps), "itl_s": gaps}
    return made.record(arrival_s, ttft_s, tokens=1 + len(gaps), **usual | more)


def waves(concurrency: int, count: int) -> list[RequestRecord]:
    """``count`` waves of ``concurrency`` requests, 2 s each, the next as soon as the last is over."""
    return [request(2.0 * wave) for wave in range(count) for _ in range(concurrency)]


def test_whole_run() -> None:
    whole = metrics.whole(LevelData.of([*waves(2, 3), request(6.0, error="x", finish_s=None, first_token_s=None)]))
    assert (whole.duration_s, whole.completed) == (6.0, 6)
    assert (whole.requests_per_s, whole.input_tokens_per_s, whole.output_tokens_per_s) == (1.0, 100.0, 5.0)
    assert whole.ttft and whole.tpot and whole.itl and whole.e2el
    assert (whole.ttft.p50_s, whole.tpot.p50_s, whole.itl.mean_s, whole.e2el.p50_s) == (1.0, 0.25, 0.25, 2.0)
    assert set(whole.ttft.percentiles_s) == {"p50", "p90", "p95", "p99"}


def test_nothing_was_answered() -> None:
    for records in ([], [request(0.0, error="x", finish_s=None)]):
        whole = metrics.whole(LevelData.of(records))
        assert (whole.completed, whole.requests_per_s, whole.duration_s, whole.ttft) == (0, 0.0, 0.0, None)
        assert metrics.steady(LevelData.of(records), Closed(concurrency=1)) is None
        assert metrics.steady(LevelData.of(records), Open(rate_rps=1)) is None


def test_one_output_token_has_no_tpot() -> None:
    whole = metrics.whole(LevelData.of([request(0.0, gaps=())]))
    assert whole.tpot is None and whole.itl is None and whole.ttft and whole.e2el == whole.ttft


def test_closed_window_is_between_the_burst_and_the_last_arrival() -> None:
    records = waves(2, 6)
    assert metrics.steady_window(LevelData.of(records), Closed(concurrency=2)) == (1.0, 10.0)
    steady = metrics.steady(LevelData.of(records), Closed(concurrency=2))
    assert steady is not None
    # Waves end at 2, 4, 6, 8 and 10 s; of the first wave 4 of 5 tokens fall inside, of waves 2 to 5 all.
    assert (steady.duration_s, steady.completed) == (9.0, 10)
    assert steady.requests_per_s == pytest.approx(10 / 9)
    assert steady.input_tokens_per_s == pytest.approx(1000 / 9)
    assert steady.output_tokens_per_s == pytest.approx((2 * 4 + 4 * 2 * 5) / 9)


def test_latencies_of_the_burst_and_of_the_drain_stay_out() -> None:
    records = waves(1, 8)
    slow_first = [request(-3.0, ttft_s=4.0), *records[1:-1], request(14.0, ttft_s=4.0)]
    steady = metrics.steady(LevelData.of(slow_first), Closed(concurrency=1))
    whole = metrics.whole(LevelData.of(slow_first))
    assert steady and steady.ttft and whole.ttft and steady.tpot
    assert steady.ttft.percentiles_s["p99"] == 1.0
    assert whole.ttft.percentiles_s["p99"] > 3.0


def test_too_short_for_a_closed_window() -> None:
    assert metrics.steady(LevelData.of(waves(4, 2)), Closed(concurrency=4)) is None
    assert metrics.steady(LevelData.of(waves(4, 3)), Closed(concurrency=4)) is not None


def test_chunks_of_several_tokens_are_spread() -> None:
    chunky = [request(2.0 * i, gaps=(0.5, 0.5), output_tokens=9) for i in range(10)]
    steady = metrics.steady(LevelData.of(chunky), Closed(concurrency=1))
    assert steady is not None
    # From 1 s to 18 s: two thirds of the first request and the eight whole ones after it.
    assert steady.output_tokens_per_s == pytest.approx((6 + 8 * 9) / 17)


def test_open_window_opens_when_filled_and_closes_when_load_still_lasts() -> None:
    records = [request(0.5 * i) for i in range(100)]
    load = Open(rate_rps=2)
    # E2EL is 2 s: filled after 4 s. The last request arrives at 49.5 s, so what arrives by 47.5 s ends before.
    assert metrics.steady_window(LevelData.of(records), load) == (4.0, 47.5)
    steady = metrics.steady(LevelData.of(records), load)
    assert steady is not None
    assert steady.requests_per_s == pytest.approx(2, rel=0.02)
    assert steady.output_tokens_per_s == pytest.approx(10, rel=0.02)


def test_open_window_keeps_the_slow_and_ends_before_what_outlasts_the_load() -> None:
    records = [request(0.5 * i) for i in range(100)]
    records[60] = request(30.0, ttft_s=15.0)
    steady = metrics.steady(LevelData.of(records), Open(rate_rps=2))
    assert steady and steady.ttft and steady.ttft.mean_s > 1.1
    records[60] = request(30.0, ttft_s=30.0)
    assert metrics.steady_window(LevelData.of(records), Open(rate_rps=2)) == (4.0, 29.5)


def test_a_failed_request_ends_no_window() -> None:
    records = [request(0.5 * i) for i in range(100)]
    records[60] = request(30.0, error="x", finish_s=None)
    assert metrics.steady_window(LevelData.of(records), Open(rate_rps=2)) == (4.0, 47.5)
    data = LevelData.of(records)
    window = metrics.steady_window(data, Open(rate_rps=2))
    assert window and (window.judges(data, Open(rate_rps=2)) & ~data.ok).sum() == 1


def test_mser_5_cuts_what_a_filling_system_answers_sooner() -> None:
    rising = [0.05 * min(i, 40) + 0.02 * (i % 3) for i in range(200)]
    assert 35 <= metrics.mser_cut(np.array(rising)) <= 45
    assert metrics.mser_cut(np.array([1.0 + 0.02 * (i % 3) for i in range(200)])) == 0
    falling = [5.0 - value for value in rising]
    assert metrics.mser_cut(np.array(falling)) == 0, "a busy spell at the start is part of what was measured"
    assert metrics.mser_cut(np.arange(200.0)) == 100, "never filled: half of it at most"
    assert metrics.mser_cut(np.array([1.0, 2.0])) == 0


def test_the_window_waits_for_the_truncation_point() -> None:
    records = [request(0.5 * i, ttft_s=0.1 if i < 60 else 1.0) for i in range(200)]
    assert metrics.steady_window(LevelData.of(records), Open(rate_rps=2)) == (30.0, 97.5)


def test_in_flight_is_rate_times_time_in_the_system() -> None:
    trend = metrics.trend(LevelData.of([request(0.5 * i) for i in range(200)]), Open(rate_rps=2))
    assert trend and trend.in_flight_by_rate == pytest.approx(trend.in_flight_mean, rel=0.03)
    assert trend.in_flight_mean == pytest.approx(4, rel=0.03)
    closed = metrics.trend(LevelData.of(waves(2, 20)), Closed(concurrency=2))
    assert closed and closed.in_flight_by_rate is None


def test_open_loop_too_short() -> None:
    assert metrics.steady(LevelData.of([request(0.5 * i) for i in range(20)]), Open(rate_rps=2)) is None
    assert metrics.steady(LevelData.of([request(0.5 * i) for i in range(40)]), Open(rate_rps=2)) is not None
    assert metrics.distribution([math.nan]) is None
