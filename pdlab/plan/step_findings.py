"""Findings about the basis of a plan's step times: version of the tables, host time, network, speculative
decoding. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from pdlab.core.catalog import ModelShape, encoder_not_counted, format_only_in_name
from pdlab.core.deployment import Deployment, Disaggregated, Pool
from pdlab.core.findings import Finding, found
from pdlab.core.text import counted
from pdlab.core.version import STACK
from pdlab.core.vllm_limits import redundant_experts
from pdlab.plan.extrapolation import major_minor, packs_over_nodes, unlike_gpu_link
from pdlab.sim.aic import literal_version
from pdlab.sim.hardware import Hardware, TableMode, routers_count_ends
from pdlab.sim.kv_transfer import LinkKind, link_of, wire_rate
from pdlab.sim.level import SimulatedLevel
from pdlab.sim.step_source import Correction
from pdlab.sim.steps import COMPARED_EXPERT_RANKS, has_wide_experts, tables_of

FEW_STEPS = 10  # of an answer: its last step counts as whole steps of its tokens, an error of up to one step
CALCULATED: tuple[TableMode, ...] = ("EMPIRICAL", "SOL")


def step_findings(
    hardware: Hardware,
    shape: ModelShape | None = None,
    deployments: Iterable[Deployment] = (),
    levels: Iterable[SimulatedLevel] = (),
    link: LinkKind | None = None,
) -> tuple[Finding, ...]:
    """Findings about the model, the hardware, and the GPU types beside it. ``deployments``:
    those of the plan, for whose pools the tables of ``shape`` may have estimated values. ``levels``: the predictions.
    ``link``: the link of KV transfers, if it is not that of the deployments. Raises UsageError for tables that do not
    exist."""
    findings: list[Finding] = []
    if shape is not None and (what := format_only_in_name(shape)):
        findings.append(found("weights_not_as_named", what=what))
    if shape is not None and (what := encoder_not_counted(shape)):
        findings.append(found("encoder_not_counted", what=what))
    planned = list(deployments)
    findings += {each.text: each for deployment in planned for each in _assumptions(deployment, hardware)}.values()
    pools = list(dict.fromkeys(pool for deployment in planned for pool in deployment.pools.values()))
    for each in hardware.types:
        if each.steps is not None:
            findings += _of_tables(each, shape, [pool for pool in pools if hardware.typed(pool) is each], planned)
    predicted = list(levels)
    beyond = max((level.beyond_tables for level in predicted), default=0.0)
    if beyond > 1:
        findings.append(found("step_times_extrapolated", times=beyond))
    for each in hardware.beside:
        findings.append(found("pools_of_two_types", prefill=hardware.gpu_type, decode=each.gpu_type))
    if hardware.common_node_gpus is None:
        sizes = [f"nodes of {each.gpu_type} have {counted(each.gpus_per_node, 'GPU')}" for each in hardware.types]
        findings.append(found("nodes_of_two_sizes", sizes=" and ".join(sizes)))
    links = {link_of(each) if link is None or each.mode == "collocated" else link for each in planned}
    if hardware.wires is not None and (not planned or links - {"nvlink"}):
        alike = len({wire_rate(each, "srd") for each in hardware.types}) == 1
        for each in (hardware,) if alike else hardware.types:
            findings += _of_network(each, "" if alike else f" of {each.gpu_type}")
    elif "srd" in links and hardware.wires is None and hardware.steps is not None:
        findings.append(found("network_assumed", gb_per_s=wire_rate(hardware, "srd").gb_per_s))
    if hardware.speculation is not None:
        speculation = hardware.speculation
        tokens = min((statistics.fmean(level.output_tokens) for level in predicted), default=math.inf)
        if tokens < FEW_STEPS * speculation.acceptance_length:
            findings.append(found("few_guessing_steps", tokens=tokens, accepted=speculation.acceptance_length))
        findings.append(
            found(
                "draft_time_not_counted",
                accepted=speculation.acceptance_length,
                guessed=speculation.draft_tokens,
            )
        )
    return tuple(findings)


def _assumptions(deployment: Deployment, hardware: Hardware) -> Iterable[Finding]:
    """What is predicted of a deployment that no node may have, or that is not simulated."""
    if (unlike := unlike_gpu_link(hardware, deployment)) is not None:
        yield found("steps_of_another_gpu_link", nodes=unlike.nodes, steps=unlike.steps)
    if packs_over_nodes(deployment, hardware):
        yield found("pack_over_nodes", gpus=deployment.gpus, node=hardware.gpus_per_node)
    else:
        largest: dict[int, tuple[int, Hardware]] = {}  # the largest TP and its hardware, by the GPUs of a node
        for pool in deployment.pools.values():
            typed = hardware.typed(pool)
            node = typed.gpus_per_node
            if node not in largest or pool.tp > largest[node][0]:
                largest[node] = pool.tp, typed
        for node, (tp, typed) in largest.items():
            if tp > node:
                link = "as if NVLink joined them"
                if typed.steps is not None:
                    link = f"with the link that the tables have between nodes of {typed.gpu}"
                yield found("tp_over_nodes", tp=tp, node=node, link=link)
    for pool in deployment.pools.values():
        arguments = deployment.engine_kwargs_of(pool)
        if arguments.get("enable_eplb"):
            copies = redundant_experts(arguments)
            yield found("experts_balanced", ranks=pool.tp * pool.dp, copies=copies)


def launched_stack(hardware: Hardware) -> tuple[Finding, ...]:
    """Whether pdlab launches another version of vLLM than that of the hardware, or with Ray what is planned without.
    Other engines are not launched, and the version of an unknown fit is unknown."""
    launched, planned = major_minor(STACK["vllm"]), hardware.engine_version
    routed = hardware.routers_count_ends == (routers_count_ends(STACK["ray"]).value > 0)
    same = planned == launched and routed and hardware.direct is None
    if planned is None or same or hardware.engine != "vllm" or hardware.gpu_type is None:
        return ()
    return (
        found(
            "launches_another_stack",
            launched=launched,
            ray=major_minor(STACK["ray"]),
            stack=hardware.stack,
            flags=f"{'' if hardware.beside else f'--hardware {hardware.gpu_type} '}--engine-version {launched}",
            less=", without the measured levels" if hardware.steps and hardware.steps.correction.fitted_levels else "",
        ),
    )


def _of_network(hardware: Hardware, of_type: str) -> Iterable[Finding]:
    """About the network of the hardware's nodes, if it is not EFA at the rate of the constants. ``of_type``: words that
    name its GPU type; empty: the nodes of all types are alike."""
    wires = hardware.wires
    assert wires is not None
    rate, line = wire_rate(hardware, "srd"), wires.node_gb_per_s
    share = line if line is None or rate.per_node else line / hardware.gpus_per_node
    if wires.network == "efa" and rate.gb_per_s == hardware.value("srd_gb_per_s"):
        return
    if rate.gb_per_s == share:
        why = f"the line rate of the NICs{'' if rate.per_node else ', shared equally'}"
    elif rate.per_node:
        why = "as published for TCP without GPUDirect"
    else:
        why = "as over EFA, because the nodes' file gives no gbit_per_s"
    of = f"{'node' if rate.per_node else 'GPU'}{of_type}"
    yield found("network_not_fitted", network=wires.network.upper(), gb_per_s=rate.gb_per_s, of=of, why=why)


def _of_tables(
    hardware: Hardware, shape: ModelShape | None, pools: Sequence[Pool], deployments: Sequence[Deployment]
) -> Iterable[Finding]:
    steps = hardware.steps
    assert steps is not None
    literal = literal_version(steps.system, steps.engine, steps.version)
    tables = major_minor(literal) or literal
    planned = steps.engine_version or tables
    if planned == tables:
        yield found("tables_of_version", gpu=hardware.gpu_type or hardware.gpu, engine=steps.engine, tables=literal)
    else:
        yield found(
            "tables_of_another_version",
            gpu=hardware.gpu_type or hardware.gpu,
            engine=steps.engine,
            tables=literal,
            planned=planned,
        )
    if steps.mode in CALCULATED:
        yield found("step_times_calculated", gpu=hardware.gpu_type or hardware.gpu, mode=steps.mode)
    apart = hardware.apart
    of_pd = [apart is not None and isinstance(each.topology, Disaggregated) for each in deployments]
    if not all(of_pd) or not of_pd:
        yield _host_time(steps.correction)
    if apart is not None and any(of_pd):
        yield found(
            "steps_of_pd",
            decode=apart.correction.factor,
            prefill=apart.correction.prefill_factor,
            sequence_us=apart.correction.sequence_us,
            path_ms=apart.pd_overhead_ms,
            source=apart.correction.source,
        )
    wide = [pool.tp * pool.dp for pool in pools if has_wide_experts(pool)]
    if wide:
        yield found("experts_wider_than_tables", gpus=max(wide), most=COMPARED_EXPERT_RANKS)
    tables_of_pools = [] if shape is None else [tables_of(steps, shape, pool) for pool in pools]
    kinds = sorted({kind for each in tables_of_pools for kind in each.estimated})
    if kinds and steps.mode not in CALCULATED:
        yield found("table_values_estimated", gpu=hardware.gpu_type or hardware.gpu, kinds=", ".join(kinds))


def _host_time(correction: Correction) -> Finding:
    return found(
        "host_time",
        host_ms=correction.host_ms,
        sequence_us=correction.sequence_us,
        sync_us=correction.sync_us,
        spread="not known" if correction.host_sd_ms is None else f"{correction.host_sd_ms:.2g} ms",
        source=correction.source or "of unknown origin",
    )
