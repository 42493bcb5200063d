"""inference-perf: ``stage_N_lifecycle_metrics.json``, a level per file.

``summary_lifecycle_metrics.json`` is the mean of all stages, so it is a level only if the run has one stage. The model
and the kind of arrivals are in ``config.yaml`` beside them. The client counts the tokens of answers itself, or takes
the server's counts (``use_server_output_tokens``). Its throughput and its TPOT use these counts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from pdlab.core.schema import parse_yaml
from pdlab.results.readers import FileReading, RawLevel
from pdlab.results.readers.statistics import METRICS, REGULAR, keyed, total_of

TOOL = "inference-perf"
CONFIG = "config.yaml"


def read(file: Path, content: Any) -> FileReading | None:
    """None unless it is a report of inference-perf."""
    if isinstance(content, list) and "per_request_lifecycle" in file.name:
        return FileReading(TOOL, skipped="the requests of the stages beside it")
    if not isinstance(content, dict):
        return None
    if file.name == CONFIG and {"api", "data", "load", "server"} <= content.keys():
        return FileReading(TOOL, skipped="the settings of the stages beside it")
    if file.name == "validation.json" and {"global", "reports"} <= content.keys():
        return FileReading(TOOL, skipped="the client's own checks of the stages beside it")
    if not {"load_summary", "successes", "failures"} <= content.keys():
        return None
    if "summary_" in file.name and any(file.parent.glob("*stage_*_lifecycle_metrics.json")):
        return FileReading(TOOL, skipped="the mean over the stages beside it")
    return FileReading(TOOL, (RawLevel("", _level(content, _config(file))),))


def _config(file: Path) -> dict[str, Any]:
    """The settings beside a file; empty if there are none."""
    try:
        stated = parse_yaml((file.parent / CONFIG).read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return stated if isinstance(stated, dict) else {}


def _level(content: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    load, good, bad = content["load_summary"], content["successes"], content["failures"]
    completed = good.get("count") or 0
    throughput = good.get("throughput") or {}
    rate = throughput.get("requests_per_sec")
    measured = content.get("benchmark_time_seconds") or load.get("send_duration")
    duration = completed / rate if rate and completed else measured
    level: dict[str, Any] = {
        "request_throughput": rate,
        "duration": duration,
        "completed": completed,
        "num_prompts": completed + (bad.get("count") or 0),
        "total_input_tokens": total_of(good.get("prompt_tokens") or good.get("prompt_len"), completed, "total"),
        "total_output_tokens": _outputs(good, duration, completed),
        "server_output_tokens": total_of(good.get("output_tokens"), completed, "total"),
        "model_id": (config.get("server") or {}).get("model_name"),
        "burstiness": REGULAR if (config.get("load") or {}).get("type") == "constant" else None,
        "request_rate": load.get("requested_rate"),
        "max_concurrency": load.get("concurrency"),
    }
    if level["max_concurrency"]:
        level["request_rate"] = level["burstiness"] = None
    for theirs, ours in METRICS.items():
        statistics = (good.get("latency") or {}).get(theirs)
        if isinstance(statistics, dict):
            level |= keyed(ours, statistics, to_ms=1000.0)
    return level


def _outputs(good: dict[str, Any], duration: float | None, completed: float) -> float | None:
    """Output tokens from the client's throughput, because its TPOT uses the same counts."""
    per_s = (good.get("throughput") or {}).get("output_tokens_per_sec")
    if per_s and duration:
        return float(per_s * duration)
    return total_of(good.get("output_tokens") or good.get("output_len"), completed, "total")
