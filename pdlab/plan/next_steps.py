"""From a plan to a measurement: commands and configuration files."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pdlab.core.catalog import load_cluster
from pdlab.core.commands import typed
from pdlab.core.deployment import Deployment, launch_flags
from pdlab.core.files import replace
from pdlab.core.rendering import rendered
from pdlab.core.schema import is_yaml_path, to_yaml
from pdlab.core.workload import Closed
from pdlab.placement.place import fits
from pdlab.plan import TEMPLATES
from pdlab.plan.extrapolation import OutsideFit
from pdlab.plan.planner import Candidate, outside
from pdlab.plan.scenario import Scenario

ENGINE_SETTINGS = "max_num_batched_tokens, max_num_seqs, enable_prefix_caching"
APART = 1.2  # levels of a sweep differ by at least this factor


class Measurement(NamedTuple):
    """The commands that measure one candidate. ``launch``: the command that launches it. ``cluster``: the cluster for a
    dry run (None: it fits none). ``concurrencies``: those of its sweep (empty: a request rate was requested).
    ``outside``: the dimensions in which its prediction is extrapolated."""

    candidate: Candidate
    is_baseline: bool
    launch: str
    cluster: str | None
    concurrencies: list[int]
    outside: tuple[OutsideFit, ...]


def commands(
    best: Sequence[Candidate],
    scenario: Scenario,
    node: str | None,
    folder: Path | None = None,
    baseline: Candidate | None = None,
    plan_flags: str = "",
    viz_flags: str = "",
) -> str:
    """The commands to launch, sweep, plot and compare the best candidates.

    ``node``: the node type or the cluster file (None: the nodes are those of the tables). ``folder``: the
    configuration files of the candidates are written there (None: not at all). ``baseline``: the best collocated
    candidate, with which PD is compared. ``plan_flags``: this plan's flags for model and hardware. ``viz_flags``:
    flags of viz.py for the plan's figures per GPU. Raises WriteError.
    """
    measured = [*best, *([baseline] if baseline is not None and baseline not in best else [])]
    steps = []
    for candidate in measured:
        deployment = candidate.deployment
        launch = f"{typed('launch')} {launch_flags(deployment)}"
        if folder is not None:
            path = folder / f"{deployment.label}.yaml"
            replace(path, to_yaml(deployment.model_copy(update={"name": deployment.label})).encode())
            launch = typed("launch", "--config", str(path))
        cluster = cluster_for(deployment, node) if node and not scenario.hardware.cpu else None
        steps.append(
            Measurement(
                candidate=candidate,
                is_baseline=candidate is baseline,
                launch=launch,
                cluster=cluster,
                concurrencies=sweep_levels(candidate),
                outside=outside(candidate, scenario),
            )
        )
    return rendered(
        TEMPLATES / "commands.txt",
        best=best,
        steps=steps,
        local=scenario.hardware.cpu,
        engine_settings=ENGINE_SETTINGS,
        bench=typed("bench"),
        viz=typed("viz"),
        plan=typed("plan"),
        plan_flags=plan_flags,
        viz_flags=viz_flags,
        slo=scenario.slo,
        workload=scenario.workload,
        folders=shlex.join(f"bm_results/{candidate.deployment.label}" for candidate in measured),
    )


def sweep_levels(candidate: Candidate) -> list[int]:
    """Concurrencies to measure: the best one, and simulated ones that differ from it and each other by `APART`."""
    loads = sorted({each.load.concurrency for each in candidate.outcomes if isinstance(each.load, Closed)})
    best_load = (candidate.closed or candidate.best_or_nearest).load
    chosen_loads = [best_load.concurrency] if isinstance(best_load, Closed) else []
    for load in loads:
        if all(max(load, chosen) >= APART * min(load, chosen) for chosen in chosen_loads):
            chosen_loads.append(load)
    return sorted(chosen_loads)


def cluster_for(deployment: Deployment, node: str) -> str | None:
    """The cluster for a dry run of one copy; None if the copy does not fit. It is the cluster file ``node``, or the
    smallest cluster of at least two nodes of the type ``node``."""
    if is_yaml_path(node):
        return shlex.quote(node) if fits(deployment, load_cluster(node)) else None
    slots = load_cluster(f"{node}-x1").nodes[0].total_slots
    least = max(2, -(-deployment.gpus // slots))
    names = (f"{node}-x{count}" for count in range(least, max(least, deployment.gpus) + 1))
    return next((name for name in names if fits(deployment, load_cluster(name))), None)
