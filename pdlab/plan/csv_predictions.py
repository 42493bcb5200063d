"""`plan.py --predict FILE`: predictions for the rows of a CSV (`pdlab.plan.csv_rows`).

Rows that differ only in the load are one sweep: they are simulated in ascending order on one
deployment, caches carried from level to level where prompts repeat. A configuration that cannot run gets
no figures and the reason; the other rows are predicted all the same.
"""

from __future__ import annotations

import csv
import io
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pdlab.core.catalog import ModelShape, whole_shape
from pdlab.core.deployment import Deployment, Disaggregated
from pdlab.core.errors import UsageError
from pdlab.core.findings import found
from pdlab.core.vllm_limits import check_divisibility
from pdlab.core.workload import Closed, Level
from pdlab.plan import prediction_intervals
from pdlab.plan.csv_rows import PUBLISHED_PROMPTS, RefusedRow, RequestedRow, is_precision
from pdlab.plan.error_catalog import with_stack_prior
from pdlab.plan.extrapolation import Platform, in_flight_per_gpu, major_minor, outside_fit, outside_text
from pdlab.plan.stack_bands import StackBand, band_of, saturation, why_cached
from pdlab.plan.step_findings import step_findings
from pdlab.sim.computed_hardware import as_served
from pdlab.sim.hardware import FitError, Hardware
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


# Words beside a GPU's type that do not name another GPU: H100 SXM5 80GB HBM3; PCIe and NVL do.
SAME_GPU = re.compile(r"nvidia|sxm\d*|hbm\d*e?|\d+ ?(gb|gib)?|gb")


def predict(
    requested: Sequence[RequestedRow | RefusedRow],
    any_model: Hardware,
    seeds: Sequence[int] = prediction_intervals.SEEDS,
) -> list[dict[str, Any]]:
    """Row by row the columns of `COLUMNS` (means over the seeds) and `NOTE`. ``any_model``: hardware, as it is before a
    model is known. Raises UsageError if no row can run."""
    predictions: dict[int, dict[str, Any]] = {}
    sweeps: dict[tuple[str, ...], list[RequestedRow]] = {}
    number_of: dict[int, int] = {}
    parsed = [row for row in requested if isinstance(row, RequestedRow)]
    known = {model: whole_shape(model) for model in {row.deployment.model for row in parsed}}
    shapes = {model: as_served(shape, any_model) for model, shape in known.items() if isinstance(shape, ModelShape)}
    for number, row in enumerate(requested):
        number_of[row.line] = number
        if isinstance(row, RefusedRow):
            predictions[number] = _without_figures(f"not predicted: {row.reason}")
        elif row.deployment.model not in shapes:
            predictions[number] = _without_figures(
                f"not predicted: model {row.deployment.model!r} has no shape: {known[row.deployment.model]}"
            )
        elif reason := _other_stack(row, any_model, shapes[row.deployment.model]):
            predictions[number] = _without_figures(f"not predicted: {reason}")
        else:
            sweeps.setdefault(row.sweep, []).append(row)
    for rows in sweeps.values():
        numbers = [number_of[row.line] for row in rows]
        deployment = rows[0].deployment
        levels = _levels(rows)
        shape = shapes[deployment.model]
        hardware = with_stack_prior(any_model, shape)
        try:
            trials = [_trial(rows[0], levels, hardware, shape, seed) for seed in seeds]
            merged: list[list[SimulatedLevel]] = []
            if hardware.error and depends_on_age(deployment, hardware, shape, rows[0].link):
                merged = [_trial(rows[0], levels, hardware, shape, seed, scattered=False) for seed in seeds]
        except UsageError as error:
            predictions |= {number: _without_figures(f"cannot run: {error}") for number in numbers}
            continue
        for number, row in zip(numbers, rows, strict=True):
            level_index = levels.index(_level(row))
            own, other = [trial[level_index] for trial in trials], [trial[level_index] for trial in merged]
            in_flight = [_in_flight(level, deployment) for level in own]
            outside = outside_fit(
                hardware,
                shape.name,
                deployment,
                [row.workload],
                ran_on=_ran_on(row),
                in_flight_per_gpu=in_flight,
            )
            unlike = "" if hardware.steps is None else _unlike_public_stacks(row, hardware, own)
            band = (
                StackBand(None, (found("no_band", why=unlike),))
                if unlike
                else band_of(hardware, shape, deployment, row.workload, row.load, in_flight, outside)
            )
            full = saturation(own, hardware, shape, deployment) if hardware.steps is not None else None
            said = [*step_findings(hardware, shape, deployment.pools.values(), own), *band.findings]
            said += [full] if full is not None else []
            notes = [_caveat(deployment, hardware), *(each.text for each in said), outside_text(outside)]
            columns = _columns(own, other, deployment, hardware, None if full is not None else band.error)
            predictions[number] = {**columns, NOTE: "; ".join(filter(None, notes))}
    if requested and not any(row[COLUMNS[0]] or row[COLUMNS[2]] for row in predictions.values()):
        raise UsageError(f"{_named(requested[0])}: {predictions[0][NOTE]}")
    return [predictions[number] for number in range(len(requested))]


def _without_figures(note: str) -> dict[str, Any]:
    return {**dict.fromkeys(COLUMNS, ""), NOTE: note}


def _named(row: RequestedRow | RefusedRow) -> str:
    return f"line {row.line}" + (f", {row.deployment.label}" if isinstance(row, RequestedRow) else "")


def _other_stack(row: RequestedRow, hardware: Hardware, shape: ModelShape) -> str:
    """Why a row is of other hardware, another engine or other weights than would be simulated; empty: it is not."""
    stated = row.stated
    if stated.hardware and not _is_gpu(stated.hardware, "cpu" if hardware.cpu else hardware.gpu_type):
        return (
            f"hardware {stated.hardware!r}: the step times of {hardware.name} are of {hardware.gpu}; give --hardware "
            "with a fit to such GPUs"
        )
    engine, simulated = _engine(row), hardware.steps.engine if hardware.steps else "vllm"
    if engine is not None and engine != simulated:
        return f"framework {stated.framework!r}: engines are simulated with the step times of {simulated}"
    for what, value, dtype in (
        ("precision", stated.precision, shape.weight_dtype),
        ("KV precision", stated.kv_precision, shape.kv_dtype),
    ):
        if value and value.lower() != "auto" and not is_precision(value, dtype):
            return f"{what} {value!r}: {shape.name} is simulated with {dtype}"
    return ""


def _is_gpu(text: str, gpu_type: str | None) -> bool:
    """Whether the words of a cell name that GPU and no other: "h100_sxm" and "NVIDIA H100 80GB HBM3" are H100."""
    words = [word for word in re.split(r"[^a-z0-9]+", text.lower()) if word]
    if gpu_type is None or gpu_type.lower() not in words:
        return False
    return all(word == gpu_type.lower() or SAME_GPU.fullmatch(word) for word in words)


def _engine(row: RequestedRow) -> str | None:
    """The engine that a row names, without a version; None: it names none."""
    return re.split(r"[\s:=@v-]*\d", row.stated.framework.lower().strip(), maxsplit=1)[0].strip() or None


def _ran_on(row: RequestedRow) -> Platform:
    stated = row.stated
    inline = re.search(r"\d+\.\d.*", stated.framework)
    version = major_minor(stated.version or (inline[0] if inline else ""))
    return Platform(None, _engine(row), version, "tcp" if row.link == "tcp" else None)


def _unlike_public_stacks(row: RequestedRow, hardware: Hardware, levels: Sequence[SimulatedLevel]) -> str:
    """Why a row has no band that another one of its deployment and load may have: another engine version than the
    tables are corrected for, or prompts that caches answer. Empty: nothing of it."""
    version, steps = _ran_on(row).version, hardware.steps
    if steps is not None and version is not None and steps.engine_version not in (None, version):
        return f"none ran {steps.engine} {version} and was predicted as {steps.engine_version} (give --engine-version)"
    return why_cached(statistics.fmean(level.hit_share for level in levels))


def _in_flight(level: SimulatedLevel, deployment: Deployment) -> float:
    load, (_, _, rps) = level.level.load, figures(level)
    e2el_s = statistics.fmean(end_s - came_s for end_s, came_s in zip(level.finish_s, level.arrival_s, strict=True))
    return in_flight_per_gpu(load, deployment.gpus, rps, e2el_s)


def refused(requested: Sequence[RequestedRow | RefusedRow], predictions: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line for every row that has no figures."""
    return [
        f"{_named(row)}: {columns[NOTE]}"
        for row, columns in zip(requested, predictions, strict=True)
        if not columns["predicted_requests_per_s"]
    ]


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
    request = sum(row.workload.longest)
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
    levels: Sequence[SimulatedLevel],
    merged: Sequence[SimulatedLevel],
    deployment: Deployment,
    hardware: Hardware,
    error: FitError | None,
) -> dict[str, Any]:
    """``levels``: one of each seed; ``merged``: the same if scattered blocks merge, where that matters. ``error``: of
    the fit where the row is within it, else None."""
    means = [figures(level) for level in levels]
    tpots = [tpot for tpot, _, _ in means if tpot is not None]
    ttfts = [_ttft_ms(level) for level in levels]
    medians = [
        statistics.median(
            (e - f) / (n - 1) * 1e3
            for e, f, n in zip(level.finish_s, level.first_token_s, level.output_tokens, strict=True)
            if n > 1
        )
        for level in levels
        if max(level.output_tokens) > 1
    ]
    rps = statistics.fmean(rps for _, _, rps in means)
    output_tokens_per_s = rps * statistics.fmean(statistics.fmean(level.output_tokens) for level in levels)
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
        *_interval("TPOT", tpot_ms, tpots, [tpot for tpot, _, _ in others if tpot is not None], error),
        *_interval("mean TTFT", ttft_ms, [ttft for _, ttft, _ in means], [ttft for _, ttft, _ in others], error),
        *_interval("requests/s", rps, [rate for _, _, rate in means], [rate for _, _, rate in others], error),
    )
    return {name: "" if value is None else f"{value:.5g}" for name, value in zip(COLUMNS, values, strict=True)}


def _interval(
    metric: str, value: float | None, seeds: Sequence[float], merged: Sequence[float], error: FitError | None
) -> tuple[float | None, float | None]:
    """Where 90 % of measured values are expected (`pdlab.plan.prediction_intervals`); unknown stays unknown."""
    if value is None or error is None:
        return None, None
    known = prediction_intervals.scatter(seeds, statistics.fmean(merged) if merged else None)
    factor = math.exp(prediction_intervals.of(error, metric, known, value))
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
