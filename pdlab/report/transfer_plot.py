"""Bandwidth of KV transfers against their size, with the ceilings measured in the same run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pdlab.report.figure import DASH_DOT, DASHED, DOTTED, Axis, Figure, Line, PlotPanel, rising
from pdlab.report.style import HUES, MARKERS, SOFT
from pdlab.transfer.check import BackendResult
from pdlab.transfer.plan import TransferPlan
from pdlab.transfer.report import NETWORKS

WIDTH, ASIDE = 1.8, 1.3


def figure(plan: TransferPlan, results: Sequence[BackendResult]) -> Figure:
    """Medians, all repeats as bars."""
    sizes = [size.bytes / 1e6 for result in results for size in result.sizes]
    ends = (min(sizes) / ASIDE, max(sizes) * ASIDE)
    lines = [line for number, result in enumerate(results) for line in _lines(result, number, ends)]
    fastest = [Line([(0.0, high) for line in lines for _, high in line.reach], SOFT)]
    panel = PlotPanel(
        rising("GB/s (median; bars: slowest to fastest)", [*lines, *fastest]),
        Axis("KV cache moved at a time, MB", *ends, log=True),
        lines,
        title=f"KV transfer, {plan.strategy}, prefill TP{plan.prefill_tp} to decode TP{plan.decode_tp}, "
        f"{plan.shape.name}, {plan.direction}",
        legend="right",
        height_in=5.0,
    )
    return Figure([[panel]], width_in=10.0)


def _lines(result: BackendResult, number: int, ends: tuple[float, float]) -> Iterator[Line]:
    wire = result.wire.name if result.wire else result.verdict.wire
    yield Line(
        [(size.bytes / 1e6, size.gb_per_s) for size in result.sizes],
        HUES[number % len(HUES)],
        f"{result.backend} over {wire}",
        width=WIDTH,
        marker=MARKERS[number % len(MARKERS)],
        reach=[(size.spread_gb_per_s.slowest, size.spread_gb_per_s.fastest) for size in result.sizes],
    )
    verdict = result.verdict
    times = f"{result.copies} times " if result.copies > 1 else ""
    ceilings = [
        (f"memcpy, {times}one thread", (result.memcpy_gb_per_s or 0.0) * result.copies, DOTTED),
        ("raw UCX, one thread", result.raw_gb_per_s, DASHED),
    ]
    if verdict.share and verdict.ceiling in NETWORKS:
        ceilings.append((verdict.of, result.sizes[-1].gb_per_s / verdict.share, DASH_DOT))
    for name, rate, dashes in ceilings:
        if rate:
            yield Line([(end, rate) for end in ends], SOFT, f"{name}, {rate:.3g} GB/s", dashes, 1.2)
