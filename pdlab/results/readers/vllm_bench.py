"""``vllm bench serve`` of all versions, and SGLang's ``bench_serving``, which has the same keys, a level per line.

With ``--save-detailed`` (vLLM) or ``--output-details`` (SGLang) the file holds the requests, which give all percentiles
and the share within an SLO.

``vllm bench sweep`` writes a folder per combination with ``run=N.json``, a level each. Its ``summary.json`` and
``summary.csv`` repeat the same levels. Beside vLLM's own results a level has ``run_number`` and the parameters of its
combination, which are settings.
"""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path
from typing import Any

from pdlab.core.errors import StoreError
from pdlab.results.readers import FileReading, RawLevel, RequestTimes
from pdlab.results.readers.statistics import add_statistics, is_finite

TOOL = "vllm bench serve"
OF_SGLANG = "SGLang bench_serving"
_MARKS = {"request_throughput", "completed"}
# Summary of a sweep -> pattern of its levels' files, from the folder of the summary.
_SUMMARIES = {"summary.json": "run=*.json", "summary.csv": "*/run=*.json"}

# Arguments of SGLang's server, which reports also figures and what differs with every start.
_OF_SERVER = (
    *("chunked_prefill_size", "max_prefill_tokens", "max_running_requests", "mem_fraction_static", "page_size"),
    *("schedule_policy", "disable_radix_cache", "disable_cuda_graph", "disable_overlap_schedule", "quantization"),
    *("kv_cache_dtype", "attention_backend", "moe_a2a_backend", "speculative_algorithm", "enable_dp_attention"),
)
# What a level of a sweep has beside the parameters of its combination: its load, and the results of `vllm bench serve`.
_OF_SWEEP = frozenset({"", "run_number", "_benchmark_name", "seed"})
_LOAD = frozenset({"max_concurrency", "request_rate", "burstiness", "num_prompts"})
_RESULTS = frozenset(
    {"date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "duration", "completed", "failed"}
    | {"max_concurrent_requests", "rtfx", "rps_change_events", "input_lens", "output_lens", "ttfts", "itls"}
    | {"start_times", "generated_texts", "errors"}
)
_FIGURE = re.compile(r"[\w.]+_(?:ms|throughput|goodput|per_s)|(?:total|spec_decode|diffusion|probe|ramp_up)_\w+")


def read(file: Path, content: Any) -> FileReading | None:
    """None unless every level has the keys of these clients."""
    rows = content if isinstance(content, list) else [content]
    if not rows or not all(isinstance(row, dict) and row.keys() >= _MARKS for row in rows):
        return None
    if file.name in _SUMMARIES and any(file.parent.glob(_SUMMARIES[file.name])):
        return FileReading("vllm bench sweep", skipped="the levels whose files are beside or below it")
    if file.suffix == ".csv":
        rows = [_numbers(row) for row in rows]
    of_sglang = any("total_output_tokens_retokenized" in row or "sharegpt_output_len" in row for row in rows)
    levels = [
        RawLevel(f"line {number}" if isinstance(content, list) else "", *_level(file, row, of_sglang), _settings(row))
        for number, row in enumerate(rows, 1)
    ]
    return FileReading(OF_SGLANG if of_sglang else TOOL, tuple(levels))


def _level(file: Path, row: dict[str, Any], of_sglang: bool) -> tuple[dict[str, Any], RequestTimes | None]:
    level = dict(row)
    if of_sglang:
        info = level.pop("server_info", None)
        if isinstance(info, dict):
            level = {**_of_server(info), **level}
        if isinstance(level.get("errors"), list):
            level.setdefault("num_prompts", len(level["errors"]))
        # E2EL ends with the stream, after the last token. The stored requests lack that moment.
        for name in [name for name in level if name.endswith("_e2e_latency_ms")]:
            level[name.replace("_e2e_latency_ms", "_e2el_ms")] = level.pop(name)
        if str(level.get("request_rate")) == "trace":
            level["arrivals"] = level.pop("request_rate")
    try:
        times = _add_requests(level)
    except (TypeError, ValueError) as error:
        raise StoreError(f"{file}: its requests are not numbers ({error}); write the file again") from error
    return level, times


def _settings(row: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a combination of ``vllm bench sweep``, or what SGLang's server reports; else empty."""
    info = row.get("server_info")
    if isinstance(info, dict):
        every = {"": info, **{f"{role}_": engine for role, engine in _roles(info).items()}}
        return {
            f"{role}{name}": engine[name]
            for role, engine in every.items()
            for name in _OF_SERVER
            if engine.get(name) is not None
        }
    if "run_number" not in row:
        return {}
    return {
        name: value
        for name, value in row.items()
        if value is not None
        and (key := name.replace("-", "_")) not in _OF_SWEEP | _LOAD | _RESULTS
        and not _FIGURE.fullmatch(key)
    }


def _numbers(row: dict[str, Any]) -> dict[str, Any]:
    """A row of a table: its numbers as numbers, without empty cells."""
    level: dict[str, Any] = {}
    for name, text in row.items():
        if isinstance(text, str) and text:
            try:
                level[name] = int(text) if text.isdecimal() else float(text)
            except ValueError:
                level[name] = text
    return level


def _of_server(info: dict[str, Any]) -> dict[str, Any]:
    """The deployment and the version that SGLang's server reports; a router reports lists of both roles' servers."""
    names = {"model_path": "model_id", "tp_size": "tp", "dp_size": "dp", "ep_size": "ep", "pp_size": "pp"}
    names |= {"version": "sglang_version", "enable_dp_attention": "enable_dp_attention"}
    roles = _roles(info)
    if not roles:
        return {ours: info[theirs] for theirs, ours in names.items() if info.get(theirs) is not None}
    found = _of_server(roles.get("decode") or roles["prefill"])
    for role, engine in roles.items():
        found |= {
            f"{role}_{name}": value for name, value in _of_server(engine).items() if name in ("tp", "pp", "dp", "ep")
        }
    return {name: value for name, value in found.items() if f"decode_{name}" not in found}


def _roles(info: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The first server of each role behind SGLang's router; empty for a server itself."""
    found = {role: info[role][0] for role in ("prefill", "decode") if isinstance(info.get(role), list) and info[role]}
    return {role: engine for role, engine in found.items() if isinstance(engine, dict)}


def _add_requests(level: dict[str, Any]) -> RequestTimes | None:
    """Add percentiles of the requests in the file, and return these; the file's own figures stay. A request whose
    times are not finite is left out, as one without them.

    Raises TypeError or ValueError for values that are not numbers.
    """
    import numpy as np

    ttfts, itls, outputs, errors, starts = (
        level.pop(name, None) for name in ("ttfts", "itls", "output_lens", "errors", "start_times")
    )
    for name in ("generated_texts", "input_lens"):
        level.pop(name, None)
    if not (isinstance(ttfts, list) and isinstance(itls, list) and isinstance(outputs, list)):
        return None
    failed = errors if isinstance(errors, list) else []
    good = [
        i
        for i in range(min(len(ttfts), len(itls), len(outputs)))
        if not (i < len(failed) and failed[i]) and is_finite(ttfts[i]) and isinstance(itls[i], list)
    ]
    counts = np.array([len(itls[i]) for i in good], dtype=np.int64)
    gaps_s = np.fromiter(chain.from_iterable(itls[i] for i in good), dtype=float, count=int(counts.sum()))
    if not np.isfinite(gaps_s).all():  # one of them would be in the sums of all later requests
        good = [i for i in good if all(map(is_finite, itls[i]))]
        counts = np.array([len(itls[i]) for i in good], dtype=np.int64)
        gaps_s = np.fromiter(chain.from_iterable(itls[i] for i in good), dtype=float, count=int(counts.sum()))
    totals_s = np.diff(np.concatenate(([0.0], np.cumsum(gaps_s)))[np.concatenate(([0], np.cumsum(counts)))])
    ttfts_s = np.array([ttfts[i] for i in good], dtype=float)
    tokens = np.array([outputs[i] or 0 for i in good], dtype=float)
    several = tokens > 1
    tpots_s = np.where(several, totals_s / np.maximum(tokens - 1, 1), np.nan)
    add_statistics(level, "ttft", ttfts_s)
    add_statistics(level, "tpot", tpots_s[several])
    add_statistics(level, "itl", gaps_s)
    add_statistics(level, "e2el", ttfts_s + totals_s)
    starts_s = None
    if isinstance(starts, list) and len(starts) == len(ttfts) and all(map(is_finite, starts)):
        starts_s = np.array([starts[i] for i in good], dtype=float)
    return RequestTimes(ttfts_s, tpots_s, ttfts_s + totals_s, starts_s)
