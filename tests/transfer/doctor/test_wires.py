"""Rules are judged against the wire that a deployment will use, on machines that are not here."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from support.made_up_nodes import REFUSED, device, efa_pod, machine, nd_h100_v5, nd_h100_v5_pod, workstation

from pdlab.cli import doctor as command
from pdlab.remote import node
from pdlab.transfer.doctor.diagnosis import concerns_of, diagnose, render
from pdlab.transfer.doctor.findings import ONE_MACHINE, SPANNING, Concern

WIRES: tuple[Concern, ...] = ("efa", "rdma", "tcp", "shared memory", "gpu peer")


def topics(fact: dict[str, Any], concerns: Collection[Concern] | None) -> list[tuple[str, str]]:
    return [(finding.severity, finding.topic) for finding in diagnose({"a": fact}, concerns=concerns)]


def with_environment(fact: dict[str, Any], **environment: str) -> dict[str, Any]:
    return {**fact, "environment": environment}


HEALTHY = [
    nd_h100_v5(),
    efa_pod(32, 8, environment={"UCX_MAX_RMA_RAILS": "4"}),
    efa_pod(16, 8),
    efa_pod(16, 4, environment={"UCX_MAX_RMA_RAILS": "4"}),
    efa_pod(4, 1, environment={"UCX_MAX_RMA_RAILS": "4"}),
    machine([], 0, [], memlock=8 * 2**20),
]


@pytest.mark.parametrize("fact", HEALTHY)
@pytest.mark.parametrize("concerns", [None, *({wire} for wire in WIRES)])
def test_healthy_machines_have_no_findings(fact: dict[str, Any], concerns: set[Concern] | None) -> None:
    assert topics(fact, concerns) == []


BAD_NETWORK = {
    "no /dev/infiniband": nd_h100_v5_pod(),
    "a workstation": workstation(),
    "memlock": nd_h100_v5(memlock=2**16),
    "no EFA device": efa_pod(0, 8),
    "devices refused": nd_h100_v5(rdma=[device("mlx5_ib0", "infiniband", "mlx5_core", 400.0, **REFUSED)]),
    "tcp alone": nd_h100_v5(loaded=machine([], 8, [])["loaded"]),
    "UCX_NET_DEVICES": with_environment(nd_h100_v5(), UCX_NET_DEVICES="eth0"),
    "UCX_TLS": with_environment(nd_h100_v5(), UCX_TLS="tcp,cuda_ipc,cuda_copy,sm"),
    "no GPUDirect": nd_h100_v5(nvidia_peermem=False),
    "rails": efa_pod(32, 8),
    "one NIC": with_environment(nd_h100_v5(), UCX_NET_DEVICES="mlx5_ib0:1"),
    "two libibverbs": nd_h100_v5(
        loaded={**nd_h100_v5()["loaded"], "libraries": ["/usr/lib/libibverbs.so.1", "/w/libibverbs-1d.so.1"]}
    ),
    "emulation": with_environment(machine([], 8, []), UCX_PROTO_EMULATION_ENABLE="n"),
}


@pytest.mark.parametrize("fact", BAD_NETWORK.values(), ids=BAD_NETWORK)
@pytest.mark.parametrize("wire", ONE_MACHINE)
def test_a_deployment_on_one_machine_has_no_network_findings(fact: dict[str, Any], wire: Concern) -> None:
    assert topics(fact, None) != [], "there is something"
    assert topics(fact, {wire}) == []


@pytest.mark.parametrize(
    ("fact", "expected"),
    [
        (nd_h100_v5_pod(), [("error", "InfiniBand not usable"), ("error", "memlock")]),
        (workstation(), [("error", "memlock")]),
        (BAD_NETWORK["devices refused"], [("error", "InfiniBand not usable")]),
        (BAD_NETWORK["tcp alone"], [("error", "RDMA")]),
        (BAD_NETWORK["UCX_NET_DEVICES"], [("error", "UCX_NET_DEVICES")]),
        (BAD_NETWORK["UCX_TLS"], [("error", "UCX_TLS")]),
        (with_environment(nd_h100_v5(), UCX_TLS="^ib"), [("error", "UCX_TLS")]),
        (with_environment(nd_h100_v5(), UCX_TLS="^rc,dc,ud"), [("error", "UCX_TLS")]),
        (with_environment(nd_h100_v5(), UCX_TLS="^rc"), []),
        (with_environment(nd_h100_v5(), UCX_TLS="rc,cuda,sm"), []),
        (with_environment(nd_h100_v5(), UCX_TLS="rc_x,cuda,sm"), []),
        (with_environment(nd_h100_v5(), UCX_TLS="all"), []),
        (with_environment(nd_h100_v5(), UCX_NET_DEVICES="^eth0"), []),
        (with_environment(nd_h100_v5(), UCX_NET_DEVICES=",".join(f"mlx5_ib{i}:1" for i in range(8))), []),
        (BAD_NETWORK["one NIC"], [("warning", "one NIC")]),
        (BAD_NETWORK["no GPUDirect"], [("warning", "GPUDirect")]),
        (BAD_NETWORK["two libibverbs"], [("error", "libibverbs twice")]),
        (
            nd_h100_v5(system_libraries={"libibverbs": ["/usr/lib/libibverbs.so.1.14.57.0"]}),
            [("warning", "rdma-core ABI")],
        ),
    ],
)
def test_infiniband_and_roce_have_the_rules_of_efa(fact: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    assert topics(fact, {"rdma"}) == expected
    assert topics(fact, {"tcp"}) == []


def test_one_nic_of_a_pod_serves_all_its_gpus() -> None:
    nics = [{**each, "given": False, "usable": False} for each in nd_h100_v5()["rdma"]]
    nics[1] = nd_h100_v5()["rdma"][1]
    assert topics(nd_h100_v5(rdma=nics), {"rdma"}) == [("warning", "one NIC")]
    assert topics(nd_h100_v5(rdma=nics, gpus=1), {"rdma"}) == []


def test_rails_are_of_the_devices_that_can_be_used() -> None:
    """32 devices in sysfs and 8 GPUs are four each; a pod that was given 16 has two, which UCX's default fills."""
    assert topics(efa_pod(16, 8), {"efa"}) == []
    assert topics(efa_pod(32, 8), {"efa"}) == [("warning", "rails")]
    (finding,) = diagnose({"a": efa_pod(16, 4)}, concerns={"efa"})
    assert finding.topic == "rails" and "UCX_MAX_RMA_RAILS=4" in finding.fix


def test_a_node_without_gpus_has_no_rails_of_a_gpu() -> None:
    ports = [device(f"mlx5_{i}", "roce", "mlx5_core", 100.0) for i in range(4)]
    assert "rails" not in [topic for _, topic in topics(machine(ports, 0, []), {"rdma"})]
    assert "rails" in [topic for _, topic in topics(machine(ports, 1, []), {"rdma"})]


def test_a_port_without_a_link_is_no_fabric() -> None:
    unplugged = device("mlx5_0", "roce", "mlx5_core", 25.0, active=False)
    assert topics(machine([unplugged], 0, [], memlock=8 * 2**20), None) == []


@pytest.mark.parametrize(
    ("value", "concerns", "expected"),
    [
        ("eth7", {"gpu peer"}, [("error", "UCX_NET_DEVICES")]),
        ("eth7,eth0", {"gpu peer"}, []),
        ("eth7,eth0", {"tcp"}, [("error", "UCX_NET_DEVICES")]),
    ],
)
def test_without_any_network_device_even_a_pack_has_no_backend(
    value: str, concerns: set[Concern], expected: list[tuple[str, str]]
) -> None:
    assert topics(with_environment(machine([], 8, []), UCX_NET_DEVICES=value), concerns) == expected


def test_reads_over_tcp_that_may_not_be_emulated_fail() -> None:
    assert topics(BAD_NETWORK["emulation"], {"tcp"}) == [("error", "UCX emulation")]


class TestOfAnyEngine:
    @pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
    @pytest.mark.parametrize("value", ["expandable_segments:True", "max_split_size_mb:64, expandable_segments: true"])
    def test_expandable_segments(self, name: str, value: str) -> None:
        assert topics(with_environment(nd_h100_v5(), **{name: value}), {"gpu peer"}) == [("error", name)]
        assert topics(with_environment(machine([], 0, []), **{name: value}), {"shared memory"}) == []
        off = with_environment(nd_h100_v5(), **{name: "expandable_segments:False"})
        assert topics(off, {"gpu peer"}) == []

    @pytest.mark.parametrize("free", [0, 64 * 2**20, 2**30 - 1])
    def test_a_small_shared_memory(self, free: int) -> None:
        fact = nd_h100_v5(shm={"bytes": 64 * 2**20, "free_bytes": free})
        assert topics(fact, {"gpu peer"}) == [("warning", "/dev/shm")]

    def test_mig(self) -> None:
        fact = nd_h100_v5(mig=[True, False] * 4)
        (finding,) = diagnose({"a": fact}, concerns={"gpu peer"})
        assert (finding.severity, finding.topic) == ("warning", "MIG") and "4 of 8" in finding.evidence

    @pytest.mark.parametrize(
        "resolved",
        [
            {"addresses": ["127.0.1.1"], "error": None},
            {"addresses": ["127.0.1.1", "::1"], "error": None},
            {"addresses": [], "error": "Name or service not known"},
        ],
    )
    def test_a_host_name_that_other_nodes_cannot_use(self, resolved: dict[str, Any]) -> None:
        def found(concerns: set[Concern], **more: Any) -> list[tuple[str, str]]:
            facts = {"a": nd_h100_v5(resolved=resolved, **more), "b": nd_h100_v5(boot="machine-b")}
            return [(finding.severity, finding.topic) for finding in diagnose(facts, concerns=concerns)]

        assert found({"rdma", SPANNING}) == [("error", "host name")]
        assert found({"rdma"}) == [], "engines that each have one node"
        assert found({SPANNING}, environment={"GLOO_SOCKET_IFNAME": "eth0"}) == []
        assert found({SPANNING}, boot="machine-b") == [], "Ray nodes of one machine"

    @pytest.mark.parametrize(
        ("name", "value", "missing"),
        [
            ("GLOO_SOCKET_IFNAME", "eth0", False),
            ("GLOO_SOCKET_IFNAME", "eth", True),
            ("GLOO_SOCKET_IFNAME", "ens5,eth0", False),
            ("NCCL_SOCKET_IFNAME", "eth", False),
            ("NCCL_SOCKET_IFNAME", "=eth", True),
            ("NCCL_SOCKET_IFNAME", "=eth0", False),
            ("NCCL_SOCKET_IFNAME", "ens", True),
            ("NCCL_SOCKET_IFNAME", "^docker,lo", False),
            ("NCCL_SOCKET_IFNAME", "^eth,lo", True),
        ],
    )
    def test_an_interface_that_the_node_does_not_have(self, name: str, value: str, missing: bool) -> None:
        fact = with_environment(nd_h100_v5(), **{name: value})
        assert topics(fact, set()) == ([("error", name)] if missing else [])

    def test_weights_that_no_engine_can_load(self) -> None:
        found = {
            "model": "org/m",
            "folder": "/w",
            "missing": [],
            "broken": {"model-2.safetensors": "truncated: 7 bytes, 9 by its header"},
        }
        assert topics(nd_h100_v5(weights=found), set()) == [("error", "weights")]
        absent = {"model": "org/m", "folder": None, "missing": ["everything"], "broken": {}}
        assert topics(nd_h100_v5(weights=absent), set()) == [("note", "weights")]

    @pytest.mark.parametrize(
        ("node", "model", "fix"),
        [
            ("here", "org/m", "python -m pdlab weights --model org/m --here --fetch"),
            ("10.0.0.1", "org/m", "python -m pdlab weights --model org/m --fetch"),
            ("here", "/models/m", "copy the model's files to /models/m on the node"),
        ],
    )
    def test_the_fix_of_weights_is_for_this_model_and_these_nodes(self, node: str, model: str, fix: str) -> None:
        absent = {"model": model, "folder": None, "missing": ["everything"], "broken": {}}
        (one,) = [each for each in diagnose({node: nd_h100_v5(weights=absent)}) if each.code == "weights"]
        assert one.fix == fix
        cut = {"model": model, "folder": "/w", "missing": [], "broken": {"a": "truncated"}}
        (one,) = [each for each in diagnose({node: nd_h100_v5(weights=cut)}) if each.code == "weights"]
        assert fix in one.fix


def test_what_ucx_finds_and_whom_a_finding_concerns_is_printed() -> None:
    facts = {"a": efa_pod(16, 4)}
    text = render(facts, diagnose(facts))
    assert "4 GPUs, 16 usable of 32 EFA devices" in text
    assert "UCX finds: cma, tcp, cuda_ipc, srd on 16 devices" in text
    assert "matters:  to deployments with efa" in text


@pytest.mark.parametrize(
    ("nodes", "placement", "concerns"),
    [
        ([nd_h100_v5()], "pack", {"gpu peer"}),
        ([workstation()], "pack", {"shared memory"}),
        ([nd_h100_v5(), nd_h100_v5_pod()], "spread", {"rdma", SPANNING}),
        ([efa_pod(0, 8)], "spread", {"efa", SPANNING}),
        ([efa_pod(32, 8), nd_h100_v5()], "spread", {"tcp", SPANNING}),
        ([machine([], 8, [])], "spread", {"tcp", SPANNING}),
        ([machine([], 0, []), efa_pod(32, 8), efa_pod(32, 8)], "spread", {"efa", SPANNING}),  # a head without GPUs
        ([workstation(), workstation()], "spread", {"rdma", SPANNING}),  # engines on CPUs
    ],
)
def test_the_wire_of_a_placement(
    nodes: list[dict[str, Any]], placement: Literal["pack", "spread"], concerns: set[Concern]
) -> None:
    assert concerns_of(dict(enumerate_names(nodes)), placement) == concerns


def enumerate_names(nodes: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, fact in enumerate(nodes):
        yield f"n{number}", fact


@pytest.mark.parametrize(("words", "code"), [((), 3), (("--placement", "spread"), 3), (("--placement", "pack"), 0)])
def test_the_command_on_a_workstation(words: tuple[str, ...], code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "quick", lambda *_: workstation())
    assert command.main(["--here", "--quick", *words]) == code


def test_the_command_looks_at_the_models_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model in Hugging Face's cache, whose config.json is empty and whose weights are cut."""
    model = tmp_path / "hub" / "models--org--model"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("abc")
    snapshot = model / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("")
    (snapshot / "model.safetensors").write_bytes(b"cut")
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    out = tmp_path / "doctor.json"
    assert command.main(["--here", "--quick", "--model", "org/model", "--json", str(out)]) == 3
    findings = json.loads(out.read_text())["findings"]
    broken = {Path(each["evidence"].split(": ")[0]).name for each in findings if each["topic"] == "weights"}
    assert {"config.json", "model.safetensors"} <= broken
