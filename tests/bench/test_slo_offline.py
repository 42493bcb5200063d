"""Searches over queues whose answer is known, with the windows and gates of a measured search.

Smaller than benchmarks/slo_coverage.py, so with a lower quantile and confidence.
"""

from __future__ import annotations

import pytest
from support.queues import highest_rate, served

from pdlab.bench import slo_offline
from pdlab.bench.slo_search import Search
from pdlab.core.workload import Level, Slo, Workload
from pdlab.results.metrics import Columns

WORKLOAD = Workload(input_tokens=1, output_tokens=2)
SERVICE_S = 0.1
SEARCHES = 12


@pytest.mark.parametrize(("bound_s", "decode_s"), [(0.3, 0.0), (1.0, 0.0), (0.5, 5.0)])
def test_the_bracket_of_a_known_queue_holds_the_truth(bound_s: float, decode_s: float) -> None:
    truth = highest_rate(bound_s - SERVICE_S + 1e-9, SERVICE_S, 0.8)
    search = Search(slo=Slo(ttft_s=bound_s, quantile=0.8), confidence=0.9, max_points=14, longest_s=200)
    found = [
        slo_offline.search_over(
            lambda level: served(level, SERVICE_S, decode_s), search, WORKLOAD, label="x", seed=seed, hold_s=30
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
        lambda level: served(level, 0.0, 12.0), search, WORKLOAD, label="x", hold_s=30, guess_rps=1.0
    )
    assert found.high_rps is None and found.low_rps == 8
    assert "the upper end is unknown" in found.detail and not found.finished


@pytest.mark.parametrize("guess_rps", [4.0, 5.2])
def test_a_bound_that_overload_does_not_touch_is_never_met_above_the_service_rate(guess_rps: float) -> None:
    """Requests wait before a server whose answers, once begun, are all quick. At 5.2 x 2 a level is so little above
    what is served that its own queue does not show it."""
    search = Search(slo=Slo(tpot_s=0.05, quantile=0.8), max_points=14)
    lows = []
    for seed in range(SEARCHES):
        found = slo_offline.search_over(
            lambda level: served(level, SERVICE_S, 0.01), search, WORKLOAD, label="x", seed=seed, guess_rps=guess_rps
        )
        assert found.low_rps is not None and found.low_rps < 1 / SERVICE_S, found.detail
        assert found.high_rps is not None and 1 / SERVICE_S <= found.high_rps <= 16, found.detail
        assert found.best_rps is None or found.best_rps < 1 / SERVICE_S
        lows.append(found.low_rps)
    assert sum(low >= 8 for low in lows) >= SEARCHES - 3, "and it says something"


def test_levels_have_seeds_of_their_own_and_are_held() -> None:
    levels: list[Level] = []

    def drive(level: Level) -> Columns:
        levels.append(level)
        return served(level, SERVICE_S, 8.0)

    search = Search(slo=Slo(ttft_s=0.5, quantile=0.8), max_points=6)
    slo_offline.search_over(drive, search, WORKLOAD, label="x", hold_s=30, guess_rps=4.0)
    assert len({level.seed for level in levels}) == len(levels) == 6
    for level in levels[1:]:
        assert level.num_requests >= 80 * level.load.value, "ten times E2EL"
    again: list[Level] = []
    slo_offline.search_over(
        lambda level: again.append(level) or served(level, SERVICE_S, 8.0),  # type: ignore[func-returns-value]
        search, WORKLOAD, label="x", hold_s=30, guess_rps=4.0, seed=1,
    )  # fmt: skip
    assert {level.seed for level in again}.isdisjoint(level.seed for level in levels)
