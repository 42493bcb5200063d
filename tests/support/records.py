"""Records of requests, and what a sweep keeps of a level that sent them, made up on the spot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdlab.core.workload import Load, RunKey, Workload
from pdlab.results import metrics
from pdlab.results.level_data import LevelData
from pdlab.results.schema import RequestRecord, Run


def record(
    arrival_s: float = 0.0, ttft_s: float = 1.0, tpot_s: float = 0.25, tokens: int = 5, **more: Any
) -> RequestRecord:
    """An answer of ``tokens`` to a prompt of 100; ``more``: other values."""
    usual = {
        "arrival_s": arrival_s,
        "first_token_s": arrival_s + ttft_s,
        "finish_s": arrival_s + ttft_s + tpot_s * (tokens - 1),
        "input_tokens": 100,
        "output_tokens": tokens,
    }
    return RequestRecord(**usual | more)


def run(
    sent: Sequence[RequestRecord],
    load: Load,
    *,
    repeat: int = 0,
    count: int | None = None,
    window: bool = False,
    **more: Any,
) -> Run:
    """Those requests as a level at ``load``. ``count``: as if so many had been answered; ``window``: with its steady
    window; ``more``: other values."""
    data = LevelData.of(sent)
    requests, answered = (len(sent), sum(each.ok for each in sent)) if count is None else (count, count)
    usual = {
        "origin": "measured",
        "label": "x",
        "key": RunKey(kind=load.kind, value=load.value, repeat=repeat),
        "workload": Workload(),
        "load": load,
        "num_requests": requests,
        "completed": answered,
        "failed": requests - answered,
        "whole": metrics.whole(data),
        "steady": metrics.steady(data, load) if window else None,
    }
    return Run(**usual | more)
