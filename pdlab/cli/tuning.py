"""``tune_baseline:`` of an experiment's file: find the best settings of the collocated side, then run with them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from pdlab.bench.experiment.run import RunOptions, run
from pdlab.bench.experiment.schedule import Schedule, earlier_record, visit_s
from pdlab.bench.experiment.tuning import TuningSearch, search_of, tuned_plan
from pdlab.cli.rehearsal_pace import paced
from pdlab.core.bounds import parse_bounds
from pdlab.core.errors import BenchError
from pdlab.core.status_line import minutes
from pdlab.core.text import counted
from pdlab.core.workload import title
from pdlab.results.schema import ExperimentRecord, TriedSettings, Tuning


def tuned(plan: Schedule, options: RunOptions) -> Schedule:
    """``plan`` with the settings that the search finds; unchanged if the file has no search. A search that is not
    finished is continued. Raises StoreError as `run` does, BenchError if a deployment has no valid level."""
    from pdlab.report.tuning import tried_text, tuning_text

    search = search_of(plan)
    if search is None:
        return plan
    earlier = earlier_record(options.out / plan.file.name, plan.file, resume=options.resume)
    if earlier is not None and earlier.tuned:
        return tuned_plan(plan, earlier.tuned)  # the levels measured so far have these settings
    done = run(paced(search.plan), options)
    tunings = {name: judged(search, name, done.folder, done.record) for name in search.deployments}
    for name, tuning in tunings.items():
        print(f"{name}: {tuning_text(tuning)}", *(f"  {tried_text(tried)}" for tried in tuning.tried), sep="\n")
    return tuned_plan(plan, tunings)


def judged(search: TuningSearch, name: str, folder: Path, record: ExperimentRecord) -> Tuning:
    """The best settings of one deployment, from the results in ``folder``: most output tokens/s within the bounds.

    If no settings are within the bounds, the deployment keeps its own. Raises BenchError without a valid level.
    """
    from pdlab.analysis.tuning import judged as compared

    candidates, bounds = search.of(name), parse_bounds(search.at, "p50")
    visit = next(each for each in search.plan.visits if each.configuration.name == candidates[0].name)
    unjudged = Tuning(
        grid=dict(search.tune.grid),
        bounds=bounds.label,
        workload=search.workload.label,
        loads=tuple(title(each) for each in visit.parts[0].loads),
        repeats=search.plan.file.repeats,
        tried=tuple(TriedSettings(settings=each.settings) for each in candidates),
        folder=folder.name,
    )
    tuning = compared(unjudged, name, folder, bounds, record)
    if all(tried.error for tried in tuning.tried):
        errors = [visit.error for visit in record.visits if visit.error]
        raise BenchError(
            f"{folder}: nothing was measured of {name}, which tune_baseline is for: {[*errors, 'no level is valid'][0]}"
        )
    best = tuning.tried[0]
    return tuning if best.tokens_per_s is None else tuning.model_copy(update={"settings": best.settings})


class Description(NamedTuple):
    """A search in words, and its estimated seconds."""

    lines: list[str]
    seconds: float


def described(plan: Schedule, out: Path) -> Description:
    """The search before the experiment; empty without one. Raises UsageError."""
    search = search_of(plan)
    if search is None:
        return Description([], 0.0)
    folder = out / search.plan.file.name
    search_plan = paced(search.plan)
    seconds = sum(visit_s(search_plan, visit, folder) for visit in search_plan.visits)
    loads = ", ".join(title(load) for load in search.plan.visits[0].parts[0].loads)
    settings = counted(len(search.candidates), "setting")
    lines = [
        f"first the collocated side is tuned: {settings} launched {counted(len(search.plan.visits), 'time')}, about "
        f"{minutes(seconds)}, levels in {folder}; the most output tokens/s at {parse_bounds(search.at, 'p50').label} "
        f"wins, by {loads} of {search.workload.label}",
        *(f"  {each.name}" for each in search.candidates),
    ]
    return Description(lines, seconds)
