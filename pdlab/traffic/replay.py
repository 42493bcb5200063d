"""Turns a trace into requests: window, speed, scale, spreading of ticks, follow-ups causal or as recorded.

A trace in order of time is read twice, line by line: first to find errors, ticks and its order, then to make requests.
A trace in another order is sorted in memory.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from pdlab.core.errors import UsageError
from pdlab.traffic.bounded import LatestKeys
from pdlab.traffic.file import TrafficFile
from pdlab.traffic.formats import TraceFormat, format_of
from pdlab.traffic.formats.record import RecordedRequest, scaled_tokens
from pdlab.traffic.requests import TrafficHead, TrafficRequest

# Ticks: gaps are multiples of the smallest one to so many seconds, and that share of requests comes with another.
TICK_JITTER_S, LEAST_TICK_S, SHARED = 0.002, 0.1, 0.1
MOST_GAPS = 4096  # different ones, that are kept to find a tick


@dataclass(slots=True)
class _Survey:
    """The results of the first reading."""

    requests: int = 0
    left_out: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    in_order: bool = True
    together: int = 0
    gaps_ms: set[int] = field(default_factory=set)

    @property
    def ticks_s(self) -> float | None:
        """The tick in seconds: all arrivals are multiples of it; None: there is none."""
        if not self.gaps_ms or len(self.gaps_ms) > MOST_GAPS or self.together < SHARED * self.requests:
            return None
        tick_s = min(self.gaps_ms) / 1000
        # Gaps of 2,999, 3,000 and 3,001 ms are of ticks of 3 s.
        tick_s = round(tick_s + TICK_JITTER_S / 2, 2) if tick_s >= 1 else tick_s
        if tick_s < LEAST_TICK_S:
            return None
        off_s = (abs(gap / 1000 - tick_s * round(gap / 1000 / tick_s)) for gap in self.gaps_ms)
        return tick_s if max(off_s) <= TICK_JITTER_S else None


def replayed(spec: TrafficFile, path: Path) -> tuple[TrafficHead, Iterator[TrafficRequest]]:
    """The head and the requests of a trace. The whole file is checked before this returns. Raises UsageError."""
    trace_format = format_of(path)
    _check_keys(spec, trace_format, path)
    as_recorded = spec.model_copy(update={"follow": "recorded"})  # follow-ups need not be looked for twice
    survey = _survey(trace_format.read(path, as_recorded), timed=trace_format.times == "clock")
    if not survey.requests:
        raise UsageError(f"{path}: holds no request; give a trace with at least one")
    ticks_s = survey.ticks_s if trace_format.times == "clock" else None
    spread_s = None
    if trace_format.times == "clock" and spec.spread_ticks != "never":
        spread_s = ticks_s if spec.spread_ticks == "auto" else float(spec.spread_ticks)
    head = TrafficHead(
        seed=spec.seed,
        source=path.name,
        source_sha256=None if path.is_dir() else _sha256(path),
        kind=trace_format.name,
        follow=spec.follow,
        endpoint=spec.endpoint,
        scale=spec.scale,
        speed=spec.speed,
        window_s=spec.window,
        ticks_s=ticks_s,
        spread=spread_s is not None,
        tokens="estimated" if trace_format.text and spec.tokenizer is None else "exact",
        inferred=trace_format.inferred and spec.follow == "causal",
        left_out=survey.left_out,
    )
    rows = (row for row in trace_format.read(path, spec) if row.out)
    if trace_format.times == "clock":
        ordered = rows if survey.in_order else iter(sorted(rows, key=lambda row: row.at_s or 0.0))
        moments = _clocked(ordered, survey.first_s, spread_s, spec.seed)
    else:
        moments = _sessions(rows, spec)
    return head, _Maker(spec, trace_format).requests(moments)


def _check_keys(spec: TrafficFile, trace_format: TraceFormat, path: Path) -> None:
    """Raises UsageError for keys that this format has no use for, or that it needs."""
    name = trace_format.name
    if trace_format.times == "clock":
        for key in ("rate_rps", "think_s"):
            if key in spec.model_fields_set:
                raise UsageError(f"{path}: the {name} format sets the times of requests; leave {key} out")
    else:
        if spec.rate_rps is None:
            why = f"the {name} format has no start times of sessions"
            raise UsageError(f"{path}: {why}; give rate_rps in a workload file")
        if "spread_ticks" in spec.model_fields_set:
            raise UsageError(f"{path}: the {name} format has no common clock; leave spread_ticks out")
    if trace_format.times == "none" and spec.follow == "recorded":
        raise UsageError(f"{path}: the {name} format has no times to follow; leave follow out")
    if trace_format.times == "session" and "think_s" in spec.model_fields_set:
        raise UsageError(f"{path}: the {name} format sets the pauses of agents; leave think_s out")
    if not trace_format.text:
        for key in ("tokenizer", "output_tokens"):
            if key in spec.model_fields_set:
                raise UsageError(f"{path}: the {name} format has no text and sets its token counts; leave {key} out")
    elif spec.scale != 1:
        raise UsageError(f"{path}: the {name} format has real text, which cannot be scaled; leave scale out")


def _survey(rows: Iterable[RecordedRequest], *, timed: bool) -> _Survey:
    found, before_s = _Survey(), None
    for row in rows:
        if not row.out:
            found.left_out += 1
            continue
        found.requests += 1
        if not timed:
            continue
        at_s = row.at_s or 0.0
        if before_s is None:
            found.first_s = at_s
        elif at_s < before_s:
            found.in_order = False
        elif at_s == before_s:
            found.together += 1
        elif len(found.gaps_ms) <= MOST_GAPS:
            found.gaps_ms.add(round(1000 * (at_s - before_s)))
        found.first_s = min(found.first_s, at_s)
        found.last_s = max(found.last_s, at_s)
        before_s = at_s
    if not found.in_order:
        found.gaps_ms.clear()
    return found


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


Moments = Iterator[tuple[float, float, RecordedRequest]]
"""(moment in the source, by which the window cuts; moment at which it is due, at the source's speed; request)"""


def _clocked(rows: Iterator[RecordedRequest], first_s: float, spread_s: float | None, seed: int) -> Moments:
    if spread_s is None:
        for row in rows:
            at_s = (row.at_s or 0.0) - first_s
            yield at_s, at_s, row
        return
    for tick, group in groupby(rows, key=lambda row: round(((row.at_s or 0.0) - first_s) / spread_s)):
        spread = [(spread_s * (tick + share_of(seed, f"tick/{row.id}")), row) for row in group]
        for at_s, row in sorted(spread, key=lambda each: (each[0], each[1].line)):
            yield spread_s * tick, at_s, row


def _sessions(rows: Iterator[RecordedRequest], spec: TrafficFile) -> Moments:
    """Sessions begin as a Poisson process; what is within them is relative to that."""
    starts = poisson(spec.seed, spec.rate_rps or 1.0)
    for _, group in groupby(rows, key=lambda row: (row.line, row.session)):
        start_s = next(starts)
        for row in group:
            yield start_s, start_s + (row.at_s or 0.0), row


def poisson(seed: int, rate_rps: float) -> Iterator[float]:
    """The times of a Poisson process from 0 on, without an end."""
    rng, now_s = random.Random(f"{seed}:arrivals"), 0.0
    while True:
        yield now_s
        now_s += rng.expovariate(rate_rps)


def share_of(seed: int, key: str) -> float:
    """From 0 to below 1, by BLAKE2b over the seed and the key."""
    digest = hashlib.blake2b(f"{seed}:{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


class _Maker:
    """Makes requests from recorded ones. It stores the latest requests, which follow-ups may continue."""

    def __init__(self, spec: TrafficFile, trace_format: TraceFormat) -> None:
        self.spec, self.trace_format = spec, trace_format
        # Request -> tokens of its prompt and answer as sent, as recorded, and the session that it is in.
        self.known: LatestKeys[str, tuple[int, int, str]] = LatestKeys()
        self.causal = spec.follow == "causal"

    def requests(self, moments: Moments) -> Iterator[TrafficRequest]:
        window = self.spec.window or (0.0, float("inf"))
        for source_s, due_s, row in moments:
            if window[0] <= source_s < window[1]:
                yield self._request(row, max(due_s - window[0], 0.0) / self.spec.speed)

    def _request(self, row: RecordedRequest, due_s: float) -> TrafficRequest:
        spec = self.spec
        blocks = row.prompt.scaled(spec.scale)
        out = scaled_tokens(row.out, spec.scale)
        before = self.known.get(row.parent) if row.parent is not None else None
        session = row.session if before is None else before[2]
        parent: str | None = None
        waits: tuple[str, ...] = ()
        gap_s, fresh = 0.0, False
        total, recorded = sum([tokens for _, tokens in blocks]), row.prompt.tokens
        if self.causal and before is not None:
            parent = row.parent
            waits = tuple(each for each in row.waits if each in self.known)
            gap_s = (row.gap_s if row.gap_s is not None else self._think_s(row)) / spec.speed
            fresh = not row.continues
            if row.added:
                total += before[0]
                recorded += before[1]
            elif row.continues and recorded > before[1]:
                new_tokens = max(total - before[0], 1)
                blocks, total = ((f"{row.id}/new", new_tokens),), before[0] + new_tokens
            else:
                fresh = True
        if self.causal:
            self.known[row.id] = (total + out, recorded + row.out, session)
        waited_alone = parent is not None and (row.gap_s is not None or self.trace_format.times == "none")
        return TrafficRequest(
            id=row.id,
            session=session,
            blocks=blocks,
            out=out,
            at_s=None if waited_alone else due_s,
            parent=parent,
            gap_s=gap_s,
            waits=waits,
            fresh=fresh,
            messages=row.messages,
            extra=row.extra,
        )

    def _think_s(self, row: RecordedRequest) -> float:
        think = self.spec.think_s
        return think.seconds(random.Random(f"{self.spec.seed}:{row.id}/think")) if think else 0.0
