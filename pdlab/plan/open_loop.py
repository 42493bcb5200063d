"""Candidates of a plan under Poisson arrivals, for the goodput map: what a closed loop reaches is another figure."""

from __future__ import annotations

from pdlab.analysis.goodput_map import RateLevel, Served
from pdlab.core.workload import Level, Open
from pdlab.plan.planner import Candidate, Scene
from pdlab.sim.level import columns
from pdlab.sim.simulator import simulate

# Of the most that any closed loop reached: up to rates that no bound of a map is met at.
RATES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5)
SECONDS, LEAST, MOST = 90.0, 600, 4000
FILLING, DRAINING = 0.2, 0.1  # shares of a level's requests that are left out


def under_rates(scene: Scene, candidate: Candidate) -> Served:
    """One copy of the candidate over a ladder of request rates."""
    import numpy as np

    most_rps = max(outcome.requests_per_s for outcome in candidate.outcomes)
    levels: list[RateLevel] = []
    for share in RATES:
        rate_rps = share * most_rps
        count = round(min(max(SECONDS * rate_rps, LEAST), MOST))
        level = Level(load=Open(rate_rps=rate_rps, burstiness=scene.burstiness), num_requests=count, seed=scene.seed)
        (done,) = simulate(
            candidate.deployment,
            [level],
            scene.workload,
            scene.hardware,
            scene.shape,
            seed=scene.seed,
            prefix_hit_rate=scene.prefix_hit_rate,
            scattered=scene.scattered,
        )
        found = columns(done).part(slice(round(FILLING * count), count - round(DRAINING * count)))
        ttft_s = found.first_token_s - found.arrival_s
        tokens = found.output_tokens
        tpot_s = np.where(tokens > 1, (found.finish_s - found.first_token_s) / np.maximum(tokens - 1, 1), np.nan)
        levels.append(RateLevel(rate_rps, ttft_s, tpot_s))
    return Served(
        label=candidate.deployment.label,
        origin="simulated",
        gpus=candidate.total_gpus / candidate.copies,
        output_tokens=scene.workload.mean_tokens[1],
        levels=tuple(levels),
    )
