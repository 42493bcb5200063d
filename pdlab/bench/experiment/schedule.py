"""The schedule of an experiment file: its visits in order, what is left to measure, and how long it takes.

Starts nothing and imports neither Ray nor vLLM.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from pdlab.bench import levels
from pdlab.bench.experiment.file import (
    CLUSTER_LAUNCH_S,
    LOCAL_LAUNCH_S,
    Configuration,
    ExperimentFile,
    NamedWorkload,
    configurations,
    folder_name,
    load_experiment_file,
    loads_and_searches,
    order,
)
from pdlab.bench.slo_search import SloSearchOptions
from pdlab.bench.sweep import unfinished
from pdlab.bench.traffic import replayed
from pdlab.core.errors import PlacementError, UsageError
from pdlab.core.schema import Frozen, incidental
from pdlab.core.workload import Closed, Load, Open, Replay, RunKey
from pdlab.deploy.prepared import checked_model, prepared_launch
from pdlab.results.schema import ExperimentRecord, Tuning
from pdlab.results.store import LOCK, RECORD, Store, read_record
from pdlab.steps.resume import check_folder_is_new, check_same_run

# Around a visit's levels: imports of the load generator, its warm-up; after a level: counters that come late.
CLIENT_START_S, AFTER_LEVEL_S = 15.0, 2.0
SEARCH_POINTS = 15  # levels that a search takes, as a rule (benchmarks/slo_coverage.py)


class Part(Frozen):
    """One workload on one configuration: its folder's name, levels and searches (the same in every repeat)."""

    folder: str
    workload: NamedWorkload
    loads: tuple[Load, ...]
    searches: tuple[SloSearchOptions, ...]


class PlannedVisit(Frozen):
    """One visit: ``configuration`` is launched and measured under every part, as ``repeat``."""

    repeat: int
    configuration: Configuration
    parts: tuple[Part, ...]


class Schedule(Frozen):
    """A prepared experiment. ``file`` is as it was read from ``path``; ``tuned`` and ``tunes`` as in its record.
    ``slow_downs``: configuration -> real seconds per simulated second of a rehearsal whose launch chooses them."""

    file: ExperimentFile
    path: Path
    visits: tuple[PlannedVisit, ...]
    tuned: dict[str, Tuning] = Field(default_factory=dict)
    tunes: str | None = None
    slow_downs: dict[str, float] = Field(default_factory=dict)

    def slow_down(self, configuration: Configuration) -> float | None:
        """Real seconds per second of a level: 1 without a rehearsal; None: the launch chooses, and it is not known."""
        rehearsal = configuration.request.rehearsal
        if rehearsal is None:
            return 1.0
        return rehearsal.slow_down or self.slow_downs.get(configuration.name)

    @property
    def parts(self) -> dict[str, Part]:
        """The parts of all visits by folder, each once."""
        return {part.folder: part for visit in self.visits for part in visit.parts}

    @property
    def configurations(self) -> tuple[Configuration, ...]:
        """In the file's order."""
        names = [visit.configuration.name for visit in self.visits]
        first = {name: self.visits[names.index(name)].configuration for name in names}
        return tuple(sorted(first.values(), key=lambda c: self.file.deployments.index(c.entry)))


def make_schedule(name_or_path: str, repeats: int | None = None) -> Schedule:
    """Read and check a file; ``repeats`` in place of its own. Raises UsageError for anything that could not be run,
    PlacementError for a deployment that does not fit the cluster of the file."""
    file, path = load_experiment_file(name_or_path)
    return schedule_of(file if repeats is None else file.model_copy(update={"repeats": repeats}), path)


def schedule_of(file: ExperimentFile, path: Path) -> Schedule:
    """`make_schedule` of a file that is read already, from ``path``."""
    by_name = {configuration.name: configuration for configuration in configurations(file, path)}
    parts = {}
    for name, configuration in by_name.items():
        try:
            model, view = checked_model(configuration.request), configuration.request.known_view()
            if view is not None:
                prepared_launch(configuration.request, model, view)
        except PlacementError:
            raise  # it names the deployment
        except UsageError as error:
            raise UsageError(f"{path}: {name}: {error}") from error
        parts[name] = tuple(_part(file, configuration, workload) for workload in configuration.workloads)
    folders = [part.folder for some in parts.values() for part in some]
    if twice := [folder for folder in folders if folders.count(folder) > 1]:
        raise UsageError(f"{path}: two deployments would write to {twice[0]}; give them other names")
    visits = [
        PlannedVisit(repeat=repeat, configuration=by_name[name], parts=parts[name])
        for repeat, name in order(file, tuple(by_name))
    ]
    return Schedule(file=file, path=path, visits=tuple(visits))


def _part(file: ExperimentFile, configuration: Configuration, workload: NamedWorkload) -> Part:
    workload.workload(file.seed)
    loads, searches = loads_and_searches(file, configuration, workload)
    folder = folder_name(configuration, workload, file)
    return Part(folder=folder, workload=workload, loads=loads, searches=searches)


def unfinished_work(part: Part, repeat: int, out: Path) -> tuple[tuple[Load, ...], tuple[SloSearchOptions, ...]]:
    """Loads and searches of a part that are not finished in the experiment's folder ``out``."""
    store = Store(out / part.folder)
    loads = [x for x in part.loads if not store.has(RunKey(kind=x.kind, value=x.value, repeat=repeat))]
    return tuple(loads), tuple(search for search in part.searches if unfinished(store, search, repeat))


def launch_s(file: ExperimentFile) -> float:
    """Estimate of one start."""
    return file.expect.launch_s or (LOCAL_LAUNCH_S if file.where.local is not None else CLUSTER_LAUNCH_S)


def part_s(
    file: ExperimentFile,
    part: Part,
    loads: tuple[Load, ...],
    searches: tuple[SloSearchOptions, ...],
    slow_down: float = 1.0,
) -> float:
    """Estimate of measuring those loads and searches in one visit, the load generator's start included; real seconds.

    A closed loop takes requests / concurrency times the expected time of one, an open loop the time in which its
    requests arrive. Expected times are the file's (``expect``): they do not include how load slows a server down. They
    are simulated seconds in a rehearsal, as the times of its levels are; each takes ``slow_down`` real ones.
    """
    if not loads and not searches:
        return 0.0
    workload = part.workload.workload(file.seed)
    request_s = file.expect.ttft_s + (workload.mean_tokens[1] - 1) * file.expect.tpot_s
    total, levels_s = CLIENT_START_S, request_s
    for load in loads:
        requests = file.prompts_per_level or levels.num_requests(load, workload, hold_s=file.hold_s, e2el_s=request_s)
        if isinstance(load, Closed):
            levels_s += requests / load.concurrency * request_s
        elif isinstance(load, Replay):
            lengths = replayed(workload)
            levels_s += request_s + (lengths.least_s if lengths else 0.0)
        else:
            levels_s += workload.mean_duration_s(load, requests) + request_s
        total += AFTER_LEVEL_S
    for search in searches:
        load = Open(rate_rps=search.start_rps or 1 / request_s / workload.mean_rate, burstiness=search.burstiness)
        requests = search.requests_needed
        if file.prompts_per_level is None:
            held = levels.num_requests(load, workload, hold_s=file.hold_s, e2el_s=request_s)
            requests = max(requests, held)
        levels_s += SEARCH_POINTS * workload.mean_duration_s(load, requests)
        total += SEARCH_POINTS * AFTER_LEVEL_S
    return total + slow_down * levels_s


def visit_s(plan: Schedule, visit: PlannedVisit, out: Path) -> float:
    """Estimate of what is left of a visit; 0 when it is finished. Levels count in simulated seconds if the slow-down
    of a rehearsal is not known."""
    rest = [(part, *unfinished_work(part, visit.repeat, out)) for part in visit.parts]
    if not any(loads or searches for _, loads, searches in rest):
        return 0.0
    slow_down = plan.slow_down(visit.configuration) or 1.0
    return launch_s(plan.file) + sum(part_s(plan.file, *item, slow_down) for item in rest)


def earlier_record(folder: Path, file: ExperimentFile, *, resume: bool) -> ExperimentRecord | None:
    """The record of an earlier run in ``folder``; None: there is none. Raises StoreError when results of ``file`` must
    not go there.
    """
    earlier = read_record(folder)
    if earlier is None:
        check_folder_is_new(folder, RECORD, ignored=(LOCK,))
    else:
        check_same_run(folder, earlier.experiment, settings_of(file), resume=resume, free=incidental(ExperimentFile))
    return earlier


def settings_of(file: ExperimentFile) -> dict[str, Any]:
    """The file as a record keeps it."""
    return file.model_dump(mode="json", exclude_defaults=True)
