"""The placement as it came out, from the nodes that Ray Serve's replicas are on."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.clusters import gpu_nodes

from pdlab.core.deployment import Deployment, parse_label
from pdlab.core.errors import DeployError
from pdlab.core.nodes import ClusterView, Placement, Role
from pdlab.placement.actual import observe
from pdlab.placement.place import place

Actual = dict[Role, list[list[str]]]


def as_planned(plan: Placement, ranks_per_replica: int = 1) -> Actual:
    """What Ray says when everything came out as planned, one entry per DP rank."""
    actual: Actual = {}
    for replica in plan.replicas:
        bundles = [node for group in replica.groups for node, slots in group.slots.items() for _ in slots]
        size = len(bundles) // ranks_per_replica
        actual.setdefault(replica.role, []).extend(bundles[i : i + size] for i in range(0, len(bundles), size))
    return actual


def planned(label: str, view: ClusterView) -> Placement:
    return place(Deployment(topology=parse_label(label)), view)


@pytest.mark.parametrize(
    "label",
    [
        "collocated-8xtp1",
        "collocated-1xtp16",
        "pd-pack-p1xtp4-d1xtp4",
        "pd-spread-p4xtp2-d1xtp8",
        "collocated-2xtp4pp2",
    ],
)
def test_as_planned(label: str) -> None:
    view = gpu_nodes(8, 8)
    plan = planned(label, view)
    assert observe(plan, view, as_planned(plan)) == plan


def test_another_distribution_within_the_set_of_nodes() -> None:
    """Ray chooses within the set: here it put three replicas on n1 that the plan had on n0."""
    view = gpu_nodes(8, 8)
    plan = planned("collocated-3xtp4", view)
    came_out = observe(plan, view, {"collocated": [["n1"] * 4, ["n1"] * 4, ["n0"] * 4]})
    assert [replica.slots for replica in came_out.replicas] == [
        {"n1": (0, 1, 2, 3)},
        {"n1": (4, 5, 6, 7)},
        {"n0": (0, 1, 2, 3)},
    ]


def test_slots_are_free_ones() -> None:
    view = gpu_nodes(3)
    plan = planned("collocated-2xtp1", view)
    assert observe(plan, view, {"collocated": [["n0"], ["n0"]]}).used_slots == {"n0": (5, 6)}


def test_dp_ranks_make_up_replicas() -> None:
    view = gpu_nodes(8, 8)
    plan = planned("collocated-2xtp2dp2", view)
    by_rank = observe(plan, view, as_planned(plan, ranks_per_replica=2))
    by_gang = observe(plan, view, as_planned(plan))
    assert by_rank == by_gang == plan
    assert [len(replica.groups) for replica in by_rank.replicas] == [2, 2]


@pytest.mark.parametrize(
    ("label", "free", "seen", "complaint"),
    [
        ("pd-spread-p1xtp4-d1xtp4", (8, 8), {"prefill": [["n0"] * 4], "decode": [["n0"] * 4]},
         "decode: a replica is on n0, planned on n1"),
        ("pd-spread-p1xtp4-d1xtp4", (8, 8), {"decode": [["n1"] * 4]}, "prefill: 0 TP groups run, 1 were planned"),
        ("collocated-1xtp2", (8,), {"collocated": [["an unknown node"]]}, "is on an unknown node, planned on n0"),
        ("collocated-2xtp2", (8,), {"collocated": []}, "collocated: 0 TP groups run, 2 were planned"),
        ("collocated-2xtp2", (8,), {"collocated": [["n0", "n0"]]}, "collocated: 1 TP group runs, 2 were planned"),
        ("collocated-2xtp2", (8,), {"collocated": [["n0", "n0"]] * 3}, "collocated: 3 TP groups run, 2 were planned"),
        # Of a replica whose placement group is not found, only the node of its own process is known.
        ("collocated-1xtp4", (8,), {"collocated": [["n0"]]}, "[1] bundles per replica do not make TP 4"),
        ("collocated-4xtp1", (2, 2), {"collocated": [["n0"]] * 3 + [["n1"]]},
         "collocated: more ranks are on n0 than it had free"),
    ],
)  # fmt: skip
def test_another_placement_than_the_planned_one(
    label: str, free: tuple[int, ...], seen: Actual, complaint: str
) -> None:
    view = gpu_nodes(*free)
    with pytest.raises(DeployError, match=re.escape(complaint)):
        observe(planned(label, view), view, seen)


def test_of_a_number_that_moves_those_run_that_begin() -> None:
    view = gpu_nodes(8)
    plan = planned("pd-fluid-2xtp2-n2to4", view)
    assert len(plan.of("fluid")) == 4
    assert len(observe(plan, view, {"fluid": [["n0", "n0"]] * 2}, {"fluid": 2}).of("fluid")) == 2
    with pytest.raises(DeployError, match="fluid: 3 TP groups run, 2 were planned"):
        observe(plan, view, {"fluid": [["n0", "n0"]] * 3}, {"fluid": 2})


@st.composite
def observations(draw: st.DrawFn) -> tuple[Placement, ClusterView, Actual]:
    """A plan that has room to spare, and its replicas shuffled and moved within their pool's nodes."""
    nodes = draw(st.integers(2, 4))
    view = gpu_nodes(*draw(st.lists(st.integers(4, 8), min_size=nodes, max_size=nodes)))
    tp = draw(st.sampled_from([1, 2, 4]))
    replicas = draw(st.integers(1, sum(len(node.slots) // tp for node in view.nodes)))
    plan = planned(f"collocated-{replicas}xtp{tp}", view)
    room = {node: len(view.node(node).slots) for node in plan.nodes_of("collocated")}
    ranks = []
    for _ in range(replicas):
        node = draw(st.sampled_from([node for node, left in room.items() if left >= tp]))
        room[node] -= tp
        ranks.append([node] * tp)
    return plan, view, {"collocated": ranks}


@settings(max_examples=150, deadline=None)
@given(observations())
def test_every_rank_has_a_slot_of_its_own_on_its_node(case: tuple[Placement, ClusterView, Actual]) -> None:
    plan, view, actual = case
    came_out = observe(plan, view, actual)
    on_node = Counter(node for rank in actual["collocated"] for node in rank)
    assert {node: len(slots) for node, slots in came_out.used_slots.items()} == on_node
    for node, slots in came_out.used_slots.items():
        assert len(set(slots)) == len(slots)
        assert set(slots) <= set(view.node(node).slots)
    assert [replica.nodes for replica in came_out.replicas] == [
        tuple(dict.fromkeys(rank)) for rank in actual["collocated"]
    ]
    assert (came_out.device, came_out.ingress_nodes) == (plan.device, plan.ingress_nodes)
    assert observe(came_out, view, as_planned(came_out)) == came_out
