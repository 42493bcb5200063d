"""genai-bench: a level per file, and ``experiment_metadata.json`` for the folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pdlab.results.readers import NOTHING_ANSWERED, FileReading, RawLevel
from pdlab.results.readers.statistics import add_statistics, is_finite, json_beside, keyed, times_of

TOOL = "genai-bench"
METADATA = "experiment_metadata.json"
_METRICS = {"ttft": "ttft", "tpot": "tpot", "e2e_latency": "e2el"}


def read(file: Path, content: Any) -> FileReading | None:
    """None unless genai-bench wrote the file."""
    if not isinstance(content, dict):
        return None
    if file.name == METADATA and "benchmark_version" in content:
        return FileReading(TOOL, skipped="common settings of the levels beside it")
    if not {"aggregated_metrics", "individual_request_metrics"} <= content.keys():
        return None
    if file.name.startswith("debug_for_run_"):
        return FileReading(TOOL, skipped=NOTHING_ANSWERED)
    good = [each for each in content["individual_request_metrics"] if not each.get("error_code")]
    return FileReading(TOOL, (RawLevel("", _level(file, content), times_of(good, _times(content))),))


def _times(content: dict[str, Any]) -> dict[str, tuple[str, float]]:
    unit_s = 1e-3 if content.get("_time_unit") == "ms" else 1.0
    return {"ttft_s": ("ttft", unit_s), "tpot_s": ("tpot", unit_s), "e2el_s": ("e2e_latency", unit_s)}


def _level(file: Path, content: dict[str, Any]) -> dict[str, Any]:
    figures = content["aggregated_metrics"]
    to_ms = 1.0 if content.get("_time_unit") == "ms" else 1000.0
    statistics = figures.get("stats") or {}
    completed, duration = figures.get("num_completed_requests"), figures.get("run_duration")
    level: dict[str, Any] = {
        "request_throughput": figures.get("requests_per_second"),
        "duration": duration,
        "completed": completed,
        "num_prompts": figures.get("num_requests"),
        "total_input_tokens": (statistics.get("num_input_tokens") or {}).get("sum"),
        "total_output_tokens": (statistics.get("num_output_tokens") or {}).get("sum"),
        "max_concurrency": figures.get("num_concurrency"),
        "scenario": figures.get("scenario"),
        **_of_folder(file),
    }
    for theirs, ours in _METRICS.items():
        level |= keyed(ours, statistics.get(theirs), to_ms=to_ms)
        values = [
            request[theirs] * to_ms / 1000
            for request in content["individual_request_metrics"]
            if is_finite(request.get(theirs)) and not request.get("error_code")
        ]
        add_statistics(level, ours, values)
    return level


def _of_folder(file: Path) -> dict[str, Any]:
    stated = json_beside(file, METADATA)
    count = str(stated.get("server_gpu_count") or "")
    return {
        "model_id": stated.get("api_model_name") or stated.get("model"),
        "num_gpus": int(count) if count.isdigit() else None,
        "gpu": stated.get("server_gpu_type"),
        "framework": stated.get("server_engine"),
        "framework_version": stated.get("server_version"),
    }
