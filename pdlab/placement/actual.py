"""The actual placement, rebuilt from the node of every placement-group bundle. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdlab.core.errors import DeployError
from pdlab.core.nodes import ClusterView, Placement, ReplicaPlacement, Role, TpGroup
from pdlab.core.text import counted


def observe(
    plan: Placement,
    view: ClusterView,
    rank_nodes: Mapping[Role, Sequence[Sequence[str]]],
    replicas_of: Mapping[Role, int] | None = None,
) -> Placement:
    """The placement that Ray made.

    ``rank_nodes``: per role, per Ray Serve replica (one DP rank), the node id of each of its tp * pp bundles.
    ``replicas_of``: per role the number of planned replicas that were to start (None: all). Ray reports a bundle's
    node, but not its GPU: each bundle gets the lowest free slot of its node. Raises DeployError if ranks are missing,
    or a rank is on a node that the plan does not have for its role.
    """
    free = {node.id: list(node.slots) for node in view.engine_nodes}
    replicas: list[ReplicaPlacement] = []
    for role in plan.roles:
        ranks = rank_nodes.get(role, ())
        planned = plan.of(role)[: None if replicas_of is None else replicas_of[role]]
        allowed = plan.nodes_of(role)
        stray = sorted({node for rank in ranks for node in rank} - set(allowed))
        if stray:
            raise DeployError(f"{role}: a replica is on {', '.join(stray)}, planned on {', '.join(allowed)}")
        size = sum(len(slots) for slots in planned[0].groups[0].slots.values())
        groups = [rank[start : start + size] for rank in ranks for start in range(0, len(rank), size)]
        groups_per_replica = len(planned[0].groups)
        if len(groups) != groups_per_replica * len(planned):
            raise DeployError(
                f"{role}: {counted(len(groups), 'TP group runs', 'TP groups run')}, "
                f"{groups_per_replica * len(planned)} were planned"
            )
        if any(len(rank) % size for rank in ranks):
            raise DeployError(f"{role}: {[len(rank) for rank in ranks]} bundles per replica do not make TP {size}")
        replicas += [
            ReplicaPlacement(
                role=role,
                index=index,
                groups=tuple(
                    _group(role, group, free)
                    for group in groups[index * groups_per_replica : (index + 1) * groups_per_replica]
                ),
            )
            for index in range(len(planned))
        ]
    return Placement(device=plan.device, replicas=tuple(replicas), ingress_nodes=plan.ingress_nodes)


def _group(role: Role, bundles: Sequence[str], free: dict[str, list[int]]) -> TpGroup:
    slots: dict[str, list[int]] = {}
    for node in bundles:
        if not free[node]:
            raise DeployError(f"{role}: more ranks are on {node} than it had free when the deployment was planned")
        slots.setdefault(node, []).append(free[node].pop(0))
    return TpGroup(slots={node: tuple(indexes) for node, indexes in slots.items()})
