"""What carried a long request's KV cache, by the counters of both sides; and what is refused."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.launched import running
from support.web import body_of, reply, web_server

from pdlab.core.catalog import load_cluster, local_cluster, resolve_model, two_hosts_cluster
from pdlab.core.deployment import Deployment, Disaggregated, Fluid, Pool, Transport, parse_label
from pdlab.core.errors import WireError
from pdlab.core.nodes import NODE_ID_LABEL, ClusterView, LinkShape
from pdlab.core.request_lengths import LEAST_MODEL_LEN
from pdlab.deploy import wire_proof
from pdlab.deploy.application import AppState, ReplicaState
from pdlab.deploy.wire_proof import NodeCounters, judge, planned_wire, refuse, sentence
from pdlab.placement.place import place
from pdlab.remote import network
from pdlab.remote.logs import ucx_tables
from pdlab.results.schema import Manifest, WireProof
from pdlab.transfer.ucx_log import UcxLane, Wire, parse_table, reads

X2, PAYLOAD = load_cluster("p5.48xlarge-x2"), 180_000_000
TWO_HOSTS = two_hosts_cluster(LinkShape(gbit_per_s=1))
EFA = {"ens32": "ethernet", "lo": "loopback", **{f"rdmap{i}": "efa" for i in range(4)}}
NOISE = 300_000


def pd(label: str, **transport: Any) -> Deployment:
    topology = parse_label(label)
    assert isinstance(topology, Disaggregated)
    return Deployment(topology=topology.model_copy(update={"transport": Transport(**transport)}))


@pytest.mark.parametrize(
    ("label", "view", "tls", "wire"),
    [
        ("pd-spread-p1xtp4-d1xtp4", X2, None, "efa"),
        ("pd-spread-p1xtp4-d1xtp4", X2, "srd,cuda_copy,cuda_ipc,sm,self", "efa"),
        ("pd-spread-p1xtp4-d1xtp4", X2, "tcp,cuda_copy,sm,self", "tcp"),
        ("pd-pack-p1xtp4-d1xtp4", X2, None, "gpu peer"),
        ("pd-spread-p1xtp1-d1xtp1", TWO_HOSTS, None, "tcp"),
        ("pd-pack-p1xtp1-d1xtp1", TWO_HOSTS, None, "shared memory"),
        ("pd-spread-p1xtp1-d1xtp1", local_cluster(2), None, "shared memory"),
        ("pd-spread-p1xtp1-d1xtp1", local_cluster(2), "tcp", "tcp"),
        ("pd-spread-p1xtp1-d1xtp1", local_cluster(2), "tcp,self", "tcp"),
        ("pd-pack-p1xtp4-d1xtp4", X2, "tcp,cuda_copy", "tcp"),
        ("pd-spread-p1xtp4-d1xtp4", X2, "^srd", "tcp"),
    ],
)
def test_the_wire_that_the_plan_names(label: str, view: ClusterView, tls: str | None, wire: str) -> None:
    deployment = pd(label, ucx_tls=tls)
    assert planned_wire(deployment, place(deployment, view), view) == wire


def proof(
    moved: dict[str, dict[str, tuple[int, int]]],
    planned: Any = "efa",
    kinds: dict[str, str] = EFA,
    nodes: tuple[str, str] = ("p", "d"),
    **more: Any,
) -> WireProof:
    """``moved``: node -> interface -> bytes (received, sent) while the request ran."""
    start = {nic: (10**9, 2 * 10**9) for nic in kinds}
    before = {node: NodeCounters(kinds, start) for node in dict.fromkeys(nodes)}
    after = {
        node: NodeCounters(kinds, {nic: (start[nic][0] + r, start[nic][1] + s) for nic, (r, s) in nics.items()})
        for node, nics in moved.items()
    }
    facts = {"payload_bytes": PAYLOAD, "apart": nodes[0] != nodes[1], **more}
    return judge(planned, before, after, prefill=[nodes[0]], decode=[nodes[1]], **facts)


def over(nic: str, share: float = 1.05, rails: int = 1) -> dict[str, dict[str, tuple[int, int]]]:
    """Prefill sends and decode receives that share of the payload, beside some other traffic."""
    part = int(share * PAYLOAD / rails)
    names = [nic] if rails == 1 else [f"{nic}{i}" for i in range(rails)]
    return {
        "p": {"ens32": (NOISE, NOISE), **{name: (NOISE, part) for name in names}},
        "d": {"ens32": (NOISE, NOISE), **{name: (part, NOISE) for name in names}},
    }


def table(transport: str, protocol: str = "zero-copy") -> Wire:
    """What UCX's table says."""
    return Wire(protocol, (UcxLane(transport, "device"),), False)


ONE_MACHINE = ("n", "n")
BOTH = Wire("zero-copy", (UcxLane("cma", "memory"), UcxLane("tcp", "lo")), False)
SOFTWARE = "software emulation"
QUIET = {"ens32": (NOISE, NOISE)}
LOUD = {"ens32": (2 * PAYLOAD, 2 * PAYLOAD)}
TURNED = {"p": {"rdmap0": (PAYLOAD, 0)}, "d": {"rdmap0": (0, PAYLOAD)}}
# What: bytes moved, what differs from a spread over EFA, and the wire observed, whether it is proven, by which
# evidence.
JUDGED: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str | None, bool | None, str | None]]] = {
    "EFA over all its rails": (over("rdmap", rails=4), {}, ("efa", True, "counters")),
    "a silent fallback to tcp": (over("ens32"), {}, ("tcp", False, "counters")),
    "nobody counted anything between machines": (over("rdmap0", share=0.01), {}, (None, False, None)),
    "one side alone": (over("rdmap0") | {"d": QUIET}, {}, (None, False, None)),
    "the other direction": (TURNED, {}, (None, False, None)),
    "a node that does not answer": ({"p": {"rdmap0": (0, PAYLOAD)}}, {}, (None, None, None)),
    "a pack whose KV cache goes through the NICs": (
        {"n": {"rdmap0": (PAYLOAD, PAYLOAD)}},
        {"planned": "gpu peer", "nodes": ONE_MACHINE},
        ("efa", False, "counters"),
    ),
    "a table of several wires": (
        {"n": {}},
        {"planned": "shared memory", "nodes": ONE_MACHINE, "ucx": BOTH},
        (None, None, None),
    ),
    "links of several kinds are not judged": (over("ens32"), {"planned": None}, ("tcp", None, "counters")),
    "UCX's table where counters cannot be read": ({}, {"ucx": table("srd")}, ("efa", True, "ucx")),
    "counters before the table": (over("ens32"), {"ucx": table("srd")}, ("tcp", False, "counters")),
    "counters before a table of verbs": (over("ens32"), {"ucx": table("ud_verbs")}, ("tcp", False, "counters")),
    "two wires counted enough, no table": (
        {node: nics | LOUD for node, nics in over("rdmap0").items()},
        {},
        ("tcp", False, "counters"),
    ),
    "of two wires the table names one": (
        {node: nics | LOUD for node, nics in over("rdmap0").items()},
        {"ucx": table("srd")},
        ("efa", True, "ucx"),
    ),
}
for transport, planned, observed, proven in (
    ("cma", "shared memory", "shared memory", True),
    ("cuda_ipc", "gpu peer", "gpu peer", True),
    ("tcp", "shared memory", "tcp", False),
    ("srd", "gpu peer", "efa", False),
    ("rc_mlx5", "gpu peer", "rdma", False),
):
    # Ray, HTTP and a large vocabulary's log-probabilities take the loopback too: the table is the evidence.
    for loopback in (NOISE, 3 * PAYLOAD):
        JUDGED[f"{transport} on one machine, {loopback} bytes over loopback"] = (
            {"n": {"lo": (loopback, loopback)}},
            {"planned": planned, "nodes": ONE_MACHINE, "ucx": table(transport)},
            (observed, proven, "ucx"),
        )
for planned in ("shared memory", "gpu peer"):
    for counted in ({}, {"lo": (NOISE, NOISE)}, {"lo": (2 * PAYLOAD, 2 * PAYLOAD)}):
        JUDGED[f"{planned} without a table, {counted} counted"] = (
            {"n": counted},
            {"planned": planned, "nodes": ONE_MACHINE},
            (None, None, None),
        )


@pytest.mark.parametrize(("moved", "more", "verdict"), JUDGED.values(), ids=JUDGED)
def test_what_carried_the_kv_cache(
    moved: dict[str, Any], more: dict[str, Any], verdict: tuple[str | None, bool | None, str | None]
) -> None:
    result = proof(moved, **more)
    assert (result.observed, result.proven, result.evidence) == verdict


def test_the_sentence_of_a_proof() -> None:
    result = proof(over("rdmap", rails=4))
    assert result.counted["d"]["rdmap0"][0] == int(1.05 * PAYLOAD / 4) and "efa 189 MB out" in result.detail
    assert sentence(result).startswith("wire: efa, as planned")
    assert "could not be read" in sentence(proof({"p": {"rdmap0": (0, PAYLOAD)}}))
    assert sentence(proof({"n": {}}, "gpu peer", nodes=ONE_MACHINE)).startswith("warning: wire: not proven")


def test_reads_in_software_over_the_right_wire_are_a_warning() -> None:
    result = proof(over("rdmap0"), ucx=table("srd", SOFTWARE))
    assert result.proven and result.emulated and sentence(result).startswith("warning: wire: efa")
    tcp = proof(over("ens32"), "tcp", ucx=table("tcp", SOFTWARE))
    assert tcp.proven and not tcp.emulated, "UCX has no other read over tcp"


class TestRefuse:
    SPREAD, PACK = pd("pd-spread-p1xtp4-d1xtp4"), pd("pd-pack-p1xtp4-d1xtp4")

    def test_the_right_wire(self) -> None:
        result = proof(over("rdmap0"))
        assert refuse(result, self.SPREAD, None) == result

    def test_another_wire_than_the_planned_one(self) -> None:
        with pytest.raises(WireError, match=r"uses tcp, but the plan names efa: .*--accept-wire tcp"):
            refuse(proof(over("ens32")), self.SPREAD, None)

    def test_accepted(self) -> None:
        assert refuse(proof(over("ens32")), self.SPREAD, "tcp").accepted is True

    @pytest.mark.parametrize("accept", ["rdma", "efa", "unknown"])
    def test_another_one_accepted(self, accept: str) -> None:
        with pytest.raises(WireError):
            refuse(proof(over("ens32")), self.SPREAD, accept)

    def test_counters_that_did_not_move(self) -> None:
        unmoved = proof(over("rdmap0", share=0.0))
        with pytest.raises(WireError, match=r"no wire that any interface counted.*--accept-wire unknown"):
            refuse(unmoved, self.SPREAD, None)
        assert refuse(unmoved, self.SPREAD, "unknown").accepted is True

    def test_a_pack_is_told_and_served(self) -> None:
        result = proof({"n": {}}, "gpu peer", nodes=("n", "n"), ucx=table("tcp"))
        assert result.proven is False and refuse(result, self.PACK, None).accepted is False
        assert sentence(result).startswith("warning: wire: tcp, the plan names gpu peer")

    def test_a_spread_within_one_machine_is_told_and_served(self) -> None:
        """Where processes may not read each other's memory, as in some containers, its KV takes the loopback."""
        result = proof({"n": {}}, "shared memory", nodes=("n", "n"), ucx=table("tcp"))
        assert result.proven is False and refuse(result, pd("pd-spread-p1xtp1-d1xtp1"), None).proven is False

    def test_what_cannot_be_seen_is_a_warning(self) -> None:
        assert refuse(proof({}), self.SPREAD, None).proven is None


def test_the_manifest_keeps_it() -> None:
    result = proof(over("ens32"))
    manifest = Manifest(origin="measured", label="x", wire=result)
    assert Manifest.model_validate_json(manifest.model_dump_json()).wire == result


def test_a_reading_of_this_machine() -> None:
    reading = network.reading()
    assert reading["kinds"].get("lo", "loopback") == "loopback"
    assert NodeCounters(**reading).counters.keys() >= {"lo"}


def candidates(scope: str, lanes: str, *, more: str = "") -> str:
    """A table that UCX 1.21 prints when it first reads a peer."""
    title = "remote memory read by ucp_get*(multi) into host memory from host"
    return (
        f"[1] [vm:1:0]   +----------+-----------------+\n"
        f"[1] [vm:1:0]   | ucp_context_0 {scope} cfg#1 | {title} |\n"
        f"[1] [vm:1:0]   +----------+-----------------+-----------------+\n{more}"
        f"[1] [vm:1:0]   | 0..inf | zero-copy | {lanes} |\n"
        f"[1] [vm:1:0]   +----------+-----------------+-----------------+\n"
    )


def logged(folder: Path, *scopes: str) -> Wire | None:
    app: Any = SimpleNamespace(logs_by=lambda read: read(str(folder), "pdlab"))
    return wire_proof._logged(app, scopes or wire_proof.PEER_SCOPES)


def test_ucxs_tables_are_found_in_the_logs_of_the_application_alone(tmp_path: Path) -> None:
    mine, others = candidates("inter-node", "srd/rdmap0:1"), candidates("inter-node", "tcp/ens32")
    (tmp_path / "worker-1.err").write_text(f":actor_name:ServeReplica:pdlab:Decode:m\nloading\n{mine}done\n")
    (tmp_path / "worker-2.err").write_text(f":actor_name:ServeReplica:other:Decode:m\n{others}")
    (text,) = ucx_tables(str(tmp_path), "pdlab")
    assert reads(parse_table(text), ["inter-node"], 4096) == logged(tmp_path)
    assert getattr(logged(tmp_path), "transports", None) == ("srd",)


def test_a_table_is_found_far_from_the_end_of_a_log(tmp_path: Path) -> None:
    text = ":actor_name:ServeReplica:pdlab:Decode:m\n" + candidates("intra-node", "cma/memory") + "DEBUG ...\n" * 50_000
    (tmp_path / "worker-1.err").write_text(text)
    assert getattr(logged(tmp_path), "transports", None) == ("cma",)


@pytest.mark.parametrize("actor", ["RayWorkerProc", "RayWorkerWrapper"])
def test_ranks_that_are_actors_of_their_own_have_the_tables(actor: str, tmp_path: Path) -> None:
    (tmp_path / "worker-1.err").write_text(f":actor_name:{actor}\n" + candidates("intra-node", "cuda_ipc/cuda"))
    (tmp_path / "worker-2.err").write_text(":actor_name:Mine\n" + candidates("intra-node", "tcp/lo"))
    assert getattr(logged(tmp_path), "transports", None) == ("cuda_ipc",)


def test_reads_of_an_engine_itself_and_of_few_bytes_are_no_kv_transfer(tmp_path: Path) -> None:
    small = "[1] [vm:1:0]   | 0..2047 | copy-out | tcp/lo |\n"
    text = candidates("self", "tcp/lo") + candidates("intra-node", "cma/memory", more=small)
    (tmp_path / "worker-1.err").write_text(":actor_name:ServeReplica:pdlab:Decode:m\n" + text)
    assert getattr(logged(tmp_path), "transports", None) == ("cma",)


def test_peers_on_the_same_node_and_on_others_are_told_apart(tmp_path: Path) -> None:
    text = candidates("intra-node", "cuda_ipc/cuda") + candidates("inter-node", "srd/rdmap0:1")
    (tmp_path / "worker-1.err").write_text(":actor_name:ServeReplica:pdlab:Fluid:m\n" + text)
    for scope, transports in (("intra-node", ("cuda_ipc",)), ("inter-node", ("srd",))):
        assert getattr(logged(tmp_path, scope), "transports", None) == transports


def test_every_length_that_a_launch_chooses_holds_the_request() -> None:
    assert wire_proof.TOKENS + 16 <= LEAST_MODEL_LEN


@pytest.mark.parametrize(
    ("topology", "model", "bytes_per_token"),
    [
        ("pd-spread-p1xtp1-d1xtp8", "deepseek-v3", 8 * 61 * 576 * 2),  # the latent vector on every rank of decode
        ("pd-spread-p1xtp8-d1xtp4", "deepseek-v3", 4 * 61 * 576 * 2),
        ("pd-spread-p1xtp4-d1xtp8", "gpt-oss-120b", 18 * 2 * 8 * 64 * 2),  # a head on each
    ],
)
def test_the_payload_has_every_copy_that_decode_keeps(topology: str, model: str, bytes_per_token: int) -> None:
    deployment, shape = Deployment(topology=parse_label(topology)), resolve_model(model)[0]
    assert shape is not None
    more = wire_proof._payload(deployment, shape, 3000, cpu=False) - wire_proof._payload(
        deployment, shape, 2000, cpu=False
    )
    assert more == 1000 * bytes_per_token


@pytest.mark.parametrize(
    ("more", "tokens"),
    [
        ({}, wire_proof.TOKENS),
        ({"max_model_len": 2048}, 2032),
        ({"engine_kwargs": {"max_model_len": 1024}}, 1008),
        ({"engine_kwargs": {"max_model_len": -1}}, wire_proof.TOKENS),
    ],
)
def test_the_request_fits_what_is_served(more: dict[str, Any], tokens: int) -> None:
    deployment = Deployment(topology=parse_label("pd-spread-p1xtp4-d1xtp4"), **more)
    assert wire_proof._longest(deployment, resolve_model("gpt-oss-120b")[0], X2) == tokens


def test_a_request_that_is_refused_as_too_long_is_asked_shorter() -> None:
    prompt_tokens: list[int] = []

    def answer(call: BaseHTTPRequestHandler) -> None:
        prompt_tokens.append(len(body_of(call)["prompt"]))
        reply(call, {}, 400 if prompt_tokens[-1] > 1000 else 200)

    with web_server(answer) as url:
        assert wire_proof._ask(wire_proof._over_http(running(url)), "m", 3000, None) == 750
        assert prompt_tokens == [3000, 1500, 750]
        with pytest.raises(WireError, match="no answer"):
            wire_proof._ask(wire_proof._over_http(running("http://127.0.0.1:9")), "m", 3000, None)


@pytest.mark.parametrize("gpu_type", ["H100", "L40S", "MI300X", None])
def test_a_pack_moves_kv_cache_between_its_gpus_whatever_joins_them(gpu_type: str | None) -> None:
    view = ClusterView(nodes=tuple(node.model_copy(update={"gpu_type": gpu_type}) for node in X2.nodes))
    deployment = Deployment(topology=parse_label("pd-pack-p1xtp4-d1xtp4"))
    assert wire_proof.planned_wire(deployment, place(deployment, view), view) == "gpu peer"


def test_one_pair_of_fluid_engines_for_each_wire() -> None:
    nodes = [node.model_copy(update={"labels": {NODE_ID_LABEL: f"ray-{node.id}"}}) for node in X2.nodes]
    view = X2.model_copy(update={"nodes": tuple(nodes)})
    replicas = [
        ReplicaState(deployment="Fluid:m", replica=f"r{i}", state="RUNNING", node=f"ray-node-{1 + i // 2}")
        for i in range(4)
    ]
    app: Any = SimpleNamespace(state=lambda: AppState(status="RUNNING", replicas=tuple(replicas)))
    served = running("http://127.0.0.1:9").model_copy(update={"pools": {f"r{i}": "fluid" for i in range(4)}})

    def pairs(tls: str | None) -> dict[str, tuple[str, str]]:
        fluid = Deployment(topology=Fluid(pool=Pool(replicas=4, tp=4), transport=Transport(ucx_tls=tls)))
        found = wire_proof._pair_of_each_wire(app, fluid, served, view)
        return {wire: (prefill.replica, decode.replica) for wire, (prefill, decode) in found.items()}

    assert pairs(None) == {"gpu peer": ("r0", "r1"), "efa": ("r0", "r2")}
    assert pairs("tcp") == {"tcp": ("r0", "r1")}
