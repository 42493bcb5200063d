"""Statistics of requests in the keys of the record: seconds in, ``p95_ttft_ms`` out."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdlab.results.readers import RequestTimes
from pdlab.results.schema import PERCENTILES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ASSUMED_REQUESTS = 1000  # of a level whose file has a rate and no number of requests; the level notes that
# Burstiness of arrivals at a constant rate, which is infinite: with 1000 the arrivals are practically regular.
REGULAR = 1000.0
_PERCENTILE = re.compile(r"p\d+(?:[p.]\d+)?")
# Names that several clients use -> pdlab's.
METRICS = {
    "time_to_first_token": "ttft",
    "time_per_output_token": "tpot",
    "inter_token_latency": "itl",
    "request_latency": "e2el",
}


def latency_key(statistic: str, metric: str) -> str:
    """The key of the record for ``mean`` or a percentile such as ``p50``, whose key is that of the median."""
    return f"{'median' if statistic == 'p50' else statistic}_{metric}_ms"


def total_of(statistics: Any, count: float | None, total: str | None, mean: str = "mean") -> float | None:
    """The sum over requests under ``total`` (None: no key), else the mean times ``count``; None without either."""
    if not isinstance(statistics, dict):
        return None
    if isinstance(value := statistics.get(total), int | float):
        return float(value)
    value = statistics.get(mean)
    return value * count if isinstance(value, int | float) and count is not None else None


def add_statistics(level: dict[str, Any], metric: str, values_s: Sequence[float] | NDArray[np.float64]) -> None:
    """Add the mean and percentiles of ``values_s``, linear between neighbours (numpy's default, as in vLLM and AIPerf).
    Existing values stay."""
    import numpy as np

    if not len(values_s):
        return
    columns = np.asarray(values_s, dtype=float)
    level.setdefault(latency_key("mean", metric), float(columns.mean()) * 1000)
    for percent, value in zip(PERCENTILES, np.percentile(columns, PERCENTILES), strict=True):
        level.setdefault(latency_key(f"p{percent}", metric), float(value) * 1000)


def times_of(requests: Sequence[Mapping[str, Any]], names: Mapping[str, tuple[str, float]]) -> RequestTimes | None:
    """Requests that have a finite value under each name; None without requests, or if one lacks a value.

    ``names``: column of `RequestTimes` -> the client's name of it, and its unit in seconds. An answer without a TPOT
    has one token, or came in one piece.
    """
    import numpy as np

    columns: dict[str, list[float]] = {column: [] for column in names}
    for request in requests:
        row = {column: request.get(name) for column, (name, _) in names.items()}
        if row["tpot_s"] is None:
            row["tpot_s"] = math.nan
        for column, value in row.items():
            if not isinstance(value, int | float) or math.isinf(value) or (value != value and column != "tpot_s"):
                return None
            columns[column].append(float(value) * names[column][1])
    if not columns["ttft_s"]:
        return None
    arrays = {column: np.array(values) for column, values in columns.items()}
    order = np.argsort(arrays["start_s"], kind="stable") if "start_s" in arrays else slice(None)
    return RequestTimes(**{column: values[order] for column, values in arrays.items()})


def is_finite(value: Any) -> bool:
    """Whether a value of a file is a finite number. Python's json writes NaN and Infinity, and reads them."""
    return isinstance(value, int | float) and math.isfinite(value)


def keyed(metric: str, statistics: Mapping[str, Any] | None, *, to_ms: float, mean: str = "mean") -> dict[str, Any]:
    """A client's ``{"mean": .., "p50": ..}`` under the keys of the record, times ``to_ms``; other keys are left out."""
    found: dict[str, Any] = {}
    for name, value in (statistics or {}).items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        statistic = {mean: "mean", "median": "p50"}.get(name, name)
        if statistic == "mean" or _PERCENTILE.fullmatch(statistic):
            found[latency_key(statistic[:1] + statistic[1:].replace("p", "."), metric)] = value * to_ms
    return found


def number_in(cell: Any) -> float | None:
    """The number in a cell of a table; None for an empty cell and for text."""
    try:
        return None if cell in (None, "") or isinstance(cell, bool) else float(cell)
    except (TypeError, ValueError):
        return None


def json_beside(file: Path, name: str) -> Any:
    """The content of another JSON file in the same folder; an empty dictionary if it cannot be read."""
    try:
        return json.loads((file.parent / name).read_bytes())
    except (OSError, ValueError):
        return {}


def of_export(content: Mapping[str, Any]) -> dict[str, Any]:
    """The curve's name and platform in a file that viz.py exported, for which the format has no field."""
    origin = content.get("pdlab")
    if not isinstance(origin, dict):
        return {}
    names = {"label": "experiment", "num_gpus": "gpus", "device": "device", "gpu": "gpu_type"}
    names |= {"framework": "engine", "framework_version": "engine_version"}
    return {ours: origin[theirs] for ours, theirs in names.items() if origin.get(theirs) is not None}
