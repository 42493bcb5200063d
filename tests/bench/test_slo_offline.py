"""Searches over queues whose answer is known, with the windows and gates of a measured search.

Smaller than benchmarks/slo_coverage.py, so with a lower quantile and confidence.
"""

from __future__ import annotations

import numpy as np
import pytest
from support.queues import highest_rate, served

from pdlab.bench import levels, slo_offline, slo_search
from pdlab.bench.slo_search import SloSearchOptions
from pdlab.core.lengths import parse_lengths
from pdlab.core.workload import Level, Open, Slo, Workload
from pdlab.results.level_data import LevelData
from pdlab.results.metrics import steady_window

WORKLOAD = Workload(input_tokens=1, output_tokens=2)
SERVICE_S = 0.1
SEARCHES = 12


@pytest.mark.parametrize(("bound_s", "decode_s"), [(0.3, 0.0), (1.0, 0.0), (0.5, 5.0)])
def test_the_bracket_of_a_known_queue_holds_the_truth(bound_s: float, decode_s: float) -> None:
    truth = highest_rate(bound_s - SERVICE_S + 1e-9, SERVICE_S, 0.8)
    search = SloSearchOptions(slo=Slo(ttft_s=bound_s, quantile=0.8), confidence=0.9, max_points=14, longest_s=200)
    answers = [
        slo_offline.search_over(
            lambda level: served(level, SERVICE_S, decode_s), search, WORKLOAD, label="x", seed=seed, hold_s=30
        )
        for seed in range(SEARCHES)
    ]
    lows, highs = [each.low_rps or 0.0 for each in answers], [each.high_rps or 1e9 for each in answers]
    # Each end may be wrong with 5 %: three of twelve have a probability of 2 %.
    assert sum(low > truth for low in lows) <= 2 and sum(high < truth for high in highs) <= 2
    assert max(lows) < 1 / SERVICE_S
    narrow = sum(high / low < 2 for low, high in zip(lows, highs, strict=True) if low)
    assert narrow >= SEARCHES - 3, "and narrow ones"


def test_a_server_without_a_limit_has_no_upper_end() -> None:
    """Answers that take 12 s: by the windows of an earlier rule requests piled up."""
    search = SloSearchOptions(slo=Slo(ttft_s=1.0, quantile=0.8), max_points=4)
    answer = slo_offline.search_over(
        lambda level: served(level, 0.0, 12.0), search, WORKLOAD, label="x", hold_s=30, guess_rps=1.0
    )
    assert answer.high_rps is None and answer.low_rps == 8
    assert "the upper end is unknown" in answer.detail and not answer.finished


@pytest.mark.parametrize("guess_rps", [4.0, 5.2])
def test_a_bound_that_overload_does_not_touch_is_never_met_above_the_service_rate(guess_rps: float) -> None:
    """Requests wait before a server whose answers, once begun, are all quick. At 5.2 x 2 a level is so little above
    what is served that its own queue does not show it."""
    search = SloSearchOptions(slo=Slo(tpot_s=0.05, quantile=0.8), max_points=14)
    lows = []
    for seed in range(SEARCHES):
        answer = slo_offline.search_over(
            lambda level: served(level, SERVICE_S, 0.01), search, WORKLOAD, label="x", seed=seed, guess_rps=guess_rps
        )
        assert answer.low_rps is not None and answer.low_rps < 1 / SERVICE_S, answer.detail
        assert answer.high_rps is not None and 1 / SERVICE_S <= answer.high_rps <= 16, answer.detail
        assert answer.best_rps is None or answer.best_rps < 1 / SERVICE_S
        lows.append(answer.low_rps)
    assert sum(low >= 8 for low in lows) >= SEARCHES - 3, "and narrow ones"


@pytest.mark.parametrize("answers_s", [0.01, 1.0, 6.0, 12.0, 20.0])
def test_what_is_judged_began_in_a_filled_system_however_long_answers_take(answers_s: float) -> None:
    """Half of what the server can do. Held for 60 s, the last of these fill it for two thirds of that."""
    load, slo = Open(rate_rps=5.0), Slo(ttft_s=1.0)
    count = levels.num_requests(load, WORKLOAD, hold_s=60.0, e2el_s=answers_s)
    for seed in range(20):
        level = Level(load=load, num_requests=count, seed=seed)
        columns = served(level, SERVICE_S, answers_s)
        run = slo_offline.run_of(level, columns, WORKLOAD, "x")
        window = steady_window(columns, load)
        assert window is not None and window.opens_s >= 2 * answers_s
        judged = window.judges(columns, load)
        assert judged.sum() > 0.55 * count, "most of what was sent is of use"
        assert columns.finish_s[~judged].max() >= columns.arrival_s[judged].max() or answers_s < 1, (
            "the load is kept up"
        )
        moments = np.linspace(window.opens_s, window.closes_s, 50)[:, None]
        in_flight = ((columns.arrival_s <= moments) & (columns.finish_s > moments)).sum(axis=1).mean()
        stays_s = columns.e2el_s[judged].mean()
        assert in_flight == pytest.approx(5.0 * stays_s, rel=0.25, abs=0.5), "Little's law: nothing fills or drains"
        taken = slo_search.sample(run, columns, slo)
        assert taken.steady is True and taken.share > 0.99 and taken.judged == judged.sum()


@pytest.mark.parametrize("answers_s", [0.01, 6.0, 20.0])
def test_overload_is_never_taken_for_steady(answers_s: float) -> None:
    load, slo = Open(rate_rps=14.0), Slo(tpot_s=30.0)
    count = levels.num_requests(load, WORKLOAD, hold_s=60.0, e2el_s=answers_s)
    for seed in range(20):
        level = Level(load=load, num_requests=count, seed=seed)
        requests = served(level, SERVICE_S, answers_s)
        run = slo_offline.run_of(level, requests, WORKLOAD, "x")
        assert slo_search.sample(run, requests, slo).steady is not True


def alike(arrivals: float) -> Workload:
    """Mixes whose requests are as good as alike, and arrive at that multiple of the load's rate."""
    return Workload(lengths=parse_lengths(f"mixes:100:2@{arrivals:g},101:2@{arrivals:g},every=10"))


@pytest.mark.parametrize("arrivals", [0.2, 4.0])
def test_a_mix_at_a_multiple_of_the_rate_has_the_bracket_of_a_plain_load(arrivals: float) -> None:
    truth = highest_rate(0.9 + 1e-9, SERVICE_S, 0.8) / arrivals
    search = SloSearchOptions(slo=Slo(ttft_s=1.0, quantile=0.8), confidence=0.9, max_points=14, longest_s=200)
    lasted_s: list[float] = []

    def drive(level: Level) -> LevelData:
        requests = served(level, SERVICE_S, arrivals=arrivals)
        lasted_s.append(requests.arrival_s[-1] if level.num_requests > 2 * search.requests_needed else 0.0)
        return requests

    answers = [
        slo_offline.search_over(drive, search, alike(arrivals), label="x", seed=seed, hold_s=30, guess_rps=truth / 3)
        for seed in range(SEARCHES)
    ]
    lows, highs = [each.low_rps or 0.0 for each in answers], [each.high_rps or 1e9 for each in answers]
    assert sum(low > truth for low in lows) <= 2 and sum(high < truth for high in highs) <= 2
    assert sum(high / low < 2 for low, high in zip(lows, highs, strict=True) if low) >= SEARCHES - 3
    assert max(lasted_s) < 1.1 * 2 * search.longest_s, "a look and its doubling"


def test_a_mix_at_a_multiple_of_the_rate_never_meets_above_what_is_served() -> None:
    search = SloSearchOptions(slo=Slo(tpot_s=0.05, quantile=0.8), max_points=14)
    for seed in range(SEARCHES):
        answer = slo_offline.search_over(
            lambda level: served(level, SERVICE_S, 0.01, arrivals=4.0),
            search, alike(4.0), label="x", seed=seed, guess_rps=1.3,
        )  # fmt: skip
        assert answer.low_rps is not None and 1.5 <= answer.low_rps < 1 / SERVICE_S / 4, answer.detail
        assert answer.best_rps is None or answer.best_rps < 1 / SERVICE_S / 4


def test_every_level_over_mixes_has_two_rounds() -> None:
    workload, driven = Workload(lengths=parse_lengths("mixes:100:2,400:2,every=60")), []

    def drive(level: Level) -> LevelData:
        arrivals = workload.arrivals(level)
        assert arrivals is not None
        driven.append(arrivals[-1].due_s)
        return served(level, SERVICE_S)

    search = SloSearchOptions(slo=Slo(ttft_s=0.5, quantile=0.8), max_points=4)
    slo_offline.search_over(drive, search, workload, label="x", guess_rps=4.0)
    assert min(driven) > 0.9 * 240


def test_the_number_in_flight_counts_what_arrives() -> None:
    level = Level(load=Open(rate_rps=1.0), num_requests=400, seed=1)
    requests = served(level, 0.0, 2.0, arrivals=4.0)
    taken = slo_search.sample(slo_offline.run_of(level, requests, alike(4.0), "x"), requests, Slo(ttft_s=1.0))
    assert taken.in_flight == pytest.approx(8.0)


def test_levels_have_seeds_of_their_own_and_are_held() -> None:
    driven: list[Level] = []

    def drive(level: Level) -> LevelData:
        driven.append(level)
        return served(level, SERVICE_S, 8.0)

    search = SloSearchOptions(slo=Slo(ttft_s=0.5, quantile=0.8), max_points=6)
    slo_offline.search_over(drive, search, WORKLOAD, label="x", hold_s=30, guess_rps=4.0)
    assert len({level.seed for level in driven}) == len(driven) == 6
    for level in driven[1:]:
        assert level.num_requests >= 80 * level.load.value, "ten times E2EL"
    again: list[Level] = []
    slo_offline.search_over(
        lambda level: again.append(level) or served(level, SERVICE_S, 8.0),  # type: ignore[func-returns-value]
        search, WORKLOAD, label="x", hold_s=30, guess_rps=4.0, seed=1,
    )  # fmt: skip
    assert {level.seed for level in again}.isdisjoint(level.seed for level in driven)
