"""One KV-transfer check: handshake, transfers of every size, checks of the content, wire, verdict.

Independent of Ray: it drives `Ranks`, which are Ray actors (`pdlab.transfer.ray_ranks`) or, in tests, processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, NamedTuple, Protocol

from pdlab.core.errors import TransferError
from pdlab.core.findings import Finding
from pdlab.core.text import counted
from pdlab.remote.network import RankHost
from pdlab.transfer.plan import RequestSize, TransferPlan
from pdlab.transfer.rank.codes import Inspection
from pdlab.transfer.rank.layout import BlockTable, block_tables, pairs
from pdlab.transfer.rank.messages import RankOptions, TransferTimes
from pdlab.transfer.rank.side_channel import Registration
from pdlab.transfer.ucx_log import Operation, Wire, failed_modules, parse_table, together, ucx_version, wire_of
from pdlab.transfer.verdict import CORRUPT, OK, ObservedTransfer, Verdict, judge, notes, traffic_share

GRACE_S = 5.0  # added to a rank's own timeout, so that the rank can report what it waited for
PING_S = 2.0
TOGETHER_S = 0.02  # several initiators start together this long after the call


class Ranks(Protocol):
    """Processes that run `rank.Rank`, one per rank of the plan, in that order."""

    def call(self, ranks: Sequence[int], method: str, args: Sequence[tuple[Any, ...]], timeout_s: float) -> list[Any]:
        """Each rank's answer: ("ok", value), (kind of error, text), or ("peer" or "timeout", text) if it died or hangs.

        ``args``: arguments for each rank.
        """

    def ips(self) -> list[str]:
        """Each rank's address for other nodes."""


class SpreadGbPerS(NamedTuple):
    """Rates of the slowest and fastest repeat; GB are 10^9 bytes."""

    slowest: float
    fastest: float


@dataclass(frozen=True)
class SizeResult:
    """Warm repeats of one size. ``seconds`` per repeat: from the first post to the last byte of all requests.

    ``request_s``: each request's own time. ``post_share``: NIXL's posting time over all time. ``first_s``: the first
    transfer of the size, which is not among the repeats. ``contiguous_s``: as ``seconds``, with contiguous blocks;
    empty without a comparison.
    """

    size: RequestSize
    bytes: int
    first_s: float
    seconds: tuple[float, ...]
    request_s: tuple[float, ...]
    descriptors: int
    merged: int
    post_share: float
    contiguous_s: tuple[float, ...] = ()

    @property
    def scattered_over_contiguous(self) -> float | None:
        """Ratio of the medians of scattered and contiguous blocks; None without a comparison."""
        return median(self.seconds) / median(self.contiguous_s) if self.contiguous_s else None

    @property
    def gb_per_s(self) -> float:
        """Median over the repeats; GB are 10^9 bytes."""
        return self.bytes / median(self.seconds) / 1e9

    @property
    def spread_gb_per_s(self) -> SpreadGbPerS:
        return SpreadGbPerS(self.bytes / max(self.seconds) / 1e9, self.bytes / min(self.seconds) / 1e9)


@dataclass(frozen=True)
class BackendResult:
    """Result of one backend's run.

    ``startup_s``: imports, agents, memory and handshake until the first transfer, without Ray's own time (``ray_s``).
    ``check_s``: duration of all checks of ``checked_bytes``; no other time includes it.
    """

    backend: str
    hosts: dict[str, RankHost]
    startup_s: float
    handshake_s: float
    cold_s: float
    sizes: tuple[SizeResult, ...]
    verdict: Verdict
    notes: tuple[Finding, ...]
    findings: tuple[Inspection, ...]
    checked_bytes: int
    check_s: float
    notice_s: float
    memcpy_gb_per_s: float | None
    raw_gb_per_s: float | None
    raw_why: str | None
    raw_wire: Wire | None
    wire: Wire | None
    traffic: dict[str, float]
    payload_bytes: int
    ucx_version: str | None
    failed_modules: dict[str, str]
    libraries: tuple[str, ...]
    observed: ObservedTransfer | None = field(default=None, repr=False)
    log: str = field(default="", repr=False)
    ray_s: float | None = None

    @property
    def copies(self) -> int:
        """As of `ObservedTransfer`."""
        return self.observed.copies if self.observed else 1


def run_backend(
    plan: TransferPlan, options: Sequence[RankOptions], ranks: Ranks, print_line: Callable[[str], None] = lambda _: None
) -> BackendResult:
    """Run the plan on started ranks. Raises TransferError. Corruption is a finding and not an error."""
    return _CheckRun(plan, options, ranks, print_line).run()


def verdict_of(observed: ObservedTransfer, findings: Sequence[Inspection]) -> Verdict:
    """The wire's verdict, unless a finding is worse."""
    verdict = judge(observed)
    worst = next((finding for finding in findings if finding.wrong_words), None)
    if worst is None:
        return verdict
    text = f"CORRUPT: {worst.patterns[0][0]}, {counted(worst.wrong_words, 'wrong word')}; the wire: {verdict.text}"
    return replace(verdict, code=CORRUPT, text=text)


def wire_unreported(result: BackendResult) -> bool:
    """Whether UCX printed no table of the protocols in use, as UCX before 1.21."""
    return result.backend == "UCX" and result.wire is None


def probe_plan(plan: TransferPlan) -> TransferPlan:
    """The smallest run that makes UCX choose its protocols and print the candidates."""
    return replace(plan, sizes=plan.sizes[:1], repeats=1, fault=None)


def with_wire_of(result: BackendResult, probe: BackendResult) -> BackendResult:
    """The result, judged again with the wire of another run of the same ranks."""
    assert result.observed is not None
    observed = replace(result.observed, wire=probe.wire)
    return replace(
        result,
        wire=probe.wire,
        observed=observed,
        verdict=verdict_of(observed, result.findings),
        notes=tuple(notes(observed)),
        log=probe.log,
    )


class _CheckRun:
    def __init__(
        self, plan: TransferPlan, options: Sequence[RankOptions], ranks: Ranks, print_line: Callable[[str], None]
    ) -> None:
        self.plan, self.options, self.ranks, self.print_line = plan, options, ranks, print_line
        self.everyone = list(range(len(options)))
        self.prefill = [i for i in self.everyone if options[i].side == "prefill"]
        self.decode = [i for i in self.everyone if options[i].side == "decode"]
        self.page = min(pair.length for pair in pairs(plan.shape, plan.prefill_tp, plan.decode_tp))
        self.copies: list[float] = []
        self.operation: Operation = "read" if plan.direction == "read" else "write"
        self.raw_wire: Wire | None = None
        involved = {(s, getattr(p, s)) for p in pairs(plan.shape, plan.prefill_tp, plan.decode_tp) for s in _SIDES}
        movers = [i for i in self.everyone if options[i].initiator]
        self.initiators = [i for i in movers if (options[i].side, options[i].rank) in involved]
        self.targets = [i for i in self.everyone if i not in movers]
        self.hosts: list[RankHost] = []
        self.findings: list[Inspection] = []
        self.traffic: dict[str, int] = {}
        self.payload = 0
        self.checked_bytes = 0
        self.check_s = 0.0
        self.notice_s: list[float] = []
        self.next_request = 1
        self.used: tuple[BlockTable, ...] = ()

    def run(self) -> BackendResult:
        plan, began = self.plan, time.monotonic()
        self.hosts = self.call(self.everyone, "facts", [(ip,) for ip in self.ranks.ips()])
        registered: list[Registration] = self.call(self.everyone, "open")
        published = [registered[i] for i in self.targets]
        port = self.call(self.targets[:1], "serve", [(published,)])[0]
        address = self.hosts[self.targets[0]].ip
        handshake_s = max(self.call(self.initiators, "connect", [(address, port)] * len(self.initiators)))
        startup_s = time.monotonic() - began + max(self.call(self.everyone, "early_s"))
        results: list[SizeResult] = []
        cold_s = None
        for size in plan.sizes:
            results.append(self._size(size))
            cold_s = results[0].first_s if cold_s is None else cold_s
            self.print_line(f"{plan.strategy}: {_size_text(size)}: {results[-1].gb_per_s:.3g} GB/s")
            if self._corrupt():
                break
        memcpy = median(self.copies) if self.copies else None
        libraries = self.call(self.initiators[:1], "libraries")[0]
        logs = self.call(self.initiators, "close")
        self.call([i for i in self.everyone if i not in self.initiators], "close")
        raw, raw_why = self._raw()
        wire = together(wire_of(parse_table(log), self.operation, self.page) for log in logs)
        observed = ObservedTransfer(
            strategy=plan.strategy, backend=self.options[0].backend, direction=plan.direction,
            prefill=self.hosts[self.prefill[0]], decode=self.hosts[self.decode[0]], vram=self.options[0].vram,
            gb_per_s=results[-1].gb_per_s, size_bytes=results[-1].bytes, wire=wire,
            payload_bytes=self.payload, traffic=self.traffic, memcpy_gb_per_s=memcpy,
            ucx_version=ucx_version(logs[0]), ucx_tls=_tls(logs[0]) or plan.ucx_tls,
            failed_modules=failed_modules(logs[0]), ranks=len(self.initiators),
        )  # fmt: skip
        return BackendResult(
            backend=observed.backend, hosts={"prefill": observed.prefill, "decode": observed.decode},
            startup_s=startup_s, handshake_s=handshake_s, cold_s=cold_s or 0.0, sizes=tuple(results),
            verdict=verdict_of(observed, self.findings),
            notes=tuple(notes(observed)), findings=tuple(self.findings), checked_bytes=self.checked_bytes,
            check_s=self.check_s, notice_s=median(self.notice_s), memcpy_gb_per_s=memcpy, raw_gb_per_s=raw,
            raw_why=raw_why, raw_wire=self.raw_wire, wire=observed.wire, traffic=traffic_share(observed),
            payload_bytes=self.payload,
            ucx_version=observed.ucx_version, failed_modules=dict(observed.failed_modules or {}), libraries=libraries,
            observed=observed, log="".join(logs),
        )  # fmt: skip

    def _size(self, size: RequestSize) -> SizeResult:
        """Move one size: the first transfer, then the warm repeats. Each is checked, and corruption stops the run."""
        runs: list[list[TransferTimes]] = []
        contiguous: list[list[TransferTimes]] = []
        while len(runs) <= self.plan.repeats and not self._corrupt():
            runs.append(self._transfer(size, scattered=self.plan.scattered))
            if self.plan.compare:
                contiguous.append(self._transfer(size, scattered=False))
            if size == self.plan.sizes[-1]:  # in turn with the transfers, so that both have the same load
                self.copies += self.call(self.decode[:1], "copy_gb_per_s", [(self.page,)])
        times = [_took_s(run) for run in runs]
        warm = list(zip(runs, times, strict=True))[1:] or [(runs[0], times[0])]
        request_s = [
            max(rank_times) for run, _ in warm for rank_times in zip(*(move.request_s for move in run), strict=True)
        ]
        return SizeResult(
            size, sum(move.bytes for move in runs[-1]), times[0], tuple(took for _, took in warm), tuple(request_s),
            sum(move.descriptors for move in runs[-1]), sum(move.merged for move in runs[-1]),
            median(sum(move.post_s for move in run) / (len(run) * took) for run, took in warm),
            tuple(_took_s(run) for run in contiguous[1:] or contiguous),
        )  # fmt: skip

    def _transfer(self, size: RequestSize, *, scattered: bool) -> list[TransferTimes]:
        plan = self.plan
        tables = block_tables(
            self.next_request, plan.concurrent, size.blocks, plan.num_blocks, scattered=scattered, seed=plan.seed
        )
        self.next_request += plan.concurrent
        clocks = self.call(self.everyone, "prepare", [(tables, self.used)] * len(self.everyone))
        self.used = tables
        start_s = 0.0
        if len(self.initiators) > 1:  # they run on one host, so they share its clock
            start_s = max(clocks[i] for i in self.initiators) + TOGETHER_S
        moved: list[TransferTimes] = self.call(self.initiators, "transfer", [(tables, start_s)] * len(self.initiators))
        self.notice_s.append(max(self.call(self.targets, "await_notices", [(tables,)] * len(self.targets))))
        side = 0 if plan.direction == "read" else 1
        for nic in {nic for move in moved for nic in move.traffic}:
            # Ranks of one host read the same counters, so take the highest reading.
            nic_bytes = max(move.traffic.get(nic, (0, 0))[side] for move in moved)
            self.traffic[nic] = self.traffic.get(nic, 0) + nic_bytes
        self.payload += sum(move.bytes for move in moved)
        for finding, check_s in self.call(self.decode, "inspect", [(tables,)] * len(self.decode)):
            self.findings.append(finding)
            self.checked_bytes += (finding.words + finding.outside_words) * 8
            self.check_s += check_s
        return moved

    def _corrupt(self) -> bool:
        return any(finding.wrong_words for finding in self.findings)

    def _raw(self) -> tuple[float | None, str | None]:
        """(GB/s of UCX without NIXL between the first pair, None), or (None, why it was not measured).

        It runs last, so that a failure, even the death of a rank, costs only this figure.
        """
        if self.options[0].backend != "UCX":
            return None, "not UCX"
        if len(self.initiators) > 1 or len(self.targets) > 1:
            return None, "compared only for one pair of ranks"
        initiator, target = self.initiators[0], self.targets[0]
        try:
            exposed = self.call([target], "raw_expose")[0]
            rates = self.call([initiator], "raw_rates", [(exposed, self.used[0], self.plan.repeats)])[0]
            log, _ = (self.call([rank], "raw_close")[0] for rank in (initiator, target))
        except TransferError as error:
            return None, str(error)
        self.raw_wire = wire_of(parse_table(log), self.operation, self.page)
        return median(rates), None

    def call(self, ranks: Sequence[int], method: str, args: Sequence[tuple[Any, ...]] | None = None) -> list[Any]:
        """The values of all ranks. Raises TransferError with the root cause, and with the ranks that died or hang."""
        words = args if args is not None else [()] * len(ranks)
        answers = self.ranks.call(ranks, method, words, self.plan.timeout_s + GRACE_S)
        failed = [(rank, kind, text) for rank, (kind, text) in zip(ranks, answers, strict=True) if kind != "ok"]
        if not failed:
            return [value for _, value in answers]
        _, kind, text = failed[0]
        if kind in ("peer", "timeout"):
            lost = self._lost_ranks()
            text += f" ({'; '.join(lost)})" if lost else ""
        raise TransferError(kind, f"{text} [while: {_WHILE.get(method, method)}]")

    def _lost_ranks(self) -> list[str]:
        """Ranks that are dead or do not answer."""
        answers = self.ranks.call(self.everyone, "ping", [()] * len(self.everyone), PING_S)
        lost_ranks = []
        for option, (kind, _), number in zip(self.options, answers, self.everyone, strict=True):
            if kind != "ok":
                host = self.hosts[number] if self.hosts else None
                where = f", process {host.pid} on {host.name}" if host else ""
                lost_ranks.append(
                    f"{option.name}{where} {'is dead' if kind == 'peer' else 'does not answer: it hangs'}"
                )
        return lost_ranks


def _took_s(moves: Sequence[TransferTimes]) -> float:
    """Seconds from the first rank's begin to the last rank's end."""
    return max(move.end_s for move in moves) - min(move.begin_s for move in moves)


_SIDES = ("prefill", "decode")
_WHILE = {
    "open": "starting the agents",
    "connect": "handshake",
    "transfer": "transfer",
    "await_notices": "waiting for notifications",
    "close": "release",
}


def _size_text(size: RequestSize) -> str:
    return counted(size.tokens, "token") if size.tokens else counted(size.blocks, "block")


def _tls(log: str) -> str | None:
    """UCX_TLS in UCX's own log; None if it is not set."""
    words = (word for line in log.splitlines() if "env variables" in line for word in line.split())
    return next((word.removeprefix("UCX_TLS=") for word in words if word.startswith("UCX_TLS=")), None)


def worst_code(codes: Sequence[int]) -> int:
    """Exit code of several backends: corrupt, else cannot run, else slow, else OK."""
    return next((code for code in (CORRUPT, 5, 3) if code in codes), OK)
