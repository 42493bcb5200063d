"""Prove at a launch which wire the KV cache takes: send one long request, and read the evidence of UCX and of the
interfaces.

UCX falls back to TCP silently, and answers stay right. The evidence is UCX's own table of how it reads a peer and,
between machines, the byte counters of both sides. Within a machine no counter belongs only to the KV transfer: the
loopback interface carries other traffic too, and an unchanged counter proves nothing. `judge` is pure.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from pdlab.core.catalog import ModelShape
from pdlab.core.commands import DOCTOR
from pdlab.core.deployment import Deployment, Fluid
from pdlab.core.errors import WireError
from pdlab.core.hybrid_kv import is_hybrid
from pdlab.core.model_size import moved_bytes
from pdlab.core.nodes import NETWORKS, WIRE_OF_NIC, ClusterView, Placement, Role, WireKind
from pdlab.core.request_lengths import shortest_length
from pdlab.core.text import counted
from pdlab.deploy.application import Application, ReplicaState
from pdlab.deploy.endpoint import Running
from pdlab.deploy.engine_metrics import await_nixl, read_snapshot
from pdlab.deploy.http_client import NoAnswer, complete
from pdlab.deploy.serve_config import engine_kwargs
from pdlab.placement.place import link_wire, links
from pdlab.remote import network
from pdlab.remote.logs import ucx_tables
from pdlab.results.schema import WireProof
from pdlab.transfer.ucx_log import Wire, parse_table, reads, together
from pdlab.transfer.verdict import CARRIED, EFA, FABRIC, SHARED_MEMORY, VERBS, allows

TOKENS, LEAST_TOKENS = 4000, 256
TIMEOUT_S = 300.0
# vLLM's bytes come as middles of a histogram's buckets: half of them are sure to have moved.
SURE_SHARE = 0.5
# The smallest read of KV cache: K and V of one block of 16 tokens in a layer, of one head of 64 in bfloat16.
LEAST_READ_BYTES = 4096
PEER_SCOPES = ("intra-node", "inter-node")

# Wire -> the transports of UCX by which KV cache takes it. What copies within a process is none of them.
TRANSPORTS: dict[WireKind, tuple[str, ...]] = {
    "efa": FABRIC["efa"],
    "rdma": VERBS,
    "tcp": ("tcp",),
    "shared memory": tuple(name for name in SHARED_MEMORY if name != "self"),
    "gpu peer": ("cuda_ipc", "rocm_ipc"),
}
UNKNOWN = "unknown"


@dataclass(frozen=True)
class NodeCounters:
    """One node: kind of every interface by name (`pdlab.remote.network.Interface`), and its byte counters."""

    kinds: Mapping[str, str]
    counters: Mapping[str, tuple[int, int]]


def planned_wires(deployment: Deployment, placement: Placement, view: ClusterView) -> frozenset[WireKind]:
    """The wires of the plan, restricted by UCX_TLS; none for collocated engines."""
    if deployment.transport is None:
        return frozenset()
    return frozenset(_allowed(deployment, link.wire) for link in links(placement, view))


def planned_wire(deployment: Deployment, placement: Placement, view: ClusterView) -> WireKind | None:
    """The only wire of `planned_wires`; None: links of several kinds have no common wire."""
    wires = planned_wires(deployment, placement, view)
    return next(iter(wires)) if len(wires) == 1 else None


def _allowed(deployment: Deployment, wire: WireKind) -> WireKind:
    """The wire of a link, or what UCX_TLS leaves."""
    assert deployment.transport is not None
    tls = deployment.transport.ucx_tls
    return "tcp" if tls and not allows(tls, FABRIC.get(wire, TRANSPORTS[wire])) else wire


def judge(
    planned: WireKind | None,
    before: Mapping[str, NodeCounters],
    after: Mapping[str, NodeCounters],
    *,
    prefill: Iterable[str],
    decode: Iterable[str],
    payload_bytes: int,
    apart: bool,
    ucx: Wire | None = None,
) -> WireProof:
    """What carried the payload from the nodes of ``prefill`` to those of ``decode``.

    ``apart``: they are different machines, so that some interface must have counted it. ``ucx``: how UCX reads peers,
    by its own table. Between machines counters are believed before the table, because they count what happened.
    """
    moved = {
        node: network.bytes_between(dict(reading.counters), dict(after[node].counters))
        for node, reading in before.items()
        if node in after
    }
    sides = (tuple(prefill), tuple(decode))
    readable = bool(sides[0] and sides[1]) and all(moved.get(node) is not None for side in sides for node in side)
    readable = readable and payload_bytes > 0
    counted = {
        wire: (_counted(moved, before, sides[0], wire, sent=True), _counted(moved, before, sides[1], wire, sent=False))
        for wire in NETWORKS
        if apart or wire != "tcp"
    }
    carriers = [wire for wire, both in counted.items() if readable and min(both) >= CARRIED * payload_bytes]
    in_table = _wire_in(ucx, planned)
    observed: WireKind | None = None
    evidence: Literal["ucx", "counters"] | None = None
    if in_table and (not apart or not readable or in_table in carriers or (in_table not in NETWORKS and not carriers)):
        observed, evidence = in_table, "ucx"
    elif carriers:
        most: WireKind = max(carriers, key=lambda carrier: min(counted[carrier]))
        observed, evidence = most, "counters"
    proven = observed == planned if planned and (observed or (apart and readable)) else None
    return WireProof(
        planned=planned,
        observed=observed,
        proven=proven,
        evidence=evidence,
        payload_bytes=payload_bytes,
        counted={node: dict(nics) for node, nics in moved.items()},
        ucx=ucx.transports if ucx else (),
        emulated=ucx is not None and ucx.emulated and evidence == "ucx" and observed != "tcp",
        detail="; ".join(_details(counted, payload_bytes, ucx, apart=apart, readable=readable)),
    )


def _wire_in(ucx: Wire | None, planned: WireKind | None) -> WireKind | None:
    """The wire of UCX's table; None without a table, and where it names several."""
    transports = set(ucx.transports) if ucx else set()
    if "ud_verbs" in transports and ("srd" in transports or planned == "efa"):
        transports = transports - set(EFA) | set(FABRIC["efa"])  # every kind of RDMA device has unreliable datagrams
    wires = [wire for wire, names in TRANSPORTS.items() if transports & set(names)]
    return wires[0] if len(wires) == 1 else None


def _details(
    counted: Mapping[WireKind, tuple[int, int]], payload_bytes: int, ucx: Wire | None, *, apart: bool, readable: bool
) -> Iterator[str]:
    traffic = ", ".join(
        f"{wire} {sent / 1e6:.3g} MB out and {received / 1e6:.3g} MB in"
        for wire, (sent, received) in counted.items()
        if sent or received
    )
    if apart and not readable:
        yield "the interfaces' counters could not be read on every node"
    elif apart or traffic:
        yield f"interfaces counted {traffic or 'nothing'} of {payload_bytes / 1e6:.3g} MB"
    if ucx:
        yield f"by UCX's table it reads by {ucx.protocol} over {ucx.name}"
    elif not apart:
        yield "no engine's log has UCX's table of its reads"


def _counted(
    moved: Mapping[str, Mapping[str, tuple[int, int]]], readings: Mapping[str, NodeCounters], nodes: Iterable[str],
    wire: str, *, sent: bool,
) -> int:  # fmt: skip
    total = 0
    for node in dict.fromkeys(nodes):
        for nic, (received_bytes, sent_bytes) in moved.get(node, {}).items():
            if WIRE_OF_NIC.get(readings[node].kinds.get(nic, ""), "tcp") == wire:
                total += sent_bytes if sent else received_bytes
    return total


def sentence(proof: WireProof) -> str:
    """For the person."""
    observed = proof.observed or UNKNOWN
    if proof.emulated:
        return f"warning: wire: {observed}, but UCX emulates its reads in software ({proof.detail})"
    if proof.proven:
        return f"wire: {observed}, as planned ({proof.detail})"
    if proof.proven is None:
        return f"warning: wire: not proven, the plan names {proof.planned or 'several'} ({proof.detail})"
    return f"warning: wire: {observed}, the plan names {proof.planned} ({proof.detail})"


def refuse(proof: WireProof, deployment: Deployment, accept: str | None) -> WireProof:
    """The proof, marked as accepted if the user accepted another wire than the planned one. Raises WireError for a
    spread over a network with another wire that was not accepted. Between nodes of one machine another wire is only
    reported.
    """
    if proof.proven is not False:
        return proof
    accepted = accept == (proof.observed or UNKNOWN)
    if deployment.mode in ("pd-spread", "pd-fluid") and proof.planned in NETWORKS and not accepted:
        observed = proof.observed or "no wire that any interface counted"
        raise WireError(
            f"KV cache uses {observed}, but the plan names {proof.planned}: {proof.detail}; run {DOCTOR} to "
            f"see what UCX finds, read docs/debugging.md, or give --accept-wire {proof.observed or UNKNOWN} to serve "
            "with it"
        )
    return proof.model_copy(update={"accepted": accepted})


def prove(
    app: Application, deployment: Deployment, running: Running, view: ClusterView, placement: Placement,
    shape: ModelShape | None, print_line: Callable[[str], None], accept: str | None = None,
) -> WireProof | None:  # fmt: skip
    """Send one long request and find the wire of its KV cache; None: no KV cache moves. Raises WireError."""
    if deployment.transport is None:
        return None
    tokens = _longest(deployment, shape, view)

    def proven(planned: WireKind | None, prefill: Sequence[str], decode: Sequence[str], send: Send) -> WireProof:
        before = _readings(app, view)
        bytes_before = None if shape else read_snapshot(running.metrics_urls, running.replicas).nixl.bytes_transferred
        sent = _ask(send, running.model_id, tokens, shape)
        payload = (
            _payload(deployment, shape, sent, cpu=view.device == "cpu")
            if shape
            else _by_vllm(running, bytes_before or 0.0)
        )
        machines = [{view.node(node).machine for node in nodes} for nodes in (prefill, decode)]
        apart = not machines[0] & machines[1]
        # Fluid engines have peers on their own node and on others; those of this pair are of one scope.
        scopes = (PEER_SCOPES[apart],) if isinstance(deployment.topology, Fluid) else PEER_SCOPES
        proof = judge(
            planned,
            before,
            _readings(app, view),
            prefill=prefill,
            decode=decode,
            payload_bytes=payload,
            apart=apart,
            ucx=_logged(app, scopes),
        )
        print_line(sentence(proof))
        return refuse(proof, deployment, accept)

    if not isinstance(deployment.topology, Fluid):
        planned = planned_wire(deployment, placement, view)
        return proven(planned, placement.nodes_of("prefill"), placement.nodes_of("decode"), _over_http(running))
    proofs = []
    for planned, (prefill, decode) in _pair_of_each_wire(app, deployment, running, view).items():
        send = partial(app.pair_answers, running.model_id, wanted={decode.replica: [prefill.replica]})
        proofs.append(proven(planned, (str(prefill.node),), (str(decode.node),), send))
    # The manifest has one: that of a network before others, what is not proven before what is.
    return min(proofs, key=lambda proof: (proof.proven is True, proof.planned not in NETWORKS), default=None)


Send = Callable[[dict[str, Any]], object]


def _pair_of_each_wire(
    app: Application, deployment: Deployment, running: Running, view: ClusterView
) -> dict[WireKind, tuple[ReplicaState, ReplicaState]]:
    """Planned wire -> two fluid engines between which KV cache takes it, one pair of each. ``node``: by its id in the
    view."""
    ids = view.by_ray_id
    engines = [
        each.model_copy(update={"node": ids[each.node]})
        for each in app.state().replicas
        if each.replica in running.pools and each.node in ids
    ]
    pairs: dict[WireKind, tuple[ReplicaState, ReplicaState]] = {}
    for prefill in engines:
        for decode in engines:
            if prefill is not decode:
                wire = link_wire(view.node(str(prefill.node)), view.node(str(decode.node)))
                pairs.setdefault(_allowed(deployment, wire), (prefill, decode))
    return pairs


def _over_http(running: Running) -> Send:
    return lambda body: complete(running.base_url, body, running.key, TIMEOUT_S)


def _longest(deployment: Deployment, shape: ModelShape | None, view: ClusterView) -> int:
    """As long as a prompt may be, as far as that is known, up to TOKENS."""
    length = shortest_length(deployment, shape, cpu=view.device == "cpu") or (shape.max_context if shape else TOKENS)
    return max(1, min(TOKENS, length - 16))


def _ask(send: Send, model_id: str, tokens: int, shape: ModelShape | None) -> int:
    """Send one prompt that no prefix cache has, a shorter one where that is refused as too long (HTTP 400).

    Returns its tokens. Raises WireError.
    """
    draw = random.Random(time.time_ns())
    prompt = [draw.randrange(100, min(shape.vocab if shape else 1000, 1000)) for _ in range(tokens)]
    body = {"model": model_id, "prompt": prompt, "max_tokens": 2, "temperature": 0.0, "ignore_eos": True}
    try:
        send(body)
    except NoAnswer as error:
        if error.code == 400 and tokens > LEAST_TOKENS:
            return _ask(send, model_id, tokens // 2, shape)
        raise WireError(f"a request of {counted(tokens, 'token')} {error}") from error
    return tokens


def _payload(deployment: Deployment, shape: ModelShape, tokens: int, *, cpu: bool) -> int:
    """Bytes that the KV cache of a prompt moves."""
    role: Role = "decode" if "decode" in deployment.pools else "fluid"
    arguments = engine_kwargs(deployment, role, shape, cpu=cpu)
    return int(moved_bytes(shape, tokens, deployment.pools[role].tp, hybrid=is_hybrid(arguments)))


def _by_vllm(running: Running, before: float) -> int:
    """Bytes that certainly moved, by vLLM's counter; 0 when it does not grow."""
    counters = await_nixl(running.metrics_urls, running.replicas, lambda read: (read.bytes_transferred or 0.0) > before)
    return int(SURE_SHARE * max(0.0, (counters.bytes_transferred or 0.0) - before))


def _readings(app: Application, view: ClusterView) -> dict[str, NodeCounters]:
    """Node (by its id in the view) -> what its interfaces counted. Nodes side by side on this machine share them."""
    local = app.cluster.local
    if local and not local.two_hosts:
        reading = network.reading()
        return {node.id: NodeCounters(**reading) for node in view.nodes}
    names = view.by_ray_id
    answers: dict[str, Any] = app.cluster.call_nodes(network.reading)
    return {names[node]: NodeCounters(**answer) for node, answer in answers.items() if node in names}


def _logged(app: Application, scopes: Sequence[str]) -> Wire | None:
    """How UCX reads peers of those scopes, by the tables in the engines' logs; None without any."""
    return together(reads(parse_table(text), scopes, LEAST_READ_BYTES) for text in app.logs_by(ucx_tables))
