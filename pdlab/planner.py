"""Model + GPUs + workload + SLO -> feasible deployments, simulated and ranked. Pure, no Ray.

1. **Enumerate**: collocated n x TP, and prefill:decode ratios without common factors for every
   pair of TP degrees that vLLM accepts, as long as they fit the GPUs, the KV memory and a node
   where the placement asks for it. A deployment smaller than the GPUs is run in copies.
2. **Rate-match**: what one prefill replica prefills per second against what one decode replica
   decodes at the SLO's TPOT gives the ratio at which neither waits; ratios far from it are not simulated.
3. **Simulate** each over a ladder of concurrencies per GPU (or at the load asked for), with requests of its own.
4. **Rank** by goodput per GPU: requests/s that meet every bound of the SLO, of the highest load at
   which the share of such requests is at least the quantile, over all the GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pydantic import Field

from pdlab.catalog import ModelShape, check_divisibility
from pdlab.errors import PlacementError, UsageError
from pdlab.nodes import ClusterView
from pdlab.perf import Hardware, kv_capacity_tokens, step_costs
from pdlab.placement import place
from pdlab.sim import SimulatedLevel, simulate
from pdlab.spec import Collocated, Deployment, Disaggregated, Frozen, PlacementKind, Pool
from pdlab.workload import Closed, Level, Open, Workload

TP_DEGREES = (1, 2, 4, 8)
LADDER = (0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)  # requests in flight per GPU
RATIOS_EACH = 3  # prefill:decode ratios simulated per pair of TP degrees
WAVES = 6  # requests simulated per unit of concurrency
LEAST_REQUESTS = 48


class Slo(Frozen):
    """Bounds in seconds that a request must meet (None: not bounded), and the share of requests that must."""

    ttft_s: float | None = Field(default=None, gt=0)
    tpot_s: float | None = Field(default=None, gt=0)
    e2el_s: float | None = Field(default=None, gt=0)
    quantile: float = Field(default=0.9, gt=0, le=1)

    @property
    def bounded(self) -> bool:
        return (self.ttft_s, self.tpot_s, self.e2el_s) != (None, None, None)


@dataclass(frozen=True, slots=True)
class Rates:
    """Service rates of one replica, requests/s: prefill alone, and decode alone at the SLO's TPOT."""

    prefill_rps: float
    decode_rps: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """One load on one deployment: means over its requests, without the first wave."""

    load: Closed | Open
    requests_per_s: float
    output_tokens_per_s: float
    ttft_s: float
    tpot_s: float
    good_share: float
    bottleneck: str
    level: SimulatedLevel

    @property
    def goodput_rps(self) -> float:
        return self.requests_per_s * self.good_share


@dataclass(frozen=True, slots=True)
class Candidate:
    """One deployment with what it does at every load. ``copies`` of it fill the GPUs."""

    deployment: Deployment
    copies: int
    outcomes: tuple[Outcome, ...]
    best: Outcome | None  # the load of most goodput among those that meet the SLO; None when none does
    total_gpus: int

    @property
    def goodput_per_gpu(self) -> float:
        """Requests/s within the SLO per GPU of the whole, idle ones included; 0 when no load meets it."""
        return self.best.goodput_rps * self.copies / self.total_gpus if self.best else 0.0


def feasible(
    model: str,
    shape: ModelShape,
    hardware: Hardware,
    view: ClusterView,
    gpus: int,
    workload: Workload,
    placement: PlacementKind | None = None,
) -> list[Deployment]:
    """Every deployment worth asking about, collocated first. Raises UsageError when the model fits no TP degree."""
    request = workload.sent_input_tokens + workload.sent_output_tokens
    degrees = [
        tp
        for tp in TP_DEGREES
        if tp <= gpus and kv_capacity_tokens(hardware, shape, Pool(tp=tp)) >= request and shape.heads % tp == 0
    ]
    if not degrees:
        raise UsageError(
            f"{shape.name} with a request of {request} tokens fits no TP degree of {TP_DEGREES} within {gpus} GPUs of "
            f"{hardware.gpu}; give more GPUs or shorter requests"
        )
    found = [
        Deployment(model=model, topology=Collocated(pool=Pool(replicas=1 if tp == gpus else count, tp=tp)))
        for tp in degrees
        for count in {max(min(gpus, hardware.gpus_per_node) // tp, 1)}
    ]
    for prefill_tp in degrees:
        for decode_tp in degrees:
            for prefills in range(1, gpus // prefill_tp + 1):
                for decodes in range(1, (gpus - prefills * prefill_tp) // decode_tp + 1):
                    if math.gcd(prefills, decodes) > 1:
                        continue
                    found += _placed(
                        model,
                        shape,
                        view,
                        Pool(replicas=prefills, tp=prefill_tp),
                        Pool(replicas=decodes, tp=decode_tp),
                        placement,
                        hardware.gpus_per_node,
                    )
    return found


def _placed(
    model: str,
    shape: ModelShape,
    view: ClusterView,
    prefill: Pool,
    decode: Pool,
    placement: PlacementKind | None,
    node_gpus: int,
) -> list[Deployment]:
    """The deployment packed where one node takes it, else spread; or only as asked; nothing if it does not fit."""
    kinds: tuple[PlacementKind, ...] = (placement,) if placement else ("pack", "spread")
    for kind in kinds:
        if kind == "pack" and prefill.gpus + decode.gpus > node_gpus:
            continue
        made = Deployment(model=model, topology=Disaggregated(prefill=prefill, decode=decode, placement=kind))
        try:
            check_divisibility(made, shape)
            place(made, view)
        except (PlacementError, UsageError):
            continue
        return [made]
    return []


def rates(deployment: Deployment, shape: ModelShape, hardware: Hardware, workload: Workload, slo: Slo) -> Rates:
    """What one replica of each role can do alone, from step times; the sanity check beside the simulation.

    Prefill: one prompt per step. Decode: the largest batch whose step is within the SLO's TPOT (or
    that KV memory holds), over the time that a request stays.
    """
    pools = deployment.pools
    prefill = pools.get("prefill") or pools["collocated"]
    decode = pools.get("decode") or pools["collocated"]
    costs = step_costs(hardware, shape, prefill)
    tokens, outputs = workload.sent_input_tokens, workload.sent_output_tokens
    prefill_rps = prefill.dp * prefill.pp / costs.step_s(0, tokens, tokens / 2)
    costs = step_costs(hardware, shape, decode)
    context = tokens + outputs / 2
    room = int(kv_capacity_tokens(hardware, shape, decode) // (tokens + outputs))
    bound_s = slo.tpot_s or math.inf
    low, high = 0, max(room, 1)
    while low < high:  # step time grows with the batch
        middle = (low + high + 1) // 2
        if costs.step_s(middle, 0, context) <= bound_s:
            low = middle
        else:
            high = middle - 1
    stays_s = max(outputs - 1, 1) * costs.step_s(max(low, 1), 0, context)
    return Rates(prefill_rps=prefill_rps, decode_rps=decode.dp * decode.pp * low / stays_s)


def shortlist(
    deployments: Sequence[Deployment], shape: ModelShape, hardware: Hardware, workload: Workload, slo: Slo
) -> list[Deployment]:
    """All collocated ones; of each pair of TP degrees and placement the ratios nearest to the matched one."""
    kept = [deployment for deployment in deployments if isinstance(deployment.topology, Collocated)]
    groups: dict[tuple[int, int], list[tuple[float, Deployment]]] = {}
    for deployment in deployments:
        topology = deployment.topology
        if not isinstance(topology, Disaggregated):
            continue
        alone = rates(deployment, shape, hardware, workload, slo)
        supply = topology.prefill.replicas * alone.prefill_rps
        demand = topology.decode.replicas * alone.decode_rps
        mismatch = abs(math.log(supply / demand)) if demand > 0 else math.inf
        groups.setdefault((topology.prefill.tp, topology.decode.tp), []).append((mismatch, deployment))
    for group in groups.values():
        group.sort(key=lambda item: (item[0], item[1].gpus, item[1].label))
        kept += [deployment for _, deployment in group[:RATIOS_EACH]]
    return kept


def evaluate(
    deployment: Deployment,
    shape: ModelShape,
    hardware: Hardware,
    workload: Workload,
    slo: Slo,
    gpus: int,
    *,
    concurrencies: Sequence[int] | None = None,
    rate_rps: float | None = None,
    prefix_hit_rate: float = 0.0,
    seed: int = 0,
) -> Candidate:
    """Simulate one deployment over the ladder, or at the loads asked for (of the whole, shared by the copies)."""
    copies = max(gpus // deployment.gpus, 1)
    loads: list[Closed | Open]
    if rate_rps is not None:
        loads = [Open(rate_rps=rate_rps / copies)]
    elif concurrencies:
        loads = [Closed(concurrency=max(round(number / copies), 1)) for number in concurrencies]
    else:
        loads = [Closed(concurrency=max(round(step * deployment.gpus), 1)) for step in LADDER]
    outcomes: list[Outcome] = []
    for load in dict.fromkeys(loads):
        outcome = _outcome(deployment, load, shape, hardware, workload, slo, prefix_hit_rate, seed)
        outcomes.append(outcome)
        if slo.bounded and outcome.good_share < slo.quantile / 4 and isinstance(load, Closed):
            break  # more load makes it no better
    meeting = [outcome for outcome in outcomes if outcome.good_share >= slo.quantile]
    most = max((outcome.goodput_rps for outcome in meeting), default=0.0)
    # More load that only lengthens queues is no better: the lowest load within 2 % of the most.
    best = next((outcome for outcome in meeting if outcome.goodput_rps >= 0.98 * most), None)
    return Candidate(deployment, copies, tuple(outcomes), best, gpus)


def _outcome(
    deployment: Deployment,
    load: Closed | Open,
    shape: ModelShape,
    hardware: Hardware,
    workload: Workload,
    slo: Slo,
    prefix_hit_rate: float,
    seed: int,
) -> Outcome:
    if isinstance(load, Closed):
        count, skipped = max(WAVES * load.concurrency, LEAST_REQUESTS), load.concurrency
    else:
        count = max(int(30 * load.rate_rps), 2 * LEAST_REQUESTS)
        skipped = count // 10
    level = Level(load=load, num_requests=count, seed=seed)
    done = simulate(deployment, [level], workload, hardware, shape, seed=seed, prefix_hit_rate=prefix_hit_rate)[0]
    judged = range(skipped, count)
    ttft = [done.first_token_s[i] - done.arrival_s[i] for i in judged]
    e2el = [done.finish_s[i] - done.arrival_s[i] for i in judged]
    tpot = [(done.finish_s[i] - done.first_token_s[i]) / max(done.output_tokens[i] - 1, 1) for i in judged]
    good = sum(
        (slo.ttft_s is None or t <= slo.ttft_s)
        and (slo.tpot_s is None or p <= slo.tpot_s)
        and (slo.e2el_s is None or e <= slo.e2el_s)
        for t, p, e in zip(ttft, tpot, e2el, strict=True)
    )
    # Rates between the end of the first wave and the last arrival: neither ramp nor drain.
    opens_s, closes_s = sorted(done.finish_s)[skipped - 1] if skipped else 0.0, max(done.arrival_s)
    inside = sum(opens_s < moment <= closes_s for moment in done.finish_s)
    if isinstance(load, Open) or closes_s <= opens_s or inside < skipped:
        per_s = count / done.duration_s
    else:
        per_s = inside / (closes_s - opens_s)
    return Outcome(
        load=load,
        requests_per_s=per_s,
        output_tokens_per_s=per_s * workload.sent_output_tokens,
        ttft_s=sum(ttft) / len(ttft),
        tpot_s=sum(tpot) / len(tpot),
        good_share=good / len(judged),
        bottleneck=bottleneck(done),
        level=done,
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


def plan_deployments(
    model: str,
    shape: ModelShape,
    hardware: Hardware,
    view: ClusterView,
    gpus: int,
    workload: Workload,
    slo: Slo,
    *,
    placement: PlacementKind | None = None,
    concurrencies: Sequence[int] | None = None,
    rate_rps: float | None = None,
    prefix_hit_rate: float = 0.0,
    seed: int = 0,
) -> tuple[list[Candidate], int]:
    """Ranked candidates, best first, and how many deployments were feasible. Raises UsageError."""
    possible = feasible(model, shape, hardware, view, gpus, workload, placement)
    chosen = shortlist(possible, shape, hardware, workload, slo)
    candidates = [
        evaluate(
            deployment,
            shape,
            hardware,
            workload,
            slo,
            gpus,
            concurrencies=concurrencies,
            rate_rps=rate_rps,
            prefix_hit_rate=prefix_hit_rate,
            seed=seed,
        )
        for deployment in chosen
    ]
    candidates.sort(key=lambda candidate: (-candidate.goodput_per_gpu, candidate.deployment.gpus, _label(candidate)))
    return candidates, len(possible)


def _label(candidate: Candidate) -> str:
    return candidate.deployment.label


@dataclass(frozen=True, slots=True)
class Regime:
    """From ``from_tokens_per_s`` output tokens/s per node on, ``label`` gives it at the lowest TPOT."""

    label: str
    from_tokens_per_s: float
    to_tokens_per_s: float
    tpot_s: tuple[float, float]


def regimes(candidates: Sequence[Candidate], node_gpus: int, steps: int = 60) -> list[Regime]:
    """Which configuration wins at which throughput per node: the lowest TPOT among those that reach it.

    Between simulated loads a curve is taken as straight; nothing is extended beyond them.
    """
    curves = {}
    for candidate in candidates:
        scale = candidate.copies * node_gpus / candidate.total_gpus
        points = sorted((o.output_tokens_per_s * scale, o.tpot_s) for o in candidate.outcomes)
        curves[candidate.deployment.label] = points
    top = max((points[-1][0] for points in curves.values() if points), default=0.0)
    low = min((points[0][0] for points in curves.values() if points), default=0.0)
    found: list[Regime] = []
    for number in range(steps + 1):
        wanted = low + (top - low) * number / steps
        options = [(tpot_s, label) for label, points in curves.items() if (tpot_s := _at(points, wanted)) is not None]
        if not options:
            continue
        tpot_s, label = min(options)
        if found and found[-1].label == label:
            found[-1] = Regime(label, found[-1].from_tokens_per_s, wanted, (found[-1].tpot_s[0], tpot_s))
        else:
            found.append(Regime(label, wanted, wanted, (tpot_s, tpot_s)))
    return found


def _at(points: Sequence[tuple[float, float]], wanted: float) -> float | None:
    """Lowest TPOT at a throughput of at least ``wanted``, straight between neighbours."""
    best = min((tpot_s for reached, tpot_s in points if reached >= wanted), default=None)
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 <= wanted <= x1 and x1 > x0:
            between = y0 + (y1 - y0) * (wanted - x0) / (x1 - x0)
            best = between if best is None else min(best, between)
    return best
