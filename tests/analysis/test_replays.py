"""Facts of a replay, against figures worked out by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from pdlab.analysis.replays import LAST_TURN, ReplayFacts, replay_facts
from pdlab.core.workload import Slo
from pdlab.results.level_data import LevelData
from pdlab.results.schema import ReplayedRequest, RequestRecord


def record(
    name: str,
    turn: int,
    arrival_s: float,
    ttft_s: float,
    e2el_s: float | None,
    *,
    cached: int | None = None,
    foreseen: int | None = None,
) -> RequestRecord:
    session = name[0]
    own = ReplayedRequest(id=name, session=session, turn=turn, cached_tokens=cached, foreseen_tokens=foreseen)
    return RequestRecord(
        arrival_s=arrival_s,
        first_token_s=arrival_s + ttft_s,
        finish_s=None if e2el_s is None else arrival_s + e2el_s,
        input_tokens=100,
        output_tokens=10,
        error="x" if e2el_s is None else None,
        replayed=own,
    )


# Sessions a (two turns), b (two turns, the second fails) and c (one turn).
RECORDS = (
    record("a0", 1, 0.0, 1.0, 2.0, cached=0),
    record("a1", 2, 5.0, 0.2, 1.0, cached=80),
    record("b0", 1, 1.0, 2.0, 4.0, cached=0),
    record("b1", 2, 6.0, 0.5, None),
    record("c0", 1, 2.0, 1.5, 8.0, cached=40),
)


def facts_of(records: Iterable[RequestRecord], slos: Sequence[Slo] = ()) -> ReplayFacts | None:
    return replay_facts(LevelData.of(records), slos)


def test_sessions_turns_and_hits() -> None:
    facts = facts_of(RECORDS)
    assert facts is not None
    assert (facts.requests, facts.answered, facts.sessions, facts.complete) == (5, 4, 3, 2)
    assert facts.completion is not None
    # From a0's sending to a1's end, and c0's 8 s: 6 and 8 s; all of it took 10 s.
    assert facts.completion.mean_s == pytest.approx(7.0) and facts.complete_per_s == pytest.approx(0.2)
    by_turn = {turn: (each.requests, each.ttft.mean_s) for turn, each in facts.by_turn.items() if each.ttft}
    assert by_turn == {1: (3, pytest.approx(1.5)), 2: (1, pytest.approx(0.2))}
    assert facts.hit_share == pytest.approx(120 / 400) and facts.hits_from == "server"
    assert facts.by_hit is not None and facts.by_hit.hit.ttft is not None and facts.by_hit.miss.ttft is not None
    assert (facts.by_hit.hit.requests, facts.by_hit.miss.requests) == (2, 2)
    assert facts.by_hit.hit.ttft.mean_s == pytest.approx(0.85) and facts.by_hit.miss.ttft.mean_s == pytest.approx(1.5)


def test_latencies_by_turn_and_by_length() -> None:
    """Nine gaps between ten tokens: TPOT is the rest of E2EL over nine. Failed requests are in no class."""
    longer = record("d0", 9, 0.0, 0.5, 1.4).model_copy(update={"input_tokens": 65})
    shorter = record("e0", 7, 0.0, 0.5, 2.3).model_copy(update={"input_tokens": 64})
    facts = facts_of((*RECORDS, longer, shorter))
    assert facts is not None
    tpot = {turn: each.tpot.mean_s for turn, each in facts.by_turn.items() if each.tpot}
    assert tpot == {1: pytest.approx(9.5 / 27), 2: pytest.approx(0.8 / 9), LAST_TURN: pytest.approx(0.15)}
    lengths = {longest: (each.requests, each.tpot and each.tpot.mean_s) for longest, each in facts.by_length.items()}
    assert lengths == {64: (1, pytest.approx(0.2)), 256: (5, pytest.approx((9.5 + 0.8 + 0.9) / 45))}
    assert facts.every.requests == 6 and facts.requests_per_s == pytest.approx(0.6)


def test_interactivity_is_of_the_slow_ones() -> None:
    records = [record(f"a{number}", 1, 0.0, 0.1, 1.0 + number) for number in range(11)]
    facts = facts_of(records)
    assert facts is not None and facts.interactivity_p90 is not None
    assert facts.interactivity_p90 == pytest.approx(10 / 10.0), "E2EL of 1 to 11 s for 10 tokens: the 90th percentile"


def test_goodput_counts_sessions_whose_every_request_is_within_the_bounds() -> None:
    facts = facts_of(RECORDS, [Slo(ttft_s=1.2), Slo(ttft_s=0.5), Slo(e2el_s=9.0)])
    assert facts is not None
    assert [(each.sessions, each.per_s) for each in facts.within] == [
        (1, pytest.approx(0.1)),
        (0, 0.0),
        (2, pytest.approx(0.2)),
    ]


def test_a_forecast_stands_in_for_the_server_and_some_of_the_hits_are_no_share() -> None:
    foreseen = tuple(record(f"a{n}", n + 1, 3.0 * n, 0.1, 1.0, foreseen=50 * n) for n in range(2))
    facts = facts_of(foreseen)
    assert facts is not None and facts.hits_from == "rules" and facts.hit_share == pytest.approx(0.25)
    partly = facts_of((*foreseen, record("b0", 1, 0.0, 0.1, 1.0)))
    assert partly is not None and partly.hit_share is None and partly.by_hit is None and partly.hits_from is None


def test_what_replays_nothing_has_none() -> None:
    plain = [each.model_copy(update={"replayed": None}) for each in RECORDS]
    assert facts_of(plain) is None and facts_of([]) is None
