"""(Deployment, ClusterView) -> Placement, and the links of the KV transfers. Pure: no Ray.

Rules. Only free slots and free CPUs count. Collocated and fluid replicas go on as few nodes as possible, partly used
nodes first. ``pack`` puts all prefill and decode replicas on one node. ``spread`` puts the two pools on disjoint sets
of nodes. A TP group stays on one node, unless TP is larger than the largest node: then it takes whole free nodes of
one size. A replica stays on one node if possible, otherwise on few. If a placement exists, it is found.

Ray Serve has one label selector for all replicas of a deployment. So a pool is pinned to its set of nodes, and Ray
chooses the node and the GPUs of each replica within the set. These choices may differ from the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdlab.core.catalog import gpu_link
from pdlab.core.deployment import FLAG_PREFIX, Deployment, Disaggregated, Fluid, Pool
from pdlab.core.errors import PlacementError
from pdlab.core.nodes import (
    NODE_ID_LABEL,
    NODE_NAME_LABEL,
    ClusterNode,
    ClusterView,
    GpuLink,
    Placement,
    ReplicaPlacement,
    Role,
    TpGroup,
    WireKind,
    common_network,
    network_wire,
    rate_text,
)
from pdlab.core.schema import Frozen
from pdlab.core.text import listed
from pdlab.placement.explain import explain
from pdlab.placement.solver import choose_nodes, cpus_per_group, eligible, fill

# Per replica its TP groups, each as the ids of its nodes.
Layout = list[list[tuple[str, ...]]]


class Link(Frozen):
    """The link from one prefill node to one decode node.

    ``kind``: the name of ``wire`` for the reader. ``pairs``: the number of (prefill replica, decode replica) pairs that
    use the link.
    """

    prefill_node: str
    decode_node: str
    kind: str
    wire: WireKind
    pairs: int


def place(deployment: Deployment, view: ClusterView) -> Placement:
    """Place all replicas, also those that start only under a later load.

    Raises PlacementError with the demand, the free slots and the smallest changes that fit.
    """
    layouts = _layouts(deployment, view)
    if layouts is None:
        raise PlacementError(why_not(deployment, view))
    free = {node.id: list(node.slots) for node in view.engine_nodes}
    replicas: list[ReplicaPlacement] = []
    for role, layout in layouts.items():
        tp = deployment.pools[role].tp
        for index, groups in enumerate(layout):
            placed = tuple(_allocate(free, node_ids, tp) for node_ids in groups)
            replicas.append(ReplicaPlacement(role=role, index=index, groups=placed))
    head = next((node for node in view.nodes if node.head), view.nodes[0])
    return Placement(device=view.device, replicas=tuple(replicas), ingress_nodes=(head.id,))


def why_not(deployment: Deployment, view: ClusterView) -> str:
    """The demand, the free slots and the smallest changes that fit, of a deployment that does not."""
    return explain(deployment, view, lambda d, v: _layouts(d, v) is not None)


def fits(deployment: Deployment, view: ClusterView) -> bool:
    """Whether `place` would succeed. It is quicker, because it does not explain a refusal."""
    return _layouts(deployment, view) is not None


def _layouts(deployment: Deployment, view: ClusterView) -> dict[Role, Layout] | None:
    topology = deployment.topology
    nodes = view.engine_nodes
    by_role: dict[Role, Pool]
    if isinstance(topology, Disaggregated):
        by_role = {"prefill": topology.prefill, "decode": topology.decode}
        if topology.placement == "pack":
            node = _packing_node(list(by_role.values()), nodes)
            if node is None:
                return None
            return {role: [[(node.id,)] * (pool.pp * pool.dp)] * pool.replicas for role, pool in by_role.items()}
    else:
        role: Role = "fluid" if isinstance(topology, Fluid) else "collocated"
        by_role = {role: deployment.most_pools[role]}
    chosen = choose_nodes(list(by_role.values()), nodes)
    if chosen is None:
        return None
    return {role: fill(offer, node_ids) for role, (offer, node_ids) in zip(by_role, chosen, strict=True)}


def _packing_node(pools: Sequence[Pool], nodes: Sequence[ClusterNode]) -> ClusterNode | None:
    """The fullest node with room for all pools."""
    slots = sum(pool.gpus for pool in pools)
    fitting = [
        node
        for node in nodes
        if len(node.slots) >= slots
        and all(eligible(pool, [node]) for pool in pools)
        and (
            not node.gpus
            or node.available_cpus >= sum(pool.tp_groups * cpus_per_group(node, pool.tp) for pool in pools)
        )
    ]
    return min(fitting, key=lambda node: len(node.slots), default=None)


def _allocate(free: dict[str, list[int]], node_ids: Sequence[str], tp: int) -> TpGroup:
    share = tp // len(node_ids)
    slots = {}
    for node_id in node_ids:
        slots[node_id] = tuple(free[node_id][:share])
        del free[node_id][:share]
    return TpGroup(slots=slots)


def links(placement: Placement, view: ClusterView) -> tuple[Link, ...]:
    """The link of each (prefill node, decode node) pair, in order of the nodes; empty for collocated.

    Ray Serve LLM pairs any prefill with any decode replica, so every pair of nodes is used. Fluid replicas pair with
    all others.
    """
    counts: dict[tuple[str, str], int] = {}
    for prefill, decode in placement.pairs():
        for pair in ((p, d) for p in prefill.nodes for d in decode.nodes):
            counts[pair] = counts.get(pair, 0) + 1
    return tuple(
        Link(prefill_node=p, decode_node=d, kind=link_kind(one, other), wire=link_wire(one, other), pairs=count)
        for (p, d), count in counts.items()
        for one, other in [(view.node(p), view.node(d))]
    )


_NETWORK = {
    "efa": "EFA/SRD",
    "infiniband": "InfiniBand RDMA",
    "roce": "RoCE RDMA",
    "tcpxo": "TCP",
    "ethernet": "TCP",
    "loopback": "TCP",
    "tcp": "TCP",
}


def link_wire(prefill: ClusterNode, decode: ClusterNode) -> WireKind:
    """The wire that UCX uses between two nodes if all the software for it is there."""
    on_gpus = bool(prefill.gpus and decode.gpus)
    if prefill.id == decode.id:
        return "gpu peer" if on_gpus else "shared memory"
    if not on_gpus and prefill.machine == decode.machine:
        return "shared memory"
    return network_wire((prefill, decode))


# Between GPUs of one node. If GPUs with only PCIe refuse cuda_ipc, KV cache goes through host memory.
GPU_LINKS: dict[GpuLink | None, str] = {
    "nvlink": "NVLink (cuda_ipc)",
    "pcie": "PCIe",
    "xgmi": "Infinity Fabric (rocm_ipc)",
    None: "not known: give gpu_link of the node",
}


def link_kind(prefill: ClusterNode, decode: ClusterNode) -> str:
    """The name of `link_wire` for the reader, with the network's rate or what the link needs."""
    on_gpus = bool(prefill.gpus and decode.gpus)
    if prefill.id == decode.id:
        return GPU_LINKS[gpu_link(prefill)] if on_gpus else "shared memory (cma)"
    if not on_gpus and prefill.machine == decode.machine:
        return "shared memory (cma), same machine"
    rates = [node.nic.gbit_per_s for node in (prefill, decode) if node.nic.gbit_per_s is not None]
    common = common_network((prefill, decode))
    network = _NETWORK[common]
    if common in ("ethernet", "tcpxo") and rates:
        network = f"TCP, {rate_text(min(rates))}"
    if on_gpus and prefill.nvlink_domain and prefill.nvlink_domain == decode.nvlink_domain:
        # UCX uses NVLink between nodes only for memory with fabric handles, which torch does not allocate by default.
        return f"{network} (NVLink domain {prefill.nvlink_domain}, if the KV cache has fabric handles)"
    return network


def bundle_nodes(pool: Pool, placement: Placement, role: Role) -> list[tuple[str, ...]]:
    """For each of the tp * pp bundles of one Ray Serve replica, the ids of its allowed nodes.

    A Ray Serve replica is one DP rank, and all replicas of a pool share this list. So only a pool with one replica and
    one DP rank pins each bundle to one node. Other pools pin each bundle to their set of nodes.
    """
    replicas = placement.of(role)
    if len(replicas) == 1 and pool.dp == 1:
        return [(node,) for group in replicas[0].groups for node, slots in group.slots.items() for _ in slots]
    return [placement.nodes_of(role)] * (pool.tp * pool.pp)


def node_selector(placement: Placement, role: Role, view: ClusterView) -> tuple[str, dict[str, str]]:
    """The label that selects the nodes of a pool, and node id (of ``view``) -> its value.

    It is the label of names if all nodes have one, else that of Ray's ids. A cluster file has no ids of Ray: its nodes
    are selected by name even if they have no such label, and `cautions` warns.
    """
    nodes = [view.node(node_id) for node_id in placement.nodes_of(role)]
    for label in (NODE_NAME_LABEL, NODE_ID_LABEL):
        if all(label in node.labels for node in nodes):
            return label, {node.id: node.labels[label] for node in nodes}
    return NODE_NAME_LABEL, {node.id: node.labels.get(NODE_NAME_LABEL, node.id) for node in nodes}


def pinned_to_ids(placement: Placement, view: ClusterView) -> dict[Role, tuple[str, ...]]:
    """Role -> its nodes, for roles that Ray's node ids select: a replacement node has another id."""
    roles = placement.roles
    selectors = {role: node_selector(placement, role, view) for role in roles}
    return {role: tuple(values) for role, (label, values) in selectors.items() if label == NODE_ID_LABEL}


def _unnamed(placement: Placement, view: ClusterView) -> list[str]:
    """A warning about nodes that are selected by name but have no label with it."""
    unnamed = [
        node_id
        for role in placement.roles
        for node_id in placement.nodes_of(role)
        if node_selector(placement, role, view)[0] not in view.node(node_id).labels
    ]
    if not unnamed:
        return []
    return [
        f"{view.name} gives {listed(list(dict.fromkeys(unnamed)))} no label {NODE_NAME_LABEL}: start Ray there with "
        f"--labels {NODE_NAME_LABEL}={unnamed[0]} (each node its own id of the file), or the replicas wait for nodes"
    ]


def cautions(deployment: Deployment, placement: Placement, view: ClusterView) -> list[str]:
    """Warnings about TP groups that Ray may split, about nodes that differ, and about missing labels; usually none.

    Ray reserves single GPUs. If a replica spans nodes whose free GPUs are not a multiple of TP, and its bundles are not
    pinned one by one, Ray may split a TP group between nodes.
    """
    warnings = []
    for role in (replica.role for replica in placement.replicas if replica.index == 0):
        pool = deployment.pools[role]
        spanning = [replica for replica in placement.of(role) if len(replica.nodes) > 1]
        ids = dict.fromkeys(node for replica in spanning for node in replica.nodes)
        ragged = [i for i in ids if pool.tp < view.node(i).total_slots and len(view.node(i).slots) % pool.tp]
        if ragged and any(len(nodes) > 1 for nodes in bundle_nodes(pool, placement, role)):
            warnings.append(
                f"{role}: replicas span nodes whose free GPUs are not a multiple of TP {pool.tp} "
                f"({', '.join(ragged)}); Ray may split a TP group there: free those nodes first"
            )
    return warnings + _unlike(deployment, placement, view) + _unnamed(placement, view)


def _unlike(deployment: Deployment, placement: Placement, view: ClusterView) -> list[str]:
    """Warnings if prefill and decode are on nodes with different networks, or GPUs, unless flags chose these."""
    roles: tuple[tuple[Role, ...], ...] = (("prefill", "fluid"), ("decode", "fluid"))
    pools = [[view.node(node_id) for role in part for node_id in placement.nodes_of(role)] for part in roles]
    facts: list[tuple[str, Callable[[ClusterNode], str | None], str]] = [
        ("GPUs", lambda node: node.gpu_type, "the slower GPUs limit the throughput"),
        ("networks", lambda node: node.nic.kind, "KV cache uses TCP between them"),
    ]
    flags = dict.fromkeys(f"--{FLAG_PREFIX[replica.role]}gpu TYPE" for replica in placement.replicas)
    if all(pool.gpu_type for pool in deployment.pools.values()):
        facts = facts[1:]
    warnings = []
    for kind_of_fact, fact_of, effect in facts:
        prefill, decode = ({fact_of(node) or "unknown" for node in pool} for pool in pools)
        if prefill and decode and len(prefill | decode) > 1:
            both_roles = f"prefill {' and '.join(sorted(prefill))}, decode {' and '.join(sorted(decode))}"
            warnings.append(
                f"nodes with different {kind_of_fact}: {both_roles}; {effect} (choose with {' and '.join(flags)}, or "
                "gpu_type of a pool in --config)"
            )
    return warnings
