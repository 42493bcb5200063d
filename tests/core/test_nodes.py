"""Nodes of a cluster's file: many that are alike in one entry, and what is between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdlab.core.catalog import load_cluster
from pdlab.core.deployment import Deployment, parse_label
from pdlab.core.nodes import ClusterNode, ClusterView, Nic
from pdlab.placement.place import link_kind, link_wire, links, place


def test_one_entry_stands_for_nodes_that_are_alike(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "nodes:\n- {id: head, cpus: 4, head: true}\n"
        "- {id: node, count: 13, gpu_type: H100, gpus: 8, cpus: 192, nic: {kind: efa, count: 32, gbit_per_s: 100},\n"
        "   labels: {pdlab/node: node}}\n"
    )
    view = load_cluster(str(file))
    written_out = load_cluster("p5.48xlarge-x13")
    assert [node.id for node in view.nodes] == ["head", *(f"node-{n}" for n in range(1, 14))]
    own = [node.model_copy(update={"head": False}) for node in written_out.nodes]
    assert list(view.engine_nodes) == own, "with the names that selectors go by"
    assert place(Deployment(topology=parse_label("pd-spread-p3xdp24ep-d1xdp32ep")), view).ingress_nodes == ("head",)


def test_the_head_is_one_of_them() -> None:
    view = ClusterView.model_validate({"nodes": [{"id": "n", "count": 2, "gpus": 8, "head": True}]})
    assert [node.head for node in view.nodes] == [True, False]


def test_two_entries_may_not_make_the_same_node() -> None:
    with pytest.raises(ValueError, match="distinct"):
        ClusterView.model_validate({"nodes": [{"id": "n", "count": 2}, {"id": "n-2"}]})


def tray(number: int, domain: str | None, kind: Any = "efa") -> ClusterNode:
    nic = Nic(kind=kind, count=4, gbit_per_s=400)
    return ClusterNode(id=f"t{number}", gpu_type="GB200", gpus=4, cpus=144, nic=nic, nvlink_domain=domain)


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [("rack-1", "rack-1", True), ("rack-1", "rack-2", False), (None, None, False), ("rack-1", None, False)],
)
def test_trays_of_one_rack_may_have_nvlink_between_them(one: str | None, other: str | None, said: bool) -> None:
    """Which wire it is stays the network's: whether UCX takes NVLink depends on how memory was made."""
    kind = link_kind(tray(1, one), tray(2, other))
    assert ("NVLink domain rack-1" in kind) is said and kind.startswith("EFA/SRD")
    assert link_wire(tray(1, one), tray(2, other)) == "efa"
    assert link_kind(tray(1, one), tray(1, one)) == "NVLink (cuda_ipc)"


def test_tcpxo_is_tcp_to_nixl() -> None:
    one, other = tray(1, None, "tcpxo"), tray(2, None, "tcpxo")
    assert link_wire(one, other) == "tcp" and link_kind(one, other) == "TCP, 400 Gbit/s"
    deployment = Deployment(topology=parse_label("pd-spread-p1xtp4-d1xtp4"))
    view = ClusterView(nodes=(one, other))
    assert [link.wire for link in links(place(deployment, view), view)] == ["tcp"]
