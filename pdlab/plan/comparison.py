"""`plan.py --compare`: measured experiments beside their predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pdlab.core.catalog import ModelShape, load_model, require_shape, whole_shape
from pdlab.core.errors import UsageError
from pdlab.core.findings import Finding
from pdlab.core.rendering import rendered
from pdlab.plan import TEMPLATES
from pdlab.plan.accuracy import MeasuredSweep, PredictedPoint, mean_rows, median_errors
from pdlab.plan.calibration import compare, device_mismatch, loads_in_flight, measured_sweep
from pdlab.plan.engine_arguments import measured_as_launched
from pdlab.plan.error_catalog import with_stack_prior
from pdlab.plan.extrapolation import OutsideFit, outside_fit, ran_on
from pdlab.plan.replay_accuracy import ComparedReplay, compared, trace_sent
from pdlab.plan.stack_bands import outside_bands
from pdlab.plan.step_findings import step_findings
from pdlab.results.published_folders import load_experiment
from pdlab.results.schema import Experiment
from pdlab.sim.computed_hardware import as_served
from pdlab.sim.hardware import Hardware
from pdlab.sim.simulator import Prompts


class ComparedExperiment(NamedTuple):
    """A measured experiment beside its prediction. ``hardware``: what it is predicted with. ``points``: the figures of
    its levels; a replay has ``replays`` instead. ``outside``: in what its prediction is extrapolated. ``notes``:
    assumptions of its prediction, as sentences."""

    experiment: Experiment
    sweep: MeasuredSweep
    hardware: Hardware
    shape: ModelShape
    points: list[PredictedPoint]
    replays: list[ComparedReplay]
    outside: tuple[OutsideFit, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]


def compared_experiment(
    folder: Path,
    hardware: Hardware,
    model: str | None,
    prompts: Prompts | None,
    local_engine_kwargs: Mapping[str, Any],
) -> ComparedExperiment:
    """Predict the experiment in a folder.

    ``model``: the model of the prediction; None: the measured one. ``prompts``: whether levels repeat the prompts of
    earlier levels; None: see `pdlab.plan.calibration.measured_sweep`. ``local_engine_kwargs``: the engine arguments
    that a launch on this machine adds. Raises UsageError and StoreError for an experiment that cannot be predicted.
    """
    experiment = load_experiment(folder)
    sweep = measured_sweep(experiment, prompts, trace_sent(folder, experiment))
    deployment = sweep.deployment
    measured = _measured_model(deployment.model)
    shape, notes = _shape(model, deployment.model, measured, folder)
    if mismatch := device_mismatch(hardware, experiment):
        notes = (*notes, f"{mismatch}: give --hardware")
    shape = as_served(shape, hardware)
    sweep = measured_as_launched(sweep, hardware, shape)
    deployment = sweep.deployment
    corrected = with_stack_prior(sweep.as_measured(hardware), shape)
    points, replays = [], []
    if sweep.trace is None:
        points = compare(corrected, shape, sweep)
    else:
        kwargs = local_engine_kwargs if experiment.manifest.local else {}
        replays = compared(folder, experiment, sweep, corrected, shape, kwargs)
    return ComparedExperiment(
        experiment=experiment,
        sweep=sweep,
        hardware=corrected,
        shape=shape,
        points=points,
        replays=replays,
        outside=_outside(
            sweep,
            outside_fit(
                corrected,
                deployment.model.rpartition("/")[2] if isinstance(measured, str) else measured,
                deployment,
                [sweep.workload],
                ran_on=ran_on(experiment),
                in_flight_per_gpu=loads_in_flight(sweep),
                kv_dtype=shape.kv_dtype,
            ),
            corrected,
            shape,
        ),
        findings=step_findings(corrected, shape, [deployment]),
        notes=(*notes, *sweep.doubts),
    )


def _outside(
    sweep: MeasuredSweep, outside: Sequence[OutsideFit], hardware: Hardware, shape: ModelShape
) -> tuple[OutsideFit, ...]:
    """In what any of the levels is extrapolated (`pdlab.plan.stack_bands.outside_bands`). Levels of one kind of load
    are judged together: by all their loads, and by the largest share of prompt tokens that caches answer."""
    if hardware.steps is None:
        return tuple(outside)
    in_flight = loads_in_flight(sweep)
    simulated = sweep.simulated(hardware, shape, seed=0)
    found: dict[OutsideFit, None] = {}
    for kind in dict.fromkeys(level.load.kind for level in sweep.levels):
        places = [place for place, level in enumerate(sweep.levels) if level.load.kind == kind]
        load, loads = sweep.levels[places[0]].load, [in_flight[place] for place in places]
        cached = max(simulated[place].hit_share for place in places)
        judged = outside_bands(hardware, shape, sweep.deployment, sweep.workload, load, loads, outside, cached)
        found.update(dict.fromkeys(judged))
    return tuple(found)


def _measured_model(model: str) -> ModelShape | str:
    """The shape of the measured model, or why it is unknown. A path may be one of another machine."""
    return load_model(model.rpartition("/")[2]) or whole_shape(model)


def _shape(
    model: str | None, name: str, measured: ModelShape | str, folder: Path
) -> tuple[ModelShape, tuple[str, ...]]:
    """The shape of ``model``, else of the measured model; and a note if it is the shape of another model. ``name``: of
    the measured model."""
    shape = require_shape(model) if model else measured
    if isinstance(shape, str):
        raise UsageError(f"{folder} is of {name}: {shape}; name one like it with --model")
    same = shape.name in (name, name.rpartition("/")[2]) if isinstance(measured, str) else shape.is_same(measured)
    return shape, () if same else (f"{folder} is of {name}, predicted as {shape.name}",)


def comparison_text(experiments: Sequence[ComparedExperiment], hardware: Hardware) -> str:
    """The printed comparison: figures with errors, medians, and what is extrapolated."""
    points = [point for each in experiments for point in each.points]
    return rendered(
        TEMPLATES / "compare.txt",
        models=list(dict.fromkeys(each.shape.name for each in experiments)),
        hardware=hardware,
        rows=mean_rows(points),
        replays=[replay for each in experiments for replay in each.replays],
        rehearsed=[each.experiment.name for each in experiments if each.experiment.manifest.rehearsal],
        errors=median_errors(points, skip_first=False),
        outside={each.experiment.name: each.outside for each in experiments},
        findings=list({finding.text: finding for each in experiments for finding in each.findings}.values()),
    )
