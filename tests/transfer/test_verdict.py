"""UCX's tables of every form, and the verdicts that follow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlab.core.findings import CODES
from pdlab.remote import network
from pdlab.remote.network import Interface, RankHost, bytes_between
from pdlab.transfer.ucx_log import (
    UcxLane,
    Wire,
    failed_modules,
    parse_table,
    reads,
    together,
    ucx_version,
    wire_of,
)
from pdlab.transfer.verdict import OK, SLOW, ObservedTransfer, judge, notes

SAMPLES = Path(__file__).resolve().parents[1] / "data" / "ucx"
SRD = "srd/rdmap79s0:1"

# (file, UCX, operation, protocol, lanes, counted operations)
TABLES = [
    ("ucx-1.19-perftest-get-cma", "1.19.0", "read", "zero-copy", ["cma/memory"], None),
    ("ucx-1.19-perftest-get-tcp", "1.19.0", "read", "software emulation", ["tcp/lo"], None),
    ("ucx-1.19-perftest-get-tcp", "1.19.0", "write", "zero-copy", ["tcp/lo"], None),
    (
        "ucx-1.19-perftest-rendezvous",
        "1.19.0",
        "message",
        "rendezvous zero-copy read from remote",
        ["cma/memory"],
        None,
    ),
    ("ucx-1.21-nixl-read-cma", "1.21.0", "read", "zero-copy", ["cma/memory"], 40960),
    ("ucx-1.21-nixl-read-tcp", "1.21.0", "read", "software emulation", ["tcp/lo"], 20480),
    ("ucx-1.21-nixl-read-cma-candidates", None, "read", "zero-copy", ["cma/memory"], None),
    ("ucx-1.21-nixl-read-tcp-candidates", None, "read", "software emulation", ["tcp/lo"], None),
    ("ucx-1.21-nixl-write-tcp", "1.21.0", "write", "zero-copy", ["tcp/lo", "tcp/eth0"], 43152),
    ("ucx-1.22-perftest-rendezvous", "1.22.0", "message", "rendezvous zero-copy read from remote", ["cma/memory"], 215),
    ("ucx-1.23-nixl-read-cma", "1.23.0", "read", "zero-copy", ["cma/memory"], 20480),
    ("ucx-1.23-nixl-read-tcp", "1.23.0", "read", "software emulation", ["tcp/lo"], 20480),
    ("made-1.19-srd-emulation", "1.19.0", "read", "software emulation", [SRD], None),
    ("made-1.21-srd-zero-copy", "1.21.0", "read", "zero-copy", [SRD, "srd/rdmap80s0:1"], 28980),
    (
        "made-1.23-srd-rendezvous",
        None,
        "message",
        "rendezvous zero-copy read from remote",
        [SRD, "srd/rdmap80s0:1"],
        643,
    ),
]


@pytest.mark.parametrize("name, version, operation, protocol, lanes, count", TABLES)
def test_tables(name, version, operation, protocol, lanes, count) -> None:  # type: ignore[no-untyped-def]
    log = (SAMPLES / f"{name}.log").read_text()
    wire = wire_of(parse_table(log), operation, 65536)
    assert ucx_version(log) == version
    assert wire is not None
    assert (wire.protocol, [lane.name for lane in wire.lanes], wire.operations) == (protocol, lanes, count)
    assert wire.counted == (count is not None)
    assert wire.emulated == ("emulation" in protocol)


@pytest.mark.parametrize("transport", ["cma", "tcp"])
@pytest.mark.parametrize("kind", ["", "-candidates"])
def test_how_a_peer_is_read(transport: str, kind: str) -> None:
    """By both forms of the table that NIXL's UCX prints, of what was used and of what it chooses."""
    rows = parse_table((SAMPLES / f"ucx-1.21-nixl-read-{transport}{kind}.log").read_text())
    peer = reads(rows, ("intra-node",), 4096)
    assert peer is not None and peer.transports == (transport,)
    assert reads(rows, ("inter-node",), 4096) is None, "none is on another node"


def test_every_sample_is_used() -> None:
    assert {path.stem for path in SAMPLES.glob("*.log")} == {row[0] for row in TABLES}


def test_lanes_carry_their_share() -> None:
    rows = parse_table((SAMPLES / "ucx-1.21-nixl-write-tcp.log").read_text())
    wire = wire_of(rows, "write", 1)
    assert wire is not None and [lane.percent for lane in wire.lanes] == [52, 48]


def test_a_candidate_counts_only_for_its_sizes() -> None:
    rows = parse_table((SAMPLES / "ucx-1.19-perftest-rendezvous.log").read_text())
    small = wire_of(rows, "message", 64)
    assert small is not None and small.protocol == "eager short" and small.transports == ("tcp",)


def test_modules_that_did_not_load() -> None:
    failed = failed_modules((SAMPLES / "ucx-1.21-nixl-read-cma.log").read_text())
    assert failed["uct_ib_efa"] == "libefa.so.1: cannot open shared object file: No such file or directory"
    assert "uct_cma" not in failed and "uct_ib" not in failed


@given(st.text(alphabet="|+- \n.0123456789infKread ucp_get*cfg#intra-node", max_size=400))
def test_garbage_gives_no_row_and_no_error(text: str) -> None:
    for row in parse_table(text):
        assert row.low >= 0 and row.operation in ("read", "write", "message")
    assert failed_modules(text) == {}


def test_a_row_cut_behind_an_inner_bar_is_no_row() -> None:
    log = (SAMPLES / "ucx-1.22-perftest-rendezvous.log").read_text()
    assert parse_table(log[:1440]) == parse_table(log)[:2]


@given(st.data())
def test_a_table_cut_anywhere_gives_no_row_that_the_whole_does_not(data: st.DataObject) -> None:
    log = (SAMPLES / f"{data.draw(st.sampled_from(TABLES))[0]}.log").read_text()
    rows = parse_table(log)
    cut = parse_table(log[: data.draw(st.integers(0, len(log)))])
    assert cut == rows[: len(cut)]


def test_no_operation_of_that_kind_gives_no_wire() -> None:
    assert wire_of(parse_table((SAMPLES / "ucx-1.21-nixl-read-cma.log").read_text()), "write", 65536) is None
    assert wire_of((), "read", 1) is None


ETHERNET = (Interface("lo", "loopback", None), Interface("ens5", "ethernet", 100.0))
EFA_NICS = (*ETHERNET, *(Interface(f"rdmap{i}s0", "efa", 100.0) for i in (79, 80, 81, 82)))
HOST_A = RankHost("a", "10.0.0.1", 1, "boot-a", "memory-a", ETHERNET)
HOST_B = RankHost("b", "10.0.0.2", 2, "boot-b", "memory-b", ETHERNET)
EFA_A, EFA_B = replace(HOST_A, nics=EFA_NICS), replace(HOST_B, nics=EFA_NICS)
GIB = 2**30


def wire(protocol: str, *lanes: str) -> Wire:
    return Wire(protocol, tuple(UcxLane(*lane.split("/", 1)) for lane in lanes), True, 1000)


TCP = wire("software emulation", "tcp/ens5")
CMA = wire("zero-copy", "cma/memory")
CUDA = wire("zero-copy", "cuda_ipc/cuda")
TWO_RAILS = wire("zero-copy", "srd/rdmap79s0:1", "srd/rdmap80s0:1")
ON_TWO_RAILS = {"rdmap79s0": GIB // 2, "rdmap80s0": GIB // 2}


def observed(**changes: Any) -> ObservedTransfer:
    fields: dict[str, Any] = dict(
        strategy="spread", backend="UCX", direction="read", prefill=HOST_A, decode=HOST_B, vram=False, gb_per_s=11.4,
        size_bytes=GIB, wire=TCP, payload_bytes=GIB, traffic={"ens5": GIB}, memcpy_gb_per_s=8.0, ucx_version="1.21.0",
    )  # fmt: skip
    return ObservedTransfer(**(fields | changes))


ONE_HOST: dict[str, Any] = dict(strategy="pack", decode=HOST_A, wire=CMA, traffic={"lo": 1000}, gb_per_s=6.0)
ON_EFA: dict[str, Any] = dict(prefill=EFA_A, decode=EFA_B, vram=True)

IB = Interface("mlx5_0", "infiniband", 400.0)
IB_A, IB_B = (replace(host, nics=(*ETHERNET, IB)) for host in (HOST_A, HOST_B))
VIRTUAL_A, VIRTUAL_B = (replace(host, nics=(Interface("ens5", "virtual", None),)) for host in (HOST_A, HOST_B))
ON_LOOPBACK = ONE_HOST | dict(wire=wire("software emulation", "tcp/lo"), traffic={"lo": GIB}, gb_per_s=0.3)
EMULATED_SRD = ON_EFA | dict(wire=wire("software emulation", SRD), traffic={"rdmap79s0": GIB})
CUDA_IPC = ONE_HOST | dict(vram=True, wire=wire("zero-copy", "cuda_ipc/cuda"))
LIBFABRIC = dict(backend="LIBFABRIC", wire=None)
RC = wire("zero-copy", "rc_mlx5/mlx5_0:1")
ON_IB = dict(prefill=IB_A, decode=IB_B, wire=RC, traffic={"mlx5_0": GIB})

# What: changes, the cause (None: right and fast), and how the verdict begins.
CASES: dict[str, tuple[dict[str, Any], str | None, str]] = {
    "tcp between Ethernet hosts": (
        {},
        None,
        "OK: spread over tcp/ens5, software emulation (UCX has no other read over tcp), 11.4 GB/s, 91% of the line rate"
        " (100 Gbit/s)",
    ),
    "srd": (
        ON_EFA | dict(wire=TWO_RAILS, traffic=ON_TWO_RAILS),
        None,
        "OK: spread over srd/rdmap79s0:1 + srd/rdmap80s0:1, zero-copy, 11.4 GB/s, 46% of 2 rails",
    ),
    "cma on one host": (ONE_HOST, None, "OK: pack over cma/memory, zero-copy, 6.0 GB/s, 75% of memcpy"),
    "spread on one host": (ONE_HOST | dict(strategy="spread"), None, "OK: spread over cma/memory"),
    "tcp on one host, forced": (
        ON_LOOPBACK | dict(ucx_tls="tcp"),
        "wire_tls_lacks",
        "WRONG WIRE: pack by software emulation over tcp/lo, 0.30 GB/s; expected shared memory (cma), zero-copy; "
        "likely cause: UCX_TLS=tcp leaves out shared memory; try: unset UCX_TLS, or let it have cma",
    ),
    "tcp on one host, not forced": (ON_LOOPBACK, "wire_memory_forbidden", "WRONG WIRE: pack"),
    "tcp on one host, no cma": (
        ON_LOOPBACK | dict(failed_modules={"uct_cma": "no symbol"}), "wire_module_lacks", "WRONG WIRE: pack",
    ),
    "tcp with EFA": (
        ON_EFA | dict(gb_per_s=0.3, failed_modules={"uct_ib_efa": "libefa.so.1: cannot open"}),
        "wire_efa_module_lacks",
        "WRONG WIRE: spread by software emulation over tcp/ens5, 0.30 GB/s; expected srd over EFA, zero-copy",
    ),
    "tcp with EFA, without a word": (ON_EFA | dict(gb_per_s=0.3), "wire_efa_not_usable", "WRONG WIRE: spread"),
    "tcp with EFA, forced": (ON_EFA | dict(ucx_tls="tcp"), "wire_tls_lacks", "WRONG WIRE: spread"),
    "emulation over srd, UCX 1.19": (
        EMULATED_SRD | dict(ucx_version="1.19.0"),
        "wire_ucx_too_old",
        "WRONG WIRE: spread by software emulation over srd",
    ),
    "emulation over srd, UCX 1.21": (EMULATED_SRD, "wire_efa_without_gpudirect", "WRONG WIRE: spread"),
    "tcp between InfiniBand hosts": (dict(prefill=IB_A, decode=IB_B), "wire_rdma_unused", "WRONG WIRE: spread"),
    "tcp between InfiniBand hosts, forced": (
        dict(prefill=IB_A, decode=IB_B, ucx_tls="tcp"),
        "wire_tls_lacks",
        "WRONG WIRE: spread by software emulation over tcp/ens5, 11.4 GB/s; expected RDMA verbs, zero-copy; likely "
        "cause: UCX_TLS=tcp leaves out the reads of InfiniBand and RoCE; try: unset UCX_TLS, or let it have rc",
    ),
    "tcp between InfiniBand hosts, no module": (
        dict(prefill=IB_A, decode=IB_B, failed_modules={"uct_ib": "libibverbs.so.1: cannot open"}),
        "wire_module_lacks",
        "WRONG WIRE: spread",
    ),
    "tcp for some ranks between InfiniBand hosts": (
        dict(prefill=IB_A, decode=IB_B, wire=wire("software emulation and zero-copy", "tcp/ens5", "rc_mlx5/mlx5_0:1")),
        "wire_rdma_of_some_ranks",
        "WRONG WIRE: spread",
    ),
    "emulation over InfiniBand": (
        ON_IB | dict(wire=wire("software emulation", "rc_mlx5/mlx5_0:1")),
        "wire_rdma_without_gpudirect",
        "WRONG WIRE: spread by software emulation over rc_mlx5/mlx5_0:1",
    ),
    "emulation over datagrams, forced": (
        ON_IB | dict(wire=wire("software emulation", "ud_mlx5/mlx5_0:1"), ucx_tls="ud,tcp"),
        "wire_tls_lacks",
        "WRONG WIRE: spread by software emulation over ud_mlx5/mlx5_0:1",
    ),
    "slow InfiniBand": (
        ON_IB | dict(gb_per_s=3.0),
        "slow_rails",
        "SLOW: spread over rc_mlx5/mlx5_0:1, zero-copy, 3.0 GB/s, 6% of 1 rail (50 GB/s)",
    ),
    "slow InfiniBand between GPUs": (ON_IB | dict(gb_per_s=3.0, vram=True), "slow_rails", "SLOW: spread"),
    "slow LIBFABRIC on EFA": (
        ON_EFA | LIBFABRIC | dict(traffic=ON_TWO_RAILS, gb_per_s=1.0), "slow_rails", "SLOW: spread over efa/rdmap79s0",
    ),
    "LIBFABRIC fallen back, with a setting of UCX": (
        ON_EFA | LIBFABRIC | dict(gb_per_s=0.2, ucx_tls="tcp"),
        "wire_efa_not_usable",
        "WRONG WIRE: spread by tcp/ens5, 0.20 GB/s; expected srd over EFA, zero-copy; likely cause: LIBFABRIC sees no "
        "usable EFA device",
    ),
    "LIBFABRIC fallen back for some ranks": (
        ON_EFA | LIBFABRIC | dict(traffic={"rdmap79s0": GIB // 2, "ens5": GIB // 2}),
        "wire_efa_of_some_ranks",
        "WRONG WIRE: spread by efa/rdmap79s0 + tcp/ens5",
    ),
    "InfiniBand on one host": (dict(decode=IB_B, wire=CMA, traffic={}), "wire_rdma_on_one_side", "WRONG WIRE: spread"),
    "shared memory between hosts": (dict(wire=CMA, traffic={}), "wire_unexpected", "WRONG WIRE: spread by zero-copy"),
    "host staging on one GPU host": (
        ONE_HOST | dict(vram=True, ucx_tls="tcp,cma"),
        "wire_tls_lacks",
        "WRONG WIRE: pack by zero-copy over cma/memory",
    ),
    "cuda_ipc": (CUDA_IPC, None, "OK: pack over cuda_ipc/cuda"),
    "slow tcp": (
        dict(gb_per_s=1.0),
        "slow_tcp",
        "SLOW: spread over tcp/ens5, software emulation (UCX has no other read over tcp), 1.0 GB/s, 8% of the line "
        "rate",
    ),
    "slow srd on one rail": (
        EMULATED_SRD | dict(wire=wire("zero-copy", SRD), gb_per_s=1.0),
        "slow_rails",
        "SLOW: spread over srd/rdmap79s0:1, zero-copy, 1.0 GB/s, 8% of 1 rail (12.5 GB/s)",
    ),
    "cuda_ipc without NVLink": (
        CUDA_IPC | dict(gb_per_s=0.6, memcpy_gb_per_s=1200.0),
        "slow_gpu_link",
        "SLOW: pack over cuda_ipc/cuda, zero-copy, 0.60 GB/s, 0% of the GPU's own copy",
    ),
    "slow cma": (
        ONE_HOST | dict(gb_per_s=1.0), "slow_memory", "SLOW: pack over cma/memory, zero-copy, 1.0 GB/s, 12% of memcpy",
    ),
    "table against counters": (ONE_HOST | dict(traffic={"lo": GIB}), "wire_not_as_counted", "WRONG WIRE: pack"),
    "counters against table": (dict(traffic={"ens5": 1000}), "wire_counts_nothing", "WRONG WIRE: spread"),
    "LIBFABRIC on EFA": (
        ON_EFA | LIBFABRIC | dict(traffic=ON_TWO_RAILS),
        None,
        "OK: spread over efa/rdmap79s0 + efa/rdmap80s0, 11.4 GB/s, 46% of 2 rails",
    ),
    "LIBFABRIC fallen back": (
        ON_EFA | LIBFABRIC | dict(gb_per_s=0.2), "wire_efa_not_usable", "WRONG WIRE: spread by tcp/ens5",
    ),
    "LIBFABRIC inside a node": (
        LIBFABRIC | dict(strategy="pack", prefill=EFA_A, decode=EFA_A, vram=True, traffic=ON_TWO_RAILS),
        "wire_backend_leaves_host",
        "WRONG WIRE: pack by efa/rdmap79s0",
    ),
    "LIBFABRIC on one host, by no interface": (
        ONE_HOST | LIBFABRIC,
        None,
        "OK: pack over a wire that is not proven (no table of UCX's, and no interface counted it), 6.0 GB/s, 75% of "
        "memcpy",
    ),
    "virtual interface, rate not known": (
        dict(prefill=VIRTUAL_A, decode=VIRTUAL_B, gb_per_s=0.3), None, "OK: spread over tcp/ens5",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "cause", "begin"), CASES.values(), ids=CASES)
def test_verdicts(changes: dict[str, Any], cause: str | None, begin: str) -> None:
    verdict = judge(observed(**changes))
    assert (verdict.cause.code if verdict.cause else None) == cause
    assert verdict.code == (SLOW if cause else OK)
    assert verdict.text.startswith(begin)
    assert verdict.text.endswith(verdict.cause.text) if verdict.cause else "likely cause" not in verdict.text


def test_every_cause_has_a_case() -> None:
    named = {cause for _, cause, _ in CASES.values()} | {"wire_efa_of_some_ranks"}
    assert named - {None} == {
        code for code, row in CODES.items() if row.source == "transfer" and row.severity == "error"
    }


def noted(**changes: Any) -> list[str]:
    return [note.code for note in notes(observed(**changes))]


def test_small_requests_are_not_judged_slow() -> None:
    small = observed(**(ONE_HOST | {"gb_per_s": 1.0, "size_bytes": 25_000_000}))
    assert judge(small).code == OK
    assert {note.code: note.numbers for note in notes(small)} == {
        "too_few_bytes": {"megabytes": 25, "least_megabytes": 64}
    }
    forced = replace(small, wire=wire("software emulation", "tcp/lo"), traffic={"lo": GIB})
    assert judge(forced).code == SLOW, "a wrong wire is wrong at any size"


@pytest.mark.parametrize(("share_each", "code"), [(0.06, SLOW), (0.6, OK)])
def test_several_ranks_have_the_ceiling_of_as_many_copies(share_each: float, code: int) -> None:
    verdict = judge(observed(**ONE_HOST | dict(ranks=4, gb_per_s=4 * share_each * 8.0)))
    assert verdict.code == code and verdict.share == pytest.approx(share_each)
    assert f"{share_each:.0%} of memcpy on 4 cores" in verdict.text
    two_cores = replace(HOST_A, cores=2)
    crowded = judge(observed(**ONE_HOST | dict(ranks=4, gb_per_s=0.3 * 2 * 8.0, prefill=two_cores, decode=two_cores)))
    assert crowded.code == OK and "30% of memcpy on 2 cores" in crowded.text, "no more cores copy than there are"
    gpus = judge(observed(**CUDA_IPC | dict(ranks=8, gb_per_s=600.0, memcpy_gb_per_s=1200.0)))
    assert gpus.code == OK and "6% of 8 GPUs' own copies" in gpus.text


def test_the_slower_side_sets_the_line_rate() -> None:
    shaped = replace(HOST_A, nics=(Interface("vx0", "virtual", 1.0, shaped=True),))
    verdict = judge(observed(prefill=shaped, gb_per_s=0.11))
    assert verdict.share == pytest.approx(0.88) and "(1 Gbit/s, shaped)" in verdict.text


def test_notes_name_the_evidence_of_a_verdict() -> None:
    assert noted(**ONE_HOST) == []
    assert noted(**ONE_HOST | {"strategy": "spread"}) == ["spread_on_one_host"]
    assert noted(decode=replace(HOST_B, boot="boot-a")) == ["hosts_share_a_kernel"]
    assert noted(wire=None) == ["no_protocol_table"] and noted(**LIBFABRIC) == ["backend_reports_no_transport"]


@pytest.mark.parametrize("vram", [False, True])
@pytest.mark.parametrize(("table", "proven"), [(None, False), (CMA, True)])
def test_silence_of_the_interfaces_proves_no_wire(vram: bool, table: Wire | None, proven: bool) -> None:
    assert judge(observed(**(ONE_HOST | dict(wire=table, vram=vram)))).proven is proven
    assert judge(observed(wire=None)).proven, "an interface counted the payload"
    assert notes(observed()) == []


def test_traffic_between_two_readings() -> None:
    before = {"lo": (5, 5), "ens5": (100, 50)}
    assert bytes_between(before, {"lo": (5, 5), "ens5": (300, 60), "new": (7, 7)}) == {"ens5": (200, 10)}


def rank_log(first: int, count: int = 100, transport: str = "srd", protocol: str = "zero-copy") -> str:
    """What UCX 1.21 writes for one rank that reads over two devices of its own GPU."""
    lanes = f"50% on {transport}/rdmap{first}s0:1 and 50% on {transport}/rdmap{first + 1}s0:1"
    cells = f"   | {count}   0..inf | {protocol} | {lanes if transport == 'srd' else transport + '/ens5'} |"
    border = "   +---+---+---+"
    title = "   | ucp_context_0 inter-node cfg#3 | remote memory read by ucp_get*(multi) into cuda/GPU0 from cuda |"
    return "\n".join([border, title, border, cells, border])


FOUR_GPUS = (79, 83, 95, 99)
P5 = (
    Interface("ens5", "ethernet", 100.0),
    *(Interface(f"rdmap{i + j}s0", "efa", 100.0) for i in FOUR_GPUS for j in range(4)),
)
P5_A, P5_B = replace(HOST_A, nics=P5), replace(HOST_B, nics=P5)


def test_four_ranks_on_devices_of_their_own_are_one_wire() -> None:
    wires = [wire_of(parse_table(rank_log(first)), "read", 65536) for first in FOUR_GPUS]
    joined = together(wires)
    assert joined is not None and joined.transports == ("srd",) and len(joined.devices) == 8
    assert joined.operations == 400 and joined.counted and joined.protocol == "zero-copy"
    counted = {device.split(":")[0]: GIB // 8 for device in joined.devices}
    verdict = judge(observed(prefill=P5_A, decode=P5_B, vram=True, wire=joined, traffic=counted, gb_per_s=46.0))
    assert verdict.code == OK and "46% of 8 rails (100 GB/s)" in verdict.text, verdict.text


@pytest.mark.parametrize("number", [1, 2, 4, 5, 8, 16, 32])
def test_a_payload_over_many_devices_without_a_table(number: int) -> None:
    """LIBFABRIC stripes over every device of a GPU, so each counts a small share of the payload."""
    nics = (Interface("ens5", "ethernet", 100.0), *(Interface(f"rdmap{i}s0", "efa", 100.0) for i in range(32)))
    sides = dict(prefill=replace(HOST_A, nics=nics), decode=replace(HOST_B, nics=nics), vram=True)
    counts = {f"rdmap{i}s0": GIB // number for i in range(number)} | {"ens5": GIB // 50}
    run = dict(traffic=counts, gb_per_s=10.0 * number, memcpy_gb_per_s=1000.0, **LIBFABRIC, **sides)
    verdict = judge(observed(**run))
    assert verdict.code == OK and verdict.proven and verdict.share == pytest.approx(0.8), verdict.text
    inside = judge(observed(**run | dict(strategy="pack", decode=sides["prefill"])))
    assert inside.cause is not None and inside.cause.code == "wire_backend_leaves_host", inside.text
    table = judge(observed(**run | dict(strategy="pack", decode=sides["prefill"], backend="UCX", wire=CUDA)))
    assert table.cause is not None and table.cause.code == "wire_not_as_counted", table.text


def test_a_kind_that_carried_a_quarter_is_part_of_the_wire() -> None:
    """One rank of four without its devices, whose bytes leave over two Ethernet ports."""
    nics = (*P5, Interface("ens6", "ethernet", 100.0))
    sides = dict(prefill=replace(HOST_A, nics=nics), decode=replace(HOST_B, nics=nics))
    counts = {f"rdmap{first + j}s0": GIB // 16 for first in FOUR_GPUS[:3] for j in range(4)}
    both = judge(observed(**LIBFABRIC, **sides, traffic=counts | {"ens5": GIB // 8, "ens6": GIB // 8}))
    assert both.code == SLOW and both.wire == "efa on 12 devices + tcp/ens5 + tcp/ens6"
    background = judge(
        observed(**LIBFABRIC, **sides, traffic=counts | {"ens5": GIB // 8, "ens6": GIB // 10}, gb_per_s=60.0)
    )
    assert background.code == OK and background.wire == "efa on 12 devices"


def test_bytes_that_a_virtual_interface_counts_again_are_not_added_up() -> None:
    """Traffic of a container is counted by its own interface, by the bridge and by the tunnel."""
    nics = tuple(Interface(name, "virtual", None) for name in ("veth1", "cni0", "flannel.1"))
    counts = {nic.name: GIB // 5 for nic in nics}
    quiet = judge(observed(**ONE_HOST | dict(decode=replace(HOST_A, nics=nics), traffic=counts)))
    assert quiet.code == OK, quiet.text


def test_one_rank_of_four_on_tcp_is_the_wrong_wire() -> None:
    logs = [rank_log(first) for first in FOUR_GPUS[:3]] + [rank_log(0, transport="tcp", protocol="software emulation")]
    joined = together(wire_of(parse_table(log), "read", 65536) for log in logs)
    counted = {f"rdmap{first + j}s0": GIB // 8 for first in FOUR_GPUS[:3] for j in range(2)} | {"ens5": GIB // 4}
    verdict = judge(observed(prefill=P5_A, decode=P5_B, vram=True, wire=joined, traffic=counted))
    assert verdict.code == SLOW and "tcp" in verdict.text
    assert verdict.cause is not None and verdict.cause.code == "wire_efa_of_some_ranks"


def test_a_share_of_one_ranks_operations_on_another_way_is_part_of_its_wire() -> None:
    log = "\n".join([rank_log(79, 90), rank_log(0, 10, "tcp", "software emulation")])
    mixed = wire_of(parse_table(log), "read", 65536)
    assert mixed is not None and mixed.transports == ("srd", "tcp") and mixed.emulated and mixed.operations == 100
    log = "\n".join([rank_log(79, 990), rank_log(0, 10, "tcp", "software emulation")])
    stray = wire_of(parse_table(log), "read", 65536)
    assert stray is not None and stray.transports == ("srd",), "one in a hundred is no wire"


def test_operations_over_many_devices_are_one_way() -> None:
    """The log of an engine has the tables of all its ranks, each with devices of its own."""
    ranks = [rank_log(first) for first in range(0, 60, 2)]
    spread = wire_of(parse_table("\n".join([*ranks, rank_log(0, 10, "tcp", "software emulation")])), "read", 65536)
    assert spread is not None and spread.transports == ("srd",) and len(spread.devices) == 60


def test_no_wire_of_no_rank() -> None:
    assert together([]) is None and together([None, None]) is None
    assert together([None, CMA]) == CMA


def p5_48xlarge(root: Path) -> None:
    """The parts of /sys/class that are read, as a p5.48xlarge has them: 32 EFA devices and one that carries IP."""
    driver = root / "drivers/efa"
    driver.mkdir(parents=True)
    for number in range(32):
        port = root / f"infiniband/rdmap{number}s0/ports/1"
        (port / "hw_counters").mkdir(parents=True)
        (port / "rate").write_text("100 Gb/sec (4X EDR)\n")
        (port / "link_layer").write_text("Unspecified\n")
        for name, value in (("tx_bytes", 10 * number), ("rx_bytes", 20 * number), ("lifespan", 1)):
            (port / "hw_counters" / name).write_text(f"{value}\n")
        (root / f"infiniband/rdmap{number}s0/device").mkdir()
        (root / f"infiniband/rdmap{number}s0/device/driver").symlink_to(driver)
    for name, speed in (("ens32", "-1"), ("lo", "")):
        (root / "net" / name).mkdir(parents=True)
        (root / "net" / name / "operstate").write_text("up\n" if speed else "unknown\n")
        (root / "net" / name / "speed").write_text(f"{speed}\n")
    (root / "net/ens32/device").mkdir()


def test_the_devices_of_a_p5_48xlarge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    p5_48xlarge(tmp_path)
    monkeypatch.setattr(network, "CLASS_RDMA", tmp_path / "infiniband")
    monkeypatch.setattr(network, "CLASS_NET", tmp_path / "net")
    efa = [nic for nic in network.nics() if nic.kind == "efa"]
    assert len(efa) == 32 and sum(nic.gbit_per_s or 0 for nic in efa) == 3200
    assert [nic for nic in network.nics() if nic.name == "ens32"] == [Interface("ens32", "ethernet", None)]
    assert replace(HOST_A, nics=network.nics()).efa
    slept: list[float] = []
    monkeypatch.setattr(network.time, "sleep", slept.append)
    assert network.settled_counters()["rdmap3s0"] == (60, 30), "received, sent"
    assert slept == [pytest.approx(0.0015)], "past the age that the kernel's copy of the counters may have"


@pytest.mark.parametrize(("state", "fabric"), [("1: DOWN", False), ("2: INIT", False), ("4: ACTIVE", True)])
def test_a_port_without_a_link_is_no_fabric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, fabric: bool
) -> None:
    port = tmp_path / "mlx5_1/ports/1"
    port.mkdir(parents=True)
    for name, text in (("link_layer", "Ethernet"), ("state", state), ("rate", "40 Gb/sec (4X QDR)")):
        (port / name).write_text(f"{text}\n")
    monkeypatch.setattr(network, "CLASS_RDMA", tmp_path)
    facts = network.host_facts("192.0.2.1")
    assert facts.rdma is fabric and any(nic.kind == "roce" for nic in facts.nics) is fabric
    prefill, decode = (replace(host, nics=(*ETHERNET, *facts.nics)) for host in (HOST_A, HOST_B))
    assert judge(observed(prefill=prefill, decode=decode)).code == (SLOW if fabric else OK)


def test_counters_of_infiniband_are_in_words_of_four_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = tmp_path / "mlx5_0/ports/1/counters"
    counted.mkdir(parents=True)
    (counted / "port_xmit_data").write_text("10\n")
    (counted / "port_rcv_data").write_text("25\n")
    monkeypatch.setattr(network, "CLASS_RDMA", tmp_path)
    assert network.counters()["mlx5_0"] == (100, 40)
