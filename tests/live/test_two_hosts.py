"""Two hosts of namespaces, for real: separate, joined by a link that is what it says, and gone without a trace.

Needs root. With plain sockets, then with Ray, last with vLLM engines on both, as in tests/live/test_chaos.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from support import timed
from support.processes import alive, environment, eventually, title

from pdlab.cluster import local_nodes, two_hosts
from pdlab.cluster.namespaces import FLAGS, network_of, spawn_in
from pdlab.cluster.two_hosts import INTERFACE, Host, TwoHosts, create_hosts, reshape
from pdlab.core.catalog import load_model
from pdlab.core.errors import PdlabError, UsageError
from pdlab.core.nodes import LinkShape
from pdlab.deploy.endpoint import reach
from pdlab.deploy.engine_metrics import read_snapshot
from pdlab.results.timeline import RequestTimeline
from tests.live.conftest import BUSY_MACHINE, ROOT, Done, Stack, own_stack


def _why_not() -> str | None:
    try:
        two_hosts.require()
    except UsageError as error:
        return str(error)
    return None


WHY_NOT = _why_not()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

OWNER = "pdlab's tests"
LINK = ("--link-rate", "1gbit")
UNSHAPED = LinkShape()


def shape(rate: str | None, delay_ms: float | None) -> LinkShape:
    return LinkShape.model_validate({"gbit_per_s": rate, "delay_s": (delay_ms or 0.0) / 1000})


def link_bytes(pair: TwoHosts) -> tuple[int, int]:
    """Bytes that each host has sent over the link, frame headers included, as the kernel counts them."""
    first, second = (
        next(int(line.split(":")[1].split()[8]) for line in lines if line.split(":")[0].strip() == INTERFACE)
        for lines in (Path(f"/proc/{host.pid}/net/dev").read_text().splitlines() for host in pair.hosts)
    )
    return first, second


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def pair(folder: Path) -> Iterator[TwoHosts]:
    """Two hosts that end with the test."""
    with contextlib.suppress(KeyError), create_hosts(folder, UNSHAPED, os.environ, OWNER) as hosts:
        yield hosts
        raise KeyError  # the block must not end well: they would stay


def on(host: Host, *command: str) -> str:
    """What a command prints there."""
    with spawn_in(host.pid, command, stdout=subprocess.PIPE) as process:
        return process.communicate(timeout=30)[0].decode().strip()


def connect(source: Host, target: Host) -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection from ``source`` to ``target``."""
    with network_of(target.pid):
        server = socket.create_server((target.address, 0))
    with server, network_of(source.pid):
        near = socket.create_connection(server.getsockname(), timeout=30)
        far, _ = server.accept()
    near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return near, far


def move(source: Host, target: Host, total: int) -> float:
    """Send so many bytes; returns the seconds from the first to the last byte received."""
    near, far = connect(source, target)
    with near, far:
        sender = threading.Thread(target=near.sendall, args=(bytes(total),))
        sender.start()
        count = len(far.recv(1))
        began = time.monotonic()
        while count < total:
            count += len(far.recv(1 << 20))
        took = time.monotonic() - began
        sender.join()
    return took


def interfaces() -> set[str]:
    return {path.name for path in Path("/sys/class/net").iterdir()}


class TestHosts:
    def test_they_are_two_hosts(self, pair: TwoHosts) -> None:
        own = {kind: Path(f"/proc/self/ns/{kind}").readlink() for kind in FLAGS}
        there = [{kind: Path(f"/proc/{host.pid}/ns/{kind}").readlink() for kind in FLAGS} for host in pair.hosts]
        assert all(len({own[kind], there[0][kind], there[1][kind]}) == 3 for kind in FLAGS)
        for number, host in enumerate(pair.hosts):
            other = pair.hosts[1 - number]
            assert on(host, "hostname") == host.name
            assert set(on(host, "ls", "/sys/class/net").split()) == {"lo", two_hosts.INTERFACE}
            assert Path(on(host, "readlink", "/proc/1/exe")) == Path(sys.executable).resolve()
            assert on(host, "getent", "ahostsv4", other.name).split()[0] == other.address
            on(host, "touch", f"/dev/shm/{host.name}")
            assert on(host, "ls", "/dev/shm") == host.name
            assert on(host, "cat", __file__) == Path(__file__).read_text().strip(), "one file system"

    def test_nothing_of_them_is_outside(self, folder: Path) -> None:
        before = interfaces()
        with contextlib.suppress(KeyError), create_hosts(folder, UNSHAPED, os.environ, OWNER) as pair:
            assert interfaces() == before
            assert set(two_hosts.strays(OWNER)) == {host.pid for host in pair.hosts}
            assert not two_hosts.strays(OWNER + "2")
            raise KeyError
        assert interfaces() == before and not two_hosts.strays(OWNER)

    @pytest.mark.parametrize("delay_s", [0.0, 0.002])
    def test_killing_a_host_takes_everything_on_it(self, delay_s: float, folder: Path) -> None:
        with contextlib.suppress(KeyError), create_hosts(folder, LinkShape(delay_s=delay_s), os.environ, OWNER) as pair:
            first, second = pair.hosts
            # It leaves its parent and its session, as a daemon does.
            out = on(first, "sh", "-c", "setsid sh -c 'sleep 1000 >/dev/null & echo done' & wait")
            assert out == "done"
            sleepers = [pid for pid in _inside(first) if title(pid) == "sleep 1000"]
            assert len(sleepers) == 1
            os.kill(first.pid, signal.SIGTERM)
            assert eventually(lambda: not alive(sleepers[0]) and not alive(pair.relay or sleepers[0]))
            assert eventually(lambda: on(second, "ls", "/sys/class/net") == "lo")
            raise KeyError

    def test_orphans_are_reaped(self, pair: TwoHosts) -> None:
        first = pair.hosts[0]
        on(first, "sh", "-c", "(sleep 0.1 &)")
        assert eventually(lambda: _inside(first) == [first.pid])

    @pytest.mark.parametrize("when", ["while they are made", "after the link"])
    def test_killing_whoever_makes_them_leaves_nothing(self, when: str, folder: Path) -> None:
        program = f"""
import os, signal, sys
from pathlib import Path
from pdlab.cluster import two_hosts
from pdlab.core.nodes import LinkShape
if {when!r} == "while they are made":
    two_hosts._set_rate = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
with two_hosts.create_hosts(Path({str(folder)!r}), LinkShape(gbit_per_s=1, delay_s=0.001), os.environ, {OWNER!r}):
    os.kill(os.getpid(), signal.SIGKILL)
"""
        before = interfaces()
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=60)
        assert done.returncode == -signal.SIGKILL
        assert eventually(lambda: not two_hosts.strays(OWNER))
        assert interfaces() == before
        relays = [pid for pid in psutil.pids() if str(folder) in str(environment(pid)) or "link_relay.py" in title(pid)]
        assert eventually(lambda: not any(alive(pid) for pid in relays))

    def test_a_child_there_is_like_any_child(self, pair: TwoHosts) -> None:
        host = pair.hosts[1]
        assert spawn_in(host.pid, ["sh", "-c", "exit 7"]).wait(30) == 7
        sleeper = spawn_in(host.pid, ["sleep", "1000"])
        sleeper.terminate()
        assert sleeper.wait(30) == -signal.SIGTERM
        with pytest.raises(FileNotFoundError):
            spawn_in(host.pid, ["no-such-command"])
        assert spawn_in(host.pid, ["true"]).wait(30) == 0, "this process's own namespaces are as before"
        assert Path("/proc/self/ns/pid_for_children").readlink() == Path("/proc/self/ns/pid").readlink()

    def test_a_child_there_starts_in_the_same_folder(
        self, pair: TwoHosts, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(folder)
        assert on(pair.hosts[0], "pwd") == str(folder)

    def test_a_host_that_does_not_start_says_why(self, folder: Path) -> None:
        (folder / "pdlab-a").write_text("in the way")
        with pytest.raises((PdlabError, FileExistsError)), create_hosts(folder, UNSHAPED, os.environ, OWNER):
            pass
        assert not two_hosts.strays(OWNER)


class TestLink:
    @pytest.mark.parametrize(
        ("rate", "delay_ms"),
        [pytest.param("20mbit", None, marks=pytest.mark.long), ("200mbit", None), ("200mbit", 2.0)],
    )
    def test_the_rate_is_what_was_asked_for(
        self, rate: str, delay_ms: float | None, pair: TwoHosts, folder: Path
    ) -> None:
        """Payload at the rate and not above it, in each direction; every byte of it crosses the link. Where all cores
        are busy the sender does not fill the link."""
        pair = reshape(pair, shape(rate, delay_ms), folder, os.environ)
        gbit_per_s = pair.shape.gbit_per_s
        assert gbit_per_s is not None
        total = round(gbit_per_s * 1e9 / 8 * 1.5)
        for number in (0, 1):
            before = link_bytes(pair)
            took = move(pair.hosts[number], pair.hosts[1 - number], total)
            sent, back = (now - then for now, then in zip(link_bytes(pair), before, strict=True))
            if number == 1:
                sent, back = back, sent
            assert 0.5 * gbit_per_s < total * 8 / took / 1e9 < 1.02 * gbit_per_s
            assert total < sent < 1.05 * total and back < 0.05 * total

    def test_delay_both_ways(self, pair: TwoHosts, folder: Path) -> None:
        def round_trip_s(hosts: TwoHosts) -> float:
            near, far = connect(*hosts.hosts)
            times = []
            with near, far:
                for _ in range(10):
                    began = time.monotonic()
                    near.sendall(b"x")
                    far.sendall(far.recv(1))
                    near.recv(1)
                    times.append(time.monotonic() - began)
            return min(times)

        assert round_trip_s(pair) < 0.02
        slow = reshape(pair, shape(None, 20), folder, os.environ)
        assert 0.04 < round_trip_s(slow) < 0.06

    def test_connections_outlive_another_shape(self, pair: TwoHosts, folder: Path) -> None:
        """Also where another delay means another link."""
        near, far = connect(*pair.hosts)
        with near, far:
            far.settimeout(60)
            for number, (rate, delay_ms) in enumerate(
                [("100mbit", None), ("100mbit", 1), ("20mbit", 1), ("20mbit", 3), (None, None)]
            ):
                pair = reshape(pair, shape(rate, delay_ms), folder, os.environ)
                text = bytes([number]) * 100_000
                near.sendall(text)
                received = b""
                while len(received) < len(text):
                    received += far.recv(1 << 20)
                assert received == text
        assert pair.relay is None

    def test_loopback_is_not_the_link(self, pair: TwoHosts) -> None:
        before = link_bytes(pair)
        move(pair.hosts[0], pair.hosts[0], 10_000_000)
        assert max(now - then for now, then in zip(link_bytes(pair), before, strict=True)) < 100_000


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with own_stack(tmp_path_factory.mktemp("hosts")) as made:
        try:
            yield made
        finally:
            hosts(made, "down")


def hosts(stack: Stack, *words: str) -> Any:
    return stack.run("-m", "pdlab", "two-hosts", *words)


def nothing_is_left(stack: Stack) -> bool:
    cache = stack.env["PDLAB_CACHE_DIR"]
    return not two_hosts.strays(str(Path(cache).resolve())) and not [
        pid for pid in psutil.pids() if environment(pid).get("PDLAB_CACHE_DIR") == cache and alive(pid)
    ]


# One actor makes an array, another one takes it: where both are on one host it must not cross the link.
ACTORS = """
import sys, numpy, ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
ray.init(log_to_driver=False, logging_level="ERROR")
nodes = {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}
def make(): return numpy.random.default_rng(0).integers(0, 256, 20_000_000, dtype=numpy.uint8)
def take(array): return len(array)
def there(function, address):
    strategy = NodeAffinitySchedulingStrategy(nodes[address], soft=False)
    return ray.remote(function).options(scheduling_strategy=strategy)
made = there(make, sys.argv[1]).remote()
assert ray.get(there(take, sys.argv[2]).remote(made)) == 20_000_000
"""


@pytest.mark.long
class TestRay:
    def test_killing_up_leaves_nothing(self, stack: Stack) -> None:
        command = stack.command("-m", "pdlab", "two-hosts", "up")
        process = subprocess.Popen(command, cwd=ROOT, env=stack.env)
        owner = str(Path(stack.env["PDLAB_CACHE_DIR"]).resolve())
        assert eventually(lambda: len(two_hosts.strays(owner)) == 2 or process.poll() is not None)
        assert process.poll() is None
        process.kill()
        process.wait()
        assert eventually(lambda: nothing_is_left(stack))
        assert local_nodes.running() is None

    def test_up(self, stack: Stack) -> None:
        done = hosts(stack, "up", "--rate", "1gbit")
        assert done.code == 0 and "1 Gbit/s each way" in done.text
        again = hosts(stack, "up")
        assert again.code == 2 and "are up already" in again.text

    @pytest.mark.parametrize(("target", "crosses"), [("10.77.0.1", False), ("10.77.0.2", True)])
    def test_what_crosses_the_link(self, target: str, crosses: bool, stack: Stack) -> None:
        nodes = stack.nodes()
        # The second node joins a moment later.
        joined = "import ray; ray.init(logging_level='ERROR'); n = len(ray.nodes()); print('NODES', n)"
        assert eventually(
            lambda: "NODES 2" in hosts(stack, "shell", "--", sys.executable, "-Wignore", "-c", joined).text
        )
        before = sum(link_bytes(nodes.two_hosts))
        words = (sys.executable, "-W", "ignore", "-c", ACTORS, "10.77.0.1", target)
        assert hosts(stack, "shell", "--", *words).code == 0
        moved = sum(link_bytes(nodes.two_hosts)) - before
        assert (20_000_000 < moved < 24_000_000) if crosses else moved < 4_000_000

    def test_shape_and_shell(self, stack: Stack) -> None:
        done = hosts(stack, "shape", "--rate", "20mbit", "--delay-ms", "1")
        assert done.code == 0 and "20 Mbit/s each way, 1 ms one way" in done.text
        for which, name in (("a", "pdlab-a"), ("b", "pdlab-b")):
            done = hosts(stack, "shell", "--host", which, "--", "sh", "-c", "hostname; tc qdisc show; exit 7")
            assert done.code == 7 and name in done.text and "tbf" in done.text and "20Mbit" in done.text
        assert "no such command" in hosts(stack, "shell", "--", "no-such-command").text
        inside = hosts(stack, "shell", "--", sys.executable, "-m", "pdlab", "two-hosts", "down")
        assert inside.code == 2 and "this is pdlab-a" in inside.text
        plain = stack.run("launch_gptoss.py", "--pd-spread", "--local", "--port", str(stack.port))
        assert plain.code == 2 and "local Ray nodes on two hosts are up" in plain.text

    def test_down_leaves_nothing(self, stack: Stack) -> None:
        nodes = stack.nodes()
        assert hosts(stack, "down").code == 0
        assert nothing_is_left(stack)
        assert not Path(nodes.temp_dir).exists() and stack.nodes() is None
        assert "no two hosts were up" in hosts(stack, "down").text

    def test_hosts_without_a_record_are_found_again(self, stack: Stack) -> None:
        assert hosts(stack, "up").code == 0
        nodes = stack.nodes()
        (Path(stack.env["PDLAB_CACHE_DIR"]) / "local.yaml").unlink()
        assert hosts(stack, "down").code == 0
        assert eventually(lambda: nothing_is_left(stack))
        assert not Path(nodes.temp_dir).exists()

    @pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -9)])
    def test_a_launcher_that_is_stopped(self, number: int, code: int, stack: Stack) -> None:
        """By Ctrl-C: the hosts go. Killed: its child notices, and its cleanup process takes down what is left."""
        words = ("launch_gptoss.py", "--pd-spread", "--local", "--two-hosts", "--port", str(stack.port))
        launcher = stack.start(*words, until="2 local Ray nodes are up")
        os.kill(launcher.pid, number)
        ended = launcher.end()
        assert ended.code == code and "Traceback" not in ended.text
        assert eventually(lambda: nothing_is_left(stack) and stack.nodes() is None, 120)


# The plan is told that EFA joins the hosts, while UCX takes TCP without a word, as it does where EFA fails.
WRONG_PLAN = """
import sys
from pdlab.cluster.connection import Cluster
from pdlab.core.catalog import resolve_model
from pdlab.core.errors import WireError
from pdlab.deploy import wire_proof
from pdlab.deploy.application import Application
from pdlab.deploy.endpoint import load_running
running = load_running(sys.argv[1])
manifest = running.manifest
wire_proof.planned_wire = lambda *_: "efa"
with Cluster() as cluster:
    launched = (Application(cluster), manifest.deployment, running, manifest.cluster, manifest.placement)
    shape = resolve_model(manifest.deployment.model)[0]
    try:
        wire_proof.prove(*launched, shape, print)
    except WireError as error:
        print("REFUSED", error)
    print("ACCEPTED", wire_proof.prove(*launched, shape, print, accept="tcp").accepted)
"""


def check_crossing(stack: Stack, done: Done, mode: str) -> None:
    """What the first host (prefill's in both) sends while prompts are answered, against the KV cache they make.

    The oracle is the model's shape. Of vLLM's counters only the number of transfers is taken: Ray exports the
    sum of a histogram as that of its buckets' middles, and theirs are a factor of four wide.
    """
    shape = load_model("tiny-gptoss")
    assert shape is not None and shape.full_attention_layers is not None and shape.sliding_window is not None
    requests, tokens = 16, 1500
    per_token = 2 * 2 * shape.kv_heads * shape.head_dim  # bytes of K and V in bf16, per layer
    least = requests * tokens * per_token * shape.full_attention_layers
    # Whole blocks of 128 tokens move, and of layers with a sliding window those that the window reaches.
    blocks = -(-tokens // 128) * shape.full_attention_layers
    blocks += (1 + shape.sliding_window // 128) * (shape.layers - shape.full_attention_layers)
    most = requests * blocks * 128 * per_token
    assert done.code == 0 and re.search(r"canary: [1-3] of 3", done.text)
    assert f"wire: {'tcp' if mode == 'spread' else 'shared memory'}, as planned" in done.text
    assert re.search(r"LLMRouter: \d+ running", done.text)
    assert "LLMRouter: 2 running" not in done.text, "HAProxy asks the one beside it"
    if mode == "spread":
        words = (sys.executable, "-W", "ignore", "-c", WRONG_PLAN, stack.url)
        wrong = hosts(stack, "shell", "--", *words).text
        assert "REFUSED KV cache uses tcp, but the plan names efa: interfaces counted tcp" in wrong
        assert "--accept-wire tcp" in wrong and "ACCEPTED True" in wrong
    running, nodes = stack.running(), stack.nodes()
    view = running.manifest.cluster
    assert [(node.host, node.nic.gbit_per_s) for node in view.nodes] == [("pdlab-a", 1), ("pdlab-b", 1)]
    with reach(stack.url):
        transfers = _settled(running)
        before = link_bytes(nodes.two_hosts)[0]
        for number in range(requests):
            stack.complete([(7 * i + 131 * number) % 990 + 10 for i in range(tokens)], tokens=1)
        sent = link_bytes(nodes.two_hosts)[0] - before
        assert _settled(running, transfers) - transfers == requests
    if mode == "spread":
        assert least < sent < 1.15 * most
    else:
        assert sent < 0.1 * least
    with pytest.raises(OSError):
        stack.complete("ba", tokens=1)  # from outside nothing answers there


def check_shutdown(stack: Stack) -> None:
    """Whatever was launched on two hosts is gone with them."""
    assert stack.shutdown().code == 0
    assert eventually(lambda: nothing_is_left(stack))
    assert stack.nodes() is None and stack.running() is None


@pytest.mark.long  # spread crosses it in tests/live/test_chaos.py too
class TestEngines:
    @pytest.mark.parametrize("mode", ["pack", "spread"])
    def test_spread_crosses_the_link_and_pack_does_not(self, mode: str, stack: Stack) -> None:
        check_crossing(stack, stack.launch(f"--pd-{mode}", "--two-hosts", *LINK), mode)

    def test_shutdown_leaves_nothing(self, stack: Stack) -> None:
        check_shutdown(stack)


@pytest.mark.long
class TestTransferPart:
    """The decode engine is idle, so that it polls every millisecond or two and not once in a step."""

    def test_it_follows_bytes_over_bandwidth(self, stack: Stack) -> None:
        """Bytes are checked against what the kernel says has crossed the link, and the bandwidth is the shaper's."""
        assert stack.launch("--pd-spread", "--two-hosts", "--link-rate", "100mbit").code == 0
        rng = random.Random(11)
        lines, wrong = [], []
        for mbit_per_s in (50, 100, 200, 400):
            assert hosts(stack, "shape", "--rate", f"{mbit_per_s}mbit").code == 0
            pair = stack.nodes().two_hosts
            timelines = []
            with reach(stack.url):
                for tokens in (1000, 2000, 3000, 4000, 6000, 8000) * 2:
                    before = link_bytes(pair)[0]
                    prompt = [rng.randrange(300, 1000) for _ in range(tokens)]
                    timelines.append(timed.ask(stack.url, stream=True, prompt=prompt))
                    read = read_bytes(timelines[-1])
                    assert read < link_bytes(pair)[0] - before < 1.1 * read + 200_000, "frames, and other traffic"
            timed.check(timelines, "pd")
            points = [(read_bytes(each), dict(each.parts())["transfer"]) for each in timelines]
            seconds_per_byte, fixed_s = np.polyfit(*zip(*points, strict=True), 1)
            slope = float(seconds_per_byte) * mbit_per_s * 1e6 / 8
            ratios = [seconds * mbit_per_s * 1e6 / 8 / size for size, seconds in points]
            lines.append(
                f"{mbit_per_s} Mbit/s: slope {slope:.3f} of bytes over bandwidth, {1e3 * fixed_s:.1f} ms besides, "
                f"single ones {min(ratios):.3f} to {max(ratios):.3f}, {min(points)[1]:.3f} to {max(points)[1]:.3f} s"
            )
            wrong += [lines[-1]] if not 0.9 < slope < 1.1 else []
            # A short read is prolonged by a poll, any by what else the machine does: the quicker one of a size counts.
            for size in {size for size, _ in points}:
                seconds = min(seconds for each, seconds in points if each == size)
                if seconds > 0.1 and not 0.9 < seconds * mbit_per_s * 1e6 / 8 / size < 1.1:
                    wrong.append(f"{mbit_per_s} Mbit/s: {size} bytes in {seconds:.3f} s")
        print("\n".join(lines))
        assert not wrong, wrong

    def test_shutdown_leaves_nothing(self, stack: Stack) -> None:
        check_shutdown(stack)


def read_bytes(timeline: RequestTimeline) -> int:
    return sum(each.bytes for each in timeline.wire)


CUT_S = 180.0


def engine_connections(pair: TwoHosts) -> list[tuple[str, str]]:
    """TCP connections from decode's engine core, on the second host, to the first: its and the other end."""
    lines = [line.split() for line in on(pair.hosts[1], "ss", "-tnpH").splitlines()]
    far = f"{pair.hosts[0].address}:"
    return [(words[3], words[4]) for words in lines if words[4].startswith(far) and "EngineCor" in words[-1]]


@contextlib.contextmanager
def cut(pair: TwoHosts, ports: set[str]) -> Iterator[None]:
    """Whatever goes to or comes from those ports of the first host vanishes, without a word to either end."""
    rules = [(pair.hosts[1], "dport", port) for port in ports] + [(pair.hosts[0], "sport", port) for port in ports]
    for host, end, port in rules:
        on(host, "ip", "rule", "add", "ipproto", "tcp", end, port, "blackhole")
    try:
        yield
    finally:
        for host, end, port in rules:
            on(host, "ip", "rule", "del", "ipproto", "tcp", end, port, "blackhole")


@pytest.mark.long
class TestDeadConnections:
    """Prefill and decode live, and the connection between them does not."""

    def prompt(self, number: int) -> list[int]:
        return [(11 * i + 137 * number) % 990 + 10 for i in range(300)]

    def counters(self, stack: Stack) -> Any:
        running = stack.running()
        with reach(stack.url):
            _settled(running)
            return read_snapshot(running.metrics_urls, running.replicas).nixl

    def ask(self, stack: Stack, first: int, count: int) -> None:
        with reach(stack.url):
            for number in range(first, first + count):
                assert len(stack.complete(self.prompt(number), tokens=2)) == 2

    def is_as_new(self, stack: Stack, name: str) -> None:
        """A sweep is valid, and the KV cache of its prompts crosses the link, by the kernel's count."""
        shape = load_model("tiny-gptoss")
        assert shape is not None and shape.full_attention_layers is not None
        requests, tokens = 40, 300
        least = requests * tokens * 2 * 2 * shape.kv_heads * shape.head_dim * shape.full_attention_layers
        before = link_bytes(stack.nodes().two_hosts)[0]
        out = stack.folder / "dead"
        lengths = ("--itl", str(tokens), "--otl", "8", "-c", "4", "--prompts-per-level", str(requests))
        done = stack.run("-m", "pdlab", "bench", "-u", stack.url, *lengths, "--out", str(out), "-e", name)
        assert done.code in (0, 3), "3 where this machine is too busy for the load"
        assert re.search(r"canary after the sweep: [1-3] of 3", done.text)
        assert link_bytes(stack.nodes().two_hosts)[0] - before > least
        run = json.loads((out / name / "concurrency4.json").read_text())
        assert set(run["validity"]["failed_gates"]) <= BUSY_MACHINE, run["validity"]
        assert run["nixl_after"]["transfers"] - run["nixl_before"]["transfers"] >= requests

    def test_a_killed_connection_is_made_anew(self, stack: Stack) -> None:
        assert stack.launch("--pd-spread", "--two-hosts").code == 0
        pair = stack.nodes().two_hosts
        self.ask(stack, 0, 4)
        before = self.counters(stack)
        killed = engine_connections(pair)
        assert len(killed) > 1
        for near, far in killed:
            on(pair.hosts[1], "ss", "-K", "-t", "src", near, "dst", far)
        if not set(killed) - set(engine_connections(pair)):
            pytest.skip("this kernel does not end a connection from outside (ss -K)")
        self.ask(stack, 4, 8)
        after = self.counters(stack)
        assert after.guard_failed_reads >= 1 and after.guard_handshakes_renewed >= 1
        assert after.transfers - before.transfers >= 4, "but those that met the dead connection"
        assert after.bytes_transferred > before.bytes_transferred
        self.is_as_new(stack, "killed")

    def test_engines_that_were_cut_off_from_each_other_are_as_new(self, stack: Stack) -> None:
        """Ray's own connections are left, for Ray gives a node up that it does not reach for so long."""
        pair = stack.nodes().two_hosts
        ports = {far.rpartition(":")[2] for _, far in engine_connections(pair)}
        with cut(pair, ports):
            ends = time.monotonic() + CUT_S
            number = 100
            while time.monotonic() < ends:
                self.ask(stack, number, 1)
                number += 1
                time.sleep(1)
        assert number > 105, "answered by decode alone"
        replicas = stack.running().replicas
        began = time.monotonic()
        before = self.counters(stack)
        while (self.counters(stack).transfers or 0) - (before.transfers or 0) < 4:
            assert time.monotonic() < began + 60
            self.ask(stack, number, 5)
            number += 5
        self.is_as_new(stack, "cut")
        assert stack.running().replicas == replicas, "nothing was launched anew"

    def test_shutdown(self, stack: Stack) -> None:
        check_shutdown(stack)


def _settled(running: Any, more_than: float = -1.0) -> float:
    """Finished KV transfers as vLLM counts them, once no more are reported: Ray exports metrics every second."""
    before, deadline = -1.0, time.monotonic() + 60
    while time.monotonic() < deadline:
        now = read_snapshot(running.metrics_urls, running.replicas).nixl.transfers or 0.0
        if now == before and now > more_than:
            return now
        before = now
        time.sleep(3)
    raise AssertionError("vLLM's counters do not settle")


def _inside(host: Host) -> list[int]:
    """Processes in the host's PID namespace, as this machine counts."""
    own = Path(f"/proc/{host.pid}/ns/pid").readlink()
    pids = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/ns/pid").readlink() == own:
                pids.append(pid)
    return pids
