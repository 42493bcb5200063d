"""The planner's results in words and tables, labelled as simulated."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from pdlab.analysis.crossovers import Regime, ThroughputCurve, ThroughputPoint, stretches
from pdlab.core.commands import typed
from pdlab.core.deployment import Disaggregated, launch_flags
from pdlab.core.gpu_count import other_count
from pdlab.core.nodes import ClusterView
from pdlab.core.text import table
from pdlab.core.workload import Slo
from pdlab.plan.candidates import MOST_REPLICAS
from pdlab.plan.extrapolation import dimensions_text, fit_text, outside_text
from pdlab.plan.fluid_pools import FluidPlan
from pdlab.plan.planner import Candidate, Gain, Plan, gain, outside
from pdlab.plan.rate_matching import Matcher
from pdlab.plan.scattered_blocks import CHECK
from pdlab.plan.scene import LoadResult, Scene
from pdlab.results.slo import bounds_text
from pdlab.sim.hardware import TO_90, Hardware

ROWS = 12
NOTHING_KNOWN = "how far these predictions are off is not known, so they have no intervals and no verdict"
FIXED_SHOWN = 5  # fixed splits of a fluid pool
WORTH_IT, AS_GOOD = 1.1, 1.03  # times the best fixed split: worth it; no more than as good
MEASURED_AT = 0.8  # of what it serves within the SLO
DEPENDENT = 5  # rows on scattered blocks
LONG_TTFT_S = 1.0
MATCHED = 4  # pairs of TP degrees in the rate-matching check


def ranking(plan: Plan, scene: Scene, view: ClusterView, gpus: int) -> str:
    """The ranked table, the verdict on PD, the regime map and the rate-matching check."""
    hardware, workload, slo = scene.hardware, scene.workload, scene.slo
    base = plan.best_candidate(collocated=True)
    also = ["closed loop"] if plan.candidates[0].goodput_rps is not None else []
    head = ["", "deployment", "copies", "GPUs", "load", f"{served(plan)} per GPU", *also, "req/s", "tok/s per node"]
    head += ["TTFT ms", "TPOT ms", "in SLO", "limited by", "over collocated"]
    shown = list(enumerate(plan.candidates[:ROWS], start=1))
    if base is not None and base not in plan.candidates[:ROWS]:
        shown.append((plan.candidates.index(base) + 1, base))
    rows = [_row(number, candidate, base, scene) for number, candidate in shown]
    left = [1, len(head) - 2, len(head) - 1]
    if any(outside(candidate, scene) for _, candidate in shown):
        left.append(len(head))
        head.append("extrapolated")
        rows = [[*row, dimensions_text(outside(each, scene))] for row, (_, each) in zip(rows, shown, strict=True)]
    hit = f", {scene.prefix_hit_rate:.0%} of each prompt cached" if scene.prefix_hit_rate else ""
    lines = [
        f"Simulated, not measured: {scene.shape.name} on {gpus} x {hardware.gpu} ({view.name}), "
        f"{workload.label} tokens{_requests(scene)}{hit}",
        f"SLO: {_slo(slo)}",
        f"Step times: {hardware.name} ({hardware.stack}), {fit_text(hardware)}",
        sentence(rests_on(scene)),
        f"{plan.possible} combinations fit; {len(plan.candidates) + len(plan.screened)} were simulated, "
        "the others are worse by rate matching"
        + (f" (pools of more than {MOST_REPLICAS} replicas left out)" if gpus > 2 * MOST_REPLICAS else ""),
        "",
        table(head, rows, left=tuple(left)),
        "",
        *_remarks(plan, scene),
        *_on_scattered_blocks(plan, scene),
        "",
        verdict(plan, scene),
    ]
    if plan.rate_rps is None and workload.sent_output_tokens > 1 and len(plan.candidates[0].outcomes) > 1:
        lines += ["", *_regime_map(plan, scene)]
    lines += ["", *_matching(plan, scene)]
    return "\n".join(lines)


def sentence(text: str) -> str:
    """The text with a capital letter first."""
    return text[:1].upper() + text[1:]


def served(plan: Plan) -> str:
    """What the plan ranks by."""
    return "goodput/s" if plan.loop == "open" else "closed-loop capacity/s"


def _requests(scene: Scene) -> str:
    """Number, rate and longest request of a trace, after the mean lengths; empty without a trace."""
    if scene.trace is None:
        return ""
    inputs, outputs = scene.trace.longest
    count, rate = len(scene.trace.arrival_s), scene.trace.rate_rps
    return f" (means of a trace of {count} requests at {rate:.3g}/s, the longest {inputs}:{outputs})"


def rests_on(scene: Scene) -> str:
    """The errors of these step times where the plan is within their fit, else in what it is extrapolated."""
    outside = scene.outside()
    return f"{outside_text(outside)}: {NOTHING_KNOWN}" if outside else errors_of(scene.hardware)


def errors_of(hardware: Hardware) -> str:
    """The errors on runs left out of the fit, in words."""
    error = hardware.error
    if error is None:
        return f"the errors of {hardware.name} are not known"
    return (
        f"median errors on runs left out of the fit: TPOT {error.tpot_percent:g} %, TTFT {error.ttft_percent:g} %, "
        f"requests/s {error.requests_per_s_percent:g} %"
    )


def _row(number: int, candidate: Candidate, base: Candidate | None, scene: Scene) -> list[str]:
    outcome = candidate.best_or_nearest
    scale = candidate.copies * scene.hardware.gpus_per_node / candidate.total_gpus
    over = "-"
    if base is not None and not candidate.collocated and (advantage := gain(candidate, base, scene)):
        over = percent(advantage)
    return [
        str(number),
        candidate.deployment.label
        + ("*" if experimental(candidate) else "")
        + ("~" if scene.depends(candidate.deployment) else ""),
        str(candidate.copies),
        str(candidate.copies * candidate.deployment.gpus),
        f"{outcome.load.value:.3g}" + ("/s" if outcome.load.kind == "rate" else ""),
        f"{candidate.served_per_gpu:.2f}" if candidate.best else "-",
        *(
            []
            if candidate.goodput_rps is None
            else [f"{candidate.capacity_per_gpu:.2f}" if candidate.capacity_rps else "-"]
        ),
        f"{outcome.requests_per_s:.2f}",
        f"{outcome.output_tokens_per_s * scale:.0f}",
        f"{1e3 * outcome.ttft_s:.0f}",
        f"{1e3 * outcome.tpot_s:.2f}" if scene.workload.sent_output_tokens > 1 else "-",
        f"{outcome.good_share:.0%}",
        outcome.bottleneck,
        over,
    ]


def experimental(candidate: Candidate) -> bool:
    """Prefill TP above decode TP: vLLM allows it, and asks for care."""
    topology = candidate.deployment.topology
    return isinstance(topology, Disaggregated) and topology.prefill.tp > topology.decode.tp


def percent(advantage: Gain) -> str:
    """``+57 % (+41 to +75)``: the gain and its 90 % interval; without one where no error is known."""
    value = f"{100 * advantage.value:+.0f} %"
    if advantage.interval is None:
        return value
    low, high = advantage.interval
    return f"{value} ({100 * low:+.0f} to {f'{100 * high:+.0f}' if high < MANIFOLD else 'more'})"


MANIFOLD = 10.0  # the upper end of an interval, beyond which its value says nothing


def counting(plan: Plan, scene: Scene) -> list[str]:
    """How GPUs are counted where that matters, and whether the other way has another candidate first."""
    lines = []
    if scene.count == "used":
        lines.append("Per GPU and per node count the GPUs used; nodes are rented whole (--count-gpus nodes).")
    elif any(c.total_gpus > c.copies * c.deployment.gpus for c in plan.candidates[:ROWS]):
        lines.append("Per GPU and per node count whole nodes, of which some candidates leave GPUs idle.")
    other = other_count(scene.count)
    by_other = plan.first(scene, other)
    if by_other.served_per_gpu and by_other.deployment != plan.first(scene, scene.count).deployment:
        lines.append(f"With --count-gpus {other} another one is first: {by_other.deployment.label}.")
    return lines


def _remarks(plan: Plan, scene: Scene) -> list[str]:
    """Notes below the table."""
    listed_candidates, slo = plan.candidates[:ROWS], scene.slo
    lines = ["load, req/s, TTFT and TPOT (means) are of one copy, at its best load within the SLO."]
    if listed_candidates[0].goodput_rps is not None:
        lines.append(
            "goodput: the highest rate of Poisson arrivals within the SLO, which ranks; closed loop: the requests/s "
            "per GPU of as many in flight as meet it, which arrivals that do not wait for answers seldom reach."
        )
    if plan.screened:
        lines.append(_left_out(plan))
    lines += counting(plan, scene)
    if any(c.copies > 1 for c in listed_candidates):
        lines.append(
            "copies: the number of such deployments, each an application of its own, behind one load balancer."
        )
    if any(c.best is None for c in listed_candidates):
        lines.append("-: no simulated load meets the SLO; the row shows the one that misses it by least.")
    if any(experimental(c) for c in listed_candidates):
        lines.append("*: prefill TP above decode TP is experimental in vLLM: the launcher's canary must pass.")
    if slo.bounded and _queues_unbounded(slo) and plan.rate_rps is None:
        worst_s = max((c.best.ttft_s for c in listed_candidates if c.best), default=0.0)
        if worst_s > LONG_TTFT_S:
            lines.append(
                f"TTFT is not bounded, so requests queue before prefill (up to {worst_s:.1f} s): add --slo-ttft-ms."
            )
    return lines


def _left_out(plan: Plan) -> str:
    """Who was looked at in a closed loop alone, and why that is enough."""
    most_per_gpu, label = max((c.capacity_per_gpu or 0.0, c.deployment.label) for c in plan.screened)
    text = (
        f"{len(plan.screened)} more were simulated in a closed loop alone: there the best of them, {label}, serves "
        f"{most_per_gpu:.2f}/s per GPU within the SLO"
    )
    if most_per_gpu <= plan.candidates[0].served_per_gpu:
        return f"{text}, less than the first one's goodput."
    return f"{text}; it may come before the first."


def _on_scattered_blocks(plan: Plan, scene: Scene) -> list[str]:
    """What of the plan depends on whether scattered blocks are copied one by one, both cases side by side."""
    if scene.blocks is not None:
        return [
            "KV pools are simulated as they are once each has served more tokens than it holds (minutes): free blocks "
            "lie apart.",
            scene.blocks.text,
        ]
    if not plan.other:
        return []
    base = plan.best_candidate(collocated=True)
    by_label = {candidate.deployment.label: candidate for candidate in plan.candidates}

    def cells(candidate: Candidate) -> list[str]:
        advantage = gain(candidate, base, scene) if base is not None else None
        goodput = f"{candidate.served_per_gpu:.2f}" if candidate.best else "-"
        return [goodput, percent(advantage) if advantage else "-"]

    rows = []
    for other in plan.other[:DEPENDENT]:
        copied, merged = by_label[other.deployment.label], other
        if not scene.scattered:
            copied, merged = merged, copied
        rows.append([other.deployment.label, *cells(copied), *cells(merged)])
    head = ["", f"{served(plan)} per GPU, copied", "over collocated", "merged", "over collocated"]
    ranked = "that they are" if scene.scattered else "with --assume-merged that they are not"
    return [
        "~: KV pools are simulated as they are once each has served more tokens than it holds (minutes): free blocks "
        "lie apart.",
        "With vLLM 0.11 a decode engine copied such blocks one by one within a node; no other version was measured.",
        f"The ranking takes it {ranked}:",
        "",
        table(head, rows, left=(0,)),
        "",
        f"To measure the cost on your nodes: {CHECK} --model {scene.shape.name} --json blocks.json, then this plan "
        "with --blocks blocks.json.",
    ]


def if_otherwise(plan: Plan, scene: Scene) -> str:
    """What would be first if scattered blocks behaved the other way; empty where that changes nothing."""
    first, label = plan.candidates[0], plan.candidates[0].deployment.label
    other_by_label = {candidate.deployment.label: candidate for candidate in plan.other}
    rest = [candidate for candidate in plan.candidates if candidate.deployment.label not in other_by_label]
    best = max([*plan.other, *rest], key=lambda candidate: candidate.served_per_gpu)
    if not best.best or not first.best or best.deployment.label == label:
        return ""
    case = "merge" if scene.scattered else "are copied one by one"
    return (
        f" Where scattered blocks {case}, {best.deployment.label} is first, with {best.served_per_gpu:.2f} "
        f"{served(plan)} per GPU ({label}: {other_by_label.get(label, first).served_per_gpu:.2f})."
    )


def verdict(plan: Plan, scene: Scene) -> str:
    """Whether PD pays, by how much, with which uncertainty, and whether it rests on how scattered blocks are copied.
    Nobody is named while TTFT is unbounded, or where one of those that are compared is extrapolated."""
    base, split = (plan.best_candidate(collocated=each) for each in (True, False))
    unnamed = _queues_unbounded(plan.slo) and split is not None and split.best is not None
    for candidate in (base, split):
        if candidate is not None and not unnamed and (found := outside(candidate, scene)):
            return f"No verdict: {candidate.deployment.label} is {outside_text(found)}. Measure before you decide."
    verdict = _verdict(plan, scene)
    if _queues_unbounded(plan.slo) or any(outside(candidate, scene) for candidate in plan.other):
        return verdict
    return verdict + if_otherwise(plan, scene)


def _queues_unbounded(slo: Slo) -> bool:
    return slo.ttft_s is None and slo.e2el_s is None


def _verdict(plan: Plan, scene: Scene) -> str:
    base, split, slo = plan.best_candidate(collocated=True), plan.best_candidate(collocated=False), plan.slo
    if not any(candidate.best for candidate in plan.candidates):
        nearest = min(plan.candidates, key=lambda c: c.best_or_nearest.stress)
        return (
            f"No deployment meets the SLO ({_slo(slo)}) at any simulated load. "
            f"Nearest is {nearest.deployment.label}, "
            f"{nearest.best_or_nearest.stress - 1:.0%} over a bound at load {nearest.best_or_nearest.load.value:.3g}: "
            "relax the SLO, shorten the requests, or lower the load."
        )
    if split is None:
        return "PD does not pay here: no PD deployment fits these GPUs and this placement."
    if split.best is None:
        return f"PD does not pay here: no PD deployment meets the SLO; {plan.candidates[0].deployment.label} does."
    if _queues_unbounded(slo):
        return _without_ttft(plan, split, base)
    if base is None or base.best is None:
        return f"PD pays here: only PD meets the SLO, best {split.deployment.label}."
    if plan.rate_rps is not None:
        return _verdict_at_rate(split, base, scene, plan.rate_rps)
    advantage = gain(split, base, scene)
    assert advantage is not None
    unit = served(plan).removesuffix("/s")
    comparison = (
        f"{split.deployment.label} against {base.deployment.label}: {percent(advantage)} {unit} per GPU, "
        "90 % interval from the errors of the model"
    )
    assert advantage.interval is not None, "neither is extrapolated"
    low, high = advantage.interval
    if low > 0:
        return f"PD pays here. {comparison}."
    if high < 0:
        return f"PD does not pay here. {comparison}."
    return f"PD does not clearly pay here: within the uncertainty. {comparison}. Measure both."


def _without_ttft(plan: Plan, split: Candidate, base: Candidate | None) -> str:
    def words(candidate: Candidate) -> str:
        if plan.rate_rps is not None:
            return f"{candidate.deployment.label} on {candidate.total_gpus:.4g} GPUs"
        return f"{candidate.deployment.label} {candidate.served_per_gpu:.2f}"

    sizes = " and ".join(words(candidate) for candidate in (split, base) if candidate is not None and candidate.best)
    figure = f"{plan.rate_rps:g} requests/s take" if plan.rate_rps is not None else f"{served(plan)} per GPU:"
    alone = "" if base is not None and base.best else "; no collocated deployment meets the SLO"
    return (
        "No winner is named while TTFT is unbounded: bound it too, for example --slo-ttft-ms 2000 "
        f"({figure} {sizes}{alone})."
    )


def _verdict_at_rate(split: Candidate, base: Candidate, scene: Scene, rate_rps: float) -> str:
    def words(candidate: Candidate) -> str:
        assert candidate.best is not None
        error = scene.hardware.error
        assert error is not None, "neither is extrapolated"
        tpot, ttft = (math.exp(TO_90 * value / 100) for value in (error.tpot_percent, error.ttft_percent))
        holds = scene.slo.stress_of(candidate.best.latencies, tpot, ttft) <= 1
        sure = "" if holds or not scene.slo.bounded else ", which the errors of the model put in doubt"
        tpot_ms = 1e3 * candidate.best.tpot_s
        return f"{candidate.deployment.label} on {candidate.total_gpus:.4g} GPUs (TPOT {tpot_ms:.1f} ms{sure})"

    comparison = f"{rate_rps:g} requests/s take {words(split)}, or collocated {words(base)}"
    if split.total_gpus < base.total_gpus:
        return f"PD pays here: {comparison}."
    if split.total_gpus > base.total_gpus:
        return f"PD does not pay here: {comparison}."
    return f"PD saves no GPU here: {comparison}."


def _regime_map(plan: Plan, scene: Scene) -> list[str]:
    """Of the candidates and loads that are not extrapolated; nothing where all are."""
    slo, error = scene.slo, scene.hardware.error
    every = [*plan.candidates, *plan.screened]
    inside = [candidate for candidate in every if not scene.outside(candidate.deployment)]
    if error is None or not inside:
        return ["Which wins at which throughput is not said: that rests on errors that are not known."]
    within = "" if slo.ttft_s is None else " within the TTFT bound"
    lines = [
        f"Which wins at which throughput of a closed loop{within}: the lowest TPOT, or within "
        f"{math.sqrt(2) * error.tpot_percent:.0f} % of it: the model cannot distinguish closer values (sqrt(2) times "
        "its median error of TPOT)"
    ]
    if len(inside) < len(every):
        lines.append(f"Without {len(every) - len(inside)} that are extrapolated.")
    rows = [_regime(regime) for regime in regimes(inside, scene)]
    return [*lines, "", table(["output tok/s per node", "deployment", "TPOT ms", "as good"], rows, left=(0, 1, 2, 3))]


def _regime(regime: Regime) -> list[str]:
    first_ms, last_ms = 1e3 * regime.from_tpot_s, 1e3 * regime.to_tpot_s
    rivals = ", ".join(regime.rivals[:2]) + (f" and {len(regime.rivals) - 2} more" if len(regime.rivals) > 2 else "")
    return [
        f"{regime.from_tokens_per_s:.0f} to {regime.to_tokens_per_s:.0f}",
        regime.label,
        f"{first_ms:.1f} to {last_ms:.1f}",
        rivals,
    ]


def _matching(plan: Plan, scene: Scene) -> list[str]:
    """Prefill against decode service rates of the best PD candidates: the check beside the simulation."""
    matcher = Matcher(scene.hardware, scene.shape, scene.workload, scene.prefix_hit_rate)
    rows, compared = [], set()
    for candidate in plan.candidates:
        topology = candidate.deployment.topology
        if not isinstance(topology, Disaggregated):
            continue
        prefill, decode = topology.prefill.one_replica, topology.decode.one_replica
        if (prefill, decode) in compared:
            continue
        compared.add((prefill, decode))
        alone = matcher.rates(prefill, decode, scene.slo.tpot_s or math.inf)
        rows.append(
            [
                topology.prefill.label.split("x", 1)[1].upper(),
                f"{alone.prefill_rps:.1f}",
                topology.decode.label.split("x", 1)[1].upper(),
                f"{alone.decode_rps:.1f}",
                alone.matched,
                f"{topology.prefill.replicas}:{topology.decode.replicas}",
            ]
        )
        if len(rows) == MATCHED:
            break
    if not rows:
        return []
    bound = "KV memory" if scene.slo.tpot_s is None else "the TPOT bound"
    return [
        f"Rate matching, without queues: requests/s of one replica, decode at {bound}; P:D at which neither pool waits",
        "",
        table(["prefill", "req/s", "decode", "req/s", "matched P:D", "simulated best"], rows, left=(0, 2)),
    ]


def fluid(plan: FluidPlan, scene: Scene) -> str:
    """The controller beside the fixed splits, what that means, and how to measure it."""
    gpus = plan.deployment.gpus
    rows = [
        [each.roles, f"{each.rps:.1f}", f"{each.rps / gpus:.2f}"]
        for each in (plan.auto, *sorted(plan.fixed, key=lambda each: -each.rps)[:FIXED_SHOWN])
    ]
    mode = " (times the rate of each mix)" if plan.moves else ""
    scattered, found = [], scene.outside(plan.deployment)
    if scene.depends(plan.deployment):
        how = "are copied one by one (--assume-merged: they merge)" if scene.scattered else "merge"
        scattered = [f"Assumed: scattered KV blocks within a node {how}; the first was seen with vLLM 0.11 alone."]
    bounds = f"--slo-ttft-ms {scene.slo.bounds_ms['ttft']:g} --slo-tpot-ms {scene.slo.bounds_ms['tpot']:g}"
    return "\n".join(
        [
            f"{plan.deployment.label}, {scene.workload.label} tokens, {scene.slo.quantile:.0%} of requests within "
            f"{scene.slo.flag}; simulated with {scene.hardware.name}",
            *([sentence(f"{outside_text(found)}: {NOTHING_KNOWN}")] if found else []),
            "",
            table(["prefill:decode", f"requests/s{mode}", "per GPU"], rows, left=(0,)),
            "",
            f"No verdict: {outside_text(found)}." if found else fluid_verdict(plan),
            *scattered,
            "To measure it:",
            f"  {typed('launch')} {launch_flags(plan.deployment)} {bounds} --detach",
            f"  {typed('bench', '-e', plan.deployment.label)} -r {MEASURED_AT * plan.auto.rps:.3g} "
            f"{scene.workload.flags}",
        ]
    )


def fluid_verdict(plan: FluidPlan) -> str:
    """In one sentence whether roles that follow the load are worth it here."""
    best = plan.fixed[0]
    if best.rps == 0:
        return "No fixed split keeps the SLO at any rate."
    gain = f"{plan.gain:.2f} times what the best fixed split, {best.roles}, serves within the SLO"
    if plan.gain >= WORTH_IT:
        return f"Roles that follow the load are worth it here: {gain}."
    more = (
        ""
        if plan.moves
        else ("; they pay where the mix moves (--lengths mixes:...), or where it is not known beforehand")
    )
    if plan.gain < 1 / AS_GOOD:
        return f"A fixed split serves more here: roles that follow the load serve {gain}{more}."
    if plan.gain <= AS_GOOD:
        return f"A fixed split is as good here: roles that follow the load serve {gain}{more}."
    return f"Roles that follow the load gain little here: {gain}{more}."


def explanation(candidate: Candidate, scene: Scene) -> str:
    """Mean time of a request by phase at every load, and the bottleneck."""
    head = ["load", "ingress", "queue", "prefill", "KV transfer", "first step", "decode", "end to end", "limited by"]
    rows = []
    for outcome in candidate.outcomes:
        phases = phases_s(outcome)
        rows.append(
            [f"{outcome.load.kind} {outcome.load.value:.3g}"]
            + [f"{1e3 * value:.0f}" for value in phases.values()]
            + [f"{1e3 * sum(phases.values()):.0f}", outcome.bottleneck]
        )
    last_outcome = candidate.outcomes[-1]
    shares = phases_s(last_outcome)
    whole_s = sum(shares.values())
    largest = sorted(shares, key=lambda name: -shares[name])[:2]
    workload = scene.workload
    lines = [
        f"{candidate.deployment.label}, {workload.label} tokens, {scene.hardware.name}; mean ms per request, simulated",
        *_extrapolated_loads(candidate, scene),
        "",
        table(head, rows, left=(0, 8)),
        "",
        "ingress: HTTP, tokenizing, routing. queue: waiting for a prefill. first step: from KV to the first token.",
        f"At {last_outcome.load.kind} {last_outcome.load.value:.3g}: "
        + ", ".join(f"{shares[name] / whole_s:.0%} {name}" for name in largest)
        + "; busy: "
        + ", ".join(f"{role} engines {share:.0%}" for role, share in last_outcome.level.busy.items())
        + f", busiest link {last_outcome.level.link_busy:.0%}"
        + f", prompts waited for KV memory {last_outcome.level.kv_full:.0%} of the time.",
    ]
    topology = candidate.deployment.topology
    if isinstance(topology, Disaggregated):
        matcher = Matcher(scene.hardware, scene.shape, workload, scene.prefix_hit_rate)
        alone = matcher.rates(topology.prefill.one_replica, topology.decode.one_replica, math.inf)
        prefills, decodes = topology.prefill.replicas, topology.decode.replicas
        lines.append(
            f"Without queues its prefill serves {prefills * alone.prefill_rps:.1f} requests/s, its decode "
            f"{decodes * alone.decode_rps:.1f} with KV memory full."
        )
    return "\n".join(lines)


def _extrapolated_loads(candidate: Candidate, scene: Scene) -> list[str]:
    """One line for what all loads have in common, and one for those that lie outside by themselves."""
    if found := scene.outside(candidate.deployment):
        return [sentence(outside_text(found))]
    loads = [o.load for o in candidate.outcomes if scene.outside(candidate.deployment, o)]
    if not loads:
        return []
    return [
        f"Extrapolated: {loads[0].kind} {', '.join(f'{load.value:.3g}' for load in loads)}, outside of the fit's loads"
    ]


def phases_s(outcome: LoadResult) -> dict[str, float]:
    """Phase -> mean seconds per request; they sum to the mean E2EL."""
    level = outcome.level
    mean = statistics.fmean
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


def _slo(slo: Slo) -> str:
    return bounds_text(slo) if slo.bounded else "none, so goodput is throughput"


def regimes(candidates: Sequence[Candidate], scene: Scene) -> list[Regime]:
    """The regime map of the candidates, in as few stretches as the error of the model allows.

    From the lowest throughput up, the configuration that stays longest within the error of the lowest TPOT
    (sqrt(2) times the held-out median error: two predictions closer than that may be the same). Loads
    that miss the TTFT bound do not count, nor do those that are extrapolated. Between simulated loads a
    curve is straight, and nothing is extended beyond them. Raises ValueError where the error is not known.
    """
    error = scene.hardware.error
    if error is None:
        raise ValueError(f"the errors of {scene.hardware.name} are not known")
    return stretches(
        {c.deployment.label: curve_of(c, scene) for c in candidates},
        tolerance=math.sqrt(2) * error.tpot_percent / 100,
    )


def curve_of(candidate: Candidate, scene: Scene) -> ThroughputCurve:
    """Throughput per node and TPOT of the candidate's loads that are not extrapolated."""
    scale = candidate.copies * scene.hardware.gpus_per_node / candidate.total_gpus
    ttft_slo = Slo(ttft_s=scene.slo.ttft_s, quantile=scene.slo.quantile)
    inside = [o for o in candidate.outcomes if not scene.outside(candidate.deployment, o)]
    within_ttft = [o for o in inside if ttft_slo.stress_of(o.latencies) <= 1]
    return sorted(ThroughputPoint(o.output_tokens_per_s * scale, o.tpot_s) for o in within_ttft)
