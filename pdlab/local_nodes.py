"""Ray nodes on this machine for ``--local``: started with `ray start`, found again, stopped to the last process.

Every process that the nodes start inherits the marker ``PDLAB_LOCAL=<id>`` and writes to the nodes'
own folder, so that stopping ends exactly those, whatever they are called and whoever their parent
is by then. The nodes share this machine's loopback interface, or they are on the two hosts of
`pdlab.two_hosts`, with a link between them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pdlab import two_hosts
from pdlab.catalog import LOCAL_NODE_CPUS
from pdlab.errors import ClusterError, UsageError
from pdlab.namespaces import INSIDE, network_of, spawn_in
from pdlab.nodes import LinkShape
from pdlab.running import cache_dir
from pdlab.serve_args import NODE_NAME_LABEL
from pdlab.spec import Frozen, load_yaml, to_yaml
from pdlab.two_hosts import Host, TwoHosts

MARKER = "PDLAB_LOCAL"
START_TIMEOUT_S = 60.0
TERM_WAIT_S = 5.0
KILL_WAIT_S = 10.0
OBJECT_STORE_BYTES = 100_000_000

# Held so that Python does not warn of a dropped child; the nodes outlive a launch that detaches.
_children: list[subprocess.Popen[bytes]] = []


class LocalNodes(Frozen):
    """``count`` Ray nodes of this machine; ``pids`` are their `ray start` processes.

    ``two_hosts``: where they run, the head on the first (None: side by side on the loopback interface).
    """

    id: str
    count: int
    gcs_port: int
    temp_dir: str
    pids: tuple[int, ...]
    two_hosts: TwoHosts | None = None

    @property
    def address(self) -> str:
        return f"{self.host(1).address if self.two_hosts else '127.0.0.1'}:{self.gcs_port}"

    def host(self, number: int) -> Host:
        """The host of node 1 or 2, where there are two."""
        assert self.two_hosts is not None
        return self.two_hosts.hosts[number - 1]

    @property
    def logs(self) -> Path:
        """Where Ray and the engines write their logs."""
        return Path(self.temp_dir) / "session_latest" / "logs"


def environment(cluster_id: str, temp_dir: str) -> dict[str, str]:
    """Environment of the nodes and of the driver: a Ray that starts no process and takes no core for nothing."""
    root = str(Path(__file__).resolve().parent.parent)
    env = {key: value for key, value in os.environ.items() if key not in ("RAY_ADDRESS", "PYTHONDONTWRITEBYTECODE")}
    return env | {
        MARKER: cluster_id,
        "PYTHONPATH": os.pathsep.join(filter(None, [f"{root}/pdlab/child", root, os.environ.get("PYTHONPATH")])),
        "RAY_AUTH_MODE": "disabled",  # nobody outside gets in; on by default, it writes into the home folder
        "RAY_DISABLE_IMPORT_WARNING": "1",
        "RAY_usage_stats_enabled": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "RAY_enable_worker_prestart": "0",
        "RAY_prestart_worker_first_driver": "0",
        "RAY_worker_niceness": "0",  # Ray's 15 lets any other program of a small machine starve the engines
        "RAYLLM_ENABLE_WORKER_PROCESS_SETUP_HOOK": "0",
        "RAY_metrics_report_interval_ms": "1000",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",  # one event loop per replica, gRPC between them, buffered logs
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0.5",  # Ray waits 30 s for balancers in front; none here
        "RAY_SERVE_LOG_TO_STDERR": "1",  # where a failing replica says why
        "RAYLLM_ENABLE_REQUEST_PROMPT_LOGS": "0",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{temp_dir}/haproxy/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{temp_dir}/haproxy/admin.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": f"{temp_dir}/haproxy",
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{temp_dir}/haproxy/server-state",
    }


def environment_on(host: Host, nodes: LocalNodes) -> dict[str, str]:
    """Environment of a process on that host: the nodes' own, with Ray's address and the host's."""
    own = {INSIDE: host.name, "VLLM_HOST_IP": host.address, "RAY_ADDRESS": nodes.address}
    return environment(nodes.id, nodes.temp_dir) | own


def start(count: int, link: LinkShape | None = None) -> LocalNodes:
    """Start ``count`` Ray nodes; returns when the head answers, the others join meanwhile.

    With ``link`` they are two, on two hosts with that link between them. Raises UsageError when
    other local nodes are up or just being started, or where two hosts cannot be made, ClusterError
    when Ray does not start.
    """
    if link is not None:
        two_hosts.require()
    with _lock(fcntl.LOCK_EX):
        if _found(_read()):
            raise UsageError("local Ray nodes are up already; stop them with launch_gptoss.py --shutdown")
        return _start(count, link)


def _start(count: int, link: LinkShape | None) -> LocalNodes:
    cluster_id = uuid.uuid4().hex[:12]
    # Unix socket paths end at 107 characters, so Ray's folder sits right under the temporary folder.
    temp_dir = tempfile.mkdtemp(prefix="pdlab-")
    nodes = LocalNodes(id=cluster_id, count=count, gcs_port=free_port(), temp_dir=temp_dir, pids=())
    try:
        if link is None:
            return _start_ray(nodes)
        end_strays()
        _write(nodes)
        with two_hosts.made(Path(temp_dir), link, environment(cluster_id, temp_dir), _owner()) as pair:
            return _start_ray(nodes.model_copy(update={"two_hosts": pair}))
    except BaseException:
        stop(nodes)
        raise


def _start_ray(nodes: LocalNodes) -> LocalNodes:
    port, temp_dir = nodes.gcs_port, nodes.temp_dir
    flags = ["--head", f"--port={port}", f"--temp-dir={temp_dir}", "--include-dashboard=false"]
    head = _ray_start(1, [*flags, f"--ray-client-server-port={free_port()}"], nodes)
    nodes = nodes.model_copy(update={"pids": (head.pid,)})
    _write(nodes)
    _wait_for(nodes, head)
    others = [_ray_start(i, [f"--address={nodes.address}"], nodes) for i in range(2, nodes.count + 1)]
    nodes = nodes.model_copy(update={"pids": (head.pid, *(other.pid for other in others))})
    _write(nodes)
    return nodes


def shape_link(link: LinkShape) -> LocalNodes:
    """Give the link between the two hosts another rate and delay. Raises UsageError where there are none."""
    with _lock(fcntl.LOCK_EX):
        nodes = on_two_hosts(_found(_read()))
        assert nodes.two_hosts is not None
        folder, env = Path(nodes.temp_dir), environment(nodes.id, nodes.temp_dir)
        nodes = nodes.model_copy(update={"two_hosts": two_hosts.reshape(nodes.two_hosts, link, folder, env)})
        _write(nodes)
        return nodes


def on_two_hosts(nodes: LocalNodes | None) -> LocalNodes:
    """The same nodes. Raises UsageError unless they are on two hosts."""
    if nodes is None or nodes.two_hosts is None:
        raise UsageError("no two hosts are up; start them with python -m pdlab.cluster two-hosts up")
    return nodes


def end_strays() -> None:
    """End two hosts that no record tells of any more."""
    for pid, folder in two_hosts.strays(_owner()).items():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def running() -> LocalNodes | None:
    """The local nodes that a launch left up; None when there are none (stale traces are removed).

    Raises UsageError when another launch is just starting them, or when their record is damaged.
    """
    with _lock(fcntl.LOCK_SH):
        return _found(_read())


def running_or_salvaged() -> LocalNodes | None:
    """For stopping: the same, whoever is starting them, and from a damaged record what can still be read of it."""
    try:
        return _found(_read())
    except UsageError:
        nodes = _salvage()
        if processes(nodes):
            return nodes
        stop(nodes)
        return None


def _found(nodes: LocalNodes | None) -> LocalNodes | None:
    # On one of two hosts the processes' numbers say nothing; whoever started this one knows that they are up.
    inside = nodes is not None and INSIDE in os.environ and os.environ.get(MARKER) == nodes.id
    if nodes is None or inside or any(_belongs(pid, nodes) for pid in nodes.pids):
        return nodes
    stop(nodes)
    return None


def stop(nodes: LocalNodes) -> None:
    """End every process of the nodes and remove their files. Raises ClusterError if one will not end."""
    for number, wait_s in ((signal.SIGTERM, TERM_WAIT_S), (signal.SIGKILL, KILL_WAIT_S)):
        for pid in processes(nodes):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + wait_s
        while processes(nodes) and time.monotonic() < deadline:
            time.sleep(0.05)
    left = processes(nodes)
    _children[:] = [child for child in _children if child.poll() is None]
    two_hosts.reap()
    shutil.rmtree(nodes.temp_dir, ignore_errors=True)
    if left:
        raise ClusterError(f"processes {left} of the local Ray nodes do not end; end them by hand")
    _state_file().unlink(missing_ok=True)


def processes(nodes: LocalNodes) -> list[int]:
    """Processes of the nodes, this one left out."""
    pids = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
    return sorted(pid for pid in pids if pid != os.getpid() and _belongs(pid, nodes))


def keep_logs(nodes: LocalNodes) -> Path | None:
    """Copy the logs to the cache folder before `stop` removes them; returns where they are (None: there are none)."""
    kept = cache_dir() / "logs" / "last-failure"
    shutil.rmtree(kept, ignore_errors=True)
    with contextlib.suppress(OSError):  # no logs yet; a file that went meanwhile, after all others were copied
        shutil.copytree(nodes.logs, kept, ignore_dangling_symlinks=True)
    return kept if kept.is_dir() else None


def free_port() -> int:
    """A TCP port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _ray_start(number: int, args: list[str], nodes: LocalNodes) -> subprocess.Popen[bytes]:
    ray = shutil.which("ray", path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")]))
    if ray is None:
        raise ClusterError(f"`ray` is not installed beside {sys.executable}; install requirements-cpu.txt (make setup)")
    host = nodes.host(number) if nodes.two_hosts else None
    command = [
        ray, "start", *args, "--block", "--disable-usage-stats", "--include-log-monitor=false",
        f"--num-cpus={LOCAL_NODE_CPUS}", "--num-gpus=0", f"--object-store-memory={OBJECT_STORE_BYTES}",
        f"--node-ip-address={host.address if host else '127.0.0.1'}", f"--labels={NODE_NAME_LABEL}=local-{number}",
    ]  # fmt: skip
    env = environment_on(host, nodes) if host else environment(nodes.id, nodes.temp_dir)
    env.pop("RAY_ADDRESS", None)  # `ray start --head` refuses it
    # Fixed ports by default, so another program's HAProxy, or another pdlab's, would keep ours from starting.
    env |= {f"RAY_SERVE_HAPROXY_{what}_PORT": str(free_port()) for what in ("METRICS", "STATS")}
    with (Path(nodes.temp_dir) / f"node-{number}.log").open("w") as log:
        options: dict[str, Any] = {"env": env, "stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        options["start_new_session"] = True
        process = spawn_in(host.pid, command, **options) if host else subprocess.Popen(command, **options)
    _children.append(process)
    return process


def _wait_for(nodes: LocalNodes, head: subprocess.Popen[bytes]) -> None:
    address = (nodes.address.partition(":")[0], nodes.gcs_port)
    deadline = time.monotonic() + START_TIMEOUT_S
    with network_of(nodes.host(1).pid if nodes.two_hosts else None):
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(address, 0.2):
                return
            if head.poll() is not None:
                break
            time.sleep(0.05)
    lines = [line for line in (Path(nodes.temp_dir) / "node-1.log").read_text().splitlines() if line.strip()]
    raise ClusterError(f"Ray's head node did not start: {lines[-1] if lines else 'no word of it'}")


def _belongs(pid: int, nodes: LocalNodes) -> bool:
    """By the marker, or by output that goes to the nodes' folder: a process that changes its title
    (Ray's workers and agents, vLLM's engines) overwrites the environment that others can read of it."""
    proc = Path(f"/proc/{pid}")
    with contextlib.suppress(OSError):
        if f"{MARKER}={nodes.id}".encode() in (proc / "environ").read_bytes().split(b"\0"):
            return True
    streams = [proc / "fd/1", proc / "fd/2"]
    with contextlib.suppress(OSError):
        # An agent of Ray writes to pipes at first; the raylet's log, which it inherits, gives it away.
        if (proc / "cmdline").read_bytes().startswith(b"ray::"):
            streams = list((proc / "fd").iterdir())
    for stream in streams:
        with contextlib.suppress(OSError):
            if str(stream.readlink()).startswith(nodes.temp_dir + "/"):
                return True
    return False


@contextlib.contextmanager
def _lock(kind: int) -> Iterator[None]:
    """One launch at a time starts local nodes, and nobody looks for them meanwhile. Raises UsageError in the others."""
    lock = cache_dir() / "local.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError("another launch is just starting local Ray nodes; try again when it is ready") from error
        yield


def _read() -> LocalNodes | None:
    state = _state_file()
    if not state.exists():
        return None
    try:
        return load_yaml(state, LocalNodes)
    except UsageError as error:
        raise UsageError(f"{error}; launch_gptoss.py --shutdown removes it and what it still tells of") from error


def _write(nodes: LocalNodes) -> None:
    state = _state_file()
    part = state.with_name(f".{state.name}.{os.getpid()}.part")
    part.write_text(to_yaml(nodes), encoding="utf-8")
    part.replace(state)


def _salvage() -> LocalNodes:
    """The nodes of a damaged record: by their marker, by their folder, or by neither."""
    state = _state_file()
    try:
        text = state.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    marker = re.search(r"^id: ['\"]?([0-9a-f]{12})\b", text, re.MULTILINE)
    folder = re.search(r"^temp_dir: (/\S*/pdlab-[^/\s]+)$", text, re.MULTILINE)
    return LocalNodes(
        id=marker[1] if marker else "unknown",
        count=1,
        gcs_port=0,
        temp_dir=folder[1] if folder else f"{state}.none",
        pids=(),
    )


def _owner() -> str:
    return str(cache_dir().resolve())


def _state_file() -> Path:
    return cache_dir() / "local.yaml"
