"""vLLM's own counters of a running deployment, per pool, from its Prometheus pages."""

from __future__ import annotations

import http.client
import re
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping

from pdlab.errors import ClusterError
from pdlab.results import EngineCounters, NixlCounters
from pdlab.running import parse_counters
from pdlab.spec import Frozen

TIMEOUT_S = 10.0

_LABELS = r"\{(?:[^\"}\n]|\"(?:[^\"\\\n]|\\.)*\")*\}"  # a quoted value may hold braces and escaped quotes
_SAMPLE = re.compile(
    rf"^(?:ray_)?vllm[:_](?P<name>[a-z0-9_]+?)(?:_total)?(?P<labels>{_LABELS})?[ \t]+(?P<value>\S+)", re.MULTILINE
)
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
    another of the same engine its absence is a true zero: see `_IMPLIED`.
    """
    pages = list(pages)
    totals: dict[str, dict[str, float]] = {}
    seen: dict[str, None] = {}
    for page in pages:
        for match in _SAMPLE.finditer(page):
            field = _FIELDS.get(match["name"])
            if field is None:
                continue
            replica = _label("ReplicaId", match["labels"])
            if replica:
                seen[replica] = None
            if replicas and replica not in replicas:
                continue
            pool = totals.setdefault(pools.get(replica or "", "collocated"), {})
            pool[field] = pool.get(field, 0.0) + float(match["value"])
    for fields in totals.values():
        for field, beside in _IMPLIED.items():
            if beside in fields:
                fields.setdefault(field, 0.0)
    engines = {pool: EngineCounters(**fields) for pool, fields in sorted(totals.items())}
    return Snapshot(nixl=parse_counters(pages, replicas), engines=engines, replicas=tuple(seen))


def read_snapshot(
    metrics_urls: Iterable[str], replicas: tuple[str, ...] = (), pools: Mapping[str, str] | None = None
) -> Snapshot:
    """Read the pages of a running deployment. Raises ClusterError when one does not answer."""
    pages = []
    for url in metrics_urls:
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
                pages.append(answer.read().decode())
        except (OSError, ValueError, http.client.HTTPException) as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()
            raise ClusterError(f"metrics page {url} does not answer ({error}); is the deployment still up?") from error
    return parse_snapshot(pages, replicas, pools or {})


def _label(name: str, labels: str | None) -> str | None:
    match = re.search(rf'[{{,]{name}="([^"]*)"', labels or "")
    return match[1] if match else None
