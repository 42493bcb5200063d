"""Where the time to the first token goes, from the engines' own metrics.

vLLM's histograms, as differences over a level and means over requests (vllm/v1/metrics/stats.py and
the NIXL connector's stats.py of vLLM 0.29):

- ``request_queue_time_seconds``: from the request's arrival in the engine core to its first scheduling.
- ``request_prefill_time_seconds``: from there to the first token that this engine makes.
- ``nixl_xfer_time_seconds``: one KV transfer, from posting it to the poll that finds it done.

Collocated: queue, prefill, rest. Prefill-decode: a request is queued and prefilled on P; on D it is
first scheduled when its KV cache has come, so D's queue time holds the transfer, and D's "prefill"
is the one step that makes the first token the client sees. What the client measured beyond that is
the way: HTTP, routing, tokenising, streaming, and the network.

The engines' means are over every request that finished in the level, the client's TTFT is over the
level's window: in the ramp-up requests queue longer, so parts can exceed the whole. The split says so
(``rest_s`` below 0) and hides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from pdlab.results import EngineCounters, Run
from pdlab.spec import Frozen


class Split(Frozen):
    """Means in seconds per request; None where the engines did not say.

    ``decode_wait_s`` is D's queue without the transfer: waiting for a free place and for KV blocks.
    ``rest_s`` is what the client measured beyond the engines' parts.
    """

    ttft_s: float
    queue_s: float | None
    prefill_s: float | None
    kv_transfer_s: float | None = None
    decode_wait_s: float | None = None
    first_step_s: float | None = None
    rest_s: float | None = None

    @property
    def parts(self) -> dict[str, float]:
        """Name -> seconds of every part that is known, in the order of time."""
        named = {
            "queue": self.queue_s,
            "prefill": self.prefill_s,
            "KV transfer": self.kv_transfer_s,
            "decode queue": self.decode_wait_s,
            "first decode step": self.first_step_s,
            "rest": self.rest_s,
        }
        return {name: value for name, value in named.items() if value is not None}


def split(run: Run) -> Split | None:
    """The split of one level; None without the engines' counters or without a TTFT."""
    # The whole run: the counters cover all of its requests.
    if run.whole.ttft is None or not run.engines_after:
        return None
    ttft_s = run.whole.ttft.mean_s
    prefill_pool = "prefill" if "prefill" in run.engines_after else "collocated"
    queue_s = _mean(run, prefill_pool, "queue_s", "queue_count")
    prefill_s = _mean(run, prefill_pool, "prefill_s", "prefill_count")
    if queue_s is None and prefill_s is None:
        return None
    if prefill_pool == "collocated":
        return _with_rest(Split(ttft_s=ttft_s, queue_s=queue_s, prefill_s=prefill_s))
    transfer_s = _mean(run, "decode", "kv_transfer_s", "kv_transfers")
    waited_s = _mean(run, "decode", "queue_s", "queue_count")
    return _with_rest(
        Split(
            ttft_s=ttft_s,
            queue_s=queue_s,
            prefill_s=prefill_s,
            kv_transfer_s=transfer_s,
            decode_wait_s=None if waited_s is None else max(0.0, waited_s - (transfer_s or 0.0)),
            first_step_s=_mean(run, "decode", "prefill_s", "prefill_count"),
        )
    )


def mean_split(repeats: Sequence[Split]) -> Split:
    """Mean over repeats of every part that each of them has."""

    def mean(name: str) -> float | None:
        values = [getattr(each, name) for each in repeats]
        return None if None in values else fmean(values)

    return Split(**{name: mean(name) for name in Split.model_fields})


def _with_rest(found: Split) -> Split:
    return found.model_copy(update={"rest_s": found.ttft_s - sum(found.parts.values())})


def _mean(run: Run, pool: str, total: str, count: str) -> float | None:
    """Difference of a sum over the difference of its count; None when nothing was counted."""
    after = run.engines_after.get(pool)
    before = run.engines_before.get(pool, EngineCounters())
    if after is None:
        return None
    many, much = (_difference(before, after, name) for name in (count, total))
    return None if not many or many < 0 or much is None or much < 0 else much / many


def _difference(before: EngineCounters, after: EngineCounters, name: str) -> float | None:
    value: float | None = getattr(after, name)
    return None if value is None else value - (getattr(before, name) or 0.0)
