"""Figures of a workload: requests, sessions, lengths, duration, and the share of its prompts that a cache could
hold.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from pdlab.core.text import aligned, counted
from pdlab.traffic.bounded import LatestKeys, percentile_of
from pdlab.traffic.requests import TrafficHead, TrafficRequest

PARTS = (50, 90, 99)
KEPT_BLOCKS = 2**18


class LengthPercentiles(NamedTuple):
    """Tokens: mean, percentiles of `PARTS`, longest."""

    mean: float
    percentiles: tuple[int, ...]
    most: int

    @classmethod
    def of(cls, counts: Counter[int]) -> LengthPercentiles:
        mean = sum(value * count for value, count in counts.items()) / counts.total()
        return cls(mean, tuple(percentile_of(counts, part) for part in PARTS), max(counts))


class WorkloadFigures(NamedTuple):
    """A workload in figures.

    ``hit_share``: share of all prompt tokens in a cache that keeps every prompt and answer, or the `KEPT_BLOCKS` latest
    blocks if there are more (``forgot``). ``latest_s``: the last time in the workload itself; answers and requests that
    wait for them come later. ``waiting``: requests that wait for others.
    """

    head: TrafficHead
    requests: int
    sessions: int
    waiting: int
    inputs: LengthPercentiles
    outputs: LengthPercentiles
    turns: LengthPercentiles
    hit_share: float
    forgot: bool
    latest_s: float

    def text(self) -> str:
        """A table with two columns."""
        head = self.head
        cache = f"cache of the last {KEPT_BLOCKS:,} blocks" if self.forgot else "unbounded cache"
        rows = [
            ("source", f"{head.source} ({head.kind}), seed {head.seed}"),
            ("requests", f"{self.requests}; {self.waiting} of them wait for others"),
            ("sessions", f"{self.sessions}"),
            ("requests of a session", _lengths(self.turns)),
            ("input tokens", _lengths(self.inputs) + (" (estimated)" if head.tokens == "estimated" else "")),
            ("output tokens", _lengths(self.outputs)),
            ("ideal hit share", f"{self.hit_share:.3f} of prompt tokens ({cache})"),
            ("latest start time", f"{self.latest_s:.1f} s"),
            ("ticks", "none" if head.ticks_s is None else f"{head.ticks_s:g} s, {'' if head.spread else 'not '}spread"),
        ]
        if head.left_out:
            rows.append(("left out", f"{counted(head.left_out, 'request')} of the source that were not answered"))
        if head.inferred:
            rows.append(("parents", "inferred from shared blocks"))
        return "\n".join(aligned(rows, left={0, 1}))


def _lengths(values: LengthPercentiles) -> str:
    parts = ", ".join(f"p{part} {value}" for part, value in zip(PARTS, values.percentiles, strict=True))
    return f"mean {values.mean:.1f}, {parts}, most {values.most}"


def described(head: TrafficHead, requests: Iterable[TrafficRequest]) -> WorkloadFigures:
    """Reads every request, of which there is at least one, once. Raises UsageError as ``requests`` do."""
    inputs, outputs, turns = Counter[int](), Counter[int](), Counter[int]()
    waiting, latest_s, hits, forgot = 0, 0.0, 0, False
    sessions: LatestKeys[str, int] = LatestKeys(gone=lambda count: turns.update((count,)))
    seen: LatestKeys[bytes, None] = LatestKeys(KEPT_BLOCKS)
    ends: LatestKeys[str, tuple[int, bytes]] = LatestKeys()  # request -> tokens of its prompt and answer, what they are
    for request in requests:
        before, chain = ends[request.continues] if request.continues is not None else (0, b"")
        hit, missed, tokens = before, False, before
        for key, count in request.blocks:
            chain = _next(chain, f"{key}:{count}")
            tokens += count
            missed = missed or chain not in seen
            hit += 0 if missed else count
            forgot = forgot or (len(seen) == KEPT_BLOCKS and chain not in seen)
            seen[chain] = None
        ends[request.id] = (tokens + request.out, _next(chain, f"answer of {request.id}"))
        inputs[tokens] += 1
        outputs[request.out] += 1
        hits += hit
        sessions[request.session] = sessions.get(request.session, 0) + 1
        waiting += request.parent is not None or bool(request.waits)
        latest_s = max(latest_s, request.at_s or 0.0)
    turns.update(sessions.values())
    return WorkloadFigures(
        head,
        inputs.total(),
        turns.total(),
        waiting,
        LengthPercentiles.of(inputs),
        LengthPercentiles.of(outputs),
        LengthPercentiles.of(turns),
        hits / sum(tokens * count for tokens, count in inputs.items()),
        forgot,
        latest_s,
    )


def _next(chain: bytes, what: str) -> bytes:
    return hashlib.blake2b(chain + what.encode(), digest_size=12).digest()
