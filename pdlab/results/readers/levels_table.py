"""The table of levels from ``viz.py --export csv=FILE`` and ``parquet=FILE``, a level per row.

Its figures may be those of a steady window; the rest of the run is then unknown. A row has no duration: that is its
requests over their rate.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pdlab.results.readers import FileReading, RawLevel
from pdlab.results.readers.statistics import latency_key, number_in

TOOL = "table of pdlab"
_MARKS = {"experiment", "load_kind", "load", "completed", "requests", "requests_per_s", "output_tokens_per_s", "window"}
_LATENCY = re.compile(r"(ttft|tpot|itl|e2el)_(mean|p[\d.]+)_ms")


def read(file: Path, content: Any) -> FileReading | None:
    """None unless every row has the columns of the table."""
    if not isinstance(content, list) or not content:
        return None
    if not all(isinstance(row, dict) and row.keys() >= _MARKS for row in content):
        return None
    levels = [RawLevel(f"row {number}", level) for number, row in enumerate(content, 1) if (level := _level(row))]
    return FileReading(TOOL, tuple(levels), "" if levels else "no level that a request was answered in")


def _level(row: dict[str, Any]) -> dict[str, Any] | None:
    rate, completed = number_in(row["requests_per_s"]), number_in(row["completed"])
    if not rate or not completed:
        return None
    duration = completed / rate
    kind, load = row["load_kind"], number_in(row["load"])
    level: dict[str, Any] = {
        "label": row["experiment"],
        "model_id": row.get("model") or None,
        "num_gpus": number_in(row.get("gpus")),
        "device": row.get("device") or None,
        "gpu": row.get("gpu_type") or None,
        "framework": row.get("engine") or None,
        "framework_version": row.get("engine_version") or None,
        "request_throughput": rate,
        "duration": duration,
        "completed": completed,
        "judged": number_in(row.get("judged")),
        "num_prompts": completed + (number_in(row.get("failed")) or 0),
        "total_input_tokens": (number_in(row.get("input_tokens_per_s")) or 0) * duration,
        "total_output_tokens": (number_in(row["output_tokens_per_s"]) or 0) * duration,
        "max_concurrency": load if kind == "concurrency" else None,
        "request_rate": load if kind == "rate" else None,
        "burstiness": number_in(row.get("burstiness")),
        "steady": row["window"] == "steady",
        "invalid": (row.get("reasons") or "not valid") if str(row.get("valid")) == "False" else None,
    }
    if kind == "ramp":
        level |= {"ramp_up_strategy": row.get("ramp_shape"), "ramp_up_start_rps": number_in(row.get("ramp_start_rps"))}
        level["ramp_up_end_rps"] = load
    for name, value in row.items():
        match, figure = _LATENCY.fullmatch(name), number_in(value)
        if match and figure is not None:
            level[latency_key(match[2], match[1])] = figure
    return level
