"""vLLM's own counters of a running deployment, from its Prometheus pages."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping

from pydantic import Field

from pdlab.core.schema import Frozen
from pdlab.deploy.metrics_page import MetricSample, read_pages, samples
from pdlab.results.schema import EngineCounters, NixlCounters

NIXL_TIMEOUT_S, NIXL_POLL_S = 30.0, 0.5
PREFILLED = "prefill_answered"
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
    # pdlab's own (`pdlab.deploy.serving.prefill_call.COUNTERS`).
    "prefill_calls": "prefill_calls",
    "prefill_timeouts": "prefill_timeouts",
    "prefill_retries": "prefill_retries",
    "prefill_local": "prefill_local",
    "prefill_failures": "prefill_failures",
    # A fluid engine finishes requests that others decode, too: they are taken off those that it answered.
    PREFILLED: "requests",
    "rehearsal_requests": "modelled_requests",
    "rehearsal_ttft_seconds": "modelled_ttft_s",
    "rehearsal_decode_seconds": "modelled_decode_s",
    "rehearsal_late_seconds": "modelled_late_s",
}
_HISTOGRAMS = {
    "time_to_first_token_seconds_bucket": "ttft",
    "request_queue_time_seconds_bucket": "queue",
    "request_prefill_time_seconds_bucket": "prefill",
    "nixl_xfer_time_seconds_bucket": "kv_transfer",
}
_NIXL_FIELDS = {
    "nixl_bytes_transferred_sum": "bytes_transferred",
    "nixl_xfer_time_seconds_count": "transfers",
    "nixl_num_failed_transfers": "failed_transfers",
    "nixl_num_failed_notifications": "failed_notifications",
    "nixl_num_kv_expired_reqs": "kv_expired_requests",
    "guard_receives": "guard_receives",
    "guard_recomputed": "guard_recomputed",
    "guard_deadlines": "guard_deadlines",
    "guard_errors": "guard_errors",
    "guard_failed_reads": "guard_failed_reads",
    "guard_handshakes_renewed": "guard_handshakes_renewed",
}
_WANTED = {*_FIELDS, *_HISTOGRAMS, *_NIXL_FIELDS, "kv_pool_tokens", "cache_config_info", "roles_changed"}
# Counter -> one that is exported before it can grow.
_IMPLIED = {
    "preemptions": "generation_tokens",
    "prefix_cache_hits": "prefix_cache_queries",
    "external_cache_hits": "external_cache_queries",
    "prefill_timeouts": "prefill_calls",
    "prefill_retries": "prefill_calls",
    "prefill_local": "prefill_calls",
    "prefill_failures": "prefill_calls",
}
# What an engine has put into its KV pool: all tokens but those whose blocks were there already.
_SERVED = {"prompt_tokens": 1.0, "generation_tokens": 1.0, "prefix_cache_hits": -1.0}


class KvPool(Frozen):
    """One engine's KV pool: the pool of its engine, the tokens that it holds, and the tokens that it has been given
    since the engine's start.
    """

    role: str
    tokens: float = Field(gt=0)
    served: float

    @property
    def age(self) -> float:
        """Tokens given over tokens held. Below 1 some blocks were never used."""
        return self.served / self.tokens


class Snapshot(Frozen):
    """All counters at one moment: NIXL's over the decode engines, the engines' per pool, and every Ray Serve replica
    that has samples on the pages (those of deployments that are gone included), with the requests that it has finished.
    ``kv_pools``: by replica, None where the size of one of them is not known. ``delayed``: they came through Ray, which
    exports them at intervals. ``roles_changed``: whether somebody has set other roles of a fluid pool than those of its
    launch; None: no role board reports it.
    """

    nixl: NixlCounters
    engines: dict[str, EngineCounters]
    replicas: tuple[str, ...]
    finished_by: dict[str, float] = Field(default_factory=dict)
    kv_pools: dict[str, KvPool] | None = None
    delayed: bool = False
    roles_changed: bool | None = None

    @property
    def pool_age(self) -> float | None:
        """The smallest ratio of served tokens to held tokens over all engines; None: unknown."""
        return min(pool.age for pool in self.kv_pools.values()) if self.kv_pools else None

    @property
    def to_fill(self) -> float | None:
        """Prompt tokens, spread evenly, that are still needed to fill every KV pool once. Each prompt goes to one
        engine of every role. None: unknown.
        """
        if not self.kv_pools:
            return None
        pools = list(self.kv_pools.values())
        engines = Counter(pool.role for pool in pools)
        return max(0.0, max(engines[pool.role] * (pool.tokens - pool.served) for pool in pools))

    @property
    def finished(self) -> float | None:
        """Requests that the answering engines (decode or collocated) have finished."""
        counts = [counters.requests for pool, counters in self.engines.items() if pool != "prefill"]
        counted = [value for value in counts if value is not None]
        return sum(counted) if counted else None


def parse_snapshot(pages: Iterable[str], replicas: tuple[str, ...], pools: Mapping[str, str]) -> Snapshot:
    """Counters of Prometheus pages, under vLLM's names or Ray's (``ray_vllm_...``).

    With ``replicas`` only samples of those count; ``pools``: replica -> its pool. A sample
    without a known pool counts as collocated. Ray exports a counter when it first grows, so beside
    another of the same engine its absence is a true zero: see `_IMPLIED`. Sums that Ray makes
    of buckets are left out, and the buckets kept.
    """
    read = [sample for page in pages for sample in samples(page, _WANTED.__contains__)]
    totals: dict[str, dict[str, float]] = {}
    buckets: dict[str, dict[str, dict[str, float]]] = {}
    replica_ids: dict[str, None] = {}
    finished_by: dict[str, float] = {}
    held: dict[str, float] = {}
    served: dict[str, float] = {}
    delayed = False
    roles_changed: bool | None = None
    for sample in read:
        if (size := _pool_tokens(sample)) is not None:
            held[sample.replica] = size
        if sample.name == "roles_changed":
            roles_changed = bool(roles_changed or sample.value)
        field, histogram = _FIELDS.get(sample.name), _HISTOGRAMS.get(sample.name)
        if field is None and histogram is None:
            continue
        value = -sample.value if sample.name == PREFILLED else sample.value
        replica = sample.replica
        if replica:
            replica_ids[replica] = None
            if field == "requests":
                finished_by[replica] = finished_by.get(replica, 0.0) + value
        delayed = delayed or sample.through_ray
        if replicas and replica not in replicas:
            continue
        name = pools.get(replica, "collocated")
        if field in _SERVED:
            served[replica] = served.get(replica, 0.0) + _SERVED[field] * sample.value
        if histogram and sample.through_ray:
            counts = buckets.setdefault(name, {}).setdefault(histogram, {})
            end = sample.labels.get("le", "?")
            counts[end] = counts.get(end, 0.0) + sample.value
        elif field and not (sample.through_ray and sample.name.endswith("_sum")):
            pool = totals.setdefault(name, {})
            pool[field] = pool.get(field, 0.0) + value
    for fields in totals.values():
        for field, beside in _IMPLIED.items():
            if beside in fields:
                fields.setdefault(field, 0.0)
    engines = {pool: EngineCounters(**fields, buckets=buckets.get(pool, {})) for pool, fields in sorted(totals.items())}
    return Snapshot(
        nixl=_nixl_counters(read, replicas),
        engines=engines,
        replicas=tuple(replica_ids),
        finished_by=finished_by,
        kv_pools=_kv_pools(held, served, pools),
        delayed=delayed,
        roles_changed=roles_changed,
    )


def _pool_tokens(sample: MetricSample) -> float | None:
    """Tokens that an engine's KV pool holds: blocks times tokens of a block, whatever layers share them. vLLM exports
    both as labels of a gauge that it sets once, which Ray's pages show for two exports only. pdlab's servers export
    the product as a counter, which Ray keeps."""
    if sample.name == "kv_pool_tokens":
        return sample.value or None
    if sample.name != "cache_config_info":
        return None
    sizes = [sample.labels.get(name, "") for name in ("num_gpu_blocks", "block_size")]
    return float(int(sizes[0]) * int(sizes[1])) or None if all(size.isdecimal() for size in sizes) else None


def _kv_pools(
    held: Mapping[str, float], served: Mapping[str, float], pools: Mapping[str, str]
) -> dict[str, KvPool] | None:
    """Of the engines in ``pools``; if none are published, of all that report."""
    engines = pools or {replica: "collocated" for replica in {*held, *served}}
    if not engines or not all(replica in held for replica in engines):
        return None
    return {
        replica: KvPool(role=role, tokens=held[replica], served=served.get(replica, 0.0))
        for replica, role in engines.items()
    }


def read_snapshot(
    metrics_urls: Iterable[str], replicas: tuple[str, ...] = (), pools: Mapping[str, str] | None = None
) -> Snapshot:
    """Read the pages of a running deployment. Raises ClusterError when one does not answer."""
    return parse_snapshot(read_pages(metrics_urls), replicas, pools or {})


def await_nixl(
    metrics_urls: Iterable[str], replicas: tuple[str, ...], enough: Callable[[NixlCounters], object]
) -> NixlCounters:
    """The NIXL counters once they are ``enough``, or after `NIXL_TIMEOUT_S`: Ray exports metrics with a delay. Raises
    ClusterError when a page does not answer."""
    urls, deadline = tuple(metrics_urls), time.monotonic() + NIXL_TIMEOUT_S
    while True:
        counters = read_snapshot(urls, replicas).nixl
        if enough(counters) or time.monotonic() > deadline:
            return counters
        time.sleep(NIXL_POLL_S)


def _nixl_counters(read: Iterable[MetricSample], replicas: Collection[str]) -> NixlCounters:
    """The sums of vLLM's NIXL metrics and of the KV guard's counters.

    A counter that no page has is None, unless transfers are counted. vLLM creates its failure counters at the first
    failure, so their absence beside counted transfers is a true zero. The same holds for the KV guard's counters beside
    the receives that the guard watched.
    """
    total: dict[str, float] = {}
    for sample in read:
        field = _NIXL_FIELDS.get(sample.name)
        if field and (not replicas or sample.replica in replicas):
            total[field] = total.get(field, 0.0) + sample.value
    if "transfers" in total:
        for field in ("failed_transfers", "failed_notifications", "kv_expired_requests"):
            total.setdefault(field, 0.0)
    if "guard_receives" in total:
        for field in (field for field in _NIXL_FIELDS.values() if field.startswith("guard_")):
            total.setdefault(field, 0.0)
    return NixlCounters(**total)
