"""Facts of nodes (`pdlab.node_probe`) -> findings: what stands in the way of a fast and correct KV transfer. Pure.

Every finding says what was seen, what follows from it, and what to do. ``error``: a PD deployment fails,
or transfers are wrong or many times too slow. ``warning``: slower, or fails under some conditions.
``note``: worth knowing. A rule that lacks its facts says nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pdlab.ucx_table import failed_modules

Severity = Literal["error", "warning", "note"]
Facts = Mapping[str, Mapping[str, Any]]  # node -> facts

ORDER: tuple[Severity, ...] = ("error", "warning", "note")
DEBUG_LEVELS = {"debug", "trace", "trace_req", "trace_data", "trace_async", "trace_func", "trace_poll", "data", "func"}
SAME_NODE_GPU = {"cuda_ipc", "cuda", "all"}
SAME_NODE_HOST = {"cma", "sm", "shm", "all", "knem", "xpmem"}
NETWORK = {"tcp", "srd", "ud", "rc", "dc", "ib", "efa", "all"}
MAX_SKEW_S = 1.0
EFA_GBIT_PER_S = 100  # of one EFA device of a p5.48xlarge


@dataclass(frozen=True)
class Finding:
    """One thing seen on ``nodes``."""

    severity: Severity
    topic: str
    nodes: tuple[str, ...]
    evidence: str
    consequence: str
    fix: str


def diagnose(facts: Facts, *, asked_s: tuple[float, float] | None = None) -> list[Finding]:
    """All findings, worst first. ``asked_s``: the asker's clock before the question and after the answers."""
    found = [finding for rule in RULES for finding in rule(facts)]
    if asked_s is not None:
        found += _clocks(facts, asked_s)
    return sorted(_joined(found), key=lambda finding: (ORDER.index(finding.severity), finding.topic))


def _joined(findings: Sequence[Finding]) -> list[Finding]:
    """The same finding on several nodes is one finding."""
    merged: dict[tuple[str, ...], Finding] = {}
    for finding in findings:
        key = (finding.severity, finding.topic, finding.evidence, finding.consequence, finding.fix)
        before = merged.get(key)
        nodes = (*before.nodes, *finding.nodes) if before else finding.nodes
        merged[key] = Finding(finding.severity, finding.topic, nodes, *key[2:])
    return list(merged.values())


def _versions(facts: Facts) -> Iterator[Finding]:
    names = sorted({name for fact in facts.values() for name in fact.get("versions", {})})
    for name in names:
        by_node = {node: fact["versions"].get(name) for node, fact in facts.items() if "versions" in fact}
        if len(set(by_node.values())) > 1:
            told = ", ".join(f"{node} {version or 'none'}" for node, version in by_node.items())
            yield Finding(
                "error" if name in ("vllm", "nixl") else "warning",
                f"{name} version",
                tuple(by_node),
                told,
                "the NIXL handshake compares hashes of vLLM and connector: transfers are refused"
                if name in ("vllm", "nixl")
                else "nodes behave differently",
                f"install the same {name} on every node (requirements.txt)",
            )
        elif name in ("vllm", "nixl") and set(by_node.values()) == {None}:
            yield Finding(
                "error",
                f"{name} version",
                tuple(by_node),
                f"{name} is not installed for the Python that Ray runs",
                "no engine starts" if name == "vllm" else "no KV transfer is possible",
                "make setup-gpu on the node, in the environment of `ray start`",
            )


def _ucx_versions(facts: Facts) -> Iterator[Finding]:
    used = {node: fact["loaded"].get("ucx") for node, fact in facts.items() if fact.get("loaded", {}).get("ucx")}
    if len(set(used.values())) > 1:
        told = ", ".join(f"{node} {version}" for node, version in used.items())
        yield Finding(
            "error",
            "UCX version",
            tuple(used),
            told,
            "UCX of different versions may choose different protocols, or fail to talk",
            "use the same UCX on every node: unset LD_LIBRARY_PATH, or debug/install_on_nodes.py",
        )
    for node, version in used.items():
        old = tuple(int(part) for part in version.split(".")[:2]) < (1, 20)
        if old and any(device["driver"] == "efa" for device in facts[node].get("rdma", ())):
            yield Finding(
                "error",
                "UCX version",
                (node,),
                f"UCX {version} with EFA devices",
                "SRD without zero-copy get: every read is emulated in software",
                "UCX 1.20 or later: debug/build_nixl_ucx_efa.sh",
            )


def _system_ucx(facts: Facts) -> Iterator[Finding]:
    for node, fact in facts.items():
        loaded = [path for path in fact.get("loaded", {}).get("libraries", ()) if "libucp" in path]
        outside = [path for path in loaded if "nixl_cu" not in path]
        if outside and len(loaded) > 1:
            yield Finding(
                "error",
                "UCX twice",
                (node,),
                ", ".join(loaded),
                "two copies of UCX in one process: crashes, or settings that reach only one",
                "unset LD_LIBRARY_PATH and LD_PRELOAD, or use a NIXL built against the system's UCX",
            )
        elif outside:
            yield Finding(
                "note",
                "UCX of the system",
                (node,),
                outside[0],
                "NIXL runs on this UCX instead of the one in its wheel",
                "intended if you built it (debug/build_nixl_ucx_efa.sh); check that every node has it",
            )


def _duplicates(facts: Facts) -> Iterator[Finding]:
    for node, fact in facts.items():
        libraries = fact.get("loaded", {}).get("libraries", ())
        by_name: dict[str, set[str]] = {}
        for path in libraries:
            match = re.match(r"(lib(?:ibverbs|efa|nl-3|nl-route-3|rdmacm))", Path(path).name)
            if match:
                by_name.setdefault(match[1], set()).add(path)
        for name, paths in by_name.items():
            if len(paths) > 1:
                yield Finding(
                    "error",
                    f"{name} twice",
                    (node,),
                    ", ".join(sorted(paths)),
                    "two copies keep two lists of devices: UCX sees none and falls back to TCP without a word",
                    "build NIXL and UCX against the system's rdma-core (debug/build_nixl_ucx_efa.sh)",
                )


def _efa(facts: Facts) -> Iterator[Finding]:
    for node, fact in facts.items():
        devices = [device for device in fact.get("rdma", ()) if device["driver"] == "efa"]
        if not devices:
            continue
        closed = [device["name"] for device in devices if not device["usable"]]
        if closed:
            yield Finding(
                "error",
                "EFA not usable",
                (node,),
                f"{len(closed)} of {len(devices)} EFA devices cannot be opened ({closed[0]})",
                "UCX and libfabric do not see them: transfers go over TCP, some hundred times slower",
                "give the process /dev/infiniband (containers: --device /dev/infiniband/uverbsN), rw",
            )
        system = fact.get("system_libraries", {})
        if "libefa" not in system:
            yield Finding(
                "error",
                "libefa missing",
                (node,),
                "EFA devices, but the dynamic loader finds no libefa",
                "UCX's EFA module does not load, and says so only with UCX_MODULE_LOG_LEVEL=info",
                "install the EFA installer's rdma-core (docs/setup.md)",
            )
        bundled = [path for path in fact.get("bundled_libraries", ()) if "libibverbs" in path]
        newer = _abi(system.get("libibverbs", ())), _abi(bundled)
        if newer[0] and newer[1] and newer[0] > newer[1]:
            yield Finding(
                "warning",
                "rdma-core ABI",
                (node,),
                f"libibverbs 1.14.{newer[0]} of the system, 1.14.{newer[1]} in the nixl wheel",
                "providers of a newer rdma-core do not load into an older libibverbs: UCX may see no EFA",
                "prove the wire with debug/test_nixl_connector_ray.py; if it is not srd, debug/build_nixl_ucx_efa.sh",
            )
        rails = fact.get("environment", {}).get("UCX_MAX_RMA_RAILS")
        per_gpu = len(devices) // max(fact.get("gpus", 0), 1)
        if per_gpu > 2 and (rails is None or int(rails) < per_gpu):
            yield Finding(
                "warning",
                "rails",
                (node,),
                f"{per_gpu} EFA devices per GPU, UCX_MAX_RMA_RAILS {rails or 'not set (2)'}",
                f"a transfer uses {rails or 2} of {per_gpu} devices: at most {int(rails or 2) * EFA_GBIT_PER_S / 8:g} "
                f"of {per_gpu * EFA_GBIT_PER_S / 8:g} GB/s",
                f"UCX_MAX_RMA_RAILS={per_gpu} on every node",
            )


def _abi(paths: Sequence[str]) -> int | None:
    """``libibverbs.so.1.14.57.0`` is of rdma-core 57."""
    numbers = [int(match[1]) for path in paths if (match := re.search(r"\.so\.1\.14\.(\d+)\.", path))]
    return max(numbers, default=None)


def _modules(facts: Facts) -> Iterator[Finding]:
    for node, fact in facts.items():
        loaded = fact.get("loaded")
        if not loaded:
            continue
        efa = any(device["driver"] == "efa" for device in fact.get("rdma", ()))
        for module, why in failed_modules(loaded.get("log", "")).items():
            wanted = (efa and "efa" in module) or (fact.get("gpus") and "cuda" in module)
            yield Finding(
                "error" if wanted else "note",
                f"UCX module {module}",
                (node,),
                why,
                "UCX goes on without it, silently" + ("" if wanted else "; nothing on this node needs it"),
                "install what it names" if wanted else "nothing to do here",
            )


def _backends(facts: Facts) -> Iterator[Finding]:
    for node, fact in facts.items():
        loaded = fact.get("loaded")
        if not loaded:
            continue
        if loaded.get("error"):
            yield Finding(
                "error",
                "NIXL",
                (node,),
                loaded["error"],
                "no KV transfer is possible",
                "reinstall nixl for this Python (requirements.txt); see the log in --json",
            )
        for name, why in loaded.get("backends", {}).items():
            if why:
                yield Finding(
                    "error",
                    f"NIXL backend {name}",
                    (node,),
                    why,
                    "its plugin is there or not, but it does not load: a deployment that asks for it fails",
                    "another --kv-backend, or install what the plugin needs (docs/debugging.md)",
                )


def _log_levels(facts: Facts) -> Iterator[Finding]:
    for node, fact in facts.items():
        for name in ("NIXL_LOG_LEVEL", "UCX_LOG_LEVEL"):
            value = fact.get("environment", {}).get(name, "")
            if value.lower() in DEBUG_LEVELS:
                yield Finding(
                    "error",
                    "debug logging",
                    (node,),
                    f"{name}={value}",
                    "KV transfers are 5 to 10 times slower while it is on",
                    f"unset {name} where `ray start` runs, and restart Ray there",
                )


def _ucx_settings(facts: Facts) -> Iterator[Finding]:
    for node, fact in facts.items():
        env = fact.get("environment", {})
        yield from _tls(node, fact, env.get("UCX_TLS"))
        devices = env.get("UCX_NET_DEVICES", "")
        known = {*fact.get("interfaces", ()), *(device["name"] for device in fact.get("rdma", ()))}
        missing = [d for d in devices.split(",") if d and d != "all" and d.split(":")[0] not in known]
        if missing:
            yield Finding(
                "error",
                "UCX_NET_DEVICES",
                (node,),
                f"UCX_NET_DEVICES={devices}; this node has {', '.join(sorted(known)) or 'none'}",
                "UCX uses the named devices only: no transport between nodes",
                "unset UCX_NET_DEVICES, or name devices that every node has",
            )
        if env.get("UCX_PROTO_EMULATION_ENABLE", "").lower() in ("n", "no", "0", "off"):
            yield Finding(
                "note",
                "UCX emulation",
                (node,),
                f"UCX_PROTO_EMULATION_ENABLE={env['UCX_PROTO_EMULATION_ENABLE']}",
                "a silent fallback to software becomes an error: good on EFA; TCP reads fail",
                "leave it on EFA; set y where TCP is the wire",
            )


def _tls(node: str, fact: Mapping[str, Any], value: str | None) -> Iterator[Finding]:
    if not value or value.startswith("^"):
        return
    names = {part.strip().split(":")[0] for part in value.split(",") if part.strip()}
    text = f"UCX_TLS={value}"
    efa = any(device["driver"] == "efa" for device in fact.get("rdma", ()))
    if not names & NETWORK:
        yield Finding(
            "error",
            "UCX_TLS",
            (node,),
            text,
            "no transport with error handling and none between nodes: NIXL fails to create its UCX backend",
            "unset UCX_TLS, or add tcp (or srd on EFA)",
        )
    elif efa and not names & (NETWORK - {"tcp"}):
        yield Finding(
            "error",
            "UCX_TLS",
            (node,),
            text,
            "EFA devices are there and left out: KV crosses nodes over TCP, some hundred times slower",
            "unset UCX_TLS, or add srd",
        )
    if fact.get("gpus") and not names & SAME_NODE_GPU:
        yield Finding(
            "warning",
            "UCX_TLS",
            (node,),
            text,
            "without cuda_ipc GPUs of one node exchange KV through host memory or the network",
            "add cuda_ipc,cuda_copy",
        )
    elif not fact.get("gpus") and not names & SAME_NODE_HOST:
        yield Finding(
            "warning",
            "UCX_TLS",
            (node,),
            text,
            "without sm (cma) engines of one machine exchange KV over the loopback network",
            "add sm, or unset UCX_TLS",
        )


def _limits(facts: Facts) -> Iterator[Finding]:
    for node, fact in facts.items():
        if fact.get("rdma") and fact.get("memlock") is not None:
            yield Finding(
                "error",
                "memlock",
                (node,),
                f"at most {fact['memlock'] / 2**20:.0f} MiB of memory may be locked",
                "RDMA registers the whole KV cache: registration fails, or falls back to TCP",
                "ulimit -l unlimited where `ray start` runs (limits.conf, LimitMEMLOCK, docker --ulimit memlock=-1)",
            )
        if any(device["driver"] == "efa" for device in fact.get("rdma", ())) and fact.get("hugepages") == 0:
            yield Finding(
                "note",
                "huge pages",
                (node,),
                "HugePages_Total: 0",
                "libfabric's EFA provider uses them for its buffers where there are some",
                "the EFA installer reserves them; not needed for UCX",
            )


def _gpus(facts: Facts) -> Iterator[Finding]:
    for node, fact in facts.items():
        visible = fact.get("environment", {}).get("NVIDIA_VISIBLE_DEVICES")
        if fact.get("gpus") and visible not in (None, "all") and len(visible.split(",")) < fact["gpus"]:
            yield Finding(
                "warning",
                "GPU visibility",
                (node,),
                f"NVIDIA_VISIBLE_DEVICES={visible}, the node has {fact['gpus']} GPUs",
                "cuda_ipc needs both GPUs in sight of both processes: pack placement goes through host memory",
                "run one container per node with all its GPUs, and let Ray hand them out",
            )


def _namespaces(facts: Facts) -> Iterator[Finding]:
    machines: dict[str, list[str]] = {}
    for node, fact in facts.items():
        if fact.get("boot"):
            machines.setdefault(fact["boot"], []).append(node)
    for nodes in machines.values():
        for kind in ("pid", "ipc"):
            spaces = {facts[node].get("namespaces", {}).get(kind) for node in nodes}
            if len(spaces) > 1:
                yield Finding(
                    "warning",
                    f"{kind} namespaces",
                    tuple(nodes),
                    f"Ray nodes of one machine in {len(spaces)} {kind} namespaces (containers)",
                    "no shared memory and no cuda_ipc between them: their KV goes over the network",
                    f"one Ray node per machine, or containers with --{kind}=host",
                )


def _ports(facts: Facts) -> Iterator[Finding]:
    for node, fact in facts.items():
        taken = fact.get("ports_taken")
        if taken:
            yield Finding(
                "error",
                "side-channel port",
                (node,),
                f"taken: {', '.join(map(str, taken[:5]))}" + (" ..." if len(taken) > 5 else ""),
                "the engine that wants it cannot start, or peers shake hands with a stranger",
                "stop what listens there (ss -ltnp), or wait for an earlier deployment to end",
            )


def _addresses(facts: Facts) -> Iterator[Finding]:
    machines = {fact.get("boot") for fact in facts.values()}
    for node, fact in facts.items():
        told = fact.get("advertised")
        if not told:
            continue
        if not told["mine"]:
            yield Finding(
                "error",
                "advertised host",
                (node,),
                f"VLLM_NIXL_SIDE_CHANNEL_HOST={told['host']} is no address of this node",
                "peers shake hands with another machine, or with nobody",
                "unset it: Ray sets each node's own address",
            )
        elif told.get("loopback") and len(machines) > 1:
            yield Finding(
                "error",
                "advertised host",
                (node,),
                f"VLLM_NIXL_SIDE_CHANNEL_HOST={told['host']} on a cluster of several machines",
                "peers on other machines shake hands with themselves",
                "unset it: Ray sets each node's own address",
            )


def _auth(facts: Facts) -> Iterator[Finding]:
    known = {node: fact["auth"] for node, fact in facts.items() if fact.get("auth")}
    on = {node: auth for node, auth in known.items() if auth.get("mode") == "token"}
    without = [node for node, auth in on.items() if not auth["token"]]
    if without:
        yield Finding(
            "error",
            "Ray token",
            tuple(without),
            "RAY_AUTH_MODE=token, and neither RAY_AUTH_TOKEN nor a token file",
            "Ray refuses this node's calls",
            "copy ~/.ray/auth_token of the head node there (ray get-auth-token)",
        )
    if len({auth["token"] for auth in on.values() if auth["token"]}) > 1:
        yield Finding(
            "error",
            "Ray token",
            tuple(on),
            "nodes have different tokens",
            "Ray refuses calls between them",
            "one token everywhere: copy ~/.ray/auth_token of the head node",
        )


def _shadowed(facts: Facts) -> Iterator[Finding]:
    for name in ("vllm", "nixl"):
        found = {node: fact.get("modules", {}).get(name) for node, fact in facts.items()}
        for node, path in found.items():
            if path and "site-packages" not in path and "dist-packages" not in path:
                yield Finding(
                    "warning",
                    f"{name} from elsewhere",
                    (node,),
                    path,
                    "what is imported is not the installed package: versions above may not be what runs",
                    "look at PYTHONPATH and the working directory of `ray start`",
                )


def _clocks(facts: Facts, asked_s: tuple[float, float]) -> Iterator[Finding]:
    before, after = asked_s
    for node, fact in facts.items():
        now = fact.get("time_s")
        if now is None:
            continue
        off = max(before - now, now - after, 0.0)
        if off > MAX_SKEW_S:
            yield Finding(
                "warning",
                "clock",
                (node,),
                f"its clock is {off:.1f} s off",
                "log lines and KV leases of different nodes cannot be compared",
                "run a time service (chrony) on every node",
            )


Rule = Callable[[Facts], Iterator[Finding]]
RULES: tuple[Rule, ...] = (
    _versions,
    _ucx_versions,
    _system_ucx,
    _duplicates,
    _efa,
    _modules,
    _backends,
    _log_levels,
    _ucx_settings,
    _limits,
    _gpus,
    _namespaces,
    _ports,
    _addresses,
    _auth,
    _shadowed,
)


def render(facts: Facts, findings: Sequence[Finding]) -> str:
    """Nodes, then findings with what follows and what to do, then one line that sums up."""
    lines = []
    for node, fact in facts.items():
        versions = ", ".join(f"{name} {version or '-'}" for name, version in fact.get("versions", {}).items())
        loaded = fact.get("loaded") or {}
        ucx = f", UCX {loaded['ucx']} ({_whose(loaded['libraries'])})" if loaded.get("ucx") else ""
        efa = sum(device["driver"] == "efa" for device in fact.get("rdma", ()))
        lines.append(f"{node}  {fact.get('host')}: {versions}{ucx}; {fact.get('gpus', 0)} GPUs, {efa} EFA devices")
        works = [name for name, why in loaded.get("backends", {}).items() if why is None]
        if loaded:
            lines.append(f"  NIXL backends that load: {', '.join(works) or 'none'}")
    for finding in findings:
        where = ", ".join(finding.nodes) if len(finding.nodes) < len(facts) or len(facts) == 1 else "every node"
        lines += ["", f"{finding.severity.upper()}  {finding.topic}  [{where}]", f"  seen: {finding.evidence}"]
        lines += [f"  then: {finding.consequence}", f"  do:   {finding.fix}"]
    return "\n".join([*lines, "", summary(findings)])


def summary(findings: Sequence[Finding]) -> str:
    """One line."""
    counts = [(severity, sum(f.severity == severity for f in findings)) for severity in ORDER]
    told = ", ".join(f"{number} {severity}{'' if number == 1 else 's'}" for severity, number in counts if number)
    return f"doctor: {told or 'nothing found'}"


def as_json(facts: Facts, findings: Sequence[Finding]) -> dict[str, Any]:
    """For scripts: everything that was asked, and everything that was found."""
    return {"nodes": dict(facts), "findings": [asdict(finding) for finding in findings]}


def _whose(libraries: Sequence[str]) -> str:
    paths = [path for path in libraries if "libucp" in path]
    return "bundled with nixl" if paths and "nixl_cu" in paths[0] else paths[0] if paths else "?"
