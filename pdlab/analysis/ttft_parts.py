"""Breakdown of the TTFT of a level, from the timelines of its requests: facts for the report.

The parts are those of `pdlab.results.timeline.PARTS`; the parts of a request sum to its TTFT. The parts of a percentile
are means over the requests whose TTFT is next to it, because those of a single request are random. Only whole timelines
count: without a mark, one part contains two. Times in seconds.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from pdlab.analysis.intervals import MIN_BEYOND, beyond
from pdlab.core.findings import Finding, found
from pdlab.core.workload import LoadKind
from pdlab.results.schema import Run
from pdlab.results.timeline import PARTS, RequestTimeline, TimePart

STATISTICS = ("p10", "p50", "p90", "p99")
NEIGHBOURS = 0.025  # share of the requests on either side of a percentile
SLOWEST = 20
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


def ttft_parts(label: str, runs: Iterable[tuple[Run, Sequence[RequestTimeline]]]) -> list[TtftParts]:
    """Of every load of one curve with timelines, over its valid repeats together.

    In a level with a steady window only requests that arrived within it count.
    """
    levels: dict[tuple[LoadKind, float], list[RequestTimeline]] = defaultdict(list)
    for run, timelines in runs:
        if run.validity.valid:
            levels[run.key.kind, run.key.value] += [each for each in timelines if _counts(run, each)]
    found_parts = [_of_level(label, kind, load, levels[kind, load]) for kind, load in sorted(levels)]
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


def _of_level(label: str, kind: LoadKind, load: float, timelines: Sequence[RequestTimeline]) -> TtftParts | None:
    whole = sorted((_slow(each) for each in timelines if each.whole), key=lambda each: each.ttft_s)
    if not whole or whole[-1].ttft_s <= 0:
        return None
    second = [dict(parts) for each in timelines if each.whole and (parts := each.parts_of_second())]
    return TtftParts(
        label=label,
        kind=kind,
        load=load,
        timed=len(whole),
        lacking=len(timelines) - len(whole),
        mean=_mean("mean", whole),
        around=tuple(
            _mean(statistic, _neighbours_of(statistic, whole))
            for statistic in STATISTICS
            if statistic == "p50" or beyond(statistic, len(whole)) >= MIN_BEYOND
        ),
        slowest=tuple(reversed(whole[-SLOWEST:])),
        until_second_s={name: fmean(each.get(name, 0.0) for each in second) for name in _names(second)},
    )


def _slow(timeline: RequestTimeline) -> SlowRequest:
    assert timeline.arrival_s is not None and timeline.ttft_s is not None
    return SlowRequest(timeline.id, timeline.path, timeline.arrival_s, timeline.ttft_s, timeline.parts())


def _neighbours_of(statistic: str, ordered: Sequence[SlowRequest]) -> Sequence[SlowRequest]:
    """Those next to a percentile, equally many on either side."""
    at = math.ceil(float(statistic[1:]) / 100 * len(ordered)) - 1
    aside = min(max(1, round(NEIGHBOURS * len(ordered))), at, len(ordered) - 1 - at)
    return ordered[at - aside : at + aside + 1]


def _mean(statistic: str, requests: Sequence[SlowRequest]) -> PartsAround:
    parts = [dict(each.parts) for each in requests]
    return PartsAround(
        statistic,
        len(requests),
        fmean(each.ttft_s for each in requests),
        {name: fmean(each.get(name, 0.0) for each in parts) for name in _names(parts)},
    )


def _names(parts: Sequence[Mapping[str, float]]) -> list[str]:
    return [name for name in PARTS if any(name in each for each in parts)]
