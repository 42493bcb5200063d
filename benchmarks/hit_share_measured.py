#!/usr/bin/env python3
"""What a cached beginning of the prompt is worth to collocated and to PD, measured on this machine's CPUs: prompts of
equal length, of which a growing share is a system prompt of one of several tenants.

    python benchmarks/hit_share_measured.py --out DIR

Of the last three deployments each engine's pool is too small for the tenants' prompts; one of them keeps what it
evicts in host memory (--kv-offload-gb). Every row is one launch and one replay: no interval. What DIR has is not
measured again.
"""

from __future__ import annotations

import sys
from typing import Any

from measured_replays import Replayed, main, milliseconds, percent, predicted

PROMPT, TENANTS = 1536, 6
SHARES = (0, 25, 50, 75, 90)
SMALL_POOL = {"kv_cache_memory_bytes": 20_000_000}
EVICTED = ("shared-50", "shared-90")  # what is measured with small pools


def workload(share: int) -> dict[str, object]:
    """Single requests whose first ``share`` percent are a tenant's system prompt."""
    system_tokens = PROMPT * share // 100
    tenants = {f"t{number}": {"share": 1, "system_tokens": system_tokens} for number in range(TENANTS)}
    requests = {
        "rate_rps": 4,
        "sessions": 80,
        "turns": 1,
        "user_tokens": PROMPT - system_tokens,
        "answer_tokens": "24 lognormal:0.4",
        "think_s": 0,
    }
    return {"seed": 11, "conversations": requests, "tenants": tenants}


DEPLOYMENTS: list[dict[str, Any]] = [
    {"name": "collocated", "label": "collocated-2xtp1"},
    {"name": "pd", "label": "pd-spread-p1xtp1-d1xtp1"},
    {"name": "collocated-small", "label": "collocated-2xtp1", "engine_arg": SMALL_POOL, "workloads": EVICTED},
    {"name": "pd-small", "label": "pd-spread-p1xtp1-d1xtp1", "engine_arg": SMALL_POOL, "workloads": EVICTED},
    {
        "name": "pd-small-offload",
        "label": "pd-spread-p1xtp1-d1xtp1",
        "engine_arg": SMALL_POOL,
        "kv_offload_gb": 0.5,
        "workloads": EVICTED,
    },
]


def by_hit(row: Replayed) -> str:
    """TTFT p50 of requests of which some was cached, and of the others."""
    found = row.facts.by_hit
    both = (found.hit.ttft, found.miss.ttft) if found else (None, None)
    return " / ".join(milliseconds(each.p50_s if each else None) for each in both)


COLUMNS = {
    "deployment": lambda row: row.configuration,
    "shared": lambda row: f"{row.workload.removeprefix('shared-')} %",
    "hits": lambda row: percent(row.facts.hit_share),
    "predicted": predicted,
    "TTFT p50, ms": lambda row: milliseconds(row.run.whole.ttft.percentiles_s["p50"] if row.run.whole.ttft else None),
    "p50 of hits / misses": by_hit,
    "TPOT p50, ms": lambda row: milliseconds(
        row.run.whole.tpot.percentiles_s["p50"] if row.run.whole.tpot else None, 1
    ),
    "output tokens/s": lambda row: f"{row.run.whole.output_tokens_per_s:.0f}",
}

if __name__ == "__main__":
    workloads = {f"shared-{share}": workload(share) for share in SHARES}
    sys.exit(main(str(__doc__), "hit-share-measured", DEPLOYMENTS, workloads, COLUMNS))
