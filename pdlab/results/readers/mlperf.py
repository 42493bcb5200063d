"""MLPerf inference: LoadGen's ``mlperf_log_summary.txt`` if it has token latencies, and result tables.

The summary of a Server run has the rate of its Poisson arrivals, the completed rate, and TTFT, TPOT and E2EL. It has
neither the number of requests nor their lengths. Tables have only throughput; they are recognised and skipped.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pdlab.results.readers import SUMMARY_OF_LOADGEN, FileReading, RawLevel
from pdlab.results.readers.statistics import ASSUMED_REQUESTS, latency_key

TOOL = "MLPerf"
_TABLE = {"scenario", "division", "units", "result"}
_LINE = re.compile(r"^[ \t]*([^:=\n]+?)[ \t]*:[ \t]*(\S.*?)[ \t]*$", re.MULTILINE)
_LATENCY = re.compile(r"(Mean|(\d\d\.\d\d) percentile) (.*?latency|Time (?:per|to) Output Token) \(ns\)", re.IGNORECASE)
_METRICS = {
    "latency": "e2el",
    "first token latency": "ttft",
    "time per output token": "tpot",
    "time to output token": "tpot",
}


def read(file: Path, content: Any) -> FileReading | None:
    """None unless it is a summary of LoadGen or an MLPerf table of results."""
    if file.name == SUMMARY_OF_LOADGEN and isinstance(content, str) and "MLPerf Results Summary" in content:
        level = _level(dict(_LINE.findall(content)))
        why = "" if level else "of a scenario without a request rate, or without token latencies"
        return FileReading(TOOL, (RawLevel("", level),) if level else (), why)
    rows = content if isinstance(content, list) else []
    if not rows or not isinstance(rows[0], dict):
        return None
    names = {str(name).lower() for name in rows[0]}
    if not names >= _TABLE:
        return None
    return FileReading(TOOL, skipped="a table of throughput without latencies: nothing to plot against")


def _level(lines: dict[str, str]) -> dict[str, Any] | None:
    """The level of a Server run; None for another scenario."""
    latencies: dict[str, float] = {}
    for name, value in lines.items():
        match = _LATENCY.fullmatch(name)
        metric = _METRICS.get(match[3].lower()) if match else None
        if match and metric:
            latencies[latency_key(f"p{float(match[2]):g}" if match[2] else "mean", metric)] = float(value) / 1e6
    rate, tokens_per_s, target = (
        float(lines.get(name, 0))
        for name in ("Completed samples per second", "Completed tokens per second", "target_qps")
    )
    if not (rate and target and any(name.endswith("_ttft_ms") for name in latencies)):
        return None
    duration_s = ASSUMED_REQUESTS / rate
    level: dict[str, Any] = {
        "request_throughput": rate,
        "duration": duration_s,
        "completed": ASSUMED_REQUESTS,
        "counts_unknown": True,
        "request_rate": target,
        "burstiness": 1.0,
        "sut": lines.get("SUT name", ""),
        **latencies,
    }
    if tokens_per_s:
        level["total_output_tokens"] = tokens_per_s * duration_s
    if lines.get("Result is") != "VALID":
        failed = [name for name, value in lines.items() if name.endswith("satisfied") and value.lower() == "no"]
        level["invalid"] = f"LoadGen calls the run {lines.get('Result is', 'neither valid nor invalid')}" + "".join(
            f", not satisfied: {name.removesuffix(' satisfied')}" for name in failed
        )
    return level
