"""Placement against its rules, and against a brute-force search over small clusters."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pdlab.core.deployment import Collocated, Deployment, Disaggregated, Pool
from pdlab.core.errors import PlacementError
from pdlab.core.nodes import ClusterNode, ClusterView, Placement
from pdlab.placement.place import links, place

pytestmark = pytest.mark.property


@st.composite
def gpu_nodes(draw: st.DrawFn, index: int) -> ClusterNode:
    gpus = draw(st.sampled_from([0, 1, 2, 3, 4]))
    taken = draw(st.sets(st.integers(0, max(gpus - 1, 0)), max_size=gpus))
    return ClusterNode(
        id=f"n{index}",
        gpu_type=draw(st.sampled_from(["H100", "H100", "H100", "A100"])) if gpus else None,
        gpus=gpus,
        free_gpus=tuple(gpu for gpu in range(gpus) if gpu not in taken) if gpus else None,
        cpus=draw(st.sampled_from([32, 32, 32, 3, 5])),
    )


@st.composite
def cpu_nodes(draw: st.DrawFn, index: int) -> ClusterNode:
    cpus = draw(st.integers(0, 3))
    return ClusterNode(id=f"n{index}", cpus=cpus, free_cpus=draw(st.integers(0, cpus)), host="one")


@st.composite
def views(draw: st.DrawFn) -> ClusterView:
    kind = draw(st.sampled_from([gpu_nodes, gpu_nodes, cpu_nodes]))
    return ClusterView(nodes=tuple(draw(kind(index)) for index in range(draw(st.integers(1, 4)))))


@st.composite
def pools(draw: st.DrawFn) -> Pool:
    pool = Pool(
        replicas=draw(st.integers(1, 3)),
        tp=draw(st.sampled_from([1, 1, 2, 2, 3, 4, 8])),
        pp=draw(st.sampled_from([1, 1, 2])),
        dp=draw(st.sampled_from([1, 1, 2])),
        gpu_type=draw(st.sampled_from([None, None, None, "H100"])),
    )
    assume(pool.tp_groups <= 6)
    return pool


@st.composite
def deployments(draw: st.DrawFn) -> Deployment:
    if draw(st.booleans()):
        return Deployment(topology=Collocated(pool=draw(pools())))
    kind = draw(st.sampled_from(["pack", "spread"]))
    return Deployment(topology=Disaggregated(prefill=draw(pools()), decode=draw(pools()), placement=kind))


def free_slots(node: ClusterNode) -> int:
    if node.gpus:
        return len(node.free_gpus) if node.free_gpus is not None else node.gpus
    return int(node.free_cpus if node.free_cpus is not None else node.cpus)


def total(node: ClusterNode) -> int:
    return node.gpus or int(node.cpus)


def candidates(view: ClusterView, pool: Pool) -> list[ClusterNode]:
    has_gpus = any(node.gpus for node in view.nodes)
    return [n for n in view.nodes if (n.gpus or not has_gpus) and pool.gpu_type in (None, n.gpu_type)]


def shares(view: ClusterView, pool: Pool) -> list[dict[str, int]]:
    """Every way to lay one TP group: node id -> slots."""
    nodes = candidates(view, pool)
    if any(total(node) >= pool.tp for node in nodes):
        return [{node.id: pool.tp} for node in nodes]
    placements = []
    for size in {total(node) for node in nodes} - {0}:
        whole = [node for node in nodes if total(node) == size == free_slots(node)]
        if pool.tp % size == 0:
            placements += [{n.id: size for n in chosen} for chosen in itertools.combinations(whole, pool.tp // size)]
    return placements


def brute_force(deployment: Deployment, view: ClusterView) -> bool:
    """Whether any assignment of TP groups keeps the rules. Slow and simple."""
    by_id = {node.id: node for node in view.nodes}
    work = [
        (role, share_list)
        for role, pool in deployment.pools.items()
        for share_list in [shares(view, pool)]
        for _ in range(pool.replicas * pool.pp * pool.dp)
    ]
    keys: set[tuple[int, tuple[tuple[str, str, int, int], ...]]] = set()

    def search(position: int, used: dict[tuple[str, str], tuple[int, int]]) -> bool:
        if position == len(work):
            return True
        key = (position, tuple(sorted((n, r, s, c) for (n, r), (s, c) in used.items())))
        if key in keys:
            return False
        keys.add(key)
        role, options = work[position]
        for share in options:
            after = dict(used)
            for node_id, slots in share.items():
                before = after.get((node_id, role), (0, 0))
                cpus = slots + 1 if by_id[node_id].gpus else 0
                after[node_id, role] = (before[0] + slots, before[1] + cpus)
            if keeps_rules(after) and search(position + 1, after):
                return True
        return False

    def keeps_rules(used: dict[tuple[str, str], tuple[int, int]]) -> bool:
        for node_id in {node_id for node_id, _ in used}:
            mine = [used[key] for key in used if key[0] == node_id]
            node = by_id[node_id]
            if sum(slots for slots, _ in mine) > free_slots(node):
                return False
            if node.gpus and sum(cpus for _, cpus in mine) > (node.cpus if node.free_cpus is None else node.free_cpus):
                return False
            if deployment.mode == "pd-spread" and len(mine) > 1:
                return False
        return deployment.mode != "pd-pack" or len({node_id for node_id, _ in used}) == 1

    return search(0, {})


def check_rules(deployment: Deployment, view: ClusterView, placement: Placement) -> None:
    has_gpus = any(node.gpus for node in view.nodes)
    by_id = {node.id: node for node in view.nodes}
    taken: Counter[tuple[str, int]] = Counter()
    cpus: Counter[str] = Counter()
    for role, pool in deployment.pools.items():
        replicas = placement.of(role)
        assert [replica.index for replica in replicas] == list(range(pool.replicas))
        fits_a_node = any(total(node) >= pool.tp for node in candidates(view, pool))
        for replica in replicas:
            assert len(replica.groups) == pool.pp * pool.dp
            for group in replica.groups:
                assert sum(len(slots) for slots in group.slots.values()) == pool.tp
                assert len(group.slots) == 1 or not fits_a_node
                for node_id, slots in group.slots.items():
                    assert by_id[node_id] in candidates(view, pool)
                    assert len(slots) == pool.tp or len(slots) == total(by_id[node_id])
                    taken.update((node_id, slot) for slot in slots)
                    cpus[node_id] += len(slots) + 1
    assert all(count == 1 for count in taken.values())
    for node_id, slot in taken:
        node = by_id[node_id]
        assert slot in (node.slots if node.gpus else range(free_slots(node)))
    if has_gpus:
        assert all(count <= by_id[node_id].available_cpus for node_id, count in cpus.items())
    used = {role: set(placement.nodes_of(role)) for role in deployment.pools}
    if deployment.mode == "pd-pack":
        assert len(used["prefill"] | used["decode"]) == 1
    if deployment.mode == "pd-spread":
        assert not used["prefill"] & used["decode"]


@settings(max_examples=600, deadline=None)
@given(deployments(), views())
def test_finds_a_placement_exactly_when_brute_force_does(deployment: Deployment, view: ClusterView) -> None:
    possible = brute_force(deployment, view)
    try:
        placement = place(deployment, view)
    except PlacementError as error:
        assert not possible, f"there is a placement, but: {error}"
        assert "\n" not in str(error) and deployment.label in str(error)
        return
    assert possible
    check_rules(deployment, view, placement)
    pairs = {(p, d) for p in placement.nodes_of("prefill") for d in placement.nodes_of("decode")}
    assert {(link.prefill_node, link.decode_node) for link in links(placement, view)} == pairs


@settings(max_examples=200, deadline=None)
@given(pools(), views())
def test_replicas_stay_on_one_node_whenever_they_all_can(pool: Pool, view: ClusterView) -> None:
    deployment = Deployment(topology=Collocated(pool=pool))
    try:
        placement = place(deployment, view)
    except PlacementError:
        return
    per_node = []
    for node in candidates(view, pool):
        groups = free_slots(node) // pool.tp
        if node.gpus:
            groups = min(groups, int(node.available_cpus // (pool.tp + 1)))
        per_node.append(groups // (pool.pp * pool.dp))
    if sum(per_node) >= pool.replicas:
        assert all(len(replica.nodes) == 1 for replica in placement.replicas)
        fewest = next(
            count
            for count in range(1, len(per_node) + 1)
            if sum(sorted(per_node, reverse=True)[:count]) >= pool.replicas
        )
        mixed = len({node.gpu_type for node in candidates(view, pool)}) > 1
        assert mixed or len(placement.nodes_of("collocated")) == fewest


@settings(max_examples=100, deadline=None)
@given(deployments(), views())
def test_same_question_same_answer(deployment: Deployment, view: ClusterView) -> None:
    def answer() -> object:
        try:
            return place(deployment, view)
        except PlacementError as error:
            return str(error)

    assert answer() == answer()


def test_brute_force_refuses_something_and_accepts_something() -> None:
    """The oracle itself is not a constant."""
    view = ClusterView(nodes=(ClusterNode(id="n0", gpus=4, cpus=32),))
    assert brute_force(Deployment(topology=Collocated(pool=Pool(tp=4))), view)
    assert not brute_force(Deployment(topology=Collocated(pool=Pool(tp=4, replicas=2))), view)
