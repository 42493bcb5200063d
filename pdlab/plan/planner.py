"""Model + GPUs + workload + SLO -> deployments that fit, simulated and ranked. Pure, no Ray.

1. **Enumerate and rate-match** (`pdlab.plan.candidates`, `pdlab.plan.rate_matching`): the deployments that fit, and
   those that are worth a simulation.
2. **Screen** each of these in a closed loop: over a ladder of loads around the load that rate matching gives, until
   the load clearly misses the SLO; or at the requested loads. For a requested rate: the fewest copies, or replicas of
   a collocated pool, that serve it.
3. **Confirm** the best ones by closed-loop capacity and matched rate, PD and collocated: their goodput under Poisson
   arrivals is searched (`pdlab.plan.open_loop`). The search for candidates ends when no closed loop is left that
   reaches more than the best goodput.
4. **Rank** the confirmed ones by goodput per GPU. The others are not ranked, because the capacity of a closed loop is
   another figure. If closed loops were requested, or no SLO was given, closed-loop capacities are ranked instead. For
   a requested rate the fewest GPUs rank first.
5. **Compare** with collocated: the gain, and the interval that the errors of the model allow.

KV pools are simulated as they are after some minutes: wrapped, with free blocks that lie apart. The cost of such blocks
for a PD pack of equal TP was seen with only one version of vLLM. Those deployments are simulated a second time, without
the cost.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from pdlab.core.deployment import Collocated, Deployment, PlacementKind, Pool
from pdlab.core.gpu_count import Count
from pdlab.core.nodes import ClusterView
from pdlab.core.workload import Closed, Slo
from pdlab.placement.copies import copies_of
from pdlab.plan import open_loop
from pdlab.plan.candidates import SizedDeployment, engine_shapes, fewest_copies, shortlist
from pdlab.plan.extrapolation import OutsideFit
from pdlab.plan.prediction_intervals import factors_90
from pdlab.plan.rate_matching import RateMatcher, unit_of
from pdlab.plan.scenario import LoadResult, Scenario, crossing_share
from pdlab.sim.engine import MAX_SEQUENCES
from pdlab.sim.hardware import TO_90, FitError
from pdlab.sim.kv_transfer import link_of

LADDER = (0.1, 0.25, 0.5, 0.75, 1.0, 1.25)  # of the requests in flight that rate matching gives
EXTENSION, EXTENSIONS = 1.4, 4  # further steps while the SLO is met and throughput still grows
CLEARLY_MISSED = 1.3  # times the bound
MORE = 1.02  # a throughput counts as higher from this factor on
# The numbers of candidates under Poisson arrivals: collocated ones by capacity; PD by capacity; PD by the product of
# capacity and matched rate; of either kind at most; and those whose scattered blocks are copied in the other way.
CONFIRMED_COLLOCATED, CONFIRMED_BY_CAPACITY, CONFIRMED_BY_BOTH, MOST_CONFIRMED, CONFIRMED_OTHERWISE = 4, 4, 2, 16, 4


@dataclass(frozen=True, slots=True)
class Candidate:
    """One deployment, with the simulated results of one copy at every load.

    ``copies`` of it are counted as ``total_gpus`` (`Scenario.counted_gpus`). ``outcomes``: the loads of a closed loop,
    or the requested rate. ``rates``: the loads of its Poisson arrivals. ``best``: the load that serves most within the
    SLO, of the kind of loop by which the candidate is ranked; None if no load meets the SLO. ``closed``: the same of
    the closed loop. ``capacity_rps``: requests/s within the SLO of one copy in a closed loop, between the simulated
    loads; None: not simulated. ``goodput_rps``: the same under Poisson arrivals. ``too_few``: of a candidate that meets
    the SLO at the requested rate, the next smaller number of copies or replicas, which misses it (None: there is none).
    """

    deployment: Deployment
    copies: int
    outcomes: tuple[LoadResult, ...]
    best: LoadResult | None
    total_gpus: float
    capacity_rps: float | None = None
    goodput_rps: float | None = None
    rates: tuple[LoadResult, ...] = ()
    closed: LoadResult | None = None
    too_few: Candidate | None = None

    @property
    def served_per_gpu(self) -> float:
        """Requests/s within the SLO per counted GPU, by the kind of loop of the rank; 0 if no load meets the SLO."""
        if self.goodput_rps is not None:
            return self._per_gpu(self.goodput_rps)
        return self._per_gpu(self.best.goodput_rps) if self.best else 0.0

    @property
    def capacity_per_gpu(self) -> float | None:
        """Requests/s within the SLO per counted GPU in a closed loop; None: not simulated."""
        return None if self.capacity_rps is None else self._per_gpu(self.capacity_rps)

    @property
    def shown_per_gpu(self) -> float:
        """Requests/s per counted GPU at the best load, or at the load that misses the SLO by least."""
        return self._per_gpu(self.best_or_nearest.requests_per_s)

    def _per_gpu(self, rps: float) -> float:
        return rps * self.copies / self.total_gpus

    @property
    def loop(self) -> Literal["open", "closed"]:
        """The kind of loop by which the candidate is ranked. Only candidates of one kind compare."""
        if self.goodput_rps is not None:
            return "open"
        return "closed" if isinstance(self.best_or_nearest.load, Closed) else "open"

    @property
    def best_or_nearest(self) -> LoadResult:
        """The best load, or the load that misses the SLO by least."""
        return self.best or min(self.rates or self.outcomes, key=lambda outcome: outcome.stress)

    @property
    def collocated(self) -> bool:
        return isinstance(self.deployment.topology, Collocated)


@dataclass(frozen=True, slots=True)
class Plan:
    """Result of `plan`: ranked candidates of one kind of loop, best first.

    ``possible``: the number of units that fit. ``rate_rps``: the requested rate. ``otherwise``: the candidates that
    depend on how scattered blocks are copied, each under the other assumption than `Scenario.scattered`, best first.
    ``screened``: candidates that were simulated only in a closed loop, highest capacity first; they have no rank.
    ``gpus``: the number of planned GPUs. ``unplaced``, ``why_unplaced``: see `pdlab.plan.candidates.Shortlist`.
    """

    candidates: tuple[Candidate, ...]
    possible: int
    slo: Slo
    rate_rps: float | None
    otherwise: tuple[Candidate, ...] = ()
    screened: tuple[Candidate, ...] = ()
    gpus: int = 0
    unplaced: int = 0
    why_unplaced: str = ""

    def first(self, scenario: Scenario, count: Count) -> Candidate:
        """The candidate that serves most per GPU, if GPUs are counted by ``count``."""
        counting = replace(scenario, count=count)

        def merit_of(candidate: Candidate) -> tuple[float, float]:
            filled = self.rate_rps is None
            counted = counting.counted_gpus(candidate.deployment, candidate.copies, self.gpus, filled=filled)
            return merit(candidate, self.rate_rps, counted)

        return max(self.candidates, key=merit_of)

    @property
    def loop(self) -> Literal["open", "closed"]:
        return self.candidates[0].loop

    def best_candidate(self, *, collocated: bool) -> Candidate | None:
        """The best collocated or the best PD candidate."""
        return next((each for each in self.candidates if each.collocated is collocated), None)


def merit(candidate: Candidate, rate_rps: float | None, counted_gpus: float) -> tuple[float, float]:
    """By which candidates are ranked, higher first: requests/s within the SLO per counted GPU. Of candidates for a
    requested rate, the one with the fewest GPUs is first, because all of them serve it. (0, 0): it misses the SLO."""
    per_gpu = candidate.served_per_gpu * candidate.total_gpus / counted_gpus
    if rate_rps is None or candidate.best is None:
        return per_gpu, 0.0
    return 1 / counted_gpus, per_gpu


def ladder(scenario: Scenario, sized: SizedDeployment) -> tuple[LoadResult, ...]:
    """Simulate one copy under growing load, until a load clearly misses the SLO, or throughput no longer grows. Rate
    matching ignores queues. If its lowest load misses the SLO, lower loads are simulated too."""
    outcomes: list[LoadResult] = []
    groups = {role: pool.tp_groups for role, pool in sized.deployment.pools.items()}
    # Beyond the largest batch of the engines, more load only lengthens the queue.
    most = float(MAX_SEQUENCES * groups.get("decode", sum(groups.values())))
    start = min(sized.in_flight or float(sum(groups.values())), most)
    factors = [*LADDER, *(LADDER[-1] * EXTENSION**n for n in range(1, EXTENSIONS + 1))]
    for number in dict.fromkeys(max(round(factor * start), 1) for factor in factors):
        beyond = len(outcomes) > 1 and number > LADDER[-1] * start
        if beyond and outcomes[-1].requests_per_s < MORE * outcomes[-2].requests_per_s:
            break
        outcomes.append(scenario.outcome(sized.deployment, Closed(concurrency=number)))
        if outcomes[-1].stress > CLEARLY_MISSED:
            break
    lower = round(outcomes[0].load.value)
    while outcomes[0].stress > 1 and lower > 1:
        lower //= 2
        outcomes.insert(0, scenario.outcome(sized.deployment, Closed(concurrency=lower)))
    return tuple(outcomes)


def _best(outcomes: Sequence[LoadResult]) -> LoadResult | None:
    """The lowest load within 2 % of the highest goodput, because more load only lengthens queues."""
    meeting = [outcome for outcome in outcomes if outcome.meets]
    most = max((outcome.goodput_rps for outcome in meeting), default=0.0)
    return next((outcome for outcome in meeting if outcome.goodput_rps * MORE >= most), None)


def evaluate(
    scenario: Scenario,
    sized: SizedDeployment,
    gpus: int | None,
    *,
    concurrencies: Sequence[int] | None = None,
    rate_rps: float | None = None,
) -> Candidate:
    """Simulate one deployment at the loads of its `ladder`, or at the given loads of all GPUs. ``gpus``: the number of
    planned GPUs of each type (None: those of the deployment alone). ``concurrencies``, ``rate_rps``: given loads.
    Raises UsageError if a request does not fit."""
    deployment, copies = sized.deployment, sized.copies
    if rate_rps is not None:
        return _for_rate(scenario, sized, gpus, rate_rps)
    if concurrencies:
        # Of all GPUs' requests in flight, those of the copy's GPUs: less is to be served where some GPUs are left over.
        share = 1.0 if gpus is None else deployment.gpus / scenario.planned_gpus(gpus)
        numbers = sorted({max(round(number * share), 1) for number in concurrencies})
        outcomes = tuple(scenario.outcome(deployment, Closed(concurrency=number), long=True) for number in numbers)
    else:
        outcomes = ladder(scenario, sized)
    best, total = _best(outcomes), scenario.counted_gpus(deployment, copies, gpus)
    return Candidate(deployment, copies, outcomes, best, total, capacity(outcomes, scenario.slo), closed=best)


def _for_rate(scenario: Scenario, sized: SizedDeployment, gpus: int | None, rate_rps: float) -> Candidate:
    """The fewest copies that serve the rate within the SLO, or the fewest replicas of a collocated deployment that may
    have other pools; all of them if even they miss it. More copies, or replicas, count as serving more. A prime number
    of replicas above two nodes has pools of one, which serve a little less than its neighbours."""
    topology = sized.deployment.topology
    pooled = sized.node_replicas > 0 and isinstance(topology, Collocated)
    most = sized.copies * (sized.deployment.pools["collocated"].replicas if pooled else 1)

    def with_number(number: int) -> Candidate:
        deployment, copies = sized.deployment, number
        if pooled:
            replicas = pool_replicas(number, sized.node_replicas)
            pool = deployment.pools["collocated"].model_copy(update={"replicas": replicas})
            deployment, copies = deployment.with_topology(pool=pool), number // replicas
        load = scenario.at_rate(rate_rps / copies)
        outcome = scenario.outcome(deployment, load)
        if outcome.meets and scenario.trace is None:  # in a level that is long for such requests it may fall behind
            outcome = scenario.outcome(deployment, load, statistics.fmean(outcome.columns[2].tolist()))
        total = scenario.counted_gpus(deployment, copies, gpus, filled=False)
        return Candidate(deployment, copies, (outcome,), _best([outcome]), total)

    number = min(fewest_copies(rate_rps, sized.replica_rps if pooled else sized.matched_rps), most)
    misses, serves = 0, most + 1
    found: Candidate | None = None
    too_few: Candidate | None = None
    while True:
        candidate = with_number(number)
        if candidate.best is not None:
            serves, found = number, candidate
        else:
            misses, too_few = number, candidate
        if serves - misses <= 1:
            return candidate if found is None else replace(found, too_few=too_few)
        step = max(number // 8, 1)
        if found is None:
            number = min(number + step, most)
        else:
            number = (misses + serves) // 2 if misses else max(number - step, 1)


def pool_replicas(number: int, node_replicas: int) -> int:
    """The replicas of each of the equal pools that have ``number`` replicas together. A pool fills a node if it can;
    else it is as large as can be, and smaller than two nodes."""
    if number % node_replicas == 0:
        return node_replicas
    return next(each for each in range(2 * node_replicas - 1, 0, -1) if number % each == 0)


def plan(
    scenario: Scenario,
    model: str,
    view: ClusterView,
    gpus: int,
    *,
    placement: PlacementKind | None = None,
    concurrencies: Sequence[int] | None = None,
    rate_rps: float | None = None,
    on_progress: Callable[[int, int, str], None] = lambda done, of, label: None,
) -> Plan:
    """Enumerate, simulate and rank deployments.

    ``view``: nodes for ``gpus`` GPUs. ``placement``: of PD deployments (None: pack if the deployment fits one node).
    ``concurrencies``, ``rate_rps``: the requested loads, over all GPUs. ``on_progress``: gets the number of finished
    simulations, the number of all, and the label of the next deployment. Raises UsageError if the model does not fit
    the GPUs.
    """
    shapes = engine_shapes(scenario.hardware, scenario.shape, gpus, scenario.longest)
    of_node: list[Pool] = []
    if rate_rps is not None and any(gpus < each.gpus_per_node for each in scenario.hardware.types):
        of_node = engine_shapes(scenario.hardware, scenario.shape, gpus, scenario.longest, whole_nodes=True)
    in_other_way = replace(scenario, scattered=not scenario.scattered)
    listed = partial(
        shortlist, matcher_of(scenario, placement), model, view, gpus, shapes, scenario.slo.tpot_s, rate_rps, of_node,
        otherwise=matcher_of(in_other_way, placement) if scenario.blocks is None else None,
        count=scenario.count,
    )  # fmt: skip
    short = listed()
    done: dict[tuple[bool, str], Candidate] = {}

    def simulated() -> tuple[list[SizedDeployment], list[tuple[Scenario, SizedDeployment]], list[Candidate]]:
        chosen = [replace(sized, deployment=scenario.with_offload(sized.deployment)) for sized in short.deployments]
        cases = [(scenario, sized) for sized in chosen]
        cases += [(in_other_way, sized) for sized in chosen if scenario.depends(sized.deployment)]
        for number, (under, sized) in enumerate(cases):
            key = (under is scenario, sized.deployment.model_dump_json())
            if key not in done:
                on_progress(number, 2 * len(cases), sized.deployment.label)
                done[key] = evaluate(under, sized, gpus, concurrencies=concurrencies, rate_rps=rate_rps)
        keys = [(under is scenario, sized.deployment.model_dump_json()) for under, sized in cases]
        return chosen, cases, [done[key] for key in keys]

    chosen, cases, candidates = simulated()
    if short.sizes_to:
        # Rate matching has no queues: what serves the rate may be larger than all that was looked at. A unit that
        # needs fewer GPUs than the found ones is smaller than these.
        most = min(
            (math.ceil(each.total_gpus) - 1 for each in candidates[: len(chosen)] if not each.collocated and each.best),
            default=gpus,
        )
        if most > short.sizes_to:
            short = listed(sizes_to=most)
            chosen, cases, candidates = simulated()
    steps = 2 * len(cases)
    assumed = range(len(chosen))
    confirmed = set(range(len(cases)))
    if rate_rps is None and not concurrencies and scenario.slo.bounded:
        confirmed.clear()
        per_gpu = [candidate.copies / candidate.total_gpus for candidate in candidates]
        matched = [sized.matched_rps * each for sized, each in zip(chosen, per_gpu, strict=False)]
        for number in _to_confirm(matched, candidates, assumed):
            on_progress(len(cases) + len(confirmed), steps, candidates[number].deployment.label)
            candidates[number] = under_poisson(cases[number][0], candidates[number])
            confirmed.add(number)
    ranked, in_other_case, screened = (
        tuple(sorted(some, key=partial(_rank_key, rate_rps=rate_rps)))
        for some in (
            [candidates[number] for number in assumed if number in confirmed],
            [candidates[number] for number in range(len(chosen), len(cases)) if number in confirmed],
            [candidates[number] for number in assumed if number not in confirmed],
        )
    )
    return Plan(
        ranked,
        short.units,
        scenario.slo,
        rate_rps,
        in_other_case,
        screened,
        gpus,
        unplaced=short.unplaced,
        why_unplaced=short.why_unplaced,
    )


def _to_confirm(matched_per_gpu: Sequence[float], candidates: list[Candidate], assumed: range) -> Iterator[int]:
    """The numbers of the candidates to simulate under Poisson arrivals, one after another. ``candidates`` gets the
    results of the earlier ones. The numbers in ``assumed`` are those of the candidates that are ranked; the other
    candidates are under the other assumption about scattered blocks."""
    per_gpu = [candidate.capacity_per_gpu or 0.0 for candidate in candidates]
    by_capacity = sorted(range(len(candidates)), key=lambda number: -per_gpu[number])
    # Equal requests of a closed loop may run in step, which rate matching ignores.
    by_both = sorted(assumed, key=lambda number: -per_gpu[number] * matched_per_gpu[number])
    confirmed: list[int] = []
    for collocated, count, more in ((True, CONFIRMED_COLLOCATED, 0), (False, CONFIRMED_BY_CAPACITY, CONFIRMED_BY_BOTH)):
        of_kind = [each for each in by_capacity if each in assumed and candidates[each].collocated is collocated]
        first = of_kind[:count]
        first += [each for each in by_both if candidates[each].collocated is collocated and each not in first][:more]
        most = 0.0
        for number in [*first, *(each for each in of_kind if each not in first)][:MOST_CONFIRMED]:
            if number not in first and per_gpu[number] <= most:
                break
            confirmed.append(number)
            yield number
            most = max(most, candidates[number].served_per_gpu)
    for number in [each for each in by_capacity if each not in assumed][:CONFIRMED_OTHERWISE]:
        yield number
        label = candidates[number].deployment.label
        yield from (each for each in assumed if each not in confirmed and candidates[each].deployment.label == label)


def under_poisson(scenario: Scenario, candidate: Candidate) -> Candidate:
    """The candidate with its goodput under Poisson arrivals, by which it is then ranked."""
    if candidate.closed is None or not candidate.capacity_rps:
        return replace(candidate, goodput_rps=0.0)
    stays_s = candidate.closed.load.value / candidate.closed.requests_per_s
    goodput_rps, rates = open_loop.goodput(scenario, candidate.deployment, candidate.capacity_rps, stays_s)
    meeting = [level for level in rates if level.meets]
    below = [level for level in meeting if level.load.value <= goodput_rps * MORE] or meeting[:1]
    return replace(candidate, goodput_rps=goodput_rps, rates=rates, best=below[-1] if below else None)


def _rank_key(candidate: Candidate, rate_rps: float | None) -> tuple[float, float, float, float, int, str]:
    label, shown = candidate.deployment.label, candidate.best_or_nearest
    if candidate.best is None:  # without bounds all are alike but for what they serve
        return 0.0, 0.0, shown.stress, -round(candidate.shown_per_gpu, 6), candidate.deployment.gpus, label
    first, second = merit(candidate, rate_rps, candidate.total_gpus)
    return -round(first, 6), -round(second, 6), shown.stress, 0.0, candidate.deployment.gpus, label


def sized_deployment(
    scenario: Scenario, deployment: Deployment, view: ClusterView | None = None, gpus: int | None = None
) -> SizedDeployment:
    """The deployment with its matched rate, as in a `shortlist`. ``view``: the nodes on which as many copies are placed
    as fit ``gpus`` (None: one copy, which is not placed)."""
    bound_s = scenario.slo.tpot_s or math.inf
    rps, in_flight = matcher_of(scenario).serves(unit_of(deployment), bound_s, link_of(deployment, same_node=True))
    copies = copies_of(deployment, view, gpus or deployment.gpus) if view is not None else 1
    return SizedDeployment(deployment, copies, rps, in_flight)


def matcher_of(scenario: Scenario, placement: PlacementKind | None = None) -> RateMatcher:
    """The rates of engines in the scenario. ``placement``: of units of P:D (None: pack if the unit fits a node)."""
    return RateMatcher(
        scenario.hardware,
        scenario.shape,
        scenario.workload,
        scenario.prefix_hit_rate,
        scenario.slo.ttft_s,
        sum(scenario.longest.longest),
        placement,
        scenario.scattered,
    )


# --- uncertainty --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ThroughputGain:
    """Served requests/s per GPU over those of another candidate, minus 1. ``interval``: its 90 % interval; None: one of
    the two candidates is extrapolated, so its error is unknown."""

    value: float
    interval: tuple[float, float] | None


def outside(candidate: Candidate, scenario: Scenario) -> tuple[OutsideFit, ...]:
    """The dimensions in which a candidate is extrapolated, at the load by which it is ranked."""
    return scenario.outside(candidate.deployment, candidate.best_or_nearest)


def gain(candidate: Candidate, baseline: Candidate, scenario: Scenario) -> ThroughputGain | None:
    """The gain of ``candidate`` over ``baseline``; None if one of them misses the SLO or falls behind the load.

    The interval has three parts: the change of closed-loop capacity if latencies are longer or shorter by the model's
    error (held-out medians, scaled to 90 % of cases); the error of requests/s; and the chance in a goodput, which the
    arrivals of its runs bring. The errors of the two candidates are taken as independent, and add in squares of
    logarithms. Shared errors cancel, so the interval is rather wide.
    Raises ValueError if one is of an open loop and the other of a closed loop.
    """
    if candidate.loop != baseline.loop:
        raise ValueError(f"{candidate.deployment.label} and {baseline.deployment.label} are of different loops")
    if not (candidate.best and candidate.served_per_gpu and baseline.best and baseline.served_per_gpu):
        return None
    value = math.log(candidate.served_per_gpu / baseline.served_per_gpu)
    error = scenario.hardware.error
    if error is None or outside(candidate, scenario) or outside(baseline, scenario):
        return ThroughputGain(math.expm1(value), None)
    down, up = _goodput_errors(candidate, scenario, error)
    baseline_down, baseline_up = _goodput_errors(baseline, scenario, error)
    searched = candidate.goodput_rps is not None
    parts = (error.requests_per_s_percent, open_loop.CHANCE_PERCENT if searched else 0.0)
    each = math.hypot(*(math.log1p(TO_90 * percent / 100) for percent in parts))
    low = value - math.sqrt(down**2 + baseline_up**2 + 2 * each**2)
    high = value + math.sqrt(up**2 + baseline_down**2 + 2 * each**2)
    return ThroughputGain(math.expm1(value), (math.expm1(low), math.expm1(high)))


def _goodput_errors(candidate: Candidate, scenario: Scenario, error: FitError) -> tuple[float, float]:
    """(fall, rise) of the logarithm of goodput, if latencies are longer or shorter than predicted."""
    tpot, ttft = factors_90(error)
    base = capacity(candidate.outcomes, scenario.slo)
    falls, rises = [], []
    for factors in ((tpot, 1.0), (1.0, ttft)):
        longer = capacity(candidate.outcomes, scenario.slo, *factors)
        shorter = capacity(candidate.outcomes, scenario.slo, *(1 / factor for factor in factors))
        falls.append(math.log(base / longer) if longer > 0 else math.inf)
        rises.append(math.log(shorter / base))
    return math.hypot(*falls), math.hypot(*rises)


def capacity(outcomes: Sequence[LoadResult], slo: Slo, tpot: float = 1.0, ttft: float = 1.0) -> float:
    """Requests/s at which growing load begins to miss the SLO, linear between simulated loads. If all loads meet the
    SLO: the highest requests/s of any load. If the lowest load misses it: 0. ``tpot``, ``ttft``: factors on these
    latencies."""
    capacity_rps, previous = 0.0, None
    for outcome in outcomes:
        stress = slo.stress_of(outcome.columns, tpot, ttft) if (tpot, ttft) != (1.0, 1.0) else outcome.stress
        if stress <= 1:
            capacity_rps = max(capacity_rps, outcome.requests_per_s)
        elif previous is not None and previous[0] <= 1:
            share = crossing_share(previous[0], stress)
            capacity_rps = max(capacity_rps, previous[1] + share * (outcome.requests_per_s - previous[1]))
        previous = (stress, outcome.requests_per_s)
    return capacity_rps
