"""Whether roles that follow the load pay: a pool of engines with fixed P:D splits and with the controller. Pure.

The engines have the TP degree with the most requests/s by rate matching. All splits and the controller get the same
requests, with Poisson arrivals or as mixes that change with time. Goodput is the highest rate at which the SLO's share
of requests is within every bound. It is found by halving. The best split is found by a search uphill from the
rate-matched one.

The arrivals of a workload file are scaled in time. The pauses after answers stay as they are (`Trace.at_rate`). If
requests wait for others, their rate is that of the simulation.

Rates depend on the arrivals. So the controller and the fixed splits that may be the best are simulated with the
arrivals of three seeds.

The beginning, in which the controller learns, is left out: a round of mixes, 25 s of other workloads, the first tenth
of a trace (`Scenario.replayed`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from pdlab.core.catalog import ModelShape
from pdlab.core.deployment import Deployment, Fluid, Pool
from pdlab.core.errors import UsageError
from pdlab.core.mixes import Mixes
from pdlab.core.workload import Level, Slo, Workload
from pdlab.plan.candidates import engine_shapes
from pdlab.plan.rate_matching import RateMatcher
from pdlab.plan.scenario import LoadResult, Scenario
from pdlab.results.slo import stresses
from pdlab.roles.spec import AUTO
from pdlab.sim.hardware import Hardware
from pdlab.sim.kv_transfer import LinkKind
from pdlab.sim.level import SimulatedLevel, columns
from pdlab.sim.simulator import simulate

FILLS_S, HOLDS_S = 25.0, 60.0  # of a workload whose mix does not change: time that is left out, time that is judged
CLOSE = 1.02  # the search for goodput ends if two rates differ by this factor
HIGHEST = 1.5  # the first rate that is taken as too high, times the matched rate
AT_ONCE_S = 0.01  # sessions that begin within this time begin at once
SEEDS = 3  # whose arrivals are compared
MAY_BE_BEST = 1.1  # a fixed split within this factor of the best one may be the best with other arrivals
FAR = 2  # neighbours in each direction that a split must beat to be the best


class MatchedSplit(NamedTuple):
    """The best fixed split of a pool by rate matching, and its requests/s."""

    prefill: int
    rps: float


class ServedRate(NamedTuple):
    """Requests/s within the SLO of one setting of the roles. ``roles``: ``auto``, or a fixed split such as ``3:5``.
    ``speed``: of a trace, times its own (None: no trace). ``hit_share``: of a trace, the share of its prompt tokens
    from caches."""

    roles: str
    rps: float
    speed: float | None = None
    hit_share: float = 0.0


class FluidPlan(NamedTuple):
    """The goodput of a pool with the arrivals of the scenario's seed. ``fixed``: that of the simulated splits, best
    first. ``auto``: that of the controller. ``moves``: the mix of requests changes with time. ``gains``: the
    controller's rate over that of the best fixed split, with the arrivals of each seed (see `gain_over`)."""

    deployment: Deployment
    fixed: tuple[ServedRate, ...]
    auto: ServedRate
    moves: bool
    gains: tuple[float, ...]


def gain_over(fixed: Sequence[ServedRate], auto: ServedRate) -> float:
    """The controller's rate over that of the best fixed split; 1: no gain; infinite: no fixed split keeps the SLO, and
    the controller does; NaN: none does."""
    best = max(each.rps for each in fixed)
    return auto.rps / best if best else math.inf if auto.rps else math.nan


def matched(
    hardware: Hardware, shape: ModelShape, workload: Workload, pool: Pool, slo: Slo, prefix_hit_rate: float = 0.0
) -> MatchedSplit:
    """The best split of the pool without queues. For mixes, it is that of the mix with the lowest rate."""
    if isinstance(workload.lengths, Mixes):
        splits = []
        for mix in workload.lengths.mixes:
            of_mix = Workload(input_tokens=mix.input_tokens, output_tokens=mix.output_tokens)
            best_of_mix = matched(hardware, shape, of_mix, pool, slo, prefix_hit_rate)
            splits.append(MatchedSplit(best_of_mix.prefill, best_of_mix.rps / mix.rate))
        return min(splits, key=lambda split: split.rps)
    matcher = RateMatcher(hardware, shape, workload, prefix_hit_rate, slo.ttft_s)
    link: LinkKind = "nvlink" if pool.gpus <= hardware.gpus_per_node else "srd"
    rates = matcher.rates(pool.one_replica, pool.one_replica, slo.tpot_s or float("inf"), link)

    def served(prefill: int) -> float:
        return min(prefill * rates.prefill_rps, (pool.replicas - prefill) * rates.decode_rps)

    best = max(range(1, pool.replicas), key=served)
    return MatchedSplit(best, served(best))


def share_within(simulated: SimulatedLevel, slo: Slo, from_s: float) -> float:
    """The share of the requests that are within every bound, among those that arrive from ``from_s`` on."""
    requests = columns(simulated)
    judged = requests.arrival_s >= from_s
    return float((stresses(requests, slo)[judged] <= 1).mean()) if judged.any() else 0.0


def hill_climb(value: Callable[[int], float], begin: int, engines: int, step: int = 1) -> int:
    """The number of prefill engines with the highest ``value``, by a search uphill. ``engines``: the number of engines.
    ``step``: the difference of neighbours. The result is at least as good as `FAR` neighbours in each direction."""
    best = begin
    while True:
        near = [prefill for prefill in range(best - FAR * step, best + FAR * step + 1, step) if 1 <= prefill < engines]
        better = max(near, key=value)
        if value(better) <= value(best):
            return best
        best = better


def most_rps(share: Callable[[float], float], quantile: float, near_rps: float) -> float:
    """The highest rate whose ``share`` is at least the quantile, by halving; 0 if there is none. ``near_rps``: an
    estimate of that rate."""
    low, high = 0.0, HIGHEST * near_rps
    while high > CLOSE * low and high > near_rps / 100:
        rate_rps = (low + high) / 2
        low, high = (rate_rps, high) if share(rate_rps) >= quantile else (low, rate_rps)
    return low


def fluid_plan(
    scenario: Scenario,
    model: str,
    gpus: int,
    on_progress: Callable[[int, int, str], None] = lambda done, of, label: None,
) -> FluidPlan:
    """Simulate the pool with the controller and with fixed splits. With the arrivals of further seeds, only those fixed
    splits are simulated that may be the best. Where the pool is extrapolated, which leaves no verdict, one seed is
    enough. ``on_progress``: see `pdlab.plan.planner.plan`.
    Raises UsageError for fewer than two engines, or without an SLO on TTFT and TPOT."""
    if scenario.slo.ttft_s is None or scenario.slo.tpot_s is None:
        raise UsageError("--fluid compares requests/s within bounds: give --slo-ttft-ms and --slo-tpot-ms")
    trace = scenario.trace
    shapes = engine_shapes(scenario.hardware.of_pd(), scenario.shape, gpus, scenario.longest)
    pools = [
        pool.model_copy(update={"replicas": gpus // pool.gpus})
        for pool in shapes
        if pool.pp == pool.dp == 1 and gpus // pool.gpus >= 2
    ]
    if not pools:
        raise UsageError(f"--fluid needs two engines of one TP degree, which {gpus} GPUs do not hold: give more --gpus")
    begins = {
        pool: matched(
            scenario.hardware, scenario.shape, scenario.workload, pool, scenario.slo, scenario.prefix_hit_rate
        )
        for pool in pools
    }
    pool = max(pools, key=lambda pool: begins[pool].rps)
    begin, near_rps = begins[pool]
    lengths = scenario.workload.lengths
    moving = lengths if isinstance(lengths, Mixes) else None
    fills_s = moving.round_s if moving and len(moving.mixes) > 1 else FILLS_S
    seconds = fills_s + (moving.whole_s if moving else HOLDS_S)
    simulations = 0

    def topology(roles: str) -> Fluid:
        return Fluid(pool=pool, roles=roles, slo_ttft_s=scenario.slo.ttft_s, slo_tpot_s=scenario.slo.tpot_s)

    def served(roles: str, scenario: Scenario = scenario) -> ServedRate:
        deployment = Deployment(model=model, topology=topology(roles))
        tried: dict[float, LoadResult] = {}

        def share(rate_rps: float) -> float:
            nonlocal simulations
            on_progress(simulations, simulations + 1, deployment.label)
            simulations += 1
            if trace is not None:
                tried[rate_rps] = scenario.replayed(deployment, rate_rps)
                return float(tried[rate_rps].meets)
            load = scenario.at_rate(rate_rps)
            requests = max(round(scenario.workload.mean_requests(load, seconds)), 20)
            level = Level(load=load, num_requests=requests, seed=scenario.seed)
            (done,) = simulate(
                deployment,
                [level],
                scenario.workload,
                scenario.hardware,
                scenario.shape,
                seed=scenario.seed,
                prefix_hit_rate=scenario.prefix_hit_rate,
                scattered=scenario.scattered,
            )
            return share_within(done, scenario.slo, fills_s)

        if trace is None:
            return ServedRate(roles, most_rps(share, scenario.slo.quantile, near_rps))
        # The matched rate assumes one large cache, and requests that do not wait for others.
        near = near_rps
        while near and share(rate_rps := HIGHEST * near) >= scenario.slo.quantile:
            if max(trace.arrival_s) * trace.rate_rps < AT_ONCE_S * rate_rps:
                raise UsageError(
                    f"--fluid: {gpus} GPUs keep the SLO even if all sessions of this workload begin at once, so that "
                    "no highest rate is found; give fewer --gpus, or more sessions"
                )
            near *= 2
        best = tried.get(most_rps(share, scenario.slo.quantile, near))
        if best is None:
            return ServedRate(roles, 0.0)
        came_s = best.level.arrival_s
        rps = (len(came_s) - 1) / (max(came_s) - min(came_s))
        return ServedRate(roles, rps, best.load.value / trace.rate_rps, best.level.hit_share)

    splits: dict[int, ServedRate] = {}

    @cache
    def of_split(prefill: int) -> float:
        splits[prefill] = served(f"{prefill}:{pool.replicas - prefill}")
        return splits[prefill].rps

    hill_climb(of_split, begin, pool.replicas)
    fixed = sorted(splits.values(), key=lambda each: -each.rps)
    auto, deployment = served(AUTO), Deployment(model=model, topology=topology(AUTO))
    gains = [gain_over(fixed, auto)]
    may_be_best = [each.roles for each in fixed if each.rps * MAY_BE_BEST >= fixed[0].rps]
    for seed in range(scenario.seed + 1, scenario.seed + SEEDS) if not scenario.outside(deployment) else ():
        under = replace(scenario, seed=seed)
        gains.append(gain_over([served(roles, under) for roles in may_be_best], served(AUTO, under)))
    return FluidPlan(deployment, tuple(fixed), auto, moving is not None, tuple(gains))
