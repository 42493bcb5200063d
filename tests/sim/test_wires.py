"""The rate of KV transfers over the wires of the planned nodes, as a calculation by hand gives it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pdlab.core.catalog import known_gpu, known_gpus, load_cluster, require_shape
from pdlab.core.deployment import Deployment, Disaggregated, Pool, parse_label
from pdlab.core.nodes import ClusterNode, Nic
from pdlab.plan.step_findings import step_findings
from pdlab.sim.computed_hardware import computed
from pdlab.sim.hardware import Hardware, load_hardware
from pdlab.sim.kv_transfer import LinkKind, Links, TransferCosts, on_nodes, transfer_costs

H100 = load_hardware("h100-vllm-0.11")
SHAPE = require_shape("gpt-oss-120b")


def node(kind: str, count: int = 1, gbit_per_s: float | None = None, **changes: Any) -> ClusterNode:
    nic = Nic.model_validate({"kind": kind, "count": count, "gbit_per_s": gbit_per_s})
    return ClusterNode(id="a", gpu_type="H100", gpus=8, cpus=96, nic=nic, **changes)


def spread(hardware: Hardware) -> TransferCosts:
    topology = Disaggregated(prefill=Pool(tp=2), decode=Pool(tp=2), placement="spread")
    return transfer_costs(hardware, SHAPE, topology, "srd")


def pack(hardware: Hardware) -> TransferCosts:
    topology = Disaggregated(prefill=Pool(tp=1), decode=Pool(tp=1), placement="pack")
    return transfer_costs(hardware, SHAPE, topology, "nvlink")


def test_nodes_of_the_fit_change_nothing() -> None:
    for each in (load_cluster("p5.48xlarge-x2").nodes, [node("efa")]):
        on_them = on_nodes(H100, each)
        assert spread(on_them) == spread(H100) and pack(on_them) == pack(H100)
        assert on_them.value("alltoall_gb_per_s") == H100.value("alltoall_gb_per_s")
        assert not step_findings(on_them)


@pytest.mark.parametrize(
    ("nodes", "gb_per_s", "shared"),
    [
        ([node("ethernet", 1, 10)], 0.2, True),  # 1.25 GB/s, of which TCP was published to reach 0.2
        ([node("ethernet", 1, 1)], 0.125, True),
        ([node("tcpxo", 8, 200)], 0.2, True),
        ([node("infiniband", 8, 400)], 2 * 50.0, False),  # one NIC of 50 GB/s for each of two GPUs
        ([node("roce", 1, 100)], 2 * 12.5 / 8, False),  # one NIC of 12.5 GB/s for eight GPUs
        ([node("efa", 4, 100)], 2 * 50.0 / 8, False),
        ([node("infiniband")], 2 * 10.0, False),  # no rate is known: as EFA
        ([node("infiniband", 8, 400), node("infiniband", 4, 400)], 2 * 25.0, False),  # the slower one
        ([node("infiniband", 8, 400), node("efa", 32, 100)], 0.2, True),  # they share no network but Ethernet
    ],
)
def test_a_spread_has_the_rate_of_the_nodes(nodes: list[ClusterNode], gb_per_s: float, shared: bool) -> None:
    on_them = on_nodes(H100, nodes)
    costs = spread(on_them)
    assert costs.prefill_bytes_per_s == costs.decode_bytes_per_s == pytest.approx(gb_per_s * 1e9)
    assert costs.shared is shared
    (finding,) = step_findings(on_them)
    assert finding.code == "network_not_fitted"
    assert f"at {gb_per_s if shared else gb_per_s / 2:.3g} GB/s per {'node' if shared else 'GPU'}" in finding.text


TWO_TYPES = H100.model_copy(
    update={"beside": (H100.model_copy(update={"gpu_type": "H200", "gpus_per_node": 4}),), "fit": None}
)


def of_h200(*nic: Any) -> ClusterNode:
    return node(*nic).model_copy(update={"gpu_type": "H200", "gpus": 4})


@pytest.mark.parametrize(
    ("prefill", "decode", "tp", "gb_per_s", "shared"),
    [
        # A prefill GPU has an eighth of its node's line, a decode GPU a quarter of that of its own node.
        (node("infiniband", 8, 400), of_h200("infiniband", 2, 400), (2, 4), (2 * 50.0, 4 * 25.0), False),
        (node("infiniband", 8, 400), of_h200("infiniband", 8, 400), (4, 1), (4 * 50.0, 1 * 100.0), False),
        (node("infiniband", 1, 400), of_h200("infiniband", 8, 400), (4, 4), (4 * 6.25, 4 * 100.0), False),
        (node("efa", 1, 400), of_h200("efa", 1, 400), (2, 2), (2 * 6.25, 2 * 10.0), False),  # 12.5, and EFA reaches 10
        (node("ethernet", 1, 10), of_h200("ethernet", 1, 1), (4, 4), (0.125, 0.125), True),  # one wire for both
        (node("ethernet", 1, 1), of_h200("ethernet", 1, 10), (4, 4), (0.125, 0.125), True),
    ],
)
def test_each_end_has_the_line_of_its_own_nodes(
    prefill: ClusterNode, decode: ClusterNode, tp: tuple[int, int], gb_per_s: tuple[float, float], shared: bool
) -> None:
    other = node("ethernet", 1, 1).model_copy(update={"gpu_type": "A100"})  # takes no part in the plan
    on_them = on_nodes(TWO_TYPES, [prefill, decode, other])
    topology = Disaggregated(
        prefill=Pool(tp=tp[0], gpu_type="H100"), decode=Pool(tp=tp[1], gpu_type="H200"), placement="spread"
    )
    costs = transfer_costs(on_them, SHAPE, topology, "srd")
    assert (costs.prefill_bytes_per_s / 1e9, costs.decode_bytes_per_s / 1e9) == pytest.approx(gb_per_s)
    assert costs.shared is shared
    sender, receiver = (SimpleNamespace(link_free_s=0.0, link_busy_s=0.0) for _ in range(2))
    arrives_s = Links(costs).carry(sender, receiver, 2e9, 0.0)
    assert arrives_s == pytest.approx(costs.setup_s + 2 / min(gb_per_s)), "the slower end decides"


def test_networks_of_two_types_are_named_by_type() -> None:
    unlike = on_nodes(TWO_TYPES, [node("infiniband", 8, 400), of_h200("infiniband", 2, 400)])
    texts = [each.text for each in step_findings(unlike) if each.code == "network_not_fitted"]
    assert ["50 GB/s per GPU of H100," in texts[0], "25 GB/s per GPU of H200," in texts[1]] == [True, True]
    alike = on_nodes(TWO_TYPES, [node("infiniband", 8, 400), of_h200("infiniband", 4, 400)])
    (text,) = (each.text for each in step_findings(alike) if each.code == "network_not_fitted")
    assert "50 GB/s per GPU, " in text


@pytest.mark.parametrize(("tp", "said"), [((8, 4), []), ((8, 8), [(8, 4)]), ((16, 8), [(16, 8), (8, 4)])], ids=str)
def test_an_engine_spans_the_nodes_of_its_own_type(tp: tuple[int, int], said: list[tuple[int, int]]) -> None:
    topology = Disaggregated(
        prefill=Pool(tp=tp[0], gpu_type="H100"), decode=Pool(tp=tp[1], gpu_type="H200"), placement="spread"
    )
    findings = step_findings(TWO_TYPES, None, [Deployment(topology=topology)])
    texts = [each.text for each in findings if each.code == "tp_over_nodes"]
    assert [text.partition(":")[0] for text in texts] == [f"TP {tp} spans nodes of {node} GPUs" for tp, node in said]


def test_a_network_that_is_not_given_is_a_finding() -> None:
    """Constants that were fitted to measured runs have the network of these."""

    def codes(hardware: Hardware, label: str, link: LinkKind | None = None) -> set[str]:
        return {
            each.code for each in step_findings(hardware, None, [Deployment(topology=parse_label(label))], (), link)
        }

    tables = computed("H200")
    for label, link, assumed in (
        ("pd-spread-p1xtp4-d1xtp4", None, True),
        ("pd-spread-p1xtp4-d1xtp4", "srd", True),
        ("pd-spread-p1xtp4-d1xtp4", "tcp", False),
        ("pd-pack-p1xtp4-d1xtp4", None, False),
        ("pd-pack-p1xtp4-d1xtp4", "srd", True),
        ("collocated-1xtp4", None, False),
        ("collocated-1xtp4", "srd", False),
    ):
        assert ("network_assumed" in codes(tables, label, link)) is assumed, (label, link)
        assert "network_assumed" not in codes(on_nodes(tables, [node("ethernet", 1, 10)]), label, link)
        assert "network_assumed" not in codes(H100, label, link)


def test_a_network_that_no_kv_cache_crosses_is_none() -> None:
    slow = on_nodes(H100, [node("ethernet", 1, 10)])
    for label, crosses in (("pd-spread-p1xtp4-d1xtp4", True), ("pd-pack-p1xtp2-d1xtp2", False)):
        findings = step_findings(slow, SHAPE, [Deployment(topology=parse_label(label))])
        assert [each.code for each in findings] == ["network_not_fitted"] * crosses


def test_a_pack_without_nvlink_has_the_rate_of_pcie() -> None:
    l40s = H100.model_copy(update={"gpu_type": "L40S"})
    assert pack(l40s).prefill_bytes_per_s == 32e9 < pack(H100).prefill_bytes_per_s
    cards = on_nodes(H100.model_copy(update={"gpu_type": "A100-80G"}), [node("efa", 32, 100, gpu_link="pcie")])
    assert pack(cards).prefill_bytes_per_s == 32e9
    with_bridge = on_nodes(l40s, [node("efa", 32, 100, gpu_link="nvlink")])
    assert pack(with_bridge).prefill_bytes_per_s == pack(H100).prefill_bytes_per_s


def test_every_type_without_nvlink_has_a_published_rate() -> None:
    without = [name for name, each in known_gpus().items() if each.link == "pcie"]
    assert without and all((known_gpu(name) or pytest.fail()).host_gb_per_s for name in without)
