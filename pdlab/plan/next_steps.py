"""From a plan to a measurement: commands, configuration files, pictures."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from pdlab.core.catalog import ModelShape, load_cluster
from pdlab.core.commands import typed
from pdlab.core.deployment import Deployment, launch_flags
from pdlab.core.files import replace
from pdlab.core.schema import to_yaml
from pdlab.core.workload import Closed, Slo, Workload
from pdlab.placement.place import fits
from pdlab.plan.accuracy import MeasuredSweep
from pdlab.plan.planner import Candidate
from pdlab.results.schema import Experiment, Manifest
from pdlab.sim.hardware import Hardware
from pdlab.sim.level import to_run
from pdlab.sim.simulator import simulate

PREDICTED = "predicted"
KNOBS = "max_num_batched_tokens, max_num_seqs, enable_prefix_caching"
APART = 1.2  # levels of a sweep differ by at least this factor


def commands(
    best: Sequence[Candidate],
    workload: Workload,
    node: str | None,
    folder: Path | None,
    compare_flags: str = "",
    baseline: Candidate | None = None,
    slo: Slo | None = None,
    viz_flags: str = "",
    extrapolated: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """How to launch, sweep, plot and compare the best; with ``folder`` their files too. Raises WriteError.

    ``baseline``: the best collocated deployment, measured too so that PD can be compared with it.

    ``node``: the kind of node, None: engines on this machine's CPUs. ``compare_flags``: the flags of this plan
    for model and hardware, so that the comparison uses the same. ``slo``: what a goodput under Poisson arrivals is of,
    which is searched for from there. ``viz_flags``: what the plan's figures per GPU take of viz.py's flags.
    ``extrapolated``: label -> in what its prediction lies outside of the fit.
    """
    measured_candidates = [*best, *([baseline] if baseline is not None and baseline not in best else [])]
    if not measured_candidates:
        return "No commands: no deployment meets the SLO."
    subject = "them" if best else "how far the collocated baseline is from the SLO"
    lines = [
        f"To measure {subject} (one copy each):"
        if any(c.copies > 1 for c in measured_candidates)
        else f"To measure {subject}:"
    ]
    for candidate in measured_candidates:
        if candidate is baseline and best:
            lines += [
                "  # the collocated baseline that PD is compared with; tune it first, or PD is compared with defaults:",
                f"  # {KNOBS} (--engine-arg KEY=VALUE here;",
                "  # tune_baseline: in an experiment's file searches for the best)",
            ]
        deployment = candidate.deployment
        if text := extrapolated.get(deployment.label):
            lines.append(f"  # {text}")
        launch = f"{typed('launch')} {launch_flags(deployment)}"
        if folder is not None:
            path = folder / f"{deployment.label}.yaml"
            replace(path, to_yaml(deployment.model_copy(update={"name": deployment.label})).encode())
            launch = typed("launch", "--config", str(path))
        loads = ",".join(map(str, sweep_levels(candidate)))
        kind = f"-t concurrency -c {loads}" if loads else f"-t request-rate -r {candidate.outcomes[0].load.value:.4g}"
        if slo is not None and candidate.goodput_rps:
            kind += f" --slo {slo.flag} --slo-quantile {slo.quantile:g} --slo-start {candidate.goodput_rps:.3g}"
        cluster = cluster_for(deployment, node) if node else None
        launch += "" if node else " --local"
        if cluster or not node:
            lines.append(f"  {launch}{f' --cluster {cluster}' if cluster else ''} --dry-run")
        lines += [
            f"  {launch} --detach",
            f"  {typed('bench')} -e {deployment.label} {kind} {workload.flags}",
        ]
    folders = shlex.join(f"bm_results/{candidate.deployment.label}" for candidate in measured_candidates)
    compare = f"  {typed('plan')}{compare_flags} --compare {folders}"
    return "\n".join([*lines, f"  {typed('viz')} --exps {folders}{viz_flags}", compare])


def sweep_levels(candidate: Candidate) -> list[int]:
    """Concurrencies worth measuring: the best one, and simulated ones that differ from it and each other by APART."""
    loads = sorted({o.load.concurrency for o in candidate.outcomes if isinstance(o.load, Closed)})
    best_load = (candidate.closed or candidate.best_or_nearest).load
    chosen_loads = [best_load.concurrency] if isinstance(best_load, Closed) else []
    for load in loads:
        if all(max(load, chosen) >= APART * min(load, chosen) for chosen in chosen_loads):
            chosen_loads.append(load)
    return sorted(chosen_loads)


def cluster_for(deployment: Deployment, node: str) -> str | None:
    """The smallest cluster of at least two of that type of node that takes one copy, or the cluster file that ``node``
    names; None if none does."""
    if node.endswith((".yaml", ".yml")):
        return shlex.quote(node) if fits(deployment, load_cluster(node)) else None
    slots = load_cluster(f"{node}-x1").nodes[0].total_slots
    least = max(2, -(-deployment.gpus // slots))
    names = (f"{node}-x{count}" for count in range(least, max(least, deployment.gpus) + 1))
    return next((name for name in names if fits(deployment, load_cluster(name))), None)


def experiments(candidates: Sequence[Candidate], workload: Workload) -> list[Experiment]:
    """Candidates as experiments of simulated runs, for the plots and tables of viz."""
    return [
        Experiment(
            name=f"{candidate.deployment.label} {PREDICTED}",
            manifest=Manifest(
                origin="simulated",
                label=candidate.deployment.label,
                deployment=candidate.deployment,
                gpus=candidate.deployment.gpus,
                workload=workload,
            ),
            runs=tuple(to_run(o.level, candidate.deployment.label, workload) for o in candidate.outcomes),
        )
        for candidate in candidates
    ]


def as_measured(
    experiment: MeasuredSweep, hardware: Hardware, shape: ModelShape, seed: int, without_window: bool
) -> Experiment:
    """The levels of a measured experiment, simulated as they were measured.

    ``without_window``: the runs have no steady window.
    """
    levels = simulate(
        experiment.deployment,
        experiment.levels,
        experiment.workload,
        hardware,
        shape,
        seed=seed,
        prompts=experiment.prompts,
    )
    label = experiment.deployment.label
    return Experiment(
        name=f"{experiment.name} {PREDICTED}",
        manifest=Manifest(
            origin="simulated",
            label=label,
            deployment=experiment.deployment,
            gpus=experiment.deployment.gpus,
            workload=experiment.workload,
        ),
        runs=tuple(
            run.model_copy(update={"steady": None}) if without_window else run
            for run in (to_run(level, label, experiment.workload) for level in levels)
        ),
    )
