"""Whether requests meet an SLO, how sure a share of them is, and the bracket of a search. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, overload

from pdlab.core.text import plain
from pdlab.core.workload import Slo
from pdlab.results.schema import RequestRecord, SloPoint, SloSearch

if TYPE_CHECKING:
    from pdlab.results.metrics import Column, Mask

PILED_UP = "requests piled up"


def bounds_text(slo: Slo) -> str:
    """``TTFT <= 2,000 ms and TPOT <= 50 ms for 95 % of requests``."""
    bounds_s = {"TTFT": slo.ttft_s, "TPOT": slo.tpot_s, "E2EL": slo.e2el_s}
    bounds = [f"{name} <= {plain(1000 * bound_s)} ms" for name, bound_s in bounds_s.items() if bound_s is not None]
    return f"{' and '.join(bounds)} for {100 * slo.quantile:g} % of requests"


def meets(record: RequestRecord, slo: Slo) -> bool:
    """Whether an answered request is within every bound (`within`)."""
    times_s = (math.nan if time_s is None else time_s for time_s in (record.ttft_s, record.tpot_s, record.e2el_s))
    return record.ok and within(slo, *times_s)


@overload
def within(slo: Slo, ttft_s: float, tpot_s: float, e2el_s: float) -> bool: ...
@overload
def within(slo: Slo, ttft_s: Column, tpot_s: Column, e2el_s: Column) -> Mask: ...
def within(slo: Slo, ttft_s: Any, tpot_s: Any, e2el_s: Any) -> Any:
    """Whether an answer is within every bound, of one or of columns of them. One output token has no TPOT (NaN) to
    miss; without another latency a bound on it is missed."""
    met = e2el_s == e2el_s  # not NaN: answered
    if slo.ttft_s is not None:
        met = met & (ttft_s <= slo.ttft_s)
    if slo.e2el_s is not None:
        met = met & (e2el_s <= slo.e2el_s)
    if slo.tpot_s is not None:
        met = met & ((tpot_s <= slo.tpot_s) | (tpot_s != tpot_s))
    return met


@lru_cache(maxsize=4096)
def share_bounds(met: int, judged: int, confidence: float) -> tuple[float, float]:
    """Clopper-Pearson bounds of a share: each holds by itself with ``confidence``; (0, 1) without requests.

    Lower: the share p at which ``met`` or more of ``judged`` has probability 1 - confidence; upper: at
    which ``met`` or fewer has.
    """
    if not judged:
        return 0.0, 1.0
    error = 1 - confidence
    low = 0.0 if not met else _solve(lambda p: 1 - _at_most(met - 1, judged, p), error, rising=True)
    high = 1.0 if met == judged else _solve(lambda p: _at_most(met, judged, p), error, rising=False)
    return low, high


def verdict_of(
    usable: bool, piled: bool, low: float, high: float, quantile: float
) -> Literal["meets", "misses", "undecided", "invalid"]:
    if not usable:
        return "invalid"
    if piled or high < quantile:
        return "misses"
    return "meets" if low >= quantile else "undecided"


def bracket_at(search: SloSearch, confidence: float) -> tuple[float | None, float | None]:
    """The ends of a finished search (`bracket`), its requests judged at another confidence."""
    again = []
    for point in search.points:
        low, high = share_bounds(point.met, point.judged, 1 - (1 - confidence) / 2)
        usable, piled = point.verdict != "invalid", point.reason == PILED_UP
        verdict = verdict_of(usable, piled, low, high, search.slo.quantile)
        again.append(point.model_copy(update={"low": low, "high": high, "verdict": verdict}))
    return bracket(again)


def bracket(found: Sequence[SloPoint]) -> tuple[float | None, float | None]:
    """(highest rate that meets, below the lowest that misses; lowest rate that misses); None where there is none."""
    high = min((point.rate_rps for point in found if point.verdict == "misses"), default=None)
    low = max((p.rate_rps for p in found if p.verdict == "meets" and (high is None or p.rate_rps < high)), default=None)
    return low, high


def _at_most(k: int, n: int, p: float) -> float:
    """P(X <= k) of a binomial(n, p), summed over the shorter tail."""
    if p <= 0:
        return 1.0
    if p >= 1:
        return 1.0 if k >= n else 0.0
    upper = 2 * k > n
    tail = range(k + 1, n + 1) if upper else range(k + 1)
    all_ways, odds = math.lgamma(n + 1) + n * math.log1p(-p), math.log(p) - math.log1p(-p)
    found = math.fsum(math.exp(all_ways - math.lgamma(i + 1) - math.lgamma(n - i + 1) + i * odds) for i in tail)
    return max(0.0, 1 - found) if upper else min(1.0, found)


def _solve(probability: Callable[[float], float], target: float, *, rising: bool) -> float:
    low, high = 0.0, 1.0
    for _ in range(48):
        middle = (low + high) / 2
        if (probability(middle) < target) == rising:
            low = middle
        else:
            high = middle
    return (low + high) / 2
