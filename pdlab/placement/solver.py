"""Choose the nodes of each pool by an exact search. Pure.

A pool's demand is counted in units: TP groups, or whole nodes if one TP group is larger than a node. A node serves at
most one pool, so this is a partition problem. Dynamic programming solves it: it goes through the nodes once, and keeps
the cheapest way to each reachable pair (units of the first pool, units of the second).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pdlab.core.catalog import has_gpu
from pdlab.core.deployment import Pool
from pdlab.core.nodes import ClusterNode


def cpus_per_group(node: ClusterNode, tp: int) -> int:
    """CPUs that a TP group takes beside its slots: one per worker, one for the engine process; 0 if slots are CPUs."""
    return tp + 1 if node.gpus else 0


def groups_on(node: ClusterNode, tp: int) -> int:
    """The number of TP groups that fit the node's free slots and free CPUs."""
    by_slots = len(node.slots) // tp
    per_group = cpus_per_group(node, tp)
    return min(by_slots, int(node.available_cpus // per_group)) if per_group else by_slots


def eligible(pool: Pool, nodes: Sequence[ClusterNode]) -> list[ClusterNode]:
    """The nodes with the pool's GPU type."""
    return [node for node in nodes if pool.gpu_type is None or has_gpu(node, pool.gpu_type)]


def spans_nodes(pool: Pool, nodes: Sequence[ClusterNode]) -> bool:
    """Whether one TP group is larger than the largest of ``nodes``."""
    return pool.tp > max((node.total_slots for node in nodes), default=0)


@dataclass(frozen=True)
class PoolOption:
    """One way to serve a pool.

    ``units``: node id -> units on it. ``per_replica``: units of one replica. ``single``: each replica is on one node.
    ``rank``: the smaller, the better. ``ragged``: nodes whose free slots are no multiple of TP. ``nodes_per_group``:
    above 1 only if a TP group takes whole nodes. ``kinds``: GPU types of its nodes.
    """

    units: dict[str, int]
    per_replica: int
    replicas: int
    single: bool
    rank: tuple[int, int]
    ragged: frozenset[str] = frozenset()
    nodes_per_group: int = 1
    kinds: frozenset[str | None] = frozenset()

    @property
    def need(self) -> int:
        return self.replicas if self.single else self.replicas * self.per_replica

    def gain(self, node_id: str) -> int:
        units = self.units.get(node_id, 0)
        return units // self.per_replica if self.single else units


def offers(pool: Pool, nodes: Sequence[ClusterNode]) -> Iterator[PoolOption]:
    """Every way to serve ``pool``: on one GPU type or on several, with replicas on single nodes or not."""
    usable = eligible(pool, nodes)
    kinds = list(dict.fromkeys(node.gpu_type for node in usable))
    choices = [([node for node in usable if node.gpu_type == kind], 0) for kind in kinds]
    if len(kinds) > 1:
        choices.append((usable, 1))
    for chosen, mixed in choices:
        if spans_nodes(pool, usable):
            yield from _whole_node_offers(pool, chosen, mixed)
            continue
        units = {node.id: count for node in chosen if (count := groups_on(node, pool.tp))}
        per_replica = pool.pp * pool.dp
        types = _gpu_types(chosen)
        yield PoolOption(units, per_replica, pool.replicas, True, (0, mixed), kinds=types)
        if per_replica > 1:
            # Ray reserves single GPUs, so on such a node it could split a TP group between two nodes.
            ragged = frozenset(node.id for node in chosen if len(node.slots) % pool.tp)
            yield PoolOption(units, per_replica, pool.replicas, False, (1, mixed), ragged, kinds=types)


def _whole_node_offers(pool: Pool, nodes: Sequence[ClusterNode], mixed: int) -> Iterator[PoolOption]:
    """For TP larger than a node: a group takes whole free nodes, all of one size that divides TP."""
    for size in sorted({node.total_slots for node in nodes}, reverse=True):
        if not size or pool.tp % size:
            continue
        units = {
            node.id: 1
            for node in nodes
            if node.total_slots == len(node.slots) == size and node.available_cpus >= cpus_per_group(node, size)
        }
        nodes_per_group = pool.tp // size
        per_replica = pool.pp * pool.dp * nodes_per_group
        yield PoolOption(
            units, per_replica, pool.replicas, False, (1, mixed), nodes_per_group=nodes_per_group,
            kinds=_gpu_types(nodes),
        )  # fmt: skip


def _gpu_types(nodes: Sequence[ClusterNode]) -> frozenset[str | None]:
    return frozenset(node.gpu_type for node in nodes)


Cost = tuple[int, int, int]
# The choices on one way through the nodes, newest first: ((pool number, node id), earlier choices).
Steps = tuple[tuple[int, str], "Steps"] | None


class ChosenNodes(NamedTuple):
    """How one pool is served, and the ids of its nodes."""

    offer: PoolOption
    node_ids: list[str]


def choose_nodes(pools: Sequence[Pool], nodes: Sequence[ClusterNode]) -> list[ChosenNodes] | None:
    """For each pool its own nodes; None if they do not fit.

    In this order it prefers: replicas on single nodes, one GPU type per pool and for both, few ragged nodes, few nodes,
    nodes with few free slots (partly used nodes are filled first), early nodes.
    """
    ways = sorted(itertools.product(*(list(offers(pool, nodes)) for pool in pools)), key=_rank)
    best: tuple[tuple[int, int], Cost, tuple[PoolOption, ...], list[list[str]]] | None = None
    for way in ways:
        rank = _rank(way)
        if best and rank > best[0]:
            break
        cheapest = _cheapest(way, nodes)
        if cheapest and (best is None or cheapest[0] < best[1]):
            best = (rank, cheapest[0], way, cheapest[1])
    return list(map(ChosenNodes, best[2], best[3])) if best else None


def _rank(way: Sequence[PoolOption]) -> tuple[int, int]:
    types = frozenset().union(*(offer.kinds for offer in way))
    return sum(offer.rank[0] for offer in way), sum(offer.rank[1] for offer in way) + len(types)


def _cheapest(way: Sequence[PoolOption], nodes: Sequence[ClusterNode]) -> tuple[Cost, list[list[str]]] | None:
    goal = tuple(offer.need for offer in way)
    states: dict[tuple[int, ...], tuple[Cost, Steps]] = {tuple(0 for _ in way): ((0, 0, 0), None)}
    for node in nodes:
        reached: dict[tuple[int, ...], tuple[Cost, Steps]] = {}
        for have, (cost, steps) in states.items():
            for number, offer in enumerate(way):
                gain = min(offer.gain(node.id), goal[number] - have[number])
                if gain <= 0:
                    continue
                more = (*have[:number], have[number] + gain, *have[number + 1 :])
                dearer = (cost[0] + (node.id in offer.ragged), cost[1] + 1, cost[2] + len(node.slots))
                if more not in reached or dearer < reached[more][0]:
                    reached[more] = (dearer, ((number, node.id), steps))
            if have not in reached or cost <= reached[have][0]:
                reached[have] = (cost, steps)
        states = reached
    if goal not in states:
        return None
    cost, steps = states[goal]
    sets: list[list[str]] = [[] for _ in way]
    while steps is not None:
        (number, node_id), steps = steps
        sets[number].insert(0, node_id)
    return cost, sets


def fill(offer: PoolOption, node_ids: Sequence[str]) -> list[list[tuple[str, ...]]]:
    """Per replica its TP groups, each as its node ids (one id, unless TP is larger than a node).

    A replica goes to the fullest node with room for all of it. If no node has room for it, it takes the emptiest nodes,
    so that it is on few.
    """
    free_units = {node_id: offer.units[node_id] for node_id in node_ids}
    replicas = []
    for _ in range(offer.replicas):
        assigned: list[str] = []
        while len(assigned) < offer.per_replica:
            still_needed = offer.per_replica - len(assigned)
            holding = [node_id for node_id in node_ids if free_units[node_id] >= still_needed]
            if holding:
                node_id, count = min(holding, key=free_units.__getitem__), still_needed
            else:
                node_id = max(node_ids, key=free_units.__getitem__)
                count = free_units[node_id]
            free_units[node_id] -= count
            assigned += [node_id] * count
        step = offer.nodes_per_group
        replicas.append([tuple(assigned[i : i + step]) for i in range(0, len(assigned), step)])
    return replicas
