"""Ray nodes on this machine for ``--local``: start them with `ray start`, find them again, stop all their processes.

Every process of the nodes inherits the marker ``PDLAB_LOCAL=<id>`` and writes to the nodes' own folder. So `stop` ends
exactly these processes, whatever their names and parents are. The nodes share this machine's loopback interface, or
they are on the two hosts of `pdlab.cluster.two_hosts`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from pdlab.cluster import machine, two_hosts
from pdlab.cluster.loopback import LISTEN, LOOPBACK, NODE_NUMBER
from pdlab.cluster.namespaces import INSIDE, network_of, spawn_in
from pdlab.cluster.two_hosts import Host, TwoHosts
from pdlab.core import api_key
from pdlab.core.catalog import LOCAL_NODE_CPUS
from pdlab.core.commands import LAUNCH, PDLAB, not_installed
from pdlab.core.errors import ClusterError, UsageError
from pdlab.core.files import PACKAGE, cache_dir, holder, launch_lock, python_path, replace
from pdlab.core.nodes import NODE_NAME_LABEL, ClusterNode, ClusterView, LinkShape
from pdlab.core.schema import Frozen, load_yaml, to_yaml
from pdlab.remote.kernel_files import inherited, mapped_files

MARKER = "PDLAB_LOCAL"
# Names a module whose ``at_start`` runs before the import of Ray (pdlab/cluster/site/sitecustomize.py).
AT_START = "PDLAB_AT_START"
# Start-up timeout for a loaded machine; the end of a node's process is seen at once.
START_TIMEOUT_S = 300.0
# Nodes that start at once: `ray start` gives up after 30 s, which is too short for a dozen starts on two cores.
AT_ONCE = 4
LAST_LINES = 3
# `ray start` prints this after its node has joined the GCS (ray/scripts/scripts.py; a contract test checks it).
JOINED = "Ray runtime started."
TERM_WAIT_S = 5.0
KILL_WAIT_S = 10.0
LONGEST_TITLE = 300
FIRST_SERVE_PORT = 24_000  # NIXL's side channels have ports below these ranges, the kernel's ephemeral ports are above
OBJECT_STORE_BYTES = 100_000_000
# Python's semaphores and shared memory, and segments of UCX and vLLM; no file of a user, such as a model.
_SHARED = re.compile(
    r"/dev/shm/(?:sem\.mp-\w{8}|psm_[0-9a-f]{8}|ucx_shm_posix_\w+|(?:vllm_dist_[0-9a-f]{32}|\d+)-[^/]+-cpushm_\d+)"
)
TOKEN_FILE = "ray-token"
OTHER_CLUSTERS = (
    "RAY_ADDRESS",
    "RAY_AUTH_TOKEN",
)  # of another cluster; they have priority over the settings of `environment`
# UCX opens a TCP listener on every network device, and torch's gloo opens one at the host's name.
LOOPBACK_ONLY = {"UCX_NET_DEVICES": "lo", "GLOO_SOCKET_IFNAME": "lo"}
# Without these ports a raylet waits 15 s for its agents to choose them, and then ends. The agents are two Python
# processes that import more than a thousand modules. `ray start` does not see the end and gives up after 30 s.
# `ray start` gives the listening port only to the agent: see pdlab/cluster/loopback.py.
AGENT_PORTS = (
    "metrics-export-port",
    "dashboard-agent-grpc-port",
    "dashboard-agent-listen-port",
    "runtime-env-agent-port",
)

# Raylets check these ten, four and four times a second by default.
SLOW_POLLING = {
    "RAY_raylet_check_gc_period_milliseconds": "1000",
    "RAY_memory_monitor_refresh_ms": "1000",
    "RAY_local_fs_monitor_interval_ms": "5000",
}

_own: set[str] = set()  # names of variables that `set_own` has set


class Template(NamedTuple):
    """A process from which workers are forked: its module, the variable with the name of its socket for the workers,
    and its environment in addition to that of the nodes."""

    module: str
    socket: str
    env: Mapping[str, str]


class LocalNodes(Frozen):
    """``count`` Ray nodes of this machine. ``pids``: their `ray start` processes.

    ``two_hosts``: the hosts that they run on, the head on the first; None: all on the loopback interface.
    ``made_up``: the cluster whose nodes and GPUs they pretend to be. ``env``: environment of their processes in
    addition to `environment`.
    """

    id: str
    count: int
    gcs_port: int
    temp_dir: str
    pids: tuple[int, ...]
    two_hosts: TwoHosts | None = None
    made_up: ClusterView | None = None
    env: dict[str, str] = Field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"{self.host(1).address if self.two_hosts else LOOPBACK}:{self.gcs_port}"

    def host(self, number: int) -> Host:
        """The host of node 1 or 2; only on two hosts."""
        assert self.two_hosts is not None
        return self.two_hosts.hosts[number - 1]

    def node(self, number: int) -> ClusterNode:
        """Ray's view of node ``number`` (from 1)."""
        if self.made_up:
            return self.made_up.nodes[number - 1]
        return ClusterNode(id=f"local-{number}", cpus=LOCAL_NODE_CPUS)

    def number_of(self, name: str) -> int | None:
        """The number of the node with that name; None without such a node."""
        return next((number for number in range(1, self.count + 1) if self.node(number).id == name), None)

    @property
    def logs(self) -> Path:
        """Folder of the logs of Ray and the engines."""
        return Path(self.temp_dir) / "session_latest" / "logs"


def environment(cluster_id: str, temp_dir: str, address: str = LOOPBACK) -> dict[str, str]:
    """Environment of a node at that address and of its driver.

    With it Ray starts no unneeded process, listens only at that address, and requires the nodes' token.
    """
    left_out = {*OTHER_CLUSTERS, *_own, "PYTHONDONTWRITEBYTECODE", api_key.KEY}
    env = {key: value for key, value in os.environ.items() if key not in left_out}
    return (
        env
        | {
            MARKER: cluster_id,
            # `stop` removes this folder with the sockets and folders of Ray Serve, vLLM and torch.
            "TMPDIR": _scratch(temp_dir),
            "VLLM_RPC_BASE_PATH": _scratch(temp_dir),
            "PYTHONPATH": python_path(str(PACKAGE / "cluster" / "site")),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": f"{temp_dir}/{TOKEN_FILE}",  # Ray's default: one in the home folder
            LISTEN: address,
            "VLLM_HOST_IP": address,
            "RAY_DISABLE_IMPORT_WARNING": "1",
            "RAY_usage_stats_enabled": "0",
            **SLOW_POLLING,
            "RAY_event_stats": "0",  # no timing of each event in the loops of Ray's processes
            "VLLM_NO_USAGE_STATS": "1",
            "RAY_enable_worker_prestart": "0",
            "RAY_prestart_worker_first_driver": "0",
            # Ray: 60. A replica's process imports vLLM before it registers (pdlab/deploy/cpu_engine/prefork.py).
            "RAY_worker_register_timeout_seconds": "600",
            "RAY_worker_niceness": "0",  # Ray: 15, with which another program of a small machine starves the engines
            "RAYLLM_ENABLE_WORKER_PROCESS_SETUP_HOOK": "0",
            "RAY_metrics_report_interval_ms": "5000",  # 1000 for engines, because pdlab waits for their counts: cpu_env
            "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "1000",  # Ray: 100; every replica and router wakes for it
            "RAY_SERVE_STATUS_GAUGE_REPORT_INTERVAL_S": "1",  # Ray: 10; Ray drops a gauge after two exports
            "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",  # with 0.1 s an idle controller takes 5 % of a core
            "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",  # one event loop per replica, gRPC between them, buffered logs
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0.5",  # Ray: 30 s, for a load balancer in front
            "RAY_SERVE_LOG_TO_STDERR": "1",  # a failing replica writes its reason there
            "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # Ray: three times 5 s, too short on a busy machine
            "RAYLLM_ENABLE_REQUEST_PROMPT_LOGS": "0",
            "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",  # Ray: a line per request, counted by a Python process
            "RAY_SERVE_HAPROXY_OBSERVE_ERROR_LIMIT": "1",  # Ray: 3, the tries of a request
            "RAY_SERVE_HAPROXY_NBTHREAD": "1",  # Ray: 4; these threads wake each other for every chunk
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{temp_dir}/haproxy/haproxy.cfg",
            "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{temp_dir}/haproxy/admin.sock",
            "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{temp_dir}/haproxy/metrics.sock",
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": f"{temp_dir}/haproxy",
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{temp_dir}/haproxy/server-state",
        }
        | serve_ports(cluster_id)
        | (LOOPBACK_ONLY if address == LOOPBACK else {})
    )


def serve_ports(cluster_id: str) -> dict[str, str]:
    """Variables for the ports of replicas and of Ray Serve's own proxy: one of 20 ranges of 390 ports.

    Ray's default ports are the same for every cluster: after the end of a replica HAProxy could send its requests to
    a replica of another cluster.
    """
    first = FIRST_SERVE_PORT + 390 * (zlib.crc32(cluster_id.encode()) % 20)
    ends = {"MIN_HTTP": first + 2, "MAX_HTTP": first + 289, "MIN_GRPC": first + 290, "MAX_GRPC": first + 389}
    return {f"RAY_SERVE_DIRECT_INGRESS_{end}_PORT": str(port) for end, port in ends.items()} | {
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(first),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(first + 1),
    }


def set_own(name: str, value: str) -> None:
    """Set an unset variable of this process only: the nodes do not inherit it."""
    if name not in os.environ:
        os.environ[name] = value
        _own.add(name)


def environment_on(host: Host, nodes: LocalNodes) -> dict[str, str]:
    """Environment of a process on that host: that of the nodes, with the addresses of Ray and of the host."""
    own = {INSIDE: host.name, "RAY_ADDRESS": nodes.address}
    return environment(nodes.id, nodes.temp_dir, host.address) | own


def become_driver(nodes: LocalNodes) -> None:
    """Give this process the nodes' environment. Ray reads it at its import."""
    this_host = next((host for host in _hosts(nodes) if host.name == os.environ.get(INSIDE)), None)
    own = environment_on(this_host, nodes) if this_host else environment(nodes.id, nodes.temp_dir) | nodes.env
    os.environ.update(own)
    for name in OTHER_CLUSTERS:
        os.environ.pop(name, None)


def _hosts(nodes: LocalNodes) -> tuple[Host, ...]:
    return nodes.two_hosts.hosts if nodes.two_hosts else ()


def start_made_up(
    cluster: ClusterView,
    env: Mapping[str, str],
    announce: Callable[[str, str], None] | None = None,
) -> LocalNodes:
    """Start a Ray node for every node of ``cluster``, with its CPUs, GPUs and name, whatever this machine has.

    ``env``: in the environment of their processes. Announces, returns and raises as `start`.
    """
    with _lock(fcntl.LOCK_EX):
        _refuse_running()
        # The head must be node 1.
        nodes = tuple(sorted(cluster.nodes, key=lambda node: not node.head))
        return _start(len(nodes), None, announce, cluster.model_copy(update={"nodes": nodes}), env)


def start(
    count: int,
    link: LinkShape | None = None,
    announce: Callable[[str, str], None] | None = None,
    template: Template | None = None,
) -> LocalNodes:
    """Start ``count`` Ray nodes; returns when the head answers. The other nodes may still be joining.

    ``announce`` gets the nodes' id and folder before anything is made. With ``link`` there are two nodes, on two hosts
    with that link. ``template``: the process from which workers are forked; it is not used on two hosts, because a fork
    stays in the network of its template. Raises UsageError if other local nodes are up or starting, or if two hosts
    cannot be made. Raises ClusterError if Ray does not start.
    """
    if link is not None:
        two_hosts.require()
    with _lock(fcntl.LOCK_EX):
        _refuse_running()
        return _start(count, link, announce, template=None if link else template)


def _refuse_running() -> None:
    if _verified(recorded()):
        raise UsageError(f"local Ray nodes are up already; stop them with {LAUNCH} --shutdown")


def _start(
    count: int,
    link: LinkShape | None,
    announce: Callable[[str, str], None] | None,
    made_up: ClusterView | None = None,
    env: Mapping[str, str] | None = None,
    template: Template | None = None,
) -> LocalNodes:
    cluster_id = uuid.uuid4().hex[:12]
    # A Unix socket path has at most 107 characters, so Ray's folder is directly in the temporary folder.
    temp_dir = f"{tempfile.gettempdir()}/pdlab-{cluster_id[:8]}"
    if announce is not None:
        announce(cluster_id, temp_dir)
    Path(temp_dir).mkdir(mode=0o700)
    Path(_scratch(temp_dir)).mkdir()
    _write_token(Path(temp_dir) / TOKEN_FILE)
    own: dict[str, Any] = {"made_up": made_up, "env": dict(env or {})}
    if template is not None:
        own["env"][template.socket] = f"{temp_dir}/template"
    nodes = LocalNodes(id=cluster_id, count=count, gcs_port=0, temp_dir=temp_dir, pids=(), **own)
    try:
        if template is not None:
            _start_template(nodes, template)
        if link is None:
            return _start_ray(nodes)
        end_strays()
        _write(nodes)
        with two_hosts.create_hosts(Path(temp_dir), link, environment(cluster_id, temp_dir), _owner()) as pair:
            return _start_ray(nodes.model_copy(update={"two_hosts": pair}))
    except BaseException:
        stop(nodes)
        raise


def _start_template(nodes: LocalNodes, template: Template) -> None:
    env = environment(nodes.id, nodes.temp_dir) | nodes.env | dict(template.env)
    with (Path(nodes.temp_dir) / "template.log").open("w") as log:
        options: dict[str, Any] = {"env": env, "stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        # A fork writes its title over the command: make the command as long as the titles of Ray's workers.
        command = [sys.executable, "-u", "-m", template.module, nodes.id.ljust(LONGEST_TITLE)]
        two_hosts.CHILDREN.append(subprocess.Popen(command, start_new_session=True, **options))


def _start_ray(nodes: LocalNodes) -> LocalNodes:
    with _held(1, nodes, 1) as ports:
        port = next(iter(ports))
        nodes = nodes.model_copy(update={"gcs_port": port})
        flags = ["--head", f"--port={port}", f"--temp-dir={nodes.temp_dir}", "--include-dashboard=false"]
        # The monitor belongs to the autoscaler, which these nodes do not need.
        head = _ray_start(1, [*flags, "--no-monitor"], nodes, ports)
    nodes = nodes.model_copy(update={"pids": (head.pid,)})
    _write(nodes)
    _wait_for(nodes, head)
    others = []
    for number in range(2, nodes.count + 1):
        _await_room(nodes, range(2, number))
        others.append(_ray_start(number, [f"--address={nodes.address}"], nodes, {}))
    nodes = nodes.model_copy(update={"pids": (head.pid, *(other.pid for other in others))})
    _write(nodes)
    return nodes


def restart(nodes: LocalNodes, number: int) -> LocalNodes:
    """End the remaining processes of node ``number`` and start it again; returns when it has joined.

    Raises ClusterError if it does not start. Raises UsageError for the head node, and for a process on one of the two
    hosts: only a process outside the hosts can enter both.
    """
    if number == 1 or INSIDE in os.environ:
        why = "it is the head" if number == 1 else "only a process outside the two hosts can do that"
        raise UsageError(f"local Ray node {number} cannot be started again: {why}")
    for pid in _left_of(nodes, number):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    (Path(nodes.temp_dir) / f"node-{number}.log").unlink(missing_ok=True)
    node = _ray_start(number, [f"--address={nodes.address}"], nodes, {})
    pids = [*nodes.pids[: number - 1], node.pid, *nodes.pids[number:]]
    nodes = nodes.model_copy(update={"pids": tuple(pids)})
    with _lock(fcntl.LOCK_EX):
        _write(nodes)
    _await_joined(nodes, number, time.monotonic() + START_TIMEOUT_S)
    return nodes


def _left_of(nodes: LocalNodes, number: int) -> list[int]:
    """Processes of that node: its `ray start`, and processes whose environment still has the node's number."""
    started = nodes.pids[number - 1]
    left = [started] if _belongs(started, nodes) else []
    for pid in processes(nodes):
        with contextlib.suppress(OSError):
            if pid != started and inherited(pid, f"{NODE_NUMBER}={number}"):
                left.append(pid)
    return left


def _await_room(nodes: LocalNodes, started: Iterable[int]) -> None:
    """Return when fewer than `AT_ONCE` of the ``started`` nodes are still joining, or after the start timeout.

    The code that needs a node reports its absence.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    while sum(JOINED not in _log(nodes, number) for number in started) >= AT_ONCE and time.monotonic() < deadline:
        time.sleep(0.05)


def _write_token(path: Path) -> None:
    """Write a new token for Ray to a file that only its owner can read."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))


def shape_link(link: LinkShape) -> LocalNodes:
    """Change the rate and delay of the link between the two hosts. Raises UsageError without two hosts."""
    with _lock(fcntl.LOCK_EX):
        nodes = on_two_hosts(_verified(recorded()))
        assert nodes.two_hosts is not None
        folder, env = Path(nodes.temp_dir), environment(nodes.id, nodes.temp_dir)
        nodes = nodes.model_copy(update={"two_hosts": two_hosts.reshape(nodes.two_hosts, link, folder, env)})
        _write(nodes)
        return nodes


def on_two_hosts(nodes: LocalNodes | None) -> LocalNodes:
    """``nodes`` itself. Raises UsageError unless the nodes are on two hosts."""
    if nodes is None or nodes.two_hosts is None:
        raise UsageError(f"no two hosts are up; start them with {PDLAB} two-hosts up")
    return nodes


def end_strays() -> None:
    """End hosts that are not in the record."""
    for pid, folder in two_hosts.strays(_owner()).items():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def running() -> LocalNodes | None:
    """The local nodes that a launch left up; None without any. Removes the rest of nodes that have ended.

    Raises UsageError if another launch is starting nodes, or if the record is damaged.
    """
    with _lock(fcntl.LOCK_SH):
        return _verified(recorded())


def still_running(base_url: str) -> LocalNodes:
    """The running nodes, for a deployment that was launched on local nodes. Raises UsageError if they are gone."""
    nodes = running()
    if nodes is None:
        raise UsageError(f"the local Ray nodes that {base_url} was on are gone; launch it again")
    return nodes


def running_or_salvaged() -> LocalNodes | None:
    """As `running`, for a stop: also during another launch, and with what is readable of a damaged record."""
    try:
        return _verified(recorded())
    except UsageError:
        nodes = _salvage()
        if processes(nodes):
            return nodes
        stop(nodes)
        return None


def _verified(nodes: LocalNodes | None) -> LocalNodes | None:
    # On one of two hosts process numbers differ. The process outside that started this one has checked the nodes.
    inside = nodes is not None and INSIDE in os.environ and os.environ.get(MARKER) == nodes.id
    if nodes is None or inside or any(_belongs(pid, nodes) for pid in nodes.pids):
        return nodes
    stop(nodes)
    return None


def stop(nodes: LocalNodes) -> None:
    """End every process of the nodes and remove their files. Raises ClusterError if one will not end."""
    shared = _shared_memory(nodes)
    for number, wait_s in ((signal.SIGTERM, TERM_WAIT_S), (signal.SIGKILL, KILL_WAIT_S)):
        for pid in processes(nodes):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + wait_s
        while processes(nodes) and time.monotonic() < deadline:
            time.sleep(0.05)
    left = processes(nodes)
    for path in shared - _mapped(_all_pids()):
        path.unlink(missing_ok=True)
    two_hosts.reap()
    shutil.rmtree(nodes.temp_dir, ignore_errors=True)
    if left:
        raise ClusterError(f"processes {left} of the local Ray nodes do not end; kill them")
    with contextlib.suppress(UsageError):
        kept = recorded()
        if kept is not None and kept.id != nodes.id:
            return  # the record of other nodes, started meanwhile
    _state_file().unlink(missing_ok=True)


def processes(nodes: LocalNodes) -> list[int]:
    """Process numbers of the nodes, without this process."""
    return sorted(pid for pid in _all_pids() if pid != os.getpid() and _belongs(pid, nodes))


def note_shared_memory(nodes: LocalNodes) -> None:
    """Record the semaphores and segments in /dev/shm that the nodes' processes use now.

    With this record `stop` can remove them also after the processes were killed.
    """
    names = "".join(f"{path}\n" for path in sorted(_shared_memory(nodes)))
    with contextlib.suppress(OSError):
        (Path(nodes.temp_dir) / "shared-memory").write_text(names, encoding="utf-8")


def _shared_memory(nodes: LocalNodes) -> set[Path]:
    """Files of the nodes in /dev/shm: mapped now, and recorded. Empty on two hosts, which have their own /dev/shm."""
    if nodes.two_hosts is not None:
        return set()
    noted = Path(nodes.temp_dir) / "shared-memory"
    lines = noted.read_text(encoding="utf-8").splitlines() if noted.is_file() else []
    paths = {Path(line) for line in lines if _SHARED.fullmatch(line)} | _mapped(processes(nodes))
    return {path for path in paths if path.exists()}


def _mapped(pids: Iterable[int]) -> set[Path]:
    """Files of Python, UCX and vLLM in /dev/shm that these processes have mapped.

    Found by inode: glibc creates a semaphore under a temporary name, links it to its own name and removes the first.
    The maps keep the first name.
    """
    inodes = {inode for pid in pids for path, inode in mapped_files(pid).items() if "/dev/shm/" in path}
    paths = set()
    for path in Path("/dev/shm").glob("*"):
        with contextlib.suppress(OSError):
            if _SHARED.fullmatch(str(path)) and path.stat().st_ino in inodes:
                paths.add(path)
    return paths


def _all_pids() -> list[int]:
    import psutil

    return list(psutil.pids())


def _scratch(temp_dir: str) -> str:
    """Temporary folder of the nodes' processes. The name is short, because socket paths begin with it."""
    return f"{temp_dir}/t"


def keep_logs(nodes: LocalNodes) -> Path | None:
    """Copy the logs to the cache folder before `stop` removes them; returns their new folder (None without logs)."""
    kept = cache_dir() / "logs" / "last-failure"
    shutil.rmtree(kept, ignore_errors=True)
    with contextlib.suppress(OSError):  # no logs yet; or a file was removed meanwhile, and copytree copied the others
        shutil.copytree(nodes.logs, kept, ignore_dangling_symlinks=True)
    return kept if kept.is_dir() else None


def hold_port() -> tuple[socket.socket, int]:
    """(socket, port): a TCP port that is free on every interface, reserved until the socket is closed.

    The socket is bound and does not listen, so the kernel does not choose its port for another socket (bind to port 0,
    connect). A server can listen on the port if it sets SO_REUSEADDR, as HAProxy, gRPC, Ray Serve's proxy, vLLM and
    ZeroMQ do. Until then connections are refused.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    return held, int(held.getsockname()[1])


@contextlib.contextmanager
def _held(count: int, nodes: LocalNodes, number: int) -> Iterator[dict[int, socket.socket]]:
    """Reserve ``count`` ports in the network of that node for a block: port -> the socket that holds it."""
    with contextlib.ExitStack() as sockets:
        with network_of(nodes.host(number).pid if nodes.two_hosts else None):
            held = [hold_port() for _ in range(count)]
        yield {port: sockets.enter_context(one) for one, port in held}


def _ray_start(
    number: int, args: list[str], nodes: LocalNodes, ports: Mapping[int, socket.socket]
) -> subprocess.Popen[bytes]:
    """Start `ray start` as node ``number``. It inherits the sockets of ``ports`` and of the node's own ports.

    So the ports stay reserved: Ray listens on them seconds later, HAProxy when an application is deployed.
    """
    ray = shutil.which("ray", path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")]))
    if ray is None:
        raise ClusterError(not_installed("ray"))
    host = nodes.host(number) if nodes.two_hosts else None
    env = environment_on(host, nodes) if host else environment(nodes.id, nodes.temp_dir) | nodes.env
    env.pop("RAY_ADDRESS", None)  # `ray start --head` refuses it
    with (Path(nodes.temp_dir) / f"node-{number}.log").open("w") as log, _held(6, nodes, number) as own:
        metrics, stats, *agents = own
        # The default ports are fixed: HAProxy would not start beside another HAProxy.
        env |= {"RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics), "RAY_SERVE_HAPROXY_STATS_PORT": str(stats)}
        env[NODE_NUMBER] = str(number)
        command = [
            ray, "start", *args, "--block", "--disable-usage-stats", "--include-log-monitor=false",
            *_resources(nodes.node(number)), f"--object-store-memory={OBJECT_STORE_BYTES}",
            f"--node-ip-address={host.address if host else LOOPBACK}",
            *(f"--{flag}={port}" for flag, port in zip(AGENT_PORTS, agents, strict=True)),
            "--min-worker-port=0", "--max-worker-port=0",  # each worker chooses: two nodes would use the same range
        ]  # fmt: skip
        options: dict[str, Any] = {"env": env, "stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        options["pass_fds"] = [held.fileno() for held in (*ports.values(), *own.values())]
        options["start_new_session"] = True
        process = spawn_in(host.pid, command, **options) if host else subprocess.Popen(command, **options)
    two_hosts.CHILDREN.append(process)
    return process


def _resources(node: ClusterNode) -> list[str]:
    """Flags of `ray start` for the node's resources and name."""
    flags = [f"--num-cpus={node.cpus:g}", f"--num-gpus={node.gpus}", f"--labels={NODE_NAME_LABEL}={node.id}"]
    if node.gpus and node.gpu_type:
        flags.append(f"--resources={json.dumps({f'accelerator_type:{node.gpu_type}': 1})}")
    return flags


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
    raise ClusterError(f"Ray's head node did not start: {last_words(nodes, 1)}")


def await_joined(nodes: LocalNodes) -> None:
    """Return when every node has joined. Raises ClusterError if a node ends or does not join in time."""
    deadline = time.monotonic() + START_TIMEOUT_S
    for number in range(1, nodes.count + 1):
        _await_joined(nodes, number, deadline)


def _await_joined(nodes: LocalNodes, number: int, deadline: float) -> None:
    while JOINED not in _log(nodes, number):
        if not _belongs(nodes.pids[number - 1], nodes) or time.monotonic() > deadline:
            raise ClusterError(f"local Ray node {number} of {nodes.count} did not join: {last_words(nodes, number)}")
        time.sleep(0.05)


def ended(nodes: LocalNodes) -> int | None:
    """Number of a node whose `ray start` has ended; None without one, and always on one of the two hosts."""
    if INSIDE in os.environ:
        return None
    up = [_belongs(pid, nodes) for pid in nodes.pids]
    return up.index(False) + 1 if False in up else None


def last_words(nodes: LocalNodes, number: int) -> str:
    """The last lines that a node's `ray start` printed, in one line."""
    lines = [" ".join(line.split()) for line in _log(nodes, number).splitlines() if line.strip()]
    return " / ".join(lines[-LAST_LINES:]) if lines else "it logged nothing"


def _log(nodes: LocalNodes, number: int) -> str:
    try:
        return (Path(nodes.temp_dir) / f"node-{number}.log").read_text(errors="replace")
    except OSError:
        return ""


def _belongs(pid: int, nodes: LocalNodes) -> bool:
    """Whether the process has the nodes' marker or writes its output to the nodes' folder.

    A process that changes its title overwrites its readable environment, as Ray's workers and vLLM's engines do.
    """
    with contextlib.suppress(OSError):
        if inherited(pid, f"{MARKER}={nodes.id}"):
            return True
    # An agent of Ray first writes to pipes; it is found by the raylet's log, which it inherits.
    agent = "".join(machine.command_line(pid)[:1]).startswith("ray::")
    return machine.writes_below(pid, nodes.temp_dir, through_any=agent)


@contextlib.contextmanager
def _lock(kind: int) -> Iterator[None]:
    """Let only one launch at a time start local nodes. Raises UsageError in another one."""
    lock = cache_dir() / "local.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder_text = holder(launch_lock(local=True)) or "another process"
            raise UsageError(f"{holder_text} is starting local Ray nodes; try again when it is ready") from error
        yield


def recorded() -> LocalNodes | None:
    """The nodes of the record, up or not; None without a record. Raises UsageError if the record is damaged."""
    state = _state_file()
    if not state.exists():
        return None
    try:
        return load_yaml(state, LocalNodes)
    except UsageError as error:
        raise UsageError(f"{error}; {LAUNCH} --shutdown removes it and ends its processes") from error


def _write(nodes: LocalNodes) -> None:
    replace(_state_file(), to_yaml(nodes).encode())


def _salvage() -> LocalNodes:
    """The nodes of a damaged record, with its marker and folder if they are readable."""
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
