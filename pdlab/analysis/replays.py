"""Facts of a replay of sessions: turns, cached prompts, and whole sessions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Literal, NamedTuple

from pdlab.core.workload import Slo
from pdlab.results.level_data import LevelData
from pdlab.results.metrics import distribution
from pdlab.results.schema import Distribution, RequestRecord
from pdlab.results.slo import bounds_of_one, stresses

LAST_TURN = 6
"""Turns from this one on are one class."""
LENGTH_STEP = 4
"""Ratio of the longest prompts of two neighbouring classes: about five classes for any trace."""
HitSource = Literal["server", "rules"]


class TimesOfSome(NamedTuple):
    """TTFT and TPOT of ``requests`` answered requests, seconds. ``tpot`` None: none has a second output token."""

    requests: int
    ttft: Distribution | None
    tpot: Distribution | None

    @classmethod
    def of(cls, answered: Sequence[RequestRecord]) -> TimesOfSome:
        times = (
            [value for r in answered if (value := r.ttft_s) is not None],
            [value for r in answered if (value := r.tpot_s) is not None],
        )
        return cls(len(answered), *map(distribution, times))


class RequestsByHit(NamedTuple):
    """Requests with some of the prompt from a cache, and others."""

    hit: TimesOfSome
    miss: TimesOfSome


class SlowestTenth(NamedTuple):
    """The tenth of the answers with most E2EL per output token: seconds per token due to TTFT and due to decode."""

    ttft_s: float
    decode_s: float


class WithinSlo(NamedTuple):
    """Sessions with every request answered within an SLO: their number, and per second. ``missed``: bound -> complete
    sessions that missed it."""

    slo: Slo
    sessions: int
    per_s: float
    missed: dict[str, int]


class ReplayFacts(NamedTuple):
    """A replay. ``sessions``: begun. ``complete``: those with every request answered. ``completion``: their time from
    the first request's sending to the last answer's end, pauses included, seconds.

    ``interactivity_p90``: output tokens/s that a client sees, including the wait for the first token, of the request
    that is slower than 90 %. It is the inverse of the 90th percentile of E2EL over output tokens. That quotient is the
    normalised latency of Orca (Yu et al., OSDI 2022) and vLLM (Kwon et al., SOSP 2023).

    ``hit_share``: share of the prompt tokens of answered requests from a cache (None: unknown). ``hits_from``: the
    server's count, or vLLM's rules. ``by_hit``: None if unknown. ``by_turn``: keyed by turn, `LAST_TURN` and later ones
    together. ``by_length``: keyed by the longest prompt of a class, tokens.
    """

    requests: int
    answered: int
    requests_per_s: float
    every: TimesOfSome
    sessions: int
    complete: int
    complete_per_s: float
    completion: Distribution | None
    interactivity_p90: float | None
    slowest: SlowestTenth | None
    by_turn: dict[int, TimesOfSome]
    by_length: dict[int, TimesOfSome]
    hit_share: float | None
    hits_from: HitSource | None
    by_hit: RequestsByHit | None
    within: tuple[WithinSlo, ...]


def replay_facts(records: Sequence[RequestRecord], slos: Iterable[Slo] = ()) -> ReplayFacts | None:
    """Of the requests of one level; None if it replays nothing."""
    replayed = [record for record in records if record.replayed is not None]
    if not replayed:
        return None
    answered = [record for record in replayed if record.ok]
    sessions: defaultdict[str, list[RequestRecord]] = defaultdict(list)
    for record in replayed:
        assert record.replayed is not None
        sessions[record.replayed.session].append(record)
    complete = [each for each in sessions.values() if all(record.ok for record in each)]
    spans_s = [max(r.finish_s or 0.0 for r in each) - min(r.arrival_s for r in each) for each in complete]
    lasted_s = max((r.finish_s or 0.0 for r in answered), default=0.0) - min(r.arrival_s for r in replayed)
    spoken = sorted((r for r in answered if r.e2el_s and r.output_tokens), key=_per_token_s)
    per_token_s = distribution(map(_per_token_s, spoken))
    slowest_s = per_token_s.percentiles_s["p90"] if per_token_s else 0.0
    known = _known_hits(answered)
    # A share over only some of the requests would not be the replay's.
    whole = bool(answered) and len(known) == len(answered)
    told = any(record.replayed and record.replayed.cached_tokens is not None for record in known)
    return ReplayFacts(
        requests=len(replayed),
        answered=len(answered),
        requests_per_s=len(answered) / lasted_s if lasted_s > 0 else 0.0,
        every=TimesOfSome.of(answered),
        sessions=len(sessions),
        complete=len(complete),
        complete_per_s=len(complete) / lasted_s if lasted_s > 0 else 0.0,
        completion=distribution(spans_s),
        interactivity_p90=1 / slowest_s if slowest_s > 0 else None,
        slowest=_slowest(spoken[9 * len(spoken) // 10 :]),
        by_turn=_classes(answered, _turn_number),
        by_length=_classes(answered, _length_class),
        hit_share=hit_share(known) if whole else None,
        hits_from=("server" if told else "rules") if whole else None,
        by_hit=_by_hit(answered) if whole else None,
        within=tuple(_within(slo, complete, lasted_s) for slo in slos),
    )


def hit_share(records: Sequence[RequestRecord]) -> float | None:
    """Share of the prompt tokens from a cache, of the requests of which that is known; None: of none."""
    known = _known_hits(records)
    prompts = sum(record.input_tokens for record in known)
    return sum(map(_hit_tokens, known)) / prompts if prompts else None


def _known_hits(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    return [record for record in records if record.replayed and record.replayed.hit_tokens is not None]


def _per_token_s(record: RequestRecord) -> float:
    return (record.e2el_s or 0.0) / record.output_tokens


def _slowest(records: Sequence[RequestRecord]) -> SlowestTenth | None:
    if not records:
        return None
    ttft_s = fmean((record.ttft_s or 0.0) / record.output_tokens for record in records)
    return SlowestTenth(ttft_s, fmean(map(_per_token_s, records)) - ttft_s)


def _hit_tokens(record: RequestRecord) -> int:
    return (record.replayed.hit_tokens or 0) if record.replayed else 0


def _classes(answered: Sequence[RequestRecord], key: Callable[[RequestRecord], int]) -> dict[int, TimesOfSome]:
    classes: defaultdict[int, list[RequestRecord]] = defaultdict(list)
    for record in answered:
        classes[key(record)].append(record)
    return {name: TimesOfSome.of(members) for name, members in sorted(classes.items())}


def _turn_number(record: RequestRecord) -> int:
    assert record.replayed is not None
    return min(record.replayed.turn, LAST_TURN)


def _length_class(record: RequestRecord) -> int:
    longest = LENGTH_STEP
    while longest < record.input_tokens:
        longest *= LENGTH_STEP
    return longest


def _by_hit(answered: Sequence[RequestRecord]) -> RequestsByHit:
    hits, misses = (TimesOfSome.of([r for r in answered if bool(_hit_tokens(r)) is hit]) for hit in (True, False))
    return RequestsByHit(hits, misses)


def _within(slo: Slo, complete: Sequence[Sequence[RequestRecord]], lasted_s: float) -> WithinSlo:
    sessions = [LevelData.of(each) for each in complete]
    given = slo.model_dump(exclude={"quantile"}, exclude_none=True)
    alone = [Slo(**{name: bound_s}) for name, bound_s in given.items()]
    missed = {bounds_of_one(each): len(sessions) - _kept(each, sessions) for each in alone}
    count = _kept(slo, sessions)
    return WithinSlo(slo, count, count / lasted_s if lasted_s > 0 else 0.0, missed)


def _kept(slo: Slo, sessions: Sequence[LevelData]) -> int:
    return sum(bool((stresses(each, slo) <= 1).all()) for each in sessions)
