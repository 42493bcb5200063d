"""Start the search for the highest rate within an SLO at the rate that the same search finds on the simulator."""

from __future__ import annotations

import math
from typing import NamedTuple

from pdlab.bench.experiment.schedule import Part, Schedule
from pdlab.bench.slo_offline import search_over
from pdlab.bench.slo_search import SloSearchOptions
from pdlab.core import defaults
from pdlab.core.catalog import require_shape
from pdlab.core.commands import LAUNCH
from pdlab.core.deployment import Deployment
from pdlab.core.errors import UsageError
from pdlab.core.served_model import served_model
from pdlab.core.workload import Level, Open, Workload
from pdlab.deploy.endpoint import load_running
from pdlab.plan.extrapolation import outside_fit, outside_text
from pdlab.results.level_data import LevelData
from pdlab.results.schema import SloSearch
from pdlab.sim.argument_effects import with_added
from pdlab.sim.computed_hardware import as_served
from pdlab.sim.hardware import Hardware, load_hardware
from pdlab.sim.level import columns
from pdlab.sim.simulator import simulate

STEP = 1.25
FIX = "give the rate to begin at (--slo-start RATE; start_rps in a file)"
# A finer search would be finer than the simulator's error.
QUICK = {"confidence": 0.8, "resolution": 0.2, "max_points": 12, "longest_s": 60.0, "requests": None}


class StartedSearch(NamedTuple):
    """The search with its start and a small first step, and the simulator's prediction in words."""

    search: SloSearchOptions
    sentence: str


class StartedExperiment(NamedTuple):
    """The schedule, in which the searches have their starts, and a sentence for each start from the simulator."""

    schedule: Schedule
    sentences: list[str]


def from_plan(search: SloSearchOptions, workload: Workload, base_url: str) -> StartedSearch:
    """`begun` on the deployment at ``base_url``. Raises UsageError, also if no record names that deployment."""
    running = load_running(base_url)
    if running is None or running.manifest.deployment is None:
        raise UsageError(
            f"--start-from plan: no record names the deployment at {base_url}; launch it with {LAUNCH}, or {FIX}"
        )
    return begun(search, workload, running.manifest.deployment, local=running.manifest.local)


def of_experiment(plan: Schedule) -> StartedExperiment:
    """`begun` for the searches of an experiment. Raises UsageError."""
    parts: dict[str, Part] = {}
    sentences = []
    for visit in plan.visits:
        for part in visit.parts:
            if part.folder in parts:
                continue
            searches = []
            for search in part.searches:
                if search.start_from is not None:
                    local = plan.file.where.local is not None
                    workload = part.workload.workload(plan.file.seed)
                    try:
                        search, sentence = begun(search, workload, visit.configuration.deployment, local=local)
                    except UsageError as error:
                        raise UsageError(f"{plan.path}: {part.folder}: {error}") from None
                    sentences.append(f"{part.folder}: {sentence}")
                searches.append(search)
            parts[part.folder] = part.model_copy(update={"searches": tuple(searches)})
    visits = [
        visit.model_copy(update={"parts": tuple(parts[part.folder] for part in visit.parts)}) for visit in plan.visits
    ]
    return StartedExperiment(plan.model_copy(update={"visits": tuple(visits)}), sentences)


def begun(search: SloSearchOptions, workload: Workload, deployment: Deployment, *, local: bool) -> StartedSearch:
    """Start the search at the highest rate on the simulator, which serves ``deployment`` with ``workload``.

    Raises UsageError if the simulator cannot simulate the deployment, the workload or the SLO.
    """
    calibrated = load_hardware(search.hardware or (defaults.LOCAL_HARDWARE if local else defaults.HARDWARE))
    simulated_search = simulated(search, workload, deployment, calibrated)
    ends = [end for end in (simulated_search.low_rps, simulated_search.high_rps) if end is not None]
    if not ends:
        raise UsageError(f"start from plan: the simulator found no rate that meets or misses it; {FIX}")
    start_rps = math.prod(ends) ** (1 / len(ends))
    started = {"start_rps": start_rps, "step": STEP, "start_from": None, "hardware": None}
    shape = served_model(deployment).shape
    outside = outside_fit(calibrated, shape or deployment.model, deployment, [workload])
    if calibrated.steps is not None:
        from pdlab.plan.stack_bands import outside_bands

        served, load = as_served(require_shape(deployment.model), calibrated), Open(rate_rps=start_rps)
        cached = workload.declared_cached_share
        outside = outside_bands(calibrated, served, deployment, workload, load, (), outside, cached)
    sentence = f"{search.slo.label}: on the simulator {simulated_search.detail.split(';')[0]}; measuring begins there"
    sentence += f" ({outside_text(outside)})" if outside else ""
    return StartedSearch(search.model_copy(update=started), sentence)


def simulated(search: SloSearchOptions, workload: Workload, deployment: Deployment, calibrated: Hardware) -> SloSearch:
    """A quick search on the simulator, without bounds on gaps between chunks: it has none. Raises UsageError."""
    try:
        shape = as_served(require_shape(deployment.model), calibrated)
    except UsageError as error:
        raise UsageError(f"start from plan: {error}; {FIX}") from error
    deployment = with_added(deployment, calibrated, shape)
    if workload.mode.startswith("decode"):
        raise UsageError(f"start from plan: mode {workload.mode} is not simulated; {FIX}")
    slo = search.slo.model_copy(update={"itl_p99_s": None, "stall_s": None})
    if not slo.bounded:
        raise UsageError("start from plan: gaps between chunks are not simulated; bound TTFT, TPOT or E2EL too")

    def drive(level: Level) -> LevelData:
        (done,) = simulate(
            deployment,
            [level],
            workload,
            calibrated,
            shape,
            seed=level.seed,
            prefix_hit_rate=workload.declared_cached_share,
        )
        return columns(done)

    quick = search.model_copy(update={**QUICK, "slo": slo, "start_rps": None})
    return search_over(drive, quick, workload, label=deployment.label, seed=workload.seed)
