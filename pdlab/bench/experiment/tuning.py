"""The search for engine settings of the collocated deployments, as a separate experiment before the actual one.

The baseline of PD should be as good as its settings allow. Each combination of settings is a deployment of this
experiment, which is launched, measured, stored and resumed like any other. The winner is then launched again for the
comparison, so that the luck of the search is no part of it.
"""

from __future__ import annotations

from collections.abc import Mapping

from pdlab.bench.experiment.file import (
    TUNED_LOADS,
    Configuration,
    Entry,
    ExperimentFile,
    LoadSettings,
    NamedWorkload,
    TuneBaseline,
    configurations,
)
from pdlab.bench.experiment.schedule import Schedule, schedule_of
from pdlab.core.errors import UsageError
from pdlab.core.schema import Frozen
from pdlab.results.schema import Tuning
from pdlab.results.tuning_folders import candidate_name


class TuningCandidate(Frozen):
    """One combination of ``settings`` for the deployment ``of``, as the deployment ``name`` of the search."""

    name: str
    of: str
    settings: dict[str, bool | int]


class TuningSearch(Frozen):
    """The search as a schedule, with the settings of each of its deployments. ``at``: the bounds for its ranking."""

    plan: Schedule
    tune: TuneBaseline
    at: str
    workload: NamedWorkload
    candidates: tuple[TuningCandidate, ...]

    def of(self, name: str) -> tuple[TuningCandidate, ...]:
        """The candidates of a deployment, that of the file's settings first."""
        return tuple(each for each in self.candidates if each.of == name)

    @property
    def deployments(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(each.of for each in self.candidates))


def search_of(plan: Schedule) -> TuningSearch | None:
    """The search that runs before ``plan``; None: the file has none. Raises UsageError for an impossible search."""
    file, tune = plan.file, plan.file.tune_baseline
    if tune is None:
        return None
    where = f"{plan.path}: tune_baseline"
    workload = _workload(file, tune, where)
    baselines = _baselines(plan, tune, workload, where)
    candidates, entries = [], []
    for configuration in baselines:
        base = configuration.entry
        for settings in ({}, *tune.settings):
            entry = base.with_engine_arguments(settings)
            if settings and entry == base:
                continue
            name = candidate_name(configuration.name, settings)
            candidates.append(TuningCandidate(name=name, of=configuration.name, settings=settings))
            entries.append(entry.model_copy(update={"name": name, "workloads": None}))
    changed = {
        "name": f"{file.name}-tuning",
        "description": f"engine settings of {', '.join(c.name for c in baselines)}, for {file.name}",
        "deployments": tuple(entries),
        "workloads": (workload,),
        "loads": (tune.loads or _thinned(file, workload, where),),
        "repeats": tune.repeats,
        "tune_baseline": None,
        "at": (),
    }
    made = schedule_of(file.model_copy(update=changed), plan.path).model_copy(update={"tunes": file.name})
    at = tune.at or file.at[0]
    return TuningSearch(plan=made, tune=tune, at=at, workload=workload, candidates=tuple(candidates))


def tuned_plan(plan: Schedule, tuned: Mapping[str, Tuning]) -> Schedule:
    """``plan`` with the settings that were found. Its file stays as it was read."""

    def changed(of: Configuration) -> Entry:
        return of.entry.with_engine_arguments(tuned[of.name].settings if of.name in tuned else {})

    entries = tuple(changed(configuration) for configuration in plan.configurations)
    launched = configurations(plan.file.model_copy(update={"deployments": entries}), plan.path)
    made = {
        each.name: each.model_copy(update={"entry": entry})
        for each, entry in zip(launched, plan.file.deployments, strict=True)
    }
    visits = [visit.model_copy(update={"configuration": made[visit.configuration.name]}) for visit in plan.visits]
    return plan.model_copy(update={"visits": tuple(visits), "tuned": dict(tuned)})


def _workload(file: ExperimentFile, tune: TuneBaseline, where: str) -> NamedWorkload:
    if tune.workload is None:
        workload = next((w for w in file.workloads if w.mode == "mixed"), None)
        if workload is None:
            raise UsageError(f"{where}: no workload of the file is mixed, so there is nothing to tune for")
        return workload
    workload = next((w for w in file.workloads if w.name == tune.workload), None)
    if workload is None or workload.mode == "decode-only":
        known = ", ".join(w.name for w in file.workloads if w.mode != "decode-only")
        raise UsageError(f"{where}.workload: {tune.workload!r} is none of {known}")
    return workload


def _baselines(plan: Schedule, tune: TuneBaseline, workload: NamedWorkload, where: str) -> tuple[Configuration, ...]:
    able = [each for each in plan.configurations if each.deployment.mode == "collocated" and workload in each.workloads]
    names = [each.name for each in able]
    for name in tune.deployments or ():
        if name not in names:
            raise UsageError(
                f"{where}.deployments: {name!r} is none of the collocated deployments that run {workload.name} "
                f"({', '.join(names) or 'there is none'})"
            )
    tuned = tuple(each for each in able if tune.deployments is None or each.name in tune.deployments)
    if not tuned:
        raise UsageError(f"{where}: no collocated deployment of the file runs {workload.name}; leave it out")
    return tuned


def _thinned(file: ExperimentFile, workload: NamedWorkload, where: str) -> LoadSettings:
    """Up to `TUNED_LOADS` of the first group of closed loops, or else of rates, that the workload has."""
    groups = file.loads_of(workload)
    for kind in ("concurrency", "concurrency_per_gpu", "rate_rps"):
        for group in groups:
            values = getattr(group, kind)
            if values:
                ordered, steps = sorted(values), min(TUNED_LOADS, len(values)) - 1
                chosen = [ordered[round(i * (len(ordered) - 1) / max(steps, 1))] for i in range(steps + 1)]
                return group.model_copy(update={kind: tuple(chosen), "workloads": None})
    raise UsageError(
        f"{where}: the file has no concurrency and no rate_rps for {workload.name}; give tune_baseline loads"
    )
