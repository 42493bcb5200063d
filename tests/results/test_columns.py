"""Figures and gates over columns in files are to the last digit those of plain lists in memory."""

from __future__ import annotations

import errno
import math
import os
import random
from itertools import accumulate

import numpy as np
import pytest
from support import records as made

from pdlab.bench.gates import Evidence, validate_level
from pdlab.core.errors import WriteError
from pdlab.core.workload import Closed, Load, Open, Replay
from pdlab.results import columns, metrics
from pdlab.results.level_data import LevelData
from pdlab.results.schema import PERCENTILES, ClientLoad, Distribution, ReplayedRequest, RequestRecord, Run

REQUESTS = 600


def requests(chance: random.Random) -> list[RequestRecord]:
    """In no order. Some failed, some have no gaps, some wait for others."""
    found = []
    for n in range(REQUESTS):
        arrival_s = n / 40 + chance.random() / 10
        first_s, gaps_s = arrival_s + chance.random(), tuple(chance.expovariate(50) for _ in range(n % 7))
        failed = n % 9 == 4
        replayed = ReplayedRequest(
            id=f"r{n}",
            session=f"s{n // 4}",
            parent=f"r{n - 1}" if n % 4 else None,
            waits=("r3", f"r{n + 1}") if n % 50 == 7 else (),
            replica=f"d{n % 3}" if n % 5 else None,
            cached_tokens=n % 8,
            foreseen_tokens=None if failed else n % 6,
        )
        found.append(
            RequestRecord(
                arrival_s=arrival_s,
                first_token_s=None if failed else first_s,
                finish_s=None if failed else first_s + sum(gaps_s) - (1.0 if n == 333 else 0.0),
                input_tokens=100 + n % 3,
                output_tokens=1 + len(gaps_s),
                itl_s=() if failed else gaps_s,
                lateness_s=None if n % 4 else chance.random() / 9,
                error=f"e{n % 2}" if failed else None,
                requested=(100, 1 + len(gaps_s)),
                replayed=replayed,
            )
        )
    chance.shuffle(found)
    return found


def in_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every array in a file, and whatever is done part by part in many parts."""
    monkeypatch.setattr(columns, "SMALL", 0)
    monkeypatch.setattr(columns, "AT_ONCE", 64)
    monkeypatch.setattr(metrics, "AT_ONCE", 64)


def judged(records: list[RequestRecord], load: Load) -> Run:
    data = LevelData.of(records)
    window = metrics.steady_window(data, load)
    run = made.run([], load).model_copy(
        update={
            "whole": metrics.whole(data),
            "steady": metrics.steady(data, load, window),
            "trend": metrics.trend(data, load, window),
            "num_requests": len(records),
            "client": ClientLoad(processes=1, cpu_share=0.5, loop_lag_s=0.001, clock_step_s=0.0),
        }
    )
    evidence = Evidence(run=run, requests=data, by_session=("collocated",))
    return run.model_copy(update={"validity": validate_level(evidence, moves_kv=False)})


@pytest.mark.parametrize("load", [Replay(), Open(rate_rps=40.0), Closed(concurrency=20)], ids=lambda load: load.kind)
def test_a_level_is_judged_the_same_from_memory_and_from_files(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    records = requests(random.Random(1))
    in_memory = judged(records, load)
    in_files(monkeypatch)
    assert judged(records, load).model_dump_json() == in_memory.model_dump_json()
    codes = {finding.gate for finding in in_memory.validity.findings}
    assert {"failed_requests", "token_counts", "clock"} <= codes
    assert isinstance(load, Replay) == ({"dependencies", "affinity"} <= codes)


def plain(values: list[float | None]) -> Distribution:
    ordered = sorted(value for value in values if value is not None)
    return Distribution(
        mean_s=math.fsum(ordered) / len(ordered),
        percentiles_s={f"p{q}": metrics.percentile(ordered, q) for q in PERCENTILES},
    )


def latencies(judged: list[RequestRecord]) -> dict[str, Distribution]:
    return {
        "ttft": plain([each.ttft_s for each in judged]),
        "tpot": plain([each.tpot_s for each in judged]),
        "itl": plain([gap_s for each in judged for gap_s in each.itl_s]),
        "e2el": plain([each.e2el_s for each in judged]),
    }


def test_figures_from_files_are_those_of_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    in_files(monkeypatch)
    records = sorted(requests(random.Random(2)), key=lambda each: each.arrival_s)
    data, load = LevelData.of(records), Open(rate_rps=40.0)
    answered = [each for each in records if each.ok]
    whole = metrics.whole(data)
    assert {name: getattr(whole, name) for name in latencies(answered)} == latencies(answered)
    window = metrics.steady_window(data, load)
    steady, trend = metrics.steady(data, load), metrics.trend(data, load)
    assert window and steady and trend
    opens_s, closes_s = window
    counted = [each for each in answered if opens_s <= each.arrival_s <= closes_s]
    assert {name: getattr(steady, name) for name in latencies(counted)} == latencies(counted)
    received, slices = [], [0.0] * trend.slices
    for each in answered:
        for moment_s in accumulate(each.itl_s, initial=each.first_token_s):
            assert moment_s is not None
            if opens_s < moment_s <= closes_s:
                share = each.output_tokens / (1 + len(each.itl_s))
                received.append(share)
                slices[min(trend.slices - 1, int((moment_s - opens_s) / (window.length_s / trend.slices)))] += share
    assert steady.output_tokens_per_s == sum(received) * (1 / window.length_s)
    change, t = metrics._fitted(slices)
    assert (trend.throughput_change, trend.throughput_t) == (change / float(np.mean(slices)), t)


def test_runs_of_values_come_in_the_order_of_their_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    in_files(monkeypatch)
    counts = np.array([2, 0, 3, 1, 0])
    values = np.arange(6.0)
    for order, expected in (
        ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]),
        ([4, 3, 2, 1, 0], [5, 2, 3, 4, 0, 1]),
        ([1, 2], [2, 3, 4]),
        ([3, 0], [5, 0, 1]),
        ([1], []),
        ([], []),
    ):
        assert columns.runs_taken(values, counts, np.array(order, dtype=np.int64)).tolist() == expected


def test_numbers_may_be_added_after_they_were_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "AT_ONCE", 2)
    numbers = columns.GrowingArray("q")
    assert numbers.array().tolist() == []
    numbers.extend([1, 2, 3])
    first = numbers.array()
    numbers.append(4)
    assert (first.tolist(), numbers.array().tolist()) == ([1, 2, 3], [1, 2, 3, 4])


def test_a_full_disk_is_an_error_before_it_is_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(WriteError, match=r"temporary file in .*No space left on device"):
        columns.allocated(columns.SMALL)
