"""`plan.py --predict FILE`: predictions for the rows of a CSV (`pdlab.plan.csv_rows`).

Rows that differ in the load alone are one sweep: they are simulated in ascending order on one
deployment, caches carried from level to level where prompts repeat. A configuration that cannot run gets
no figures and the reason; the other rows are predicted all the same.
"""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pdlab.core.catalog import ModelShape, load_model
from pdlab.core.deployment import Deployment, Disaggregated
from pdlab.core.errors import UsageError
from pdlab.core.vllm_limits import check_divisibility
from pdlab.core.workload import Closed, Level
from pdlab.plan import prediction_intervals
from pdlab.plan.csv_rows import PUBLISHED_PROMPTS, RequestedRow
from pdlab.sim.hardware import Hardware
from pdlab.sim.kv_transfer import depends_on_age
from pdlab.sim.level import SimulatedLevel, figures
from pdlab.sim.simulator import simulate

PUBLISHED_LADDER = (4, 8, 16, 32, 48, 64)

COLUMNS = (
    "predicted_mean_tpot_ms",
    "predicted_median_tpot_ms",
    "predicted_mean_ttft_ms",
    "predicted_median_ttft_ms",
    "predicted_p99_ttft_ms",
    "predicted_requests_per_s",
    "predicted_output_tokens_per_s",
    "predicted_output_tokens_per_s_per_node",
    "predicted_mean_tpot_ms_low",
    "predicted_mean_tpot_ms_high",
    "predicted_mean_ttft_ms_low",
    "predicted_mean_ttft_ms_high",
    "predicted_requests_per_s_low",
    "predicted_requests_per_s_high",
)
NOTE = "prediction_note"  # why a row has no figures, or what they leave out


def predict(
    requested: Sequence[RequestedRow], hardware: Hardware, seeds: Sequence[int] = prediction_intervals.SEEDS
) -> list[dict[str, Any]]:
    """Row by row the columns of `COLUMNS` (means over the seeds) and `NOTE`. Raises UsageError if no row can run."""
    sweeps: dict[tuple[str, ...], list[int]] = {}
    for number, row in enumerate(requested):
        sweeps.setdefault(row.sweep, []).append(number)
    predictions: dict[int, dict[str, Any]] = {}
    shapes = {row.deployment.model: _shape(row) for row in reversed(requested)}
    for numbers in sweeps.values():
        rows = [requested[number] for number in numbers]
        deployment = rows[0].deployment
        levels = _levels(rows)
        try:
            shape = shapes[deployment.model]
            trials = [_trial(rows[0], levels, hardware, shape, seed) for seed in seeds]
            merged: list[list[SimulatedLevel]] = []
            if hardware.error and depends_on_age(deployment, hardware, shape, rows[0].link):
                merged = [_trial(rows[0], levels, hardware, shape, seed, scattered=False) for seed in seeds]
        except UsageError as error:
            note = f"cannot run: {error}"
            predictions |= {number: {**dict.fromkeys(COLUMNS, ""), NOTE: note} for number in numbers}
            continue
        note = _caveat(deployment, hardware)
        for number, row in zip(numbers, rows, strict=True):
            level_index = levels.index(_level(row))
            own, other = [trial[level_index] for trial in trials], [trial[level_index] for trial in merged]
            predictions[number] = {**_columns(own, other, deployment, hardware), NOTE: note}
    if requested and not any(row[COLUMNS[0]] or row[COLUMNS[2]] for row in predictions.values()):
        raise UsageError(f"line {requested[0].line}, {requested[0].deployment.label}: {predictions[0][NOTE]}")
    return [predictions[number] for number in range(len(requested))]


def refused(requested: Sequence[RequestedRow], predictions: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line for every row that has no figures."""
    return [
        f"line {row.line}, {row.deployment.label}: {columns[NOTE]}"
        for row, columns in zip(requested, predictions, strict=True)
        if not columns["predicted_requests_per_s"]
    ]


def _shape(row: RequestedRow) -> ModelShape:
    shape = load_model(row.deployment.model)
    if shape is None:
        raise UsageError(
            f"line {row.line}: model {row.deployment.model!r} has no shape in configs/models/; add a file there"
        )
    return shape


def _trial(
    row: RequestedRow,
    levels: Sequence[Level],
    hardware: Hardware,
    shape: ModelShape,
    seed: int,
    scattered: bool | None = None,
) -> list[SimulatedLevel]:
    """One seed of one sweep. Raises UsageError where vLLM would refuse the deployment or a request does not fit."""
    check_divisibility(row.deployment, shape)
    request = row.workload.sent_input_tokens + row.workload.sent_output_tokens
    if request > shape.max_context:
        raise UsageError(f"{shape.name} takes {shape.max_context} tokens of context; a request has {request}")
    link = row.link if isinstance(row.deployment.topology, Disaggregated) else None
    return simulate(
        row.deployment,
        levels,
        row.workload,
        hardware,
        shape,
        seed=seed,
        prompts=row.prompts,
        link=link,
        scattered=scattered,
    )


def _caveat(deployment: Deployment, hardware: Hardware) -> str:
    """An assumption of the prediction that no real node meets; empty if there is none."""
    node = hardware.gpus_per_node
    if deployment.mode == "pd-pack" and deployment.gpus > node:
        return f"a pack of {deployment.gpus} GPUs does not fit a node of {node}: predicted as if it did"
    if (largest_tp := max(pool.tp for pool in deployment.pools.values())) > node:
        return f"TP {largest_tp} spans nodes of {node} GPUs: its all-reduce is predicted as if NVLink joined them"
    return ""


def _level(row: RequestedRow) -> Level:
    return Level(load=row.load, num_requests=row.num_requests, seed=row.workload.seed)


def _levels(rows: Iterable[RequestedRow]) -> list[Level]:
    """The sweep's levels in ascending order; with repeated prompts the published ladder's lower ones too,
    since their prompts were served before (five per unit of concurrency)."""
    levels = {_level(row) for row in rows}
    closed_levels = [level for level in levels if isinstance(level.load, Closed)]
    first_row = next(iter(rows))
    published = all(level.num_requests == PUBLISHED_PROMPTS * level.load.value for level in closed_levels)
    if closed_levels and first_row.prompts == "repeated" and published:
        highest = max(level.load.value for level in closed_levels)
        levels |= {
            Level(load=Closed(concurrency=step), num_requests=PUBLISHED_PROMPTS * step, seed=first_row.workload.seed)
            for step in PUBLISHED_LADDER
            if step < highest
        }
    return sorted(levels, key=lambda level: (level.load.value, level.num_requests))


def _columns(
    levels: Sequence[SimulatedLevel], merged: Sequence[SimulatedLevel], deployment: Deployment, hardware: Hardware
) -> dict[str, Any]:
    """``levels``: one of each seed; ``merged``: the same if scattered blocks merge, where that matters."""
    means = [figures(level) for level in levels]
    tpots = [tpot for tpot, _, _ in means if tpot is not None]
    ttfts = [_ttft_ms(level) for level in levels]
    medians = [
        statistics.median(
            (e - f) / (n - 1) * 1e3
            for e, f, n in zip(level.finish_s, level.first_token_s, level.output_tokens, strict=True)
        )
        for level in levels
        if level.output_tokens[0] > 1
    ]
    rps = statistics.fmean(rps for _, _, rps in means)
    output_tokens_per_s = rps * levels[0].output_tokens[0]
    tpot_ms = 1e3 * statistics.fmean(tpots) if tpots else None
    ttft_ms = 1e3 * statistics.fmean(ttft for _, ttft, _ in means)
    others = [figures(level) for level in merged]
    values: tuple[float | None, ...] = (
        tpot_ms,
        statistics.fmean(medians) if medians else None,
        ttft_ms,
        statistics.fmean(values[len(values) // 2] for values in ttfts),
        statistics.fmean(values[min(int(0.99 * len(values)), len(values) - 1)] for values in ttfts),
        rps,
        output_tokens_per_s,
        output_tokens_per_s * hardware.gpus_per_node / deployment.gpus,
        *_interval("TPOT", tpot_ms, tpots, [tpot for tpot, _, _ in others if tpot is not None], hardware),
        *_interval("mean TTFT", ttft_ms, [ttft for _, ttft, _ in means], [ttft for _, ttft, _ in others], hardware),
        *_interval("requests/s", rps, [rate for _, _, rate in means], [rate for _, _, rate in others], hardware),
    )
    return {name: "" if value is None else f"{value:.5g}" for name, value in zip(COLUMNS, values, strict=True)}


def _interval(
    metric: str, value: float | None, seeds: Sequence[float], merged: Sequence[float], hardware: Hardware
) -> tuple[float | None, float | None]:
    """Where 90 % of measured values are expected (`pdlab.plan.prediction_intervals`); unknown stays unknown."""
    if value is None or hardware.error is None:
        return None, None
    known = prediction_intervals.scatter(seeds, statistics.fmean(merged) if merged else None)
    factor = math.exp(prediction_intervals.of(hardware.error, metric, known))
    return value / factor, value * factor


def _ttft_ms(level: SimulatedLevel) -> list[float]:
    return sorted(1e3 * (f - a) for f, a in zip(level.first_token_s, level.arrival_s, strict=True))


def render(header: Sequence[str], rows: Sequence[Mapping[str, str]], predictions: Sequence[Mapping[str, Any]]) -> str:
    """The rows as they came, in their order, with the predictions behind them."""
    input_columns = [name for name in header if name not in (*COLUMNS, NOTE)]
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, [*input_columns, *COLUMNS, NOTE], extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row, columns in zip(rows, predictions, strict=True):
        writer.writerow({**row, **columns})
    return buffer.getvalue()
