#!/usr/bin/env python3
"""Where routing sends follow-ups, and what that is worth: one seeded workload of conversations, sent to collocated, PD
and fluid deployments of this machine's CPUs under each policy.

    python benchmarks/routing_policies.py --out DIR

Every row is one launch and one replay: no interval. *Predicted* are the hits by vLLM's rules, of the engines that
served the requests, or their bounds (docs/traffic.md). What DIR has is not measured again.
"""

from __future__ import annotations

import sys
from typing import Any

from measured_replays import Replayed, main, milliseconds, percent, predicted

CONVERSATIONS = {
    "seed": 7,
    "conversations": {
        "rate_rps": 0.6,
        "sessions": 24,
        "turns": 5,
        "user_tokens": "250 lognormal:0.6",
        "answer_tokens": "24 lognormal:0.4",
        "think_s": "1.5 lognormal:0.5",
        "most_tokens": 6000,
    },
    "tenants": {"a": {"share": 0.7, "system_tokens": 768}, "b": {"share": 0.3, "system_tokens": 256}},
}
POLICIES = ("round-robin", "power-of-two", "session")
DEPLOYMENTS: list[dict[str, Any]] = [
    *({"name": f"collocated-{each}", "label": "collocated-2xtp1", "routing": each} for each in POLICIES),
    *({"name": f"pd-2p1d-{each}", "label": "pd-spread-p2xtp1-d1xtp1", "p_routing": each} for each in POLICIES),
    {"name": "fluid-2p1d-least-loaded", "label": "pd-fluid-3xtp1-p2d1"},
    {"name": "fluid-2p1d-prefix-affinity", "label": "pd-fluid-3xtp1-p2d1", "prefix_affinity": True},
]


def follow_ups(row: Replayed) -> str:
    """TTFT p50 of first turns, and of the others, which wait longer as they grow."""
    turns = list(row.facts.by_turn.values())
    return " / ".join(milliseconds(each.ttft.p50_s if each.ttft else None) for each in (turns[0], turns[-1]))


def ttft(row: Replayed, name: str) -> str:
    found = row.run.whole.ttft
    return milliseconds(found.percentiles_s[name] if found else None)


COLUMNS = {
    "deployment, routing": lambda row: row.configuration,
    "hits": lambda row: percent(row.facts.hit_share),
    "predicted": predicted,
    "TTFT p50, ms": lambda row: ttft(row, "p50"),
    "p90": lambda row: ttft(row, "p90"),
    "p50 of turn 1 / last": follow_ups,
    "TPOT p50, ms": lambda row: milliseconds(
        row.run.whole.tpot.percentiles_s["p50"] if row.run.whole.tpot else None, 1
    ),
    "requests": lambda row: f"{row.facts.answered} of {row.facts.requests}",
}

if __name__ == "__main__":
    sys.exit(main(str(__doc__), "routing-policies", DEPLOYMENTS, {"conversations": CONVERSATIONS}, COLUMNS))
