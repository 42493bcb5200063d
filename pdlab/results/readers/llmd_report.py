"""llm-d's benchmark reports (0.1 and 0.2; YAML or JSON): a level per file."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

from pdlab.results.readers import FileReading, RawLevel
from pdlab.results.readers.statistics import METRICS, keyed, of_export, total_of

TOOL = "llm-d benchmark report"
_OF_INFERENCE_PERF = re.compile(r"inference-perf\.(?:partial\.)?stage_(\d+)")


def read(file: Path, content: Any) -> FileReading | None:
    """None unless it is a benchmark report of llm-d."""
    if not isinstance(content, dict) or "version" not in content:
        return None
    performance = _performance(content)
    if performance is None:
        return None
    of_inference_perf = _OF_INFERENCE_PERF.search(file.name)
    if of_inference_perf and any(file.parent.glob(f"*stage_{of_inference_perf[1]}_lifecycle_metrics.json")):
        return FileReading(TOOL, skipped="the same level as inference-perf's own file beside it")
    return FileReading(TOOL, (RawLevel("", _level(content, performance), settings=_engines(content.get("scenario"))),))


def _performance(content: dict[str, Any]) -> dict[str, Any] | None:
    """The dictionary with ``requests``, ``latency`` and ``throughput``. In 0.2 it is under
    results.request_performance.aggregate, in 0.1 under metrics."""
    results = content.get("results")
    aggregate = (
        ((results or {}).get("request_performance") or {}).get("aggregate") if isinstance(results, dict) else None
    )
    found = aggregate or content.get("metrics")
    return found if isinstance(found, dict) and {"requests", "latency", "throughput"} <= found.keys() else None


def _level(content: dict[str, Any], performance: dict[str, Any]) -> dict[str, Any]:
    requests, throughput = performance["requests"], performance["throughput"]
    total = requests.get("total") or 0
    completed = total - (requests.get("failures") or 0) - (requests.get("incomplete") or 0)
    rate = _value(throughput.get("request_rate", throughput.get("requests_per_sec")))
    stated = performance.get("time") or {}
    duration = stated.get("duration") or (completed / rate if rate else None)
    level: dict[str, Any] = {
        "request_throughput": rate,
        "duration": duration,
        "completed": completed,
        "num_prompts": total - (requests.get("incomplete") or 0),
        "total_input_tokens": total_of(requests.get("input_length"), completed, "sum"),
        "total_output_tokens": total_of(requests.get("output_length"), completed, "sum"),
        "date": _started(content),
        **_scenario(content.get("scenario") or {}),
        **of_export(content),
    }
    for theirs, ours in METRICS.items():
        statistics = performance["latency"].get(theirs)
        if isinstance(statistics, dict):
            in_ms = str(statistics.get("units", "s")).startswith("ms")
            level |= keyed(ours, statistics, to_ms=1.0 if in_ms else 1000.0)
    return level


def _started(content: dict[str, Any]) -> str | None:
    run = content.get("run")
    time = run.get("time") if isinstance(run, dict) else None
    start = time.get("start") if isinstance(time, dict) else None
    return None if start is None else str(start)


def _value(rate: Any) -> float | None:
    value = rate.get("mean") if isinstance(rate, dict) else rate
    return float(value) if isinstance(value, int | float) else None


def _scenario(scenario: dict[str, Any]) -> dict[str, Any]:
    load = scenario.get("load") or {}
    standardized: dict[str, Any] = load.get("standardized") or {}
    # In 0.1 an entry of the host is the accelerator itself.
    hosts = [
        each if isinstance(each.get("accelerator"), dict) else {"accelerator": each}
        for each in (scenario.get("host") or {}).get("accelerator") or []
        if isinstance(each, dict)
    ]
    parts = [
        {**each, **(each.get("standardized") or {})}
        for each in [*(scenario.get("stack") or []), *hosts]
        if isinstance(each, dict)
    ]
    engines = [each for each in parts if each.get("kind") == "inference_engine" and each.get("tool")]
    engines += [
        {"tool": each.get("name"), "tool_version": each.get("version")}
        for each in (scenario.get("platform") or {}).get("engine") or []
        if isinstance(each, dict) and each.get("name")
    ]
    models = [scenario.get("model"), *(each.get("model") for each in parts)]
    model = next((each for each in models if isinstance(each, dict) and each.get("name")), {})
    accelerators = [each.get("accelerator") for each in parts]
    gpus = [each.get("model") for each in accelerators if isinstance(each, dict)]
    if any((each.get("replicas") or 1) > 1 for each in parts):
        accelerators = []  # unclear whether the count is of one replica or of all
    return {
        "request_rate": standardized.get("rate_qps"),
        "max_concurrency": standardized.get("concurrency"),
        "model_id": model.get("name"),
        "gpu": _alike(gpus, ", "),
        "framework": _alike([each["tool"] for each in engines], ", "),
        "framework_version": _alike([each.get("tool_version") for each in engines]),
        "num_gpus": sum(each.get("count") or 0 for each in accelerators if isinstance(each, dict)) or None,
    }


def _engines(scenario: Any) -> dict[str, Any]:
    """The roles, replicas and parallelism of the engines: reports that differ in them are no repeats."""
    scenario = scenario if isinstance(scenario, dict) else {}
    host = scenario.get("host") or {}
    kinds = host.get("type")
    entries = [each for each in host.get("accelerator") or [] if isinstance(each, dict)]
    roles = kinds if isinstance(kinds, list) and len(kinds) == len(entries) else [""] * len(entries)
    found = [(str(role), 1, each.get("parallelism")) for role, each in zip(roles, entries, strict=True)]
    for part in scenario.get("stack") or []:
        each = {**part, **(part.get("standardized") or {})} if isinstance(part, dict) else {}
        if isinstance(each.get("accelerator"), dict):
            parallelism = each["accelerator"].get("parallelism")
            found.append((str(each.get("role") or ""), each.get("replicas") or 1, parallelism))
    counts: Counter[str] = Counter()
    for role, replicas, degrees in found:
        known = degrees if isinstance(degrees, dict) else {}
        words = [f"{name}{size}" for name, size in sorted(known.items()) if isinstance(size, int) and size > 1]
        counts[" ".join(filter(None, [role, *words]))] += replicas
    texts = [f"{count}x {words}" for words, count in sorted(counts.items()) if words]
    return {"engines": ", ".join(texts)} if texts else {}


def _alike(texts: list[Any], separator: str | None = None) -> str | None:
    """Each of these texts once; None without one, if a part has none, or if there are several without a separator."""
    several = list(dict.fromkeys(texts))
    if not several or not all(isinstance(text, str) and text for text in several):
        return None
    return None if separator is None and len(several) > 1 else (separator or "").join(several)
