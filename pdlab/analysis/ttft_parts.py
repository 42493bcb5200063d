"""Breakdown of the TTFT of a level, from the timelines of its requests: facts for the report.

The parts are those of `pdlab.results.timeline.PARTS`; the parts of a request sum to its TTFT. The parts of a percentile
are means over the requests whose TTFT is next to it, because those of a single request are random. Only whole timelines
count: without a mark, one part contains two. Times in seconds.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from heapq import heappush, heappushpop
from itertools import chain
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from pdlab.analysis.intervals import MIN_BEYOND, beyond
from pdlab.core.findings import Finding, found
from pdlab.core.workload import LoadKind
from pdlab.results.columns import GrowingTable, sorted_order
from pdlab.results.schema import Run
from pdlab.results.timeline import PARTS, RequestTimeline, TimePart

if TYPE_CHECKING:
    from pdlab.results.level_data import Codes, Column

STATISTICS = ("p10", "p50", "p90", "p99")
NEIGHBOURS = 0.025  # share of the requests on either side of a percentile
SLOWEST = 20
TTFT = "ttft_s"  # its column, beside those of the parts
# The finding on a level, by the largest part of its mean TTFT.
LARGEST: Mapping[str, str] = {
    "front": "ttft_mostly_front",
    "server": "ttft_mostly_server",
    "failed_calls": "ttft_mostly_failed_calls",
    "call": "ttft_mostly_call",
    "prefill_server": "ttft_mostly_prefill_server",
    "queue": "ttft_mostly_queue",
    "prefill": "ttft_mostly_prefill",
    "submit": "ttft_mostly_submit",
    "admission": "ttft_mostly_admission",
    "post": "ttft_mostly_post",
    "transfer": "ttft_mostly_transfer",
    "step_lag": "ttft_mostly_step_lag",
    "guard": "ttft_mostly_guard",
    "lost_read": "ttft_mostly_lost_read",
    "wait": "ttft_mostly_wait",
    "recompute": "ttft_mostly_recompute",
    "first_step": "ttft_mostly_first_step",
    "out": "ttft_mostly_out",
}


class PartsAround(NamedTuple):
    """Means over ``requests`` requests around a percentile (``p50``): of the TTFT and of its parts."""

    statistic: str
    requests: int
    ttft_s: float
    parts_s: dict[str, float]


class SlowRequest(NamedTuple):
    """A request and its parts in the order of time. ``arrival_s``: since the level began."""

    id: str
    path: str
    arrival_s: float
    ttft_s: float
    parts: tuple[TimePart, ...]


class TtftParts(NamedTuple):
    """One load of one curve.

    ``mean``: over all ``timed`` requests, which have a whole timeline. ``around``: over those next to each percentile
    that enough requests support. ``lacking``: requests with an incomplete timeline. ``slowest``: slowest first.
    """

    label: str
    kind: LoadKind
    load: float
    timed: int
    lacking: int
    mean: PartsAround
    around: tuple[PartsAround, ...]
    slowest: tuple[SlowRequest, ...]
    until_second_s: dict[str, float]

    @property
    def where(self) -> str:
        """The load in words."""
        return f"{self.load:g} requests/s" if self.kind == "rate" else f"{self.kind} {self.load:g}"

    @property
    def largest(self) -> str:
        """The part with most of the mean TTFT."""
        return max(self.mean.parts_s, key=lambda name: self.mean.parts_s[name])

    @property
    def finding(self) -> Finding:
        """The largest part, and what changes it."""
        seconds = self.mean.parts_s[self.largest]
        return found(
            LARGEST[self.largest],
            label=self.label,
            where=self.where,
            part_ms=1e3 * seconds,
            ttft_ms=1e3 * self.mean.ttft_s,
            percent=100 * seconds / self.mean.ttft_s,
        )


def ttft_parts(label: str, runs: Iterable[tuple[Run, Iterable[RequestTimeline]]]) -> list[TtftParts]:
    """Of every load of one curve with timelines, over its valid repeats together. The timelines are read once, load by
    load.

    In a level with a steady window only requests that arrived within it count.
    """
    levels: dict[tuple[LoadKind, float], list[Iterable[RequestTimeline]]] = defaultdict(list)
    for run, timelines in runs:
        if run.validity.valid:
            levels[run.key.kind, run.key.value].append(filter(partial(_counts, run), timelines))
    found_parts = [_of_level(label, kind, load, chain(*levels[kind, load])) for kind, load in sorted(levels)]
    return [each for each in found_parts if each is not None]


def shown_parts(levels: Sequence[TtftParts]) -> list[str]:
    """Names of the parts that are at least 1 % of some TTFT, in the order of time."""
    every = [around for level in levels for around in (level.mean, *level.around)]
    return [name for name in PARTS if any(around.parts_s.get(name, 0.0) >= 0.01 * around.ttft_s for around in every)]


def _counts(run: Run, timeline: RequestTimeline) -> bool:
    if timeline.arrival_s is None or timeline.ttft_s is None:
        return False
    window = run.steady_window_s
    return window is None or window[0] <= timeline.arrival_s <= window[1]


def _of_level(label: str, kind: LoadKind, load: float, timelines: Iterable[RequestTimeline]) -> TtftParts | None:
    whole, second, lacking = _Timed(), _Timed(), 0
    slowest: list[tuple[float, int, RequestTimeline]] = []
    for number, each in enumerate(timelines):
        assert each.ttft_s is not None
        if not each.whole:
            lacking += 1
            continue
        whole.add(each.ttft_s, each.parts())
        if of_second := each.parts_of_second():
            second.add(math.nan, of_second)
        if len(slowest) < SLOWEST:
            heappush(slowest, (each.ttft_s, number, each))
        else:
            heappushpop(slowest, (each.ttft_s, number, each))
    if not slowest or max(slowest)[0] <= 0:
        return None
    of_whole = whole.columns()
    order = sorted_order(of_whole[TTFT])
    return TtftParts(
        label=label,
        kind=kind,
        load=load,
        timed=len(order),
        lacking=lacking,
        mean=_mean("mean", of_whole, order),
        around=tuple(
            _mean(statistic, of_whole, _neighbours_of(statistic, order))
            for statistic in STATISTICS
            if statistic == "p50" or beyond(statistic, len(order)) >= MIN_BEYOND
        ),
        slowest=tuple(_slow(each) for _, _, each in sorted(slowest, reverse=True)),
        until_second_s=_means(second.columns(), slice(None)),
    )


class _Timed:
    """TTFT and parts of requests, in columns; NaN: a request has no such part."""

    def __init__(self) -> None:
        self._table = GrowingTable(dict.fromkeys((TTFT, *PARTS), "d"))

    def add(self, ttft_s: float, parts: Iterable[TimePart]) -> None:
        own = dict(parts)
        self._table.add((ttft_s, *(own.get(name, math.nan) for name in PARTS)))

    def columns(self) -> Mapping[str, Column]:
        return self._table.columns()


def _slow(timeline: RequestTimeline) -> SlowRequest:
    assert timeline.arrival_s is not None and timeline.ttft_s is not None
    return SlowRequest(timeline.id, timeline.path, timeline.arrival_s, timeline.ttft_s, timeline.parts())


def _neighbours_of(statistic: str, order: Codes) -> Codes:
    """Those next to a percentile, equally many on either side."""
    at = math.ceil(float(statistic[1:]) / 100 * len(order)) - 1
    aside = min(max(1, round(NEIGHBOURS * len(order))), at, len(order) - 1 - at)
    return order[at - aside : at + aside + 1]


def _mean(statistic: str, columns: Mapping[str, Column], selected: Codes) -> PartsAround:
    return PartsAround(statistic, len(selected), fmean(columns[TTFT][selected]), _means(columns, selected))


def _means(columns: Mapping[str, Column], selected: Codes | slice) -> dict[str, float]:
    """Of every part that one of the requests has; those without it count as 0."""
    import numpy as np

    parts = {name: columns[name][selected] for name in PARTS}
    return {name: fmean(np.nan_to_num(own)) for name, own in parts.items() if not np.isnan(own).all()}
