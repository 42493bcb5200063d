"""Facts of a replay of sessions: turns, cached prompts, and whole sessions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from pdlab.core.workload import Slo
from pdlab.results.level_data import LevelData
from pdlab.results.metrics import distribution
from pdlab.results.schema import Distribution
from pdlab.results.slo import bounds_of_one, stresses
from pdlab.results.texts import text_codes

if TYPE_CHECKING:
    from pdlab.results.level_data import Codes, Column, Mask

LAST_TURN = 6
"""Turns from this one on are one class."""
LENGTH_STEP = 4
"""Ratio of the longest prompts of two neighbouring classes: about five classes for any trace."""
MOST_CLASSES = 30
HitSource = Literal["server", "rules"]


class TimesOfSome(NamedTuple):
    """TTFT and TPOT of ``requests`` answered requests, seconds. ``tpot`` None: none has a second output token."""

    requests: int
    ttft: Distribution | None
    tpot: Distribution | None

    @classmethod
    def of(cls, requests: LevelData, selected: Mask) -> TimesOfSome:
        """Those that are ``selected``; all were answered."""
        times = (distribution(values_s[selected]) for values_s in (requests.ttft_s, requests.tpot_s))
        return cls(int(selected.sum()), *times)


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


def replay_facts(requests: LevelData, slos: Iterable[Slo] = ()) -> ReplayFacts | None:
    """Of the requests of one level; None if it replays nothing."""
    replayed = requests.part(requests.replayed.known)
    if not len(replayed):
        return None
    ok, sessions = replayed.ok, _Sessions.of(replayed)
    lasted_s = float(np.max(replayed.finish_s[ok], initial=0.0)) - float(replayed.arrival_s[0])
    per_token_s, slowest = _slowest(replayed)
    hits = hit_tokens(replayed)
    # A share over only some of the requests would not be the replay's.
    whole = bool(ok.any()) and not np.isnan(hits[ok]).any()
    reported = bool((~np.isnan(replayed.replayed.cached_tokens[ok])).any())
    complete = int(sessions.complete.sum())
    return ReplayFacts(
        requests=len(replayed),
        answered=int(ok.sum()),
        requests_per_s=int(ok.sum()) / lasted_s if lasted_s > 0 else 0.0,
        every=TimesOfSome.of(replayed, ok),
        sessions=len(sessions.complete),
        complete=complete,
        complete_per_s=complete / lasted_s if lasted_s > 0 else 0.0,
        completion=distribution(sessions.spans_s(replayed)[sessions.complete]),
        interactivity_p90=1 / per_token_s if per_token_s > 0 else None,
        slowest=slowest,
        by_turn=_classes(replayed, np.minimum(replayed.replayed.turns, LAST_TURN)),
        by_length=_classes(replayed, _longest_of_class(replayed)),
        hit_share=hit_share(replayed, ok) if whole else None,
        hits_from=("server" if reported else "rules") if whole else None,
        by_hit=RequestsByHit(TimesOfSome.of(replayed, ok & (hits > 0)), TimesOfSome.of(replayed, ok & (hits == 0)))
        if whole
        else None,
        within=tuple(_within(slo, replayed, sessions, lasted_s) for slo in slos),
    )


def hit_tokens(requests: LevelData) -> Column:
    """Of each prompt the tokens from a cache: the server's count, else the forecast; NaN: unknown."""
    own = requests.replayed
    return np.where(np.isnan(own.cached_tokens), own.foreseen_tokens, own.cached_tokens)


def hit_share(requests: LevelData, selected: Mask) -> float | None:
    """Share of the prompt tokens from a cache, of the ``selected`` requests of which that is known; None: of none."""
    hits = hit_tokens(requests)
    known = selected & ~np.isnan(hits)
    prompts = float(requests.input_tokens[known].sum())
    return float(hits[known].sum()) / prompts if prompts else None


class _Sessions(NamedTuple):
    """The number of each request's session, and by these numbers whether every request was answered."""

    numbers: Codes
    complete: Mask

    @classmethod
    def of(cls, requests: LevelData) -> _Sessions:
        numbers = text_codes(requests.replayed.sessions)
        return cls(numbers, np.bincount(numbers, weights=~requests.ok) == 0)

    def spans_s(self, requests: LevelData) -> Column:
        """From the first sending to the last end."""
        first_s, last_s = np.full(len(self.complete), np.inf), np.zeros(len(self.complete))
        np.minimum.at(first_s, self.numbers, requests.arrival_s)
        np.fmax.at(last_s, self.numbers, requests.finish_s)
        spans_s: Column = last_s - first_s
        return spans_s

    def good(self, requests: LevelData, slo: Slo) -> int:
        """Number of sessions with every request answered within the SLO."""
        missed = np.bincount(self.numbers, weights=stresses(requests, slo) > 1)
        return int((self.complete & (missed == 0)).sum())


def _slowest(requests: LevelData) -> tuple[float, SlowestTenth | None]:
    """90th percentile of E2EL per output token, seconds (0: no answer has one), and the tenth with most of it."""
    spoken = requests.ok & (requests.e2el_s > 0) & (requests.output_tokens > 0)
    per_token_s, tokens = (requests.e2el_s / requests.output_tokens)[spoken], requests.output_tokens[spoken]
    every = distribution(per_token_s)
    if every is None:
        return 0.0, None
    tenth = per_token_s.argsort(kind="stable")[9 * len(per_token_s) // 10 :]
    ttft_s = float((requests.ttft_s[spoken] / tokens)[tenth].mean())
    return every.percentiles_s["p90"], SlowestTenth(ttft_s, float(per_token_s[tenth].mean()) - ttft_s)


def _classes(requests: LevelData, keys: Codes) -> dict[int, TimesOfSome]:
    found = np.unique(keys[requests.ok]).tolist()
    return {key: TimesOfSome.of(requests, requests.ok & (keys == key)) for key in found}


def _longest_of_class(requests: LevelData) -> Codes:
    longest = LENGTH_STEP ** np.arange(1, MOST_CLASSES + 1)
    return longest[longest.searchsorted(requests.input_tokens)]


def _within(slo: Slo, requests: LevelData, sessions: _Sessions, lasted_s: float) -> WithinSlo:
    given = slo.model_dump(exclude={"quantile"}, exclude_none=True)
    alone = [Slo(**{name: bound_s}) for name, bound_s in given.items()]
    complete = int(sessions.complete.sum())
    missed = {bounds_of_one(each): complete - sessions.good(requests, each) for each in alone}
    count = sessions.good(requests, slo)
    return WithinSlo(slo, count, count / lasted_s if lasted_s > 0 else 0.0, missed)
