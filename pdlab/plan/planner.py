"""Model + GPUs + workload + SLO -> feasible deployments, simulated and ranked. Pure, no Ray.

1. **Enumerate and rate-match** (`pdlab.plan.candidates`, `pdlab.plan.rate_matching`): what fits, and which of
   these are worth a simulation.
2. **Simulate** each over a ladder of loads around the one that rate matching gives, until the SLO is clearly missed;
   or at the requested loads. For a requested rate: the fewest copies that serve it.
3. **Rank** by goodput per GPU: requests/s that meet every bound of the SLO, of the load at which most do while
   their share is at least the quantile. The best ones are simulated again near the load where they cross it.
4. **Compare** with collocated: the gain in goodput, and the interval that the errors of the model allow.

KV pools are simulated as they are after some minutes: wrapped, with free blocks that lie apart. What that costs a PD
pack of equal TP was seen with one version of vLLM alone; those are simulated a second time without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from pdlab.analysis.curves import Count
from pdlab.core.catalog import ModelShape
from pdlab.core.deployment import Collocated, Deployment, PlacementKind
from pdlab.core.nodes import ClusterView
from pdlab.core.workload import Closed, Latencies, Level, Open, Slo, Workload
from pdlab.placement.copies import copies_of, whole_node_gpus
from pdlab.plan.candidates import Sized, engine_shapes, shortlist
from pdlab.plan.rate_matching import Matcher, unit_of
from pdlab.plan.scattered_blocks import ScatteredBlocks
from pdlab.results.slo import within
from pdlab.sim.engine import MAX_SEQUENCES
from pdlab.sim.hardware import TO_90, UNKNOWN_ERROR, FitError, Hardware
from pdlab.sim.kv_transfer import link_of, transfer_costs
from pdlab.sim.level import SimulatedLevel, Trace
from pdlab.sim.simulator import simulate

LADDER = (0.1, 0.25, 0.5, 0.75, 1.0, 1.25)  # of the requests in flight that rate matching gives
CLOSE, REFINEMENTS = 1.1, 4  # loads on both sides of the SLO are near enough; else so many more between them
EXTENSION, EXTENSIONS = 1.4, 4  # further steps while the SLO is met and throughput still grows
CLEARLY_MISSED = 1.3  # times the bound
MORE = 1.02  # throughput that counts as more
WAVES, LATER_WAVES, FIRST_REQUESTS, LEAST_REQUESTS = 6, 3, 96, 48
OPEN_SECONDS, LEAST_OPEN, MOST_OPEN = 60, 200, 2000


@dataclass(frozen=True, slots=True)
class LoadResult:
    """One load on one copy, without its first wave. ``stress`` is the SLO's quantile of worst latency over bound."""

    load: Closed | Open
    requests_per_s: float
    output_tokens_per_s: float
    ttft_s: float
    tpot_s: float
    good_share: float
    stress: float
    bottleneck: str
    latencies: tuple[Latencies, ...]
    level: SimulatedLevel

    @property
    def goodput_rps(self) -> float:
        return self.requests_per_s * self.good_share


@dataclass(frozen=True, slots=True)
class Candidate:
    """One deployment with what one copy does at every load. ``copies`` of it are counted as ``total_gpus``
    (`Scene.counted_gpus`)."""

    deployment: Deployment
    copies: int
    outcomes: tuple[LoadResult, ...]
    best: LoadResult | None  # the load of most goodput among those that meet the SLO; None when none does
    total_gpus: float

    @property
    def goodput_per_gpu(self) -> float:
        """Requests/s within the SLO per GPU counted; 0 when no load meets it."""
        return self.best.goodput_rps * self.copies / self.total_gpus if self.best else 0.0

    @property
    def best_or_nearest(self) -> LoadResult:
        """The best load, or the one that misses the SLO by least."""
        return self.best or min(self.outcomes, key=lambda o: o.stress)

    @property
    def collocated(self) -> bool:
        return isinstance(self.deployment.topology, Collocated)


@dataclass(frozen=True, slots=True)
class Plan:
    """Result of `plan`: candidates best first, and the number of possible units."""

    candidates: tuple[Candidate, ...]
    possible: int
    slo: Slo
    rate_rps: float | None
    other: tuple[Candidate, ...] = ()
    """The candidates that depend on whether scattered blocks are copied one by one, each under the other assumption
    than `Scene.scattered`; best first."""

    def best_candidate(self, *, collocated: bool) -> Candidate | None:
        """The best collocated or the best PD candidate."""
        return next((c for c in self.candidates if c.collocated is collocated), None)


@dataclass(frozen=True, slots=True)
class Scene:
    """What every simulation of a plan has in common. A ``trace`` is the load of an open loop, at its own rate;
    ``workload`` then has its mean lengths. ``scattered``: scattered blocks of a wrapped KV pool are copied one by one;
    False: they merge all the same. ``count``: the GPUs of whole nodes, or those used, as the plots of measurements
    count them."""

    hardware: Hardware
    shape: ModelShape
    workload: Workload
    slo: Slo
    prefix_hit_rate: float = 0.0
    seed: int = 0
    burstiness: float = 1.0
    trace: Trace | None = None
    scattered: bool = True
    blocks: ScatteredBlocks | None = None
    """What scattered blocks cost where that was measured; ``hardware`` has it then, and no case is open."""
    count: Count = "nodes"

    def counted_gpus(self, deployment: Deployment, copies: int, gpus: int) -> float:
        """By what the throughput of all copies is divided: what they use, or the GPUs of the whole nodes that they take
        (`whole_node_gpus`), no more than the nodes that are planned for."""
        used = copies * deployment.gpus
        if self.count == "used" or self.hardware.cpu:
            return used
        node = self.hardware.gpus_per_node
        return max(used, min(copies * whole_node_gpus(deployment, node), -(-gpus // node) * node))

    @property
    def longest(self) -> Workload:
        """The requests of which an engine must be able to hold the longest."""
        if self.trace is None:
            return self.workload
        return Workload(input_tokens=self.trace.longest[0], output_tokens=self.trace.longest[1])

    def depends(self, deployment: Deployment) -> bool:
        """Whether it matters to this deployment if scattered blocks are copied one by one."""
        topology = deployment.topology
        if isinstance(topology, Collocated) or self.blocks is not None:
            return False
        return transfer_costs(self.hardware, self.shape, topology, link_of(deployment)).depend_on_age

    def outcome(self, deployment: Deployment, load: Closed | Open) -> LoadResult:
        """Simulate one copy under one load. Raises UsageError when a request does not fit."""
        trace = None
        if isinstance(load, Open) and self.trace is not None:
            trace = self.trace.part(max(round(self.trace.rate_rps / load.rate_rps), 1))
            count, skipped = len(trace.arrival_s), len(trace.arrival_s) // 10
        elif isinstance(load, Closed):
            n = load.concurrency
            count, skipped = max(min(WAVES * n, LATER_WAVES * n + FIRST_REQUESTS), LEAST_REQUESTS), n
        else:
            count = min(max(int(OPEN_SECONDS * load.rate_rps), LEAST_OPEN), MOST_OPEN)
            skipped = count // 10
        level = Level(load=load, num_requests=count, seed=self.seed)
        simulated = simulate(
            deployment,
            [level],
            self.workload,
            self.hardware,
            self.shape,
            seed=self.seed,
            prefix_hit_rate=self.prefix_hit_rate,
            trace=trace,
            scattered=self.scattered,
        )[0]
        latencies = tuple(
            (
                simulated.first_token_s[i] - simulated.arrival_s[i],
                (simulated.finish_s[i] - simulated.first_token_s[i]) / max(simulated.output_tokens[i] - 1, 1),
                simulated.finish_s[i] - simulated.arrival_s[i],
            )
            for i in range(min(skipped, count - 1), count)
        )
        within_slo = sum(within(self.slo, *request_latencies) for request_latencies in latencies)
        per_s = _throughput(simulated, skipped)
        return LoadResult(
            load=load,
            requests_per_s=per_s,
            output_tokens_per_s=per_s * self.workload.mean_tokens[1],
            ttft_s=sum(request_latencies[0] for request_latencies in latencies) / len(latencies),
            tpot_s=sum(request_latencies[1] for request_latencies in latencies) / len(latencies),
            good_share=within_slo / len(latencies),
            stress=self.slo.stress_of(latencies),
            bottleneck=bottleneck(simulated),
            latencies=latencies,
            level=simulated,
        )


def _throughput(simulated: SimulatedLevel, skipped: int) -> float:
    """Requests/s between the end of the first wave and the last arrival: neither ramp nor drain.

    In an open loop the rate of arrivals times the share of them that left again, for the rate drawn
    in one short window differs from the requested rate by chance.
    """
    closed = isinstance(simulated.level.load, Closed)
    opens_s = sorted(simulated.finish_s)[skipped - 1] if closed else simulated.arrival_s[skipped]
    closes_s = max(simulated.arrival_s)
    inside = sum(opens_s < moment <= closes_s for moment in simulated.finish_s)
    if closes_s <= opens_s or inside < LEAST_REQUESTS // 4:
        return len(simulated.finish_s) / simulated.duration_s
    load = simulated.level.load
    return (
        inside / (closes_s - opens_s) if closed else load.value * min(inside / (len(simulated.finish_s) - skipped), 1.0)
    )


def bottleneck(level: SimulatedLevel) -> str:
    """What limits: KV memory that prompts wait for, the link, prefill or decode; by their share of the time."""
    if level.kv_full > 0.05:
        return "KV memory"
    if level.link_busy > 0.8:
        return "link"
    if "collocated" in level.busy:
        computing = sum(level.prefill_end_s) - sum(level.prefill_start_s)
        living = sum(level.finish_s) - sum(level.arrival_s)
        return "prefill" if computing > 0.5 * living else "decode"
    return "prefill" if level.busy["prefill"] > 0.85 else "decode"


def ladder(scene: Scene, sized: Sized) -> tuple[LoadResult, ...]:
    """One copy under growing load, until the SLO is clearly missed or more load brings no more throughput.

    Rate matching ignores queues: if the lowest load that it suggests misses the SLO, lower ones are tried.
    """
    outcomes: list[LoadResult] = []
    groups = {role: pool.tp_groups for role, pool in sized.deployment.pools.items()}
    # Beyond what the engines take into a batch, more load is a longer queue and nothing else.
    most = float(MAX_SEQUENCES * groups.get("decode", sum(groups.values())))
    start = min(sized.in_flight or float(sum(groups.values())), most)
    factors = [*LADDER, *(LADDER[-1] * EXTENSION**n for n in range(1, EXTENSIONS + 1))]
    for number in dict.fromkeys(max(round(factor * start), 1) for factor in factors):
        beyond = len(outcomes) > 1 and number > LADDER[-1] * start
        if beyond and outcomes[-1].requests_per_s < MORE * outcomes[-2].requests_per_s:
            break
        outcomes.append(scene.outcome(sized.deployment, Closed(concurrency=number)))
        if outcomes[-1].stress > CLEARLY_MISSED:
            break
    lower = round(outcomes[0].load.value)
    while outcomes[0].stress > 1 and lower > 1:
        lower //= 2
        outcomes.insert(0, scene.outcome(sized.deployment, Closed(concurrency=lower)))
    return tuple(outcomes)


def _best(outcomes: Sequence[LoadResult], slo: Slo) -> LoadResult | None:
    """More load that only lengthens queues is no better: the lowest load within 2 % of the most goodput."""
    meeting = [outcome for outcome in outcomes if outcome.good_share >= slo.quantile]
    most = max((outcome.goodput_rps for outcome in meeting), default=0.0)
    return next((outcome for outcome in meeting if outcome.goodput_rps * MORE >= most), None)


def refine(scene: Scene, candidate: Candidate, *, halve: bool = False) -> Candidate:
    """The candidate with one more load, where it crosses the SLO by interpolation between its neighbours.

    ``halve``: at their geometric middle; interpolation alone may creep towards the crossing from one side.
    """
    for low, high in pairwise(candidate.outcomes):
        if low.stress > 1 or high.stress <= 1 or not isinstance(low.load, Closed):
            continue
        if high.load.value <= CLOSE * low.load.value:
            continue
        share = _crossing(low.stress, high.stress)
        # A little below, for the new load is to meet the SLO.
        number = int(low.load.value + 0.95 * min(share, 1.0) * (high.load.value - low.load.value))
        if halve:
            number = round(math.sqrt(low.load.value * high.load.value))
        if not low.load.value < number < high.load.value:
            continue
        extra = scene.outcome(candidate.deployment, Closed(concurrency=number))
        outcomes = tuple(sorted([*candidate.outcomes, extra], key=lambda o: o.load.value))
        return replace(candidate, outcomes=outcomes, best=_best(outcomes, scene.slo))
    return candidate


def _crossing(low: float, high: float) -> float:
    """Where between two loads stress passes 1, as a share of the way: straight in its logarithm."""
    low = max(low, 1e-9)
    return -math.log(low) / math.log(high / low)


def evaluate(
    scene: Scene,
    sized: Sized,
    gpus: int,
    *,
    concurrencies: Sequence[int] | None = None,
    rate_rps: float | None = None,
) -> Candidate:
    """Simulate one deployment over its ladder, or at the requested loads (of the whole, shared by the copies)."""
    deployment, copies = sized.deployment, sized.copies
    if rate_rps is not None:
        return _for_rate(scene, sized, gpus, rate_rps)
    if concurrencies:
        numbers = sorted({max(round(number / copies), 1) for number in concurrencies})
        outcomes = tuple(scene.outcome(deployment, Closed(concurrency=number)) for number in numbers)
    else:
        outcomes = ladder(scene, sized)
    total = scene.counted_gpus(deployment, copies, gpus)
    return Candidate(deployment, copies, outcomes, _best(outcomes, scene.slo), total)


def _for_rate(scene: Scene, sized: Sized, gpus: int, rate_rps: float) -> Candidate:
    """The fewest copies that serve the rate within the SLO; all copies if fewer do not."""
    copies = min(max(math.ceil(rate_rps / (1.15 * sized.matched_rps)), 1), sized.copies) if sized.matched_rps else 1

    def with_copies(count: int) -> Candidate:
        outcomes = (scene.outcome(sized.deployment, Open(rate_rps=rate_rps / count, burstiness=scene.burstiness)),)
        total = scene.counted_gpus(sized.deployment, count, gpus)
        return Candidate(sized.deployment, count, outcomes, _best(outcomes, scene.slo), total)

    candidate = with_copies(copies)
    while candidate.best is None and copies < sized.copies:
        copies += max(copies // 8, 1)
        copies = min(copies, sized.copies)
        candidate = with_copies(copies)
    return candidate


def plan(
    scene: Scene,
    model: str,
    view: ClusterView,
    gpus: int,
    *,
    placement: PlacementKind | None = None,
    concurrencies: Sequence[int] | None = None,
    rate_rps: float | None = None,
    on_progress: Callable[[int, int, str], None] = lambda done, of, label: None,
) -> Plan:
    """Enumerate, simulate, rank. Raises UsageError when the model does not fit the GPUs."""
    shapes = engine_shapes(scene.hardware, scene.shape, gpus, scene.longest)
    matcher = Matcher(scene.hardware, scene.shape, scene.workload, scene.prefix_hit_rate, scene.slo.ttft_s)
    chosen, possible = shortlist(matcher, model, view, gpus, shapes, scene.slo.tpot_s, placement)
    bounded = rate_rps is None and not concurrencies and scene.slo.bounded
    cases = [(scene, sized) for sized in chosen]
    otherwise = replace(scene, scattered=not scene.scattered)
    cases += [(otherwise, sized) for sized in chosen if scene.depends(sized.deployment)]
    steps = len(cases) * (1 + (REFINEMENTS if bounded else 0))
    candidates = []
    for number, (under, sized) in enumerate(cases):
        on_progress(number, steps, sized.deployment.label)
        candidates.append(evaluate(under, sized, gpus, concurrencies=concurrencies, rate_rps=rate_rps))
    if bounded:
        # All of them: a candidate that is not refined would rank below one that is.
        for step in range(REFINEMENTS):
            for number, candidate in enumerate(candidates):
                on_progress((step + 1) * len(cases) + number, steps, candidate.deployment.label)
                candidates[number] = refine(cases[number][0], candidate, halve=step % 2 == 1)
    ranked, other = (tuple(sorted(some, key=_order)) for some in (candidates[: len(chosen)], candidates[len(chosen) :]))
    return Plan(ranked, possible, scene.slo, rate_rps, other)


def _order(candidate: Candidate) -> tuple[float, float, int, str]:
    label = candidate.deployment.label
    if candidate.best is None:
        return 0.0, candidate.best_or_nearest.stress, candidate.deployment.gpus, label
    return -round(candidate.goodput_per_gpu, 6), candidate.best.stress, candidate.deployment.gpus, label


def sized_alone(
    scene: Scene, deployment: Deployment, view: ClusterView | None = None, gpus: int | None = None
) -> Sized:
    """A deployment as `shortlist` would return it; without a view, one copy that is not placed."""
    matcher = Matcher(scene.hardware, scene.shape, scene.workload, scene.prefix_hit_rate, scene.slo.ttft_s)
    rps, in_flight = matcher.serves(unit_of(deployment), scene.slo.tpot_s or math.inf)
    copies = copies_of(deployment, view, gpus or deployment.gpus) if view is not None else 1
    return Sized(deployment, copies, rps, in_flight)


# --- how sure -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gain:
    """Goodput per GPU over that of another candidate, minus 1; ``low`` to ``high`` holds it in 90 % of cases."""

    value: float
    low: float
    high: float


def gain(candidate: Candidate, baseline: Candidate, scene: Scene) -> Gain | None:
    """None where one of them does not meet the SLO.

    How far goodput moves when latencies are longer or shorter by the errors of the model (held-out medians,
    scaled to 90 % of cases), and the error of requests/s itself; those of the two deployments taken as
    independent and added in squares of logarithms. Errors that they share cancel, so this is rather wide.
    """
    if not (candidate.best and baseline.best):
        return None
    error = scene.hardware.error or UNKNOWN_ERROR
    value = math.log(candidate.goodput_per_gpu / baseline.goodput_per_gpu)
    down, up = _swing(candidate, scene, error)
    baseline_down, baseline_up = _swing(baseline, scene, error)
    rate = math.log1p(TO_90 * error.requests_per_s_percent / 100)
    low = value - math.sqrt(down**2 + baseline_up**2 + 2 * rate**2)
    high = value + math.sqrt(up**2 + baseline_down**2 + 2 * rate**2)
    return Gain(math.expm1(value), math.expm1(low), math.expm1(high))


def _swing(candidate: Candidate, scene: Scene, error: FitError) -> tuple[float, float]:
    """(fall, rise) of log goodput when latencies are longer, or shorter, than predicted."""
    tpot, ttft = (math.exp(TO_90 * percent / 100) for percent in (error.tpot_percent, error.ttft_percent))
    base = capacity(candidate.outcomes, scene.slo)
    falls, rises = [], []
    for factors in ((tpot, 1.0), (1.0, ttft)):
        longer = capacity(candidate.outcomes, scene.slo, *factors)
        shorter = capacity(candidate.outcomes, scene.slo, *(1 / factor for factor in factors))
        falls.append(math.log(base / longer) if longer > 0 else math.inf)
        rises.append(math.log(shorter / base))
    return math.hypot(*falls), math.hypot(*rises)


def capacity(outcomes: Sequence[LoadResult], slo: Slo, tpot: float = 1.0, ttft: float = 1.0) -> float:
    """Requests/s where load crosses the SLO, straight between simulated loads; latencies longer by factors.

    The most that any simulated load serves where all meet it; 0 where the lowest misses it.
    """
    capacity_rps, previous = 0.0, None
    for outcome in outcomes:
        stress = slo.stress_of(outcome.latencies, tpot, ttft) if (tpot, ttft) != (1.0, 1.0) else outcome.stress
        if stress <= 1:
            capacity_rps = max(capacity_rps, outcome.requests_per_s)
        elif previous is not None and previous[0] <= 1:
            share = _crossing(previous[0], stress)
            capacity_rps = max(capacity_rps, previous[1] + share * (outcome.requests_per_s - previous[1]))
        previous = (stress, outcome.requests_per_s)
    return capacity_rps
