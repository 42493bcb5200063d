"""Breakdown of the time to the first token, from the engines' own metrics.

vLLM's histograms, as differences over a level and means over requests (vllm/v1/metrics/stats.py and the NIXL
connector's stats.py of vLLM 0.29):

- ``time_to_first_token_seconds``: from the request's arrival at this engine to its first token.
- ``request_queue_time_seconds``: from the request's arrival in the engine core to its first scheduling.
- ``request_prefill_time_seconds``: from there to the first token.
- ``nixl_xfer_time_seconds``: one KV transfer, from its posting to the poll that finds it done.

Collocated: one engine, its queue, its prefill, rest. Prefill-decode: a request is queued and prefilled on P. D first
schedules it when its KV cache has come, so D's queue time contains the transfer. D's "prefill" is the one step that
makes the first token that the client sees. The rest of the client's TTFT is outside the engines: HTTP, routing,
tokenising, streaming, and the network.

Ray's exporter keeps a histogram's buckets and loses its sum (`pdlab.deploy.engine_metrics`). A mean then lies between
the means of the buckets' lower and upper ends. Every part is therefore a range, which is a point if the sum is known.

The engines' means are over every request that finished in the level, the client's TTFT is over the level's window.
During ramp-up requests queue longer, so parts can exceed the whole; the rest is then below 0.

If clients may get prefill's first token before decode has begun, their TTFT contains decode's part of some requests
only. The rest is then unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from pdlab.core.schema import Frozen
from pdlab.results.schema import EngineCounters, Run


class MeanRange(Frozen):
    """A mean in seconds that is at least ``low_s`` and at most ``high_s`` (None: the upper end is unknown)."""

    low_s: float
    high_s: float | None

    def __add__(self, other: MeanRange) -> MeanRange:
        high_s = None if self.high_s is None or other.high_s is None else self.high_s + other.high_s
        return MeanRange(low_s=self.low_s + other.low_s, high_s=high_s)

    def beyond(self, other: MeanRange) -> MeanRange:
        """This range minus ``other``, at least 0."""
        low_s = 0.0 if other.high_s is None else max(0.0, self.low_s - other.high_s)
        return MeanRange(low_s=low_s, high_s=None if self.high_s is None else max(0.0, self.high_s - other.low_s))


class TtftSplit(Frozen):
    """Means in seconds per request; None if the engines did not report it.

    ``engine``: the prefill (or collocated) engine's whole part, which contains ``queue`` and ``prefill``.
    ``decode_engine``: the decode engine's, which contains ``kv_transfer``, ``decode_wait`` (its queue without the
    transfer: waiting for a free place and for KV blocks) and ``first_step``. ``rest_low_s`` and ``rest_high_s``: range
    of the client's time outside the engines (None: unknown end). ``early``: clients may get prefill's first token
    before decode has begun.
    """

    ttft_s: float
    engine: MeanRange | None = None
    queue: MeanRange | None = None
    prefill: MeanRange | None = None
    decode_engine: MeanRange | None = None
    kv_transfer: MeanRange | None = None
    decode_wait: MeanRange | None = None
    first_step: MeanRange | None = None
    rest_low_s: float | None = None
    rest_high_s: float | None = None
    early: bool = False


PARTS = ("engine", "queue", "prefill", "decode_engine", "kv_transfer", "decode_wait", "first_step")


def split(run: Run, *, early: bool = False) -> TtftSplit | None:
    """The split of one level; None without the engines' counters or without a TTFT. ``early``: see `TtftSplit`."""
    # The whole run: the counters cover all of its requests.
    if run.whole.ttft is None or run.whole.ttft.mean_s is None or not run.engines_after:
        return None
    if "fluid" in run.engines_after:  # its engines count both kinds of work together
        return None
    pool = "prefill" if "prefill" in run.engines_after else "collocated"
    parts = {
        "engine": _mean(run, pool, "ttft", "ttft_count"),
        "queue": _mean(run, pool, "queue", "queue_count"),
        "prefill": _mean(run, pool, "prefill", "prefill_count"),
    }
    if pool == "prefill":
        transfer = _mean(run, "decode", "kv_transfer", "kv_transfers")
        waited = _mean(run, "decode", "queue", "queue_count")
        parts["decode_engine"] = _mean(run, "decode", "ttft", "ttft_count")
        parts["kv_transfer"] = transfer
        parts["decode_wait"] = waited.beyond(transfer) if waited and transfer else waited
        parts["first_step"] = _mean(run, "decode", "prefill", "prefill_count")
    if all(part is None for part in parts.values()):
        return None
    return _with_rest(TtftSplit(ttft_s=run.whole.ttft.mean_s, **parts, early=early and pool == "prefill"))


def mean_split(repeats: Sequence[TtftSplit]) -> TtftSplit:
    """Mean over repeats of every part that each of them has."""

    def mean(name: str) -> MeanRange | None:
        ranges: list[MeanRange] = [
            part_range for repeat in repeats if (part_range := getattr(repeat, name)) is not None
        ]
        if len(ranges) < len(repeats):
            return None
        highs = [part_range.high_s for part_range in ranges if part_range.high_s is not None]
        high_s = fmean(highs) if len(highs) == len(ranges) else None
        return MeanRange(low_s=fmean(part_range.low_s for part_range in ranges), high_s=high_s)

    return _with_rest(
        TtftSplit(
            ttft_s=fmean(repeat.ttft_s for repeat in repeats),
            **{part: mean(part) for part in PARTS},
            early=any(repeat.early for repeat in repeats),
        )
    )


def _with_rest(breakdown: TtftSplit) -> TtftSplit:
    prefill_side = breakdown.engine or _sum(breakdown.queue, breakdown.prefill)
    decode_side = breakdown.decode_engine or _sum(breakdown.kv_transfer, breakdown.decode_wait, breakdown.first_step)
    engines = _sum(prefill_side, decode_side)
    if engines is None or breakdown.early:
        return breakdown
    low_s = None if engines.high_s is None else breakdown.ttft_s - engines.high_s
    return breakdown.model_copy(update={"rest_low_s": low_s, "rest_high_s": breakdown.ttft_s - engines.low_s})


def _sum(*parts: MeanRange | None) -> MeanRange | None:
    known_parts = [part for part in parts if part is not None]
    return sum(known_parts[1:], known_parts[0]) if known_parts else None


def _mean(run: Run, pool: str, name: str, count: str) -> MeanRange | None:
    """From a sum and its count, else from buckets; None if nothing was counted, or an engine restarted."""
    after = run.engines_after.get(pool)
    before = run.engines_before.get(pool, EngineCounters())
    if after is None:
        return None
    count_difference, sum_s = (_difference(before, after, field) for field in (count, f"{name}_s"))
    if count_difference and count_difference > 0 and sum_s is not None and sum_s >= 0:
        return MeanRange(low_s=sum_s / count_difference, high_s=sum_s / count_difference)
    return _of_buckets(before.buckets.get(name, {}), after.buckets.get(name, {}))


def _of_buckets(before: Mapping[str, float], after: Mapping[str, float]) -> MeanRange | None:
    """From cumulative counts by upper end: the mean is between those of the buckets' ends."""
    grown = sorted((float(end), count - before.get(end, 0.0)) for end, count in after.items())
    if not grown or grown[-1][0] != float("inf") or grown[-1][1] <= 0 or any(count < 0 for _, count in grown):
        return None
    total, low, high, counted, begin = grown[-1][1], 0.0, 0.0, 0.0, 0.0
    for end, cumulative in grown:
        inside = cumulative - counted
        low += begin * inside
        high += end * inside if inside else 0.0
        counted, begin = cumulative, end
    return MeanRange(low_s=low / total, high_s=None if high == float("inf") else high / total)


def _difference(before: EngineCounters, after: EngineCounters, name: str) -> float | None:
    value: float | None = getattr(after, name)
    return None if value is None else value - (getattr(before, name) or 0.0)
