"""Searches over queues whose answer is known, with the windows and gates of a measured search.

Smaller than benchmarks/slo_coverage.py, so with a lower quantile and confidence.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from support.queues import highest_rate

from pdlab.bench import slo_offline
from pdlab.bench.slo_search import Search
from pdlab.core.workload import Level, Open, Slo, Workload
from pdlab.results.schema import RequestRecord
from pdlab.sim.level import open_arrivals

WORKLOAD = Workload(input_tokens=1, output_tokens=2)
SERVICE_S = 0.1
SEARCHES = 12


def queue(level: Level, service_s: float = SERVICE_S, decode_s: float = 0.0) -> list[RequestRecord]:
    """Poisson arrivals before one server of that service time (0: a server without any limit), behind which each
    answer takes ``decode_s``."""
    assert isinstance(level.load, Open)
    free_s, found = 0.0, []
    for arrival_s in open_arrivals(level.load, level.num_requests, random.Random(level.seed)):
        free_s = max(arrival_s, free_s) + service_s if service_s else arrival_s
        found.append(
            RequestRecord(
                arrival_s=arrival_s, first_token_s=free_s, finish_s=free_s + decode_s, input_tokens=1, output_tokens=2
            )
        )
    return found


@pytest.mark.parametrize(("bound_s", "decode_s"), [(0.3, 0.0), (1.0, 0.0), (0.5, 5.0)])
def test_the_bracket_of_a_known_queue_holds_the_truth(bound_s: float, decode_s: float) -> None:
    truth = highest_rate(bound_s - SERVICE_S + 1e-9, SERVICE_S, 0.8)
    search = Search(slo=Slo(ttft_s=bound_s, quantile=0.8), confidence=0.9, max_points=14, longest_s=200)
    found = [
        slo_offline.search_over(
            lambda level: queue(level, decode_s=decode_s), search, WORKLOAD, label="x", seed=seed, hold_s=30
        )
        for seed in range(SEARCHES)
    ]
    lows, highs = [each.low_rps or 0.0 for each in found], [each.high_rps or 1e9 for each in found]
    # Each end may be wrong with 5 %: three of twelve have a probability of 2 %.
    assert sum(low > truth for low in lows) <= 2 and sum(high < truth for high in highs) <= 2
    assert max(lows) < 1 / SERVICE_S
    narrow = sum(high / low < 2 for low, high in zip(lows, highs, strict=True) if low)
    assert narrow >= SEARCHES - 3, "and it says something"


def test_a_server_without_a_limit_has_no_upper_end() -> None:
    """Answers that take 12 s: the windows of an earlier rule said that requests piled up."""
    search = Search(slo=Slo(ttft_s=1.0, quantile=0.8), max_points=4)
    found = slo_offline.search_over(
        lambda level: queue(level, 0.0, 12.0), search, WORKLOAD, label="x", hold_s=30, guess_rps=1.0
    )
    assert found.high_rps is None and found.low_rps == 8
    assert "the upper end is unknown" in found.detail and not found.finished


def test_a_bound_that_overload_does_not_touch_ends_where_requests_pile_up() -> None:
    """Requests wait before a server whose answers, once begun, are all quick: known to what the gate lets pass."""
    search = Search(slo=Slo(tpot_s=0.05, quantile=0.8), max_points=14)
    for seed in range(6):
        found = slo_offline.search_over(
            lambda level: queue(level, decode_s=0.01), search, WORKLOAD, label="x", seed=seed, guess_rps=4.0
        )
        assert found.low_rps is not None and 4 <= found.low_rps <= 10.6, found.detail
        assert found.high_rps is not None and 9.0 <= found.high_rps <= 16, found.detail


def test_levels_have_seeds_of_their_own_and_are_held() -> None:
    levels: list[Level] = []

    def drive(level: Level) -> Sequence[RequestRecord]:
        levels.append(level)
        return queue(level, decode_s=8.0)

    search = Search(slo=Slo(ttft_s=0.5, quantile=0.8), max_points=6)
    slo_offline.search_over(drive, search, WORKLOAD, label="x", hold_s=30, guess_rps=4.0)
    assert len({level.seed for level in levels}) == len(levels) == 6
    for level in levels[1:]:
        assert level.num_requests >= 80 * level.load.value, "ten times E2EL"
    again: list[Level] = []
    slo_offline.search_over(
        lambda level: again.append(level) or queue(level, decode_s=8.0),  # type: ignore[func-returns-value]
        search, WORKLOAD, label="x", hold_s=30, guess_rps=4.0, seed=1,
    )  # fmt: skip
    assert {level.seed for level in again}.isdisjoint(level.seed for level in levels)
