"""Real NIXL between real processes of this machine, without Ray: integrity, faults, wires, and peers that go away."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.rank_processes import ProcessRanks

from pdlab.core.errors import TransferError
from pdlab.transfer.check import BackendResult, probe_plan, run_backend, wire_unreported, with_wire_of
from pdlab.transfer.plan import RequestSize, TransferPlan, cache_blocks
from pdlab.transfer.rank.faults import FAULTS
from pdlab.transfer.rank.layout import KvShape, model_kv_shape
from pdlab.transfer.rank.messages import RankOptions
from pdlab.transfer.verdict import CARRIED, CORRUPT, SLOW

SHAPE = model_kv_shape(
    "test", layers=4, kv_heads=4, head_dim=64, dtype_bytes=2, block_tokens=16, sliding_window=None,
    full_attention_layers=None, k_per_token=True,
)  # fmt: skip


def plan(shape: KvShape = SHAPE, blocks: Sequence[int] = (24,), **changes: Any) -> TransferPlan:
    sizes = tuple(RequestSize(count) for count in blocks)
    fields = {"strategy": "pack", "repeats": 5, "timeout_s": 30.0, "seed": 3} | changes
    return TransferPlan(shape=shape, sizes=sizes, num_blocks=cache_blocks(sizes, fields.get("concurrent", 1)), **fields)


def run(made: TransferPlan, backend: str = "UCX", proto_info: str = "used") -> BackendResult:
    options = [replace(each, proto_info=proto_info) for each in made.ranks(backend, vram=False)]
    with ProcessRanks(options) as ranks:
        return run_backend(made, options, ranks)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"prefill_tp": 2, "concurrent": 3},
        {"decode_tp": 2, "direction": "write"},
        {"scattered": False},
    ],
    ids=str,
)
def test_every_word_arrives_over_shared_memory(changes: dict[str, Any]) -> None:
    made = plan(blocks=(3, 24), **changes)
    result = run(made)
    assert all(finding.wrong_words == 0 for finding in result.findings)
    transfers = (1 + made.repeats) * len(made.sizes)
    assert len(result.findings) == transfers * made.decode_tp
    page = SHAPE.page_bytes(made.decode_tp) * SHAPE.regions * made.decode_tp
    assert result.checked_bytes == transfers * made.num_blocks * page, "all of decode's memory was looked at"
    for size in result.sizes:
        assert size.bytes == size.size.blocks * made.concurrent * page
        assert len(size.seconds) == made.repeats and len(size.request_s) == made.repeats * made.concurrent
        assert 0 < size.merged <= size.descriptors
    assert result.payload_bytes == sum(size.bytes for size in result.sizes) * (1 + made.repeats)
    assert result.wire is not None and result.wire.transports == ("cma",) and "zero-copy" in result.wire.protocol
    # Other programs' traffic may have been counted meanwhile; over tcp it is all of the payload (below).
    assert sum(result.traffic.values()) < CARRIED, "shared memory crosses no interface"
    assert result.verdict.protocol == "zero-copy" and not result.verdict.text.startswith("WRONG")
    descriptors = 24 * SHAPE.regions * made.concurrent * max(made.prefill_tp, made.decode_tp)
    assert result.sizes[-1].descriptors == descriptors
    if not made.scattered:
        assert result.sizes[-1].merged == SHAPE.regions, "a run of blocks is one descriptor"
    if not changes:
        assert result.raw_gb_per_s is not None and result.raw_wire is not None
        assert result.raw_wire.transports == ("cma",)
        operations = (1 + made.repeats) * (3 + 24) * SHAPE.regions
        assert result.wire.operations == operations, "those of raw UCX are not counted in"


def test_scattered_blocks_and_one_run_of_them_in_turns() -> None:
    made = plan(blocks=(24,), compare=True)
    result = run(made)
    (size,) = result.sizes
    assert len(size.seconds) == len(size.contiguous_s) == made.repeats
    assert len(result.findings) == made.requests == 2 * (1 + made.repeats), "both kinds are compared word by word"
    assert all(finding.wrong_words == 0 for finding in result.findings)
    assert size.merged > SHAPE.regions, "the figures beside them are of scattered blocks"
    assert size.scattered_over_contiguous and size.scattered_over_contiguous > 0


@pytest.mark.parametrize("fault", ["swap-blocks", "stale"])
def test_a_planted_fault_is_caught_and_named(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    result = run(plan(fault=fault))
    assert result.verdict.code == CORRUPT
    assert result.verdict.text.startswith(f"CORRUPT: {FAULTS[fault]}")
    assert len(result.findings) == 1, "the first transfer is corrupt, and nothing is measured after it"
    assert list(tmp_path.iterdir()) == [], "UCX's log lies in memory"


@pytest.mark.parametrize("direction", ["read", pytest.param("write", marks=pytest.mark.long)])
def test_tcp_on_one_host_is_the_wrong_wire(direction: str) -> None:
    result = run(plan(ucx_tls="tcp", direction=direction, blocks=(48,)))
    assert result.verdict.code == SLOW
    assert result.verdict.cause is not None and result.verdict.cause.code == "wire_tls_lacks"
    assert all(finding.wrong_words == 0 for finding in result.findings), "slow, but right"
    assert 0.9 < sum(result.traffic.values()) < 1.5, "the interfaces counted what UCX says went over them"


def test_a_ucx_that_counts_nothing_names_its_candidates() -> None:
    silent = run(plan(), proto_info="n")
    assert wire_unreported(silent) and "no_protocol_table" in [note.code for note in silent.notes]
    probe = run(probe_plan(plan()), proto_info="y")
    result = with_wire_of(silent, probe)
    assert result.wire is not None and not result.wire.counted
    assert result.wire.transports == ("cma",) and "over cma/memory, zero-copy" in result.verdict.text
    assert result.sizes == silent.sizes


def test_a_plugin_that_is_not_there_is_named() -> None:
    with pytest.raises(TransferError, match=r"no plugin NOWHERE; it has .*UCX") as failure:
        run(plan(), "NOWHERE")
    assert failure.value.kind == "plugin" and failure.value.exit_code == 5


def test_a_backend_that_cannot_start_is_named() -> None:
    with pytest.raises(TransferError, match="cannot start UCX") as failure:
        run(plan(ucx_tls="sm"))
    assert failure.value.kind == "backend"


class Meddled(ProcessRanks):
    """Ranks to which something happens just before a step."""

    def __init__(self, options: Sequence[RankOptions], step: str, deed: Callable[[ProcessRanks], None]) -> None:
        super().__init__(options)
        self.step, self.deed = step, deed

    def call(self, ranks: Sequence[int], method: str, args: Sequence[tuple[Any, ...]], timeout_s: float) -> list[Any]:
        if method == self.step:
            self.deed(self)
        return super().call(ranks, method, args, timeout_s)


def meddle(made: TransferPlan, step: str, deed: Callable[[ProcessRanks], None]) -> tuple[TransferError, list[int]]:
    """(the error, process ids of the ranks)."""
    options = made.ranks("UCX", vram=False)
    with Meddled(options, step, deed) as ranks, pytest.raises(TransferError) as failure:
        pids = [process.pid for process in ranks.processes]
        run_backend(made, options, ranks)
    return failure.value, pids


@pytest.mark.timeout(120)  # where nobody notices it hangs
def test_a_killed_peer_is_named_within_the_timeout() -> None:
    def kill(ranks: ProcessRanks) -> None:
        ranks.signal(0, signal.SIGKILL)
        ranks.processes[0].join()

    error, pids = meddle(plan(ucx_tls="tcp", timeout_s=8.0), "transfer", kill)
    assert error.kind in ("peer", "timeout")
    assert "prefill rank 0, process" in str(error) and "is dead" in str(error)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.timeout(120)
def test_a_hung_peer_is_named_within_the_timeout() -> None:
    error, pids = meddle(plan(ucx_tls="tcp", timeout_s=3.0), "transfer", lambda ranks: ranks.signal(0, signal.SIGSTOP))
    assert error.kind == "timeout"
    assert "--timeout-s" in str(error) and "does not answer: it hangs" in str(error)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_a_refused_side_channel_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        closed = probe.getsockname()[1]

    class Elsewhere(ProcessRanks):
        def call(self, ranks: Sequence[int], method: str, args: Any, timeout_s: float) -> list[Any]:
            if method == "connect":
                args = [(host, closed) for host, _ in args]
            return super().call(ranks, method, args, timeout_s)

    made = plan()
    options = made.ranks("UCX", vram=False)
    with Elsewhere(options) as ranks, pytest.raises(TransferError, match="side channel") as failure:
        run_backend(made, options, ranks)
    assert failure.value.kind == "side-channel" and f":{closed}" in str(failure.value)
    assert "refused" in str(failure.value)


@pytest.mark.parametrize(
    ("number", "timeout_s"), [(signal.SIGKILL, 30.0), pytest.param(signal.SIGSTOP, 8.0, marks=pytest.mark.long)]
)
def test_a_rank_lost_to_raw_ucx_costs_that_figure_alone(number: signal.Signals, timeout_s: float) -> None:
    """The time limit holds for the steps before as well, on a busy machine too; a rank that hangs is waited for."""
    made = plan(timeout_s=timeout_s)
    options = made.ranks("UCX", vram=False)
    with Meddled(options, "raw_rates", lambda ranks: ranks.signal(1, number)) as ranks:
        result = run_backend(made, options, ranks)
    assert result.raw_gb_per_s is None and result.raw_why is not None and "decode rank 0" in result.raw_why
    assert result.wire is not None and result.wire.transports == ("cma",)
    assert not result.verdict.text.startswith("WRONG") and all(not each.wrong_words for each in result.findings)
