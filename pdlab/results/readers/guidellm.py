"""guidellm's ``benchmarks.json``: several levels per file.

Up to 0.3 the totals of requests and the arguments lie beside the metrics; later they are in them and in ``config``.

guidellm's "time per output token" counts the first token. Its "inter token latency" is the TPOT of other clients,
weighted by the tokens of a request. The record has the latter as TPOT.
"""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pdlab.results.readers import FileReading, RawLevel, RequestTimes
from pdlab.results.readers.statistics import REGULAR, keyed, times_of, total_of

TOOL = "guidellm"
_METRICS = {
    "time_to_first_token_ms": ("ttft", 1.0),
    "inter_token_latency_ms": ("tpot", 1.0),
    "request_latency": ("e2el", 1000.0),
}
_TIMES = {
    "ttft_s": ("time_to_first_token_ms", 1e-3),
    "tpot_s": ("inter_token_latency_ms", 1e-3),
    "e2el_s": ("request_latency", 1.0),
    "start_s": ("request_start_time", 1.0),
}
_PERCENTILES = {"p50": "p50", "p75": "p75", "p90": "p90", "p95": "p95", "p99": "p99", "p999": "p99.9"}


def read(file: Path, content: Any) -> FileReading | None:
    """None unless it is a report of guidellm."""
    if not isinstance(content, dict) or not isinstance(content.get("benchmarks"), list):
        return None
    benchmarks = [each for each in content["benchmarks"] if isinstance(each, dict) and "metrics" in each]
    if not benchmarks:
        return None
    levels = [
        RawLevel(f"benchmark {number}" if len(benchmarks) > 1 else "", _level(benchmark, content), _requests(benchmark))
        for number, benchmark in enumerate(benchmarks, 1)
    ]
    return FileReading(TOOL, tuple(levels))


def _level(benchmark: dict[str, Any], report: dict[str, Any]) -> dict[str, Any]:
    metrics = benchmark["metrics"]
    totals = metrics.get("request_totals") or benchmark.get("request_totals")
    if not isinstance(totals, dict) or not isinstance(totals.get("successful"), int | float):
        raise ValueError("no request_totals has the number of answered requests")
    completed = totals["successful"]
    duration = benchmark.get("duration") or _difference(benchmark, "end_time", "start_time")
    level: dict[str, Any] = {
        "request_throughput": completed / duration if duration else None,
        "duration": duration,
        "completed": completed,
        # Requests in flight at the end of the level's time are no failures.
        "num_prompts": completed + (totals.get("errored") or 0),
        "total_input_tokens": _sum(metrics, "prompt_token_count"),
        "total_output_tokens": _sum(metrics, "output_token_count"),
        "model_id": _model(benchmark, report),
        "date": _date(benchmark.get("start_time")),
        **_load(benchmark),
    }
    for theirs, (ours, to_ms) in _METRICS.items():
        statistics = _successful(metrics, theirs)
        percentiles = statistics.get("percentiles") or {}
        known = {_PERCENTILES[name]: value for name, value in percentiles.items() if name in _PERCENTILES}
        level |= keyed(ours, {"mean": statistics.get("mean"), **known}, to_ms=to_ms)
    return level


def _requests(benchmark: dict[str, Any]) -> RequestTimes | None:
    kept = benchmark.get("requests")
    good = kept.get("successful") if isinstance(kept, dict) else None
    return times_of([each for each in good or [] if isinstance(each, dict)], _TIMES)


def _successful(metrics: dict[str, Any], name: str) -> dict[str, Any]:
    entry = (metrics.get(name) or {}).get("successful")
    return entry if isinstance(entry, dict) else {}


def _sum(metrics: dict[str, Any], name: str) -> float | None:
    statistics = _successful(metrics, name)
    return total_of(statistics, statistics.get("count"), "total_sum")


def _difference(benchmark: dict[str, Any], end: str, start: str) -> float | None:
    ends, starts = benchmark.get(end), benchmark.get(start)
    return None if ends is None or starts is None else ends - starts


def _date(start_s: Any) -> str | None:
    """ISO 8601 of seconds since 1970."""
    try:
        return datetime.fromtimestamp(start_s, timezone.utc).isoformat()
    except (TypeError, ValueError, OverflowError, OSError):
        return None


def _model(benchmark: dict[str, Any], report: dict[str, Any]) -> str | None:
    config = benchmark.get("config") or {}
    for backend in (
        config.get("backend"),
        benchmark.get("backend"),
        ((report.get("config") or {}).get("spec") or {}).get("backend"),
        report.get("args"),
        benchmark.get("worker"),
    ):
        if isinstance(backend, dict) and isinstance(model := backend.get("model") or backend.get("backend_model"), str):
            return model
    return None


def _load(benchmark: dict[str, Any]) -> dict[str, Any]:
    places = (benchmark.get(name) or {} for name in ("config", "scheduler", "args"))
    strategy: dict[str, Any] = next(filter(None, (place.get("strategy") for place in places)), {})
    kind = strategy.get("type_")
    if kind == "synchronous":
        return {"max_concurrency": 1}
    if kind in ("concurrent", "throughput"):
        return {"max_concurrency": strategy.get("streams") or strategy.get("max_concurrency")}
    rate = strategy.get("rate")
    regular = {"burstiness": REGULAR} if kind == "constant" else {}
    return {"request_rate": rate, "max_concurrency": strategy.get("max_concurrency"), **regular} if rate else {}
