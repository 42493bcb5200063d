"""The nodes of a plan: as many of a node type, or of a cluster file, as the planned GPUs need."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pdlab.core.catalog import gpu_name, has_gpu, known_gpus, load_cluster, node_types
from pdlab.core.commands import PDLAB
from pdlab.core.errors import UsageError
from pdlab.core.nodes import ClusterNode, ClusterView
from pdlab.core.schema import is_yaml_path
from pdlab.core.text import choices, counted, listed
from pdlab.placement.copies import CPUS_PER_GPU
from pdlab.sim.hardware import Hardware


def nodes_of(node: str) -> tuple[ClusterNode, ...]:
    """One node of a type in configs/clusters/, or the engine nodes of a cluster file. Raises UsageError."""
    if is_yaml_path(node):
        return load_cluster(node).engine_nodes
    try:
        return load_cluster(f"{node}-x1").engine_nodes
    except UsageError as error:
        raise UsageError(f"--node {node}: no node type of configs/clusters/; {choices(node, node_types())}") from error


def node_gpus(node: str, gpu: str) -> int:
    """The GPUs of a node of --node that has this GPU type, or else of its first node. Raises UsageError."""
    there = nodes_of(node)
    return next((each for each in there if has_gpu(each, gpu_name(gpu))), there[0]).gpus


def planned_nodes(hardware: Hardware, gpus: int, node: str | None, *, spread: bool) -> ClusterView:
    """Enough nodes for ``gpus`` GPUs of each GPU type of the hardware.

    The nodes of a cluster file with the most CPUs come first. More nodes than it has are like the one with the fewest.
    If ``gpus`` is no multiple of a node, only part of the last node is free. With ``spread`` there are at least two
    nodes, and all of their GPUs are free. For hardware of CPUs, the nodes are of this machine, and their slots for
    engine ranks count as GPUs.

    ``node``: a node type of configs/clusters/, or a cluster file; None: nodes as the hardware describes them.
    Raises UsageError for nodes that the hardware does not describe.
    """
    types = hardware.types
    if node is None:
        there = [[_node_of(each)] for each in types]
    else:
        there = [_required_nodes(each, node, of_type=len(types) > 1) for each in types]
    if hardware.cpu:
        there = [[each.model_copy(update={"gpus": hardware.gpus_per_node}) for each in alike] for alike in there]
    counts = [-(-gpus // alike[0].gpus) for alike in there]
    if spread and len(types) == 1:
        counts = [max(*counts, 2)]
    nodes: list[ClusterNode] = []
    for number in range(max(counts)):
        for alike in (each for each, count in zip(there, counts, strict=True) if number < count):
            model = alike[min(number, len(alike) - 1)]
            name = f"node-{len(nodes) + 1}"
            free = model.gpus if spread else min(model.gpus, gpus - number * model.gpus)
            changes = {"id": name, "head": not nodes, "labels": {"pdlab/node": name}, "free_cpus": None}
            changes["free_gpus"] = tuple(range(free))
            nodes.append(model.model_copy(update=changes))
    return ClusterView(name=_name_of(hardware, node, counts), nodes=tuple(nodes))


def _name_of(hardware: Hardware, node: str | None, counts: Sequence[int]) -> str:
    """The number and the kind of the planned nodes. ``counts``: the nodes of each GPU type."""
    if node is not None:
        kind = "local Ray node" if hardware.cpu else Path(node).stem if is_yaml_path(node) else node
        return f"{sum(counts)} x {kind}"
    of_size: dict[int, list[tuple[int, str]]] = {}
    for each, count in zip(hardware.types, counts, strict=True):
        of_size.setdefault(each.gpus_per_node, []).append((count, each.gpu_type or ""))
    return " and ".join(
        f"{sum(count for count, _ in alike)} x node of {size} {' and of '.join(name for _, name in alike)}"
        for size, alike in of_size.items()
    )


def without_network(node: str) -> str | None:
    """A note about nodes of a cluster file whose network is not given; None: it is."""
    if not is_yaml_path(node):
        return None
    silent = [each.id for each in nodes_of(node) if "nic" not in each.model_fields_set and each.gpus]
    if not silent:
        return None
    return (
        f"no nic of {listed(silent)} is given, so KV cache crosses between nodes as over Ethernet; add it, such as "
        "nic: {kind: efa, count: 32, gbit_per_s: 100}"
    )


def not_of_the_file(node: str, view: ClusterView) -> list[str]:
    """What a cluster file says of its nodes that the plan does not follow, as sentences; empty for a node type."""
    if not is_yaml_path(node):
        return []
    there, notes = nodes_of(node), []
    for gpu_type in dict.fromkeys(each.gpu_type for each in view.engine_nodes):
        alike = [each for each in there if has_gpu(each, gpu_type or "")]
        taken = sum(each.gpu_type == gpu_type for each in view.engine_nodes)
        if taken > len(alike):
            notes.append(f"it has {counted(len(alike), 'node')} of {gpu_type}, and the plan takes {taken} such nodes")
        least, most = (end(each.cpus for each in alike) for end in (min, max))
        if least < most and taken != len(alike):
            fewer = "those with the most" if taken < len(alike) else f"{least:g} for each node beyond these"
            notes.append(f"nodes of {gpu_type} have {least:g} to {most:g} CPUs, and the plan takes {fewer}")
    in_use = [each.id for each in there if len(each.slots) < each.total_slots or each.available_cpus < each.cpus]
    if in_use:
        notes.append(f"GPUs or CPUs of {listed(in_use)} are in use, and the plan takes nodes as if they were free")
    return notes


def _node_of(hardware: Hardware) -> ClusterNode:
    """A node as the hardware describes it."""
    gpus = hardware.gpus_per_node
    return ClusterNode(id="node", gpu_type=hardware.gpu_type, gpus=gpus, cpus=CPUS_PER_GPU * gpus)


def _required_nodes(hardware: Hardware, node: str, *, of_type: bool) -> list[ClusterNode]:
    """The nodes of --node, those with the most CPUs first. ``of_type``: those with the hardware's GPU type. Raises
    UsageError if there is none, or if the hardware does not describe the nodes."""
    types = sorted({each.gpu_type for each in nodes_of(node) if each.gpu_type})
    if not of_type and hardware.gpu_type in types and len(types) > 1:
        other = next(each for each in types if each != hardware.gpu_type)
        raise UsageError(
            f"--node {node} has nodes of {' and '.join(types)}, --hardware is of {hardware.gpu_type}: give both GPU "
            f"types, such as --p-hardware {hardware.gpu_type} --d-hardware {other}, or a file of one type"
        )
    nodes = [each for each in nodes_of(node) if not of_type or has_gpu(each, hardware.gpu_type or "")]
    if not nodes:
        raise UsageError(f"--node {node} has no nodes of {hardware.gpu_type}; give a file with both types")
    sizes = sorted({each.gpus for each in nodes if has_gpu(each, hardware.gpu_type or "")})
    if len(sizes) > 1:
        raise UsageError(
            f"--node {node} has nodes of {' and of '.join(map(str, sizes))} {hardware.gpu_type}: plan for one size, "
            "with a file of such nodes"
        )
    for each in nodes:
        require_node(hardware, each, node)
    nodes.sort(key=lambda each: -each.cpus)
    return [each.model_copy(update={"gpu_type": hardware.gpu_type}) for each in nodes]


def require_node(hardware: Hardware, node: ClusterNode, name: str) -> None:
    """Raises UsageError if a node has another GPU type, or another number of GPUs, than the hardware file. ``name``:
    the name of the node in the message."""
    if hardware.cpu:
        return
    if hardware.gpu_type is None:
        raise UsageError(
            f"hardware {hardware.name}: gpu_type is missing, by which nodes are compared; add the type "
            f"as Ray names it, such as gpu_type: H200 ({PDLAB} calibrate writes it)"
        )
    here = (node.gpus, node.gpu_type or "GPUs of unknown type")
    wanted = (hardware.gpus_per_node, hardware.gpu_type)
    if node.gpus != hardware.gpus_per_node or not has_gpu(node, hardware.gpu_type):
        with_tables = [name for name, each in known_gpus().items() if each.step_tables and has_gpu(node, name)]
        fix = f"give --hardware that {PDLAB} calibrate fitted on such nodes"
        if hardware.steps is not None and with_tables:
            fix = f"give --hardware {with_tables[0]}"
        raise UsageError(
            f"--node {name} has {here[0]} x {here[1]}, hardware {hardware.name} is of nodes of "
            f"{wanted[0]} x {wanted[1]}; {fix}, or another --node"
        )
