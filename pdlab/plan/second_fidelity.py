"""Candidates of a plan once more, by vLLM's own scheduler with a simulated executor (`pdlab.sim.vllm_engine`)."""

from __future__ import annotations

from collections.abc import Sequence

from pdlab.core.errors import UsageError
from pdlab.core.text import table
from pdlab.plan.planner import Candidate
from pdlab.plan.scene import LoadResult, Scene, Simulates
from pdlab.sim.vllm_engine import simulate_with_vllm


def beside(scene: Scene, candidates: Sequence[Candidate], simulates: Simulates = simulate_with_vllm) -> str:
    """The best load of each candidate: what the plan found, and what vLLM's scheduler makes of the same requests."""
    rows, refused = [], []
    for candidate in candidates:
        planned = candidate.best_or_nearest
        try:
            again = scene.again(simulates, candidate.deployment, planned)
        except UsageError as error:
            refused.append(f"{candidate.deployment.label}: {error}")
            continue
        load = f"{planned.load.value:.3g}" + ("/s" if planned.load.kind == "rate" else "")
        rows.append(
            [candidate.deployment.label, load, *map(" / ".join, zip(_cells(planned), _cells(again), strict=True))]
        )
    lines = [
        "Planned / by vLLM's own scheduler with the same step times and transfers (simulated, one run each: of "
        "several replicas the routers choose otherwise, and shares differ by some percent by chance):"
    ]
    if rows:
        lines.append(
            table(["deployment", "load", "req/s", "TTFT ms", "TPOT ms", "in SLO", "meets it"], rows, left=(0,))
        )
    return "\n".join([*lines, *refused])


def _cells(result: LoadResult) -> list[str]:
    return [
        f"{result.requests_per_s:.2f}",
        f"{1e3 * result.ttft_s:.0f}",
        f"{1e3 * result.tpot_s:.2f}",
        f"{result.good_share:.1%}",
        "yes" if result.meets else "no",
    ]
