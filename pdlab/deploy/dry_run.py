"""The dry run as text: label, replicas and links, GPUs used and idle, arguments, the commands that follow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from pdlab.core import defaults
from pdlab.core.command_lines import command_line
from pdlab.core.commands import PDLAB
from pdlab.core.deployment import Deployment, Fluid
from pdlab.core.nodes import ClusterView, Placement, ReplicaPlacement
from pdlab.core.schema import yaml_text
from pdlab.core.text import aligned, counted
from pdlab.deploy import engine_memory
from pdlab.deploy.prepared import Prepared
from pdlab.placement.place import Link, links

MAX_LINK_ROWS = 12
# The loads of the published sweep, and such as CPU engines answer in reasonable time.
LOADS = {"gpu": (4, 8, 16, 32, 64), "cpu": (4, 16)}


def describe(prepared: Prepared, *, serving_path: str, base_url: str, launch_command: str) -> str:
    """The text of a dry run. ``serving_path``: the path to the engines and its reason. ``launch_command``: the command
    that starts the deployment.
    """
    deployment, view, placement = prepared.deployment, prepared.view, prepared.placement
    unit = "GPU" if placement.device == "gpu" else "CPU slot"
    used = placement.used_slots
    sections = [
        f"deployment  {deployment.label}" + (f"  ({deployment.name})" if deployment.name else ""),
        f"model       {deployment.model}, served as {prepared.model_id} at {base_url}/v1",
        f"cluster     {view.name}: {counted(len(view.engine_nodes), 'engine node')}, "
        f"{deployment.gpus} {unit}s of {sum(len(node.slots) for node in view.engine_nodes)} free ones used"
        + (f", {most} at most" if (most := sum(map(len, used.values()))) > deployment.gpus else ""),
        f"serving     {serving_path}, from {', '.join(placement.ingress_nodes)}",
        *_roles(deployment),
        *([f"secrets     {', '.join(names)}: of the launcher's environment"] if (names := deployment.secrets) else []),
        "",
        _replica_table(deployment, view, placement, unit),
        "",
        _link_table(links(placement, view)),
        _node_table(view, used, unit),
        "",
        _memory(prepared),
        f"Ray Serve LLM arguments ({prepared.app.import_path}):",
        _indent(yaml_text(prepared.app.args, default_flow_style=None, width=110)),
        "Commands that follow:",
        _indent("\n".join(_commands(prepared, launch_command, base_url))),
    ]
    return "\n".join(section for section in sections if section is not None)


def _roles(deployment: Deployment) -> list[str]:
    topology = deployment.topology
    if not isinstance(topology, Fluid):
        return []
    bounds = f"at least {topology.p_min} prefill and {topology.d_min} decode"
    text = f"a controller follows the load, {bounds}" if topology.split is None else f"{topology.roles}, as given"
    below = topology.prefill_locally_below
    short = (
        ""
        if below is None
        else "; prompts below "
        f"{counted(below, 'token') if isinstance(below, int) else 'the threshold from measured rates'} where decoded"
    )
    if topology.prefix_affinity:
        short += "; prompts where their beginning is cached, if that ends earlier"
    lines = [f"roles       {text}{short} ({PDLAB} roles changes them)"]
    if topology.moves:
        lines.append(
            f"engines     {topology.pool.replicas} at the start, then {topology.least} to {topology.most} by the load"
        )
    return lines


def _replica_table(deployment: Deployment, view: ClusterView, placement: Placement, unit: str) -> str:
    """One row per replica and node; the link column has how its KV cache travels."""
    begins = {role: pool.replicas for role, pool in deployment.pools.items()}
    kinds: dict[tuple[str, str], list[str]] = {}
    for link in links(placement, view):
        ends = (("prefill", link.prefill_node), ("decode", link.decode_node))
        for key in (*ends, ("fluid", link.prefill_node), ("fluid", link.decode_node)):
            kinds.setdefault(key, []).append(link.kind)
    rows = [("replica", "node", f"{unit}s", "KV transfer over")]
    for replica in placement.replicas:
        for node, slots in replica.slots.items():
            over = ", ".join(dict.fromkeys(kinds.get((replica.role, node), ["-"])))
            wanted = "" if replica.index < begins[replica.role] else " (if the load needs it)"
            name = f"{replica.role} {replica.index}{_ranks(replica, node)}{wanted}"
            rows.append((name, node, ranges(slots), over))
    return _table(rows)


def _ranks(replica: ReplicaPlacement, node: str) -> str:
    """Which of the replica's TP groups are on the node, where there are several nodes."""
    if len(replica.nodes) == 1 or len(replica.groups) == 1:
        return ""
    numbers = [number for number, group in enumerate(replica.groups) if node in group.slots]
    return f" TP groups {ranges(numbers)}" if len(numbers) > 1 else f" TP group {numbers[0]}"


def _link_table(links: Sequence[Link]) -> str | None:
    if not links:
        return None
    if len(links) > MAX_LINK_ROWS:
        kinds = Counter(link.kind for link in links)
        return "".join(f"KV links: {kind} between {counted(count, 'pair')} of nodes\n" for kind, count in kinds.items())
    rows = [("prefill node", "decode node", "link", "replica pairs")]
    rows += [(link.prefill_node, link.decode_node, link.kind, str(link.pairs)) for link in links]
    return _table(rows) + "\n"


def _node_table(view: ClusterView, used: dict[str, tuple[int, ...]], unit: str) -> str:
    rows = [("node", f"{unit}s used", "idle", "taken by others")]
    for node in view.engine_nodes:
        mine = used.get(node.id, ())
        idle = [slot for slot in node.slots if slot not in mine]
        others = [slot for slot in range(node.gpus) if slot not in node.slots]
        rows.append((node.id, ranges(mine), ranges(idle), ranges(others)))
    return _table(rows)


def _memory(prepared: Prepared) -> str:
    unit = "GPU" if prepared.placement.device == "gpu" else "CPU rank"
    unknown = [role for role in prepared.deployment.pools if role not in {memory.role for memory in prepared.memory}]
    text = engine_memory.table(prepared.memory, prepared.workload, unit) if prepared.memory else ""
    if unknown:
        ids = dict.fromkeys(node for role in unknown for node in prepared.placement.nodes_of(role))
        nodes = [prepared.view.node(node_id) for node_id in ids]
        why = engine_memory.why_unknown(prepared.deployment, prepared.shape, nodes)
        text += f"memory of {' and '.join(unknown)} engines: not known ({why})\n"
    return text


def ranges(numbers: Iterable[int]) -> str:
    """``0-3,6`` for 0, 1, 2, 3, 6; ``-`` for none."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans) or "-"


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = aligned(rows, left=range(len(rows[0])))
    return "\n".join([lines[0], "-" * len(max(lines, key=len)), *lines[1:]])


def _commands(prepared: Prepared, launch_command: str, base_url: str) -> list[str]:
    name = prepared.deployment.name or prepared.deployment.label
    load = {"type": "concurrency", "concurrency": LOADS[prepared.placement.device]}
    sent = {**prepared.workload.bench_fields, "base_url": base_url, "model": prepared.model_id}
    return [
        launch_command,
        command_line("bench", name=name, **load, **sent),
        command_line("viz", exps=(f"{defaults.RESULTS}/{name}",), view={"normalized": True}),
    ]


def _indent(text: str) -> str:
    return "".join(f"  {line}\n" for line in text.splitlines())
