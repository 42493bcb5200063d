"""Highest request rate that meets an SLO: which rate to measure next, and what the points prove. Pure.

A rate *meets* the SLO when the share of its judged requests within every bound is shown to be at
least the quantile, and *misses* it when it is shown to be below: by the Clopper-Pearson bound of
that share (Clopper and Pearson, Biometrika 26, 1934), one-sided at half of the allowed error on
either side, so that the two ends of the answer together hold at the confidence. In between it is
*undecided*: more requests would tell. A rate at which requests pile up misses it whatever the share.

The search doubles or halves the rate until one meets and one misses, then divides the wider of the
gaps beside the undecided band (geometric middle) until both are within the resolution.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from pydantic import Field

from pdlab.core.schema import Frozen
from pdlab.core.workload import Slo
from pdlab.results.schema import RequestRecord, Run, SloPoint, SloSearch
from pdlab.results.slo import PILED_UP, bracket, meets, share_bounds, verdict_of

LEAST_RPS = 0.001
MOST_RPS = 100_000.0
STEADY_SHARE = 0.8  # of an open loop's requests are in its steady window (docs/metrics.md)
POWER = 2.0
# What these find is what the search asks about: that the server cannot keep up.
PERFORMANCE_GATES = {"failed_requests", "few_requests", "steady_state", "preemptions"}


class SearchLimits(Frozen):
    """Where a search begins and ends. ``resolution``: it ends when neighbouring rates are closer than 1 + that.

    ``start_rps`` None: from the closed-loop levels measured before, else 1. ``max_points``: rates, at most.
    """

    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    resolution: float = Field(default=0.1, gt=0, le=1)
    start_rps: float | None = Field(default=None, gt=0)
    max_points: int = Field(default=16, ge=2)


class Search(SearchLimits):
    """What is looked for.

    ``requests`` of one rate; None: enough that a true share half-way between the quantile and 1
    has a fair chance to be shown to meet it, see `requests_needed`.
    """

    slo: Slo
    burstiness: float = Field(default=1.0, gt=0)
    requests: int | None = Field(default=None, ge=1)

    @property
    def requests_needed(self) -> int:
        """Without a single miss ln(error) / ln(quantile) requests are needed to show that a rate meets the
        SLO; here twice as many, and the steady window holds 0.8 of them."""
        if self.requests is not None:
            return self.requests
        spotless = math.log((1 - self.confidence) / 2) / math.log(self.slo.quantile)
        return math.ceil(POWER * spotless / STEADY_SHARE)


class Sample(Frozen):
    """One level at one rate: of ``judged`` requests ``met`` the SLO. ``unsustained``: requests piled up.
    ``invalid``: why its figures cannot be used."""

    rate_rps: float
    repeat: int
    judged: int
    met: int
    unsustained: bool = False
    invalid: str | None = None


def sample(run: Run, judged: Sequence[RequestRecord], slo: Slo) -> Sample:
    """A finished open-loop level as the search takes it; ``judged`` are the requests of its steady window."""
    unusable = [g for g in run.validity.failed_gates if g not in PERFORMANCE_GATES]
    invalid = "; ".join(run.validity.reasons) if unusable else None
    return Sample(
        rate_rps=run.key.value,
        repeat=run.key.repeat,
        judged=len(judged),
        met=sum(meets(record, slo) for record in judged),
        unsustained="steady_state" in run.validity.failed_gates,
        invalid=invalid,
    )


def points(samples: Iterable[Sample], search: Search) -> tuple[SloPoint, ...]:
    """Samples of one rate pooled and judged, by rate."""
    by_rate: dict[float, list[Sample]] = {}
    for found in samples:
        by_rate.setdefault(found.rate_rps, []).append(found)
    one_sided = 1 - (1 - search.confidence) / 2
    judged_points = []
    for rate_rps, pooled in sorted(by_rate.items()):
        good = [found for found in pooled if found.invalid is None]
        judged, met = sum(found.judged for found in good), sum(found.met for found in good)
        low, high = share_bounds(met, judged, one_sided)
        piled = any(found.unsustained for found in good)
        verdict = verdict_of(bool(good), piled, low, high, search.slo.quantile)
        reason = pooled[0].invalid if not good else PILED_UP if piled else None
        judged_points.append(
            SloPoint(
                rate_rps=rate_rps,
                judged=judged,
                met=met,
                share=met / judged if judged else 0.0,
                low=low,
                high=high,
                verdict=verdict,
                repeats=tuple(sorted(found.repeat for found in good)),
                reason=reason,
            )
        )
    return tuple(judged_points)


def next_rate(found: Sequence[SloPoint], search: Search, guess_rps: float | None = None) -> float | None:
    """The rate to measure next; None when the search is over. ``guess_rps``: where to begin without points."""
    if not found:
        return rounded(search.start_rps or guess_rps or 1.0)
    if len(found) >= search.max_points or any(point.verdict == "invalid" for point in found):
        return None
    low, high = bracket(found)
    rates = [point.rate_rps for point in found]
    if high is None:
        return rounded(2 * max(rates)) if 2 * max(rates) <= MOST_RPS else None
    if low is None:
        return rounded(min(rates) / 2) if min(rates) / 2 >= LEAST_RPS else None
    between = [rate for rate in rates if low < rate < high]
    gaps = [(low, min([*between, high])), (max([*between, low]), high)]
    for a, b in sorted(set(gaps), key=lambda gap: gap[0] / gap[1]):
        middle = rounded(math.sqrt(a * b))
        if b / a > 1 + search.resolution and middle not in rates:
            return middle
    return None


def result(found: Sequence[SloPoint], search: Search, *, label: str, repeat: int) -> SloSearch:
    """What the points prove."""
    low, high = bracket(found)
    quantile = search.slo.quantile
    good = [p for p in found if p.judged and p.verdict != "misses" and p.share >= quantile]
    best = max((p.rate_rps for p in good if high is None or p.rate_rps < high), default=None)
    over = next_rate(found, search) is None
    invalid = [point for point in found if point.verdict == "invalid"]
    finished = over and not invalid and low is not None and high is not None and not _wide(found, search)
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
        points=tuple(found),
        finished=finished,
        detail=_sentence(found, search, low, high, invalid, finished),
    )


def rounded(rate_rps: float) -> float:
    """Three significant digits: a rate that names a file."""
    return float(f"{rate_rps:.3g}")


def _wide(found: Sequence[SloPoint], search: Search) -> bool:
    unlimited = search.model_copy(update={"max_points": len(found) + 1})
    return next_rate(found, unlimited) is not None


def _sentence(
    found: Sequence[SloPoint],
    search: Search,
    low: float | None,
    high: float | None,
    invalid: Sequence[SloPoint],
    finished: bool,
) -> str:
    if invalid:
        return f"not known: {invalid[0].rate_rps:g} requests/s could not be judged ({invalid[0].reason})"
    by_rate = {point.rate_rps: point for point in found}
    parts = []
    for rate, words in ((low, "shown to meet it"), (high, "shown to miss it")):
        if rate is not None:
            point = by_rate[rate]
            why = f": {point.reason}" if point.reason else ""
            parts.append(f"{rate:g} requests/s is {words} ({point.met} of {point.judged} within all bounds{why})")
    sure = f"{search.confidence:.0%} confidence"
    if low is not None and high is not None:
        answer = f"between {low:g} and {high:g} requests/s ({sure})"
    elif low is not None:
        answer = f"at least {low:g} requests/s ({sure}); no higher rate was shown to miss it"
    elif high is not None:
        answer = f"below {high:g} requests/s ({sure}); no rate was shown to meet it"
    else:
        answer = "not known: no rate was decided"
    more = "" if finished else "; the search ended before its resolution"
    return answer + "".join(f"; {part}" for part in parts) + more
