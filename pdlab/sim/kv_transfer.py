"""The cost and the arrival of a KV transfer: first come, first served at both ends of a link."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from pdlab.core.catalog import ModelShape, has_gpu, known_gpu
from pdlab.core.deployment import Collocated, Deployment, Disaggregated, Fluid
from pdlab.core.model_size import full_layers, kv_copies, moved_bytes
from pdlab.core.nodes import ClusterNode, GpuLink, network_wire
from pdlab.sim.hardware import Hardware, NodeWires


class LinkEnd(Protocol):
    """One engine's side of the link: the time at which it is free again, and its time in use."""

    link_free_s: float
    link_busy_s: float


class Links:
    """The links of one deployment; times in seconds."""

    def __init__(self, costs: TransferCosts) -> None:
        self.costs = costs
        self.free_s = 0.0  # the shared wire

    def carry(self, sender: LinkEnd, receiver: LinkEnd, size: float, now_s: float) -> float:
        """``size`` bytes leave as soon as both ends (and the wire) are free. Returns the time of their arrival."""
        costs = self.costs
        sends_s, receives_s = size / costs.prefill_bytes_per_s, size / costs.decode_bytes_per_s
        takes_s = sends_s if sends_s > receives_s else receives_s
        begins_s = sender.link_free_s if sender.link_free_s > now_s else now_s
        if receiver.link_free_s > begins_s:
            begins_s = receiver.link_free_s
        if costs.shared:
            begins_s = max(begins_s, self.free_s)
            self.free_s = begins_s + takes_s
        sender.link_free_s, receiver.link_free_s = begins_s + sends_s, begins_s + receives_s
        sender.link_busy_s += sends_s
        receiver.link_busy_s += receives_s
        return begins_s + costs.setup_s + takes_s

    def busy_s(self, ends: list[float]) -> float:
        """Time in use of the busiest link; ``ends``: that of every engine's side."""
        return sum(ends) / 2 if self.costs.shared else max(ends)


LinkKind = Literal["nvlink", "srd", "tcp"]


# --- KV transfer ------------------------------------------------------------------------------


@dataclass(slots=True)
class TransferCosts:
    """The cost of moving one request's KV: ``setup_s`` + bytes / rate, and a stall of the decode engine per fragment.
    An engine's ranks move their shares at the same time, so its rate grows with TP; the slower of the two ends
    counts."""

    setup_s: float
    prefill_bytes_per_s: float  # out of the ranks of one prefill engine that send
    decode_bytes_per_s: float  # into one decode engine
    shared: bool  # one transfer at a time over the whole link, whatever the number of engines
    bytes_per_token: float  # all that crosses the wire, copies too
    post_s_per_token: float  # stall of the decode engine that posts descriptors
    stall_s_per_token: float  # the same if blocks do not merge
    always_fragmented: bool

    @property
    def depend_on_age(self) -> bool:
        """Whether transfers into a pool with scattered blocks (it was full once) are slower than into a young one."""
        return not self.always_fragmented and self.stall_s_per_token > self.post_s_per_token


def with_scattered_blocks(hardware: Hardware, shape: ModelShape, extra_s_per_token: float) -> Hardware:
    """The hardware with a measured cost of scattered blocks. ``extra_s_per_token``: further seconds to move a token of
    ``shape`` within a node. The decode engine does nothing else during this time, which is the upper limit of the
    cost."""
    fragment_us = hardware.value("post_us") + 1e6 * extra_s_per_token / _descriptors(
        hardware, shape, hybrid=hardware.of_pd().hybrid_kv
    )
    return hardware.with_values({"fragment_us": fragment_us})


def _descriptors(hardware: Hardware, shape: ModelShape, *, hybrid: bool) -> float:
    """Pieces per token when no block merges with its neighbour. ``hybrid``: windows have too few to count."""
    return 2 * (full_layers(shape) if hybrid else shape.layers) / hardware.block_tokens


def link_of(deployment: Deployment, *, same_node: bool = False) -> LinkKind:
    """The link of a deployment: NVLink in a pack, SRD in a spread, TCP if UCX_TLS selects it. For a fluid pool it is
    the link of two engines. ``same_node``: they are on one node."""
    topology = deployment.topology
    if isinstance(topology, Collocated):
        return "nvlink"
    tls = topology.transport.ucx_tls
    if tls and "tcp" in tls.split(",") and not {"srd", "rc", "cuda_ipc", "all"} & set(tls.split(",")):
        return "tcp"
    within = same_node if isinstance(topology, Fluid) else topology.placement == "pack"
    return "nvlink" if within else "srd"


PCIE_GB_PER_S = 32.0  # one direction of PCIe 4 x16, for a GPU type whose file does not give host_gb_per_s


class WireRate(NamedTuple):
    """1e9 bytes per second, of one GPU or of a whole node."""

    gb_per_s: float
    per_node: bool


def on_nodes(hardware: Hardware, nodes: Sequence[ClusterNode]) -> Hardware:
    """The hardware with the wires of these nodes, and with the GPU memory that they state. The slowest and the smallest
    node of a GPU type count for it. Nodes whose networks differ use TCP."""
    network = network_wire(networked(hardware, nodes))
    changed = []
    for each in hardware.types:
        own = _with_gpus(each, nodes) if hardware.beside else nodes
        lines = [node.nic.count * node.nic.gbit_per_s / 8 for node in own if node.nic.gbit_per_s is not None]
        line = min(lines, default=None)
        wires = NodeWires(network=network, node_gb_per_s=line, gpu_link=_gpu_link_of(each, nodes))
        changed.append(_with_memory_of(each, nodes).model_copy(update={"wires": wires}))
    return changed[0].model_copy(update={"beside": tuple(changed[1:])})


def networked(hardware: Hardware, nodes: Sequence[ClusterNode]) -> Sequence[ClusterNode]:
    """The nodes whose network counts: with two GPU types the nodes of these types, else all."""
    if not hardware.beside:
        return nodes
    own = [node for node in nodes if any(has_gpu(node, each.gpu_type or "") for each in hardware.types)]
    return own or nodes


def _with_gpus(hardware: Hardware, nodes: Sequence[ClusterNode]) -> Sequence[ClusterNode]:
    """The nodes with the hardware's GPUs; all nodes if none has them."""
    return [each for each in nodes if has_gpu(each, hardware.gpu_type or "")] or nodes


def _gpu_link_of(hardware: Hardware, nodes: Sequence[ClusterNode]) -> GpuLink | None:
    """The link that `_with_gpus` of the hardware state, the slowest one; None: they do not, or state several."""
    links = {each.gpu_link for each in _with_gpus(hardware, nodes)}
    return "pcie" if "pcie" in links else next(iter(links)) if len(links) == 1 else None


def _with_memory_of(hardware: Hardware, nodes: Sequence[ClusterNode]) -> Hardware:
    stated = [each.gpu_memory_gb for each in nodes if each.gpu_memory_gb and has_gpu(each, hardware.gpu_type or "")]
    return hardware.with_values({"memory_gb": min(stated)}) if stated else hardware


def wire_rate(hardware: Hardware, link: LinkKind) -> WireRate:
    """The rate of one end of a link. Within a node it is at most that of the GPU's PCIe, if it has no other link.
    Between nodes it is at most the line rate of the NICs of its node. The GPUs of a node have equal shares of it; over
    TCP they share one wire."""
    value, wires = hardware.value, hardware.wires
    if link == "nvlink":
        gpu = known_gpu(hardware.gpu_type)
        within = (wires.gpu_link if wires else None) or (gpu.link if gpu else None)
        most = (gpu.host_gb_per_s if gpu else None) or PCIE_GB_PER_S
        rate = value("nvlink_gb_per_s")
        return WireRate(min(rate, most) if within == "pcie" else rate, per_node=False)
    line = (wires.node_gb_per_s if wires else None) or math.inf
    if link == "tcp" or (wires and wires.network == "tcp"):
        return WireRate(min(value("tcp_gb_per_s"), line), per_node=True)
    share = line / hardware.gpus_per_node
    # The constant is what EFA was measured to reach. RDMA of other NICs reaches about their line rate.
    if wires and wires.network == "rdma" and share < math.inf:
        return WireRate(share, per_node=False)
    return WireRate(min(value("srd_gb_per_s"), share), per_node=False)


def transfer_costs(
    hardware: Hardware, shape: ModelShape, topology: Disaggregated | Fluid, link: LinkKind
) -> TransferCosts:
    """Costs of one (prefill, decode) pair over ``link``. Each end has the `wire_rate` of its GPU type."""
    value = hardware.value
    prefill, decode = (topology.pool,) * 2 if isinstance(topology, Fluid) else (topology.prefill, topology.decode)
    prefill_tp, decode_tp, hybrid = prefill.tp, decode.tp, hardware.of(decode).hybrid_kv
    sends, receives = (wire_rate(hardware.typed(pool), link) for pool in (prefill, decode))
    shared = sends.per_node or receives.per_node
    out_per_s, in_per_s = 1e9 * sends.gb_per_s, 1e9 * receives.gb_per_s
    wire_per_s = min(out_per_s, in_per_s)
    # A decode rank reads each part of its cache from one prefill rank. Where prefill has more copies of it than decode,
    # some of its ranks send nothing (vLLM's nixl/tp_mapping.py).
    senders = prefill_tp * min(kv_copies(shape, decode_tp) / kv_copies(shape, prefill_tp), 1.0)
    # Over cuda_ipc every block that does not merge with its neighbour is a copy of its own, posted by the
    # engine's thread. Heads split between different TP degrees never merge.
    descriptors = _descriptors(hardware, shape, hybrid=hybrid)
    post_s = value("post_us") * 1e-6 * descriptors
    stall_s = value("fragment_us") * 1e-6 * descriptors if link == "nvlink" else post_s
    return TransferCosts(
        setup_s=value("transfer_setup_ms") * 1e-3,
        prefill_bytes_per_s=wire_per_s if shared else out_per_s * senders,
        decode_bytes_per_s=wire_per_s if shared else in_per_s * decode_tp,
        shared=shared,
        bytes_per_token=moved_bytes(shape, 1e6, decode_tp, hybrid=hybrid) / 1e6,
        post_s_per_token=post_s,
        stall_s_per_token=stall_s,
        always_fragmented=prefill_tp != decode_tp,
    )


def depends_on_age(deployment: Deployment, hardware: Hardware, shape: ModelShape, link: LinkKind | None = None) -> bool:
    """Whether a deployment's figures depend on how scattered blocks of a wrapped KV pool are copied."""
    topology = deployment.topology
    if isinstance(topology, Collocated):
        return False
    return transfer_costs(hardware, shape, topology, link or link_of(deployment, same_node=True)).depend_on_age
