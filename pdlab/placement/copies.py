"""How many copies of a deployment fit, and how many GPUs of whole nodes one copy takes. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from pdlab.core.deployment import Deployment
from pdlab.core.nodes import ClusterNode, ClusterView
from pdlab.placement.place import fits, place
from pdlab.placement.solver import cpus_per_group

WINDOW = 8  # number of partly used nodes that are tried for the next copy
CPUS_PER_GPU = 24.0  # of an assumed node, as of p5.48xlarge; engines need less


def whole_node_gpus(deployment: Deployment, node_gpus: int) -> float:
    """GPUs per copy on the fewest whole nodes that fit the deployment, filled with copies of it.

    Nodes are rented whole, so GPUs that no copy can use count too. If the deployment does not fit such nodes: the GPUs
    that it uses.
    """
    fewest = -(-deployment.gpus // node_gpus)
    for count in range(fewest, fewest + len(deployment.pools) + 1):
        nodes = [
            ClusterNode(id=f"node-{number}", gpus=node_gpus, cpus=CPUS_PER_GPU * node_gpus, head=not number)
            for number in range(count)
        ]
        if copies := copies_of(deployment, ClusterView(nodes=tuple(nodes)), count * node_gpus):
            return count * node_gpus / copies
    return deployment.gpus


def copies_of(deployment: Deployment, view: ClusterView, gpus: int) -> int:
    """The number of copies that fit on ``gpus`` GPUs of the view, placed one after another.

    For each copy only the emptiest partly used nodes and a few free ones are tried, because trying every node of a
    large cluster would take long. If pools are bound to a GPU type, the free ones are a few of each type.
    """
    bound = any(pool.gpu_type for pool in deployment.pools.values())
    free, partial = _by_type(view.engine_nodes, bound), list[ClusterNode]()
    windows = {
        gpu_type: -(-deployment.gpus // max(1, *(len(node.slots) for node in nodes))) + len(deployment.pools)
        for gpu_type, nodes in free.items()
    }
    copies = 0
    while copies < gpus // deployment.gpus:
        partial.sort(key=lambda node: (-len(node.slots), node.id))
        tried = [node for gpu_type, nodes in free.items() for node in nodes[: windows[gpu_type]]]
        looked_at = partial[:WINDOW] + tried
        if not looked_at or not fits(deployment, narrowed := ClusterView(nodes=tuple(looked_at))):
            break
        copies += 1
        used_slots: dict[str, set[int]] = {}
        used_cpus: dict[str, int] = {}
        by_id = {node.id: node for node in looked_at}
        for replica in place(deployment, narrowed).replicas:
            for group in replica.groups:
                for node_id, slots in group.slots.items():
                    used_slots.setdefault(node_id, set()).update(slots)
                    takes = cpus_per_group(by_id[node_id], len(slots))
                    used_cpus[node_id] = used_cpus.get(node_id, 0) + takes
        remaining = [
            _without(node, used_slots[node.id], used_cpus[node.id]) if node.id in used_slots else node
            for node in looked_at
        ]
        untouched = {node.id for node in tried} - used_slots.keys()
        for gpu_type, nodes in free.items():
            window = windows[gpu_type]
            free[gpu_type] = [node for node in nodes[:window] if node.id in untouched] + nodes[window:]
        partly_used = partial[WINDOW:] + [node for node in remaining if node.id not in untouched]
        partial = [node for node in partly_used if node.slots]
    return copies


def _by_type(nodes: Iterable[ClusterNode], bound: bool) -> dict[str | None, list[ClusterNode]]:
    """The nodes of each GPU type. ``bound``: pools need a type; else all nodes are alike (None)."""
    by_type: dict[str | None, list[ClusterNode]] = {}
    for node in nodes:
        by_type.setdefault(node.gpu_type if bound else None, []).append(node)
    return by_type


def _without(node: ClusterNode, slots: set[int], cpus: int) -> ClusterNode:
    """The node with these slots and as many CPUs in use."""
    free = {"free_gpus": tuple(slot for slot in node.slots if slot not in slots)}
    return node.model_copy(update={**free, "free_cpus": node.available_cpus - cpus} if cpus else free)
