"""Goodput under Poisson arrivals (DistServe, Zhong et al., OSDI 2024): the highest rate at which the SLO's share of
requests is within every bound and no more arrive than are served. What a closed loop reaches is another figure: it
waits for the server, and so never sees a burst."""

from __future__ import annotations

import math
from typing import NamedTuple

from pdlab.analysis.goodput_map import RateLevel, RateSweep, ShareAtRate, crossing
from pdlab.core.deployment import Deployment
from pdlab.plan.scenario import LoadResult, Scenario, crossing_share

RATES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5)  # of a map, times what closed loops reached
BEGIN = 0.9  # of the closed loop's capacity: Poisson arrivals mostly reach 0.7 to 1.0 of it
LEAST_STEP, MOST_STEP = 1.06, 1.6
TRIES, CLOSE = 10, 1.05
PAST = 0.02  # in the logarithm of the worst latency over its bound: aimed at from above, a rate should meet
LEAST_SLOPE = 0.5  # of that logarithm over the rate's: two rates that chance made alike do not send the search far away
ENOUGH = 0.02  # above the quantile: no nearer than chance makes it


class Goodput(NamedTuple):
    """Of one copy in requests/s, 0 where not even the lowest rate tried meets the SLO; and the levels simulated for it,
    by rate."""

    rps: float
    levels: tuple[LoadResult, ...]


def goodput(scenario: Scenario, deployment: Deployment, capacity_rps: float, stays_s: float) -> Goodput:
    """Search for the highest rate that meets the SLO.

    From a little below what its closed loop reached, by the distance of the SLO's quantile from the bounds, until a
    rate meets the SLO by little, or one that meets it is within 5 % of one that misses it or of the most that is
    served. ``stays_s``: how long a request stays, about.
    """
    quantile = scenario.slo.quantile

    def piled_up(level: LoadResult) -> bool:
        """Its latencies are good and more requests come than are served."""
        return not level.meets and level.good_share >= quantile

    tried: dict[float, LoadResult] = {}
    low: LoadResult | None = None
    high: LoadResult | None = None
    rate_rps = BEGIN * capacity_rps
    while len(tried) < TRIES:
        before = high
        outcome = tried[rate_rps] = scenario.outcome(deployment, scenario.at_rate(rate_rps), stays_s)
        low, high = (outcome, high) if outcome.meets else (low, outcome)
        if outcome.meets and outcome.good_share <= quantile + ENOUGH:
            break
        if low and high:
            most_rps = min(high.load.value, high.requests_per_s) if piled_up(high) else high.load.value
            if most_rps <= CLOSE * low.load.value:
                break
            rate_rps = _between(low, high, most_rps)
        else:
            # Latencies grow slowly at first: by the square where there is room.
            far = max(outcome.stress, 1e-9) ** -2 if outcome.meets else _far_down(before, outcome)
            # A tail that is there at every load falls slowly with the rate: after three steps down they widen.
            least = LEAST_STEP if outcome.meets else LEAST_STEP ** max(len(tried) - 2, 1)
            step = min(max(far, least), MOST_STEP)
            rate_rps *= step if outcome.meets else 1 / step
    levels = tuple(tried[rate] for rate in sorted(tried))
    # Just above what is served a queue grows too slowly to show in one run: no more than at a rate at which it does.
    served_rps = [level.requests_per_s for level in levels if piled_up(level)]
    most_rps, _ = crossing([ShareAtRate(level.load.value, level.good_share) for level in levels], quantile)
    return Goodput(min([most_rps, *served_rps]), levels)


def _far_down(before: LoadResult | None, outcome: LoadResult) -> float:
    """The factor from a rate that misses down to one that meets: straight in logarithms through the rate tried before,
    and a little farther; without one, or where chance turned the two around, as if latencies grew with the rate."""
    if before is None or not before.stress > outcome.stress > 1:
        return outcome.stress
    slope = math.log(before.stress / outcome.stress) / math.log(before.load.value / outcome.load.value)
    return float(math.exp((math.log(outcome.stress) + PAST) / max(slope, LEAST_SLOPE)))


def _between(low: LoadResult, high: LoadResult, most_rps: float) -> float:
    """A rate between one that meets and one that misses: where the worst latencies pass the bounds, straight in
    logarithms, or what is served at most; no nearer to either than a quarter of the way."""
    part = 0.5
    if low.stress < 1 < high.stress:
        part = crossing_share(low.stress, high.stress)
    elif most_rps < high.load.value:
        part = math.log(most_rps / low.load.value) / math.log(high.load.value / low.load.value)
    return float(low.load.value * (high.load.value / low.load.value) ** min(max(part, 0.25), 0.75))


def under_rates(scenario: Scenario, deployment: Deployment, most_rps: float, gpus: float) -> RateSweep:
    """One copy, counted as so many GPUs, over a ladder of request rates, for the goodput map. ``most_rps``: the most of
    any closed loop."""
    outcomes = [scenario.outcome(deployment, scenario.at_rate(share * most_rps)) for share in RATES]
    return RateSweep(
        label=deployment.label,
        origin="simulated",
        gpus=gpus,
        output_tokens=scenario.workload.mean_tokens.output,
        levels=tuple(map(_rate_level, outcomes)),
    )


def _rate_level(outcome: LoadResult) -> RateLevel:
    ttft_s, tpot_s, _ = outcome.columns
    return RateLevel(outcome.load.value, ttft_s, tpot_s)
