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
    """How to measure one candidate. ``cluster``: None if it fits no cluster of configs/clusters/. ``concurrencies``: of
    its sweep (empty: a request rate was planned for). ``outside``: in what its prediction is extrapolated."""

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
    """The commands to launch, sweep, plot and compare the best candidates. With ``folder``, it also writes their
    files. Raises WriteError.

    ``node``: the type of node (None: none of configs/clusters/). ``baseline``: the best collocated candidate, to
    compare PD with. ``plan_flags``: this plan's flags for model and hardware. ``viz_flags``: flags of viz.py for the
    plan's figures per GPU.
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
        loads, beyond = sweep_levels(candidate), outside(candidate, scenario)
        steps.append(Measurement(candidate, candidate is baseline, launch, cluster, loads, beyond))
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
    """Concurrencies to measure: the best one, and simulated ones that differ from it and each other by APART."""
    loads = sorted({o.load.concurrency for o in candidate.outcomes if isinstance(o.load, Closed)})
    best_load = (candidate.closed or candidate.best_or_nearest).load
    chosen_loads = [best_load.concurrency] if isinstance(best_load, Closed) else []
    for load in loads:
        if all(max(load, chosen) >= APART * min(load, chosen) for chosen in chosen_loads):
            chosen_loads.append(load)
    return sorted(chosen_loads)


def cluster_for(deployment: Deployment, node: str) -> str | None:
    """The smallest cluster with at least two nodes of type ``node`` that fits one copy, or the cluster file ``node``;
    None if the copy does not fit."""
    if is_yaml_path(node):
        return shlex.quote(node) if fits(deployment, load_cluster(node)) else None
    slots = load_cluster(f"{node}-x1").nodes[0].total_slots
    least = max(2, -(-deployment.gpus // slots))
    names = (f"{node}-x{count}" for count in range(least, max(least, deployment.gpus) + 1))
    return next((name for name in names if fits(deployment, load_cluster(name))), None)
