"""Highest request rate that meets an SLO: which rate to measure next, and what the points prove. Pure.

A rate *meets* the SLO when the share of its judged requests within every bound is shown to be at
least the quantile, and *misses* it when it is shown to be below: by the Clopper-Pearson bound of
that share (Clopper and Pearson, Biometrika 26, 1934). In between it is *undecided*, and so is a rate whose level was
not in a steady state, or could not be checked for one; `pdlab.results.slo.judge` has the rule.

- Neighbouring requests are not independent. The bounds use the number of independent requests that they are worth
  (`pdlab.results.slo.effective`), and the next level is longer by the factor that the nearest rate needed.
- A search looks often. Each side has half of the allowed error, shared by all the looks that a search may take
  (Bonferroni). So both ends together hold at the confidence, wherever the search stops.
- Levels of one rate are pooled. After a level without a steady state, a further look is twice as long. A further look
  confirms each end, and must not contradict it by itself.
- Without a steady window (answers take too long) all requests are judged. They began and ended in an empty system,
  which only helps them: they can show that a rate misses the SLO, and never that it meets it.
- If requests piled up at one rate, no rate above the served rate meets the SLO: just above its capacity a server's
  queue grows too slowly for one level to show it.

The search goes up or down by a factor until one rate meets and one misses. Then it divides the wider of the gaps beside
the undecided band at its geometric middle, until both gaps are within the resolution. It looks again at undecided
rates, and confirms. A rate that only lacks independent requests is measured again before any other rate.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pydantic import Field

from pdlab.bench.options import SearchOptions
from pdlab.core.errors import UsageError
from pdlab.core.schema import Frozen
from pdlab.core.text import rounded
from pdlab.core.workload import BURSTINESS, Burstiness, Load, Open, Slo, title
from pdlab.results import metrics
from pdlab.results.level_data import LevelData
from pdlab.results.schema import Run, SloPoint, SloSearch
from pdlab.results.slo import (
    PILED_UP,
    bracket,
    clearly_within,
    effective,
    judge,
    judge_all,
    most_served,
    served_rps,
    stresses,
)

LEAST_RPS = 0.001
DIGITS = 3  # of a rate: it names a file
MOST_RPS = 100_000.0
STEADY_SHARE = 0.7  # of an open loop's requests are in its steady window, where it is held for 10 times E2EL
POWER = 2.0
MOST_LOOKS = 3  # at one rate
FURTHER_LOOK = 3  # times as many requests
NO_QUEUE = 0.2  # requests in flight: who misses then gains nothing from a lower rate
# What these find is what the search measures: that the server cannot keep up.
PERFORMANCE_GATES = {"failed_requests", "few_requests", "steady_state", "preemptions"}


class SloSearchOptions(SearchOptions):
    """The settings of one search for an SLO's highest rate.

    ``requests`` of the first level at a rate; None: enough to show with a good chance that a true share half-way
    between the quantile and 1 meets the SLO, see `requests_needed`.
    """

    slo: Slo
    burstiness: Burstiness = BURSTINESS
    requests: int | None = Field(default=None, ge=1)

    @property
    def requests_needed(self) -> int:
        """Without a single miss ln(error) / ln(quantile) independent requests are needed to show that a rate meets the
        SLO; here twice as many, and the steady window holds 0.7 of them."""
        if self.requests is not None:
            return self.requests
        spotless = math.log((1 - self.confidence) / 2 / self.max_points) / math.log(self.slo.quantile)
        return math.ceil(POWER * spotless / STEADY_SHARE)


class LevelSample(Frozen):
    """One level at one rate: ``met`` of ``judged`` requests meet the SLO. ``effective``: how many independent requests
    these are worth (None: all). ``steady``: whether it was in a steady state (None: not checked). ``in_flight``: mean
    number. ``clear``: it is far within the bounds. ``served_rps``: if requests piled up, the lowest possible served
    rate, as a rate of the load (`Workload.mean_rate`). ``invalid``: why its figures cannot be used.
    """

    rate_rps: float
    repeat: int
    look: int = 0
    judged: int
    met: int
    effective: float | None = None
    steady: bool | None = True
    in_flight: float | None = None
    clear: bool = False
    served_rps: float | None = None
    invalid: str | None = None

    @property
    def share(self) -> float:
        return self.met / self.judged if self.judged else 0.0


class NextLevel(Frozen):
    """The next level: its rate, how often that rate was measured before, the least number of requests, and its length
    as a multiple (``longer``) of a first level.
    """

    rate_rps: float
    look: int
    requests: int
    longer: int = 1


def check_apart(searches: Sequence[SloSearchOptions], loads: Iterable[Load]) -> None:
    """Raises UsageError for searches and loads that cannot share a folder: levels are named by their rate without the
    burstiness, results of searches by the SLO.
    """
    names = [search.slo.label for search in searches]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"two searches for {twice[0]} have one result: keep one of them")
    opens = {title(load): load.burstiness for load in loads if isinstance(load, Open)}
    others = [*opens.items(), *((f"the search for {search.slo.label}", search.burstiness) for search in searches)]
    for search in searches:
        for other, burstiness in others:
            if burstiness != search.burstiness:
                raise UsageError(
                    f"the search for {search.slo.label} has burstiness {search.burstiness:g}, {other} has "
                    f"{burstiness:g}, and levels are named by their rate alone: give both one burstiness, or measure "
                    "them into two folders"
                )


def sample(run: Run, requests: LevelData, slo: Slo) -> LevelSample:
    """A finished open-loop level and its requests, as a sample of the search."""
    worst = stresses(requests, slo)
    unusable = [g for g in run.validity.failed_gates if g not in PERFORMANCE_GATES]
    invalid = "; ".join(run.validity.reasons) if unusable else None
    window = metrics.steady_window(requests, run.load)
    judged = worst[window.judges(requests, run.load)] if window else worst
    steady: bool | None = True
    if "steady_state" in run.validity.failed_gates:
        steady = False
    elif window is None or "few_requests" in run.validity.failed_gates or "steady_state" in run.validity.unchecked:
        steady = None
    times_s = requests.e2el_s[requests.ok]
    served = served_rps(requests) if steady is False else None
    return LevelSample(
        rate_rps=run.key.value,
        repeat=run.key.repeat,
        look=run.key.look,
        judged=len(judged),
        met=int((judged <= 1).sum()),
        effective=effective(judged, slo.quantile),
        steady=steady,
        in_flight=run.key.value * run.workload.mean_rate * float(times_s.mean()) if len(times_s) else None,
        clear=clearly_within(judged, slo),
        served_rps=None if served is None else served / run.workload.mean_rate,
        invalid=invalid,
    )


def points(samples: Iterable[LevelSample], search: SloSearchOptions) -> tuple[SloPoint, ...]:
    """Samples of one rate pooled and judged, by rate."""
    by_rate: dict[float, list[LevelSample]] = {}
    for sample in samples:
        by_rate.setdefault(sample.rate_rps, []).append(sample)
    pooled = [_point(rate_rps, by_rate[rate_rps]) for rate_rps in sorted(by_rate)]
    return judge_all(pooled, search.slo.quantile, search.confidence, search.max_points)


class SearchState(NamedTuple):
    """What the samples prove, and the next level (None: the search is over)."""

    answer: SloSearch
    step: NextLevel | None


def evaluate(
    samples: Sequence[LevelSample],
    search: SloSearchOptions,
    *,
    label: str,
    repeat: int,
    guess_rps: float | None = None,
    mean_rate: float = 1.0,
) -> SearchState:
    """The state of a search with these samples. ``guess_rps``: the first rate if there are none. ``mean_rate``: that
    of the workload."""
    rate_points, looks = points(samples, search), dict(Counter(sample.rate_rps for sample in samples))
    answer = result(rate_points, search, label=label, repeat=repeat, looks=looks)
    return SearchState(answer, next_step(rate_points, search, guess_rps, looks, mean_rate))


def _point(rate_rps: float, pooled: Sequence[LevelSample]) -> SloPoint:
    good = sorted(
        (sample for sample in pooled if sample.invalid is None), key=lambda sample: (sample.look, sample.repeat)
    )
    # A level too short to be checked adds nothing to a longer one.
    counted = [sample for sample in good if sample.steady is not None] or good
    judged, met = sum(sample.judged for sample in counted), sum(sample.met for sample in counted)
    piled = bool(counted) and all(sample.steady is False for sample in counted)
    size = sum(sample.judged if sample.effective is None else sample.effective for sample in counted)
    flying = [sample.in_flight for sample in counted if sample.in_flight is not None]
    served = [sample.served_rps for sample in counted if sample.served_rps is not None]
    return SloPoint(
        rate_rps=rate_rps,
        judged=judged,
        met=met,
        share=met / judged if judged else 0.0,
        low=0.0,
        high=1.0,
        verdict="undecided" if good else "invalid",
        repeats=tuple(sorted({sample.repeat for sample in good})),
        effective=math.floor(size),
        looks=max(1, len(counted)),
        latest=counted[-1].share if counted else None,
        steady=_all_steady(counted),
        in_flight=math.fsum(flying) / len(flying) if flying else None,
        clear=bool(counted) and all(sample.clear for sample in counted),
        served_rps=min(served, default=None),
        piled_up=bool(good) and piled,
        reason=pooled[0].invalid if not good else PILED_UP if piled else None,
    )


def _all_steady(samples: Sequence[LevelSample]) -> bool | None:
    if any(sample.steady is False for sample in samples):
        return False
    return True if samples and all(sample.steady for sample in samples) else None


def next_step(
    points: Sequence[SloPoint],
    search: SloSearchOptions,
    guess_rps: float | None = None,
    looks: dict[float, int] | None = None,
    mean_rate: float = 1.0,
) -> NextLevel | None:
    """The next level; None: the search is over. ``guess_rps``: the first rate if there are no points. ``looks``: rate
    -> measured levels, also those that are in no point (None: as many as the points have). ``mean_rate``: as in
    `evaluate`.
    """
    taken = looks if looks is not None else {point.rate_rps: point.looks for point in points}
    rate = _next_rate(points, search, guess_rps, taken)
    if rate is None or sum(taken.values()) >= search.max_points:
        return None
    if search.start_rps is not None and not {search.start_rps, rounded(search.start_rps, DIGITS)} & taken.keys():
        rate = rounded(search.start_rps, DIGITS)
    look, steady = taken.get(rate, 0), any(point.rate_rps == rate and point.steady for point in points)
    longer = 1 if steady else 2**look
    return NextLevel(rate_rps=rate, look=look, requests=_requests(rate, points, search, mean_rate), longer=longer)


def _requests(rate_rps: float, points: Sequence[SloPoint], search: SloSearchOptions, mean_rate: float) -> int:
    """Requests of a first look: enough independent ones, by the correlation of neighbours at the nearest rate."""
    steady = [point for point in points if point.effective and point.steady]
    if search.requests is not None or not steady:
        return search.requests_needed
    nearest = min(steady, key=lambda point: abs(math.log(point.rate_rps / rate_rps)))
    alike = nearest.judged / (nearest.effective or 1)
    longest = search.longest_s * rate_rps * mean_rate
    return max(search.requests_needed, math.ceil(min(search.requests_needed * alike, longest)))


def _next_rate(
    points: Sequence[SloPoint], search: SloSearchOptions, guess_rps: float | None, taken: dict[float, int]
) -> float | None:
    if not points:
        return rounded(search.start_rps or guess_rps or 1.0, DIGITS)
    if any(point.verdict == "invalid" for point in points):
        return None
    low, high = bracket(points)
    factor = min(2.0, search.step ** (2 ** min(len(points) - 1, 9)))
    top, bottom = max(points, key=lambda p: p.rate_rps), min(points, key=lambda p: p.rate_rps)
    if high is None:
        if _unclear(top, taken):
            return top.rate_rps
        return rounded(factor * top.rate_rps, DIGITS) if factor * top.rate_rps <= MOST_RPS else None
    if low is None:
        if _unclear(bottom, taken) or _promising(bottom, taken, search):
            return bottom.rate_rps
        alone = bottom.verdict == "misses" and bottom.in_flight is not None and bottom.in_flight < NO_QUEUE
        lower = rounded(bottom.rate_rps / factor, DIGITS)
        return lower if not alone and bottom.rate_rps / factor >= LEAST_RPS else None
    between = [point for point in points if low < point.rate_rps < high]
    most_rps = most_served(points)
    for point in reversed(between):
        if (most_rps is None or point.rate_rps <= most_rps) and _promising(point, taken, search):
            return point.rate_rps
    if (middle := _middle(low, high, [point.rate_rps for point in between], points, search)) is not None:
        return middle
    for point in between:
        if taken.get(point.rate_rps, 1) < MOST_LOOKS - 1:
            return point.rate_rps
    return next((end for end in (low, high) if taken.get(end, 1) < 2), None)


def _unclear(point: SloPoint, taken: dict[float, int]) -> bool:
    """Whether a longer look decides more than another rate, because the last level had no steady state."""
    return point.verdict == "undecided" and point.steady is not True and taken.get(point.rate_rps, 1) < MOST_LOOKS


def _promising(point: SloPoint, taken: dict[float, int], search: SloSearchOptions) -> bool:
    """Whether a rate that is undecided would meet if a further look, `FURTHER_LOOK` times as much in all, has the same
    share: that decides more than a lower rate, at which as few independent requests would leave it undecided again."""
    if point.verdict != "undecided" or point.steady is not True or taken.get(point.rate_rps, 1) >= MOST_LOOKS:
        return False
    sized = {"effective": FURTHER_LOOK * point.effective, "reason": None}
    more = judge(point.model_copy(update=sized), search.slo.quantile, search.confidence, search.max_points)
    return more.verdict == "meets"


def _middle(
    low: float, high: float, between: Sequence[float], points: Sequence[SloPoint], search: SloSearchOptions
) -> float | None:
    """The middle of the wider gap beside the undecided band; None where both are within the resolution."""
    rates = [point.rate_rps for point in points]
    gaps = {(low, min([*between, high])), (max([*between, low]), high)}
    for a, b in sorted(gaps, key=lambda gap: gap[0] / gap[1]):
        middle = rounded(math.sqrt(a * b), DIGITS)
        if b / a > 1 + search.resolution and middle not in rates:
            return middle
    return None


def result(
    points: Sequence[SloPoint],
    search: SloSearchOptions,
    *,
    label: str,
    repeat: int,
    looks: dict[float, int] | None = None,
) -> SloSearch:
    """The search's result from these points. ``looks``: as in `next_step`."""
    low, high = bracket(points)
    quantile = search.slo.quantile
    good = [p for p in points if p.judged and p.verdict != "misses" and p.share >= quantile]
    ends = [end for end in (high, most_served(points)) if end is not None]
    best = max((p.rate_rps for p in good if all(p.rate_rps < end for end in ends)), default=None)
    unlimited = search.model_copy(update={"max_points": 1 << 30})
    finished = None not in (low, high) and next_step(points, unlimited, looks=looks) is None
    finished = finished and not any(point.verdict == "invalid" for point in points)
    return SloSearch(
        label=label,
        slo=search.slo,
        repeat=repeat,
        burstiness=search.burstiness,
        confidence=search.confidence,
        resolution=search.resolution,
        low_rps=low,
        high_rps=high,
        best_rps=best,
        points=tuple(points),
        finished=finished,
        detail=_sentence(points, search, low, high, finished),
        error_shares=search.max_points,
    )


def _sentence(
    points: Sequence[SloPoint], search: SloSearchOptions, low: float | None, high: float | None, finished: bool
) -> str:
    by_rate = {point.rate_rps: point for point in points}
    parts = []
    for rate, words in ((low, "shown to meet it"), (high, "shown to miss it")):
        if rate is not None:
            point = by_rate[rate]
            why = f": {point.reason}" if point.reason else ""
            worth = "" if point.effective == point.judged else f", worth {point.effective} independent ones"
            parts.append(
                f"{rate:g} requests/s is {words} ({point.met} of {point.judged} within all bounds{worth}{why})"
            )
    sure = f"{search.confidence:.0%} confidence"
    if low is not None and high is not None:
        answer = f"between {low:g} and {high:g} requests/s ({sure})"
    elif low is not None:
        answer = f"at least {low:g} requests/s ({sure}); the upper end is unknown: no higher rate was shown to miss it"
    elif high is not None:
        answer = f"below {high:g} requests/s ({sure}); no rate was shown to meet it"
    else:
        answer = "not known: no rate was decided"
    parts += [
        f"{point.rate_rps:g} requests/s could not be judged ({point.reason})"
        for point in points
        if point.verdict == "invalid"
    ][:1]
    more = "" if finished else "; the search ended before its resolution"
    return answer + "".join(f"; {part}" for part in parts) + more
