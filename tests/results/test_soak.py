"""A load held for long: what changed is found, what did not is not, and what cannot be decided is undecided."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from support import records as made
from support.queues import served

from pdlab.core.workload import Closed, Level, Open
from pdlab.report.soaks import changes
from pdlab.results.level_data import LevelData
from pdlab.results.schema import Change, RequestRecord, Soak
from pdlab.results.soak import change, load_window, soak, windows

Known = list[tuple[float, float]]


def record(arrival_s: float, ttft_s: float = 0.2, tpot_s: float = 0.01, error: str | None = None) -> RequestRecord:
    return made.record(arrival_s, ttft_s, tpot_s, 11, error=error)


def noisy(seed: int, grows: float = 0.0, count: int = 3600, jump_at: float = 2.0) -> Known:
    """Two a second; ``grows`` over the whole, or by as much at once from a share of it on."""
    chance = random.Random(seed)
    grown = [grows * (i / count if jump_at > 1 else i / count >= jump_at) for i in range(count)]
    return [(i / 2, 1 + chance.gauss(0, 0.1) + more) for i, more in enumerate(grown)]


@pytest.mark.parametrize(
    ("grows", "jump_at", "verdict"),
    [(0.0, 2.0, "same"), (0.05, 2.0, "longer"), (0.5, 2.0, "longer"), (0.3, 0.5, "longer"), (-0.3, 0.5, "shorter")],
)
def test_what_changed_and_what_did_not(grows: float, jump_at: float, verdict: str) -> None:
    verdicts = Counter(change(noisy(seed, grows, jump_at=jump_at), 0, 1800, 5).verdict for seed in range(40))
    assert verdicts[verdict] >= 35, verdicts


def test_the_interval_holds_the_change() -> None:
    """Two thirds of a steady growth by 30 %: 1.25 over 1.05."""
    drift = change(noisy(1, 0.3), 0, 1800, 5)
    assert drift.low and drift.high and drift.low < 1.25 / 1.05 < drift.high < 1.1 * drift.low
    assert drift.first_s == pytest.approx(1.05, rel=0.02) and drift.last_s == pytest.approx(1.25, rel=0.02)
    assert drift.ratio == pytest.approx(1.25 / 1.05, rel=0.02) and drift.blocks == 10


@pytest.mark.parametrize("load", [0.5, 0.8, 0.9])
def test_a_queue_that_does_not_change_seldom_gives_a_change(load: float) -> None:
    """Waiting times of neighbours are alike, and a busy spell in one third is no change: at most 5 %, and what 100
    searches leave to chance (binomial, 99 %: 11)."""
    wrong = 0
    for seed in range(100):
        table = served(Level(load=Open(rate_rps=load), num_requests=4000, seed=seed), 1.0)
        known = list(zip(table.arrival_s.tolist(), (table.first_token_s - table.arrival_s).tolist(), strict=True))
        wrong += change(known[200:], known[200][0], known[-1][0], 2.0).verdict not in ("undecided", "same")
    assert wrong <= 11


def test_too_little_is_undecided() -> None:
    few = change([(i * 60.0, 1.0) for i in range(30)], 0, 1800, 5)
    assert few.verdict == "undecided" and few.reason == "too few requests for a verdict: hold the load longer"
    long = change(noisy(1), 0, 1800, 200)
    assert long.verdict == "undecided" and long.ratio is None, "blocks shorter than requests are no sample"


def test_windows_are_minutes_of_arrivals() -> None:
    sent = [record(float(i)) for i in range(131)] + [record(10.5, error="x")]
    one, two = windows(LevelData.of(sent))
    assert (one.begins_s, one.ends_s, two.begins_s, two.ends_s) == (0, 60, 60, 130), "ten seconds are no window"
    assert (one.requests, two.requests) == (60, 71)
    assert one.output_tokens_per_s == pytest.approx(11), "those of the failed one do not count"
    assert one.ttft and one.ttft.p50_s == pytest.approx(0.2) and one.tpot and one.tpot.p50_s == pytest.approx(0.01)
    assert len(windows(LevelData.of([record(float(i)) for i in range(152)]))) == 3, "more than half a minute is one"
    assert windows(LevelData.of([]))[0].requests == 0


def test_latencies_of_a_load_over_time() -> None:
    sent = [record(i / 2, tpot_s=0.01 * (1 + i / 3600) * (1 + 0.02 * (i % 2))) for i in range(3600)]
    result = soak(LevelData.of(sent), Open(rate_rps=2), 1800)
    assert result.requested_s == 1800 and len(result.windows) == 30
    assert result.changes["tpot"].verdict == "longer" and result.changes["ttft"].verdict == "same"
    assert "TTFT the same in the last third: +0.0 % (+0.0 to +0.0, 95 %)" in changes(result)
    assert "TPOT longer in the last third: +5" in changes(result)


@pytest.mark.parametrize("load", [Open(rate_rps=2), Closed(concurrency=1)])
def test_a_jump_at_half_time_is_no_system_that_fills(load: Open | Closed) -> None:
    """By the rule that opens an open loop's steady window (MSER-5) its first half would be cut."""
    chance = random.Random(1)
    sent = [record(i / 2, tpot_s=(0.01 if i < 1800 else 0.016) * chance.gauss(1, 0.05)) for i in range(3600)]
    drift = soak(LevelData.of(sent), load, 1800).changes["tpot"]
    assert drift.verdict == "longer" and drift.ratio == pytest.approx(1.6, rel=0.01)


def test_load_is_kept_up_to_the_end_of_what_is_looked_at() -> None:
    window = load_window(LevelData.of([record(i / 2, ttft_s=5.0) for i in range(100)]), Open(rate_rps=2))
    assert window is not None and window.opens_s == pytest.approx(2 * 5.1) and window.closes_s == 44.0
    assert load_window(LevelData.of([record(i / 2, ttft_s=30.0) for i in range(100)]), Open(rate_rps=2)) is None


def test_one_token_has_no_tpot_and_nothing_answered_no_window() -> None:
    one = [RequestRecord(arrival_s=i / 2, first_token_s=i / 2 + 0.1, finish_s=i / 2 + 0.1, input_tokens=1,
                         output_tokens=1) for i in range(3600)]  # fmt: skip
    assert soak(LevelData.of(one), Open(rate_rps=2), 1800).changes["tpot"].verdict == "undecided"
    failed = [RequestRecord(arrival_s=0.0, input_tokens=1, output_tokens=0, error="x")] * 30
    result = soak(LevelData.of(failed), Closed(concurrency=4), 60)
    assert {each.verdict for each in result.changes.values()} == {"undecided"}
    assert changes(result) == (
        "TTFT undecided: no answers while the load is kept up; TPOT undecided: no answers while the load is kept up"
    )


def test_words_of_an_interval_that_cannot_tell() -> None:
    wide = Soak(
        requested_s=60,
        windows=(),
        changes={"tpot": Change(verdict="undecided", ratio=1.1, low=0.9, high=1.4, blocks=4)},
    )
    assert changes(wide) == "TPOT undecided: last third against first +10.0 % (-10.0 to +40.0, 95 %)"
