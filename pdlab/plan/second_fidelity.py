"""Simulate candidates of a plan again with vLLM's own scheduler and a simulated executor (`pdlab.sim.vllm_engine`)."""

from __future__ import annotations

from collections.abc import Sequence

from pdlab.core.errors import UsageError
from pdlab.core.rendering import rendered
from pdlab.plan import TEMPLATES
from pdlab.plan.planner import Candidate
from pdlab.plan.scenario import LoadResult, Scenario, Simulates
from pdlab.sim.vllm_engine import simulate_with_vllm


def comparison_with_vllm(
    scenario: Scenario, candidates: Sequence[Candidate], simulates: Simulates = simulate_with_vllm
) -> str:
    """The plan's figures at the best load of each candidate, beside those of vLLM's scheduler for the same requests.
    ``simulates``: the simulator with vLLM's scheduler."""
    found: list[tuple[str, LoadResult, LoadResult]] = []
    refused: list[tuple[str, UsageError]] = []
    for candidate in candidates:
        planned, label = candidate.best_or_nearest, candidate.deployment.label
        try:
            found.append((label, planned, scenario.again(simulates, candidate.deployment, planned)))
        except UsageError as error:
            refused.append((label, error))
    return rendered(TEMPLATES / "second_fidelity.txt", found=found, refused=refused)
