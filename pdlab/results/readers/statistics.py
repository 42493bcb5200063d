"""Statistics of requests in the keys of the record: seconds in, ``p95_ttft_ms`` out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pdlab.results.readers import RequestTimes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PERCENTILES = (50, 90, 95, 99)
# Arrivals at a constant rate are less bursty than Poisson's: a burstiness without end. 1000 is as regular as it gets.
REGULAR = 1000.0
# Names that several clients write out -> ours.
METRICS = {
    "time_to_first_token": "ttft",
    "time_per_output_token": "tpot",
    "inter_token_latency": "itl",
    "request_latency": "e2el",
}


def add_statistics(level: dict[str, Any], metric: str, values_s: Sequence[float] | NDArray[np.float64]) -> None:
    """Add the mean and percentiles of ``values_s``, by linear interpolation as numpy has it, which vLLM and AIPerf use.
    What the level has already stays."""
    import numpy as np

    if not len(values_s):
        return
    columns = np.asarray(values_s, dtype=float)
    level.setdefault(f"mean_{metric}_ms", float(columns.mean()) * 1000)
    for percent, value in zip(PERCENTILES, np.percentile(columns, PERCENTILES), strict=True):
        key = f"median_{metric}_ms" if percent == 50 else f"p{percent}_{metric}_ms"
        level.setdefault(key, float(value) * 1000)


def times_of(requests: Sequence[Mapping[str, Any]], names: Mapping[str, tuple[str, float]]) -> RequestTimes | None:
    """Requests that have a value under each name; ``names``: column of `RequestTimes` -> the client's name of it, and
    its unit in seconds. An answer without a TPOT has one token, or came in one piece. None without requests."""
    import numpy as np

    columns: dict[str, list[float]] = {column: [] for column in names}
    for request in requests:
        row = {column: request.get(name) for column, (name, _) in names.items()}
        if row["tpot_s"] is None:
            row["tpot_s"] = math.nan
        for column, value in row.items():
            if not isinstance(value, int | float):
                return None
            columns[column].append(float(value) * names[column][1])
    if not columns["ttft_s"]:
        return None
    arrays = {column: np.array(values) for column, values in columns.items()}
    order = np.argsort(arrays["start_s"], kind="stable") if "start_s" in arrays else slice(None)
    return RequestTimes(**{column: values[order] for column, values in arrays.items()})


def keyed(metric: str, statistics: Mapping[str, Any] | None, *, to_ms: float, mean: str = "mean") -> dict[str, Any]:
    """A client's ``{"mean": .., "p50": ..}`` in the keys of the record, times ``to_ms``; keys that are no statistic are
    left out."""
    found: dict[str, Any] = {}
    for name, value in (statistics or {}).items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        if name == mean:
            found[f"mean_{metric}_ms"] = value * to_ms
        elif name in ("median", "p50"):
            found[f"median_{metric}_ms"] = value * to_ms
        elif name[:1] == "p" and name[1:].replace("p", "", 1).replace(".", "", 1).isdigit():
            found[f"p{name[1:].replace('p', '.')}_{metric}_ms"] = value * to_ms
    return found


def of_export(content: Mapping[str, Any]) -> dict[str, Any]:
    """What a file says that viz.py exported: the curve's name and its GPUs, which the format has no place for."""
    origin = content.get("pdlab")
    if not isinstance(origin, dict):
        return {}
    return {"label": origin.get("experiment"), "num_gpus": origin.get("gpus")}
