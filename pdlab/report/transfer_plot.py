"""Bandwidth of KV transfers against their size, with the ceilings measured in the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pdlab.report.style import HUES, MARKERS, picture
from pdlab.transfer.check import BackendResult, TransferPlan
from pdlab.transfer.report import NETWORKS

SOFT = "#666666"


def draw(plan: TransferPlan, results: list[BackendResult], path: Path) -> None:
    """Write the picture (png, svg or pdf by its suffix): medians, all repeats as bars. Raises StoreError."""
    with picture(path, tight=True, figsize=(8.2, 5.0)) as figure:
        axes = figure.subplots()
        for number, result in enumerate(results):
            _backend(axes, result, HUES[number % len(HUES)], MARKERS[number % len(MARKERS)])
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        axes.margins(x=0.12)
        axes.set_xlabel("KV cache moved at a time, MB")
        axes.set_ylabel("GB/s (median; bars: slowest to fastest)")
        axes.set_title(
            f"KV transfer, {plan.strategy}, prefill TP{plan.prefill_tp} to decode TP{plan.decode_tp}, "
            f"{plan.shape.name}, {plan.direction}"
        )
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0))


def _backend(axes: Any, result: BackendResult, color: str, marker: str) -> None:
    sizes = [size.bytes / 1e6 for size in result.sizes]
    medians = [size.gb_per_s for size in result.sizes]
    low = [m - size.spread_gb_per_s.slowest for m, size in zip(medians, result.sizes, strict=True)]
    high = [size.spread_gb_per_s.fastest - m for m, size in zip(medians, result.sizes, strict=True)]
    wire = result.wire.name if result.wire else result.verdict.wire
    label = f"{result.backend} over {wire}"
    axes.errorbar(sizes, medians, yerr=(low, high), color=color, marker=marker, capsize=3, label=label)
    verdict = result.verdict
    ceilings = [("memcpy, one thread", result.memcpy_gb_per_s, ":"), ("raw UCX, one thread", result.raw_gb_per_s, "--")]
    if verdict.share and verdict.ceiling in NETWORKS:
        ceilings.append((verdict.of, result.sizes[-1].gb_per_s / verdict.share, "-."))
    for name, rate, line in ceilings:
        if rate:
            axes.axhline(rate, color=SOFT, linestyle=line, linewidth=1.2, label=f"{name}, {rate:.3g} GB/s")
