"""Arrivals of open loops: the rate, the burstiness, the ramp; and shares that add up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from support.client_levels import client_level

from pdlab.bench.client.protocol import ClientAnswer, ClientLevel, merged
from pdlab.core.workload import Closed, Open, Ramp
from pdlab.results import metrics
from pdlab.results.schema import RequestRecord


def level(**given: Any) -> ClientLevel:
    return client_level(**{"num_requests": 4000, "seed": 3} | given)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_rate_and_the_burstiness(burstiness: float) -> None:
    gaps = np.diff(level(load=Open(rate_rps=20.0, burstiness=burstiness)).schedule_s(), prepend=0.0)
    assert gaps.sum() == pytest.approx(4000 / 20)
    # The coefficient of variation of a gamma distribution is 1 / sqrt(shape).
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.1)


@pytest.mark.parametrize("shape", ["linear", "exponential"])
@pytest.mark.parametrize(("start", "end"), [(2.0, 32.0), (8.0, 8.0), (16.0, 4.0)])
def test_a_ramp_takes_the_time_of_its_mean_rate(shape: Any, start: float, end: float) -> None:
    ramp = Ramp(start_rps=start, end_rps=end, shape=shape)
    due = level(load=ramp).schedule_s()
    assert due[-1] == pytest.approx(4000 / ramp.mean_rps, rel=0.08)
    few = 80
    assert few / (due[few] - due[0]) == pytest.approx(start, rel=0.4)
    assert few / (due[-1] - due[-few]) == pytest.approx(end, rel=0.4)


def test_who_needs_a_schedule() -> None:
    assert not level(load=Closed(concurrency=4)).scheduled and not level(load=Closed(concurrency=4), parts=2).scheduled
    assert (
        level(load=Open(rate_rps=2.0)).scheduled
        and level(load=Open(rate_rps=2.0), parts=2).scheduled
        and level(load=Ramp(start_rps=1, end_rps=2)).scheduled
    )


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_lateness_at_200_requests_per_second_counts_from_the_one_schedule_of_all_processes(parts: int) -> None:
    """Every process sends its share of 60 s; each request as much later as was planted."""
    whole = level(load=Open(rate_rps=200.0), num_requests=12_000)
    due = whole.schedule_s()
    assert due[-1] == pytest.approx(60.0) and np.diff(due).min() >= 0
    planted = np.random.default_rng(7).exponential(0.004, len(due))
    planted[::40] += 0.05
    planted -= planted.min()
    answers = []
    for part in range(parts):
        own = level(load=Open(rate_rps=200.0), num_requests=12_000, part=part, parts=parts)
        assert own.schedule_s() == due, "all draw the same schedule"
        began = [100.0 + due[number] + planted[number] for number in own.own_requests]
        schedule_s = min(moment - due[number] for moment, number in zip(began, own.own_requests, strict=True))
        records = tuple(
            RequestRecord(
                arrival_s=moment - began[0],
                input_tokens=8,
                output_tokens=0,
                error="x",
                lateness_s=moment - due[number] - schedule_s,
            )
            for moment, number in zip(began, own.own_requests, strict=True)
        )
        answers.append(
            ClientAnswer(
                name="x", records=records, schedule_s=schedule_s, origin_s=began[0], started_at="a", finished_at="b"
            )
        )
    total = merged(answers)
    late = np.array([record.lateness_s for record in total.records], dtype=float)
    assert np.sort(late) == pytest.approx(np.sort(planted), abs=2e-6)
    assert metrics.percentile(sorted(late), 99) == pytest.approx(np.percentile(planted, 99), abs=2e-6)


@given(st.integers(1, 40), st.integers(1, 8), st.integers(0, 400))
def test_shares_add_up(concurrency: int, parts: int, more: int) -> None:
    """Every request and every unit of concurrency belongs to exactly one process."""
    total = max(concurrency, parts) + more
    for load in (Closed(concurrency=concurrency), Open(rate_rps=2.0)):
        if parts > (concurrency if isinstance(load, Closed) else total):
            with pytest.raises(ValidationError):
                level(load=load, num_requests=total, parts=parts)
            continue
        own = [level(load=load, num_requests=total, part=part, parts=parts) for part in range(parts)]
        assert sorted(number for one in own for number in one.own_requests) == list(range(total))
        if isinstance(load, Closed):
            assert sum(one.own_concurrency or 0 for one in own) == concurrency
            assert all(one.own_concurrency and len(one.own_requests) >= 1 for one in own)
