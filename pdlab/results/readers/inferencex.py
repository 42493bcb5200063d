"""InferenceX (InferenceMAX): the aggregated JSON of a run, a list of these, and the site's CSV, a level per row.

Latencies are in seconds unless the name ends in ``_ms``; throughput is per GPU, of a disaggregated row the output
rate per decode GPU. A row has no duration and no number of
requests. It is read as `ASSUMED_REQUESTS` at its throughput, and its level notes that.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pdlab.core.bounds import METRICS
from pdlab.results.readers import FileReading, RawLevel
from pdlab.results.readers.statistics import ASSUMED_REQUESTS, latency_key, number_in, of_export

TOOL = "InferenceX"
# Our name -> theirs; the first one found counts.
_NAMES: dict[str, tuple[str, ...]] = {
    "model_id": ("model", "model_name", "infmax_model_prefix"),
    "gpu": ("hw", "gpu", "hardware"),
    "isl": ("isl", "input_len"),
    "osl": ("osl", "output_len"),
    "max_concurrency": ("conc", "concurrency", "max_concurrency"),
    "tp": ("tp", "decode_tp", "d_tp"),
    "pp": ("pp", "decode_pp", "d_pp"),
    "ep": ("ep", "decode_ep", "moe_ep"),
    "framework": ("framework",),
    "framework_version": ("framework_version", "image"),
    "precision": ("precision",),
    "dp_attention": ("dp_attention", "attention_dp"),
    "spec_decoding": ("spec_decoding",),
    "mode": ("mode",),
    "disagg": ("disagg",),
    "is_multinode": ("is_multinode",),
    **{
        f"{role[0]}_{what}": (f"{role[0]}_{what}", *(name.replace("ROLE", role) for name in theirs))
        for role in ("prefill", "decode")
        for what, theirs in (
            ("workers", ("ROLE_num_workers", "num_ROLE_workers")),
            ("gpus", ("num_ROLE_gpu", "ROLE_num_gpus")),
            ("dp_attention", ("ROLE_dp_attention", "ROLE_attention_dp")),
            *((what, (f"ROLE_{what}",)) for what in ("tp", "pp", "ep")),
        )
    },
}
# A row's load and lengths differ within a curve; its model is compared for every client.
_NO_SETTINGS = ("max_concurrency", "isl", "osl", "model_id")
_WHOLE = re.compile(r"\d+(?:\.0)?")
_LATENCY = re.compile(rf"(?:(?P<statistic>mean|median|p\d+)_)?(?P<metric>{'|'.join(METRICS)})(?P<ms>_ms)?")
# Their names are InferenceX's own, which of disaggregated rows are per decode GPU.
_PER_DECODE_GPU = ("output_tput_per_gpu", "output_throughput_per_gpu")
_GPUS = ("gpus_total", "num_gpus", "total_gpus")


def read(file: Path, content: Any) -> FileReading | None:
    """None unless every row has a load, lengths and throughput per GPU as InferenceX writes them."""
    rows = content if isinstance(content, list) else [content]
    if not rows or not all(isinstance(row, dict) for row in rows):
        return None
    if not all(_first(row, "max_concurrency") is not None and _throughput(row) is not None for row in rows[:5]):
        return None
    several = isinstance(content, list)
    levels = [
        RawLevel(f"row {number}" if several else "", level, settings=_settings(row))
        for number, row in enumerate(rows, 1)
        if (level := _level(row)) is not None
    ]
    return FileReading(TOOL, tuple(levels))


def _first(row: dict[str, Any], name: str) -> Any:
    for theirs in _NAMES.get(name, (name,)):
        value = row.get(theirs)
        if value not in (None, ""):
            return value
    return None


def _settings(row: dict[str, Any]) -> dict[str, Any]:
    """Every setting of a row. The whole numbers of a table, which may be written 8.0, are numbers."""
    found = {name: _first(row, name) for name in _NAMES if name not in _NO_SETTINGS}
    return {
        name: int(float(value)) if name != "framework_version" and _WHOLE.fullmatch(str(value)) else value
        for name, value in found.items()
        if value is not None
    }


def _gpus(row: dict[str, Any]) -> float | None:
    stated = next((number_in(row.get(name)) for name in _GPUS if row.get(name) not in (None, "")), None)
    if stated:
        return stated
    pools = _pools(row)
    tp = number_in(row.get("tp"))
    if pools is None and tp:
        return tp * (number_in(row.get("pp")) or 1)
    return sum(pools) if pools else None


def _pools(row: dict[str, Any]) -> tuple[float, float] | None:
    """GPUs of prefill and of decode, stated or those of their workers; None unless both are known."""
    prefill, decode = (_first_number(row, f"{role}_gpus") or _of_workers(row, role) for role in ("p", "d"))
    return (prefill, decode) if prefill and decode else None


def _of_workers(row: dict[str, Any], role: str) -> float | None:
    """Workers x TP x PP of a role; None also for a row that is marked as not disaggregated, whose roles are one."""
    if str(row.get("disagg")).lower() in ("false", "0"):
        return None
    workers, tp = (_first_number(row, f"{role}_{what}") for what in ("workers", "tp"))
    return workers * tp * (_first_number(row, f"{role}_pp") or 1) if workers and tp else None


def _first_number(row: dict[str, Any], name: str) -> float | None:
    return number_in(_first(row, name))


def _throughput(row: dict[str, Any]) -> float | None:
    """Output tokens/s per GPU of the whole deployment.

    Of disaggregated rows the output rate is per decode GPU, and the total rate per GPU of both pools.
    """
    total, isl, osl = number_in(row.get("tput_per_gpu")), number_in(_first(row, "isl")), number_in(_first(row, "osl"))
    of_total = None if total is None or not isl or not osl else total * osl / (isl + osl)
    pools = _pools(row)
    if pools and of_total is not None:
        return of_total
    for name in ("output_tput_per_gpu", "out_tok_s_per_gpu", "out_tok_s_per_gpu_derived", "output_throughput_per_gpu"):
        if number_in(row.get(name)) is not None:
            output = float(row[name])
            return output * pools[1] / sum(pools) if pools and name in _PER_DECODE_GPU else output
    return of_total


def _level(row: dict[str, Any]) -> dict[str, Any] | None:
    gpus, per_gpu = _gpus(row), _throughput(row)
    isl, osl = number_in(_first(row, "isl")), number_in(_first(row, "osl"))
    if not gpus or not per_gpu or not isl or not osl:
        return None
    rate = per_gpu * gpus / osl
    level: dict[str, Any] = {
        "request_throughput": rate,
        "duration": ASSUMED_REQUESTS / rate,
        "completed": ASSUMED_REQUESTS,
        "total_input_tokens": ASSUMED_REQUESTS * isl,
        "total_output_tokens": ASSUMED_REQUESTS * osl,
        "counts_unknown": True,
        "num_gpus": int(gpus),
        **of_export(row),
    }
    for name in _NAMES:
        value = _first(row, name)
        if name not in ("isl", "osl", "p_gpus", "d_gpus") and value is not None:
            level[name] = int(float(value)) if name == "max_concurrency" else value
    for theirs, value in row.items():
        match, figure = _LATENCY.fullmatch(theirs), number_in(value)
        if match and figure is not None:
            statistic = "p50" if match["statistic"] in (None, "median") else match["statistic"]
            level[latency_key(statistic, match["metric"])] = figure * (1.0 if match["ms"] else 1000.0)
    return level
