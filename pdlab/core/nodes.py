"""``ClusterView`` (the nodes) and ``Placement`` (replicas on nodes)."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from pydantic import Field, field_validator, model_validator

from pdlab.core.schema import Frozen
from pdlab.core.settings import Milliseconds, Text, setting

# The pool of a replica. A replica of the fluid pool prefills or decodes, by its present role.
Role = Literal["collocated", "prefill", "decode", "fluid"]

# The path of KV cache between two engines: a network, or memory of one machine.
WireKind = Literal["efa", "rdma", "tcp", "shared memory", "gpu peer"]
NETWORKS: tuple[WireKind, ...] = ("efa", "rdma", "tcp")
# InfiniBand and RoCE are both rdma; every other kind of interface is tcp.
WIRE_OF_NIC: dict[str, WireKind] = {"efa": "efa", "infiniband": "rdma", "roce": "rdma"}

# The label of a node's name, given to `ray start --labels`, because a cluster file has no Ray node ids.
NODE_NAME_LABEL = "pdlab/node"
NODE_ID_LABEL = "ray.io/node-id"  # of Ray itself

# The two hosts of namespaces on this machine (pdlab.cluster.two_hosts).
HOST_NAMES = ("pdlab-a", "pdlab-b")


# The link between the GPUs of one node. xgmi: AMD's Infinity Fabric.
GpuLink = Literal["nvlink", "pcie", "xgmi"]


MAX_NODES = 10_000
MAX_SLOTS = 10_000  # GPUs or CPUs of one node: more than any machine has, few enough to list


class Nic(Frozen):
    """Network of a node. ``gbit_per_s``: line rate of one NIC. tcpxo: Ethernet with Google's GPUDirect-TCPXO, which
    NCCL uses, but UCX does not."""

    kind: Literal["efa", "infiniband", "roce", "tcpxo", "ethernet", "loopback"] = "ethernet"
    count: int = Field(default=1, ge=1)
    gbit_per_s: float | None = Field(default=None, gt=0)


LINK = "the link between the two hosts"  # title of a group of flags
LEAST_GBIT, MOST_GBIT = 0.001, 100.0
_GBIT = {"kbit": 1e-6, "mbit": 1e-3, "gbit": 1.0}


def _rate(text: str) -> float:
    """Gbit/s of ``1gbit`` or ``20mbit``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text, re.IGNORECASE)
    gbit_per_s = float(match[1]) * _GBIT[match[2].lower()] if match else 0.0
    if not LEAST_GBIT <= gbit_per_s <= MOST_GBIT:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a rate from 1mbit to 100gbit, for example 1gbit or 20mbit, or none"
        )
    return gbit_per_s


RATE = Text(_rate, lambda value: f"{value:.12g}gbit" if value >= 1 else f"{1000 * value:.12g}mbit", none="none")


class LinkShape(Frozen):
    """The link between the two hosts of `pdlab.cluster.two_hosts`, in each direction.

    ``gbit_per_s``: bits on the wire, with headers (None: unlimited). ``delay_s``: one-way delay.
    """

    gbit_per_s: Annotated[Annotated[float, Ge(LEAST_GBIT), Le(MOST_GBIT)] | None, RATE] = setting(
        None,
        "bandwidth of the two-hosts link, for example 1gbit or 20mbit",
        LINK,
        "--rate",
        value="RATE",
        otherwise="no limit",
    )
    delay_s: Annotated[Milliseconds, Le(1)] = setting(
        0.0, "one-way delay of the two-hosts link", LINK, "--delay-ms", value="MS", otherwise="0"
    )

    def __str__(self) -> str:
        rate = "unshaped" if self.gbit_per_s is None else f"{rate_text(self.gbit_per_s)} each way"
        return rate + (f", {1000 * self.delay_s:g} ms one way" if self.delay_s else "")


def rate_text(gbit_per_s: float) -> str:
    """``1 Gbit/s``, ``20 Mbit/s``."""
    return f"{gbit_per_s:g} Gbit/s" if gbit_per_s >= 1 else f"{1000 * gbit_per_s:g} Mbit/s"


class ClusterNode(Frozen):
    """One node. A node without GPUs serves on its CPUs: one engine rank per free CPU.

    ``id``: Ray's node id in a live cluster. ``free_gpus``: indexes of unused GPUs (None: all). ``host``: nodes with the
    same host share a machine (None: its own machine). ``gpu_memory_gb`` (1e9 bytes of one GPU) and ``gpu_link``: None
    for the values of ``gpu_type`` in configs/gpus/ (`pdlab.core.catalog.gpu_memory_gb`, `gpu_link`).
    ``nvlink_domain``: nodes with the same one have NVLink between them (trays of a GB200 rack).
    """

    id: str
    gpu_type: str | None = None
    gpus: int = Field(default=0, ge=0, le=MAX_SLOTS)
    gpu_memory_gb: float | None = Field(default=None, gt=0, le=10_000)
    gpu_link: GpuLink | None = None
    nvlink_domain: str | None = None
    free_gpus: tuple[int, ...] | None = None
    cpus: float = Field(default=0, ge=0, le=MAX_SLOTS)
    free_cpus: float | None = Field(default=None, ge=0)
    nic: Nic = Nic()
    host: str | None = None
    head: bool = False
    labels: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _free_within_total(self) -> ClusterNode:
        free = self.free_gpus
        if free is not None and (len(set(free)) != len(free) or any(not 0 <= g < self.gpus for g in free)):
            raise ValueError(f"free_gpus {list(free)} must be distinct indexes below gpus={self.gpus}")
        if self.free_cpus is not None and self.free_cpus > self.cpus:
            raise ValueError(f"free_cpus {self.free_cpus} is more than cpus {self.cpus}")
        return self

    @property
    def total_slots(self) -> int:
        """Slots of the empty node: its GPUs, or the whole CPUs of a node without GPUs."""
        return self.gpus or int(self.cpus)

    @property
    def slots(self) -> tuple[int, ...]:
        """Free slots for engine ranks: indexes of GPUs, or of CPUs on a node without GPUs."""
        if self.gpus:
            return self.free_gpus if self.free_gpus is not None else tuple(range(self.gpus))
        return tuple(range(int(self.available_cpus)))

    @property
    def available_cpus(self) -> float:
        return self.cpus if self.free_cpus is None else self.free_cpus

    @property
    def machine(self) -> str:
        """Identity of the physical machine: two nodes of one machine share memory."""
        return self.host or self.id


def _copies(node: Any) -> Iterator[Any]:
    """The ``count`` copies of a node with that key; else the node itself. Raises ValueError."""
    if not isinstance(node, dict) or "count" not in node:
        yield node
        return
    count, base = node["count"], {key: value for key, value in node.items() if key != "count"}
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_NODES:
        raise ValueError(f"count of a node must be a whole number from 1 to {MAX_NODES}, got {count!r}")
    labels = base.get("labels", {})
    for number in range(1, count + 1):
        name = f"{base.get('id')}-{number}"
        changes: dict[str, Any] = {"id": name, "head": base.get("head", False) and number == 1}
        if isinstance(labels, dict):
            changes["labels"] = {key: name if value == base.get("id") else value for key, value in labels.items()}
        yield base | changes


def common_network(nodes: Sequence[ClusterNode]) -> str:
    """The kind of NIC that all of these nodes have; ``tcp`` if the kinds differ, as they share no other network."""
    kinds = {node.nic.kind for node in nodes}
    return next(iter(kinds)) if len(kinds) == 1 else "tcp"


def network_wire(nodes: Sequence[ClusterNode]) -> WireKind:
    """The wire of `common_network`."""
    return WIRE_OF_NIC.get(common_network(nodes), "tcp")


class ClusterView(Frozen):
    """All nodes that may be used. If any node has GPUs, a node without GPUs (a head node) takes no engine.

    A file may give N equal nodes as one node with ``count: N``. A number is added to their ids, and to labels that are
    the id. ``head`` then is the first node.
    """

    name: str = "cluster"
    nodes: tuple[ClusterNode, ...] = Field(min_length=1)

    @field_validator("nodes", mode="before")
    @classmethod
    def _counted(cls, nodes: Any) -> Any:
        if not isinstance(nodes, list):
            return nodes
        return [each for node in nodes for each in _copies(node)]

    @model_validator(mode="after")
    def _distinct_ids(self) -> ClusterView:
        ids = [node.id for node in self.nodes]
        if len(set(ids)) != len(ids):
            raise ValueError(f"node ids must be distinct, got {ids}")
        owners: dict[str, str] = {}
        for node in self.nodes:
            name = node.labels.get(NODE_NAME_LABEL)
            if name is not None and owners.setdefault(name, node.id) != node.id:
                raise ValueError(
                    f"nodes {owners[name]} and {node.id} both have the label {NODE_NAME_LABEL}: {name}; "
                    "give each node a name of its own"
                )
        return self

    @property
    def device(self) -> Literal["gpu", "cpu"]:
        return "gpu" if any(node.gpus for node in self.nodes) else "cpu"

    @property
    def engine_nodes(self) -> tuple[ClusterNode, ...]:
        """Nodes for engines: nodes with GPUs, or all nodes if none has GPUs."""
        return tuple(node for node in self.nodes if node.gpus or self.device == "cpu")

    @property
    def by_ray_id(self) -> dict[str, str]:
        """Ray's node id -> id, of the nodes of a live cluster; empty for a cluster of a file."""
        return {node.labels[NODE_ID_LABEL]: node.id for node in self.nodes if NODE_ID_LABEL in node.labels}

    def node(self, node_id: str) -> ClusterNode:
        """The node with that id. Raises KeyError."""
        for node in self.nodes:
            if node.id == node_id:
                return node
        raise KeyError(node_id)


class TpGroup(Frozen):
    """One TP group: node id -> slot indexes. One node, unless TP is larger than a node."""

    slots: dict[str, tuple[int, ...]]


class ReplicaPlacement(Frozen):
    """One replica: its TP groups, ordered by DP rank and then PP stage."""

    role: Role
    index: int
    groups: tuple[TpGroup, ...]

    @property
    def slots(self) -> dict[str, tuple[int, ...]]:
        """Node id -> all slot indexes of the replica, sorted."""
        return _merged(group.slots for group in self.groups)

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(self.slots)


class Placement(Frozen):
    """All replicas of a deployment on the nodes of a cluster."""

    device: Literal["gpu", "cpu"]
    replicas: tuple[ReplicaPlacement, ...]
    ingress_nodes: tuple[str, ...] = ()

    @property
    def roles(self) -> tuple[Role, ...]:
        """In order of first use."""
        return tuple(dict.fromkeys(replica.role for replica in self.replicas))

    def of(self, role: Role) -> tuple[ReplicaPlacement, ...]:
        return tuple(replica for replica in self.replicas if replica.role == role)

    def nodes_of(self, role: Role) -> tuple[str, ...]:
        """Ids of the nodes with replicas of ``role``, in order of first use."""
        return tuple(dict.fromkeys(node for replica in self.of(role) for node in replica.nodes))

    def pairs(self) -> Iterator[tuple[ReplicaPlacement, ReplicaPlacement]]:
        """All pairs of replicas in which the first may send KV cache to the second."""
        for prefill in (*self.of("prefill"), *self.of("fluid")):
            for decode in self.of("decode" if prefill.role == "prefill" else "fluid"):
                if prefill is not decode:
                    yield prefill, decode

    @property
    def used_slots(self) -> dict[str, tuple[int, ...]]:
        """Node id -> slots in use, all replicas together, sorted."""
        return _merged(replica.slots for replica in self.replicas)


def _merged(parts: Iterable[Mapping[str, Sequence[int]]]) -> dict[str, tuple[int, ...]]:
    slots_by_node: dict[str, list[int]] = {}
    for part in parts:
        for node, slots in part.items():
            slots_by_node.setdefault(node, []).extend(slots)
    return {node: tuple(sorted(slots)) for node, slots in slots_by_node.items()}
