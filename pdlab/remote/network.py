"""Host, network interfaces, line rates and byte counters of this machine.

Sent by value to nodes without pdlab: imports only the standard library and psutil, which Ray brings.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pdlab.remote.kernel_files import boot_id, namespace, read

CLASS_NET = Path("/sys/class/net")
CLASS_RDMA = Path("/sys/class/infiniband")
# On EFA tx_bytes and rx_bytes count all traffic; the rdma_*_bytes counters can stay 0.
EFA_COUNTERS = ("tx_bytes", "rx_bytes")
IB_COUNTERS = ("port_xmit_data", "port_rcv_data")  # in units of 4 bytes
SETTLE = 1.5  # wait for this many lifespans of the kernel's copy of the counters


@dataclass(frozen=True)
class Interface:
    """One interface. ``kind``: efa, infiniband, roce, ethernet, virtual or loopback. ``gbit_per_s``: the line rate, or
    the rate of its `tc` shaper (``shaped``); None: unknown, as for a virtual interface."""

    name: str
    kind: str
    gbit_per_s: float | None
    shaped: bool = False


@dataclass(frozen=True)
class RankHost:
    """The host of a rank. Ranks with the same ``memory`` can read each other's memory. ``boot``: the kernel's id.
    ``cores``: those that the rank may use; None: unknown."""

    name: str
    ip: str
    pid: int
    boot: str
    memory: str
    nics: tuple[Interface, ...]
    cores: int | None = None

    @property
    def efa(self) -> bool:
        return any(nic.kind == "efa" for nic in self.nics)

    @property
    def rdma(self) -> bool:
        return any(nic.kind in ("efa", "infiniband", "roce") for nic in self.nics)


def host_facts(ip: str) -> RankHost:
    """Facts of this process's host; ``ip`` is the address that other hosts use."""
    boot = boot_id() or socket.gethostname()
    # UCX also compares host, pid namespace and ipc namespace. The others distinguish hosts made of namespaces.
    spaces = [namespace(kind) or kind for kind in ("ipc", "pid", "net", "uts")]
    cores = len(os.sched_getaffinity(0))
    return RankHost(socket.gethostname(), ip, os.getpid(), boot, ":".join([boot, *spaces]), nics(), cores)


def nics() -> tuple[Interface, ...]:
    """Network interfaces that are up, and RDMA devices with a link."""
    interfaces = []
    for path in sorted(CLASS_NET.glob("*")):
        if not (path / "operstate").exists() or (read(path / "operstate") == "down"):
            continue
        if path.name == "lo":
            interfaces.append(Interface("lo", "loopback", None))
            continue
        rate = _shaped_gbit(path.name)
        virtual = not (path / "device").exists()
        speed = None if virtual else _number(path / "speed")
        line = speed / 1000 if speed and speed > 0 else None
        shaped = rate is not None and (line is None or rate < line)
        interfaces.append(Interface(path.name, "virtual" if virtual else "ethernet", rate if shaped else line, shaped))
    linked = (device for device in rdma_devices() if device.active)
    interfaces += (Interface(device.path.name, device.kind, line_rate(device)) for device in linked)
    return tuple(interfaces)


class RdmaDevice(NamedTuple):
    """An RDMA device. ``path``: in sysfs. ``kind``: efa, infiniband or roce. ``active``: its port has a link, or the
    kernel does not report it."""

    path: Path
    driver: str
    kind: str
    active: bool


def rdma_devices() -> list[RdmaDevice]:
    """The RDMA devices, sorted by name."""
    devices = []
    for path in sorted(CLASS_RDMA.glob("*")):
        driver = (path / "device" / "driver").resolve().name
        infiniband = read(path / "ports/1/link_layer") == "InfiniBand"
        kind = "efa" if driver == "efa" else "infiniband" if infiniband else "roce"
        state = read(path / "ports/1/state")  # "4: ACTIVE"
        devices.append(RdmaDevice(path, driver, kind, state is None or state.endswith("ACTIVE")))
    return devices


def line_rate(device: RdmaDevice) -> float | None:
    """The line rate in Gbit/s; None if the kernel does not report it."""
    word = (read(device.path / "ports/1/rate") or "").split()
    return float(word[0]) if word else None


def counters() -> dict[str, tuple[int, int]]:
    """Interface or RDMA device -> bytes (received, sent) since it came up."""
    import psutil

    every = psutil.net_io_counters(pernic=True, nowrap=False)
    bytes_by_device = {name: (nic.bytes_recv, nic.bytes_sent) for name, nic in every.items()}
    for path in CLASS_RDMA.glob("*"):
        for folder, names, unit in (("hw_counters", EFA_COUNTERS, 1), ("counters", IB_COUNTERS, 4)):
            sent, received = (_number(path / "ports/1" / folder / name) for name in names)
            if sent is not None and received is not None:
                bytes_by_device[path.name] = (int(received) * unit, int(sent) * unit)
                break
    return bytes_by_device


def settled_counters() -> dict[str, tuple[int, int]]:
    """As `counters`, after a wait until all bytes so far are counted.

    The kernel reads a device's hw_counters at most once per lifespan (10 ms by default) and otherwise returns its copy.
    """
    lifespans = [_number(path) for path in CLASS_RDMA.glob("*/ports/1/hw_counters/lifespan")]
    time.sleep(SETTLE * max((ms or 0.0 for ms in lifespans), default=0.0) / 1000)
    return counters()


def reading() -> dict[str, Any]:
    """``kinds``: interface -> kind (as in `Interface`). ``counters``: the settled counters."""
    return {"kinds": {nic.name: nic.kind for nic in nics()}, "counters": settled_counters()}


def bytes_between(before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Interface -> bytes (received, sent) between two readings; interfaces without traffic are left out."""
    differences = {}
    for name, (received, sent) in after.items():
        earlier = before.get(name, (received, sent))
        if received - earlier[0] or sent - earlier[1]:
            differences[name] = (received - earlier[0], sent - earlier[1])
    return differences


def _shaped_gbit(name: str) -> float | None:
    """Rate in Gbit/s to which `tc` shapes outgoing traffic; None without a shaper, or if `tc` fails."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired, ValueError):
        command = ["tc", "-j", "qdisc", "show", "dev", name]
        completed = subprocess.run(command, capture_output=True, text=True, timeout=10)
        for discipline in json.loads(completed.stdout or "[]"):
            if discipline.get("kind") == "tbf":  # tc prints bytes per second
                return float(discipline["options"]["rate"]) * 8 / 1e9
    return None


def _number(path: Path) -> float | None:
    text = read(path)
    try:
        return float(text) if text else None
    except ValueError:
        return None
