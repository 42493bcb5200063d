"""The facts of the planner's outputs: the ranking with its verdict, the plan of a fluid pool, the phases of E2EL.

The templates of this folder print the facts. Other code compares the code of a verdict, not its text.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pdlab.analysis.regimes import Regime, ThroughputCurve, ThroughputPoint, stretches
from pdlab.core.command_lines import command_line, flag_words
from pdlab.core.commands import typed
from pdlab.core.deployment import Disaggregated, Pool
from pdlab.core.findings import Finding, found
from pdlab.core.gpu_count import Count, other_count
from pdlab.core.nodes import ClusterView
from pdlab.core.rendering import rendered
from pdlab.core.text import rounded
from pdlab.core.workload import Load, Open, Slo
from pdlab.plan import TEMPLATES
from pdlab.plan.candidates import MOST_REPLICAS
from pdlab.plan.engine_arguments import by_hand, planned_words
from pdlab.plan.extrapolation import OutsideFit
from pdlab.plan.fluid_pools import FluidPlan, ServedRate
from pdlab.plan.open_loop import CHANCE_AT_RATE_PERCENT
from pdlab.plan.planner import Candidate, Plan, ThroughputGain, gain, matcher_of, merit, outside
from pdlab.plan.prediction_intervals import LatencyFactors, factors_90
from pdlab.plan.rate_matching import Rates
from pdlab.plan.scattered_blocks import check_line
from pdlab.plan.scenario import LoadResult, Scenario, judged
from pdlab.results.slo import bounds_text
from pdlab.sim.hardware import FitError
from pdlab.sim.kv_transfer import link_of

ROWS = 12  # of the ranking
FIXED_SHOWN = 5  # fixed splits of a fluid pool in the output
WORTH_IT, AS_GOOD = 1.1, 1.03  # the controller's rate over that of the best fixed split
MEASURED_AT = 0.8  # rate to measure at, as a share of the rate within the SLO
BLOCK_ROWS = 5  # of the table about scattered blocks
LONG_TTFT_S = 1.0
MATCHED_ROWS = 4  # pairs of TP degrees in the check by rate matching

VerdictCode = Literal[
    "extrapolated",
    "no_slo_met",
    "pd_does_not_fit",
    "pd_misses_slo",
    "ttft_unbounded",
    "only_pd_meets_slo",
    "pays",
    "does_not_pay",
    "unclear",
    "fewer_gpus",
    "more_gpus",
    "same_gpus",
]
FluidCode = Literal["no_split_keeps_slo", "worth_it", "fixed_is_better", "as_good", "gains_little", "unclear"]


class SizedForRate(NamedTuple):
    """A candidate for the requested rate. ``sure``: see `surely_meets`."""

    candidate: Candidate
    sure: bool


class MissedBound(NamedTuple):
    """The bound that a load misses by most: ``value_s`` is the SLO's quantile of the latency ``metric``."""

    metric: str
    value_s: float
    bound_s: float


class OtherCase(NamedTuple):
    """The ranking if scattered blocks are copied in the other way: ``merged``, or else one by one. ``first``: the best
    candidate then. ``planned_first``: the plan's best candidate, under the same assumption."""

    first: Candidate
    planned_first: Candidate
    merged: bool


@dataclass(frozen=True)
class PlanVerdict:
    """Whether PD pays, with the numbers behind it.

    ``first``: the best candidate. ``split``, ``base``: the best PD and the best collocated candidate. ``sides``: these
    two, if a rate was requested. ``extrapolated``: the candidate that is extrapolated; ``outside``: in which
    dimensions. ``nearest``: the candidate that misses the SLO by least, if all miss it; ``missed``: the bound that it
    misses (None: it misses no bound alone). ``in_doubt``: a candidate that misses the SLO by less than the model's
    errors, if the verdict depends on whether it misses it. ``barely``: the best candidate of the only kind that meets
    the SLO, if no candidate of this kind `surely_meets` it.
    """

    code: VerdictCode
    slo: str
    quantile: float
    loop: Literal["open", "closed"]
    first: Candidate
    split: Candidate | None = None
    base: Candidate | None = None
    rate_rps: float | None = None
    gain: ThroughputGain | None = None
    sides: tuple[SizedForRate, ...] = ()
    extrapolated: Candidate | None = None
    outside: tuple[OutsideFit, ...] = ()
    nearest: Candidate | None = None
    missed: MissedBound | None = None
    in_doubt: Candidate | None = None
    barely: Candidate | None = None
    otherwise: OtherCase | None = None


class RankedRow(NamedTuple):
    """A row of the ranking. ``output_tokens_per_s``: per `Scenario.throughput_unit`. ``gain``: over the best collocated
    candidate. ``experimental``: prefill TP is above decode TP. ``depends``: its figures depend on how scattered blocks
    are copied."""

    number: int
    candidate: Candidate
    output_tokens_per_s: float
    gain: ThroughputGain | None
    outside: tuple[OutsideFit, ...]
    experimental: bool
    depends: bool


class BothCases(NamedTuple):
    """One deployment with scattered blocks copied one by one, and merged."""

    copied: Candidate
    copied_gain: ThroughputGain | None
    merged: Candidate
    merged_gain: ThroughputGain | None


class RegimeMap(NamedTuple):
    """The best deployment by throughput. ``inside``: there is a map, because the model's errors are known and some
    candidate is not extrapolated. ``tolerance``: relative difference of TPOT within the model's error. ``left_out``:
    number of extrapolated candidates."""

    inside: bool
    tolerance: float = 0.0
    left_out: int = 0
    regimes: tuple[Regime, ...] = ()


class MatchedPair(NamedTuple):
    """The rates of one prefill and one decode replica, and the numbers of both in the best simulated candidate."""

    prefill: Pool
    decode: Pool
    rates: Rates
    prefills: int
    decodes: int


@dataclass(frozen=True)
class Ranking:
    """The facts of a ranking. ``nodes``: number and type of the nodes. ``best_screened``: the best candidate that was
    simulated only in a closed loop. ``other_first``: the first candidate if GPUs are counted in the other way; None:
    the same one. ``queues_s``: the longest mean TTFT, if it is long and has no bound; else 0."""

    plan: Plan
    scenario: Scenario
    nodes: str
    rows: tuple[RankedRow, ...]
    verdict: PlanVerdict
    best_screened: Candidate | None
    other_first: Candidate | None
    queues_s: float
    both_cases: tuple[BothCases, ...]
    map: RegimeMap | None
    matched: tuple[MatchedPair, ...]
    most_replicas: int = MOST_REPLICAS

    @property
    def check(self) -> str:
        """The command line that measures scattered KV blocks of the model."""
        return check_line(self.scenario.shape, json_file="blocks.json")

    @property
    def ranked(self) -> tuple[Candidate, ...]:
        return self.plan.candidates[:ROWS]

    @property
    def two_loops(self) -> bool:
        """Whether closed loops and Poisson arrivals were simulated."""
        return self.plan.candidates[0].goodput_rps is not None

    @property
    def shares_of_closed(self) -> tuple[float, float] | None:
        """The lowest and the highest goodput as a share of the same row's closed-loop capacity; None: no row has
        both."""
        shares = [
            each.served_per_gpu / each.capacity_per_gpu
            for each in (row.candidate for row in self.rows)
            if each.best and each.capacity_per_gpu
        ]
        return (min(shares), max(shares)) if shares else None

    @property
    def extrapolates(self) -> bool:
        return any(row.outside for row in self.rows)

    @property
    def falls_behind(self) -> bool:
        """Whether a shown load is more than a deployment serves, although its requests are within the SLO."""
        shown = [row.candidate.best_or_nearest for row in self.rows if row.candidate.best is None]
        return any(not each.keeps_up and each.stress <= 1 for each in shown)

    @property
    def misses_slo(self) -> bool:
        """Whether a ranked deployment misses the SLO at every simulated load."""
        return any(each.best is None and each.best_or_nearest.stress > 1 for each in self.ranked)

    @property
    def experimental(self) -> bool:
        return any(experimental(candidate, self.scenario) for candidate in self.ranked)

    @property
    def outside(self) -> tuple[OutsideFit, ...]:
        return self.scenario.outside()

    @property
    def idle_gpus(self) -> bool:
        return any(each.total_gpus > each.copies * each.deployment.gpus for each in self.ranked)

    @property
    def other_count(self) -> Count:
        return other_count(self.scenario.count)

    @property
    def screened_may_win(self) -> bool:
        """Whether a screened candidate's capacity is above the first one's goodput."""
        best = self.best_screened
        return best is not None and (best.capacity_per_gpu or 0.0) > self.plan.candidates[0].served_per_gpu


def ranking(plan: Plan, scenario: Scenario, view: ClusterView) -> Ranking:
    """The facts of the ranked table, the verdict on PD, the regime map and the rate-matching check."""
    base = plan.best_candidate(collocated=True)
    shown = list(enumerate(plan.candidates[:ROWS], start=1))
    if base is not None and base not in plan.candidates[:ROWS]:
        shown.append((plan.candidates.index(base) + 1, base))
    waits_s = max((each.best.ttft_s for each in plan.candidates[:ROWS] if each.best), default=0.0)
    unbounded = scenario.slo.bounded and ttft_unbounded(scenario.slo)
    queues = unbounded and plan.rate_rps is None and waits_s > LONG_TTFT_S
    return Ranking(
        plan=plan,
        scenario=scenario,
        nodes=view.name,
        rows=tuple(_row(number, candidate, base, scenario) for number, candidate in shown),
        verdict=verdict(plan, scenario),
        best_screened=max(
            plan.screened, key=lambda each: (each.capacity_per_gpu or 0.0, each.deployment.label), default=None
        ),
        other_first=other_first(plan, scenario),
        queues_s=waits_s if queues else 0.0,
        both_cases=tuple(_both_cases(plan, scenario, base)) if scenario.blocks is None else (),
        map=regime_map(plan, scenario) if has_regime_map(plan, scenario) else None,
        matched=tuple(_matched(plan, scenario)),
    )


def ranking_text(plan: Plan, scenario: Scenario, view: ClusterView) -> str:
    """The printed ranking."""
    return rendered(TEMPLATES / "ranking.txt", r=ranking(plan, scenario, view))


def _row(number: int, candidate: Candidate, base: Candidate | None, scenario: Scenario) -> RankedRow:
    scale = candidate.copies * scenario.throughput_gpus / candidate.total_gpus
    over = None if base is None or candidate.collocated else gain(candidate, base, scenario)
    return RankedRow(
        number,
        candidate,
        candidate.best_or_nearest.output_tokens_per_s * scale,
        over,
        outside(candidate, scenario),
        experimental(candidate, scenario),
        scenario.depends(candidate.deployment),
    )


def experimental(candidate: Candidate, scenario: Scenario) -> bool:
    """Whether the engines are vLLM's and prefill TP is above decode TP, which is experimental in vLLM."""
    topology = candidate.deployment.topology
    return (
        scenario.hardware.engine == "vllm"
        and isinstance(topology, Disaggregated)
        and topology.prefill.tp > topology.decode.tp
    )


def other_first(plan: Plan, scenario: Scenario) -> Candidate | None:
    """The first candidate if GPUs are counted in the other way; None if it serves nothing, or is the same one."""
    first = plan.first(scenario, other_count(scenario.count))
    same = first.deployment == plan.first(scenario, scenario.count).deployment
    return None if same or not first.served_per_gpu else first


def _both_cases(plan: Plan, scenario: Scenario, base: Candidate | None) -> list[BothCases]:
    by_label = {candidate.deployment.label: candidate for candidate in plan.candidates}
    cases = []
    for in_other_case in plan.otherwise[:BLOCK_ROWS]:
        copied, merged = by_label[in_other_case.deployment.label], in_other_case
        if not scenario.scattered:
            copied, merged = merged, copied
        gains = [gain(each, base, scenario) if base is not None else None for each in (copied, merged)]
        cases.append(BothCases(copied, gains[0], merged, gains[1]))
    return cases


def _other_case(plan: Plan, scenario: Scenario) -> OtherCase | None:
    """The first candidate if scattered blocks are copied in the other way; None if it is the same one."""
    first, label = plan.candidates[0], plan.candidates[0].deployment.label
    otherwise = {candidate.deployment.label: candidate for candidate in plan.otherwise}
    rest = [candidate for candidate in plan.candidates if candidate.deployment.label not in otherwise]
    best = max([*plan.otherwise, *rest], key=lambda each: merit(each, plan.rate_rps, each.total_gpus))
    if not best.best or not first.best or best.deployment.label == label:
        return None
    return OtherCase(best, otherwise.get(label, first), merged=scenario.scattered)


def missed_bound(result: LoadResult, slo: Slo) -> MissedBound | None:
    """The bound that the load misses by most; None if the SLO's share of requests is within each bound by itself."""
    latencies = zip(("TTFT", "TPOT", "E2EL"), result.columns, (slo.ttft_s, slo.tpot_s, slo.e2el_s), strict=True)
    values = [MissedBound(name, slo.at_quantile(each), bound_s) for name, each, bound_s in latencies if bound_s]
    missed = [each for each in values if each.value_s > each.bound_s]
    return max(missed, key=lambda each: each.value_s / each.bound_s, default=None)


def ttft_unbounded(slo: Slo) -> bool:
    return slo.ttft_s is None and slo.e2el_s is None


def slo_text(slo: Slo) -> str:
    return bounds_text(slo) if slo.bounded else "none, so goodput is throughput"


def verdict(plan: Plan, scenario: Scenario) -> PlanVerdict:
    """Whether PD pays, by how much, with its interval, and whether that depends on how scattered blocks are copied.
    There is no winner if TTFT has no bound, or if one of the two candidates is extrapolated."""
    base, split = (plan.best_candidate(collocated=each) for each in (True, False))

    def with_code(
        code: VerdictCode,
        advantage: ThroughputGain | None = None,
        sides: tuple[SizedForRate, ...] = (),
        extrapolated: Candidate | None = None,
        nearest: Candidate | None = None,
        in_doubt: Candidate | None = None,
        barely: Candidate | None = None,
    ) -> PlanVerdict:
        no_winner = code == "extrapolated" or ttft_unbounded(plan.slo)
        compares = not no_winner and not any(outside(candidate, scenario) for candidate in plan.otherwise)
        return PlanVerdict(
            code=code,
            slo=slo_text(plan.slo),
            quantile=plan.slo.quantile,
            loop=plan.loop,
            first=plan.candidates[0],
            split=split,
            base=base,
            rate_rps=plan.rate_rps,
            gain=advantage,
            sides=sides,
            extrapolated=extrapolated,
            outside=outside(extrapolated, scenario) if extrapolated is not None else (),
            nearest=nearest,
            missed=missed_bound(nearest.best_or_nearest, plan.slo) if nearest is not None else None,
            in_doubt=in_doubt,
            barely=barely,
            otherwise=_other_case(plan, scenario) if compares else None,
        )

    shows_both = ttft_unbounded(plan.slo) and split is not None and split.best is not None
    none_meets = not any(candidate.best for candidate in plan.candidates)
    nearest = min(plan.candidates, key=lambda each: each.best_or_nearest.stress) if none_meets else None
    for candidate in (base, split):
        if candidate is not None and not shows_both and (beyond := outside(candidate, scenario)):
            # Requests that queue up at the requested rate leave the loads of the fit; more of them wait, not fewer.
            if none_meets and plan.rate_rps is not None and all(each.dimension == "load" for each in beyond):
                continue
            return with_code("extrapolated", extrapolated=candidate, nearest=nearest)
    if none_meets:
        return with_code("no_slo_met", nearest=nearest, in_doubt=_nearly(plan.candidates, scenario))
    if split is None:
        return with_code("pd_does_not_fit")
    of_pd, bases = ([each for each in plan.candidates if each.collocated is collocated] for collocated in (False, True))
    if split.best is None:
        return with_code("pd_misses_slo", in_doubt=_nearly(of_pd, scenario), barely=_barely(bases, scenario))
    if ttft_unbounded(plan.slo):
        return with_code("ttft_unbounded")
    if base is None or base.best is None:
        return with_code("only_pd_meets_slo", in_doubt=_nearly(bases, scenario), barely=_barely(of_pd, scenario))
    if plan.rate_rps is not None:
        sides = (_sized_for_rate(split, scenario), _sized_for_rate(base, scenario))
        fewer, more = split.total_gpus < base.total_gpus, split.total_gpus > base.total_gpus
        code: VerdictCode = "fewer_gpus" if fewer else "more_gpus" if more else "same_gpus"
        wins, loses = (of_pd, bases) if fewer else (bases, of_pd)
        surely = min((each.total_gpus for each in wins if surely_meets(each, scenario)), default=math.inf)
        rival = _fewest_gpus(loses, scenario)
        if surely < rival.total_gpus or (code == "same_gpus" and surely == rival.total_gpus):
            return with_code(code, sides=sides)
        return with_code("unclear", sides=sides, in_doubt=rival if rival.best is None else None)
    advantage = gain(split, base, scenario)
    assert advantage is not None and advantage.interval is not None, "neither is extrapolated"
    low, high = advantage.interval
    return with_code("pays" if low > 0 else "does_not_pay" if high < 0 else "unclear", advantage)


def _nearly(candidates: Sequence[Candidate], scenario: Scenario) -> Candidate | None:
    """The candidate that misses the SLO by least, if shorter latencies within the model's errors would meet it."""
    nearest = min(candidates, key=lambda each: each.best_or_nearest.stress, default=None)
    return nearest if nearest is not None and _nearly_meets(nearest, scenario) else None


def _nearly_meets(candidate: Candidate, scenario: Scenario) -> bool:
    """Whether the candidate misses the SLO, and shorter latencies within the model's errors, and the chance of Poisson
    arrivals, would meet it."""
    error, nearest = scenario.hardware.error, candidate.best_or_nearest
    if error is None or nearest.stress <= 1:
        return False
    shorter = (1 / factor for factor in _factors(nearest, scenario, error))
    return scenario.slo.stress_of(nearest.columns, *shorter) <= 1


def _factors(result: LoadResult, scenario: Scenario, error: FitError) -> LatencyFactors:
    """`factors_90`, with the chance of Poisson arrivals; those of a trace are given."""
    drawn = isinstance(result.load, Open) and scenario.trace is None
    return factors_90(error, CHANCE_AT_RATE_PERCENT) if drawn else factors_90(error)


def surely_meets(candidate: Candidate, scenario: Scenario) -> bool:
    """Whether some simulated load meets the SLO even if latencies are longer by the model's errors, and by the chance
    of Poisson arrivals."""
    error = scenario.hardware.error
    if error is None or not scenario.slo.bounded:
        return candidate.best is not None and error is not None
    meeting = [each for each in (*candidate.outcomes, *candidate.rates) if each.meets]
    return any(scenario.slo.stress_of(each.columns, *_factors(each, scenario, error)) <= 1 for each in meeting)


def _barely(candidates: Sequence[Candidate], scenario: Scenario) -> Candidate | None:
    """The best of the candidates, which meets the SLO, if none of them `surely_meets` it."""
    return None if any(surely_meets(each, scenario) for each in candidates) else candidates[0]


def _fewest_gpus(candidates: Sequence[Candidate], scenario: Scenario) -> Candidate:
    """Of the candidates for a rate, that with the fewest GPUs which meets the SLO, or misses it by less than the
    model's errors. It may be one of the numbers that were `too few <Candidate.too_few>`."""
    tried = [*candidates, *(each.too_few for each in candidates if each.too_few is not None)]
    possible = [each for each in tried if each.best is not None or _nearly_meets(each, scenario)]
    return min(possible, key=lambda each: (each.total_gpus, each.best is None))


def _sized_for_rate(candidate: Candidate, scenario: Scenario) -> SizedForRate:
    return SizedForRate(candidate, sure=surely_meets(candidate, scenario))


def has_regime_map(plan: Plan, scenario: Scenario) -> bool:
    """Whether deployments have several closed loops, and answers a TPOT."""
    return plan.rate_rps is None and scenario.workload.sent_output_tokens > 1 and len(plan.candidates[0].outcomes) > 1


def regime_map(plan: Plan, scenario: Scenario) -> RegimeMap:
    """The best deployment by throughput, among the candidates and loads that are not extrapolated."""
    error, every = scenario.hardware.error, [*plan.candidates, *plan.screened]
    inside = [candidate for candidate in every if not scenario.outside(candidate.deployment)]
    if error is None or not inside:
        return RegimeMap(False)
    return RegimeMap(
        True, regime_tolerance(error.tpot_percent), len(every) - len(inside), tuple(regimes(inside, scenario))
    )


def _matched(plan: Plan, scenario: Scenario) -> list[MatchedPair]:
    """The service rates of prefill and decode in the best PD candidates, which check the simulation."""
    matcher = matcher_of(scenario)
    pairs: dict[tuple[Pool, Pool], MatchedPair] = {}
    for candidate in plan.candidates:
        topology = candidate.deployment.topology
        if not isinstance(topology, Disaggregated) or len(pairs) == MATCHED_ROWS:
            continue
        pair = prefill, decode = topology.prefill.one_replica, topology.decode.one_replica
        if pair not in pairs:
            link = link_of(candidate.deployment)
            rates = matcher.rates(prefill, decode, scenario.slo.tpot_s or math.inf, link)
            pairs[pair] = MatchedPair(prefill, decode, rates, topology.prefill.replicas, topology.decode.replicas)
    return list(pairs.values())


@dataclass(frozen=True)
class FluidFacts:
    """The controller beside the best fixed splits, with a verdict. ``file``: the workload file of a trace; None: the
    workload is no trace."""

    plan: FluidPlan
    scenario: Scenario
    file: str | None = None

    @property
    def shown(self) -> list[ServedRate]:
        return [self.plan.auto, *sorted(self.plan.fixed, key=lambda each: -each.rps)[:FIXED_SHOWN]]

    @property
    def outside(self) -> tuple[OutsideFit, ...]:
        return self.scenario.outside(self.plan.deployment)

    @property
    def depends(self) -> bool:
        """Whether the figures depend on how scattered blocks are copied."""
        return self.scenario.depends(self.plan.deployment)

    @property
    def gains(self) -> list[float]:
        """Of the seeds with whose arrivals a fixed split keeps the SLO."""
        return [each for each in self.plan.gains if math.isfinite(each)]

    @property
    def verdict(self) -> FluidCode:
        """Whether roles that follow the load are worth it here. Unclear: the arrivals of the seeds do not agree."""
        codes = {fluid_code(gain) for gain in self.plan.gains}
        return codes.pop() if len(codes) == 1 else "unclear"


def fluid_code(gain: float) -> FluidCode:
    """The judgement of one rate of the controller over that of the best fixed split (`gain_over`)."""
    if not math.isfinite(gain):
        return "no_split_keeps_slo"
    if gain >= WORTH_IT:
        return "worth_it"
    if gain < 1 / AS_GOOD:
        return "fixed_is_better"
    return "as_good" if gain <= AS_GOOD else "gains_little"


def fluid_text(plan: FluidPlan, scenario: Scenario, workload: str | None = None) -> str:
    """The printed plan of a fluid pool. ``workload``: its workload file."""
    file = workload if workload and scenario.trace else None
    rate_rps = rounded(MEASURED_AT * plan.auto.rps, 3)
    load = {"replay_file": file} if file else {"request_rate": (rate_rps,), **scenario.workload.bench_fields}
    return rendered(
        TEMPLATES / "fluid.txt",
        f=FluidFacts(plan, scenario, file),
        engine=scenario.hardware.engine,
        by_hand=by_hand(scenario),
        launch=typed("launch", *planned_words(plan.deployment, scenario), *flag_words("launch", detach=True)),
        bench=command_line("bench", name=plan.deployment.label, **load),
    )


@dataclass(frozen=True)
class Explanation:
    """The mean time of a request by phase, at every load of a candidate, of the requests that a plan judges."""

    candidate: Candidate
    scenario: Scenario

    @property
    def phases(self) -> list[dict[str, float]]:
        return [phases_s(outcome, self.scenario) for outcome in self.candidate.outcomes]

    @property
    def depends(self) -> bool:
        """Whether the figures depend on how scattered blocks are copied."""
        return self.scenario.depends(self.candidate.deployment)

    @property
    def largest(self) -> list[str]:
        """The two longest phases at the highest load."""
        last = self.phases[-1]
        return sorted(last, key=lambda name: -last[name])[:2]

    @property
    def outside(self) -> tuple[OutsideFit, ...]:
        return self.scenario.outside(self.candidate.deployment)

    @property
    def loads_outside(self) -> list[Load]:
        """The loads at which the candidate is extrapolated."""
        outcomes, deployment = self.candidate.outcomes, self.candidate.deployment
        return [outcome.load for outcome in outcomes if self.scenario.outside(deployment, outcome)]

    @property
    def overload(self) -> list[Finding]:
        """The loads of which more arrives than is served."""
        return [
            found("overload", arrive=outcome.load.value, served=outcome.requests_per_s)
            for outcome in self.candidate.outcomes
            if not outcome.keeps_up
        ]

    @property
    def matched(self) -> Rates | None:
        """The rates of one prefill and one decode replica without queues; None: not disaggregated."""
        deployment, scenario = self.candidate.deployment, self.scenario
        topology = deployment.topology
        if not isinstance(topology, Disaggregated):
            return None
        matcher = matcher_of(scenario)
        prefill, decode = topology.prefill.one_replica, topology.decode.one_replica
        return matcher.rates(prefill, decode, math.inf, link_of(deployment))


def explanation_text(candidate: Candidate, scenario: Scenario) -> str:
    """The printed explanation."""
    return rendered(TEMPLATES / "explanation.txt", e=Explanation(candidate, scenario))


def phases_s(outcome: LoadResult, scenario: Scenario) -> dict[str, float]:
    """Phase -> mean seconds per judged request. Their sum is the mean E2EL."""
    level = outcome.level
    part = judged(level, recorded=scenario.trace is not None and isinstance(outcome.load, Open))

    def mean(moments_s: Sequence[float]) -> float:
        return statistics.fmean(moments_s[part])

    arrival, start, end = mean(level.arrival_s), mean(level.prefill_start_s), mean(level.prefill_end_s)
    first_token, finish = mean(level.first_token_s), mean(level.finish_s)
    arrived = mean(level.kv_arrived_s) if level.transferred_bytes else end
    queue_begins = mean(level.queued_s)
    return {
        "ingress": queue_begins - arrival,
        "queue": start - queue_begins,
        "prefill": end - start,
        "KV transfer": arrived - end,
        "first step": first_token - arrived,
        "decode": finish - first_token,
    }


def regime_tolerance(tpot_percent: float) -> float:
    """The relative difference from which on two predicted TPOT differ clearly: sqrt(2) times the median error."""
    return math.sqrt(2) * tpot_percent / 100


def regimes(candidates: Sequence[Candidate], scenario: Scenario) -> list[Regime]:
    """The regime map of the candidates, in as few stretches as the model's error allows.

    From the lowest throughput up, each stretch has the candidate that stays longest within `regime_tolerance` of the
    lowest TPOT. Loads that miss the TTFT bound, or are extrapolated, are left out. Curves are linear between simulated
    loads, and are not extended beyond them. Raises ValueError if the model's error is unknown.
    """
    error = scenario.hardware.error
    if error is None:
        raise ValueError(f"the errors of {scenario.hardware.name} are not known")
    return stretches(
        {each.deployment.label: curve_of(each, scenario) for each in candidates},
        tolerance=regime_tolerance(error.tpot_percent),
    )


def curve_of(candidate: Candidate, scenario: Scenario) -> ThroughputCurve:
    """Throughput per `Scenario.throughput_unit` and TPOT of the candidate's loads that are not extrapolated."""
    scale = candidate.copies * scenario.throughput_gpus / candidate.total_gpus
    ttft_slo = Slo(ttft_s=scenario.slo.ttft_s, quantile=scenario.slo.quantile)
    return sorted(
        ThroughputPoint(outcome.output_tokens_per_s * scale, outcome.tpot_s)
        for outcome in candidate.outcomes
        if not scenario.outside(candidate.deployment, outcome) and ttft_slo.stress_of(outcome.columns) <= 1
    )
