"""Placement by example: what goes where, over which links, and what is said when nothing fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.clusters import gpu_nodes

from pdlab.core.catalog import load_cluster, local_cluster
from pdlab.core.deployment import Collocated, Deployment, Pool, parse_label
from pdlab.core.errors import PlacementError, UsageError
from pdlab.core.nodes import NODE_ID_LABEL, NODE_NAME_LABEL, ClusterNode, ClusterView, Nic, Placement
from pdlab.placement import explain
from pdlab.placement.place import bundle_nodes, cautions, link_kind, links, node_selector, pinned_to_ids, place


def deployment_of(label: str) -> Deployment:
    return Deployment(topology=parse_label(label))


def on(label: str, cluster: str | ClusterView) -> Placement:
    return place(deployment_of(label), load_cluster(cluster) if isinstance(cluster, str) else cluster)


def complaint(label: str, view: ClusterView) -> str:
    with pytest.raises(PlacementError) as caught:
        place(deployment_of(label), view)
    return str(caught.value)


def test_unlike_nodes_name_the_flags_that_choose() -> None:
    unlike = gpu_nodes(8, 8)
    nodes = (unlike.nodes[0], unlike.nodes[1].model_copy(update={"gpu_type": "H200"}))
    view = unlike.model_copy(update={"nodes": nodes})
    said = {}
    for label in ("pd-spread-p1xtp4-d1xtp4", "pd-fluid-2xtp8"):
        (said[label],) = cautions(deployment_of(label), on(label, view), view)
    assert "prefill H100, decode H200" in said["pd-spread-p1xtp4-d1xtp4"]
    assert "choose with --p-gpu TYPE and --d-gpu TYPE, or" in said["pd-spread-p1xtp4-d1xtp4"]
    assert "choose with --gpu TYPE, or" in said["pd-fluid-2xtp8"]


def test_a_type_that_no_node_says_is_called_unknown() -> None:
    wanted = Deployment(topology=Collocated(pool=Pool(tp=8, gpu_type="H100")))
    with pytest.raises(PlacementError, match=r"8 of 8 GPUs \(type unknown\) on n0"):
        place(wanted, gpu_nodes(8, kind=None))


class TestWhere:
    def test_collocated_fills_one_node_first(self) -> None:
        assert on("collocated-8xtp1", "p5.48xlarge-x2").used_slots == {"node-1": tuple(range(8))}

    def test_collocated_goes_on_when_a_node_is_full(self) -> None:
        placed = on("collocated-3xtp4", "p5.48xlarge-x2")
        assert [replica.slots for replica in placed.of("collocated")] == [
            {"node-1": (0, 1, 2, 3)},
            {"node-1": (4, 5, 6, 7)},
            {"node-2": (0, 1, 2, 3)},
        ]

    def test_nodes_in_partial_use_are_filled_first(self) -> None:
        assert on("collocated-1xtp4", gpu_nodes(8, 4, 6)).used_slots == {"n1": (4, 5, 6, 7)}

    def test_only_free_gpus_are_taken(self) -> None:
        assert on("collocated-1xtp2", gpu_nodes(3)).used_slots == {"n0": (5, 6)}

    def test_pack_is_one_node(self) -> None:
        placed = on("pd-pack-p1xtp4-d1xtp4", "p5.48xlarge-x2")
        assert placed.used_slots == {"node-1": tuple(range(8))}
        assert placed.of("decode")[0].slots == {"node-1": (4, 5, 6, 7)}

    def test_spread_is_two_nodes_even_where_one_would_do(self) -> None:
        placed = on("pd-spread-p1xtp1-d1xtp1", "p5.48xlarge-x2")
        assert (placed.nodes_of("prefill"), placed.nodes_of("decode")) == (("node-1",), ("node-2",))

    def test_large_scale_ep(self) -> None:
        placed = on("pd-spread-p1xdp32ep-d1xdp72ep", "p5.48xlarge-x13")
        assert len(placed.nodes_of("prefill")) == 4 and len(placed.nodes_of("decode")) == 9

    def test_thirteen_of_each_take_a_node_more_than_their_gpus_do(self) -> None:
        """No node may hold both pools, and 13 replicas of TP4 leave half a node free on either side."""
        with pytest.raises(PlacementError, match="1 more node"):
            on("pd-spread-p13xtp4-d13xtp4", "p5.48xlarge-x13")
        placed = on("pd-spread-p13xtp4-d13xtp4", "p5.48xlarge-x14")
        assert len(placed.nodes_of("prefill")) == len(placed.nodes_of("decode")) == 7

    def test_three_prefill_groups_of_three_nodes_and_a_decode_group_of_four(self) -> None:
        placed = on("pd-spread-p3xdp24ep-d1xdp32ep", "p5.48xlarge-x13")
        assert [len(replica.nodes) for replica in placed.of("prefill")] == [3, 3, 3]
        assert [len(replica.nodes) for replica in placed.of("decode")] == [4]

    def test_a_partition_that_greedy_choice_misses(self) -> None:
        # Prefill must leave the node of 8 to decode and put its two replicas on the small ones.
        placed = on("pd-spread-p2xtp4-d1xtp8", gpu_nodes(8, 4, 5))
        assert placed.nodes_of("decode") == ("n0",) and set(placed.nodes_of("prefill")) == {"n1", "n2"}

    def test_tp_larger_than_a_node_takes_whole_nodes(self) -> None:
        placed = on("collocated-1xtp16", gpu_nodes(8, 7, 8))
        assert placed.used_slots == {"n0": tuple(range(8)), "n2": tuple(range(8))}

    def test_gpu_type_restricts(self) -> None:
        h100 = gpu_nodes(8).nodes[0]
        a100 = h100.model_copy(update={"id": "a", "gpu_type": "A100", "labels": {NODE_NAME_LABEL: "a"}})
        view = ClusterView(nodes=(h100, a100))
        deployment = Deployment(topology=Collocated(pool=Pool(tp=4, gpu_type="A100")))
        assert place(deployment, view).nodes_of("collocated") == ("a",)

    def test_a_pool_stays_on_one_gpu_type_when_it_can(self) -> None:
        nodes = [node.model_copy(update={"gpu_type": "A100"}) for node in gpu_nodes(4, 4, 4).nodes[:1]]
        view = ClusterView(nodes=(*nodes, *gpu_nodes(4, 4, 4).nodes[1:]))
        assert on("collocated-2xtp4", view).nodes_of("collocated") == ("n1", "n2")

    def test_both_pools_stay_on_one_gpu_type_when_they_can(self) -> None:
        nodes = list(gpu_nodes(4, 8, 4).nodes)
        ethernet = Nic(kind="ethernet", gbit_per_s=100)
        nodes[2] = nodes[2].model_copy(update={"gpu_type": "L40S", "nic": ethernet})
        nodes[:2] = [node.model_copy(update={"nic": Nic(kind="efa", count=32)}) for node in nodes[:2]]
        deployment = deployment_of("pd-spread-p1xtp4-d1xtp4")
        alike = place(deployment, ClusterView(nodes=tuple(nodes)))
        assert set(alike.used_slots) == {"n0", "n1"}
        assert cautions(deployment, alike, ClusterView(nodes=tuple(nodes))) == []
        view = ClusterView(nodes=tuple(nodes[1:]))
        gpus, networks = cautions(deployment, place(deployment, view), view)
        assert "prefill L40S, decode H100" in gpus or "prefill H100, decode L40S" in gpus
        assert "efa" in networks and "TCP" in networks

    def test_cpu_nodes_give_one_slot_per_cpu(self) -> None:
        placed = on("pd-spread-p2xtp1-d1xtp2", local_cluster(2))
        assert placed.device == "cpu"
        assert placed.used_slots == {"local-1": (0, 1), "local-2": (0, 1)}

    def test_ingress_is_on_the_head(self) -> None:
        nodes = gpu_nodes(8, 8).nodes
        view = ClusterView(nodes=(*nodes, ClusterNode(id="head", cpus=8, head=True)))
        assert on("collocated-1xtp1", view).ingress_nodes == ("head",)
        assert on("collocated-1xtp1", gpu_nodes(8)).ingress_nodes == ("n0",)


class TestLinks:
    def test_every_pair_of_nodes_once(self) -> None:
        view = load_cluster("p5.48xlarge-x13")
        link_groups = links(on("pd-spread-p3xdp24ep-d1xdp32ep", view), view)
        assert len(link_groups) == 9 * 4 and {link.kind for link in link_groups} == {"EFA/SRD"}
        assert {link.pairs for link in link_groups} == {1}

    def test_pairs_are_replica_pairs(self) -> None:
        view = load_cluster("p5.48xlarge-x2")
        (link,) = links(on("pd-spread-p4xtp1-d2xtp2", view), view)
        assert link.pairs == 8

    def test_fluid_replicas_are_prefill_and_decode_of_all_others(self) -> None:
        view = load_cluster("p5.48xlarge-x2")
        placed = on("pd-fluid-8xtp2", view)
        assert [len(placed.of("fluid")), placed.nodes_of("fluid")] == [8, ("node-1", "node-2")]
        found = {(link.prefill_node, link.decode_node): (link.kind, link.pairs) for link in links(placed, view)}
        near, far = ("NVLink (cuda_ipc)", 12), ("EFA/SRD", 16)
        assert found == {
            ("node-1", "node-1"): near,
            ("node-1", "node-2"): far,
            ("node-2", "node-1"): far,
            ("node-2", "node-2"): near,
        }
        assert sum(pairs for _, pairs in found.values()) == 8 * 7, "no replica is its own prefill"

    def test_there_is_room_for_as_many_engines_as_there_may_be(self) -> None:
        view = load_cluster("p5.48xlarge-x2")
        assert on("pd-fluid-2xtp2-n2to8", view).nodes_of("fluid") == ("node-1", "node-2")
        with pytest.raises(PlacementError, match=r"requires fluid 9 x 2 GPUs.*what would fit: --max 8 \(16 GPUs\)"):
            on("pd-fluid-2xtp2-n2to9", view)
        with pytest.raises(PlacementError, match=r"or 1 more node with 8 free GPUs"):
            on("pd-fluid-9xtp2-n9to10", view)

    def test_collocated_has_none(self) -> None:
        view = load_cluster("p5.48xlarge-x2")
        assert links(on("collocated-8xtp1", view), view) == ()

    @pytest.mark.parametrize(
        ("nic", "kind"),
        [
            ("efa", "EFA/SRD"),
            ("infiniband", "InfiniBand RDMA"),
            ("roce", "RoCE RDMA"),
            ("ethernet", "TCP"),
            ("loopback", "TCP"),
        ],
    )
    def test_between_gpu_nodes(self, nic: str, kind: str) -> None:
        one = ClusterNode(id="a", gpus=8, nic=Nic(kind=nic))  # type: ignore[arg-type]
        assert link_kind(one, one.model_copy(update={"id": "b"})) == kind

    @pytest.mark.parametrize(
        ("facts", "kind"),
        [
            ({"gpu_type": "H100"}, "NVLink"),
            ({"gpu_type": "A100"}, "NVLink"),
            ({"gpu_type": "L40S"}, "PCIe"),
            ({"gpu_type": "L4"}, "PCIe"),
            ({"gpu_type": "RTX4090"}, "PCIe"),
            ({"gpu_type": "MI300X"}, "Infinity Fabric"),
            ({"gpu_type": "H100", "gpu_link": "pcie"}, "PCIe"),
            ({"gpu_type": "of-tomorrow", "gpu_link": "nvlink"}, "NVLink"),
            ({"gpu_type": "of-tomorrow"}, "not known: give gpu_link"),
            ({}, "not known: give gpu_link"),
        ],
    )
    def test_within_a_gpu_node(self, facts: dict[str, Any], kind: str) -> None:
        node = ClusterNode(id="a", gpus=8, **facts)
        assert link_kind(node, node).startswith(kind)

    def test_different_networks_meet_on_tcp(self) -> None:
        efa, ib = (ClusterNode(id=kind, gpus=8, nic=Nic(kind=kind)) for kind in ("efa", "infiniband"))
        assert link_kind(efa, ib) == "TCP"

    def test_between_cpu_nodes(self) -> None:
        one, two = local_cluster(2).nodes
        assert link_kind(one, one) == "shared memory (cma)"
        assert link_kind(one, two) == "shared memory (cma), same machine"
        assert link_kind(one, two.model_copy(update={"host": "elsewhere"})) == "TCP"


class TestPins:
    def test_one_replica_pins_every_bundle(self) -> None:
        placed = on("collocated-1xtp4pp3", "p5.48xlarge-x2")
        assert bundle_nodes(Pool(tp=4, pp=3), placed, "collocated") == [("node-1",)] * 8 + [("node-2",)] * 4

    def test_several_replicas_share_the_set(self) -> None:
        placed = on("collocated-3xtp4", "p5.48xlarge-x2")
        assert bundle_nodes(Pool(replicas=3, tp=4), placed, "collocated") == [("node-1", "node-2")] * 4

    def test_caution_where_ray_could_split_a_tp_group(self) -> None:
        view = gpu_nodes(6, 6)
        risky, pinned = deployment_of("collocated-1xtp4dp2"), deployment_of("collocated-1xtp4pp2")
        assert "TP 4" in cautions(risky, place(risky, view), view)[0]
        assert cautions(pinned, place(pinned, view), view) == []


class TestSelectors:
    """Ray finds a pool's nodes by a label that they carry: never by a name where it compares ids."""

    HEAD = ClusterNode(id="head", cpus=4, head=True)

    def selector(self, *nodes: ClusterNode) -> tuple[tuple[str, dict[str, str]], ClusterView, Placement]:
        view = ClusterView(nodes=nodes)
        placed = on("collocated-2xtp8", view)
        return node_selector(placed, "collocated", view), view, placed

    def test_a_head_without_gpus_needs_no_name(self) -> None:
        found, view, placed = self.selector(self.HEAD, *gpu_nodes(8, 8).nodes)
        assert found == (NODE_NAME_LABEL, {"n0": "n0", "n1": "n1"})
        assert pinned_to_ids(placed, view) == {} and cautions(deployment_of("collocated-2xtp8"), placed, view) == []

    def test_one_engine_node_without_a_name_makes_all_be_found_by_their_ids(self) -> None:
        named, other = gpu_nodes(8, 8).nodes
        named = named.model_copy(update={"labels": {NODE_NAME_LABEL: "n0", NODE_ID_LABEL: "e0"}})
        other = other.model_copy(update={"id": "e1", "labels": {NODE_ID_LABEL: "e1"}})
        found, view, placed = self.selector(self.HEAD, named, other)
        assert found == (NODE_ID_LABEL, {"n0": "e0", "e1": "e1"})
        assert pinned_to_ids(placed, view) == {"collocated": ("n0", "e1")}

    def test_a_name_of_a_file_is_no_id(self) -> None:
        bare = [node.model_copy(update={"labels": {}}) for node in gpu_nodes(8, 8).nodes]
        found, view, placed = self.selector(*bare)
        assert found == (NODE_NAME_LABEL, {"n0": "n0", "n1": "n1"})
        (caution,) = cautions(deployment_of("collocated-2xtp8"), placed, view)
        assert f"{NODE_NAME_LABEL}=n0" in caution

    def test_two_nodes_of_one_name_are_refused(self, tmp_path: Path) -> None:
        file = tmp_path / "twins.yaml"
        file.write_text(
            "nodes:\n"
            + "".join(f"- {{id: {id_}, gpus: 8, cpus: 9, labels: {{{NODE_NAME_LABEL}: w}}}}\n" for id_ in "ab")
        )
        with pytest.raises(UsageError) as caught:
            load_cluster(str(file))
        text = str(caught.value)
        assert "\n" not in text and f"nodes a and b both have the label {NODE_NAME_LABEL}: w" in text


class TestAdvice:
    @pytest.mark.parametrize(
        ("label", "view", "parts"),
        [
            ("pd-pack-p2xtp4-d1xtp4", gpu_nodes(8, 8), ["prefill 2 x 4 GPUs", "12 GPUs in all, all on one node",
             "8 of 8 GPUs on n0 and n1", "--p-num 1", "--pd-spread"]),
            ("collocated-1xtp8", gpu_nodes(4, 4), ["does not fit"]),
            ("collocated-8xtp8", gpu_nodes(*[8] * 6), ["2 more nodes with 8 free GPUs"]),
            ("collocated-1xtp4", gpu_nodes(3, 2), ["--tp 2"]),
            ("pd-pack-p4xtp4-d4xtp4", gpu_nodes(8), ["--p-num 1 --d-num 1"]),
            ("collocated-1xtp4", gpu_nodes(8, cpus=4), ["but only 4 CPUs (a TP group of 4 takes 5)"]),
            ("collocated-1xtp2", gpu_nodes(0, 0), ["others release 2 of their 8 GPUs on n0"]),
            ("collocated-1xtp7", gpu_nodes(1, 6), ["; or others release 1 of their 2 GPUs on n1"]),
            ("collocated-1xtp8", gpu_nodes(7), ["others release their 1 GPU on n0"]),
            ("pd-spread-p1xtp4-d1xtp4", gpu_nodes(0, 3, 0), ["others release GPUs: 1 on n1 and 4 on n2"]),
            ("collocated-10000xtp1", gpu_nodes(8, 8), ["--num 16 (16 GPUs)"]),
            ("pd-spread-p200xtp1-d200xtp1", gpu_nodes(*[8] * 8), ["--p-num 32 --d-num 32 (64 GPUs)"]),
            ("pd-pack-p400xtp2-d400xtp2", gpu_nodes(8, 8), ["--p-num 2 --d-num 2 (8 GPUs)"]),
            ("collocated-97xtp1", gpu_nodes(*[8] * 12), ["8 of 8 GPUs on each of 12 nodes"]),
        ],
    )  # fmt: skip
    def test_what_would_fit(self, label: str, view: ClusterView, parts: list[str]) -> None:
        text = complaint(label, view)
        assert not [part for part in parts if part not in text], text

    def test_cpus_that_others_hold(self) -> None:
        node = gpu_nodes(8).nodes[0].model_copy(update={"free_cpus": 4})
        assert "others release their CPUs on n0" in complaint("collocated-1xtp4", ClusterView(nodes=(node,)))
        cpus = ClusterNode(id="c", cpus=4, free_cpus=1)
        assert "others release 1 of their 3 CPUs on c" in complaint("collocated-2xtp1", ClusterView(nodes=(cpus,)))

    def test_advice_is_left_out_rather_than_wrong_when_it_takes_too_long(self, monkeypatch: pytest.MonkeyPatch) -> None:
        text = complaint("pd-spread-p3xtp4-d3xtp4", gpu_nodes(4, 4))
        assert "--p-num 1 --d-num 1 (8 GPUs)" in text and "2 more nodes with 8 free GPUs" in text
        monkeypatch.setattr(explain, "MAX_WORK", 5)
        assert "what would fit: none of the changes that were tried" in complaint(
            "pd-spread-p3xtp4-d3xtp4", gpu_nodes(4, 4)
        )

    def test_no_advice_that_nixl_refuses(self) -> None:
        text = complaint("pd-pack-p1xtp4-d1xtp8", gpu_nodes(8))
        assert "--p-tp 3" not in text and "--d-tp 2" not in text

    def test_type_that_is_not_there(self) -> None:
        deployment = Deployment(topology=Collocated(pool=Pool(gpu_type="B200")))
        with pytest.raises(PlacementError, match=r"of type B200.*H100"):
            place(deployment, gpu_nodes(8))

    @pytest.mark.parametrize("free", [(8, 8), (4, 4), (8,), (3, 5, 8)])
    @pytest.mark.parametrize("label", ["pd-pack-p2xtp4-d1xtp4", "pd-spread-p2xtp8-d1xtp8", "collocated-9xtp4"])
    def test_flags_of_the_advice_fit(self, label: str, free: tuple[int, ...]) -> None:
        """What is recommended is true: the named flags give a deployment that places."""
        view = gpu_nodes(*free)
        try:
            place(deployment_of(label), view)
        except PlacementError as error:
            first = str(error).split("what would fit: ")[1].split("; or ")[0]
        else:
            return
        if not first.startswith(("--p-", "--d-", "--num", "--tp")):
            return
        deployment = deployment_of(label)
        words = first.split(" (")[0].split()
        topology = deployment.topology.model_dump()
        for flag, value in zip(words[::2], words[1::2], strict=True):
            role = {"--p-": "prefill", "--d-": "decode"}.get(flag[:4], "pool")
            field = flag.removeprefix("--").removeprefix("p-").removeprefix("d-")
            topology[role]["replicas" if field == "num" else field] = int(value)
        place(Deployment.model_validate({"topology": topology}), view)
