"""Before a launch: warnings are told, what would break it stops it, a port that is just being freed does not."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
from support.made_up_nodes import efa_pod, machine, nd_h100_v5, nd_h100_v5_pod, workstation

from pdlab.cluster.connection import Cluster
from pdlab.core.catalog import load_cluster, local_cluster
from pdlab.core.deployment import Deployment, Disaggregated, Fluid, Transport, parse_label
from pdlab.core.errors import DeployError
from pdlab.core.nodes import NODE_ID_LABEL, ClusterNode, ClusterView, Nic
from pdlab.deploy import preflight
from pdlab.deploy.preflight import judge
from pdlab.deploy.serve_config import host_copy_bytes
from pdlab.placement.place import place
from pdlab.remote import node
from pdlab.transfer.doctor.findings import DoctorFinding

TAKEN = DoctorFinding("error", "side_channel_port", ("n1",), "taken: 20000 (unknown)", "cannot start", "stop it")
ENGINE = DoctorFinding(
    "note", "side_channel_port", ("n1",), "taken: 20000 (VLLM::EngineCore)", "its port is taken", "stop it"
)
WARNING = DoctorFinding("warning", "memlock", ("n1",), "memlock is 64 KiB", "slower", "ulimit -l unlimited")
ERROR = DoctorFinding("error", "builds_differ", ("n1",), "nixl 1.0 and 1.3", "they do not agree", "install one")


def test_nothing_found_says_nothing() -> None:
    lines: list[str] = []
    judge(list, lines.append)
    assert lines == []


def test_a_warning_is_told_and_does_not_stop() -> None:
    lines: list[str] = []
    judge(lambda: [WARNING], lines.append)
    assert lines == ["doctor: memlock: memlock is 64 KiB; slower"]


@pytest.mark.parametrize("held", [TAKEN, ENGINE])
def test_a_port_that_is_freed_in_time(held: DoctorFinding) -> None:
    lines: list[str] = []
    answers = iter([[held], [held, WARNING], [WARNING]])
    judge(lambda: next(answers), lines.append)
    assert lines[0].startswith("waiting for side-channel ports") and len(lines) == 2
    assert list(answers) == [], "it looked until the port was free"


@pytest.mark.parametrize("held", [TAKEN, ENGINE])
def test_a_port_that_stays_taken(held: DoctorFinding) -> None:
    with pytest.raises(DeployError, match=r"side-channel port on n1: taken: 20000 .*; stop it"):
        judge(lambda: [held], lambda _: None, wait_s=0.0)


def test_an_error_stops_at_once() -> None:
    answers = iter([[ERROR]])
    with pytest.raises(DeployError, match="builds differ on n1"):
        judge(lambda: next(answers), lambda _: None)


class Nodes(Cluster):
    """A cluster whose nodes answer with planted facts; ``asked`` are the probes with their arguments."""

    def __init__(self, facts: dict[str, Any]) -> None:
        super().__init__()
        self.facts = facts
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def call_nodes(self, function: Any, *args: Any) -> dict[str, Any]:
        self.calls.append((function.__name__, args))
        return {"n1": self.facts, "n2": self.facts}


X2 = load_cluster("p5.48xlarge-x2")
EFA = [{"name": f"rdmap{i}", "driver": "efa", "usable": True} for i in range(32)]


def efa_node(libfabric: str | None = None, transports: tuple[str, ...] = ("srd/rdmap0:1", "tcp/ens32")) -> Nodes:
    loaded = {"backends": {"UCX": None, "LIBFABRIC": libfabric}, "transports": list(transports), "log": ""}
    return Nodes({"rdma": EFA, "gpus": 8, "system_libraries": {"libefa": ["/usr/lib/libefa.so.1"]}, "loaded": loaded})


def examined(
    cluster: Cluster,
    label: str,
    *,
    choose: bool,
    view: ClusterView = X2,
    env: dict[str, str | None] | None = None,
    **transport: Any,
) -> Transport:
    topology = parse_label(label)
    assert isinstance(topology, Disaggregated | Fluid)
    topology = topology.model_copy(update={"transport": Transport(**transport)})
    deployment = Deployment(topology=topology, env=env or {})
    placement = place(deployment, view)
    done = preflight.examine(cluster, deployment, view, placement, lambda _: None, choose=choose).topology
    assert isinstance(done, Disaggregated | Fluid)
    return done.transport


class TestSpreadOverEfa:
    def test_ucx_is_loaded_with_what_the_engines_get(self) -> None:
        cluster = efa_node()
        examined(cluster, "pd-spread-p1xtp4-d1xtp4", choose=False, env={"UCX_IB_PREFER": "y"})
        probe, (_, environment, backends, *_) = cluster.calls[0]
        assert probe == "thorough" and backends == ("UCX",)
        assert environment["UCX_MAX_RMA_RAILS"] == "4" and environment["UCX_IB_PREFER"] == "y"

    def test_no_srd_stops_the_launch(self) -> None:
        cluster = efa_node("no libfabric", transports=("tcp/ens32",))
        with pytest.raises(DeployError, match=r"SRD on n1, n2.*finds none"):
            examined(cluster, "pd-spread-p1xtp4-d1xtp4", choose=True)

    @pytest.mark.parametrize(
        ("libfabric", "choose", "transport", "taken"),
        [
            (None, True, {}, ("LIBFABRIC",)),
            ("NIXL_ERR_NOT_FOUND", True, {}, ("UCX",)),
            (None, False, {}, ("UCX",)),
            (None, True, {"ucx_tls": "tcp"}, ("UCX",)),
            (None, True, {"env": {"UCX_MAX_RMA_RAILS": "2"}}, ("UCX",)),
        ],
    )
    def test_libfabric_where_it_loads_and_nobody_chose(
        self, libfabric: str | None, choose: bool, transport: dict[str, Any], taken: tuple[str, ...]
    ) -> None:
        made = examined(efa_node(libfabric), "pd-spread-p1xtp4-d1xtp4", choose=choose, **transport)
        assert made.backends == taken

    def test_a_head_without_gpus_says_nothing_about_engines(self) -> None:
        """It has no EFA device, and its image may lack what engines load."""
        nodes = efa_node()
        ids = {f"n{i}": f"{i:056x}" for i in range(3)}
        workers = [
            node.model_copy(update={"labels": {**node.labels, NODE_ID_LABEL: ids[f"n{i}"]}, "head": False})
            for i, node in enumerate(X2.nodes, 1)
        ]
        head = ClusterNode(id="head", cpus=4, head=True, labels={NODE_ID_LABEL: ids["n0"]})
        view = X2.model_copy(update={"nodes": (head, *workers)})
        bare = {"gpus": 0, "loaded": {"backends": {"UCX": "no module", "LIBFABRIC": "no device"}, "log": ""}}
        facts = {ids["n0"]: bare, ids["n1"]: nodes.facts, ids["n2"]: nodes.facts}
        nodes.call_nodes = lambda *_: facts  # type: ignore[method-assign]
        transport = examined(nodes, "pd-spread-p1xtp4-d1xtp4", choose=True, view=view)
        assert transport.backends == ("LIBFABRIC",)
        facts[ids["n2"]] = {**nodes.facts, "loaded": bare["loaded"]}
        with pytest.raises(DeployError):
            examined(nodes, "pd-spread-p1xtp4-d1xtp4", choose=False, view=view)

    def test_what_ucx_lacks_is_no_concern_of_libfabric(self) -> None:
        cluster = efa_node(transports=("tcp/ens32",))
        assert examined(cluster, "pd-spread-p1xtp4-d1xtp4", choose=True).backends == ("LIBFABRIC",)

    def test_fluid_engines_keep_ucx_for_they_share_nodes_too(self) -> None:
        nodes = efa_node()
        assert examined(nodes, "pd-fluid-4xtp4", choose=True).backends == ("UCX",)
        assert nodes.calls, "UCX is loaded on every node"

    def test_a_pack_keeps_ucx_and_loads_nothing(self) -> None:
        cluster = efa_node()
        assert examined(cluster, "pd-pack-p1xtp4-d1xtp4", choose=True).backends == ("UCX",)
        assert [probe for probe, _ in cluster.calls] == ["quick"]


def test_collocated_engines_need_a_compiler_and_a_driver_and_no_wire() -> None:
    tools = {"nvcc": None, "ninja": None, "gcc": None, "Python.h": "/i/Python.h"}
    deployment = Deployment(topology=parse_label("collocated-4xtp2"))
    placement = place(deployment, X2)
    with pytest.raises(DeployError, match=r"compiler on n1, n2: .*gcc"):
        preflight.examine(Nodes({"gpus": 8, "toolchain": tools}), deployment, X2, placement, lambda _: None)
    fine = Nodes({"gpus": 8, "toolchain": {**tools, "gcc": "/usr/bin/gcc"}, "memlock": 2**16, "rdma": EFA})
    assert preflight.examine(fine, deployment, X2, placement, lambda _: None) == deployment


ND_H100 = ClusterView(
    name="nd",
    nodes=tuple(
        ClusterNode(
            id=name, gpu_type="H100", gpus=8, cpus=96, nic=Nic(kind="infiniband", count=8, gbit_per_s=400), host=name
        )
        for name in ("n1", "n2")
    ),
)


class TestAgainstThePlan:
    """The same nodes stop one deployment and serve another."""

    def test_no_device_file_stops_a_spread_and_no_pack(self) -> None:
        with pytest.raises(DeployError, match=r"InfiniBand not usable on n1, n2.*--accept-wire tcp"):
            examined(Nodes(nd_h100_v5_pod()), "pd-spread-p1xtp4-d1xtp4", choose=False, view=ND_H100)
        pack = Nodes(nd_h100_v5_pod())
        examined(pack, "pd-pack-p1xtp4-d1xtp4", choose=False, view=ND_H100)
        assert [probe for probe, _ in pack.calls] == ["quick"]

    def test_ucx_that_finds_tcp_alone_on_infiniband_stops_a_spread(self) -> None:
        blind = Nodes(nd_h100_v5(loaded=machine([], 8, [])["loaded"]))
        with pytest.raises(DeployError, match=r"RDMA on n1, n2: 8 InfiniBand devices, and UCX finds none"):
            examined(blind, "pd-spread-p1xtp4-d1xtp4", choose=False, view=ND_H100)
        seeing = Nodes(nd_h100_v5())
        assert examined(seeing, "pd-spread-p1xtp4-d1xtp4", choose=True, view=ND_H100).backends == ("UCX",)
        assert seeing.calls[0][0] == "thorough"

    def test_fluid_engines_of_several_nodes_use_the_network_too(self) -> None:
        with pytest.raises(DeployError, match="InfiniBand not usable"):
            examined(Nodes(nd_h100_v5_pod()), "pd-fluid-4xtp4", choose=False, view=ND_H100)
        examined(Nodes(nd_h100_v5_pod()), "pd-fluid-2xtp4", choose=False, view=ND_H100)

    @pytest.mark.parametrize("accept", ["tcp", "unknown"])
    def test_a_wire_that_was_accepted_is_judged_in_place_of_the_planned_one(self, accept: str) -> None:
        topology = parse_label("pd-spread-p1xtp4-d1xtp4")
        deployment = Deployment(topology=topology)
        placement = place(deployment, ND_H100)
        nodes = Nodes(nd_h100_v5_pod())
        preflight.examine(nodes, deployment, ND_H100, placement, lambda _: None, accept=accept)
        assert [probe for probe, _ in nodes.calls] == ["quick"]

    def test_ucx_tls_of_the_launch_is_the_plan_and_that_of_a_node_is_not(self) -> None:
        examined(Nodes(nd_h100_v5_pod()), "pd-spread-p1xtp4-d1xtp4", choose=False, view=ND_H100, ucx_tls="tcp,cuda,sm")
        exported = Nodes(nd_h100_v5(environment={"UCX_TLS": "tcp,cuda,sm"}))
        with pytest.raises(DeployError, match="UCX_TLS on n1, n2"):
            examined(exported, "pd-spread-p1xtp4-d1xtp4", choose=False, view=ND_H100)

    @pytest.mark.parametrize("label", ["pd-pack-p1xtp1-d1xtp1", "pd-spread-p1xtp1-d1xtp1", "pd-fluid-2xtp1"])
    @pytest.mark.parametrize("facts", [workstation(), nd_h100_v5_pod(gpus=0), efa_pod(0, 0)])
    def test_local_engines_are_told_nothing_of_the_machines_nics(
        self, label: str, facts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(node, "quick", lambda *_: facts)
        cluster = Cluster(SimpleNamespace(two_hosts=None))  # type: ignore[arg-type]
        lines: list[str] = []
        topology = parse_label(label)
        deployment = Deployment(topology=topology, model="tiny-gptoss")
        placement = place(deployment, local_cluster(2))
        assert preflight.examine(cluster, deployment, local_cluster(2), placement, lines.append) == deployment
        assert lines == []

    def test_weights_that_cannot_be_loaded_stop_collocated_engines_too(self) -> None:
        broken = {
            "model": "org/model",
            "folder": "/w",
            "missing": [],
            "broken": {"model.safetensors": "truncated: 7 bytes, 9 by its header"},
        }
        for label in ("collocated-4xtp2", "pd-pack-p1xtp4-d1xtp4"):
            deployment = Deployment(topology=parse_label(label))
            placement, nodes = place(deployment, ND_H100), Nodes(nd_h100_v5(weights=broken))
            with pytest.raises(DeployError, match=r"weights on n1, n2: /w/model.safetensors: truncated"):
                preflight.examine(nodes, deployment, ND_H100, placement, lambda _: None, model="org/model")
            assert nodes.calls[0][1][-1] == "org/model"

    def test_an_engine_over_two_nodes_needs_a_host_name(self) -> None:
        facts = nd_h100_v5(resolved={"addresses": ["127.0.1.1"], "error": None})
        nodes = Nodes(facts)
        nodes.call_nodes = lambda *_: {"n1": facts, "n2": {**facts, "boot": "other"}}  # type: ignore[method-assign]
        for label, stops in (("collocated-1xtp16", True), ("collocated-2xtp8", False)):
            deployment = Deployment(topology=parse_label(label))
            examine = (nodes, deployment, ND_H100, place(deployment, ND_H100), lambda _: None)
            with pytest.raises(DeployError, match="host name") if stops else contextlib.nullcontext():
                preflight.examine(*examine)


def test_host_memory_of_engine_arguments_is_looked_for_too() -> None:
    """vLLM's own argument is in units of 2**30 bytes."""
    deployment = Deployment(topology=parse_label("collocated-1xtp8"), engine_kwargs={"kv_offloading_size": 100})
    nodes = Nodes(nd_h100_v5(shm={"bytes": 10**13, "free_bytes": 106 * 10**9}))
    nodes.call_nodes = lambda *_: {each.id: nodes.facts for each in X2.nodes}  # type: ignore[method-assign]
    with pytest.raises(DeployError, match=r"107\.4 GB of /dev/shm.* give a smaller --engine-arg kv_offloading_size,"):
        preflight.examine(nodes, deployment, X2, place(deployment, X2), lambda _: None)


def test_the_message_names_what_gave_the_size() -> None:
    facts = {n.id: {"shm": {"bytes": 10**13, "free_bytes": 10**9}} for n in X2.nodes}
    store = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 2 * 10**9}}
    for named, fields in (("--kv-offload-gb", {"kv_offload_gb": 2}), ("cpu_bytes_to_use", {"kv_connectors": (store,)})):
        deployment = Deployment.model_validate({"topology": parse_label("pd-pack-p1xtp4-d1xtp4"), **fields})
        with pytest.raises(DeployError, match=f"2 GB of /dev/shm.* give a smaller {named}"):
            preflight.require_room(deployment, X2, place(deployment, X2), facts)


@pytest.mark.parametrize(
    ("backend", "env", "gib"),
    [
        (None, {}, 8),
        ("native", {}, 8),
        ("native", {"VLLM_USE_SIMPLE_KV_OFFLOAD": "0"}, 8),
        ("native", {"VLLM_USE_SIMPLE_KV_OFFLOAD": "1"}, 0),
        ("lmcache", {}, 0),
    ],
)
def test_only_vllms_own_offloading_is_mapped_in_shared_memory(
    backend: str | None, env: dict[str, str | None], gib: int
) -> None:
    arguments = {"kv_offloading_size": 8} | ({} if backend is None else {"kv_offloading_backend": backend})
    deployment = Deployment(topology=parse_label("collocated-1xtp8"), engine_kwargs=arguments, env=env)
    assert sum(host_copy_bytes(deployment, place(deployment, X2)).values()) == gib * 2**30


@pytest.mark.parametrize(
    ("label", "free_gb", "fits"),
    [
        ("pd-spread-p2xtp4-d2xtp4", 200, True),
        ("pd-spread-p2xtp4-d2xtp4", 199, False),  # two engines that prefill on one node
        ("pd-spread-p1xtp2dp4-d1xtp4", 399, False),  # a data parallel rank is an engine
        ("pd-spread-p1xtp4pp2-d1xtp4", 100, True),  # stages are one engine
        ("pd-pack-p1xtp4-d1xtp4", 100, True),
        ("collocated-1xtp8", 99, False),
    ],
)
def test_host_memory_for_kv_cache_is_looked_for_before_the_start(label: str, free_gb: float, fits: bool) -> None:
    deployment = Deployment(topology=parse_label(label), kv_offload_gb=100)
    placement = place(deployment, X2)
    facts = {n.id: {"shm": {"bytes": 10**13, "free_bytes": int(free_gb * 1e9)}} for n in X2.nodes}
    if fits:
        preflight.require_room(deployment, X2, placement, facts)
        preflight.require_room(deployment, X2, placement, {})  # a node that does not say is not refused
        return
    with pytest.raises(DeployError, match="of /dev/shm"):
        preflight.require_room(deployment, X2, placement, facts)
