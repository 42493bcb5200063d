"""Fit a hardware file to measured runs: ``python -m pdlab calibrate``."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge

from pdlab.analysis.curves import UNKNOWN_MODEL, gpus_of
from pdlab.core import defaults
from pdlab.core.arguments import MODEL_HELP, above_zero
from pdlab.core.catalog import gpu_name, load_model, require_shape, why_no_tables
from pdlab.core.commands import INSTALL_TABLES, PDLAB, PLAN
from pdlab.core.errors import UsageError
from pdlab.core.exit_code import command
from pdlab.core.files import write_output
from pdlab.core.model_names import same_model
from pdlab.core.output_paths import check_writable, distinct
from pdlab.core.schema import to_yaml
from pdlab.core.settings import Settings, Text, not_given, setting, written_numbers
from pdlab.core.text import choices, counted, version_numbers
from pdlab.plan.accuracy import (
    METRICS,
    coverage,
    coverage_text,
    errors_text,
    median_errors,
    parts_by_metric,
    parts_text,
    rankings,
    rankings_text,
    table,
    without_lowest,
)
from pdlab.plan.calibration import (
    assumed_prompts,
    compare,
    cross_validate,
    device_mismatch,
    fit,
    fit_domain,
    fitted_names,
    measured_sweep,
    rounded_start,
    unlike_arguments,
)
from pdlab.plan.engine_arguments import measured_as_launched
from pdlab.plan.error_catalog import with_stack_prior
from pdlab.plan.extrapolation import Platform, major_minor, network_of, ran_on
from pdlab.plan.stack_calibration import StackCalibration, calibrated, calibration_text, contradiction_text, new_levels
from pdlab.plan.step_findings import step_findings
from pdlab.results.published_folders import load_experiment
from pdlab.results.store import experiment_folders
from pdlab.sim.argument_effects import unknown_effects
from pdlab.sim.computed_hardware import as_served, computed, computed_gpus, is_gpu
from pdlab.sim.hardware import (
    Constant,
    FitDomain,
    FitError,
    Hardware,
    load_hardware,
    memory_utilization,
    routers_beside,
    signed,
    steps_in_flight,
)
from pdlab.sim.step_source import NO_CORRECTION

if TYPE_CHECKING:
    from pdlab.core.catalog import ModelShape
    from pdlab.plan.accuracy import MeasuredSweep
    from pdlab.results.schema import Experiment

EPILOG = f"""\
examples:
  {PDLAB} calibrate --runs bm_results/* --out my-cluster.yaml
      fit the hardware of your cluster; {PLAN} --hardware my-cluster.yaml predicts with it
  {PDLAB} calibrate --runs bm_results/* --cross-validate
      print the error of each experiment, predicted by a fit to the others
  {PDLAB} calibrate --runs bm_results/* --rounds 0
      print the errors of the hardware file as it is
  {PDLAB} calibrate --runs theirs/* --gpu H200 --engine 0.18 --out h200.yaml \\
      --data-sheet memory_gb=150.8,memory_gb_per_s=4800,tensor_tflops=989
      runs that do not record their GPU and vLLM version; their GPU differs from that of --start
  {PDLAB} calibrate --runs bm_results/* --start H200 --out my-h200.yaml
      correct the tabulated steps of that GPU by two to four levels (needs {INSTALL_TABLES})
"""


MOST_PERCENT = 100.0
DATA_SHEET = ("memory_gb", "memory_gb_per_s", "tensor_tflops")  # constants of the GPU itself, which no fit changes
CALIBRATED = f"{PDLAB} calibrate, see fitted_on"
NAME_RULE = r"[A-Za-z0-9][A-Za-z0-9._+-]*"


def _days(text: str) -> tuple[float, float, float]:
    try:
        tpot, ttft, rate = (float(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not three percentages: TPOT, TTFT, requests/s") from error
    if not all(0 <= value <= MOST_PERCENT for value in (tpot, ttft, rate)):
        raise argparse.ArgumentTypeError(f"{text!r} has a percentage that is not from 0 to {MOST_PERCENT:g}")
    return tpot, ttft, rate


def _version(text: str) -> str:
    version = major_minor(text)
    if version is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a version such as 0.29")
    return version


def _data_sheet(text: str) -> dict[str, float]:
    values: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in DATA_SHEET:
            raise argparse.ArgumentTypeError(f"{name!r} is not a constant of a data sheet; {choices(name, DATA_SHEET)}")
        values[name] = above_zero(value)
    return values


def _written_sheet(values: dict[str, float]) -> str:
    return ",".join(f"{name}={value:g}" for name, value in values.items())


MEASURED, FIT, RESULT = "what was measured", "fit", "result"


class CalibrateSettings(Settings):
    """The runs to fit a hardware file to, how, and where the file goes."""

    COMMAND = "calibrate"
    ABOUT = "Fit a hardware file (configs/catalog/) to measured runs, and print its prediction errors."
    EXAMPLES = EPILOG

    runs: tuple[Path, ...] = setting(
        ..., "experiment folders, of pdlab or published", MEASURED, several="words", value="DIR"
    )
    model: str | None = setting(
        None,
        f"the measured model: {MODEL_HELP}",
        MEASURED,
        value="NAME|PATH",
        otherwise="as the runs record",
    )
    gpu: str | None = setting(
        None,
        "GPU type as Ray names it, such as H200",
        MEASURED,
        value="TYPE",
        otherwise="as the runs record",
    )
    engine: Annotated[str, Text(_version)] | None = setting(
        None, "vLLM version, such as 0.29", MEASURED, value="VERSION", otherwise="as the runs record"
    )
    prompts: Literal["fresh", "repeated"] | None = setting(
        None,
        "whether levels repeat the prompts of earlier levels",
        MEASURED,
        otherwise="repeated for published runs, fresh for pdlab's",
    )
    start: str = setting(
        defaults.HARDWARE,
        "hardware file to start from; or a GPU type such as H200 (recorded: the GPU of the runs), whose tabulated step "
        "times the levels correct",
        FIT,
        value="NAME|FILE|GPU|recorded",
    )
    coarse_start: bool = setting(
        False,
        "first round the fitted constants of --start to 1, 2 or 5 times a power of ten: shows how much the start "
        "matters",
        FIT,
    )
    data_sheet: Annotated[dict[str, float], Text(_data_sheet, _written_sheet)] = setting(
        {},
        f"values from the GPU's data sheet: {', '.join(DATA_SHEET)}; needed if --start is for another GPU",
        FIT,
        value="NAME=VALUE,...",
    )
    rounds: Annotated[int, Ge(0)] = setting(12, "rounds of the search", FIT)
    cross_validate: bool = setting(False, "predict each experiment by a fit to the others; takes minutes", FIT)
    days: Annotated[tuple[float, float, float], Text(_days, written_numbers)] | None = setting(
        None,
        "median difference, in percent, between measurements of one configuration on different days; widens the "
        "intervals of predictions; coverage is printed with and without it",
        FIT,
        value="TPOT,TTFT,RPS",
        otherwise="unknown",
        needs="cross_validate",
    )
    out: Path | None = setting(None, "write the fitted hardware to this file", RESULT, value="FILE")
    name: str | None = setting(
        None,
        "name of the new hardware",
        RESULT,
        value="NAME",
        otherwise="the file name of --out",
        needs="out",
    )

    def check(self) -> None:
        if self.out is not None and self.name is None and not re.fullmatch(NAME_RULE, self.out.stem):
            raise UsageError(f"--out {self.out}: the file's name is no name for hardware; give --name")
        if self.out is not None and not self.rounds:
            raise UsageError("--rounds 0 fits nothing: leave --out out, or fit")
        if self.name is not None and not re.fullmatch(NAME_RULE, self.name):
            raise UsageError(
                f"--name {self.name!r}: letters, digits and . _ + - only, because {PLAN} --hardware takes it"
            )


def _shape(model: str | None, experiments: Sequence[MeasuredSweep]) -> ModelShape:
    """The shape of --model, else of the recorded model. Raises UsageError if the runs record several."""
    names = sorted({experiment.deployment.model for experiment in experiments} - {UNKNOWN_MODEL})
    if not all(_alike(names[0], name) for name in names):
        raise UsageError(
            f"the runs are of {' and '.join(names)}; constants are fitted to one model: leave the others out"
        )
    return require_shape(model or (names[0] if names else UNKNOWN_MODEL))


def _alike(first: str, second: str) -> bool:
    """Whether two recorded names are of one model."""
    shapes = load_model(first), load_model(second)
    if shapes[0] is None or shapes[1] is None:
        return same_model(first, second)
    return shapes[0].is_same(shapes[1])


def _of_that_model(shape: ModelShape, experiments: Sequence[MeasuredSweep]) -> None:
    """Raises UsageError if a run records another model than --model names."""
    for experiment in experiments:
        recorded = load_model(experiment.deployment.model)
        if recorded is not None and not recorded.is_same(shape):
            raise UsageError(f"--model {shape.word}: {experiment.name} is of {recorded.name}; leave --model out")


def _same_arguments(start: Hardware, shape: ModelShape, experiments: Sequence[MeasuredSweep]) -> None:
    """Raises UsageError if the runs differ in engine arguments that are not simulated."""
    if differ := unlike_arguments(start, shape, experiments):
        raise UsageError(f"{differ}: constants are fitted to one; sort the runs by it")


def _other_names(shape: ModelShape, experiments: Sequence[MeasuredSweep]) -> Iterator[str]:
    """The runs that record a name which is not known to be that of ``shape``, as sentences."""
    names = [each for each in (shape.name, shape.hf_id, shape.word) if each is not None]
    for each in experiments:
        recorded = each.deployment.model
        unknown = recorded != UNKNOWN_MODEL and load_model(recorded) is None
        if unknown and not any(same_model(recorded, name) for name in names):
            yield f"{each.name} is of {recorded}, fitted as {shape.name}"


def _print_doubts(shape: ModelShape, experiments: Sequence[MeasuredSweep]) -> None:
    """Print levels that are left out, assumed prompts, and other names of the model, on standard error."""
    doubts = [note for each in experiments for note in each.doubts]
    for note in [*_other_names(shape, experiments), *doubts, assumed_prompts(experiments)]:
        if note is not None:
            print(f"note: {note}", file=sys.stderr)


def _made_on(settings: CalibrateSettings, loaded: Sequence[Experiment]) -> Platform:
    """GPU and vLLM version of all runs, from their records and the flags. Raises UsageError if they differ or are
    unknown."""
    for experiment in loaded:
        if others := sorted({run.engine for run in experiment.runs if run.engine not in (None, "vllm")}):
            raise UsageError(f"{experiment.name} is of {' and '.join(others)}, fits are of vllm; leave it out")
    records = {experiment.name: ran_on(experiment) for experiment in loaded}
    needed = "which --out writes down" if settings.out else "on which step times depend"

    def one(what: str, flag: str, stated: str | None, of_runs: dict[str, str | None]) -> str:
        recorded = sorted({value for value in of_runs.values() if value is not None})
        if len(recorded) > 1:
            raise UsageError(f"the runs are of {what} {' and '.join(recorded)}; constants are fitted to one: sort them")
        if stated is not None and recorded and recorded != [stated]:
            raise UsageError(f"{flag} {stated}: the runs record {what} {recorded[0]}; leave {flag} out")
        unknown = [name for name, value in of_runs.items() if value is None]
        if stated is None and unknown:
            raise UsageError(f"{unknown[0]} does not record its {what}, {needed}; give {flag}")
        return stated or recorded[0]

    gpus = {name: each.gpu and gpu_name(each.gpu) for name, each in records.items()}
    gpu = one("GPU type", "--gpu", settings.gpu and gpu_name(settings.gpu), gpus)
    version = one("vLLM version", "--engine", settings.engine, {name: each.version for name, each in records.items()})
    return Platform(gpu, "vllm", version)


def _on_gpu(start: Hardware, gpu: str, node_gpus: int, sheet: dict[str, float]) -> Hardware:
    """The start, as hardware of the measured GPU. Raises UsageError if the start is of another GPU and ``sheet`` lacks
    a value of the measured GPU's data sheet."""
    of_start = "cpu" if start.cpu else start.gpu_type
    if gpu != of_start and "cpu" in (gpu, of_start):
        other = defaults.LOCAL_HARDWARE if gpu == "cpu" else defaults.HARDWARE
        raise UsageError(f"the runs are of {gpu}, --start {start.name} is of {of_start}: give --start {other}")
    missing = [name for name in DATA_SHEET if name not in sheet]
    if gpu != of_start and missing:
        raise UsageError(
            f"the runs are of {gpu}, --start {start.name} is of {of_start}: give --data-sheet with "
            f"{', '.join(missing)} of {gpu}, or a --start of that GPU"
        )
    changes: dict[str, Any] = {"constants": start.constants | _data_sheet_constants(start, sheet)}
    if gpu != "cpu":
        changes |= {"gpu": start.gpu if gpu == of_start else gpu, "gpu_type": gpu, "gpus_per_node": node_gpus}
    return start.model_copy(update=changes)


def _scheduled_as(start: Hardware, version: str | None) -> Hardware:
    """The start, with the number of steps in flight, the share of the memory and the routing of the measured vLLM
    version. The routing of a Ray that the runs record replaces the last one."""
    of_start = start.fit.version if start.fit is not None else None
    if start.cpu or version is None or version == of_start:
        return start
    of_version = {
        "steps_in_flight": steps_in_flight(version),
        "memory_utilization": memory_utilization(version),
        "routers_count_ends": routers_beside(version),
    }
    constants = start.constants | of_version
    return start.model_copy(update={"constants": constants})


def _newest_ray(experiments: Sequence[MeasuredSweep]) -> str | None:
    """The newest version of Ray of the runs; None: no run records one. Each run is simulated with its own."""
    versions = [each.ray_version for each in experiments if each.ray_version is not None]
    return max(versions, key=lambda version: version_numbers(version) or (0, 0), default=None)


def _data_sheet_constants(start: Hardware, sheet: dict[str, float]) -> dict[str, Constant]:
    return {
        name: Constant(value=value, unit=start.constants[name].unit, basis="published", source="--data-sheet")
        for name, value in sheet.items()
    }


def _stack(loaded: Sequence[Experiment], version: str) -> str:
    """The versions of vLLM, Ray and NIXL that the runs record."""
    names = {"vllm": "vLLM", "ray": "Ray", "nixl": "NIXL"}
    recorded = {
        key: {value for experiment in loaded if (value := experiment.manifest.versions.get(key))} for key in names
    }
    if not recorded["vllm"]:
        return f"vLLM {version}"
    return ", ".join(f"{names[key]} {' or '.join(sorted(values))}" for key, values in recorded.items() if values)


def _refuse_rehearsed(settings: CalibrateSettings, loaded: Sequence[Experiment]) -> None:
    """Raises UsageError if a file would be fitted to rehearsed runs."""
    rehearsed = [experiment.name for experiment in loaded if experiment.manifest.rehearsal]
    if settings.out and rehearsed:
        raise UsageError(f"{rehearsed[0]} was rehearsed, not measured: hardware is fitted only to measured runs")


CAUSES = "look for a wrong --gpu, --engine or --model, and for damaged results"
RECORDED = "recorded"
OF_A_FIT = ("coarse_start", "data_sheet", "rounds", "cross_validate", "days")


def _check_tables(word: str) -> None:
    """Raises UsageError for a GPU type without tables."""
    if why := why_no_tables(word):
        raise UsageError(f"{why}; fit constants: give --start {defaults.HARDWARE} and --data-sheet of {word.upper()}")


def _start_of(gpu: str) -> str:
    """The --start for runs of ``gpu`` (``cpu``: engines on CPUs), in words."""
    if gpu == "cpu":
        return defaults.LOCAL_HARDWARE
    has_tables = is_gpu(gpu) and not why_no_tables(gpu)
    return gpu if has_tables else f"{defaults.HARDWARE} and --data-sheet of {gpu}"


def _start(settings: CalibrateSettings, loaded: Sequence[Experiment]) -> Hardware:
    """The hardware of --start: a file, or a GPU type with the recorded engine version. Raises UsageError."""
    if settings.start == RECORDED:
        made_on = _made_on(settings, loaded)
        assert made_on.gpu is not None
        if made_on.gpu == "cpu":
            raise UsageError(f"--start {RECORDED}: there are no step times of cpu; give --start {_start_of('cpu')}")
        _check_tables(made_on.gpu)
        return computed(made_on.gpu, "vllm", made_on.version)
    _check_tables(settings.start)
    if not is_gpu(settings.start):
        return load_hardware(settings.start, {"a GPU type": tuple(computed_gpus())})
    version = settings.engine or next((each.version for each in map(ran_on, loaded) if each.version), None)
    return computed(settings.start, "vllm", version)


def _add_to_the_same_stack(settings: CalibrateSettings, start: Hardware, shape: ModelShape, made_on: Platform) -> None:
    """Raises UsageError if the levels in the start are of another model or version than the runs, or unknown."""
    if start.steps is None or not start.steps.correction.fitted_levels:
        return
    if start.fit is None:
        raise UsageError(
            f"--start {settings.start}: was changed after its levels were measured, so they are not known to be of "
            f"this stack; give the file as it was written, or --start {start.gpu_type}"
        )
    for what, earlier, now in (
        ("model", start.fit.model, start.fit.unlike_model(shape) or start.fit.model),
        ("vLLM version", start.fit.version, made_on.version),
    ):
        if earlier != now:
            raise UsageError(
                f"--start {settings.start}: its levels are of {what} {earlier}, the runs are of {now}; give --start "
                f"{start.gpu_type}"
            )


def _not_in_the_start(
    settings: CalibrateSettings, start: Hardware, loaded: Sequence[Experiment], experiments: Sequence[MeasuredSweep]
) -> tuple[list[Experiment], list[MeasuredSweep]]:
    """The runs with levels that bring something, with notes on the others. Of a start that does not record its levels,
    the runs that it names are left out. Raises UsageError if none is left."""
    correction = start.steps.correction if start.steps is not None else NO_CORRECTION
    names = () if correction.levels_recorded else start.fitted_on
    new = set(new_levels(correction, experiments))
    kept, first, again = [], 0, 0
    for run, sweep in zip(loaded, experiments, strict=True):
        numbers = range(first, first + len(sweep.levels))
        first = numbers.stop
        bring = 0 if sweep.name in names else len(new.intersection(numbers))
        if bring:
            kept.append((run, sweep))
        if left := len(numbers) - bring:
            again += left
            print(f"note: {sweep.name}: {counted(left, 'level')} given again, left out", file=sys.stderr)
    if not kept:
        raise UsageError(
            f"--runs: --start {settings.start} has all {again} levels already; give levels that it does not have"
        )
    return [run for run, _ in kept], [sweep for _, sweep in kept]


def _why_no_band(result: StackCalibration, *, doubtful: bool) -> str:
    """Why the file has no errors; empty: it has. ``doubtful``: nor has the start."""
    if result.contradicting:
        return f"measured levels contradict the stack; {CAUSES}"
    if doubtful:
        return f"levels of --start contradict the stack or are outside of their bands; {CAUSES}"
    if not result.correction.fitted_settings:
        return "no level is of collocated engines, and the errors are those of such engines after their levels"
    if result.outside:
        return (
            "measured levels are outside of the bands of their own correction; measure more levels, and give all runs "
            f"at once; or {CAUSES}"
        )
    return ""


def _correct(settings: CalibrateSettings, start: Hardware, loaded: Sequence[Experiment]) -> int:
    """Correct the start's tabulated steps by all levels of the runs. Returns the exit code."""
    not_given(settings, OF_A_FIT, f"--start {settings.start}, whose steps are tables: a correction is no fit")
    experiments = [measured_sweep(experiment, settings.prompts, fitted=True) for experiment in loaded]
    shape = _shape(settings.model, experiments)
    _of_that_model(shape, experiments)
    shape = as_served(shape, start)
    made_on = _made_on(settings, loaded)
    assert made_on.version is not None and made_on.gpu is not None
    if made_on.gpu != start.gpu_type:
        raise UsageError(
            f"the runs are of {made_on.gpu}, --start {settings.start} is of {start.gpu_type}: give --start "
            f"{_start_of(made_on.gpu)}"
        )
    if start.steps is not None and start.steps.engine != made_on.engine:
        raise UsageError(
            f"--start {settings.start}: its tables are of {start.steps.engine}, the runs are of {made_on.engine}; give "
            f"--start {start.gpu_type}"
        )
    _add_to_the_same_stack(settings, start, shape, made_on)
    experiments = [measured_as_launched(each, start, shape) for each in experiments]
    _same_arguments(start, shape, experiments)
    loaded, experiments = _not_in_the_start(settings, start, loaded, experiments)
    _print_doubts(shape, experiments)
    result = calibrated(with_stack_prior(start, shape), shape, experiments)
    hardware = start.with_correction(result.correction).with_ray(_newest_ray(experiments))
    for each in step_findings(start)[:1]:
        print(f"Note: {each.text}.")
    print(calibration_text(result))
    points = [point for experiment in experiments for point in compare(hardware, shape, experiment, seeds=(0,))]
    print("predicted with it:", errors_text(median_errors(points, skip_first=False)))
    print(table(points))
    if result.contradicted_by_all:
        raise UsageError(
            f"no level is of this stack: {contradiction_text(result.contradicting[0])}; {CAUSES}; nothing is written"
        )
    # A start has no errors if its own levels contradicted it, or were outside of their bands.
    doubtful = bool(start.steps and start.steps.correction.fitted_levels and start.error is None)
    if reason := _why_no_band(result, doubtful=doubtful):
        print(f"note: {reason}; plans with them have no intervals and no verdict", file=sys.stderr)
    if settings.out:
        fitted_on = tuple(dict.fromkeys((*start.fitted_on, *(each.name for each in experiments))))
        changed = {"fitted_on": fitted_on, "error": None if reason else result.error}
        earlier = start.fit if start.steps is not None and start.steps.correction.fitted_levels else None
        made = hardware.model_copy(update=changed)
        _write(settings, settings.out, made, shape, made_on, experiments, loaded, earlier)
    return 0


def _on_their_nodes(hardware: Hardware, experiments: Sequence[MeasuredSweep], *, has_levels: bool) -> Hardware:
    """The hardware with the network and the memory of the measured nodes, if these are known of every run and are the
    same: a plan without --node is for such nodes. ``has_levels``: it has levels of earlier runs, on its own nodes."""
    each = [experiment.on_its_nodes(hardware.model_copy(update={"wires": None})) for experiment in experiments]
    if has_levels:
        each.append(hardware)
    alike = all((one.wires, one.constants) == (each[0].wires, each[0].constants) for one in each)
    return each[0] if alike else hardware.model_copy(update={"wires": None})


def _write(
    settings: CalibrateSettings,
    out: Path,
    hardware: Hardware,
    shape: ModelShape,
    made_on: Platform,
    experiments: Sequence[MeasuredSweep],
    loaded: Sequence[Experiment],
    earlier: FitDomain | None = None,
) -> None:
    """Write the hardware file, with the domain of the fit. ``experiments``: those of ``loaded``, in the same order.
    ``earlier``: the domain of levels that the start has."""
    assert made_on.version is not None
    crossed = [
        network_of(each.deployment, ran_on(run).network, hardware.gpus_per_node)
        for each, run in zip(experiments, loaded, strict=True)
    ]
    arguments = [each for run in experiments for each in unknown_effects(hardware, run.deployment, shape.kv_dtype)]
    networks = [each for each in crossed if each is not None]
    hardware = _on_their_nodes(hardware, experiments, has_levels=earlier is not None)
    gpu_link = hardware.wires.gpu_link if hardware.wires is not None else None
    domain = fit_domain(experiments, shape, made_on, networks, arguments, gpu_link)
    if earlier is not None:
        domain = domain.joined(earlier)
    changed = {"name": settings.name or out.stem, "stack": _stack(loaded, made_on.version)}
    write_output(out, to_yaml(signed(hardware.model_copy(update=changed), domain)), "--out")
    print(f"wrote {out}", file=sys.stderr, flush=True)


@command(CalibrateSettings)
def main(settings: CalibrateSettings) -> int:
    """Fit or correct the hardware."""
    if settings.out is not None:
        check_writable(settings.out, "--out")  # before a fit, which takes minutes
        if settings.out.exists():
            raise UsageError(f"--out {settings.out}: is there already; remove it, or choose another")
    loaded = [load_experiment(folder) for folder in distinct(experiment_folders(settings.runs), "--runs")]
    start = _start(settings, loaded)
    if start.steps is not None:
        _refuse_rehearsed(settings, loaded)
        return _correct(settings, start, loaded)
    if settings.coarse_start:
        start = rounded_start(start)
    experiments = [measured_sweep(experiment, settings.prompts, fitted=True) for experiment in loaded]
    shape = _shape(settings.model, experiments)
    experiments = [measured_as_launched(each, start, shape) for each in experiments]
    _same_arguments(start, shape, experiments)
    start = start.with_ray(_newest_ray(experiments))
    if settings.cross_validate and len(experiments) < 3:
        raise UsageError(f"--cross-validate needs at least 3 experiments, got {len(experiments)}")
    made_on = None
    if settings.out:
        _refuse_rehearsed(settings, loaded)
        made_on = _made_on(settings, loaded)
        assert made_on.gpu is not None
        node_gpus = max(gpus_of(experiment).node for experiment in loaded)
        start = _scheduled_as(_on_gpu(start, made_on.gpu, node_gpus, settings.data_sheet), made_on.version)
        _of_that_model(shape, experiments)
    elif settings.data_sheet or settings.gpu or settings.engine:
        raise UsageError("--gpu, --engine and --data-sheet are of the file that --out writes: add --out FILE")
    _print_doubts(shape, experiments)
    for text in filter(None, (device_mismatch(start, experiment) for experiment in loaded)):
        print(f"note: {text}: give --start", file=sys.stderr)

    def print_line(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    fitted = fit(start, shape, experiments, rounds=settings.rounds, print_line=print_line)
    inside = [point for experiment in experiments for point in compare(fitted, shape, experiment)]
    print("fitted to all:" if settings.rounds else f"{fitted.name} as it is:", errors_text(median_errors(inside)))
    print(rankings_text(rankings(experiments, inside, start.gpus_per_node)))
    error = None
    if settings.cross_validate:
        outside = cross_validate(start, shape, experiments, settings.rounds)
        print("each left out once:", errors_text(median_errors(outside)))
        print(rankings_text(rankings(experiments, outside, start.gpus_per_node)))
        made = parts_by_metric(outside)
        days = settings.days or (0.0, 0.0, 0.0)
        if made:
            print(parts_text(made))
            print("without days:", coverage_text(coverage(outside)))
        if made and settings.days:
            held = coverage(outside, dict(zip(METRICS, days, strict=True)))
            print("with days, as predictions are given:", coverage_text(held))
        print(table(outside))
        errors = median_errors(outside)
        error = FitError(
            tpot_percent=round(errors["TPOT"], 1),
            ttft_percent=round(errors["mean TTFT"], 1),
            requests_per_s_percent=round(errors["requests/s"], 1),
            points=len({(point.experiment, point.load) for point in without_lowest(outside)}),
            how="each experiment predicted by a fit to the others; medians, without the lowest load of each",
            tpot_days_percent=days[0],
            ttft_days_percent=days[1],
            requests_per_s_days_percent=days[2],
            parts=made,
        )
    else:
        print(table(inside))
    if settings.out:
        assert made_on is not None
        moved = {
            name: fitted.constants[name].model_copy(update={"source": CALIBRATED}) for name in fitted_names(fitted)
        }
        changed = {
            "fitted_on": tuple(each.name for each in experiments),
            "constants": fitted.constants | moved,
            "error": error,
        }
        _write(settings, settings.out, fitted.model_copy(update=changed), shape, made_on, experiments, loaded)
    return 0
