"""A published table -> curves to show beside ours, never ranked.

A CSV file, one row per measured point, its columns named with their units; ``#`` begins a comment.

| column | meaning |
|---|---|
| source | where it was published; required in every row |
| configuration | any notation of `pdlab.core.notation` |
| input_tokens, output_tokens | of one request |
| concurrency or rate_rps | the load, of the whole deployment |
| per | what the rates refer to: deployment (default), gpu, node, role-gpu, role-node |
| gpus_per_node | default 8 |
| requests_per_s, input_tokens_per_s, output_tokens_per_s | at least one |
| METRIC_STATISTIC_UNIT | ttft_p95_s, tpot_mean_ms, e2el_p50_s, ... |
| model, tp | optional: the model, and the TP of a group in the notation of nodes |

``role-node``: input tokens/s per prefill node and output tokens/s per decode node, as reports on
large-scale serving give them. With fixed lengths requests/s times tokens per request is the token
rate, so rates that a row lacks follow from one it has; where input and output rates are given and
disagree, each is kept as published.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pdlab.analysis.curves import Curve, Gpus, Point, Sample
from pdlab.core import notation
from pdlab.core.bounds import METRICS, Metric
from pdlab.core.deployment import Deployment, Disaggregated, unguarded
from pdlab.core.errors import StoreError, UsageError, reason_of
from pdlab.core.text import counted
from pdlab.core.workload import Closed, Load, Open, Workload

_LATENCY = re.compile(r"(?P<metric>ttft|tpot|itl|e2el)_(?P<statistic>mean|p\d+(?:\.\d+)?)_(?P<unit>ms|s)")
RATES = ("requests_per_s", "input_tokens_per_s", "output_tokens_per_s")
PER = ("deployment", "gpu", "node", "role-gpu", "role-node")
REQUIRED = ("source", "configuration", "input_tokens", "output_tokens")
OPTIONAL = ("concurrency", "rate_rps", "per", "gpus_per_node", "model", "tp", *RATES)


def load(path: Path) -> list[Curve]:
    """One curve per source, configuration, lengths and model, in the order of the table.

    Raises StoreError if it cannot be read, UsageError with line, column and rule.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"{path}: cannot be read ({reason_of(error)}); give a CSV file") from error
    numbered = [(n, line) for n, line in enumerate(lines, 1) if line.strip() and not line.lstrip().startswith("#")]
    if len(numbered) < 2:
        raise UsageError(f"{path}: has no table; write a line of column names and one line per point")
    head, *rows = list(csv.reader([line for _, line in numbered]))
    columns = [name.strip() for name in head]
    _check_columns(path, columns)
    groups: dict[tuple[str, ...], list[tuple[Deployment, Point]]] = {}
    for (n, _), cells in zip(numbered[1:], rows, strict=True):
        where = f"{path}, line {n}"
        if len(cells) != len(columns):
            raise UsageError(
                f"{where}: {counted(len(cells), 'cell')} for {counted(len(columns), 'column')}; quote a cell that "
                "has a comma"
            )
        row = {name: cell.strip() for name, cell in zip(columns, cells, strict=True) if cell.strip()}
        key = tuple(row.get(name, "") for name in ("source", "configuration", "input_tokens", "output_tokens", "model"))
        group = groups.setdefault(key, [])
        deployment, point = _point(where, row)
        if any((existing.kind, existing.value) == (point.kind, point.value) for _, existing in group):
            raise UsageError(f"{where}: {key[1]} at this load is given twice; keep one row per point")
        group.append((deployment, point))
    several = len({key[2:4] for key in groups}) > 1
    return [
        Curve(
            name=path.name,
            label=f"{key[1]}, {key[0]}" + (f" ({key[2]}:{key[3]})" if several else ""),
            gpus=_gpus(group[0][0]),
            deployment=group[0][0],
            workload=f"{key[2]}:{key[3]}",
            points=tuple(sorted((point for _, point in group), key=lambda p: (p.kind, p.value))),
            published=key[0],
        )
        for key, group in groups.items()
    ]


def _gpus(deployment: Deployment) -> Gpus:
    topology = deployment.topology
    if isinstance(topology, Disaggregated):
        return Gpus(total=deployment.gpus, prefill=topology.prefill.gpus, decode=topology.decode.gpus)
    return Gpus(total=deployment.gpus)


def _check_columns(path: Path, columns: list[str]) -> None:
    unknown = [name for name in columns if name not in (*REQUIRED, *OPTIONAL) and not _LATENCY.fullmatch(name)]
    if unknown:
        raise UsageError(
            f"{path}: column {unknown[0]!r} is not known; use {', '.join((*REQUIRED, *OPTIONAL))}, or a latency such "
            "as ttft_p95_s or tpot_mean_ms"
        )
    if twice := next((name for name in columns if columns.count(name) > 1), None):
        raise UsageError(f"{path}: column {twice!r} occurs twice; keep one")
    absent = [name for name in REQUIRED if name not in columns]
    if absent:
        raise UsageError(f"{path}: column {absent[0]!r} is missing; every point needs {', '.join(REQUIRED)}")


def _point(where: str, row: Mapping[str, str]) -> tuple[Deployment, Point]:
    for name in REQUIRED:
        if name not in row:
            raise UsageError(f"{where}: {name} is empty; every point needs it")
    gpus_per_node, tp = _integer(where, row, "gpus_per_node", 8), _integer(where, row, "tp", 1)
    try:
        topology = notation.parse(row["configuration"], gpus_per_node=gpus_per_node, tp=tp)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error
    deployment = Deployment(model=row.get("model", "unknown"), topology=unguarded(topology))
    workload = Workload(
        input_tokens=_integer(where, row, "input_tokens"), output_tokens=_integer(where, row, "output_tokens")
    )
    load = _load(where, row)
    rates = _rates(where, row, deployment, workload, gpus_per_node)
    figures: dict[str, Any] = {**dict(zip(RATES, rates, strict=True)), "latency_ms": _latencies(where, row)}
    sample = Sample(repeat=0, **figures)
    point = Point(kind=load.kind, value=load.value, window="whole", samples=(sample,), **figures)
    return deployment, point


def _load(where: str, row: Mapping[str, str]) -> Load:
    if ("concurrency" in row) == ("rate_rps" in row):
        raise UsageError(f"{where}: give either concurrency or rate_rps")
    if "concurrency" in row:
        return Closed(concurrency=_integer(where, row, "concurrency"))
    return Open(rate_rps=_number(where, row, "rate_rps"))


def _rates(
    where: str, row: Mapping[str, str], deployment: Deployment, workload: Workload, gpus_per_node: int
) -> tuple[float, float, float]:
    """requests/s, input and output tokens/s of the whole deployment."""
    per = row.get("per", "deployment")
    if per not in PER:
        raise UsageError(f"{where}: per is {per!r}; use one of {', '.join(PER)}")
    sizes = {"prefill": deployment.gpus, "decode": deployment.gpus}
    if per.startswith("role-"):
        if not isinstance(deployment.topology, Disaggregated):
            raise UsageError(f"{where}: per {per} needs a prefill-decode configuration; use gpu or node")
        if "requests_per_s" in row:
            raise UsageError(f"{where}: requests_per_s has no role; give it per deployment, gpu or node")
        sizes = {"prefill": deployment.topology.prefill.gpus, "decode": deployment.topology.decode.gpus}
    unit = gpus_per_node if per.endswith("node") else 1
    factors = {role: 1.0 if per == "deployment" else gpus / unit for role, gpus in sizes.items()}
    roles = {name: "decode" if name == "output_tokens_per_s" else "prefill" for name in RATES}
    rates = {name: _number(where, row, name) * factors[roles[name]] for name in RATES if name in row}
    if not rates:
        raise UsageError(f"{where}: no rate; give at least one of {', '.join(RATES)}")
    requests, input_tokens, output_tokens = (rates.get(name) for name in RATES)
    if requests is None:
        # A published output rate is that of finished requests.
        known = (input_tokens or 0.0) / workload.input_tokens
        requests = known if output_tokens is None else output_tokens / workload.output_tokens
    return (
        requests,
        requests * workload.input_tokens if input_tokens is None else input_tokens,
        requests * workload.output_tokens if output_tokens is None else output_tokens,
    )


def _latencies(where: str, row: Mapping[str, str]) -> dict[Metric, dict[str, float]]:
    """The latencies of the row, in ms."""
    latencies: dict[Metric, dict[str, float]] = {}
    for name in row:
        if match := _LATENCY.fullmatch(name):
            metric = next(metric for metric in METRICS if metric == match["metric"])
            ms = _number(where, row, name) * (1 if match["unit"] == "ms" else 1000)
            latencies.setdefault(metric, {})[match["statistic"]] = ms
    return latencies


def _number(where: str, row: Mapping[str, str], name: str) -> float:
    try:
        value = float(row[name].replace(",", ""))
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise UsageError(f"{where}: {name} is {row[name]!r}; expected a number above 0")
    return value


def _integer(where: str, row: Mapping[str, str], name: str, default: int | None = None) -> int:
    if name not in row and default is not None:
        return default
    value = _number(where, row, name)
    if value != int(value):
        raise UsageError(f"{where}: {name} is {row[name]!r}; expected a whole number")
    return int(value)
