"""inference-perf: ``stage_N_lifecycle_metrics.json``, a level a file. ``summary_lifecycle_metrics.json`` is the mean of
all stages, and no level; it is one if the run has one stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pdlab.results.readers import FileReading, RawLevel
from pdlab.results.readers.statistics import keyed

TOOL = "inference-perf"
_METRICS = {
    "time_to_first_token": "ttft",
    "time_per_output_token": "tpot",
    "inter_token_latency": "itl",
    "request_latency": "e2el",
}


def read(file: Path, content: Any) -> FileReading | None:
    """None unless it is a report of inference-perf's."""
    if isinstance(content, list) and file.name.startswith("per_request_lifecycle"):
        return FileReading(TOOL, skipped="the requests of the stages beside it")
    if not isinstance(content, dict) or not {"load_summary", "successes", "failures"} <= content.keys():
        return None
    if file.name.startswith("summary_") and any(file.parent.glob("stage_*_lifecycle_metrics.json")):
        return FileReading(TOOL, skipped="the mean over the stages beside it")
    return FileReading(TOOL, (RawLevel("", _level(content)),))


def _level(content: dict[str, Any]) -> dict[str, Any]:
    load, good, bad = content["load_summary"], content["successes"], content["failures"]
    completed = good.get("count") or 0
    throughput = good.get("throughput") or {}
    rate = throughput.get("requests_per_sec")
    duration = completed / rate if rate else content.get("benchmark_time_seconds") or load.get("send_duration")
    level: dict[str, Any] = {
        "request_throughput": rate,
        "duration": duration,
        "completed": completed,
        "num_prompts": completed + (bad.get("count") or 0),
        "total_input_tokens": _tokens(good.get("prompt_tokens") or good.get("prompt_len"), completed),
        "total_output_tokens": _tokens(good.get("output_tokens") or good.get("output_len"), completed),
        "request_rate": load.get("requested_rate"),
        "max_concurrency": load.get("concurrency"),
    }
    if level["max_concurrency"]:
        level["request_rate"] = None
    for theirs, ours in _METRICS.items():
        statistics = (good.get("latency") or {}).get(theirs)
        if isinstance(statistics, dict):
            level |= keyed(ours, statistics, to_ms=1000.0)
    return {name: value for name, value in level.items() if value is not None}


def _tokens(statistics: Any, completed: float) -> float | None:
    if not isinstance(statistics, dict):
        return None
    if statistics.get("total") is not None:
        return float(statistics["total"])
    return None if statistics.get("mean") is None else statistics["mean"] * completed
