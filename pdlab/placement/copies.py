"""How many copies of a deployment fit, and how many GPUs of whole nodes each then takes. Pure."""

from __future__ import annotations

from pdlab.core.deployment import Deployment
from pdlab.core.nodes import ClusterNode, ClusterView
from pdlab.placement.place import fits, place

WINDOW = 8  # nodes in partial use looked at for the next copy
CPUS_PER_GPU = 24.0  # of a node that is made up; no engine asks for more


def whole_node_gpus(deployment: Deployment, node_gpus: int) -> float:
    """GPUs of the fewest whole nodes that take the deployment, filled with copies of it, per copy: nodes are rented
    whole, and what no copy can use is paid for all the same. What it uses where no number of such nodes takes it."""
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
    """How many copies can be placed within ``gpus`` GPUs of the view, one after another.

    Each is placed on the nodes in partial use that are emptiest and on as many free ones as it may need:
    looking at every node of a large cluster for every copy would take long.
    """
    free, partial = list(view.engine_nodes), list[ClusterNode]()
    node_gpus = max((len(node.slots) for node in free), default=1)
    window = -(-deployment.gpus // node_gpus) + len(deployment.pools)
    if any(pool.gpu_type for pool in deployment.pools.values()):
        window *= len({node.gpu_type for node in free})  # not every one is of a type that it takes
    copies = 0
    while copies < gpus // deployment.gpus:
        partial.sort(key=lambda node: (-len(node.slots), node.id))
        looked_at = partial[:WINDOW] + free[:window]
        if not looked_at or not fits(deployment, narrowed := ClusterView(nodes=tuple(looked_at))):
            break
        copies += 1
        used_slots: dict[str, set[int]] = {}
        for replica in place(deployment, narrowed).replicas:
            for group in replica.groups:
                for node_id, slots in group.slots.items():
                    used_slots.setdefault(node_id, set()).update(slots)
        remaining = [
            node.model_copy(update={"free_gpus": tuple(slot for slot in node.slots if slot not in used_slots[node.id])})
            if node.id in used_slots
            else node
            for node in looked_at
        ]
        untouched = {node.id for node in free[:window]} - used_slots.keys()
        free = [node for node in remaining if node.id in untouched] + free[window:]
        partly_used = partial[WINDOW:] + [node for node in remaining if node.id not in untouched]
        partial = [node for node in partly_used if node.slots]
    return copies
