"""``vllm bench serve`` of all versions, and SGLang's ``bench_serving``, which has the same keys, one level a line.

With ``--save-detailed`` (vLLM) or ``--output-details`` (SGLang) the file holds the requests: all percentiles, and the
share within an SLO, come from these.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pdlab.results.readers import FileReading, RawLevel
from pdlab.results.readers.statistics import add_statistics

_MARKS = {"request_throughput", "completed"}
# SGLang's name -> the name in the record.
_OF_SGLANG = {"e2e_latency": "e2el"}


def read(file: Path, content: Any) -> FileReading | None:
    """None unless every level has the keys of these clients."""
    rows = content if isinstance(content, list) else [content]
    if not rows or not all(isinstance(row, dict) and row.keys() >= _MARKS for row in rows):
        return None
    of_sglang = any("total_output_tokens_retokenized" in row or "sharegpt_output_len" in row for row in rows)
    levels = [
        RawLevel(f"line {number}" if isinstance(content, list) else "", _level(row, of_sglang))
        for number, row in enumerate(rows, 1)
    ]
    return FileReading("SGLang bench_serving" if of_sglang else "vllm bench serve", tuple(levels))


def _level(row: dict[str, Any], of_sglang: bool) -> dict[str, Any]:
    level = dict(row)
    if of_sglang:
        info = level.pop("server_info", None)
        if isinstance(info, dict):
            level = {**_of_server(info), **level}
        if isinstance(level.get("errors"), list):
            level.setdefault("num_prompts", len(level["errors"]))
        if str(level.get("request_rate")) == "trace":
            level["arrivals"] = level.pop("request_rate")
    _add_requests(level)
    return level


def _of_server(info: dict[str, Any]) -> dict[str, Any]:
    """What SGLang's server says of its deployment."""
    names = {"model_path": "model_id", "tp_size": "tp", "dp_size": "dp", "ep_size": "ep", "pp_size": "pp"}
    return {ours: info[theirs] for theirs, ours in names.items() if info.get(theirs) is not None}


def _add_requests(level: dict[str, Any]) -> None:
    """Percentiles of the requests that the file holds; its own figures stay."""
    ttfts, itls = level.get("ttfts"), level.get("itls")
    outputs, errors = level.get("output_lens"), level.get("errors")
    if not (isinstance(ttfts, list) and isinstance(itls, list) and isinstance(outputs, list)):
        return
    count = min(len(ttfts), len(itls), len(outputs))
    good = [
        i
        for i in range(count)
        if not (isinstance(errors, list) and i < len(errors) and errors[i]) and isinstance(ttfts[i], int | float)
    ]
    tpots = [
        sum(itls[i]) / (outputs[i] - 1) for i in good if isinstance(itls[i], list) and outputs[i] and outputs[i] > 1
    ]
    add_statistics(level, "ttft", [ttfts[i] for i in good])
    add_statistics(level, "tpot", tpots)
    add_statistics(level, "itl", [gap for i in good for gap in itls[i]])
    add_statistics(level, "e2el", [ttfts[i] + sum(itls[i]) for i in good])
    for name in ("generated_texts", "ttfts", "itls", "errors", "start_times", "input_lens", "output_lens"):
        level.pop(name, None)
