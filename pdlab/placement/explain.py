"""Explain why a deployment does not fit a cluster, and find the smallest change that makes it fit."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping

from pdlab.core.deployment import FLAG_PREFIX, Deployment, Disaggregated, Fluid, Pool
from pdlab.core.errors import UsageError
from pdlab.core.nodes import ClusterNode, ClusterView, Role
from pdlab.core.schema import validate
from pdlab.core.text import counted, listed
from pdlab.core.vllm_limits import check_divisibility
from pdlab.placement.solver import cpus_per_group, eligible, groups_on, spans_nodes

Fits = Callable[[Deployment, ClusterView], bool]

MAX_MORE_NODES = 64
# Enough for every change of one pool, and for the smallest changes of two, on clusters of tens of nodes.
MAX_ATTEMPTS = 400
# Each search visits at most about this many (node, prefill units, decode units): about a second of work.
MAX_WORK = 1_000_000


def explain(deployment: Deployment, view: ClusterView, fits: Fits) -> str:
    """One line: the demand, the free slots of each node, and the smallest changes that fit."""
    ways, nothing = [], "no smaller deployment, and no number of further nodes of the same kind"
    for search in (_fewer_at_most, _smaller, _other_placement, _freed_by_others, _more_nodes):
        try:
            ways.append(search(deployment, view, _Bounded(fits)))
        except _EnoughError:
            nothing = "none of the changes that were tried"
    change = "; or ".join(way for way in ways if way) or nothing
    return (
        f"{deployment.label} does not fit {view.name}: it requires {_demand(deployment, view)}; "
        f"free: {_free(deployment, view)}; what would fit: {change}"
    )


class _EnoughError(Exception):
    """A search for advice has used up its work."""


class _Bounded:
    """``fits`` with a limit on its work. Advice may be missing, but it is never wrong or slow."""

    def __init__(self, fits: Fits) -> None:
        self.fits, self.work_left = fits, MAX_WORK

    def __call__(self, deployment: Deployment, view: ClusterView) -> bool:
        work = len(view.engine_nodes)
        if deployment.mode != "pd-pack":
            for pool in deployment.pools.values():
                work *= 1 + pool.tp_groups
        self.work_left -= work
        if self.work_left < 0:
            raise _EnoughError
        return self.fits(deployment, view)


def _unit(view: ClusterView) -> str:
    return "GPU" if view.device == "gpu" else "CPU"


def _demand(deployment: Deployment, view: ClusterView) -> str:
    unit = _unit(view)
    parts = []
    for role, pool in deployment.most_pools.items():
        shape = f"{pool.replicas} x {pool.gpus_per_replica}" if pool.gpus_per_replica > 1 else f"{pool.replicas}"
        groups = f", TP groups of {pool.tp} on one node each" if pool.tp > 1 else ""
        if spans_nodes(pool, eligible(pool, view.engine_nodes)):
            groups = f", TP groups of {pool.tp} on whole nodes of one size"
        kind = f" of type {pool.gpu_type}" if pool.gpu_type else ""
        parts.append(f"{role} {shape} {unit}s{kind}{groups}")
    text = "; ".join(parts)
    if not isinstance(deployment.topology, Disaggregated):
        return text
    where = "all on one node" if deployment.mode == "pd-pack" else "the two pools on different nodes"
    return f"{text}; {deployment.gpus} {unit}s in all, {where}"


def _fewer_at_most(deployment: Deployment, view: ClusterView, fits: Fits) -> str | None:
    """For fluid engines whose number follows the load: the largest maximum that fits."""
    topology = deployment.topology
    if not isinstance(topology, Fluid):
        return None
    for most in range(topology.most - 1, topology.pool.replicas - 1, -1):
        if fits(deployment.with_topology(max_replicas=most), view):
            return f"--max {most} ({most * topology.pool.gpus_per_replica} {_unit(view)}s)"
    return None


def _free(deployment: Deployment, view: ClusterView) -> str:
    """Free slots per node, with equal nodes together, and free CPUs if a GPU node has too few."""
    unit = _unit(view)
    same: dict[str, list[str]] = {}
    for node in view.engine_nodes:
        text = f"{len(node.slots)} of {node.total_slots} {unit}s"
        if any(pool.gpu_type for pool in deployment.pools.values()):
            text += f" ({node.gpu_type or 'type unknown'})"
        if short := _short_of_cpus(deployment, node):
            text += f" {short}"
        same.setdefault(text, []).append(node.id)
    return ", ".join(
        f"{text} on {listed(ids) if len(ids) <= 3 else f'each of {len(ids)} nodes'}" for text, ids in same.items()
    )


def _short_of_cpus(deployment: Deployment, node: ClusterNode) -> str:
    tp = min(pool.tp for pool in deployment.pools.values())
    per_group = cpus_per_group(node, tp)
    groups = len(node.slots) // tp
    if not per_group or not groups or node.available_cpus >= groups * per_group:
        return ""
    return f"but only {counted(node.available_cpus, 'CPU')} (a TP group of {tp} takes {per_group})"


def _smaller(deployment: Deployment, view: ClusterView, fits: Fits) -> str | None:
    """The change of the fewest flags; among these the one that keeps most GPUs, then the nearest ratio of the pools."""
    options = [(role, list(_reductions(role, pool, view))) for role, pool in deployment.pools.items()]
    attempts = [({role: pool}, flag) for role, reductions in options for pool, flag in reductions]
    attempts.sort(key=lambda attempt: -sum(pool.gpus for pool in attempt[0].values()))
    if len(options) == 2:
        (role_a, reductions_a), (role_b, reductions_b) = options
        log_ratio = math.log(deployment.pools[role_a].gpus / deployment.pools[role_b].gpus)
        pairs = [
            ({role_a: a, role_b: b}, f"{flag_a} {flag_b}")
            for (a, flag_a), (b, flag_b) in itertools.product(reductions_a, reductions_b)
        ]

        def worth(attempt: tuple[dict[Role, Pool], str]) -> tuple[int, float]:
            a, b = attempt[0].values()
            return -a.gpus - b.gpus, abs(math.log(a.gpus / b.gpus) - log_ratio)

        attempts += sorted(pairs, key=worth)
    room = sum(len(node.slots) for node in view.engine_nodes)
    if deployment.mode == "pd-pack":
        room = max((len(node.slots) for node in view.engine_nodes), default=0)
    tried = 0
    for pools, flags in attempts:
        fields = {"pool" if role in ("collocated", "fluid") else role: pool for role, pool in pools.items()}
        changed = deployment.with_topology(**fields)
        if changed.gpus > room or not _worth_advising(changed, deployment):
            continue
        if fits(changed, view):
            return f"{flags} ({changed.gpus} {_unit(view)}s)"
        tried += 1
        if tried == MAX_ATTEMPTS:
            return None
    return None


def _reductions(role: Role, pool: Pool, view: ClusterView) -> Iterator[tuple[Pool, str]]:
    """Every smaller pool that differs in one number and has enough slots in the view, with its flag."""
    prefix = FLAG_PREFIX[role]
    nodes = eligible(pool, view.engine_nodes)
    slots = sum(len(node.slots) for node in nodes)
    if not spans_nodes(pool, nodes):
        slots = sum(groups_on(node, pool.tp) for node in nodes) * pool.tp
    for replicas in range(min(pool.replicas - 1, slots // pool.gpus_per_replica), 0, -1):
        yield pool.model_copy(update={"replicas": replicas}), f"--{prefix}num {replicas}"
    for name in ("tp", "dp", "pp"):
        for smaller in range(getattr(pool, name) - 1, 0, -1):
            if getattr(pool, name) % smaller == 0:
                yield pool.model_copy(update={name: smaller}), f"--{prefix}{name} {smaller}"


def _worth_advising(changed: Deployment, requested: Deployment) -> bool:
    """Whether vLLM accepts the degrees, with no more warnings than the requested ones."""
    topology = changed.topology
    try:
        if isinstance(topology, Fluid):  # its roles must still add up to its replicas
            validate(Fluid, topology.model_dump(), where="a smaller deployment")
        return len(check_divisibility(changed, None)) <= len(check_divisibility(requested, None))
    except UsageError:
        return False


def _other_placement(deployment: Deployment, view: ClusterView, fits: Fits) -> str | None:
    topology = deployment.topology
    if not isinstance(topology, Disaggregated):
        return None
    placement = "spread" if topology.placement == "pack" else "pack"
    return f"--pd-{placement}" if fits(deployment.with_topology(placement=placement), view) else None


def _freed_by_others(deployment: Deployment, view: ClusterView, fits: Fits) -> str | None:
    """The GPUs or CPUs that others would have to release: the fewest on one node, else on several nodes."""
    held_elsewhere = {node.id: node.total_slots - len(node.slots) for node in view.engine_nodes}
    busy = [node for node in view.engine_nodes if held_elsewhere[node.id] or node.available_cpus < node.cpus]
    unit = _unit(view)

    def without(counts: Mapping[str, int]) -> bool:
        nodes = tuple(_with_free(node, counts[node.id]) if node.id in counts else node for node in view.nodes)
        return fits(deployment, view.model_copy(update={"nodes": nodes}))

    for count in range(max(held_elsewhere.values(), default=0) + 1):
        for node in busy:
            if count <= held_elsewhere[node.id] and without({node.id: count}):
                if not count:
                    return f"others release their CPUs on {node.id}"
                amount = f"{count} of their" if count < held_elsewhere[node.id] else "their"
                return f"others release {amount} {counted(held_elsewhere[node.id], unit)} on {node.id}"
    to_free = {node.id: held_elsewhere[node.id] for node in busy}
    if not to_free or not without(to_free):
        return None
    for node_id, full_count in list(to_free.items()):
        freed_elsewhere = {other_id: count for other_id, count in to_free.items() if other_id != node_id}
        to_free = next(
            fewer
            for count in range(full_count + 1)
            if without(fewer := freed_elsewhere | ({node_id: count} if count else {}))
        )
    if len(to_free) <= 3:
        places = listed([f"{count} on {node_id}" for node_id, count in to_free.items()])
    else:
        places = f"{sum(to_free.values())} on {counted(len(to_free), 'node')}"
    return f"others release {unit}s: {places}"


def _with_free(node: ClusterNode, count: int) -> ClusterNode:
    """The node with ``count`` more free slots. On a GPU node, all CPUs are free."""
    if not node.gpus:
        return node.model_copy(update={"free_cpus": min(node.cpus, node.available_cpus + count)})
    in_use = [gpu for gpu in range(node.gpus) if gpu not in node.slots]
    return node.model_copy(update={"free_gpus": tuple(sorted((*node.slots, *in_use[:count]))), "free_cpus": None})


def _more_nodes(deployment: Deployment, view: ClusterView, fits: Fits) -> str | None:
    """The number of further free nodes that suffice, each like the largest that the deployment may use."""
    usable = [node for pool in deployment.pools.values() for node in eligible(pool, view.engine_nodes)]
    biggest = max(usable, key=lambda node: node.total_slots, default=None)
    if biggest is None or (deployment.mode == "pd-pack" and len(biggest.slots) == biggest.total_slots):
        return None
    fresh = biggest.model_copy(update={"free_gpus": None, "free_cpus": None})

    def with_more(count: int) -> ClusterView:
        added = tuple(fresh.model_copy(update={"id": f"{biggest.id}+{i}", "head": False}) for i in range(count))
        return view.model_copy(update={"nodes": view.nodes + added})

    if not fits(deployment, with_more(MAX_MORE_NODES)):
        return None
    fewest = 1 + bisect_left(range(1, MAX_MORE_NODES), True, key=lambda count: fits(deployment, with_more(count)))
    each = "" if fewest == 1 else " each"
    return f"{counted(fewest, 'more node')} with {biggest.total_slots} free {_unit(view)}s{each}"
