"""Rules of the doctor: environment, limits, namespaces, ports, addresses, tokens, clocks. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from pdlab.cluster.machine import SPAWNED
from pdlab.core.commands import LAUNCH
from pdlab.core.deployment import Pool
from pdlab.core.nodes import Role
from pdlab.core.text import counted
from pdlab.transfer.doctor.findings import ONE_MACHINE, DoctorFinding, Facts, Rule

DEBUG_LEVELS = {"debug", "trace", "trace_req", "trace_data", "trace_async", "trace_func", "trace_poll", "data", "func"}
MAX_SKEW_S = 1.0
SIDE_CHANNEL_BASES = {"prefill": 20000, "decode": 22000, "fluid": 20000}  # Ray Serve LLM 2.60


class ListeningProcess(NamedTuple):
    """A kind of listening process. ``pattern``: of its command line or title. ``can``: what a caller can do. ``token``:
    Ray's token protects it."""

    pattern: str
    name: str
    can: str
    token: bool


LISTENING = (
    ListeningProcess(r"/gcs_server\b", "Ray's GCS", "runs code on every node (starts actors)", True),
    ListeningProcess(
        r"/raylet/raylet\b", "raylet", "runs code on this node (starts workers), reads and writes objects", True
    ),
    ListeningProcess(
        r"^ray::DashboardAgent",
        "Ray's dashboard agent",
        "runs commands (job API) and reads logs; metrics, without a token",
        True,
    ),
    ListeningProcess(r"^ray::RuntimeEnvAgent", "Ray's runtime-env agent", "runs code (runtime environments)", True),
    ListeningProcess(r"ray\.util\.client\.server", "Ray Client server", "runs code on the cluster", True),
    ListeningProcess(
        r"ray/dashboard/dashboard\.py", "Ray's dashboard", "runs commands (job API); metrics, without a token", True
    ),
    ListeningProcess(r"ray/autoscaler/\S*monitor\.py", "Ray's autoscaler monitor", "reads its metrics", False),
    ListeningProcess(
        r"/haproxy\b", "Ray Serve's HAProxy", "uses the served endpoint, or reads statistics and metrics", False
    ),
    ListeningProcess(
        r"^VLLM::|RayWorkerWrapper",
        "vLLM's engine (NIXL side channel, UCX)",
        "reads where KV blocks are, and with that reads and writes them: KV cache of other requests",
        False,
    ),
    ListeningProcess(
        re.escape(SPAWNED),
        "a process of Python's multiprocessing, as an engine of vLLM without a title is",
        "reads and writes KV blocks, if it is an engine",
        False,
    ),
    ListeningProcess(
        r"^ray::ProxyActor", "Ray Serve's proxy", "uses the served endpoint, or runs code (gRPC of a worker)", True
    ),
    ListeningProcess(
        r"^ray::ServeReplica", "Ray Serve's replica", "runs code (gRPC), or uses an engine where it serves HTTP", True
    ),
    ListeningProcess(r"^ray::", "Ray's worker", "runs code in it", True),
)
ENGINES = ("VLLM::", "ray::")  # titles of vLLM's and Ray's processes


def side_channel_ports(pools: Mapping[Role, Pool]) -> tuple[int, ...]:
    """Side-channel ports of the engines of pools (role -> pool), one per engine.

    Ray Serve LLM 2.60 uses base + rank x devices for a replica (kv_transfer/base.py). For a data-parallel engine it
    uses base + rank, and vLLM adds the rank once more (nixl/base_scheduler.py).
    """
    ports: list[int] = []
    for role, pool in pools.items():
        base = SIDE_CHANNEL_BASES[role]
        count, step = (pool.dp, 2) if pool.dp > 1 else (pool.replicas, pool.tp * pool.pp)
        ports += [base + step * rank for rank in range(count)]
    return tuple(ports)


def _exported_port(facts: Facts) -> Iterator[DoctorFinding]:
    for node, fact in facts.items():
        value = fact.get("environment", {}).get("VLLM_NIXL_SIDE_CHANNEL_PORT")
        if value is not None:
            yield DoctorFinding(
                "error",
                "exported_port",
                (node,),
                f"VLLM_NIXL_SIDE_CHANNEL_PORT={value}",
                "every engine of the node uses that one port: the second waits for it for ever and logs nothing",
                "unset it where `ray start` runs, and restart Ray there",
            )


def _log_levels(facts: Facts) -> Iterator[DoctorFinding]:
    for node, fact in facts.items():
        for name in ("NIXL_LOG_LEVEL", "UCX_LOG_LEVEL"):
            value = fact.get("environment", {}).get(name, "")
            if value.lower() in DEBUG_LEVELS:
                yield DoctorFinding(
                    "error",
                    "debug_logging",
                    (node,),
                    f"{name}={value}",
                    "KV transfers are 5 to 10 times slower",
                    f"unset {name} where `ray start` runs, and restart Ray there",
                )


def _gpus(facts: Facts) -> Iterator[DoctorFinding]:
    for node, fact in facts.items():
        visible = fact.get("environment", {}).get("NVIDIA_VISIBLE_DEVICES")
        if fact.get("gpus") and visible not in (None, "all") and len(visible.split(",")) < fact["gpus"]:
            yield DoctorFinding(
                "warning",
                "gpu_visibility",
                (node,),
                f"NVIDIA_VISIBLE_DEVICES={visible}, the node has {counted(fact['gpus'], 'GPU')}",
                "cuda_ipc needs both GPUs visible to both processes: in a pack, KV cache moves through host memory",
                "run one container per node with all its GPUs, and let Ray assign them",
                ("gpu peer",),
            )


def _allocator(facts: Facts) -> Iterator[DoctorFinding]:
    """With a KV connector vLLM 0.29 refuses the setting in the first variable (config/vllm.py,
    _verify_kv_transfer_compat). It does not check the second one, which PyTorch reads too."""
    for node, fact in facts.items():
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            value = fact.get("environment", {}).get(name, "")
            if fact.get("gpus") and re.search(r"expandable_segments\s*:\s*true", value, re.IGNORECASE):
                yield DoctorFinding(
                    "error",
                    "allocator",
                    (node,),
                    f"{name}={value}",
                    "KV cache is in memory that PyTorch may map again: cuda_ipc cannot open it, and registrations of "
                    "a NIC become stale; if vLLM detects it, no engine with a KV transfer starts",
                    f"take expandable_segments out of {name} where `ray start` runs, and restart Ray there",
                    name=name,
                )


def _namespaces(facts: Facts) -> Iterator[DoctorFinding]:
    machines: dict[str, list[str]] = {}
    for node, fact in facts.items():
        if fact.get("boot"):
            machines.setdefault(fact["boot"], []).append(node)
    for nodes in machines.values():
        for kind in ("pid", "ipc"):
            spaces = {facts[node].get("namespaces", {}).get(kind) for node in nodes}
            if len(spaces) > 1:
                yield DoctorFinding(
                    "warning",
                    "namespaces",
                    tuple(nodes),
                    f"Ray nodes of one machine in {len(spaces)} {kind} namespaces (containers)",
                    "there is no shared memory and no cuda_ipc between them: their KV cache uses the network",
                    f"one Ray node per machine, or containers with --{kind}=host",
                    ONE_MACHINE,
                    name=kind,
                )


def _ports(facts: Facts) -> Iterator[DoctorFinding]:
    for node, fact in facts.items():
        holders = {port: fact.get("port_holders", {}).get(str(port), "unknown") for port in fact.get("ports_taken", ())}
        engines = {port: holder for port, holder in holders.items() if holder.startswith(ENGINES) or SPAWNED in holder}
        strangers = {port: holder for port, holder in holders.items() if port not in engines}
        if strangers:
            yield DoctorFinding(
                "error",
                "side_channel_port",
                (node,),
                _holders_text(strangers),
                "the engine that needs the port cannot start, or peers shake hands with another process",
                "stop the process that listens there (ss -ltnp)",
            )
        if engines:
            yield DoctorFinding(
                "note",
                "side_channel_port",
                (node,),
                _holders_text(engines),
                "expected while that deployment serves; otherwise a new deployment finds its port taken",
                f"run {LAUNCH} --shutdown to end the remaining engines",
            )


def _holders_text(holders: Mapping[int, str]) -> str:
    holder_texts = [f"{port} ({holder})" for port, holder in holders.items()]
    return f"taken: {', '.join(holder_texts[:4])}" + (
        f" and {len(holder_texts) - 4} more" if len(holder_texts) > 4 else ""
    )


def _addresses(facts: Facts) -> Iterator[DoctorFinding]:
    machines = {fact.get("boot") for fact in facts.values()}
    for node, fact in facts.items():
        advertised = fact.get("advertised")
        if not advertised:
            continue
        if not advertised["mine"]:
            yield DoctorFinding(
                "error",
                "advertised_host",
                (node,),
                f"VLLM_NIXL_SIDE_CHANNEL_HOST={advertised['host']} is not an address of this node",
                "peers shake hands with another machine, or with none",
                "unset it: Ray sets each node's own address",
            )
        elif advertised.get("loopback") and len(machines) > 1:
            yield DoctorFinding(
                "error",
                "advertised_host",
                (node,),
                f"VLLM_NIXL_SIDE_CHANNEL_HOST={advertised['host']} on a cluster of several machines",
                "peers on other machines shake hands with themselves",
                "unset it: Ray sets each node's own address",
            )


def _auth(facts: Facts) -> Iterator[DoctorFinding]:
    auth_by_node = {node: fact["auth"] for node, fact in facts.items() if fact.get("auth")}
    token_nodes = {node: auth for node, auth in auth_by_node.items() if auth.get("mode") == "token"}
    nodes_without_token = [node for node, auth in token_nodes.items() if not auth["token"]]
    if nodes_without_token:
        yield DoctorFinding(
            "error",
            "ray_token",
            tuple(nodes_without_token),
            "RAY_AUTH_MODE=token, and neither RAY_AUTH_TOKEN nor a token file",
            "Ray refuses the calls of this node",
            "copy ~/.ray/auth_token of the head node there (ray get-auth-token)",
        )
    if len({auth["token"] for auth in token_nodes.values() if auth["token"]}) > 1:
        yield DoctorFinding(
            "error",
            "ray_token",
            tuple(token_nodes),
            "nodes have different tokens",
            "Ray refuses calls between them",
            "use one token everywhere: copy ~/.ray/auth_token of the head node",
        )


def _open_ports(facts: Facts) -> Iterator[DoctorFinding]:
    for node, fact in facts.items():
        guarded = fact.get("auth", {}).get("mode") == "token"
        by_kind: dict[ListeningProcess, list[str]] = {}
        foreign: list[str] = []
        for port in fact.get("open_ports", ()):
            kind = _listening(port["process"])
            if kind is None:
                foreign.append(f"{port['host']} port {port['port']} ({_short(port['process'])})")
            else:
                by_kind.setdefault(kind, []).append(f"{port['host']} port {port['port']}")
        for kind, places in by_kind.items():
            risky = kind.token and not guarded
            yield DoctorFinding(
                "warning" if risky or not kind.token else "note",
                "open_port",
                (node,),
                f"{kind.name} listens beyond loopback: {', '.join(places)}",
                f"a caller that reaches it {kind.can}" + (", with Ray's token" if kind.token and guarded else ""),
                ("start Ray with RAY_AUTH_MODE=token, and " if risky else "")
                + "allow access from the cluster's own nodes only (docs/security.md)",
            )
        if foreign:
            yield DoctorFinding(
                "note",
                "open_port",
                (node,),
                f"other processes listen beyond loopback: {', '.join(foreign)}",
                "by their names they do not belong to Ray or vLLM",
                "none for pdlab; close ports that are not needed",
            )


def _listening(process: str | None) -> ListeningProcess | None:
    """The kind of a process; None for other programs, and if the doctor may not inspect it."""
    return next((kind for kind in LISTENING if process and re.search(kind.pattern, process)), None)


def _short(process: str | None) -> str:
    if process is None:
        return "a process that only root can inspect"
    words = process.split()
    return words[0].rpartition("/")[2] if words else "a process without a name"


class QueryClock(NamedTuple):
    """This machine's clock before a query and after the answers, seconds since the epoch."""

    before_s: float
    after_s: float


def clocks(facts: Facts, query_clock: QueryClock) -> Iterator[DoctorFinding]:
    for node, fact in facts.items():
        now = fact.get("time_s")
        if now is None:
            continue
        offset_s = max(query_clock.before_s - now, fact.get("answered_s", now) - query_clock.after_s, 0.0)
        if offset_s > MAX_SKEW_S:
            yield DoctorFinding(
                "warning",
                "clock_differs",
                (node,),
                f"its clock differs by {offset_s:.1f} s",
                "log lines and KV leases of different nodes cannot be compared",
                "run a time service (chrony) on every node",
            )


RULES: tuple[Rule, ...] = (
    _log_levels,
    _exported_port,
    _gpus,
    _allocator,
    _namespaces,
    _ports,
    _addresses,
    _auth,
    _open_ports,
)
