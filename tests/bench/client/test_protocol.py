"""A level in slow time and back."""

from __future__ import annotations

import pytest
from support.client_levels import client_level

from pdlab.bench.client.protocol import ClientAnswer, in_simulated_time, slowed
from pdlab.core.workload import Closed, Open, Ramp
from pdlab.results.schema import RequestRecord

LEVEL = client_level(load=Open(rate_rps=4.0), request_timeout_s=60.0)


def test_requests_come_slowly_with_their_time() -> None:
    slow = slowed(LEVEL, 8.0)
    assert (slow.load, slow.request_timeout_s, slow.stamped) == (Open(rate_rps=0.5), 480.0, True)
    assert not LEVEL.stamped
    ramp = LEVEL.model_copy(update={"load": Ramp(start_rps=1, end_rps=8)})
    assert slowed(ramp, 4.0).load == Ramp(start_rps=0.25, end_rps=2.0)
    closed = LEVEL.model_copy(update={"load": Closed(concurrency=3)})
    assert slowed(closed, 4.0).load == Closed(concurrency=3)


def test_times_become_simulated_ones_and_counts_stay() -> None:
    record = RequestRecord(
        arrival_s=8.0, first_token_s=12.0, finish_s=20.0, input_tokens=10, output_tokens=5, itl_s=(4.0, 4.0),
        lateness_s=0.4,
    )  # fmt: skip
    failed = RequestRecord(arrival_s=9.0, input_tokens=10, output_tokens=0, error="HTTP 500")
    answer = ClientAnswer(
        name="rate4", records=(record, failed), cpu_share=0.5, loop_lag_s=0.04, clock_step_s=0.004, origin_s=400.0,
        started_at="a", finished_at="b",
    )  # fmt: skip
    quick = in_simulated_time(answer, 4.0)
    first, second = quick.records
    assert (first.arrival_s, first.ttft_s, first.e2el_s, first.itl_s) == (2.0, 1.0, 3.0, (1.0, 1.0))
    assert first.tpot_s == pytest.approx(record.tpot_s / 4 if record.tpot_s else 0)
    assert first.lateness_s == pytest.approx(0.1)
    assert (second.arrival_s, second.finish_s, second.error) == (2.25, None, "HTTP 500")
    assert (quick.cpu_share, quick.loop_lag_s) == (0.5, 0.01)
