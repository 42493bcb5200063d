"""vLLM's own counters of a running deployment, per pool, from its Prometheus pages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pdlab.prometheus import read_pages, samples
from pdlab.results import EngineCounters, NixlCounters
from pdlab.running import parse_counters
from pdlab.spec import Frozen

_FIELDS = {
    "request_success": "requests",
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "generation_tokens",
    "prefix_cache_queries": "prefix_cache_queries",
    "prefix_cache_hits": "prefix_cache_hits",
    "external_prefix_cache_queries": "external_cache_queries",
    "external_prefix_cache_hits": "external_cache_hits",
    "num_preemptions": "preemptions",
    "time_to_first_token_seconds_sum": "ttft_s",
    "time_to_first_token_seconds_count": "ttft_count",
    "request_queue_time_seconds_sum": "queue_s",
    "request_queue_time_seconds_count": "queue_count",
    "request_prefill_time_seconds_sum": "prefill_s",
    "request_prefill_time_seconds_count": "prefill_count",
    "request_decode_time_seconds_sum": "decode_s",
    "request_decode_time_seconds_count": "decode_count",
    "e2e_request_latency_seconds_sum": "e2e_s",
    "e2e_request_latency_seconds_count": "e2e_count",
    "nixl_xfer_time_seconds_sum": "kv_transfer_s",
    "nixl_xfer_time_seconds_count": "kv_transfers",
}
_HISTOGRAMS = {
    "time_to_first_token_seconds_bucket": "ttft",
    "request_queue_time_seconds_bucket": "queue",
    "request_prefill_time_seconds_bucket": "prefill",
    "nixl_xfer_time_seconds_bucket": "kv_transfer",
}
# Counter -> one that is exported before it can grow.
_IMPLIED = {
    "preemptions": "generation_tokens",
    "prefix_cache_hits": "prefix_cache_queries",
    "external_cache_hits": "external_cache_queries",
}


class Snapshot(Frozen):
    """All counters at one moment: NIXL's over the decode engines, the engines' per pool, and every Ray
    Serve replica that has samples on the pages (those of deployments that are gone included)."""

    nixl: NixlCounters
    engines: dict[str, EngineCounters]
    replicas: tuple[str, ...]

    @property
    def finished(self) -> float | None:
        """Requests that the engines have finished where answers come from: decode or collocated ones."""
        found = [counters.requests for pool, counters in self.engines.items() if pool != "prefill"]
        known = [value for value in found if value is not None]
        return sum(known) if known else None


def parse_snapshot(pages: Iterable[str], replicas: tuple[str, ...], pools: Mapping[str, str]) -> Snapshot:
    """Counters of Prometheus pages, under vLLM's names or Ray's (``ray_vllm_...``).

    With ``replicas`` only samples of those count; ``pools`` says which pool each is of. A sample
    without a known pool counts as collocated. Ray exports a counter when it first grows, so beside
    another of the same engine its absence is a true zero: see `_IMPLIED`. Sums that Ray makes
    of buckets are left out, and the buckets kept.
    """
    pages = list(pages)
    totals: dict[str, dict[str, float]] = {}
    buckets: dict[str, dict[str, dict[str, float]]] = {}
    seen: dict[str, None] = {}
    for sample in (sample for page in pages for sample in samples(page)):
        field, histogram = _FIELDS.get(sample.name), _HISTOGRAMS.get(sample.name)
        if field is None and histogram is None:
            continue
        replica = sample.label("ReplicaId")
        if replica:
            seen[replica] = None
        if replicas and replica not in replicas:
            continue
        name = pools.get(replica or "", "collocated")
        if histogram and sample.through_ray:
            counts = buckets.setdefault(name, {}).setdefault(histogram, {})
            end = sample.label("le") or "?"
            counts[end] = counts.get(end, 0.0) + sample.value
        elif field and not (sample.through_ray and sample.name.endswith("_sum")):
            pool = totals.setdefault(name, {})
            pool[field] = pool.get(field, 0.0) + sample.value
    for fields in totals.values():
        for field, beside in _IMPLIED.items():
            if beside in fields:
                fields.setdefault(field, 0.0)
    engines = {pool: EngineCounters(**fields, buckets=buckets.get(pool, {})) for pool, fields in sorted(totals.items())}
    return Snapshot(nixl=parse_counters(pages, replicas), engines=engines, replicas=tuple(seen))


def read_snapshot(
    metrics_urls: Iterable[str], replicas: tuple[str, ...] = (), pools: Mapping[str, str] | None = None
) -> Snapshot:
    """Read the pages of a running deployment. Raises ClusterError when one does not answer."""
    return parse_snapshot(read_pages(metrics_urls), replicas, pools or {})
