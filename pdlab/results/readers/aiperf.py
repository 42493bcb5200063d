"""AIPerf and GenAI-Perf: ``profile_export_aiperf.json`` (``profile_export_genai_perf.json``), a level per folder.

The requests of a level are in ``profile_export.jsonl`` beside it; the summary has their percentiles already. Without a
summary the requests are the level.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pdlab.results.readers import FileReading, RawLevel, RequestTimes, parsed_lines
from pdlab.results.readers.statistics import (
    ASSUMED_REQUESTS,
    REGULAR,
    add_statistics,
    keyed,
    of_export,
    times_of,
    total_of,
)

TOOL = "AIPerf"
METRICS = {
    "time_to_first_token": "ttft",
    "inter_token_latency": "tpot",  # of a request: (latency - TTFT) / (tokens - 1)
    "inter_chunk_latency": "itl",
    "request_latency": "e2el",
}
_TIMES = {
    "ttft_s": ("time_to_first_token", 1e-3),
    "tpot_s": ("inter_token_latency", 1e-3),
    "e2el_s": ("request_latency", 1e-3),
    "start_s": ("start", 1e-9),
}
_TO_MS = {"ms": 1.0, "sec": 1000.0, "s": 1000.0, "us": 1e-3, "ns": 1e-6}
_FLAG = re.compile(
    r"--(concurrency|request-rate)[ =]'?([\d.]+)(?![\d.,])"
)  # not with several values, which are a sweep
_CONSTANT = re.compile(r"--(?:request-rate-mode|arrival-pattern)[ =]'?constant\b")


def read(file: Path, content: Any) -> FileReading | None:
    """None unless AIPerf wrote the file."""
    if file.name.startswith(("server_metrics_export", "gpu_telemetry_export")):
        return FileReading(TOOL, skipped="metrics of the server, not of a level")
    if isinstance(content, list):
        first = content[0] if content else None
        if _are_requests(content):
            if file.suffix != ".jsonl" or any(file.parent.glob("profile_export*.json")):
                return FileReading(TOOL, skipped="the requests of the summary beside it")
            return FileReading(TOOL, (RawLevel("", _of_requests(content), _times(content)),))
        if isinstance(first, dict) and file.name.startswith("profile_export"):
            return FileReading(TOOL, skipped="the table of the summary beside it")
        return None
    if not isinstance(content, dict):
        return None
    if file.name == "inputs.json" and "data" in content:
        return FileReading(TOOL, skipped="the prompts that were sent")
    if {"experiments", "service_kind"} <= content.keys():
        return FileReading(TOOL, skipped="the requests of GenAI-Perf's summary beside it")
    throughput = content.get("request_throughput")
    if isinstance(throughput, dict) and "unit" in throughput:
        return FileReading(TOOL, (RawLevel("", _level(content), _requests(file)),))
    if "aiperf_version" in content or file.name.startswith("profile_export_aiperf_"):
        return FileReading(TOOL, skipped="common settings of the levels in the folders beside it")
    if file.name == "run_config.json" and {"benchmark_id", "cfg"} <= content.keys():
        return FileReading(TOOL, skipped="the settings of the level beside it")
    return None


def _are_requests(lines: Sequence[Any]) -> bool:
    """Whether these are the requests of AIPerf. A failed one has an error and no times."""
    if not all(isinstance(line, dict) and {"metadata", "metrics"} <= line.keys() for line in lines):
        return False
    return any("request_latency" in (line["metrics"] or ()) or line.get("error") for line in lines)


def _requests(file: Path) -> RequestTimes | None:
    """The requests of the profiling phase in the file beside a summary; None without one."""
    try:
        return _times(parsed_lines((file.parent / "profile_export.jsonl").read_bytes()))
    except (OSError, ValueError):
        return None


def _profiled(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if line["metadata"].get("benchmark_phase", "profiling") == "profiling"]


def _times(lines: Sequence[dict[str, Any]]) -> RequestTimes | None:
    names = ("request_latency", "time_to_first_token", "inter_token_latency")
    rows: list[dict[str, Any]] = []
    for line in _profiled(lines):
        if not line.get("error"):
            values = {name: line["metrics"].get(name) for name in names}
            row: dict[str, Any] = {
                name: value["value"] * _TO_MS[value["unit"]] for name, value in values.items() if value is not None
            }
            rows.append({**row, "start": line["metadata"].get("request_start_ns")})
    return times_of(rows, _TIMES)


def _of_requests(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A level made of its requests. No line has its load: a name must give it."""
    profiled = _profiled(lines)
    good = [line for line in profiled if not line.get("error")]
    starts_ns, ends_ns = ([line["metadata"][f"request_{end}_ns"] for line in good or lines] for end in ("start", "end"))
    level: dict[str, Any] = {
        "duration": (max(ends_ns) - min(starts_ns)) / 1e9,
        "completed": len(good),
        "num_prompts": len(profiled),
    }
    for side in ("input", "output"):
        counts = [(line["metrics"].get(f"{side}_sequence_length") or {}).get("value") for line in good]
        if good and None not in counts:
            level[f"total_{side}_tokens"] = sum(counts)
    times = _times(lines)
    if times is not None:
        add_statistics(level, "ttft", times.ttft_s)
        add_statistics(level, "tpot", times.tpot_s[times.tpot_s == times.tpot_s])
        add_statistics(level, "e2el", times.e2el_s)
    return level


def _level(content: dict[str, Any]) -> dict[str, Any]:
    config = content.get("input_config") or {}
    command = str((content.get("run_info") or {}).get("cli_command") or content.get("cli_command") or "")
    rate = _average(content, "request_throughput")
    completed, failed = _average(content, "request_count"), _average(content, "error_request_count") or 0
    unknown = completed is None and bool(rate)
    completed, total = (ASSUMED_REQUESTS, None) if unknown else (completed or 0, "sum")
    # Its rates refer to the time from the first request to the last answer, which is shorter than benchmark_duration.
    duration = completed / rate if rate and completed else _average(content, "benchmark_duration")
    level: dict[str, Any] = {
        "request_throughput": rate,
        "duration": duration,
        "completed": completed,
        "num_prompts": completed + failed,
        "total_input_tokens": total_of(content.get("input_sequence_length"), completed, total, "avg"),
        "total_output_tokens": total_of(content.get("output_sequence_length"), completed, total, "avg"),
        "server_output_tokens": _average(content, "total_usage_completion_tokens"),
        "model_id": _model(config),
        "date": content.get("start_time"),
        "counts_unknown": True if unknown else None,
        "invalid": "AIPerf's run was cancelled" if content.get("was_cancelled") is True else None,
        **_load(config, command),
        **of_export(content),
    }
    for theirs, ours in METRICS.items():
        statistics = content.get(theirs)
        if isinstance(statistics, dict):
            level |= keyed(ours, statistics, to_ms=_TO_MS.get(str(statistics.get("unit")), 1.0), mean="avg")
    return level


def _average(content: dict[str, Any], name: str) -> float | None:
    entry = content.get(name)
    value = entry.get("avg") if isinstance(entry, dict) else None
    return value if isinstance(value, int | float) else None


def _model(config: dict[str, Any]) -> str | None:
    models = config.get("models") or {}
    items = models.get("items") if isinstance(models, dict) else None
    if items and isinstance(items[0], dict):
        return str(items[0].get("name"))
    names = (config.get("endpoint") or {}).get("model_names") or config.get("model_names") or config.get("model")
    return str(names[0] if isinstance(names, list) else names) if names else None


def _load(config: dict[str, Any], command: str) -> dict[str, Any]:
    """Load of the profiling phase: from the configuration, in earlier versions from the command."""
    flags: dict[str, float] = {}
    burstiness = None
    phases = [phase for phase in config.get("phases") or [] if isinstance(phase, dict)]
    profiling = [phase for phase in phases if phase.get("kind", phase.get("name")) in ("profiling", None)] or phases
    for phase in profiling:
        for name, key in (("concurrency", "concurrency"), ("rate", "request-rate"), ("request_rate", "request-rate")):
            if isinstance(phase.get(name), int | float):
                flags.setdefault(key, float(phase[name]))
        if isinstance(phase.get("smoothness"), int | float):
            burstiness = float(phase["smoothness"])
        elif phase.get("type") == "constant":
            burstiness = REGULAR
    generator = config.get("loadgen") or {}
    # GenAI-Perf up to 0.0.8 has its load in the configuration itself, later ones have that of perf_analyzer.
    stimulus = (config.get("perf_analyzer") or {}).get("stimulus") or config
    for source in (generator, stimulus):
        for name, key in (("concurrency", "concurrency"), ("request_rate", "request-rate")):
            if isinstance(source.get(name), int | float):
                flags.setdefault(key, float(source[name]))
    if generator.get("request_rate_mode", generator.get("arrival_pattern")) == "constant":
        burstiness = REGULAR
    elif not generator and "request-rate" in flags and stimulus.get("request_rate"):
        burstiness = REGULAR  # perf_analyzer's arrivals, unless it is told otherwise
    if not flags:
        flags = {name: float(value) for name, value in _FLAG.findall(command)}
        burstiness = REGULAR if _CONSTANT.search(command) else burstiness
    load: dict[str, Any] = {"request_rate": flags.get("request-rate", "inf"), "burstiness": burstiness}
    if "concurrency" in flags:
        load["max_concurrency"] = int(flags["concurrency"])
    return load
