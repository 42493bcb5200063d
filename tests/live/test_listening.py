"""Nobody but this machine's own processes gets in: the listening sockets of local nodes, before, during and after.

The tables are read here and not by pdlab's own doctor, for a reader that misses a socket would agree
with itself.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib
import ipaddress
import json
import re
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from support import zmq_callers
from support.web import fetch

from pdlab.cluster import local_nodes, machine, two_hosts
from pdlab.cluster.local_nodes import LocalNodes
from pdlab.cluster.namespaces import network_of, unavailable
from pdlab.faults import targets
from tests.live.conftest import ROOT, TIMEOUT_S, Stack

pytestmark = pytest.mark.long  # tests/live/test_experiment.py watches what it launches
EVERY_S = 0.2
KEY = "an-api-key-of-a-live-test"
COMPLETION = {"model": "tiny-gptoss", "prompt": "a", "max_tokens": 2}
# What must have been seen listening, or the tables were not read right. With TP, its ranks' torch and gloo listen too.
TP_PARTS = ("gcs_server", "raylet", "haproxy", "ServeReplica", "VLLM::Worker")
PD_PARTS = ("gcs_server", "raylet", "haproxy", "ServeController", "ServeReplica:pdlab:Decode", "VLLM::EngineCore")

# gRPC servers by the title of their process, with a method of each.
SERVICES = (
    ("gcs_server", "/ray.rpc.InternalKVGcsService/InternalKVGet"),
    ("/raylet/raylet", "/ray.rpc.NodeManagerService/GetNodeStats"),
    ("/raylet/raylet", "/ray.rpc.ObjectManagerService/Pull"),
    ("ray::DashboardAgent", "/ray.rpc.ReporterService/GetTraceback"),
    ("ray::ServeController", "/ray.rpc.CoreWorkerService/PushTask"),
    ("ray::ServeReplica", "/ray.rpc.CoreWorkerService/PushTask"),
    ("ray::ServeReplica", "/ray.serve.ASGIService/HandleRequest"),
)


class Listener(NamedTuple):
    """A socket that listens; ``network`` is the namespace it is in."""

    host: str
    port: int
    title: str
    network: str

    @property
    def loopback(self) -> bool:
        return ipaddress.ip_address(self.host.removeprefix("::ffff:")).is_loopback


def network(pid: int | str) -> str:
    return str(Path(f"/proc/{pid}/ns/net").readlink())


def listeners(pids: set[int]) -> set[Listener]:
    listening = set()
    tables: dict[str, dict[str, tuple[str, int]]] = {}
    for pid in pids:
        with contextlib.suppress(OSError, psutil.Error):  # it has ended meanwhile
            where = network(pid)
            links = [link for link in _links(pid) if link.startswith("socket:[")]
            # Read after the descriptors, and again for each process: a socket made in between would be missed.
            tables[where] = _table(pid, socket.AF_INET, "tcp") | _table(pid, socket.AF_INET6, "tcp6")
            title = _title(pid)
            for inode in {link[8:-1] for link in links} & tables[where].keys():
                listening.add(Listener(*tables[where][inode], title[:400], where))
    return listening


def _title(pid: int) -> str:
    """The command line. A process of vLLM's whose title is not set (`pdlab.cluster.machine.SPAWNED`) is named by its
    parent's."""
    own = " ".join(psutil.Process(pid).cmdline())
    if machine.SPAWNED not in own:
        return own
    parent = _title(psutil.Process(pid).ppid())
    names = {"ray::ServeReplica": targets.ENGINE_TITLE, targets.ENGINE_TITLE: targets.WORKER_TITLE}
    return next((f"{name} {own}" for start, name in names.items() if parent.startswith(start)), own)


def _links(pid: int) -> Iterator[str]:
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            yield str(file.readlink())


def _table(pid: int, family: int, name: str) -> dict[str, tuple[str, int]]:
    address_by_inode = {}
    for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A":
            words, port = fields[1].split(":")
            raw = b"".join(struct.pack("=I", int(words[i : i + 8], 16)) for i in range(0, len(words), 8))
            address_by_inode[fields[9]] = socket.inet_ntop(family, raw), int(port, 16)
    return address_by_inode


class Watch:
    """Collects whatever the nodes and the launcher listen at while the block lasts."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.listeners: set[Listener] = set()
        self.looks = 0
        self.launcher: set[int] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(EVERY_S):
            self.listeners |= listeners(self.pids())
            self.looks += 1

    def pids(self) -> set[int]:
        pids = set(local_nodes.processes(self._nodes()))
        for pid in self.launcher:
            with contextlib.suppress(psutil.NoSuchProcess):
                pids |= {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
        return pids

    def _nodes(self) -> LocalNodes:
        """By the marker alone, so that processes count before the record of the nodes is written."""
        text = ""
        with contextlib.suppress(OSError):
            text = (Path(self.stack.env["PDLAB_CACHE_DIR"]) / "local.yaml").read_text()
        mark, folder = (re.search(rf"^{name}: (\S+)$", text, re.MULTILINE) for name in ("id", "temp_dir"))
        unknown = "/nowhere/at/all"
        return LocalNodes(
            id=mark[1].strip("'\"") if mark else "none", count=1, gcs_port=0, temp_dir=folder[1] if folder else unknown,
            pids=(),
        )  # fmt: skip

    def launch(self, *flags: str) -> str:
        """The launcher's output; it must succeed."""
        words = ("launch_gptoss.py", *flags, "--local", "--detach", "--port", str(self.stack.port))
        process = subprocess.Popen(
            self.stack.command(*words, "--timeout-s", "600"), cwd=ROOT, env=self.stack.env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.launcher = {process.pid}
        output, _ = process.communicate(timeout=TIMEOUT_S)
        print(output)
        assert process.returncode == 0
        return output


def key_file(stack: Stack) -> Path:
    """The file with the key, as its owner alone may read it."""
    file = stack.folder / "key"
    file.write_text(KEY)
    file.chmod(0o600)
    return file


def end(stack: Stack) -> None:
    if stack.nodes() is not None:  # without nodes of its own, --shutdown looks for another Ray of this machine
        assert stack.shutdown().code == 0


@pytest.fixture(scope="module")
def pd(stack: Stack) -> Watch:
    """A PD deployment with direct streaming, watched from before its launch until it has served."""
    with Watch(stack) as watch:
        watch.launch("--pd-spread", "--api-key-file", str(key_file(stack)))
        assert get(stack, "/v1/models", KEY)[0] == 200
    watch.launcher = set()
    return watch


def get(stack: Stack, path: str, key: str | None = None, body: Any = None) -> tuple[int, str]:
    return fetch(f"{stack.url}{path}", body, key=key)


def outward() -> list[str]:
    """Addresses of this machine that others could reach."""
    addresses = []
    lines = subprocess.run(["ip", "-o", "addr"], capture_output=True, text=True, check=True).stdout.splitlines()
    for line in lines:
        address = ipaddress.ip_interface(line.split()[3]).ip
        if not address.is_loopback and not address.is_link_local:
            addresses.append(str(address))
    return addresses


def opens(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=2):
        return True
    return False


def nobody_else_hears(watch: Watch, parts: tuple[str, ...]) -> None:
    titles = [listener.title for listener in watch.listeners]
    assert watch.looks > 10
    assert [part for part in parts if not any(part in title for title in titles)] == []
    assert sorted(listener for listener in watch.listeners if not listener.loopback) == []


def side_channels(watch: Watch) -> list[int]:
    """Ports of the NIXL side channels: of each pool the first from its base on that is free, and a deployment that has
    just ended leaves one in TIME_WAIT."""
    ports = {listener.port for listener in watch.listeners if "VLLM::EngineCore" in listener.title}
    return sorted(port for port in ports if 20_000 <= port < 24_000)


def test_before_the_launch(stack: Stack) -> None:
    assert stack.nodes() is None and not opens("127.0.0.1", stack.port)


def test_pd_listens_on_loopback_alone(pd: Watch) -> None:
    nobody_else_hears(pd, PD_PARTS)
    assert len(side_channels(pd)) == 2


def test_no_port_of_it_answers_at_an_outward_address(pd: Watch) -> None:
    there = sorted({listener.port for listener in listeners(pd.pids())})
    assert len(there) > 20 and opens("127.0.0.1", there[0])
    addresses = outward()
    assert addresses, "this machine has no address but loopback: nothing would be tested"
    assert [(host, port) for host in addresses for port in there if opens(host, port)] == []


def test_the_side_channels_answer_no_stranger(pd: Watch) -> None:
    """Their question word for word; that the engines of the deployment are answered, its own checks have shown."""
    message = importlib.import_module("msgspec.msgpack").encode((b"get_meta_msg", 0, 0))
    for port in side_channels(pd):
        for _ in range(2):
            assert zmq_callers.stranger(f"tcp://127.0.0.1:{port}", message).startswith("HANDSHAKE_FAILED")
        for data in zmq_callers.GARBAGE:
            assert len(zmq_callers.throw(f"tcp://127.0.0.1:{port}", data)) < 100, "more than a greeting"
        assert opens("127.0.0.1", port), "a listener that garbage has ended"


def test_nobody_runs_a_job(pd: Watch, tmp_path: Path) -> None:
    """On any port that speaks HTTP, from this machine too, and without a token."""
    ran = tmp_path / "ran"
    body = json.dumps({"entrypoint": f"touch {ran}"}).encode()

    def taken(url: str) -> bool:
        call = urllib.request.Request(url, body, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(call, timeout=3) as answer:
                return b"submission_id" in answer.read()
        except (OSError, http.client.HTTPException) as error:  # refused, not HTTP, or HTTP 4xx
            if isinstance(error, urllib.error.HTTPError):
                error.close()
            return False

    ports = {listener.port for listener in listeners(pd.pids())}
    urls = [f"http://127.0.0.1:{port}{path}" for port in ports for path in ("/api/job_agent/jobs/", "/api/jobs/")]
    with ThreadPoolExecutor(32) as pool:  # most ports speak no HTTP and answer nothing
        assert [url for url, yes in zip(urls, pool.map(taken, urls), strict=True) if yes] == []
    assert not ran.exists()


def test_there_is_no_ray_client_server(pd: Watch) -> None:
    assert not [listener for listener in pd.listeners if "ray.util.client" in listener.title or listener.port == 10001]


def test_ray_refuses_who_has_no_token(pd: Watch, stack: Stack) -> None:
    """Every gRPC server of the nodes; with the token the same call gets past, or the refusal would prove nothing."""
    nodes = stack.nodes()
    path = Path(nodes.temp_dir) / "ray-token"
    assert path.stat().st_mode & 0o077 == 0
    token = path.read_text()
    for part, method in SERVICES:
        heard = 0
        for port in {listener.port for listener in listeners(pd.pids()) if part in listener.title}:
            answers = [answer(port, method, sent_token) for sent_token in (None, "0" * 64, token)]
            # A process has several servers, and HTTP ones: those of other methods say so whoever asks.
            if set(answers) - {"UNIMPLEMENTED", "UNAVAILABLE", "DEADLINE_EXCEEDED"}:
                assert answers[:2] == ["UNAUTHENTICATED", "UNAUTHENTICATED"], (part, method)
                assert answers[2] in ("OK", "ABORTED", "UNKNOWN"), (part, method)
                heard += 1
        assert heard, (part, method)


def answer(port: int, method: str, token: str | None) -> str:
    """The status of an empty call."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        grpc = importlib.import_module("grpc")
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            channel.unary_unary(method)(b"", timeout=10, metadata=metadata)
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


def test_the_token_is_nowhere_to_be_read(pd: Watch, stack: Stack) -> None:
    """Neither the token nor the API key is on a command line or in what Ray tells of its environments."""
    nodes = stack.nodes()
    token = (Path(nodes.temp_dir) / "ray-token").read_text()
    for pid in pd.pids():
        with contextlib.suppress(OSError):
            shown = Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
            assert token.encode() not in shown and KEY.encode() not in shown
    logs = [path for path in nodes.logs.rglob("*") if path.is_file()]
    assert len(logs) > 10
    for path in logs:
        text = path.read_bytes()
        assert token.encode() not in text and KEY.encode() not in text, path


def check_others_are_refused(stack: Stack) -> None:
    """Whoever asks with no key or another one, at any path."""
    for key in (None, "another-key-of-somebody"):
        for path, body in (
            ("/v1/models", None),
            ("/v1/completions", COMPLETION),
            ("/tokenize", COMPLETION),
            ("/nowhere", None),
        ):
            assert get(stack, path, key, body)[0] == 401, path
    assert get(stack, "/v1/models", KEY)[0] == 200


def check_key_is_required(stack: Stack) -> None:
    check_others_are_refused(stack)
    assert get(stack, "/v1/completions", KEY, COMPLETION)[0] == 200
    sweep = ("-m", "pdlab", "bench", "-t", "concurrency", "-c", "1", "--itl", "32", "--otl", "8", "--smoke")
    done = stack.run(*sweep, "-u", stack.url, "--out", str(stack.folder / "results"))
    assert done.code in (0, 3) and "8/8" in done.text, "the sweep finds the key that the launcher published"


def test_direct_streaming_asks_for_the_key(pd: Watch, stack: Stack) -> None:
    check_key_is_required(stack)
    codes = set()
    # The engine's own server, past the proxy.
    for port in {listener.port for listener in listeners(pd.pids()) if "ServeReplica:pdlab:Decode" in listener.title}:
        call = urllib.request.Request(f"http://127.0.0.1:{port}/v1/models")
        with pytest.raises((OSError, http.client.HTTPException)) as refused:
            urllib.request.urlopen(call, timeout=10).close()
        if isinstance(refused.value, urllib.error.HTTPError):
            refused.value.close()
            codes.add(refused.value.code)
    assert codes == {401}, "its HTTP server asks for the key; the others speak no HTTP"


def test_collocated_behind_the_ingress_listens_on_loopback_alone_and_asks_for_the_key(stack: Stack) -> None:
    with Watch(stack) as watch:
        watch.launch("--collocated", "--tp", "2", "--no-direct-streaming", "--api-key-file", str(key_file(stack)))
        check_key_is_required(stack)
    nobody_else_hears(watch, TP_PARTS)


def test_after_the_shutdown(pd: Watch, stack: Stack) -> None:
    pids = pd.pids()
    ports = {listener.port for listener in listeners(pids)}
    assert pids and ports
    assert stack.shutdown().code == 0
    assert listeners(pids) == set()
    # The kernel closes the sockets of a large process a moment after it has ended.
    deadline = time.monotonic() + 60
    while still := [port for port in ports if opens("127.0.0.1", port)]:
        assert time.monotonic() < deadline, still
        time.sleep(0.2)


@pytest.mark.skipif(unavailable() is not None, reason=f"two hosts: {unavailable()}")
def test_two_hosts_are_out_of_everybodys_reach(stack: Stack) -> None:
    """There Ray listens at the hosts' addresses, which no other network has: not even this machine's."""
    end(stack)
    with Watch(stack) as watch:
        watch.launch("--pd-spread", "--two-hosts")
    nodes = stack.nodes()
    try:
        ours = network("self")
        beyond = [listener for listener in watch.listeners if not listener.loopback]
        assert beyond and [listener for listener in beyond if listener.network == ours] == []
        networks = {network(host.pid) for host in nodes.two_hosts.hosts}
        assert {listener.network for listener in beyond} <= networks and len(networks) == 2
        for host in nodes.two_hosts.hosts:
            with network_of(host.pid):
                shown = subprocess.run(["ip", "-o", "addr"], capture_output=True, text=True, check=True).stdout
                routes = subprocess.run(["ip", "route"], capture_output=True, text=True, check=True).stdout
            addresses = {str(ipaddress.ip_interface(line.split()[3]).network) for line in shown.splitlines()}
            assert {a for a in addresses if not a.startswith(("127.", "::1", "fe80"))} == {"10.77.0.0/24"}
            assert "default" not in routes
            assert not reaches(host, {listener.port for listener in beyond})
        # A process beside them on a host still needs the token.
        with network_of(nodes.host(1).pid):
            assert opens(nodes.host(1).address, nodes.gcs_port)
            assert stranger(nodes.address) == "UNAUTHENTICATED"
    finally:
        end(stack)


def reaches(host: two_hosts.Host, ports: set[int]) -> bool:
    """Whether a connection from this network arrives on the host. That one opens says nothing: behind a transparent
    proxy every address takes connections."""
    with contextlib.ExitStack() as stack:
        for port in ports:
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_connection((host.address, port), timeout=2))
        with network_of(host.pid):
            shown = subprocess.run(["ss", "-Htn"], capture_output=True, text=True, check=True).stdout
    words = [line.split()[4].rsplit(":", 1)[0].strip("[]").removeprefix("::ffff:") for line in shown.splitlines()]
    peers = [ipaddress.ip_address(word.split("%")[0]) for word in words]
    assert peers, "the deployment's own connections are not seen: nothing was tested"
    ours = ipaddress.ip_network("10.77.0.0/24")
    return any(not (peer.is_loopback or peer in ours) for peer in peers)


def stranger(address: str) -> str:
    """What Ray's head answers to a process without a token; gRPC in a process of its own, for its threads stay."""
    program = (
        "import grpc, sys\n"
        "with grpc.insecure_channel(sys.argv[1]) as channel:\n"
        "    try: channel.unary_unary('/ray.rpc.InternalKVGcsService/InternalKVGet')(b'', timeout=10); print('OK')\n"
        "    except grpc.RpcError as error: print(error.code().name)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, address], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


PROBE = """
import sys
from pdlab.cluster import local_nodes, machine, two_hosts
from pdlab.cluster.connection import Cluster
known = local_nodes.environment
local_nodes.environment = lambda *args: known(*args) | {"RAY_AUTH_MODE": sys.argv[1]}
nodes = local_nodes.start(1)
try:
    local_nodes.become_driver(nodes)
    with Cluster(nodes) as cluster:
        print("ASKS", cluster.requires_token())
finally:
    local_nodes.stop(nodes)
"""


@pytest.mark.parametrize(("mode", "expected"), [("token", True), ("disabled", False)])
def test_an_open_cluster_is_told_from_one_with_a_token(mode: str, expected: bool, stack: Stack, tmp_path: Path) -> None:
    env = {**stack.env, "PDLAB_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", "-c", PROBE, mode]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert f"ASKS {expected}" in done.stdout, done.stderr[-2000:]
