"""How many copies of a deployment fit, and how many GPUs of whole nodes one copy takes. Pure."""

from __future__ import annotations

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
    large cluster would take long.
    """
    free, partial = list(view.engine_nodes), list[ClusterNode]()
    node_gpus = max((len(node.slots) for node in free), default=1)
    window = -(-deployment.gpus // node_gpus) + len(deployment.pools)
    if any(pool.gpu_type for pool in deployment.pools.values()):
        window *= len({node.gpu_type for node in free})  # some nodes have another GPU type than the pool needs
    copies = 0
    while copies < gpus // deployment.gpus:
        partial.sort(key=lambda node: (-len(node.slots), node.id))
        looked_at = partial[:WINDOW] + free[:window]
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
        untouched = {node.id for node in free[:window]} - used_slots.keys()
        free = [node for node in remaining if node.id in untouched] + free[window:]
        partly_used = partial[WINDOW:] + [node for node in remaining if node.id not in untouched]
        partial = [node for node in partly_used if node.slots]
    return copies


def _without(node: ClusterNode, slots: set[int], cpus: int) -> ClusterNode:
    """The node with these slots and as many CPUs in use."""
    free = {"free_gpus": tuple(slot for slot in node.slots if slot not in slots)}
    return node.model_copy(update={**free, "free_cpus": node.available_cpus - cpus} if cpus else free)
