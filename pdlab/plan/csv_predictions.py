"""`plan.py --predict FILE`: predictions for the rows of a CSV (`pdlab.plan.csv_rows`).

Rows that differ only in the load are one sweep. Where prompts repeat, the loads of a sweep are simulated in ascending
order on one deployment, whose caches are carried from level to level. Rows of fresh prompts are simulated each by
itself. A configuration that cannot run gets no figures and the reason; the other rows are predicted.
"""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Mapping, Sequence

from pdlab.core import defaults
from pdlab.core.catalog import ModelShape, require_shape, whole_shape
from pdlab.core.deployment import Deployment, Disaggregated
from pdlab.core.errors import UsageError
from pdlab.core.findings import Finding, found
from pdlab.core.request_lengths import check_request_fits
from pdlab.core.vllm_limits import check_divisibility, with_redundant_experts
from pdlab.core.workload import Closed, Level, Open
from pdlab.plan import prediction_intervals
from pdlab.plan.candidates import on_two_types
from pdlab.plan.csv_rows import PUBLISHED_PROMPTS, RefusedRow, RequestedRow
from pdlab.plan.error_catalog import with_stack_prior
from pdlab.plan.extrapolation import Platform, in_flight_per_gpu, major_minor, outside_fit, outside_text
from pdlab.plan.precisions import is_precision
from pdlab.plan.scenario import judged, served
from pdlab.plan.stack_bands import band_of, saturation, why_cached
from pdlab.plan.step_findings import step_findings
from pdlab.sim.computed_hardware import as_served
from pdlab.sim.hardware import FitError, Hardware
from pdlab.sim.kv_transfer import depends_on_age
from pdlab.sim.level import SimulatedLevel, figures
from pdlab.sim.simulator import simulate

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
LONG_LEVEL = 6000  # requests after which a queue has visibly grown at rates from some 1.1 times the served one on
MOST_HITS = 0.99  # of the prompt tokens, in caches
NOTE = "prediction_note"  # why a row has no figures, or their assumptions


def predict(
    requested: Sequence[RequestedRow | RefusedRow],
    any_model: Hardware,
    seeds: Sequence[int] = prediction_intervals.SEEDS,
    *,
    network: str | None = None,
) -> list[dict[str, str]]:
    """For each row the columns of `COLUMNS` (means over the seeds) and `NOTE`. ``any_model``: the hardware before a
    correction for a model. ``network``: of the nodes, see `Platform` (None: not given). Raises UsageError if no row can
    run."""
    models = {row.deployment.model for row in requested if isinstance(row, RequestedRow)}
    shapes = {model: whole_shape(model) for model in models}
    predictions: dict[int, dict[str, str]] = {}  # by line number
    sweeps: dict[tuple[str, ...], list[RequestedRow]] = {}
    for row in requested:
        reason = row.reason if isinstance(row, RefusedRow) else _other_stack(row, any_model, shapes)
        if reason:
            predictions[row.line] = _without_figures(f"not predicted: {reason}")
        elif isinstance(row, RequestedRow):
            sweeps.setdefault(row.sweep, []).append(row)
    for rows in sweeps.values():
        try:
            predictions |= _predicted_sweep(rows, any_model, require_shape(rows[0].deployment.model), seeds, network)
        except UsageError as error:
            predictions |= {row.line: _without_figures(f"cannot run: {error}") for row in rows}
    if requested and not any(row[COLUMNS[0]] or row[COLUMNS[2]] for row in predictions.values()):
        raise UsageError(f"{_name_of(requested[0])}: {predictions[requested[0].line][NOTE]}")
    return [predictions[row.line] for row in requested]


def _without_figures(note: str) -> dict[str, str]:
    return {**dict.fromkeys(COLUMNS, ""), NOTE: note}


def _name_of(row: RequestedRow | RefusedRow) -> str:
    return f"line {row.line}" + (f", {row.deployment.label}" if isinstance(row, RequestedRow) else "")


def _other_stack(row: RequestedRow, hardware: Hardware, shapes: Mapping[str, ModelShape | str]) -> str:
    """Why the model, the hardware, the engine or the precision of a row is not simulated; empty: all of them are.
    ``shapes``: model -> its shape, or why it is unknown."""
    stated, model = row.stated, row.deployment.model
    shape = shapes[model]
    if isinstance(shape, str):
        return f"model {model!r} has no shape: {shape}"
    types = [each.gpu_type for each in hardware.types]
    if stated.hardware and hardware.beside and not stated.is_gpus(types):
        return (
            f"hardware {stated.hardware!r}: prefill is on {types[0]} and decode on {types[1]}; name both as "
            f"{'+'.join(map(str, types))}, or leave the cell empty"
        )
    if stated.hardware and not hardware.beside and not stated.is_gpus(["cpu" if hardware.cpu else hardware.gpu_type]):
        return (
            f"hardware {stated.hardware!r}: the step times of {hardware.name} are of {hardware.gpu}; give --hardware "
            "the type of that GPU, or a file fitted to it"
        )
    engine = hardware.steps.engine if hardware.steps else "vllm"
    if stated.engine not in (None, engine):
        return f"framework {stated.framework!r}: engines are simulated with the step times of {engine}"
    shape = as_served(shape, hardware)
    for what, value, dtype in (
        ("precision", stated.precision, shape.weight_dtype),
        ("KV precision", stated.kv_precision, shape.kv_dtype),
    ):
        if value and value.lower() != "auto" and not is_precision(value, dtype):
            return f"{what} {value!r}: {shape.name} is simulated with {dtype}"
    return ""


def _predicted_sweep(
    rows: Sequence[RequestedRow], any_model: Hardware, shape: ModelShape, seeds: Sequence[int], network: str | None
) -> dict[int, dict[str, str]]:
    """Line number -> columns of the rows of one sweep. Raises UsageError if the deployment cannot run."""
    if any_model.beside:
        rows = [_on_two_types(row, any_model) for row in rows]
    rows = [row._replace(deployment=with_redundant_experts(row.deployment, shape)) for row in rows]
    deployment, link = rows[0].deployment, rows[0].link
    shape = as_served(shape, any_model)
    hardware = with_stack_prior(any_model, shape)
    levels = _levels(rows)
    trials = [_trial(rows[0], levels, hardware, shape, seed) for seed in seeds]
    merged: list[list[SimulatedLevel]] = []
    if hardware.error and depends_on_age(deployment, hardware, shape, link):
        merged = [_trial(rows[0], levels, hardware, shape, seed, scattered=False) for seed in seeds]
    predictions = {}
    for row in rows:
        place = levels.index(_level(row))
        own, own_merged = ([trial[place] for trial in some] for some in (trials, merged))
        predictions[row.line] = _predicted_row(row, own, own_merged, hardware, shape, network)
    return predictions


def _on_two_types(row: RequestedRow, hardware: Hardware) -> RequestedRow:
    """The row with prefill on the first GPU type and decode on the second. Raises UsageError."""
    deployment = on_two_types(row.deployment, hardware)
    if deployment is None:
        raise UsageError(
            f"{row.deployment.label}: two GPU types are for pd-spread; leave this row out, or --p-hardware and "
            "--d-hardware"
        )
    return row._replace(deployment=deployment)


def _predicted_row(
    row: RequestedRow,
    levels: Sequence[SimulatedLevel],
    merged: Sequence[SimulatedLevel],
    hardware: Hardware,
    shape: ModelShape,
    network: str | None,
) -> dict[str, str]:
    """The columns of a row. ``levels``: its level by each seed. ``merged``: the same if scattered blocks merge, where
    that matters. ``network``: of the nodes, see `Platform` (None: not given)."""
    deployment = row.deployment
    in_flight = [_in_flight(level, deployment) for level in levels]
    version = row.stated.engine_version
    crossed = {"tcp": "tcp", "nvlink": None}.get(row.link or "", network)
    ran_on = Platform(None, row.stated.engine, version, crossed)
    outside = outside_fit(
        hardware,
        shape,
        deployment,
        [row.workload],
        ran_on=ran_on,
        in_flight_per_gpu=in_flight,
        kv_dtype=shape.kv_dtype,
    )
    besides = _unlike_public(version, hardware, levels)
    band = band_of(hardware, shape, deployment, row.workload, row.load, in_flight, outside, besides)
    words = _unread_words(row, hardware)
    saturated = saturation(levels, hardware, shape, deployment) if hardware.steps is not None else None
    overload = _overload(row, levels[0], hardware, shape)
    crowded = [each for each in (overload, saturated) if each is not None]
    error = None if crowded or words else band.error
    of_band = [*(() if error is None and band.error is not None else band.findings), *crowded]
    findings = [*step_findings(hardware, shape, [deployment], levels, row.link), *of_band]
    columns = _columns(levels, merged, deployment, hardware, error)
    extrapolated = outside_text(outside) if error is None else ""
    notes = [words, *(finding.text for finding in findings), extrapolated]
    return {**columns, NOTE: "; ".join(filter(None, notes))}


def _unread_words(row: RequestedRow, hardware: Hardware) -> str:
    """The words of a configuration's name that the prediction does not have; empty if it has all."""
    fit, steps = hardware.fit, hardware.steps
    versions = {fit.version if fit else None, steps.engine_version if steps else None}
    own = {hardware.engine, (hardware.gpu_type or "").lower()}
    unread = [
        word for word in row.words if word not in own and (major_minor(word.removeprefix("v")) or word) not in versions
    ]
    if not unread:
        return ""
    return (
        f"an estimate without a band: no prediction depends on {', '.join(unread)} in the configuration's name; give "
        "what it means as a column, or leave it out"
    )


def _unlike_public(version: str | None, hardware: Hardware, levels: Sequence[SimulatedLevel]) -> list[str]:
    """Why predictions by tables have no band for this row, although they may have one for its deployment and load. The
    tables are corrected for another engine version than the row's, or caches answer its prompts."""
    if hardware.steps is None:
        return []
    unlike = []
    engine, corrected_for = hardware.steps.engine, hardware.steps.engine_version
    if version is not None and corrected_for not in (None, version):
        unlike.append(f"none ran {engine} {version} and was predicted as {corrected_for} (give --engine-version)")
    if why := why_cached(statistics.fmean(level.hit_share for level in levels)):
        unlike.append(f"{why} (prompts=fresh: no prompt of an earlier level comes again)")
    return unlike


def _overload(row: RequestedRow, level: SimulatedLevel, hardware: Hardware, shape: ModelShape) -> Finding | None:
    """Whether more requests arrive than are served, by a long level: few requests end before their queue is long.
    ``level``: that of the row."""
    if not isinstance(row.load, Open):
        return None
    (long,) = simulate(
        row.deployment,
        [Level(load=row.load, num_requests=max(row.num_requests, LONG_LEVEL), seed=row.workload.seed)],
        row.workload,
        hardware,
        shape,
        prefix_hit_rate=min(level.hit_share, MOST_HITS),
        link=row.link if isinstance(row.deployment.topology, Disaggregated) else None,
        gaps=False,
    )
    outcome = served(long, judged(long))
    return None if outcome.keeps_up else found("overload", arrive=row.load.rate_rps, served=outcome.rps)


def _in_flight(level: SimulatedLevel, deployment: Deployment) -> float:
    """Requests in flight per GPU."""
    e2el_s = statistics.fmean(end_s - came_s for end_s, came_s in zip(level.finish_s, level.arrival_s, strict=True))
    return in_flight_per_gpu(level.level.load, deployment.gpus, figures(level).requests_per_s, e2el_s)


def refused(requested: Sequence[RequestedRow | RefusedRow], predictions: Sequence[Mapping[str, str]]) -> list[str]:
    """One line for every row that has no figures."""
    return [
        f"{_name_of(row)}: {columns[NOTE]}"
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
    """Simulate the sweep of a row with one seed; each level of fresh prompts by itself, so that no row depends on
    others. Raises UsageError if vLLM would refuse the deployment, or if a request does not fit."""
    check_divisibility(row.deployment, shape, by_flags=False)
    check_request_fits(shape, sum(row.workload.longest))
    link = row.link if isinstance(row.deployment.topology, Disaggregated) else None
    runs = [[level] for level in levels] if row.prompts == "fresh" else [levels]
    return [
        level
        for run in runs
        for level in simulate(
            row.deployment,
            run,
            row.workload,
            hardware,
            shape,
            seed=seed,
            prompts=row.prompts,
            link=link,
            scattered=scattered,
        )
    ]


def _level(row: RequestedRow) -> Level:
    return Level(load=row.load, num_requests=row.num_requests, seed=row.workload.seed)


def _levels(rows: Sequence[RequestedRow]) -> list[Level]:
    """The levels of a sweep in ascending order. If its prompts repeat as in the published runs, the lower levels of the
    published ladder are among them, because their prompts were served before."""
    levels = {_level(row) for row in rows}
    closed = [level for level in levels if isinstance(level.load, Closed)]
    published = all(level.num_requests == PUBLISHED_PROMPTS * level.load.value for level in closed)
    if closed and rows[0].prompts == "repeated" and published:
        highest = max(level.load.value for level in closed)
        levels |= {
            Level(load=Closed(concurrency=step), num_requests=PUBLISHED_PROMPTS * step, seed=rows[0].workload.seed)
            for step in defaults.CONCURRENCIES
            if step < highest
        }
    return sorted(levels, key=lambda level: (level.load.value, level.num_requests))


def _columns(
    levels: Sequence[SimulatedLevel],
    merged: Sequence[SimulatedLevel],
    deployment: Deployment,
    hardware: Hardware,
    error: FitError | None,
) -> dict[str, str]:
    """The cells of `COLUMNS`. ``error``: the errors of which the band is made; None: there is no band."""
    means, merged_means = ([figures(level) for level in some] for some in (levels, merged))
    tpots_s = [each.tpot_s for each in means if each.tpot_s is not None]
    ttfts_s, rates = [each.ttft_s for each in means], [each.requests_per_s for each in means]
    medians_ms = [
        statistics.median(
            (end_s - first_s) / (tokens - 1) * 1e3
            for end_s, first_s, tokens in zip(level.finish_s, level.first_token_s, level.output_tokens, strict=True)
            if tokens > 1
        )
        for level in levels
        if max(level.output_tokens) > 1
    ]
    sorted_ttfts_ms = [
        sorted(1e3 * (first_s - came_s) for first_s, came_s in zip(level.first_token_s, level.arrival_s, strict=True))
        for level in levels
    ]
    rps = statistics.fmean(rates)
    output_tokens_per_s = rps * statistics.fmean(statistics.fmean(level.output_tokens) for level in levels)
    node_gpus = hardware.common_node_gpus
    tpot_ms = 1e3 * statistics.fmean(tpots_s) if tpots_s else None
    ttft_ms = 1e3 * statistics.fmean(ttfts_s)
    merged_tpots_s = [each.tpot_s for each in merged_means if each.tpot_s is not None]
    values: tuple[float | None, ...] = (
        tpot_ms,
        statistics.fmean(medians_ms) if medians_ms else None,
        ttft_ms,
        statistics.fmean(values[len(values) // 2] for values in sorted_ttfts_ms),
        statistics.fmean(values[min(int(0.99 * len(values)), len(values) - 1)] for values in sorted_ttfts_ms),
        rps,
        output_tokens_per_s,
        None if node_gpus is None else output_tokens_per_s * node_gpus / deployment.gpus,
        *_interval("TPOT", tpot_ms, tpots_s, merged_tpots_s, error),
        *_interval("mean TTFT", ttft_ms, ttfts_s, [each.ttft_s for each in merged_means], error),
        *_interval("requests/s", rps, rates, [each.requests_per_s for each in merged_means], error),
    )
    return {name: "" if value is None else f"{value:.5g}" for name, value in zip(COLUMNS, values, strict=True)}


def _interval(
    metric: str, value: float | None, seeds: Sequence[float], merged: Sequence[float], error: FitError | None
) -> tuple[float | None, float | None]:
    """The ends between which 90 % of measured values are expected (`pdlab.plan.prediction_intervals`); or unknown."""
    if value is None or error is None:
        return None, None
    known = prediction_intervals.scatter(seeds, statistics.fmean(merged) if merged else None)
    factor = math.exp(prediction_intervals.of(error, metric, known, value))
    return value / factor, value * factor


def render(header: Sequence[str], rows: Sequence[Mapping[str, str]], predictions: Sequence[Mapping[str, str]]) -> str:
    """The CSV of the rows in their order, with the predictions behind their own columns."""
    input_columns = [name for name in header if name not in (*COLUMNS, NOTE)]
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, [*input_columns, *COLUMNS, NOTE], extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row, columns in zip(rows, predictions, strict=True):
        writer.writerow({**row, **columns})
    return buffer.getvalue()
