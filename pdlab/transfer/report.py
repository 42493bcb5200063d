"""The report of a KV-transfer check as text and as JSON, with a prediction for PD. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from pdlab.core.errors import TransferError
from pdlab.core.text import aligned, byte_size, counted, ms
from pdlab.transfer.check import BackendResult, SizeResult
from pdlab.transfer.plan import TransferPlan
from pdlab.transfer.rank.layout import KvShape, refusal
from pdlab.transfer.verdict import LEAST_BYTES

SCHEMA_VERSION = 1
PROMPT_TOKENS = 5000
COPIES, NETWORKS = ("memcpy", "GPU copy"), ("line rate", "rails")  # ceilings inside a host, and between hosts


@dataclass(frozen=True)
class PdPrediction:
    """Predicted cost of the KV transfer of a prompt of PROMPT_TOKENS tokens. ``added_ttft_s``: without other traffic.
    ``saturates_at_rps``: rate of such prompts that saturates the link. ``measured_bytes``: size of the bandwidth."""

    model: str
    tokens: int
    bytes: int
    gb_per_s: float
    measured_bytes: int
    added_ttft_s: float
    saturates_at_rps: float


def for_pd(result: BackendResult, model: KvShape, decode_tp: int) -> PdPrediction | None:
    """Predict with time = bytes of the prompt / bandwidth of the nearest measured size, and rate = 1 / time. Both bytes
    have the copies of heads for more ranks than heads. None for a reason of `no_prediction`."""
    if no_prediction(result, model, decode_tp):
        return None
    prompt_bytes = model.request_bytes(model.blocks_of(PROMPT_TOKENS), decode_tp)
    nearest = min(_judged(result), key=lambda each: abs(each.bytes - prompt_bytes))
    rate = nearest.gb_per_s * 1e9
    seconds = prompt_bytes / rate
    return PdPrediction(model.name, PROMPT_TOKENS, prompt_bytes, nearest.gb_per_s, nearest.bytes, seconds, 1 / seconds)


def no_prediction(result: BackendResult, model: KvShape, decode_tp: int) -> str | None:
    """Why nothing is predicted; None if there is a prediction."""
    if not _judged(result):
        return f"no transfer of at least {byte_size(LEAST_BYTES, 4)} was measured"
    return refusal(1, decode_tp, model.kv_heads)


def _judged(result: BackendResult) -> list[SizeResult]:
    """The sizes that are large enough to judge the speed of a wire."""
    return [size for size in result.sizes if size.bytes >= LEAST_BYTES]


def render(plan: TransferPlan, result: BackendResult, model: KvShape, *, verbose: bool) -> str:
    """The report of one backend as text; the last line is the verdict."""
    shape = plan.shape
    pages = shape.page_bytes(max(plan.prefill_tp, plan.decode_tp))
    where = {side: f"{host.name} ({host.ip})" for side, host in result.hosts.items()}
    lines = [
        f"{result.backend}: {plan.strategy}, prefill TP{plan.prefill_tp} on {where['prefill']} -> decode TP"
        f"{plan.decode_tp} on {where['decode']}, {plan.direction}",
        f"  KV cache of {shape.name}: {counted(shape.regions, 'region')}, {byte_size(pages, 4)} per descriptor, "
        f"{'scattered' if plan.scattered else 'contiguous'} blocks, {plan.concurrent} request"
        f"{'s' * (plan.concurrent > 1)} at a time" + (f", UCX {result.ucx_version}" if result.ucx_version else ""),
        f"  cold: handshake {ms(result.handshake_s)} ms, first transfer of the pair {ms(result.cold_s)} ms; warm, "
        f"{counted(plan.repeats, 'repeat')}:",
        *_table(plan, result.sizes),
        *_compared(result.sizes),
        "  ceilings: " + "; ".join(_ceilings(result)),
        f"  integrity: {_integrity(result)}",
        f"  took: start-up {result.startup_s:.1f} s"
        + (f" beside {result.ray_s:.1f} s of Ray's" if result.ray_s is not None else "")
        + f"; checks {result.check_s:.1f} s",
        f"  wire: {_wire(result)}",
        f"  for PD: {_for_pd(result, model, plan.decode_tp)}",
    ]
    lines += [f"  note: {note.text}" for note in result.notes]
    if verbose:
        for size in result.sizes:
            seconds = " ".join(f"{second * 1e3:.2f}" for second in size.seconds)
            lines.append(f"  every repeat of {size.size.tokens or size.size.blocks}: {seconds} ms")
        lines += [f"  library: {path}" for path in result.libraries]
        lines += [f"  module {name} did not load: {why}" for name, why in result.failed_modules.items()]
        lines += [f"  UCX | {line[line.index('|') :]}" for line in result.log.splitlines() if line.endswith("|")]
    return "\n".join([*lines, result.verdict.text])


def render_error(backend: str, error: TransferError) -> str:
    """One line for a backend that cannot run."""
    return f"CANNOT RUN: {backend}: {error.kind}: {error}"


def as_json(plan: TransferPlan, outcomes: list[dict[str, Any]], environment: dict[str, Any]) -> dict[str, Any]:
    """All results, with the plan and the environment."""
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "kv-transfer-check",
        "origin": "measured",
        "environment": environment,
        "plan": asdict(plan),
        "runs": outcomes,
    }


def result_json(plan: TransferPlan, result: BackendResult, model: KvShape) -> dict[str, Any]:
    """One backend's run."""
    fields = asdict(result)
    fields["vram"] = result.observed.vram if result.observed else None
    del fields["log"], fields["observed"]
    fields["notes"] = [note.model_dump() for note in result.notes]
    cause = result.verdict.cause
    fields["verdict"]["cause"] = cause.model_dump() if cause else None
    fields["sizes"] = [
        asdict(size)
        | {
            "gb_per_s": size.gb_per_s,
            "gb_per_s_slowest": size.spread_gb_per_s.slowest,
            "gb_per_s_fastest": size.spread_gb_per_s.fastest,
            "scattered_over_contiguous": size.scattered_over_contiguous,
        }
        for size in result.sizes
    ]
    fields["findings"] = [finding.text() for finding in result.findings if finding.wrong_words]
    prediction = for_pd(result, model, plan.decode_tp)
    fields["for_pd"] = asdict(prediction) | {"origin": "predicted"} if prediction else None
    return fields


def error_json(backend: str, error: TransferError) -> dict[str, Any]:
    """A backend that cannot run."""
    return {"backend": backend, "error": {"kind": error.kind, "text": str(error)}, "exit_code": error.exit_code}


_HEADS = ("tokens", "blocks", "MB", "GB/s", "slowest-fastest", "ms/request", "ms/1k tokens", "descriptors", "merged",
          "posting", "first ms")  # fmt: skip


def _table(plan: TransferPlan, sizes: tuple[SizeResult, ...]) -> list[str]:
    rows = [_HEADS]
    for size in sizes:
        low, high = size.spread_gb_per_s
        tokens = size.size.tokens
        per_thousand = median(size.seconds) * 1e3 / (tokens * plan.concurrent / 1000) if tokens else None
        rows.append((
            str(tokens or "-"), str(size.size.blocks), f"{size.bytes / 1e6:.1f}", f"{size.gb_per_s:.3g}",
            f"{low:.3g}-{high:.3g}", f"{median(size.request_s) * 1e3:.2f}",
            f"{per_thousand:.2f}" if per_thousand is not None else "-", str(size.descriptors), str(size.merged),
            f"{size.post_share:.0%}", f"{size.first_s * 1e3:.1f}",
        ))  # fmt: skip
    return [f"    {line}" for line in aligned(rows)]


def _compared(sizes: tuple[SizeResult, ...]) -> list[str]:
    """A line with the ratios of scattered and contiguous blocks; empty without a comparison."""
    ratios = [
        f"{size.size.tokens or size.size.blocks} {'tokens' if size.size.tokens else 'blocks'} {ratio:.2f} times "
        f"({median(size.seconds) * 1e3:.2f} against {median(size.contiguous_s) * 1e3:.2f} ms)"
        for size in sizes
        if (ratio := size.scattered_over_contiguous) is not None
    ]
    return [f"  scattered blocks take, against one run of them: {', '.join(ratios)}"] if ratios else []


def _ceilings(result: BackendResult) -> list[str]:
    best = result.sizes[-1].gb_per_s
    ceilings = []
    if result.memcpy_gb_per_s:
        rate = result.memcpy_gb_per_s * result.copies
        share = f" ({best / rate:.0%} reached)" if result.verdict.ceiling in COPIES else ""
        times = f"{result.copies} times " if result.copies > 1 else ""
        ceilings.append(f"memcpy of the same pages, {times}one thread, {rate:.3g} GB/s{share}")
    else:
        ceilings.append("memcpy not measured")
    if result.raw_gb_per_s:
        over = f" over {result.raw_wire.name}" if result.raw_wire else ""
        ceilings.append(
            f"raw UCX, one thread{over}, {result.raw_gb_per_s:.3g} GB/s ({best / result.raw_gb_per_s:.2f} times that)"
        )
    else:
        ceilings.append(f"raw UCX not measured ({result.raw_why})")
    if result.verdict.ceiling in NETWORKS:
        rate_known = result.verdict.share is not None
        ceilings.append(
            f"{result.verdict.of} {result.verdict.share:.0%} reached"
            if rate_known
            else "line rate unknown (virtual interface)"
        )
    return ceilings


def _integrity(result: BackendResult) -> str:
    corrupt = next((finding for finding in result.findings if finding.wrong_words), None)
    if corrupt is not None:
        return corrupt.text()
    return (
        f"{byte_size(result.checked_bytes, 4)} compared in {counted(len(result.findings), 'check')}, every word exact, "
        "no change outside the transferred blocks"
    )


def _wire(result: BackendResult) -> str:
    moved = ", ".join(f"{nic} {share:.0%}" for nic, share in result.traffic.items()) or "none"
    counters = f"interfaces counted {moved} of {byte_size(result.payload_bytes, 4)}"
    if result.wire is None:
        return counters
    evidence = f"{result.wire.operations} operations" if result.wire.counted else "UCX's candidate for that size"
    return f"{result.wire.protocol} over {result.wire.name} ({evidence}); {counters}"


def _for_pd(result: BackendResult, model: KvShape, decode_tp: int) -> str:
    prediction = for_pd(result, model, decode_tp)
    if prediction is None:
        return f"nothing predicted: {no_prediction(result, model, decode_tp)}"
    return (
        f"a prompt of {counted(prediction.tokens, 'token', form=',')} of {prediction.model} moves "
        f"{byte_size(prediction.bytes, 4)}: predicted {ms(prediction.added_ttft_s)} ms more TTFT, and "
        f"{prediction.saturates_at_rps:.3g} such requests/s saturate this wire (at the {prediction.gb_per_s:.3g} GB/s "
        f"measured with {byte_size(prediction.measured_bytes, 4)})"
    )
