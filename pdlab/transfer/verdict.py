"""Judge the wire and speed of a transfer from UCX's table, the byte counters and the hosts. Pure.

The right wire within a host is shared memory, or cuda_ipc for GPU memory. Between hosts it is srd with EFA, and verbs
with InfiniBand or RoCE, both zero-copy. Between hosts with only Ethernet it is tcp, over which UCX emulates reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pdlab.core.findings import Finding, found
from pdlab.core.text import counted
from pdlab.remote.network import Interface, RankHost
from pdlab.transfer.ucx_log import Wire

OK, SLOW, CORRUPT = 0, 3, 4  # exit codes; SLOW also means the wrong wire

SHARED_MEMORY = ("cma", "xpmem", "knem", "sysv", "posix", "self")
GPU_PEER = ("cuda_ipc", "cuda_copy", "gdr_copy", "rocm_ipc")
VERBS = ("rc", "rc_x", "rc_mlx5", "rc_verbs", "dc", "dc_x", "dc_mlx5", "ud", "ud_x", "ud_verbs", "ud_mlx5", "gga_mlx5")
EFA = ("srd", "ud_verbs")
# Wire -> the transports with which UCX reads a peer's memory over it.
FABRIC: dict[str, tuple[str, ...]] = {
    "efa": ("srd",),
    "rdma": tuple(name for name in VERBS if name.split("_")[0] in ("rc", "dc")),
}
# The right wire is slow below this share of its ceiling. Measured: tcp with one stream per NIXL worker reaches 0.89 to
# 0.96 of a shaped link, cma at least 0.6 of memcpy. The bounds of EFA and GPUs are lenient guesses, without a
# measurement: a GPU copies in its own memory many times faster than over any link between two GPUs.
Ceiling = Literal["memcpy", "GPU copy", "line rate", "rails"]
SLOW_SHARE: dict[Ceiling, float] = {"memcpy": 0.2, "GPU copy": 0.002, "line rate": 0.5, "rails": 0.2}
WHY_SLOW: dict[Ceiling, str] = {
    "memcpy": "slow_memory",
    "GPU copy": "slow_gpu_link",
    "line rate": "slow_tcp",
    "rails": "slow_rails",
}
# Smaller transfers are not judged slow, because posting and polling take most of their time.
LEAST_BYTES = 64_000_000
UNPROVEN = "a wire that is not proven (no table of UCX's, and no interface counted it)"
CARRIED = 0.5  # interfaces carried the payload if they counted at least this share of it
PART = 0.25  # the interfaces of a kind carried a part of the payload if together they counted at least this share
IN_USE = 0.1  # an interface of such a kind is in use if it counted at least this share of the busiest one's bytes
EMULATION_FREE_SINCE = (1, 20)


@dataclass(frozen=True)
class ObservedTransfer:
    """Observations of a run. ``gb_per_s``: median of the warm repeats of the largest size, ``size_bytes``.

    ``payload_bytes``: of all transfers. ``traffic``: interface -> bytes of all transfers, in the payload's direction on
    the initiator's host. ``memcpy_gb_per_s``: of one thread on the destination's host, or of the GPU's own copy.
    ``ranks``: those that read or write at the same time.
    """

    strategy: str
    backend: str
    direction: str
    prefill: RankHost
    decode: RankHost
    vram: bool
    gb_per_s: float
    size_bytes: int
    wire: Wire | None
    payload_bytes: int
    traffic: Mapping[str, int]
    memcpy_gb_per_s: float | None
    ucx_version: str | None = None
    ucx_tls: str | None = None
    failed_modules: Mapping[str, str] | None = None
    ranks: int = 1

    @property
    def copies(self) -> int:
        """Copies at the same time that are the ceiling within a host: one per rank, on a core or GPU of its own."""
        return self.ranks if self.vram else min(self.ranks, _initiator_host(self).cores or self.ranks)


@dataclass(frozen=True)
class Verdict:
    """The verdict. ``code``: exit code. ``text``: one line. ``share``: speed over the ceiling, which is named ``of``.

    ``cause``: likely cause of a wrong or slow wire. ``proven``: UCX's table or an interface's counter shows the wire;
    otherwise it is only known that no interface carried the payload.
    """

    code: int
    text: str
    wire: str
    protocol: str
    expected: str
    share: float | None
    of: str
    cause: Finding | None = None
    proven: bool = True
    ceiling: Ceiling | None = None


def judge(run: ObservedTransfer) -> Verdict:
    """The verdict: right and fast (0), or slow or wrong wire (3) with the likely cause and a fix."""
    expected, right_transports = _expected(run)
    proven_name, transports, protocol = _actual(run)
    name = proven_name or UNPROVEN
    share, ceiling, ceiling_name = _share(run, transports)
    speed = f"{_gb(run.gb_per_s)} GB/s"
    of_text = "" if share is None else f", {share:.0%} of {ceiling_name}"
    contradiction = _contradiction(run, transports)

    def verdict(code: int, text: str, cause: Finding | None = None) -> Verdict:
        if cause:
            text += f"; likely cause: {cause.text}"
        proven = proven_name is not None
        return Verdict(code, text, name, protocol, expected, share, ceiling_name, cause, proven, ceiling)

    wrong = not transports or not set(transports) <= set(right_transports)
    emulated = run.wire is not None and run.wire.emulated and not set(transports) <= {"tcp"}
    if wrong or emulated or contradiction:
        wire_text = f"{protocol} over {name}" if protocol else name
        cause = contradiction or _cause(run, transports, expected, emulated)
        return verdict(SLOW, f"WRONG WIRE: {run.strategy} by {wire_text}, {speed}; expected {expected}", cause)
    protocol_text = f", {protocol}" if protocol else ""
    if run.wire is not None and run.wire.emulated:
        protocol_text += " (UCX has no other read over tcp)"
    text = f"{run.strategy} over {name}{protocol_text}, {speed}{of_text}"
    if share is not None and share < SLOW_SHARE[ceiling] and run.size_bytes >= LEAST_BYTES:
        return verdict(SLOW, f"SLOW: {text}", found(WHY_SLOW[ceiling]))
    return verdict(OK, f"OK: {text}")


def one_host(run: ObservedTransfer) -> bool:
    """Whether kernel and namespaces let the ranks reach each other's memory."""
    return run.prefill.memory == run.decode.memory


def notes(run: ObservedTransfer) -> list[Finding]:
    """Notes on the basis of the verdict."""
    remarks = []
    if run.strategy == "spread" and one_host(run):
        remarks.append(found("spread_on_one_host"))
    elif run.prefill.boot == run.decode.boot and not one_host(run):
        remarks.append(found("hosts_share_a_kernel"))
    if run.size_bytes < LEAST_BYTES:
        remarks.append(found("too_few_bytes", megabytes=run.size_bytes / 1e6, least_megabytes=LEAST_BYTES / 1e6))
    if run.wire is None and run.backend == "UCX":
        remarks.append(found("no_protocol_table"))
    if run.backend != "UCX":
        remarks.append(found("backend_reports_no_transport", backend=run.backend))
    return remarks


def traffic_share(run: ObservedTransfer) -> dict[str, float]:
    """Interface -> its counted bytes as a share of the payload, without shares below 1 %."""
    shares = {nic: count / run.payload_bytes for nic, count in run.traffic.items()} if run.payload_bytes else {}
    return {nic: share for nic, share in sorted(shares.items(), key=lambda item: -item[1]) if share >= 0.01}


def _expected(run: ObservedTransfer) -> tuple[str, tuple[str, ...]]:
    if one_host(run):
        if run.vram:
            return "cuda_ipc (GPU memory of one host)", GPU_PEER
        return "shared memory (cma), zero-copy", SHARED_MEMORY
    if run.prefill.efa and run.decode.efa:
        return "srd over EFA, zero-copy", (*EFA, "efa")
    if run.prefill.rdma and run.decode.rdma:
        return "RDMA verbs, zero-copy", VERBS
    return "tcp", ("tcp",)


def _actual(run: ObservedTransfer) -> tuple[str | None, tuple[str, ...], str]:
    """(name, transports, protocol) from UCX's table, else from the counters; the name is None without a proof."""
    if run.wire is not None and run.wire.lanes:
        return run.wire.name, run.wire.transports, run.wire.protocol
    carriers = [carrier for carrier in _carriers(run) if carrier.share >= PART]
    if not carriers:
        return None, ("cuda_ipc",) if run.vram else ("cma",), ""
    return " + ".join(map(str, carriers)), tuple(dict.fromkeys(carrier.transport for carrier in carriers)), ""


@dataclass(frozen=True)
class _Carrier:
    """Interfaces of one kind that are in use. ``share``: of the payload, counted by all of that kind together."""

    transport: str
    nics: tuple[str, ...]
    share: float

    def __str__(self) -> str:
        if len(self.nics) <= 4:
            return " + ".join(f"{self.transport}/{nic}" for nic in self.nics)
        return f"{self.transport} on {counted(len(self.nics), 'device')}"


def _carriers(run: ObservedTransfer) -> list[_Carrier]:
    """Counted bytes by kind of interface, the largest share first; a payload is spread over many devices of a kind.

    A virtual interface lies on others, whose bytes it counts again, so each one is a kind of its own.
    """
    kinds = {nic.name: nic.kind for nic in _initiator_host(run).nics}
    by_kind: dict[tuple[str, str], dict[str, int]] = {}
    for nic, count in run.traffic.items():
        kind = kinds.get(nic, "virtual")
        transport = {"efa": "efa", "infiniband": "rc", "roce": "rc"}.get(kind, "tcp")
        by_kind.setdefault((transport, nic if kind in ("virtual", "loopback") else ""), {})[nic] = count
    carriers = []
    for (transport, _), counts in by_kind.items():
        busiest = max(counts.values())
        if busiest and run.payload_bytes:
            in_use = sorted(
                (nic for nic in counts if counts[nic] >= IN_USE * busiest), key=lambda nic: (-counts[nic], nic)
            )
            carriers.append(_Carrier(transport, tuple(in_use), sum(counts.values()) / run.payload_bytes))
    return sorted(carriers, key=lambda carrier: -carrier.share)


def _initiator_host(run: ObservedTransfer) -> RankHost:
    """The host whose ranks read or write, and whose interfaces are counted."""
    return run.decode if run.direction == "read" else run.prefill


def _lanes(run: ObservedTransfer, transports: tuple[str, ...]) -> list[list[Interface]]:
    """The interfaces in use of the initiator's host and, for tcp, the peer's. UCX names a port ``device:port``."""
    if run.wire is not None and run.wire.lanes:
        names = {lane.device.split(":")[0] for lane in run.wire.lanes}
    else:
        names = {nic for carrier in _carriers(run) if carrier.share >= PART for nic in carrier.nics}
    initiator_host = _initiator_host(run)
    peer_host = run.prefill if initiator_host is run.decode else run.decode
    sides = [[nic for nic in initiator_host.nics if nic.name in names]]
    if transports == ("tcp",):  # the peer's interface may have another name: take its only interface with a rate
        rated = [nic for nic in peer_host.nics if nic.kind in ("ethernet", "virtual") and nic.gbit_per_s]
        sides += [rated[:1]] if len(rated) == 1 else []
    return sides


def _share(run: ObservedTransfer, transports: tuple[str, ...]) -> tuple[float | None, Ceiling, str]:
    """(share of the ceiling, its kind, its name)."""
    if set(transports) & {*SHARED_MEMORY, *GPU_PEER}:
        if not run.memcpy_gb_per_s:
            return None, "memcpy", "memcpy"
        share, one = run.gb_per_s / (run.memcpy_gb_per_s * run.copies), run.copies == 1
        if run.vram:
            return share, "GPU copy", "the GPU's own copy" if one else f"{run.copies} GPUs' own copies"
        return share, "memcpy", "memcpy" if one else f"memcpy on {run.copies} cores"
    sides = [side for side in _lanes(run, transports) if side and all(nic.gbit_per_s for nic in side)]
    rates = [sum(nic.gbit_per_s or 0.0 for nic in side) for side in sides]
    if not rates:
        return None, "line rate", "line rate"
    gbit = min(rates)
    slowest_side = sides[rates.index(gbit)]
    share = run.gb_per_s * 8 / gbit
    if transports == ("tcp",):
        shaped = ", shaped" if any(nic.shaped for nic in slowest_side) else ""
        return share, "line rate", f"the line rate ({gbit:g} Gbit/s{shaped})"
    return share, "rails", f"{len(slowest_side)} rail{'s' * (len(slowest_side) != 1)} ({gbit / 8:g} GB/s)"


def _contradiction(run: ObservedTransfer, transports: tuple[str, ...]) -> Finding | None:
    """A finding if UCX's table and the byte counters disagree."""
    if run.wire is None or not run.wire.lanes or not run.payload_bytes:
        return None
    if not set(transports) & {"tcp", *EFA, *VERBS}:
        loud = next((carrier for carrier in _carriers(run) if carrier.share >= CARRIED), None)
        return found("wire_not_as_counted", wire=run.wire.name, nic=str(loud), share=loud.share) if loud else None
    devices = {device.split(":")[0] for device in run.wire.devices}
    share = sum(count for nic, count in run.traffic.items() if nic in devices) / run.payload_bytes
    if share < CARRIED and devices & {nic.name for nic in _initiator_host(run).nics}:
        return found("wire_counts_nothing", wire=run.wire.name, share=share)
    return None


def _cause(run: ObservedTransfer, transports: tuple[str, ...], expected: str, emulated: bool) -> Finding:
    """Likely cause of a wrong wire; checks the strongest evidence first."""
    tls = run.ucx_tls if run.backend == "UCX" else None
    failed = run.failed_modules or {}
    if one_host(run) and run.backend != "UCX":
        return found("wire_backend_leaves_host", backend=run.backend, wire=_actual(run)[0])
    if one_host(run):
        if tls and not allows(tls, GPU_PEER if run.vram else SHARED_MEMORY):
            return found("wire_tls_lacks", tls=tls, lacks="shared memory", needed="cuda_ipc" if run.vram else "cma")
        for module in ("uct_cma", *(("uct_cuda",) if run.vram else ())):
            if module in failed:
                return found("wire_module_lacks", module=module, why=failed[module])
        return found("wire_memory_forbidden")
    if run.prefill.efa and run.decode.efa:
        if tls and not allows(tls, FABRIC["efa"]):
            return found("wire_tls_lacks", tls=tls, lacks="srd", needed="srd")
        if "tcp" in transports and {"srd", "efa"} & set(transports):
            return found("wire_efa_of_some_ranks")
        if emulated or "srd" in transports:
            if run.ucx_version and _release(run.ucx_version) < EMULATION_FREE_SINCE:
                return found("wire_ucx_too_old", version=run.ucx_version)
            return found("wire_efa_without_gpudirect")
        if "uct_ib_efa" in failed:
            return found("wire_efa_module_lacks", why=failed["uct_ib_efa"])
        return found("wire_efa_not_usable", backend=run.backend)
    if run.prefill.rdma and run.decode.rdma:
        if tls and not allows(tls, FABRIC["rdma"]):
            return found("wire_tls_lacks", tls=tls, lacks="the reads of InfiniBand and RoCE", needed="rc")
        if "tcp" in transports and set(VERBS) & set(transports):
            return found("wire_rdma_of_some_ranks")
        if emulated:
            return found("wire_rdma_without_gpudirect")
        if "uct_ib" in failed:
            return found("wire_module_lacks", module="uct_ib", why=failed["uct_ib"])
        return found("wire_rdma_unused", backend=run.backend)
    lone = next((host for host in (run.prefill, run.decode) if host.rdma), None)
    return found("wire_rdma_on_one_side", host=lone.name) if lone else found("wire_unexpected", expected=expected)


def allows(tls: str, transports: tuple[str, ...]) -> bool:
    """Whether a UCX_TLS list allows one of the transports (``^`` negates; sm, shm, cuda, ib and all are groups)."""
    groups = {
        "sm": SHARED_MEMORY,
        "shm": SHARED_MEMORY,
        "mm": ("sysv", "posix", "xpmem"),
        "cuda": GPU_PEER,
        "ib": (*VERBS, *EFA),
        "efa": EFA,
        **{family: tuple(name for name in VERBS if name.split("_")[0] == family) for family in ("rc", "dc", "ud")},
    }
    names = [entry.strip().split(":")[0] for entry in tls.removeprefix("^").split(",") if entry.strip()]
    allowed = {name for word in names for name in groups.get(word, (word,))}
    if tls.startswith("^"):
        return not set(transports) <= allowed
    return "all" in allowed or bool(set(transports) & allowed)


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split(".")[:2])


def _gb(value: float) -> str:
    """Two significant digits below 1, else one decimal."""
    return f"{value:.1f}" if value >= 1 else f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"
