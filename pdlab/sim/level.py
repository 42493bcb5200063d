"""One simulated level: its requests, its figures, and its `Run`."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable, MutableSequence, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from pdlab.core.workload import Closed, Level, Open, Ramp, Workload
from pdlab.results.roles_log import RoleChange
from pdlab.traffic.groups import Groups
from pdlab.traffic.requests import TrafficRequest

if TYPE_CHECKING:  # of runs, which simulations by themselves do not make
    from pdlab.results.level_data import LevelData
    from pdlab.results.schema import Distribution, RequestRecord, Run, Summary

FRACTIONS = (
    "arrival_s",
    "queued_s",
    "prefill_start_s",
    "prefill_end_s",
    "kv_arrived_s",
    "first_token_s",
    "finish_s",
    "computed_tokens",
)
MOMENTS = 200  # of a level at which what its requests hold is counted
PER_REQUEST = ("input_tokens", "output_tokens", *FRACTIONS)


@dataclass(slots=True)
class SimulatedLevel:
    """The requests of one level, in order of the prompts. Times are in seconds since the beginning of the level."""

    level: Level
    input_tokens: list[int]
    output_tokens: list[int]
    arrival_s: MutableSequence[float]
    queued_s: MutableSequence[float]
    prefill_start_s: MutableSequence[float]
    prefill_end_s: MutableSequence[float]
    kv_arrived_s: MutableSequence[float]
    first_token_s: MutableSequence[float]
    finish_s: MutableSequence[float]
    computed_tokens: MutableSequence[float]
    gap_s: array[float]  # of every step with decoding sequences: its seconds, and the tokens that it generated
    gap_tokens: array[int]
    transferred_bytes: float
    duration_s: float
    busy: dict[str, float]  # role -> share of the duration in which its engines were busy, as a mean over them
    link_busy: float  # share of the duration in which the busiest link was in use
    kv_full: float  # share of engine time in which a prompt waited for KV memory
    preemptions: int
    beyond_tables: float  # the largest step, as a multiple of the limits of tabulated step times; up to 1: inside
    splits: list[RoleChange]  # of a fluid pool: the first split, and every later one

    def packed(self) -> SimulatedLevel:
        """The same level in less memory: a plan keeps hundreds of them."""
        columns: dict[str, Any] = {name: array("d", getattr(self, name)) for name in FRACTIONS}
        return replace(self, **columns)

    def by_arrival(self) -> SimulatedLevel:
        """The same level with its requests in order of arrival."""
        order = sorted(range(len(self.arrival_s)), key=lambda number: self.arrival_s[number])
        columns: dict[str, Any] = {name: [getattr(self, name)[number] for number in order] for name in PER_REQUEST}
        return replace(self, **columns)

    def share_above(self, tokens: float) -> float:
        """Share of the duration in which all requests together hold more tokens of KV than that, from the start of
        their prefill to their end. Of requests that are prefilled and decoded by the same engines."""
        import numpy as np

        start_s, first_s, end_s = (
            np.asarray(each, dtype=np.float64) for each in (self.prefill_start_s, self.first_token_s, self.finish_s)
        )
        prompts, answers = (np.asarray(each, dtype=np.float64) for each in (self.input_tokens, self.output_tokens))
        load = self.level.load
        if isinstance(load, Closed) and np.sort(prompts + answers)[-load.concurrency :].sum() <= tokens:
            return 0.0
        rates = answers / np.maximum(end_s - first_s, 1e-9)
        above = 0
        for now_s in np.linspace(0.0, self.duration_s, MOMENTS + 1)[1:]:
            there = (start_s <= now_s) & (now_s < end_s)
            held = prompts[there] + rates[there] * np.maximum(now_s - first_s[there], 0.0)
            above += bool(held.sum() > tokens)
        return above / MOMENTS

    @property
    def hit_share(self) -> float:
        """Share of all prompt tokens that no engine computed, because a cache had them."""
        return max(1 - sum(self.computed_tokens) / sum(self.input_tokens), 0.0)


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order: arrival in seconds, prompt and output tokens.

    ``requests``: the compiled requests, if prompts share text or requests wait for others (empty: neither). A waiting
    request arrives at its ``arrival_s``, or after the requests that it waits for if that is later. These come before
    it.
    """

    arrival_s: tuple[float, ...]
    input_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]
    requests: tuple[TrafficRequest, ...] = ()

    @classmethod
    def of(cls, requests: Sequence[TrafficRequest]) -> Trace:
        """The trace of a compiled workload; the first request arrives at 0. Requests that share nothing and wait for
        nothing are in order of arrival.
        """
        keys = [key for request in requests for key, _ in request.blocks]
        independent = len({*keys}) == len(keys) and not any(request.after for request in requests)
        if independent:
            requests = in_order(requests)
        begin_s = min((request.at_s for request in requests if request.at_s is not None), default=0.0)
        requests = [
            request if request.at_s is None or not begin_s else replace(request, at_s=request.at_s - begin_s)
            for request in requests
        ]
        ends: dict[str, int] = {}
        inputs = []
        for request in requests:
            inputs.append((ends[request.continues] if request.continues else 0) + request.new_tokens)
            ends[request.id] = inputs[-1] + request.out
        return cls(
            tuple(request.at_s or 0.0 for request in requests),
            tuple(inputs),
            tuple(request.out for request in requests),
            () if independent else tuple(requests),
        )

    @property
    def rate_rps(self) -> float:
        """Mean rate of arrivals, which begin at 0 and are not all at once. For waiting requests it is the offered rate,
        as if answers took no time.
        """
        return (len(self.arrival_s) - 1) / self.last_s

    @property
    def last_s(self) -> float:
        """Arrival of the last request, as if answers took no time."""
        if not self.requests:
            return self.arrival_s[-1]
        moments_s: dict[str, float] = {}
        for request in self.requests:
            waits = [moments_s[each] for each in request.after]
            moments_s[request.id] = max([request.at_s or 0.0, *(each + request.gap_s for each in waits)])
        return max(moments_s.values())

    @property
    def longest(self) -> tuple[int, int]:
        """Input and output tokens of the request that needs most KV cache."""
        return max(zip(self.input_tokens, self.output_tokens, strict=True), key=sum)

    def at_rate(self, rate_rps: float) -> Trace:
        """The same requests at another mean rate: all arrivals move closer together, or farther apart; pauses after
        answers stay.
        """
        factor = self.rate_rps / rate_rps
        moments_s = tuple(factor * each for each in self.arrival_s)
        requests = tuple(
            each if each.at_s is None else replace(each, at_s=factor * each.at_s) for each in self.requests
        )
        return replace(self, arrival_s=moments_s, requests=requests)

    def part(self, of: int) -> Trace:
        """The part of the trace for one of ``of`` equal copies: every ``of``-th request, or every ``of``-th session."""
        if of == 1:
            return self
        if self.requests:
            return Trace.of(_every(self.requests, of))
        return Trace(self.arrival_s[::of], self.input_tokens[::of], self.output_tokens[::of])


def in_order(requests: Iterable[TrafficRequest]) -> list[TrafficRequest]:
    """Requests that share nothing and wait for nothing, in the order of a `Trace`."""
    return sorted(requests, key=lambda request: request.at_s or 0.0)


def _every(requests: Sequence[TrafficRequest], of: int) -> list[TrafficRequest]:
    """The requests of every ``of``-th session, in order of their first requests. Sessions that wait for each other are
    one."""
    groups = Groups()
    sessions = [groups.add(request) for request in requests]
    ranks = groups.ranks()
    return [request for request, number in zip(requests, sessions, strict=True) if ranks[number] % of == 0]


def trace_of(workload: Workload, level: Level) -> Trace | None:
    """The requests of a workload whose mix changes with time; None: the workload is of another kind. Raises
    UsageError.
    """
    arrivals = workload.arrivals(level)
    return None if arrivals is None else Trace(*zip(*arrivals, strict=True))


def empty_level(level: Level, workload: Workload, trace: Trace | None) -> SimulatedLevel:
    """The level before its first event."""
    drawn = () if trace else workload.draw(level)
    count = len(trace.arrival_s) if trace else level.num_requests
    zeros = [0.0] * count
    return SimulatedLevel(
        level=level,
        input_tokens=list(trace.input_tokens) if trace else [tokens for tokens, _ in drawn],
        output_tokens=list(trace.output_tokens) if trace else [tokens for _, tokens in drawn],
        arrival_s=zeros[:],
        queued_s=zeros[:],
        prefill_start_s=zeros[:],
        prefill_end_s=zeros[:],
        kv_arrived_s=zeros[:],
        first_token_s=zeros[:],
        finish_s=zeros[:],
        computed_tokens=zeros[:],
        gap_s=array("d"),
        gap_tokens=array("q"),
        transferred_bytes=0.0,
        duration_s=0.0,
        busy={},
        link_busy=0.0,
        kv_full=0.0,
        preemptions=0,
        beyond_tables=0.0,
        splits=[],
    )


def open_arrivals(load: Open | Ramp, count: int, rng: random.Random) -> list[float]:
    """Arrival times of an open loop: gamma-distributed gaps of mean 1 / rate; burstiness is their shape."""
    shape, drawn = load.burstiness, rng.gammavariate
    if isinstance(load, Open):
        scales_s: Iterable[float] = repeat(1 / (load.rate_rps * shape), count)
    else:
        scales_s = (1 / (_ramped(load, number / count) * shape) for number in range(count))
    now_s, moments = 0.0, []
    for scale_s in scales_s:
        moments.append(now_s)
        now_s += drawn(shape, scale_s)
    return moments


def _ramped(load: Ramp, share: float) -> float:
    """The rate after that share of the requests was sent."""
    if load.shape == "linear":
        return load.start_rps + (load.end_rps - load.start_rps) * share
    return float(load.start_rps * (load.end_rps / load.start_rps) ** share)


class LevelMeans(NamedTuple):
    """Means over a whole level; ``tpot_s`` None: no request has a second token."""

    tpot_s: float | None
    ttft_s: float
    requests_per_s: float


def figures(level: SimulatedLevel) -> LevelMeans:
    """Means over the whole level, as the published files define them."""
    count = len(level.arrival_s)
    ttft_s = (sum(level.first_token_s) - sum(level.arrival_s)) / count
    gaps = [
        (finish - first) / (tokens - 1)
        for finish, first, tokens in zip(level.finish_s, level.first_token_s, level.output_tokens, strict=True)
        if tokens > 1
    ]
    return LevelMeans(sum(gaps) / len(gaps) if gaps else None, ttft_s, count / level.duration_s)


def gaps(level: SimulatedLevel) -> Distribution | None:
    """The time between tokens: steps weighted by their generated tokens; None: no request has a second token."""
    from pdlab.results.schema import PERCENTILES, Distribution

    ordered = sorted(zip(level.gap_s, level.gap_tokens, strict=True))
    total = sum(tokens for _, tokens in ordered)
    if not total:
        return None
    percentiles_s, counted, left = {}, 0, list(PERCENTILES)
    for gap_s, tokens in ordered:
        counted += tokens
        while left and counted >= left[0] / 100 * total:
            percentiles_s[f"p{left.pop(0)}"] = gap_s
    mean_s = sum(gap_s * tokens for gap_s, tokens in ordered) / total
    return Distribution(mean_s=mean_s, percentiles_s=percentiles_s)


def records(level: SimulatedLevel) -> tuple[RequestRecord, ...]:
    """All requests as records of the benchmark (gaps between chunks are not simulated)."""
    from pdlab.results.schema import RequestRecord

    return tuple(
        RequestRecord(arrival_s=a, first_token_s=f, finish_s=e, input_tokens=i, output_tokens=o)
        for a, f, e, i, o in zip(
            level.arrival_s,
            level.first_token_s,
            level.finish_s,
            level.input_tokens,
            level.output_tokens,
            strict=True,
        )
    )


def columns(level: SimulatedLevel) -> LevelData:
    """All requests as columns, for windows and searches."""
    from pdlab.results.level_data import LevelData

    return LevelData.of_times(
        level.arrival_s, level.first_token_s, level.finish_s, level.output_tokens, level.input_tokens
    )


def to_run(simulated: SimulatedLevel, label: str, workload: Workload) -> Run:
    """The level as a `Run`. Gaps between tokens are those of the engines' steps, over the whole level."""
    from pdlab.results.schema import Run

    level = simulated.level
    everything = range(len(simulated.arrival_s))
    return Run(
        origin="simulated",
        label=label,
        key=level.key,
        workload=workload,
        load=level.load,
        num_requests=len(everything),
        seed=level.seed,
        completed=len(everything),
        failed=0,
        requested_tokens=(fmean(simulated.input_tokens), fmean(simulated.output_tokens)) if workload.varied else None,
        whole=_summary(simulated, everything, everything, 0.0, simulated.duration_s).model_copy(
            update={"itl": gaps(simulated)}
        ),
        steady=_steady(simulated),
    )


def _steady(level: SimulatedLevel) -> Summary | None:
    """The window of pdlab.results.metrics.steady, for a closed loop."""
    from pdlab.results.metrics import is_short, steady_window

    load = level.level.load
    if not isinstance(load, Closed):
        return None
    requests = columns(level)
    window = steady_window(requests, load)
    if window is None:
        return None
    finished = window.holds(requests.finish_s).nonzero()[0].tolist()
    judged = window.judges(requests, load).nonzero()[0].tolist()
    if is_short(load, len(finished), len(judged)) or not judged:
        return None
    return _summary(level, finished, judged, *window)


def _summary(
    level: SimulatedLevel, finished: Sequence[int], judged: Sequence[int], opens_s: float, closes_s: float
) -> Summary:
    from pdlab.results.metrics import distribution
    from pdlab.results.schema import Summary

    per_s = 1 / (closes_s - opens_s)
    tokens = 0.0
    for i, (first_s, last_s) in enumerate(zip(level.first_token_s, level.finish_s, strict=True)):
        inside_s = min(last_s, closes_s) - max(first_s, opens_s)
        if inside_s >= 0:
            tokens += level.output_tokens[i] * (inside_s / (last_s - first_s) if last_s > first_s else 1.0)
    ttft = [level.first_token_s[i] - level.arrival_s[i] for i in judged]
    e2el = [level.finish_s[i] - level.arrival_s[i] for i in judged]
    tpot = [
        (level.finish_s[i] - level.first_token_s[i]) / (level.output_tokens[i] - 1)
        for i in judged
        if level.output_tokens[i] > 1
    ]
    return Summary(
        duration_s=closes_s - opens_s,
        completed=len(finished),
        judged=len(judged),
        requests_per_s=len(finished) * per_s,
        input_tokens_per_s=sum(level.input_tokens[i] for i in finished) * per_s,
        output_tokens_per_s=tokens * per_s,
        ttft=distribution(ttft),
        tpot=distribution(tpot),
        e2el=distribution(e2el),
    )
