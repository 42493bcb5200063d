"""Rules of the doctor: networks that read memory of other nodes (EFA, InfiniBand, RoCE), and settings of UCX. Pure.

A node has a fabric of the wire ``efa`` or ``rdma``, or none. A port without a link is not a device. On a node with
InfiniBand the Ethernet ports are not part of the fabric, although they may support RoCE.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pdlab.core.commands import CHECK_TRANSFER
from pdlab.core.text import counted
from pdlab.transfer.doctor.findings import FABRIC, NETWORK, Concern, DoctorFinding, Facts, Rule
from pdlab.transfer.ucx_log import failed_modules
from pdlab.transfer.verdict import FABRIC as FABRIC_TRANSPORTS
from pdlab.transfer.verdict import SHARED_MEMORY, allows

DEFAULT_RAILS = 2  # NIXL's default (ucx_utils.cpp of 1.3.2)
NAMES = {"efa": "EFA", "infiniband": "InfiniBand", "roce": "RoCE"}
UNUSED = "are excluded: KV crosses nodes over TCP, many times slower"


class Fabric(NamedTuple):
    """The RDMA devices between a node and other nodes. ``name``: EFA, InfiniBand or RoCE."""

    wire: Concern
    name: str
    devices: tuple[Mapping[str, Any], ...]

    @property
    def usable(self) -> list[str]:
        """Names of the devices that engines of this node, or of this container, may open."""
        return [device["name"] for device in self.devices if device["usable"]]

    def __str__(self) -> str:
        count, all_ = len(self.usable), len(self.devices)
        return f"{count if count == all_ else f'{count} usable of {all_}'} {self.name} device{'s' * (all_ != 1)}"


def fabric_of(fact: Mapping[str, Any]) -> Fabric | None:
    """The node's fabric; None without one."""
    linked = [device for device in fact.get("rdma", ()) if device.get("active", True)]
    for kind, name in NAMES.items():
        devices = tuple(device for device in linked if device.get("kind", device["driver"]) == kind)
        if devices:
            return Fabric("efa" if kind == "efa" else "rdma", name, devices)
    return None


def fabric_text(fact: Mapping[str, Any]) -> str:
    """``16 usable of 32 EFA devices``, ``no RDMA devices``."""
    fabric = fabric_of(fact)
    return str(fabric) if fabric else "no RDMA devices"


def _with_fabric(facts: Facts) -> Iterator[tuple[str, Mapping[str, Any], Fabric]]:
    for node, fact in facts.items():
        fabric = fabric_of(fact)
        if fabric is not None:
            yield node, fact, fabric


def _usable(facts: Facts) -> Iterator[DoctorFinding]:
    """A container with device files of some devices is healthy."""
    for node, _, fabric in _with_fabric(facts):
        refused = [each["name"] for each in fabric.devices if not each["usable"] and each.get("given", False)]
        if fabric.usable and not refused:
            continue
        evidence = f"none of the {len(fabric.devices)} {fabric.name} devices has a file in /dev/infiniband"
        if refused:
            evidence = f"{len(refused)} of {len(fabric.devices)} {fabric.name} devices may not be opened ({refused[0]})"
        yield DoctorFinding(
            "warning" if fabric.usable else "error",
            "fabric_not_usable",
            (node,),
            evidence,
            "UCX and libfabric do not see them: transfers go over "
            + ("the others" if fabric.usable else "TCP, many times slower"),
            "give the process /dev/infiniband (containers: --device /dev/infiniband/uverbsN; Kubernetes: the device "
            "plugin's resource), readable and writable",
            (fabric.wire,),
            name=fabric.name,
        )


def _libraries(facts: Facts) -> Iterator[DoctorFinding]:
    for node, fact, fabric in _with_fabric(facts):
        system = fact.get("system_libraries", {})
        if fabric.wire == "efa" and "libefa" not in system:
            yield DoctorFinding(
                "error",
                "libefa_missing",
                (node,),
                "EFA devices, but the dynamic loader finds no libefa",
                "UCX's EFA module does not load, and logs that only with UCX_MODULE_LOG_LEVEL=info",
                "install the EFA installer's rdma-core (docs/setup.md)",
                (fabric.wire,),
            )
        bundled = [path for path in fact.get("bundled_libraries", ()) if "libibverbs" in path]
        newer = _abi(system.get("libibverbs", ())), _abi(bundled)
        if newer[0] and newer[1] and newer[0] > newer[1]:
            yield DoctorFinding(
                "warning",
                "rdma_core_abi",
                (node,),
                f"libibverbs 1.14.{newer[0]} of the system, 1.14.{newer[1]} in the nixl wheel",
                "providers of a newer rdma-core do not load into an older libibverbs: UCX may see no "
                f"{fabric.name} device",
                f"check the wire with {CHECK_TRANSFER}; if it is tcp, run debug/build_nixl_ucx_efa.sh",
                (fabric.wire,),
            )


def _abi(paths: Sequence[str]) -> int | None:
    """The highest version of rdma-core in the names: 57 for ``libibverbs.so.1.14.57.0``."""
    numbers = [int(match[1]) for path in paths if (match := re.search(r"\.so\.1\.14\.(\d+)\.", path))]
    return max(numbers, default=None)


def _rails(facts: Facts) -> Iterator[DoctorFinding]:
    for node, fact, fabric in _with_fabric(facts):
        rails = fact.get("environment", {}).get("UCX_MAX_RMA_RAILS", str(DEFAULT_RAILS))
        gpus = fact.get("gpus", 0)
        per_gpu = len(fabric.usable) // gpus if gpus else 0
        if per_gpu > DEFAULT_RAILS and rails.isdecimal() and int(rails) < per_gpu:  # UCX also accepts inf and auto
            rates = {device.get("gbit_per_s") for device in fabric.devices}
            gbit = rates.pop() if len(rates) == 1 else None
            speed = f": at most {int(rails) * gbit / 8:g} of {per_gpu * gbit / 8:g} GB/s" if gbit else ""
            yield DoctorFinding(
                "warning",
                "rails",
                (node,),
                f"{per_gpu} {fabric.name} devices per GPU, UCX_MAX_RMA_RAILS {rails} ({DEFAULT_RAILS} where not set)",
                f"a transfer uses {rails} of {counted(per_gpu, 'device')}{speed}",
                f"set UCX_MAX_RMA_RAILS={per_gpu} on every node",
                (fabric.wire,),
            )


def _gpu_direct(facts: Facts) -> Iterator[DoctorFinding]:
    for node, fact, fabric in _with_fabric(facts):
        module = "efa_nv_peermem" if fabric.wire == "efa" else "nvidia_peermem"
        if fact.get("gpus") and fact.get(module) is False:
            yield DoctorFinding(
                "warning",
                "gpudirect",
                (node,),
                f"{fabric.name} devices and GPUs, but no kernel module {module} (/sys/module)",
                f"{fabric.name} may not reach GPU memory: KV cache moves through host memory, many times slower",
                f"sudo modprobe {module}; "
                + ("AWS's EFA installer provides it" if fabric.wire == "efa" else "NVIDIA's driver provides it"),
                (fabric.wire,),
            )


def _not_found(facts: Facts) -> Iterator[DoctorFinding]:
    """Uses UCX's own list of transports, which is a proof; versions and files are not."""
    for node, fact, fabric in _with_fabric(facts):
        found = (fact.get("loaded") or {}).get("transports")
        if found is None or not fabric.usable or _excluded(fact, fabric):
            continue
        if not {name.split("/")[0] for name in found} & set(FABRIC_TRANSPORTS[fabric.wire]):
            transport_names = ", ".join(sorted({name.split("/")[0] for name in found})) or "none"
            build = "debug/build_nixl_ucx_efa.sh"
            yield DoctorFinding(
                "error",
                "ucx_finds_no_srd" if fabric.wire == "efa" else "ucx_finds_no_rdma",
                (node,),
                f"{fabric}, and UCX finds none of them (its transports: {transport_names})",
                "KV crosses nodes over TCP, many times slower, and nothing reports it",
                f"{build}, or --kv-backend LIBFABRIC if its plugin loads"
                if fabric.wire == "efa"
                else f"install the system's rdma-core in the version of nixl's wheel, or {build}",
                (fabric.wire,),
            )


def _nccl_plugin(facts: Facts) -> Iterator[DoctorFinding]:
    for node, fact, fabric in _with_fabric(facts):
        if fabric.wire == "efa" and fact.get("gpus") and fact.get("nccl_net") == []:
            yield DoctorFinding(
                "note",
                "nccl_plugin",
                (node,),
                "EFA devices, and no libnccl-net*.so (aws-ofi-nccl)",
                "NCCL uses sockets between nodes: wide expert parallel and TP over nodes are very slow; engines "
                "within a node are not affected",
                "AWS's EFA installer provides it (/opt/amazon/ofi-nccl); add its lib folder to LD_LIBRARY_PATH "
                "before Ray starts",
                ("an engine over several nodes",),
            )


def _modules(facts: Facts) -> Iterator[DoctorFinding]:
    for node, fact in facts.items():
        loaded = fact.get("loaded")
        if not loaded:
            continue
        fabric = fabric_of(fact)
        for module, why in failed_modules(loaded.get("log", "")).items():
            needed = _needs(module, fabric, fact)
            yield DoctorFinding(
                "note" if needed is None else "error",
                "ucx_module",
                (node,),
                why,
                "UCX continues without it and logs nothing"
                + ("; this node does not need it" if needed is None else ""),
                "none needed" if needed is None else "install the library that it names",
                needed or (),
                name=module,
            )


def _needs(module: str, fabric: Fabric | None, fact: Mapping[str, Any]) -> tuple[Concern, ...] | None:
    """The wires for which this node needs a module of UCX; None if it does not need the module."""
    if module.startswith("uct_ib"):
        own = {"uct_ib": FABRIC, "uct_ib_efa": ("efa",), "uct_ib_mlx5": ("rdma",)}.get(module, ())
        mlx5 = fabric is not None and any(device["driver"].startswith("mlx5") for device in fabric.devices)
        if fabric is None or fabric.wire not in own or (module == "uct_ib_mlx5" and not mlx5):
            return None
        return (fabric.wire,)
    if module in ("uct_cuda", "ucm_cuda") and fact.get("gpus"):
        return ("gpu peer", *NETWORK)
    return ("shared memory",) if module == "uct_cma" and not fact.get("gpus") else None


def _memory(facts: Facts) -> Iterator[DoctorFinding]:
    for node, fact, fabric in _with_fabric(facts):
        if fact.get("memlock") is not None:
            yield DoctorFinding(
                "error",
                "memlock",
                (node,),
                f"at most {fact['memlock'] / 2**20:.0f} MiB of memory may be locked",
                "RDMA registers the whole KV cache: registration fails, or falls back to TCP",
                "ulimit -l unlimited where `ray start` runs (limits.conf, LimitMEMLOCK, docker --ulimit memlock=-1)",
                (fabric.wire,),
            )
        if fabric.wire == "efa" and fact.get("hugepages") == 0:
            yield DoctorFinding(
                "note",
                "huge_pages",
                (node,),
                "HugePages_Total: 0",
                "libfabric's EFA provider uses huge pages for its buffers if there are any",
                "the EFA installer reserves them; not needed for UCX",
                (fabric.wire,),
            )


def _net_devices(facts: Facts) -> Iterator[DoctorFinding]:
    for node, fact in facts.items():
        value = fact.get("environment", {}).get("UCX_NET_DEVICES", "")
        fabric = fabric_of(fact)
        there = {*fact.get("interfaces", ()), *(device["name"] for device in fact.get("rdma", ()))}
        named = _device_names(value)
        unknown = named - there
        if unknown and not value.startswith("^"):
            yield DoctorFinding(
                "error",
                "ucx_net_devices",
                (node,),
                f"UCX_NET_DEVICES={value}; this node has {', '.join(sorted(there)) or 'none'}",
                "UCX uses the named devices only, so there is no transport between nodes",
                "unset UCX_NET_DEVICES, or name devices that every node has",
                NETWORK if named & there else (),  # NIXL's backend needs one network device for its messages
            )
        elif fabric and not _chosen(fact, fabric):
            yield DoctorFinding(
                "error",
                "ucx_net_devices",
                (node,),
                f"UCX_NET_DEVICES={value}; {fabric}",
                f"the {fabric.name} devices {UNUSED}",
                "unset UCX_NET_DEVICES, or name them",
                (fabric.wire,),
            )


def _one_nic(facts: Facts) -> Iterator[DoctorFinding]:
    for node, fact, fabric in _with_fabric(facts):
        chosen = _chosen(fact, fabric) & set(fabric.usable)
        if fact.get("gpus", 0) > 1 and len(chosen) == 1:
            by = fact.get("environment", {}).get("UCX_NET_DEVICES")
            reason = f"UCX_NET_DEVICES={by}" if by else str(fabric)
            yield DoctorFinding(
                "warning" if len(fabric.devices) > 1 else "note",
                "one_nic",
                (node,),
                f"{reason}: only {min(chosen)} serves {counted(fact['gpus'], 'GPU')}",
                "all KV transfers of the node share the rate of one device, and most GPUs reach it through the CPU",
                "unset UCX_NET_DEVICES: UCX takes the devices that are near each GPU" if by
                else "give the node, or the container, a device for each GPU",
                (fabric.wire,),
            )  # fmt: skip


def _device_names(value: str) -> set[str]:
    """Device names in UCX_NET_DEVICES, without the ports of entries such as ``mlx5_0:1``."""
    names = {entry.strip().split(":")[0] for entry in value.removeprefix("^").split(",")}
    return names - {"", "all"}


def _chosen(fact: Mapping[str, Any], fabric: Fabric) -> set[str]:
    """The fabric's devices that UCX_NET_DEVICES allows."""
    value = fact.get("environment", {}).get("UCX_NET_DEVICES", "")
    names, devices = _device_names(value), {device["name"] for device in fabric.devices}
    if value.startswith("^"):
        return devices - names
    return devices & names if names else devices


def _excluded(fact: Mapping[str, Any], fabric: Fabric) -> bool:
    """Whether UCX_NET_DEVICES or UCX_TLS excludes the fabric."""
    tls = fact.get("environment", {}).get("UCX_TLS")
    return not _chosen(fact, fabric) or bool(tls and not allows(tls, FABRIC_TRANSPORTS[fabric.wire]))


def _tls(facts: Facts) -> Iterator[DoctorFinding]:
    for node, fact in facts.items():
        value = fact.get("environment", {}).get("UCX_TLS")
        if not value:
            continue
        text, fabric = f"UCX_TLS={value}", fabric_of(fact)
        if not allows(value, ("tcp", *FABRIC_TRANSPORTS["efa"], *FABRIC_TRANSPORTS["rdma"])):
            yield DoctorFinding(
                "error",
                "ucx_tls",
                (node,),
                text,
                "no transport with error handling and none between nodes: NIXL fails to create its UCX backend",
                "unset UCX_TLS, or add tcp (or srd on EFA)",
            )
        elif fabric and not allows(value, FABRIC_TRANSPORTS[fabric.wire]):
            yield DoctorFinding(
                "error",
                "ucx_tls",
                (node,),
                f"{text}; {fabric}",
                f"the {fabric.name} devices {UNUSED}",
                f"unset UCX_TLS, or {'take out ' if value.startswith('^') else 'add '}"
                + ("srd" if fabric.wire == "efa" else "rc"),
                (fabric.wire,),
            )
        if fact.get("gpus") and not allows(value, ("cuda_ipc",)):
            yield DoctorFinding(
                "warning",
                "ucx_tls",
                (node,),
                text,
                "without cuda_ipc GPUs of one node exchange KV through host memory or the network",
                "unset UCX_TLS, or let it have cuda_ipc and cuda_copy",
                ("gpu peer",),
            )
        elif not fact.get("gpus") and not allows(value, tuple(set(SHARED_MEMORY) - {"self"})):
            yield DoctorFinding(
                "warning",
                "ucx_tls",
                (node,),
                text,
                "without sm (cma) engines of one machine exchange KV over the loopback network",
                "unset UCX_TLS, or let it have sm",
                ("shared memory",),
            )


def _emulation(facts: Facts) -> Iterator[DoctorFinding]:
    for node, fact in facts.items():
        value = fact.get("environment", {}).get("UCX_PROTO_EMULATION_ENABLE", "")
        if value.lower() not in ("n", "no", "0", "off"):
            continue
        fabric = fabric_of(fact)
        yield DoctorFinding(
            "note" if fabric else "error",
            "ucx_emulation",
            (node,),
            f"UCX_PROTO_EMULATION_ENABLE={value}",
            f"a silent fallback to software becomes an error: useful on {fabric.name}, but TCP reads fail"
            if fabric
            else "UCX can read over TCP only in software, which is turned off: every KV transfer between nodes fails",
            "leave it on EFA, InfiniBand and RoCE; set y if the wire is TCP",
            NETWORK if fabric else ("tcp",),
        )


RULES: tuple[Rule, ...] = (
    _usable,
    _libraries,
    _rails,
    _gpu_direct,
    _not_found,
    _nccl_plugin,
    _modules,
    _memory,
    _net_devices,
    _one_nic,
    _tls,
    _emulation,
)
