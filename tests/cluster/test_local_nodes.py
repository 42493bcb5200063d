"""Local nodes end to the last process, and nobody else's: with harmless processes in the place of Ray's."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.processes import alive, eventually

from pdlab.cluster import local_nodes
from pdlab.cluster.local_nodes import (
    MARKER,
    LocalNodes,
    keep_logs,
    processes,
    running,
    running_or_salvaged,
    start,
    stop,
)
from pdlab.cluster.two_hosts import Host, TwoHosts
from pdlab.core.catalog import load_cluster
from pdlab.core.errors import ClusterError, UsageError
from pdlab.core.nodes import LinkShape
from pdlab.core.schema import load_yaml, to_yaml

# `ray start` as far as a caller sees it: the head listens, all stay, everything is said on standard output.
FAKE_RAY = """#!{python}
import os, signal, socket, sys, time
print(" ".join(sys.argv[1:]), flush=True)
print("MARKER", os.environ["PDLAB_LOCAL"], os.environ["RAY_AUTH_MODE"], flush=True)
print("PORTS", *(os.environ[f"RAY_SERVE_HAPROXY_{{what}}_PORT"] for what in ("METRICS", "STATS")), flush=True)
{trouble}
port = [a.split("=")[1] for a in sys.argv if a.startswith("--port=")]
if port:
    server = socket.create_server(("127.0.0.1", int(port[0])))
time.sleep(60)
"""
JOINED = "print('Ray runtime started.', flush=True)"
Spawn = Callable[..., int]


@pytest.fixture
def nodes(tmp_path: Path) -> LocalNodes:
    folder = tmp_path / "ray"
    folder.mkdir()
    return LocalNodes(id=uuid.uuid4().hex[:12], count=2, gcs_port=1, temp_dir=str(folder), pids=())


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Start ``sleep`` (or Python code) with a marker or with its output to a file; ended after the test."""
    started: list[subprocess.Popen[bytes]] = []

    def spawned(*, marker: str | None = None, out: Path | None = None, code: str | None = None) -> int:
        env = {key: value for key, value in os.environ.items() if key != MARKER}
        command = [sys.executable, "-c", code] if code else ["sleep", "60"]
        with out.open("w") if out else contextlib.nullcontext(subprocess.DEVNULL) as stdout:
            process = subprocess.Popen(command, env=env | ({MARKER: marker} if marker else {}), stdout=stdout)
        started.append(process)
        return process.pid

    yield spawned
    for process in started:
        process.kill()
        process.wait()


class TestProcesses:
    def test_by_marker_and_by_output_folder(self, nodes: LocalNodes, spawn: Spawn) -> None:
        folder = Path(nodes.temp_dir)
        marked = spawn(marker=nodes.id)
        writing = spawn(out=folder / "worker-1.out")
        (folder / "session/logs").mkdir(parents=True)
        deeper = spawn(out=folder / "session/logs" / "engine.out")
        assert eventually(lambda: processes(nodes) == sorted([marked, writing, deeper]))

    def test_an_agent_of_ray_that_is_just_starting(self, nodes: LocalNodes, spawn: Spawn) -> None:
        """Its title has overwritten the marker, its output goes to pipes; the raylet's log, inherited, is open."""
        log = Path(nodes.temp_dir) / "raylet.out"
        program = f"import setproctitle, time; log = open({str(log)!r}, 'a'); setproctitle.setproctitle('{{}}'); "
        agent = spawn(code=program.format("ray::DashboardAgent") + "time.sleep(60)")
        driver = spawn(code=program.format("a driver with its log there") + "time.sleep(60)")
        for pid, title in ((agent, b"ray::"), (driver, b"a driver")):
            assert eventually(lambda pid=pid, title=title: Path(f"/proc/{pid}/cmdline").read_bytes().startswith(title))  # type: ignore[misc]
        assert processes(nodes) == [agent]

    def test_nobody_elses(self, nodes: LocalNodes, spawn: Spawn, tmp_path: Path) -> None:
        spawn()
        spawn(marker="another")
        spawn(marker=nodes.id + "0")
        spawn(out=tmp_path / "else.out")
        beside = Path(nodes.temp_dir + "2")
        beside.mkdir()
        spawn(out=beside / "worker-1.out")
        time.sleep(0.1)
        assert processes(nodes) == []

    def test_never_this_one(self, nodes: LocalNodes) -> None:
        program = (
            "import sys; from pdlab.cluster.local_nodes import LocalNodes, processes\n"
            f"print(processes(LocalNodes(id={nodes.id!r}, count=1, gcs_port=1, temp_dir='/nowhere', pids=())))"
        )
        env = {**os.environ, MARKER: nodes.id, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
        done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "[]"

    def test_a_dead_process_is_none(self, nodes: LocalNodes, spawn: Spawn) -> None:
        pid = spawn(marker=nodes.id)
        os.kill(pid, signal.SIGKILL)
        assert eventually(lambda: not processes(nodes)), "its parent has not waited for it yet"


@pytest.mark.usefixtures("cache")
class TestStop:
    def test_ends_exactly_the_nodes_processes(self, nodes: LocalNodes, spawn: Spawn, tmp_path: Path) -> None:
        mine = [spawn(marker=nodes.id), spawn(out=Path(nodes.temp_dir) / "worker-1.out")]
        others = [spawn(), spawn(marker="another"), spawn(out=tmp_path / "else.out")]
        assert eventually(lambda: len(processes(nodes)) == 2)
        stop(nodes)
        assert not any(alive(pid) for pid in mine)
        assert all(alive(pid) for pid in others)
        assert not Path(nodes.temp_dir).exists()

    def test_one_that_will_not_listen(self, nodes: LocalNodes, spawn: Spawn, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(local_nodes, "TERM_WAIT_S", 0.3)
        ready = Path(nodes.temp_dir) / "ready"
        deaf = f"import signal, time, pathlib; signal.signal(signal.SIGTERM, signal.SIG_IGN); \
pathlib.Path({str(ready)!r}).touch(); time.sleep(60)"
        pid = spawn(marker=nodes.id, code=deaf)
        assert eventually(ready.exists)
        stop(nodes)
        assert not alive(pid)

    def test_nothing_to_stop(self, nodes: LocalNodes) -> None:
        stop(nodes)
        stop(nodes)

    def test_one_that_cannot_be_ended_is_named(self, nodes: LocalNodes, monkeypatch: pytest.MonkeyPatch) -> None:
        """An uninterruptible process: the record stays, so that a later --shutdown tries again."""
        monkeypatch.setattr(local_nodes, "TERM_WAIT_S", 0.0)
        monkeypatch.setattr(local_nodes, "KILL_WAIT_S", 0.0)
        monkeypatch.setattr(local_nodes, "processes", lambda _: [2**22 + 1])
        state = local_nodes._state_file()
        state.write_text(to_yaml(nodes))
        with pytest.raises(ClusterError, match=str(2**22 + 1)):
            stop(nodes)
        assert state.exists()


class TestRunning:
    def test_none(self, cache: Path) -> None:
        assert running() is None

    def test_up(self, cache: Path, nodes: LocalNodes, spawn: Spawn) -> None:
        up = nodes.model_copy(update={"pids": (spawn(marker=nodes.id),)})
        (cache / "local.yaml").write_text(to_yaml(up))
        assert eventually(lambda: bool(processes(up)))
        assert running() == up

    def test_stale_state_is_removed_with_what_is_left_of_the_nodes(
        self, cache: Path, nodes: LocalNodes, spawn: Spawn
    ) -> None:
        orphan = spawn(marker=nodes.id)
        stranger = spawn()
        # The number of a node's process has been given to another program since.
        stale = nodes.model_copy(update={"pids": (stranger,)})
        (cache / "local.yaml").write_text(to_yaml(stale))
        assert eventually(lambda: processes(nodes) == [orphan])
        assert running() is None
        assert not alive(orphan) and alive(stranger)
        assert not (cache / "local.yaml").exists() and not Path(nodes.temp_dir).exists()


class TestDamagedRecord:
    def test_a_launch_names_the_file(self, cache: Path) -> None:
        (cache / "local.yaml").write_text("id: abc123abc123\ncount: [")
        for look in (running, lambda: start(1)):
            with pytest.raises(
                UsageError, match=r"local\.yaml: not valid YAML .*; launch_gptoss\.py --shutdown removes it"
            ):
                look()
        assert (cache / "local.yaml").exists()

    @pytest.mark.parametrize("kept", ["id", "temp_dir"])
    def test_shutdown_stops_the_processes_it_still_lists(
        self, kept: str, cache: Path, nodes: LocalNodes, spawn: Spawn, tmp_path: Path
    ) -> None:
        folder = tmp_path / "pdlab-x"
        folder.mkdir()
        nodes = nodes.model_copy(update={"temp_dir": str(folder)})
        lines = [line for line in to_yaml(nodes).splitlines() if line.startswith(f"{kept}:")]
        (cache / "local.yaml").write_text("\n".join([*lines, "count: ["]))
        mine = spawn(marker=nodes.id) if kept == "id" else spawn(out=folder / "worker-1.out")
        stranger = spawn(marker="another")
        assert eventually(lambda: processes(nodes) == [mine])
        salvaged = running_or_salvaged()
        assert salvaged is not None
        stop(salvaged)
        assert not alive(mine) and alive(stranger)
        assert not (cache / "local.yaml").exists()

    @pytest.mark.parametrize("text", ["", "\0\0\0", "id: ''\ntemp_dir: /\n", "temp_dir: /tmp\n", "id: abc123abc123\n"])
    def test_shutdown_removes_one_that_lists_nothing(self, text: str, cache: Path, spawn: Spawn) -> None:
        stranger = spawn(out=cache / "out")
        (cache / "local.yaml").write_text(text)
        assert running_or_salvaged() is None
        assert alive(stranger) and not (cache / "local.yaml").exists()


class TestKeepLogs:
    def test_kept(self, cache: Path, nodes: LocalNodes) -> None:
        nodes.logs.mkdir(parents=True)
        (nodes.logs / "worker-1.out").write_text("why")
        os.mkfifo(nodes.logs / "pipe")  # cannot be copied
        kept = keep_logs(nodes)
        assert kept == cache / "logs" / "last-failure"
        assert kept and (kept / "worker-1.out").read_text() == "why"

    def test_none_to_keep(self, cache: Path, nodes: LocalNodes) -> None:
        """Nothing is said then, not even of the logs of an earlier failure."""
        (cache / "logs" / "last-failure").mkdir(parents=True)
        assert keep_logs(nodes) is None


class TestStart:
    @staticmethod
    def ray(folder: Path, monkeypatch: pytest.MonkeyPatch, trouble: str = "") -> None:
        tool = folder / "bin" / "ray"
        tool.parent.mkdir()
        tool.write_text(FAKE_RAY.format(python=sys.executable, trouble=trouble))
        tool.chmod(0o755)
        monkeypatch.setattr(local_nodes.sysconfig, "get_path", lambda _: str(tool.parent))

    @contextlib.contextmanager
    def up(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, count: int, trouble: str = "", **more: Any
    ) -> Iterator[LocalNodes]:
        self.ray(folder, monkeypatch, trouble)
        nodes = start(count, **more)
        try:
            yield nodes
        finally:
            stop(nodes)

    def test_starts_finds_and_stops(self, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with self.up(tmp_path, monkeypatch, 2) as nodes:
            assert len(nodes.pids) == 2 and all(alive(pid) for pid in nodes.pids)
            assert running() == nodes
            head, other = (Path(nodes.temp_dir) / f"node-{i}.log" for i in (1, 2))
            assert eventually(lambda: "MARKER" in other.read_text())
            assert f"start --head --port={nodes.gcs_port} --temp-dir={nodes.temp_dir}" in head.read_text()
            assert "--labels=pdlab/node=local-1" in head.read_text()
            assert f"start --address={nodes.address}" in other.read_text()
            assert "--labels=pdlab/node=local-2" in other.read_text()
            assert f"MARKER {nodes.id} token" in head.read_text()
            token = Path(nodes.temp_dir) / local_nodes.TOKEN_FILE
            assert len(token.read_text()) == 64 and token.stat().st_mode & 0o077 == 0
            assert eventually(lambda: "PORTS" in other.read_text())
            ports = [port for log in (head, other) for port in log.read_text().split("PORTS ")[1].split()[:2]]
            assert len({*ports, "9101", "8404"}) == 6, "HAProxy's own are fixed: two clusters would share them"
            assert "--ray-client-server-port" not in head.read_text(), "there is no Ray Client server"
            ports += [head.read_text().split(f"--{flag}=")[1].split()[0] for flag in local_nodes.AGENT_PORTS]
            assert all(taken(int(port)) for port in ports), "HAProxy is started long after this"
            with pytest.raises(UsageError, match="are up already; stop them with"):
                start(2)
        assert not any(alive(pid) for pid in nodes.pids)
        assert not any(taken(int(port)) for port in ports)
        assert running() is None
        assert not Path(nodes.temp_dir).exists() and not (cache / "local.yaml").exists()

    def test_what_is_to_be_made_is_announced_before_it_is(
        self, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        announced: list[tuple[str, str]] = []

        def announce(cluster_id: str, folder: str) -> None:
            assert not Path(folder).exists() and not (cache / "local.yaml").exists()
            announced.append((cluster_id, folder))

        with self.up(tmp_path, monkeypatch, 1, announce=announce) as nodes:
            assert announced == [(nodes.id, nodes.temp_dir)]

    def test_stopping_some_leaves_the_record_of_others(
        self, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with self.up(tmp_path, monkeypatch, 1) as nodes:
            stop(nodes.model_copy(update={"id": "ffffffffffff", "temp_dir": str(tmp_path / "others"), "pids": ()}))
            assert running() == nodes
        assert running() is None

    def test_a_template_starts_beside_the_nodes_and_ends_with_them(
        self, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "made_up_template.py").write_text("import os, time\nprint(os.environ['MINE'])\ntime.sleep(60)\n")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        made_of = local_nodes.Template("made_up_template", "MADE_UP_SOCKET", {"MINE": "yes"})
        with self.up(tmp_path, monkeypatch, 1, template=made_of) as nodes:
            assert eventually(lambda: (Path(nodes.temp_dir) / "template.log").read_text() == "yes\n")
            (template,) = set(processes(nodes)) - set(nodes.pids)
            for pid in (template, nodes.pids[0]):
                environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                assert f"MADE_UP_SOCKET={nodes.temp_dir}/template".encode() in environ
                assert (b"MINE=yes" in environ) is (pid == template)
        assert not alive(template)

    def test_made_up_nodes_are_those_of_a_cluster(
        self, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.ray(tmp_path, monkeypatch)
        cluster = load_cluster("p5.48xlarge-x2")
        backwards = cluster.model_copy(update={"nodes": cluster.nodes[::-1]})
        nodes = local_nodes.start_made_up(backwards, {"PDLAB_AT_START": "some.module"})
        try:
            assert running() == nodes
            assert nodes.made_up == cluster, "the head's node is the first"
            assert [nodes.number_of(name) for name in ("node-1", "node-2", "local-1")] == [1, 2, None]
            head, other = (Path(nodes.temp_dir) / f"node-{i}.log" for i in (1, 2))
            assert eventually(lambda: "PORTS" in other.read_text() and "PORTS" in head.read_text())
            for number, log in ((1, head), (2, other)):
                flags = log.read_text()
                assert "--num-cpus=192 --num-gpus=8 " in flags
                assert f"--labels=pdlab/node=node-{number} " in flags
                assert '--resources={"accelerator_type:H100": 1}' in flags
            assert "--head" in head.read_text()
            environ = Path(f"/proc/{nodes.pids[1]}/environ").read_bytes().split(b"\0")
            assert b"PDLAB_AT_START=some.module" in environ
        finally:
            stop(nodes)

    def test_two_at_once(self, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A second launch, while the first one waits for its head node."""
        self.ray(tmp_path, monkeypatch)
        lines: list[str] = []

        def second(*_: object) -> None:
            for look in (lambda: start(1), running):
                with pytest.raises(UsageError, match="is starting local Ray nodes") as caught:
                    look()
                lines.append(str(caught.value))
            assert running_or_salvaged() is not None, "--shutdown ends a start that hangs"

        monkeypatch.setattr(local_nodes, "_wait_for", second)
        nodes = start(1)
        try:
            assert len(lines) == 2
            assert running() == nodes and running() == nodes
        finally:
            stop(nodes)

    def test_the_record_is_never_half_written(
        self, cache: Path, nodes: LocalNodes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        local_nodes._write(nodes)
        monkeypatch.setattr(local_nodes, "to_yaml", lambda _: "\ud800")  # fails in the middle of writing
        with pytest.raises(UnicodeEncodeError):
            local_nodes._write(nodes)
        assert load_yaml(cache / "local.yaml", LocalNodes) == nodes

    def test_a_head_that_does_not_start(self, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ray(tmp_path, monkeypatch, trouble="print('the port is taken'); sys.exit(1)")
        with pytest.raises(ClusterError, match=r"Ray's head node did not start: .*the port is taken$"):
            start(2)
        assert running() is None
        assert not (cache / "local.yaml").exists()

    def test_a_head_that_never_listens(self, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(local_nodes, "START_TIMEOUT_S", 0.5)
        self.ray(tmp_path, monkeypatch, trouble="print('waiting', flush=True); time.sleep(60)")
        with pytest.raises(ClusterError, match="did not start"):
            start(1)
        assert not (cache / "local.yaml").exists()

    def test_waits_until_all_have_joined(self, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        last = f"if '--head' not in sys.argv: time.sleep(0.6)\n{JOINED}"
        with self.up(tmp_path, monkeypatch, 2, last) as nodes:
            local_nodes.await_joined(nodes)
            assert "Ray runtime started." in (Path(nodes.temp_dir) / "node-2.log").read_text()

    def test_one_that_does_not_join(self, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        last = f"if '--head' not in sys.argv: sys.exit('no way to the head')\n{JOINED}"
        with (
            self.up(tmp_path, monkeypatch, 2, last) as nodes,
            pytest.raises(ClusterError, match=r"local Ray node 2 of 2 did not join: .*no way to the head$"),
        ):
            local_nodes.await_joined(nodes)

    def test_a_killed_node_starts_again(self, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with self.up(tmp_path, monkeypatch, 2, JOINED) as nodes:
            os.kill(nodes.pids[1], 9)
            assert eventually(lambda: not alive(nodes.pids[1]))
            again = local_nodes.restart(nodes, 2)
            assert again.pids[0] == nodes.pids[0] and again.pids[1] != nodes.pids[1] and alive(again.pids[1])
            assert running() == again, "whoever looks later finds and stops it"
            text = (Path(nodes.temp_dir) / "node-2.log").read_text()
            assert f"start --address={nodes.address}" in text and "--labels=pdlab/node=local-2" in text
        assert not any(alive(pid) for pid in again.pids)

    def test_a_node_whose_remainder_hangs_starts_again(
        self, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its raylet was killed, and `ray start` has not noticed it yet."""
        with self.up(tmp_path, monkeypatch, 2, JOINED) as nodes:
            again = local_nodes.restart(nodes, 2)
            assert eventually(lambda: not alive(nodes.pids[1])) and alive(again.pids[1])

    def test_one_that_does_not_start_again(self, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        gone = "import pathlib\nonce = pathlib.Path(os.environ['TMPDIR']).parent / 'once'\n"
        gone += "if '--head' not in sys.argv and once.exists(): sys.exit('no way to the head')\n"
        with self.up(tmp_path, monkeypatch, 2, f"{gone}{JOINED}") as nodes:
            local_nodes.await_joined(nodes)
            (Path(nodes.temp_dir) / "once").touch()
            with pytest.raises(ClusterError, match=r"node 2 of 2 did not join: .*no way to the head$"):
                local_nodes.restart(nodes, 2)

    def test_the_head_does_not_start_again_nor_another_from_inside(
        self, nodes: LocalNodes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(UsageError, match="node 1 cannot be started again: it is the head"):
            local_nodes.restart(nodes, 1)
        monkeypatch.setenv(local_nodes.INSIDE, "host-a")
        with pytest.raises(UsageError, match="node 2 cannot be started again: only a process outside"):
            local_nodes.restart(nodes, 2)

    def test_no_ray(self, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(local_nodes.sysconfig, "get_path", lambda _: str(tmp_path))
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(ClusterError, match="ray is not installed"):
            start(1)
        assert not (cache / "local.yaml").exists()


def test_environment_keeps_ray_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("PYTHONPATH", "/mine")
    env = local_nodes.environment("abc", "/tmp/pdlab-x")
    assert env[MARKER] == "abc"
    assert "RAY_ADDRESS" not in env and "PYTHONDONTWRITEBYTECODE" not in env
    child, root, mine = env["PYTHONPATH"].split(os.pathsep)
    assert (Path(child) / "sitecustomize.py").is_file() and (Path(root) / "pdlab").is_dir() and mine == "/mine"
    assert os.environ["RAY_ADDRESS"] == "10.0.0.1:6379", "this process's own environment stays"


def test_replicas_and_proxies_of_two_clusters_listen_in_ranges_that_do_not_overlap() -> None:
    ranges = set()
    for number in range(200):
        ranges.add(tuple(sorted(map(int, local_nodes.serve_ports(f"cluster {number}").values()))))
    assert len(ranges) == 20, "each is used"
    ordered = [port for each in sorted(ranges) for port in each]
    assert ordered == sorted(ordered) and len(set(ordered)) == 120, "none begins before the last one ends"
    assert ordered[0] > 10_000 and ordered[-1] < 32_768, "outside of NIXL's side channels and the kernel's ports"
    env = local_nodes.environment("cluster 1", "/tmp/pdlab-x")
    assert env.items() >= local_nodes.serve_ports("cluster 1").items()


def test_environment_holds_no_secret_and_keeps_to_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of another cluster")
    monkeypatch.setenv("PDLAB_API_KEY", "of the endpoint")
    monkeypatch.setenv("UCX_NET_DEVICES", "eth0")
    env = local_nodes.environment("abc", "/tmp/pdlab-x")
    assert not {"RAY_AUTH_TOKEN", "PDLAB_API_KEY"} & set(env)
    assert (env["RAY_AUTH_MODE"], env["RAY_AUTH_TOKEN_PATH"]) == ("token", "/tmp/pdlab-x/ray-token")
    assert (env["PDLAB_LISTEN"], env["VLLM_HOST_IP"], env["UCX_NET_DEVICES"]) == ("127.0.0.1", "127.0.0.1", "lo")
    host = local_nodes.environment("abc", "/tmp/pdlab-x", "10.77.0.2")
    assert (host["PDLAB_LISTEN"], host["VLLM_HOST_IP"], host["UCX_NET_DEVICES"]) == ("10.77.0.2", "10.77.0.2", "eth0")


def test_a_driver_takes_the_environment_of_its_host(nodes: LocalNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ) | {"RAY_AUTH_TOKEN": "x", "RAY_ADDRESS": "x", "PDLAB_HOST": ""})
    local_nodes.become_driver(nodes)
    assert os.environ["PDLAB_LISTEN"] == "127.0.0.1" and not {"RAY_AUTH_TOKEN", "RAY_ADDRESS"} & set(os.environ)
    hosts = (Host(name="host1", address="10.77.0.1", pid=1), Host(name="host2", address="10.77.0.2", pid=2))
    os.environ["PDLAB_HOST"] = "host2"
    local_nodes.become_driver(nodes.model_copy(update={"two_hosts": TwoHosts(hosts=hosts, shape=LinkShape())}))
    assert os.environ["PDLAB_LISTEN"] == os.environ["VLLM_HOST_IP"] == "10.77.0.2"


def taken(port: int) -> bool:
    """Whether a program that shares no port with others is refused it."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


class TestHoldPort:
    def test_a_server_can_listen_there_and_nobody_else_is_given_it(self) -> None:
        held, port = local_nodes.hold_port()
        with held:
            assert taken(port)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port), 5)
            with (
                socket.create_server(("127.0.0.1", port)) as server,
                socket.create_connection(server.getsockname(), 5),
                server.accept()[0],
            ):
                pass
        # The kernel looks through all of its ports for one that is free: none is given twice.
        with contextlib.ExitStack() as stack:
            ports = []
            for _ in range(500):
                one, port = local_nodes.hold_port()
                stack.enter_context(one)
                ports.append(port)
            assert len(set(ports)) == 500


SEMAPHORE = (
    "import multiprocessing, time\n"
    "semaphore = multiprocessing.get_context('spawn').Semaphore()\n"
    "print('sem.' + semaphore._semlock.name.lstrip('/'), flush=True); time.sleep(60)"
)
# As the ranks of a CPU engine with TP 2 talk (vllm/distributed/device_communicators/cpu_communicator.py).
SEGMENT = (
    "import mmap, time, uuid\n"
    "name = f'vllm_dist_{uuid.uuid4().hex}-tp:0-[0-1]-cpushm_1'\n"
    "file = open('/dev/shm/' + name, 'w+b'); file.truncate(4096); segment = mmap.mmap(file.fileno(), 4096)\n"
    "print(name, flush=True); time.sleep(60)"
)


@pytest.mark.usefixtures("cache")
class TestSharedMemory:
    """Semaphores and segments in /dev/shm: a killed process leaves them, and stop removes those of the nodes alone."""

    @pytest.fixture
    def elsewhere(self) -> Iterator[list[Path]]:
        paths: list[Path] = []
        yield paths
        for path in paths:
            path.unlink(missing_ok=True)

    def made(self, spawn: Spawn, folder: Path, code: str = SEMAPHORE) -> tuple[int, Path]:
        folder.mkdir(exist_ok=True)
        out = folder / "shared.out"
        pid = spawn(out=out, code=code)
        assert eventually(lambda: out.read_text().endswith("\n"), 20)
        return pid, Path("/dev/shm") / out.read_text().strip()

    @pytest.mark.parametrize("code", [SEMAPHORE, SEGMENT], ids=["semaphore", "segment"])
    def test_a_killed_engines_go_with_the_nodes_and_nobody_elses(
        self, nodes: LocalNodes, spawn: Spawn, tmp_path: Path, elsewhere: list[Path], code: str
    ) -> None:
        mine, ours = self.made(spawn, Path(nodes.temp_dir), code)
        theirs = self.made(spawn, tmp_path / "else", code)[1]
        elsewhere.append(theirs)
        assert ours.exists() and theirs.exists()
        local_nodes.note_shared_memory(nodes)
        killed = processes(nodes)  # Python's own resource tracker, which would tidy up after the other, among them
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in killed:
                os.kill(pid, number)
        assert eventually(lambda: not alive(mine))
        assert ours.exists(), "else this test shows nothing"
        stop(nodes)
        assert not ours.exists() and theirs.exists()

    def test_what_was_not_noted_is_found_while_its_process_lives(self, nodes: LocalNodes, spawn: Spawn) -> None:
        _, ours = self.made(spawn, Path(nodes.temp_dir))
        stop(nodes)
        assert not ours.exists()

    def test_other_files_there_stay(self, nodes: LocalNodes) -> None:
        other = Path("/dev/shm") / f"model-{uuid.uuid4().hex}.safetensors"
        other.touch()
        try:
            (Path(nodes.temp_dir) / "shared-memory").write_text(f"{other}\n/etc/hostname\n/dev/shm/../../etc/hosts\n")
            assert local_nodes._shared_memory(nodes) == set()
            stop(nodes)
            assert other.exists()
        finally:
            other.unlink()


def test_temporary_files_of_the_nodes_are_their_own(nodes: LocalNodes) -> None:
    env = local_nodes.environment(nodes.id, "/tmp/pdlab-abcdefgh")
    for name in ("TMPDIR", "VLLM_RPC_BASE_PATH", "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH"):
        assert env[name].startswith("/tmp/pdlab-abcdefgh/")
    assert len(f"{env['TMPDIR']}/{uuid.uuid4()}") <= 107, "a Unix socket's path"
