"""Goodput under Poisson arrivals (DistServe, Zhong et al., OSDI 2024).

Goodput is the highest rate at which the SLO's share of requests is within every bound, and no queue grows. The capacity
of a closed loop is another figure: its clients wait for the server, so it has no bursts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from pdlab.analysis.goodput_map import RateLevel, RateSweep, ShareAtRate, crossing
from pdlab.core.deployment import Deployment
from pdlab.plan.scenario import LoadResult, Scenario, crossing_share

MAP_RATES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5)  # times the rate of the closed loop
BEGIN = 0.85  # of the closed loop's capacity: goodput is mostly 0.7 to 1.0 of it
# Median difference of a goodput from its mean over ten seeds: benchmarks/plan_confirmed.py --scatter. Of 240 goodputs
# 90 % differ by 9 % or less, and by 11 % as normal errors with this median. Kinds of deployment hardly differ.
CHANCE_PERCENT = 4.5
# The same of the SLO's quantile of TPOT and of TTFT at the mean goodput, where the SLO bounds them. 90 % differ by 6 %
# and by 11 % or less.
CHANCE_AT_RATE_PERCENT = (2.5, 4.5)
LEAST_STEP, MOST_STEP = 1.06, 1.6  # factors between two rates
MOST_RATES, CLOSE = 10, 1.05  # rates that are simulated; factor between a rate that meets and one that misses
# Of the line through two rates that miss, in the logarithms of stress and rate:
PAST = 0.02  # the search aims at a stress below 1 by this logarithm
LEAST_SLOPE = 0.5  # two rates whose stress is alike by chance do not send the search far away
ENOUGH = 0.02  # a share of good requests is near the quantile: nearer shares differ only by chance


class Goodput(NamedTuple):
    """The goodput of one copy in requests/s; 0 if the lowest simulated rate misses the SLO. ``levels``: the simulated
    rates, in ascending order."""

    rps: float
    levels: tuple[LoadResult, ...]


def goodput(scenario: Scenario, deployment: Deployment, capacity_rps: float, stays_s: float) -> Goodput:
    """Search for the highest rate that meets the SLO.

    The search begins a little below the closed loop's capacity. Its steps follow the stress of the last rate. It ends
    if a rate meets the SLO by little. It also ends if a rate that meets the SLO is within 5 % of a rate that misses it,
    or of the highest served rate.

    ``capacity_rps``: of one copy in a closed loop. ``stays_s``: approximate E2EL of a request. Raises UsageError if a
    request does not fit.
    """
    quantile = scenario.slo.quantile

    def queue_grows(level: LoadResult) -> bool:
        """Whether latencies are within the bounds, and more requests arrive than are served."""
        return not level.meets and level.good_share >= quantile

    tried: dict[float, LoadResult] = {}
    low: LoadResult | None = None
    high: LoadResult | None = None
    rate_rps = BEGIN * capacity_rps
    while len(tried) < MOST_RATES:
        before = high
        outcome = tried[rate_rps] = scenario.outcome(deployment, scenario.at_rate(rate_rps), stays_s)
        low, high = (outcome, high) if outcome.meets else (low, outcome)
        if outcome.meets and outcome.good_share <= quantile + ENOUGH:
            break
        if low and high:
            most_rps = min(high.load.value, high.requests_per_s) if queue_grows(high) else high.load.value
            if most_rps <= CLOSE * low.load.value:
                break
            rate_rps = _between(low, high, most_rps)
        else:
            # Far below the bounds latencies grow slowly with the rate, so the step is the square of the distance.
            far = max(outcome.stress, 1e-9) ** -2 if outcome.meets else _factor_down(before, outcome)
            # A tail that every load has falls slowly with the rate, so steps down widen after the third.
            least = LEAST_STEP if outcome.meets else LEAST_STEP ** max(len(tried) - 2, 1)
            step = min(max(far, least), MOST_STEP)
            rate_rps *= step if outcome.meets else 1 / step
    levels = tuple(tried[rate] for rate in sorted(tried))
    # Just above the served rate a queue grows too slowly for one run. So goodput is at most the requests/s of a rate at
    # which the queue visibly grows.
    served_rps = [level.requests_per_s for level in levels if queue_grows(level)]
    most_rps, _ = crossing([ShareAtRate(level.load.value, level.good_share) for level in levels], quantile)
    return Goodput(min([most_rps, *served_rps]), levels)


def _factor_down(before: LoadResult | None, outcome: LoadResult) -> float:
    """The factor from a rate that misses the SLO down to a rate that may meet it. It follows the line through
    ``before``, an earlier rate that missed, in logarithms, and goes a little farther. Without such a rate, or if its
    stress is lower by chance, latencies are taken as proportional to the rate."""
    if before is None or not before.stress > outcome.stress > 1:
        return outcome.stress
    slope = math.log(before.stress / outcome.stress) / math.log(before.load.value / outcome.load.value)
    return float(math.exp((math.log(outcome.stress) + PAST) / max(slope, LEAST_SLOPE)))


def _between(low: LoadResult, high: LoadResult, most_rps: float) -> float:
    """A rate between ``low``, which meets the SLO, and ``high``, which misses it. It is the rate at which stress passes
    1, on a line in logarithms; or ``most_rps``, the highest served rate. It is at least a quarter of the way from
    both."""
    part = 0.5
    if low.stress < 1 < high.stress:
        part = crossing_share(low.stress, high.stress)
    elif most_rps < high.load.value:
        part = math.log(most_rps / low.load.value) / math.log(high.load.value / low.load.value)
    return float(low.load.value * (high.load.value / low.load.value) ** min(max(part, 0.25), 0.75))


def under_rates(
    scenario: Scenario,
    deployment: Deployment,
    most_rps: float,
    gpus: float,
    stays_s: float = 0.0,
    searched: Sequence[LoadResult] = (),
) -> RateSweep:
    """One copy under growing request rates, for the goodput map. ``most_rps``: the highest requests/s of its closed
    loops. ``gpus``: the counted GPUs of one copy. ``stays_s``: approximate E2EL of a request. ``searched``: the levels
    of its goodput's search, which are in the map too."""
    outcomes = [scenario.outcome(deployment, scenario.at_rate(share * most_rps), stays_s) for share in MAP_RATES]
    return RateSweep(
        label=deployment.label,
        origin="simulated",
        gpus=gpus,
        output_tokens=scenario.workload.mean_tokens.output,
        levels=tuple(map(_rate_level, [*outcomes, *searched])),
    )


def _rate_level(outcome: LoadResult) -> RateLevel:
    ttft_s, tpot_s, _ = outcome.columns
    behind_rps = None if outcome.keeps_up else outcome.requests_per_s
    return RateLevel(outcome.load.value, ttft_s, tpot_s, behind_rps=behind_rps)
