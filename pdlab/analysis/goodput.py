"""The most that a configuration serves within an SLO, the best configuration, and its lead.

Goodput is DistServe's (Zhong et al., OSDI 2024): the highest rate at which the share of requests within every bound is
at least the SLO's quantile. If the requests were kept, the share is counted request by request. If only percentiles are
known, each bound is compared with its own percentile. That is a necessary condition, not the same one, because each
request may miss another bound. If that SLO was searched for (`pdlab.bench.slo_search`), the search's bracket is the
answer, at its confidence.

Only a search answers a bound on the gaps between chunks (ITL p99, the longest stall): gaps are not loaded here.

Between two neighbouring valid levels share and throughput are straight lines; nothing is extended beyond the measured
levels.

Goodput is of open loops: levels at request rates, and searches. The most that a closed loop or a replay serves within
the SLO is its capacity, another figure. No two of them are in one ranking. A ramp is in none (`COMPARED_LOADS`): the
figures of its levels are only shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from statistics import fmean
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdlab.analysis.bootstrap import DrawnLine, LevelFigure, line
from pdlab.analysis.comparable import COMPARED_LOADS, groups
from pdlab.analysis.curves import Curve, Figures, Point, rankable
from pdlab.analysis.intervals import Between, Estimate, blocks, of_blocks, of_repeats, of_requests, share_error
from pdlab.analysis.power import of_slo, single_repeat_sd
from pdlab.analysis.ranking import LabelledEstimate, Limited, OpenEnd, Ranked, may_reach, open_end, rank, with_starts
from pdlab.analysis.requests import Requests
from pdlab.analysis.shrinkage import moderate_all
from pdlab.analysis.view import View
from pdlab.core.bounds import Metric
from pdlab.core.schema import Frozen
from pdlab.core.workload import LoadKind, Slo
from pdlab.results.schema import SloSearch
from pdlab.results.slo import Bracket, bracket_at, within

How = Literal["requests", "percentiles", "search"]
Loop = Literal["open", "closed", "replay"]
WhyUnknown = Literal["gaps", "search", "levels", "figures"]
"""Why a capacity is unknown: bounds on gaps without a search, a search that decided no rate, no valid level, or a level
without both its requests and the SLO's percentile."""
# The kinds of load of each. Those that are compared are ranked; a ramp is shown beside request rates.
KINDS_OF: dict[Loop, tuple[LoadKind, ...]] = {
    "open": ("rate", "ramp"),
    "closed": ("concurrency",),
    "replay": ("replay",),
}

# In the order of `Slo.stress`.
METRICS_OF_A_REQUEST: tuple[Metric, ...] = ("ttft", "tpot", "e2el")


class Capacity(Frozen):
    """``throughput`` in tokens/s in the view's unit; ``requests_per_gpu_s``: good requests per GPU.

    ``how``: share counted over requests, each bound against its percentile, or searched for. ``end``: the highest valid
    load still meets the SLO, so there may be more. ``searches``: one for each repeat that searched; the figures are
    then at the mean of their best rates. ``throughput_of_one``: throughput in the view's unit per request/s of the
    whole deployment. ``start_sd``: relative standard deviation between starts that a single search is taken to have.
    """

    label: str
    throughput: Estimate
    requests_per_gpu_s: Estimate
    how: How
    end: OpenEnd | None = None
    searches: tuple[SloSearch, ...] = ()
    throughput_of_one: float = 0.0
    start_sd: float = 0.0

    @property
    def bracket_rps(self) -> Bracket:
        """The result of the searches, in requests/s of the whole deployment: the lowest end that meets the SLO and the
        highest that misses it. None if one of the searches has no such end."""
        lows = [each.low_rps for each in self.searches if each.low_rps is not None]
        highs = [each.high_rps for each in self.searches if each.high_rps is not None]
        count = len(self.searches)
        return Bracket(min(lows) if len(lows) == count else None, max(highs) if len(highs) == count else None)

    @property
    def bracket_confidence(self) -> float:
        """Of each search; the lowest if they differ."""
        return min(each.confidence for each in self.searches)

    def between(self, level: float) -> Between:
        """The throughput by the ends of its searches, with the scatter between starts: that of the searches' ends, or
        an assumed one for a single search. The requests of a search are judged anew at that level."""
        if not self.searches:
            return Between.of(self.throughput)
        brackets = [bracket_at(search, level) for search in self.searches]
        ends = [_over_starts([each[i] for each in brackets], self.start_sd) for i in range(2)]
        # The steps of a search may hide the scatter of one end.
        error = max((end.relative_error or 0.0 for end in ends if end is not None), default=0.0)
        one = self.throughput_of_one
        low, high = (end and end._replace(standard_error=error * end.value).scaled(one) for end in ends)
        return Between(self.throughput.value, low, high)


def _over_starts(rates_rps: Sequence[float | None], start_sd: float) -> Estimate | None:
    """One end of the searches, each of another start; None if a search lacks it."""
    known = [rate for rate in rates_rps if rate is not None]
    if len(known) < len(rates_rps):
        return None
    return with_starts(of_repeats(known), start_sd)


class UnknownCapacity(NamedTuple):
    """A configuration whose capacity within an SLO is unknown, and why."""

    label: str
    why: WhyUnknown


class SloRanking(Frozen):
    """Capacities of one kind of loop by throughput, highest first; the first is compared with each other one.

    ``missed``: meet the SLO at no measured level. ``unsure``: the same, but the SLO is within the noise of one of their
    levels, whose throughput is not clearly below the best. ``unknown``: nothing answers the SLO for them.
    ``elsewhere``: were measured only in the other kind of loop. ``group``: distinguishes these experiments from others
    that they may not be compared with.
    """

    slo: Slo
    loop: Loop
    group: str | None = None
    capacities: tuple[Capacity, ...]
    ranking: tuple[Ranked, ...]
    missed: tuple[str, ...] = ()
    unsure: tuple[str, ...] = ()
    unknown: tuple[UnknownCapacity, ...] = ()
    elsewhere: tuple[str, ...] = ()

    @property
    def best(self) -> str | None:
        """The configuration that is best beyond the noise; None without one."""
        if not self.ranking or self.unsure or any(ranked.tied for ranked in self.ranking[1:]):
            return None
        return self.ranking[0].label


@lru_cache(maxsize=1 << 16)
def met_share(requests: Requests, slo: Slo) -> float:
    """Share of the requests of one run within every bound.

    A failed request is within none; one of a single output token has no TPOT to miss.
    """
    count = len(requests) + requests.failed
    return int(_met(requests, slo).sum()) / count if count else 0.0


def met_estimate(requests: Requests, slo: Slo) -> Estimate:
    """`met_share` with the scatter within that run."""
    met = _met(requests, slo)
    count = len(met) + requests.failed
    cut = blocks(len(met), requests.together)
    estimate = of_blocks(met.astype(np.float64), cut, met_share(requests, slo))
    if cut is None or estimate.standard_error is None:
        return estimate
    return estimate._replace(standard_error=max(estimate.standard_error, share_error(int(met.sum()), count)))


def _met(requests: Requests, slo: Slo) -> NDArray[np.bool_]:
    return within(slo, requests.ttft_s, requests.tpot_s, requests.e2el_s)


def _requests_of(point: Point, slo: Slo) -> list[Requests]:
    """Of every repeat; none if one was not loaded, or for bounds on gaps."""
    requests = [sample.requests for sample in point.samples if sample.requests is not None]
    return [] if len(requests) < point.repeats or slo.of_gaps else requests


def share_at(point: Point, slo: Slo) -> Estimate | None:
    """Share of a level's requests within the SLO, mean over repeats; None if requests are unknown."""
    requests = _requests_of(point, slo)
    if not requests:
        return None
    return (
        of_repeats([met_share(each, slo) for each in requests]) if len(requests) > 1 else met_estimate(requests[0], slo)
    )


def goodput_at(point: Point, slo: Slo) -> Estimate | None:
    """Requests/s within the SLO at one level, whole deployment; None if requests are unknown."""
    requests = _requests_of(point, slo)
    if not requests:
        return None
    if len(requests) > 1:
        served = zip(requests, point.samples, strict=True)
        return of_repeats([met_share(each, slo) * sample.requests_per_s for each, sample in served])
    share, rate = met_estimate(requests[0], slo), point.rate_estimate("requests")
    value = share.value * rate.value
    if share.standard_error is None or rate.standard_error is None:
        return Estimate(value=value)
    error = math.hypot(share.standard_error * rate.value, share.value * rate.standard_error)
    return share._replace(value=value, standard_error=error)


def capacity(curve: Curve, slo: Slo, view: View, loop: Loop) -> Capacity | Literal["missed", "elsewhere"] | WhyUnknown:
    """The most that the curve serves within the SLO in that kind of loop; by a search if there was one. Else why it has
    none."""
    searches = tuple(search for search in curve.searches if search.slo == slo)
    if searches and curve.points and loop == "open":
        return _searched(curve, searches, view)
    points = [point for point in curve.points if _ranked(point, loop)]
    if not points:
        return "elsewhere" if curve.points else "levels"
    valid = [point for point in points if point.valid]
    how = _how(valid, slo)
    if how is None:
        return "gaps" if slo.of_gaps else "figures" if valid else "levels"
    metric = view.throughput_metric
    tokens = _line(curve, valid, slo, how, lambda s: s.tokens_per_s(metric), curve.scale(view))
    requests = _line(curve, valid, slo, how, lambda s: s.requests_per_s, 1 / curve.gpus.counted(view.count))
    bound = np.array([1 - slo.quantile if how == "requests" else 1.0])
    most, rate = tokens.estimates(tokens.reach(bound))[0], requests.estimates(requests.reach(bound))[0]
    if most is None or rate is None:
        return "missed"
    end = open_end(curve, points, valid, view) if tokens.open_ended(bound) else None
    return Capacity(label=curve.label, throughput=most, requests_per_gpu_s=rate, how=how, end=end)


def _ranked(point: Point, loop: Loop) -> bool:
    """Whether a ranking of that kind of loop is over such levels."""
    return point.kind in KINDS_OF[loop] and point.kind in COMPARED_LOADS


def _searched(curve: Curve, searches: tuple[SloSearch, ...], view: View) -> Capacity | Literal["missed", "search"]:
    """The answer of finished and unfinished searches. The measured requests convert a rate into tokens."""
    best = [search.best_rps for search in searches if search.best_rps is not None]
    if not best:
        return "missed" if any(search.high_rps is not None for search in searches) else "search"
    served = [point for point in curve.points if point.requests_per_s > 0]
    each = fmean(point.tokens_per_s(view.throughput_metric) / point.requests_per_s for point in served)
    one, rate = each * curve.scale(view), fmean(best)
    return Capacity(
        label=curve.label,
        throughput=Estimate(value=rate * one),
        requests_per_gpu_s=Estimate(value=rate / curve.gpus.counted(view.count)),
        how="search",
        end=OpenEnd(beyond="search") if any(search.high_rps is None for search in searches) else None,
        searches=searches,
        throughput_of_one=one,
        start_sd=single_repeat_sd(curve.gpus.device, "throughput", *of_slo(searches[0].slo)),
    )


def slo_rankings(curves: Sequence[Curve], slo: Slo, view: View) -> list[SloRanking]:
    """`slo_ranking` for each comparable group, of each kind of loop that was measured."""
    return [
        slo_ranking(group.curves, slo, view, loop, group.name)
        for group in groups(curves, view)
        for loop in _loops(group.curves, slo)
    ]


def _loops(curves: Sequence[Curve], slo: Slo) -> list[Loop]:
    kinds = {point.kind for curve in curves for point in curve.points}
    searched = any(curve.points and search.slo == slo for curve in curves for search in curve.searches)
    measured: list[Loop] = [loop for loop, its in KINDS_OF.items() if kinds & set(its) or (searched and loop == "open")]
    return measured or ["open"]


def slo_ranking(curves: Sequence[Curve], slo: Slo, view: View, loop: Loop, group: str | None = None) -> SloRanking:
    """The capacity of every configuration of one group within the SLO in that kind of loop, ranked."""
    answers = [(curve.label, capacity(curve, slo, view, loop)) for curve in rankable(curves)]
    met = [answer for _, answer in answers if isinstance(answer, Capacity)]
    throughput = moderate_all([each.throughput for each in met])
    per_gpu = moderate_all([each.requests_per_gpu_s for each in met])
    moderated = [
        each.model_copy(update={"throughput": tokens, "requests_per_gpu_s": requests})
        for each, tokens, requests in zip(met, throughput, per_gpu, strict=True)
    ]
    capacities = sorted(moderated, key=lambda each: -each.throughput.value)
    ranking = rank(
        [LabelledEstimate(each.label, each.throughput) for each in capacities],
        view.confidence,
        {each.label: each.between for each in capacities if each.searches},
        {each.label: each.end for each in capacities if each.end is not None},
    )
    missed = tuple(label for label, answer in answers if answer == "missed")
    best = capacities[0].between(view.confidence) if capacities else None
    unsure = tuple(
        curve.label
        for curve in rankable(curves)
        if best is not None and curve.label in missed and _may_meet(curve, slo, view, loop, best)
    )
    return SloRanking(
        slo=slo,
        loop=loop,
        group=group,
        capacities=tuple(capacities),
        ranking=ranking,
        missed=tuple(label for label in missed if label not in unsure),
        unsure=unsure,
        unknown=tuple(
            UnknownCapacity(label, answer)
            for label, answer in answers
            if not isinstance(answer, Capacity) and answer != "missed" and answer != "elsewhere"
        ),
        elsewhere=tuple(label for label, answer in answers if answer == "elsewhere"),
    )


def _may_meet(curve: Curve, slo: Slo, view: View, loop: Loop, best: Between) -> bool:
    """`may_reach` of the SLO. A search that found no rate has judged its levels within one start only."""
    points = [point for point in curve.points if point.valid and _ranked(point, loop)]
    how = _how(points, slo)
    return how is not None and may_reach(curve, points, lambda point: _limits(point, slo, how), view, best)


def _limits(point: Point, slo: Slo, how: How) -> list[Limited]:
    """What the SLO limits at a level."""
    if how == "percentiles":
        statistic = f"p{100 * slo.quantile:g}"
        return [
            Limited(point.ms_estimate(metric, statistic), 1000 * bound_s, (metric,))
            for metric, bound_s in _bounds_s(slo).items()
        ]
    if point.repeats < 2:
        return [Limited(_stress(point, slo), 1.0, of_slo(slo))]
    share = share_at(point, slo)
    return [Limited(share and share._replace(value=1 - share.value), 1 - slo.quantile, of_slo(slo))]


def _stress(point: Point, slo: Slo) -> Estimate | None:
    """The SLO's quantile, over the requests of one run, of the worst latency over its bound; at most 1 if the SLO is
    met. None if that many were not answered.

    Another start scales it as it scales the latencies, which it does not do with the share of requests.
    """
    (requests,) = _requests_of(point, slo)
    worst = slo.stress(requests.ttft_s, np.nan_to_num(requests.tpot_s), requests.e2el_s)
    known = worst[~np.isnan(worst)]
    sent = len(worst) + requests.failed
    if slo.quantile * sent > len(known) or not sent:
        return None
    percent = 100 * slo.quantile * sent / len(known)
    name = f"p{percent:g}"
    estimate = of_requests(known, [percent], requests.together)[name]
    return estimate if point.supports_interval(name) else Estimate(value=estimate.value)


def _misses_at(requests: Requests, slo: Slo, factors: NDArray[np.float64]) -> NDArray[np.float64]:
    """(draws,): share of the requests of one run that would miss the SLO with latencies times each factor."""
    worst = slo.stress(requests.ttft_s, np.nan_to_num(requests.tpot_s), requests.e2el_s)
    sent = len(worst) + requests.failed
    with np.errstate(divide="ignore"):
        met = np.searchsorted(np.sort(worst[~np.isnan(worst)]), 1 / factors, side="right")
    return 1 - met / max(sent, 1)


def _how(points: Sequence[Point], slo: Slo) -> How | None:
    """How the SLO can be judged at every one of these levels; None if it cannot."""
    if not points or slo.of_gaps:
        return None
    if all(sample.requests is not None for point in points for sample in point.samples):
        return "requests"
    # A point lacks the tails for which its repeats are too short.
    known = all(_worst(figures, slo) is not None for point in points for figures in (point, *point.samples))
    return "percentiles" if known else None


def _worst(figures: Figures, slo: Slo) -> float | None:
    """The largest ratio of a latency percentile to its bound; at most 1 if each bound is met. None: unknown."""
    statistic = f"p{100 * slo.quantile:g}"
    bounded = _bounds_s(slo)
    times_s: list[float] = []
    for metric in METRICS_OF_A_REQUEST:
        value_ms = figures.ms(metric, statistic) if metric in bounded else 0.0
        if value_ms is None:
            return None
        times_s.append(value_ms / 1000)
    return float(slo.stress(*np.array([times_s]).T)[0])


def _bounds_s(slo: Slo) -> dict[Metric, float]:
    """Latency of a whole request -> its bound in s, of those that the SLO bounds."""
    bounds_s = zip(METRICS_OF_A_REQUEST, (slo.ttft_s, slo.tpot_s, slo.e2el_s), strict=True)
    return {metric: bound_s for metric, bound_s in bounds_s if bound_s is not None}


def _line(
    curve: Curve, points: Sequence[Point], slo: Slo, how: How, rate: Callable[[Figures], float], factor: float
) -> DrawnLine:
    """Throughput (y) against the share that misses the SLO, or the worst ratio to a bound (x)."""

    def misses(point: Point) -> Estimate | None:
        if how == "percentiles":
            worst = _worst(point, slo)
            return None if worst is None else Estimate(value=worst)
        share = share_at(point, slo)
        return None if share is None else share._replace(value=1 - share.value)

    def each_misses(point: Point) -> list[float]:
        if how == "percentiles":
            return [_worst(sample, slo) or 0.0 for sample in point.samples]
        return [1 - met_share(s.requests, slo) for s in point.samples if s.requests is not None]

    def misses_at(point: Point, factors: NDArray[np.float64]) -> NDArray[np.float64]:
        shares = [_misses_at(sample.requests, slo, factors) for sample in point.samples if sample.requests is not None]
        mean: NDArray[np.float64] = np.mean(shares, axis=0)
        return mean

    def rates(point: Point) -> Estimate:
        within = point.rate_estimate("requests").relative_error if point.repeats == 1 else None
        value = rate(point)
        error = None if within is None else within * value
        return Estimate(value=value, standard_error=error, dof=1.0 if error is not None else None)

    drawn = line(
        curve,
        points,
        [LevelFigure(misses, each_misses, of_slo(slo), misses_at if how == "requests" else None)],
        LevelFigure(rates, lambda p: [rate(s) for s in p.samples], ("throughput",)),
        y_factor=factor,
    )
    assert drawn is not None, "a curve without points has no line"
    return drawn
