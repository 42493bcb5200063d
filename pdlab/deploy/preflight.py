"""Run the doctor before a deployment starts; an error stops the launch. The doctor uses the rules of the wires that the
deployment will use. If EFA, InfiniBand or RoCE lies between prefill and decode, every node loads UCX to prove that it
finds the devices.
"""

from __future__ import annotations

import time
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from pdlab.cluster.connection import Cluster
from pdlab.core.commands import RUN_DOCTOR
from pdlab.core.deployment import Collocated, Deployment
from pdlab.core.errors import DeployError
from pdlab.core.nodes import NODE_ID_LABEL, ClusterView, Placement
from pdlab.core.text import byte_size
from pdlab.deploy.serve_config import engine_env, host_copy_bytes, host_copy_source
from pdlab.deploy.wire_proof import planned_wires
from pdlab.remote import node
from pdlab.transfer.doctor import diagnosis, engine_rules, settings_rules
from pdlab.transfer.doctor.findings import FABRIC, NETWORK, ONE_MACHINE, SPANNING, Concern, DoctorFinding, Facts

PORT_WAIT_S = 20.0
"""Engines of an application that was just taken down hold their side-channel ports until their process has ended:
seconds on a loaded machine."""


LIBFABRIC = "LIBFABRIC"
WIRES = (*NETWORK, *ONE_MACHINE)


def examine(
    cluster: Cluster,
    deployment: Deployment,
    view: ClusterView,
    placement: Placement,
    print_line: Callable[[str], None],
    *,
    model: str | None = None,
    choose: bool = False,
    accept: str | None = None,
) -> Deployment:
    """Examine every node and print the warnings. Raises DeployError for a finding that would break the deployment.

    Rules of a wire that the deployment does not use are not applied. ``accept``: a wire that may take the place of the
    planned network. ``model``: the model of the engines, whose files are checked.

    Returns the deployment: with ``choose`` a spread over EFA nodes moves its KV cache by LIBFABRIC where that loads
    on every node, as NIXL itself recommends there (nixl_agent.cpp of 1.3.2).
    """
    topology = deployment.topology
    concerns = concerns_of(deployment, placement, view, accept)
    ask = partial(_ask, cluster, deployment, view, placement)
    if host_copy_bytes(deployment, placement) and view.device == "gpu":
        require_room(deployment, view, placement, ask(node.quick, ()))
    if isinstance(topology, Collocated):
        facts = ask(node.quick, (), model)
        judge(lambda: diagnosis.diagnose(facts, rules=engine_rules.RULES, concerns=concerns), print_line)
        return deployment
    ports = settings_rules.side_channel_ports(deployment.pools)
    transport = topology.transport
    loaded: dict[str, dict[str, Any]] = {}
    if concerns & set(FABRIC):
        # Fluid engines of one node move KV cache over NVLink, which LIBFABRIC does not know.
        chooses = choose and may_choose(deployment) and concerns & set(WIRES) == {"efa"}
        optional = (LIBFABRIC,) if chooses else ()
        print_line("checking on every node which devices UCX finds")
        backends = (*transport.backends, *(name for name in optional if name not in transport.backends))
        facts = ask(node.thorough, ports, backends)
        if optional and _libfabric_loads(facts):
            print_line(
                f"KV transfer by {LIBFABRIC}: it loads on every node, and NIXL recommends it on EFA (--use-ucx: UCX)"
            )
            transport = transport.model_copy(update={"backends": (LIBFABRIC,)})
            deployment = deployment.with_topology(transport=transport)
        loaded = only_backends(facts, transport.backends)

    def query_nodes() -> Facts:
        # What loads does not change while a port is being freed.
        now = ask(node.quick, ports, model)
        if not loaded:
            return now
        return {name: {**fact, "loaded": loaded.get(name, {}).get("loaded")} for name, fact in now.items()}

    judge(lambda: diagnosis.diagnose(query_nodes(), concerns=concerns), print_line)
    return deployment


def concerns_of(
    deployment: Deployment, placement: Placement, view: ClusterView, accept: str | None = None
) -> frozenset[Concern]:
    """The concerns of the doctor's rules that apply to the deployment. An accepted wire, also an unknown one, replaces
    the planned network.
    """
    wires: set[Concern] = set(planned_wires(deployment, placement, view))
    if accept is not None and wires & set(NETWORK):
        wires -= set(NETWORK)
        wires |= {wire for wire in WIRES if wire == accept}
    spanning = any(len(replica.nodes) > 1 for replica in placement.replicas)
    return frozenset(wires | ({SPANNING} if spanning else set()))


def _ask(
    cluster: Cluster,
    deployment: Deployment,
    view: ClusterView,
    placement: Placement,
    probe: Callable[..., Any],
    ports: tuple[int, ...],
    *probe_args: Any,
) -> Facts:
    """Facts of the nodes that can hold engines, each with the environment of its engines; local Ray nodes have those of
    this machine, or of the host that this process is on. A head without GPUs, with no device and perhaps another image,
    is no evidence about engines."""
    environments = {role: engine_env(deployment, role, view) for role in deployment.pools}
    if cluster.local:
        return {"this machine": probe(ports, dict(ChainMap(*environments.values())), *probe_args)}
    facts: dict[str, Any] = {}
    for number, environment in enumerate(environments.values()):
        if environment in list(environments.values())[:number]:
            continue
        answers = cluster.call_nodes(probe, ports, environment, *probe_args)
        nodes = [
            node
            for replica in placement.replicas
            if environments[replica.role] == environment
            for node in replica.nodes
        ]
        own = {view.node(node).labels.get(NODE_ID_LABEL) for node in nodes}
        facts |= {name: fact for name, fact in answers.items() if number == 0 or name in own}
    ids = {engine.labels.get(NODE_ID_LABEL) for engine in view.engine_nodes}
    return {node_id: fact for node_id, fact in facts.items() if node_id in ids} or facts


def require_room(deployment: Deployment, view: ClusterView, placement: Placement, facts: Facts) -> None:
    """Raises DeployError for a node whose /dev/shm does not hold the KV cache that its engines keep in host memory:
    vLLM maps it there (v1/kv_offload/cpu/shared_offload_region.py of 0.29), and dies where it is full."""
    for name, needed_bytes in host_copy_bytes(deployment, placement).items():
        shm = (facts.get(view.node(name).labels.get(NODE_ID_LABEL, name)) or {}).get("shm")
        if shm and shm["free_bytes"] < needed_bytes:
            raise DeployError(
                f"KV cache in host memory on {name}: its engines need {needed_bytes / 1e9:.4g} GB of /dev/shm, "
                f"{byte_size(shm['free_bytes'])} are free; give a smaller {host_copy_source(deployment)}, or a larger "
                "/dev/shm (containers: --shm-size, Kubernetes: an emptyDir of medium Memory)"
            )


def may_choose(deployment: Deployment) -> bool:
    """Whether no setting of UCX was given that another backend would ignore."""
    variables = {name for role in deployment.pools for name in deployment.env_of(role)}
    tls = deployment.transport.ucx_tls if deployment.transport else None
    return tls is None and not any(name.startswith("UCX_") for name in variables)


def _libfabric_loads(facts: Facts) -> bool:
    """Whether LIBFABRIC was created on every node that was probed."""
    loaded = [(fact.get("loaded") or {}).get("backends", {}) for fact in facts.values()]
    return bool(loaded) and all(backends.get(LIBFABRIC, "not probed") is None for backends in loaded)


def only_backends(facts: Facts, backends: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The facts without the backends that the deployment does not use; their failures do not matter.

    Without UCX among them, what UCX finds and logs is left out too.
    """
    wanted_backends = set(backends)
    relevant = {}
    for name, fact in facts.items():
        loaded: Mapping[str, Any] = fact.get("loaded") or {}
        kept = {key: value for key, value in loaded.get("backends", {}).items() if key in wanted_backends}
        changed = {**loaded, "backends": kept} | ({} if "UCX" in wanted_backends else {"transports": None, "log": ""})
        relevant[name] = {**fact, "loaded": changed}
    return relevant


def judge(
    findings_now: Callable[[], list[DoctorFinding]], print_line: Callable[[str], None], wait_s: float = PORT_WAIT_S
) -> None:
    """Print the warnings. Raises DeployError on the first error.

    A used side-channel port is checked again for ``wait_s`` seconds, because its holder may be ending.
    """
    deadline = time.monotonic() + wait_s
    findings = findings_now()
    if any(map(_port, findings)):
        print_line("waiting for side-channel ports: engines of an earlier application are still ending")
    while any(map(_port, findings)) and time.monotonic() < deadline:
        time.sleep(0.25)
        findings = findings_now()
    for finding in findings:
        # A launch has its own rule for open clusters, and local nodes have no open ports.
        if finding.severity == "warning" and finding.code != "open_port":
            print_line(f"doctor: {finding.topic}: {finding.evidence}; {finding.consequence}")
    # Nothing of this application serves any more: an engine on one of its ports was left behind.
    broken = next((finding for finding in findings if finding.severity == "error" or _port(finding)), None)
    if broken is not None:
        tcp = (
            ", or --accept-wire tcp to serve over TCP"
            if broken.concerns and set(broken.concerns) <= set(FABRIC)
            else ""
        )
        raise DeployError(
            f"{broken.topic} on {', '.join(broken.nodes)}: {broken.evidence}; {broken.consequence}; {broken.fix}{tcp} "
            f"(everything: {RUN_DOCTOR})"
        )


def _port(finding: DoctorFinding) -> bool:
    return finding.code == "side_channel_port"
