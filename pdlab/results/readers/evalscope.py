"""evalscope perf: a level per folder, with ``benchmark_summary.json`` and the percentiles and arguments beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pdlab.results.readers import FileReading, RawLevel
from pdlab.results.readers.statistics import json_beside, latency_key, total_of

TOOL = "evalscope perf"
_BESIDE = ("benchmark_percentile.json", "benchmark_args.json", "workload_throughput.json", "workload_timeline.json")
_PERCENTILE_COLUMNS = {"TTFT (ms)": ("ttft", 1.0), "TPOT (ms)": ("tpot", 1.0), "ITL (ms)": ("itl", 1.0),
                       "Latency (s)": ("e2el", 1000.0), "TTFT (s)": ("ttft", 1000.0), "TPOT (s)": ("tpot", 1000.0),
                       "ITL (s)": ("itl", 1000.0)}  # fmt: skip
_MEANS = {"Avg TTFT (ms)": ("ttft", 1.0), "Avg TPOT (ms)": ("tpot", 1.0), "Avg ITL (ms)": ("itl", 1.0),
          "Avg Latency (s)": ("e2el", 1000.0)}  # fmt: skip
# Of 1.0: its name -> today's, and today's unit in its own.
_EARLIER = {"Time taken for tests (s)": ("Test Duration (s)", 1.0), "Number of concurrency": ("Concurrency", 1.0),
            "Total requests": ("Total Requests", 1.0), "Succeed requests": ("Success Requests", 1.0),
            "Request throughput (req/s)": ("Req Throughput (req/s)", 1.0),
            "Average latency (s)": ("Avg Latency (s)", 1.0),
            "Average time to first token (s)": ("Avg TTFT (ms)", 1000.0),
            "Average time per output token (s)": ("Avg TPOT (ms)", 1000.0),
            "Average inter-token latency (s)": ("Avg ITL (ms)", 1000.0),
            "Average input tokens per request": ("Avg Input Tokens", 1.0),
            "Average output tokens per request": ("Avg Output Tokens", 1.0)}  # fmt: skip


def read(file: Path, content: Any) -> FileReading | None:
    """None unless evalscope wrote the file."""
    if file.name in _BESIDE:
        return FileReading(TOOL, skipped="part of the level whose summary lies beside it")
    if isinstance(content, dict):
        content = content | {
            ours: content[theirs] * unit
            for theirs, (ours, unit) in _EARLIER.items()
            if isinstance(content.get(theirs), int | float)
        }
    if not isinstance(content, dict) or not {"Success Requests", "Req Throughput (req/s)"} <= content.keys():
        return None
    return FileReading(TOOL, (RawLevel("", _level(file, content)),))


def _level(file: Path, content: dict[str, Any]) -> dict[str, Any]:
    arguments = json_beside(file, "benchmark_args.json")
    completed = content["Success Requests"]
    rate = content.get("Request Rate (req/s)")
    level: dict[str, Any] = {
        "request_throughput": content["Req Throughput (req/s)"],
        "duration": content.get("Test Duration (s)"),
        "completed": completed,
        "num_prompts": content.get("Total Requests"),
        "total_input_tokens": total_of(content, completed, None, "Avg Input Tokens"),
        "total_output_tokens": total_of(content, completed, None, "Avg Output Tokens"),
        "max_concurrency": content.get("Concurrency"),
        "request_rate": rate if isinstance(rate, int | float) and rate > 0 else None,
        "model_id": arguments.get("model") if isinstance(arguments, dict) else None,
    }
    if level["request_rate"] and not (isinstance(arguments, dict) and arguments.get("open_loop")):
        # Without --open-loop a rate only spaces the requests of a closed loop.
        level["request_rate"] = None
    for column, (metric, to_ms) in _MEANS.items():
        if isinstance(content.get(column), int | float):
            level[latency_key("mean", metric)] = content[column] * to_ms
    rows = json_beside(file, "benchmark_percentile.json")
    for row in rows if isinstance(rows, list) else []:
        percent = str(row.get("Percentiles", "")).removesuffix("%")
        if not percent.replace(".", "", 1).isdigit():
            continue
        for column, (metric, to_ms) in _PERCENTILE_COLUMNS.items():
            if isinstance(row.get(column), int | float):
                level[latency_key(f"p{percent}", metric)] = row[column] * to_ms
    return level
