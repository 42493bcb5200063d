"""The planner's results in words, tables and files."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from pdlab.catalog import ModelShape
from pdlab.errors import UsageError
from pdlab.nodes import ClusterView
from pdlab.perf import Hardware
from pdlab.planner import Candidate, Outcome, Slo, rates, regimes
from pdlab.results import Experiment, Manifest
from pdlab.simulated import to_run
from pdlab.spec import Collocated, Deployment, Disaggregated, Pool, to_yaml
from pdlab.tables import table
from pdlab.workload import Closed, Workload

ROWS = 12


def ranking(
    candidates: Sequence[Candidate],
    possible: int,
    shape: ModelShape,
    hardware: Hardware,
    view: ClusterView,
    workload: Workload,
    slo: Slo,
    gpus: int,
) -> str:
    """The ranked table, the verdict on PD, the regime map and the rate-matching check. All simulated."""
    margin = uncertainty(hardware)
    collocated = next((c for c in candidates if isinstance(c.deployment.topology, Collocated)), None)
    head = ["", "deployment", "copies", "load", "goodput/s per GPU", "req/s", "tok/s per node", "TTFT ms", "TPOT ms"]
    head += ["in SLO", "limited by", "over collocated"]
    rows = []
    for number, candidate in enumerate(candidates[:ROWS], start=1):
        rows.append(_row(number, candidate, collocated, hardware.gpus_per_node))
    error = hardware.error
    rests = (
        f"errors on held-out runs: TPOT {error.tpot_percent:g} %, TTFT {error.ttft_percent:g} %, "
        f"requests/s {error.requests_per_s_percent:g} % (medians)"
        if error
        else "never checked against held-out runs"
    )
    lines = [
        f"simulated: {shape.name}, {gpus} x {hardware.gpu} ({view.name}), "
        f"{workload.sent_input_tokens}:{workload.sent_output_tokens} tokens, SLO {_slo(slo)}",
        f"step times: {hardware.name} ({hardware.stack}); {rests}",
        f"{possible} deployments fit; {len(candidates)} were simulated, the others are far from rate-matched",
        "",
        table(head, rows, left=(1, 10)),
    ]
    if len(candidates) > ROWS:
        lines.append(f"... and {len(candidates) - ROWS} more")
    lines += [
        "",
        verdict(candidates, margin, slo),
        "",
        *_regimes(candidates, hardware),
        "",
        *_matching(candidates, shape, hardware, workload, slo),
    ]
    return "\n".join(lines)


def uncertainty(hardware: Hardware) -> float:
    """Relative difference between two predictions that may be nothing: sqrt(2) x the median error of requests/s,
    scaled from the median to a standard deviation of a normal error (1.4826) and to 90 % of cases (1.645)."""
    percent = hardware.error.requests_per_s_percent if hardware.error else 10.0
    return math.sqrt(2) * 1.4826 * 1.645 * percent / 100


def verdict(candidates: Sequence[Candidate], margin: float, slo: Slo) -> str:
    """Whether PD pays here, and how sure that is."""
    collocated = next((c for c in candidates if isinstance(c.deployment.topology, Collocated)), None)
    split = next((c for c in candidates if isinstance(c.deployment.topology, Disaggregated)), None)
    if not any(candidate.best for candidate in candidates):
        return f"No deployment meets the SLO ({_slo(slo)}) at any simulated load: relax it, or give more GPUs."
    if split is None or not split.best:
        return "PD does not pay here: no PD deployment meets the SLO."
    if collocated is None or not collocated.best:
        return f"PD pays here: only PD meets the SLO, best {split.deployment.label}."
    gain = split.goodput_per_gpu / collocated.goodput_per_gpu - 1
    both = f"{split.deployment.label} against {collocated.deployment.label}: {gain:+.0%} goodput per GPU"
    if gain > margin:
        return f"PD pays here. {both} (differences below {margin:.0%} may be nothing)."
    if gain < -margin:
        return f"PD does not pay here. {both} (differences below {margin:.0%} may be nothing)."
    return f"PD does not clearly pay here. {both}, within the uncertainty of {margin:.0%}: measure both."


def hand_over(best: Sequence[Candidate], workload: Workload, view: ClusterView, folder: Path | None) -> str:
    """Commands for the best candidates; with ``folder`` also their configuration files. Raises UsageError."""
    if not best:
        return "Nothing to hand over."
    lines = ["To measure the best of these:"]
    for candidate in best:
        deployment = candidate.deployment
        where = f" --cluster {view.name}" if view.name in ("p5.48xlarge-x2", "p5.48xlarge-x12") else ""
        command = f"python launch_gptoss.py {launch_flags(deployment)}"
        if folder is not None:
            path = folder / f"{deployment.label}.yaml"
            _write(path, to_yaml(deployment.model_copy(update={"name": deployment.label})))
            command = f"python launch_gptoss.py --config {path}"
        loads = ",".join(str(int(o.load.value)) for o in candidate.outcomes if isinstance(o.load, Closed))
        kind = f"-t concurrency -c {loads}" if loads else f"-t request-rate -r {candidate.outcomes[0].load.value:g}"
        lengths = f"--itl {workload.input_tokens} --otl {workload.output_tokens}"
        lines += [f"  {command}{where}", f"  ./run_bm.sh -e {deployment.label} {kind} {lengths}"]
    lines.append("  python viz.py --exps " + " ".join(f"bm_results/{c.deployment.label}" for c in best))
    lines.append("  python plan.py --compare " + " ".join(f"bm_results/{c.deployment.label}" for c in best))
    return "\n".join(lines)


def launch_flags(deployment: Deployment) -> str:
    """The flags of launch_gptoss.py that mean this deployment."""
    topology = deployment.topology
    model = "" if deployment.model == "gpt-oss-120b" else f" --model {deployment.model}"
    if isinstance(topology, Collocated):
        return f"--collocated{_pool_flags('', topology.pool)}{model}"
    pools = _pool_flags("p-", topology.prefill) + _pool_flags("d-", topology.decode)
    return f"--pd-{topology.placement}{pools}{model}"


def _pool_flags(prefix: str, pool: Pool) -> str:
    text = f" --{prefix}num {pool.replicas} --{prefix}tp {pool.tp}"
    text += f" --{prefix}dp {pool.dp}" if pool.dp > 1 else ""
    text += f" --{prefix}pp {pool.pp}" if pool.pp > 1 else ""
    return text + (f" --{prefix}ep" if pool.expert_parallel else "")


def experiments(candidates: Sequence[Candidate], workload: Workload) -> list[Experiment]:
    """Candidates as experiments of simulated runs, for the plots and tables of viz."""
    return [
        Experiment(
            name=candidate.deployment.label,
            manifest=Manifest(
                origin="simulated",
                label=candidate.deployment.label,
                deployment=candidate.deployment,
                gpus=candidate.deployment.gpus,
                workload=workload,
            ),
            runs=tuple(to_run(o.level, candidate.deployment.label, workload) for o in candidate.outcomes),
        )
        for candidate in candidates
    ]


def explanation(candidate: Candidate, shape: ModelShape, hardware: Hardware, workload: Workload) -> str:
    """Mean time of a request by phase at every load, and what limits."""
    head = ["load", "ingress", "queue", "prefill", "KV transfer", "first step", "decode", "end to end", "limited by"]
    rows = []
    for outcome in candidate.outcomes:
        phases = phases_s(outcome)
        rows.append(
            [f"{outcome.load.kind} {outcome.load.value:g}"]
            + [f"{1e3 * value:.0f}" for value in phases.values()]
            + [f"{1e3 * sum(phases.values()):.0f}", outcome.bottleneck]
        )
    alone = rates(candidate.deployment, shape, hardware, workload, Slo())
    return "\n".join(
        [
            f"{candidate.deployment.label}, {workload.sent_input_tokens}:{workload.sent_output_tokens} tokens, "
            f"{hardware.name}; mean ms per request, simulated",
            "",
            table(head, rows, left=(0, 8)),
            "",
            f"one prefill replica alone: {alone.prefill_rps:.1f} requests/s",
        ]
    )


def phases_s(outcome: Outcome) -> dict[str, float]:
    """Phase -> mean seconds per request; they sum to the mean E2EL."""
    level = outcome.level
    mean = statistics.fmean
    arrival, start, end = mean(level.arrival_s), mean(level.prefill_start_s), mean(level.prefill_end_s)
    first, finish = mean(level.first_token_s), mean(level.finish_s)
    arrived = mean(level.kv_arrived_s) if level.transferred_bytes else end
    queue_begins = mean(level.queued_s)
    return {
        "ingress": queue_begins - arrival,
        "queue": start - queue_begins,
        "prefill": end - start,
        "KV transfer": arrived - end,
        "first step": first - arrived,
        "decode": finish - first,
    }


def _row(number: int, candidate: Candidate, collocated: Candidate | None, node_gpus: int) -> list[str]:
    shown = candidate.best or candidate.outcomes[0]
    scale = candidate.copies * node_gpus / candidate.total_gpus
    over = "-"
    if collocated is not None and collocated.best and candidate.best and candidate is not collocated:
        over = f"{candidate.goodput_per_gpu / collocated.goodput_per_gpu - 1:+.0%}"
    return [
        str(number),
        candidate.deployment.label,
        str(candidate.copies),
        f"{shown.load.value:g}" + ("/s" if shown.load.kind == "rate" else ""),
        f"{candidate.goodput_per_gpu:.3f}" if candidate.best else "-",
        f"{shown.requests_per_s:.2f}",
        f"{shown.output_tokens_per_s * scale:.0f}",
        f"{1e3 * shown.ttft_s:.0f}",
        f"{1e3 * shown.tpot_s:.2f}",
        f"{shown.good_share:.0%}",
        shown.bottleneck,
        over,
    ]


def _regimes(candidates: Sequence[Candidate], hardware: Hardware) -> list[str]:
    lines = ["Lowest TPOT at a throughput (output tokens/s per node):"]
    for regime in regimes(candidates, hardware.gpus_per_node):
        low, high = (1e3 * value for value in regime.tpot_s)
        lines.append(
            f"  {regime.from_tokens_per_s:6.0f} to {regime.to_tokens_per_s:6.0f}  {regime.label}"
            f"  (TPOT {low:.1f} to {high:.1f} ms)"
        )
    return lines


def _matching(
    candidates: Sequence[Candidate], shape: ModelShape, hardware: Hardware, workload: Workload, slo: Slo
) -> list[str]:
    """Prefill against decode service rates of the best PD candidates: the check beside the simulation."""
    lines = ["Rate matching, without queues (requests/s of one replica; P:D at which neither waits):"]
    seen = set()
    for candidate in candidates:
        topology = candidate.deployment.topology
        if not isinstance(topology, Disaggregated) or (topology.prefill.tp, topology.decode.tp) in seen:
            continue
        seen.add((topology.prefill.tp, topology.decode.tp))
        alone = rates(candidate.deployment, shape, hardware, workload, slo)
        ratio = alone.decode_rps / alone.prefill_rps
        matched = (
            f"{ratio:.1f}:1" if ratio >= 1 else f"1:{1 / ratio:.1f}" if ratio > 0 else "none, decode misses the SLO"
        )
        lines.append(
            f"  P TP{topology.prefill.tp} {alone.prefill_rps:.1f}, D TP{topology.decode.tp} {alone.decode_rps:.1f}: "
            f"{matched}  (simulated best: {topology.prefill.replicas}:{topology.decode.replicas})"
        )
        if len(seen) == 4:
            break
    return lines


def _slo(slo: Slo) -> str:
    bounds = {"TTFT": slo.ttft_s, "TPOT": slo.tpot_s, "E2EL": slo.e2el_s}
    told = [f"{name} <= {1e3 * value:g} ms" for name, value in bounds.items() if value is not None]
    return f"{', '.join(told)} for {slo.quantile:.0%} of requests" if told else "none"


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--out {path.parent}: cannot be written ({error.strerror})") from error
