"""From a plan to a measurement: commands and configuration files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pdlab.core import defaults
from pdlab.core.catalog import load_cluster
from pdlab.core.command_lines import command_line, flag_words
from pdlab.core.commands import typed
from pdlab.core.deployment import Deployment
from pdlab.core.files import replace
from pdlab.core.rendering import rendered
from pdlab.core.schema import is_yaml_path, to_yaml
from pdlab.core.text import rounded
from pdlab.core.workload import Closed
from pdlab.placement.place import fits
from pdlab.plan import TEMPLATES
from pdlab.plan.engine_arguments import as_planned, by_hand, planned_words
from pdlab.plan.extrapolation import OutsideFit
from pdlab.plan.planner import Candidate, outside
from pdlab.plan.scenario import Scenario

ENGINE_SETTINGS = "max_num_batched_tokens, max_num_seqs, enable_prefix_caching"
APART = 1.2  # levels of a sweep differ by at least this factor


class Measurement(NamedTuple):
    """The commands that measure one candidate. ``outside``: the dimensions in which its prediction is extrapolated."""

    candidate: Candidate
    is_baseline: bool
    lines: list[str]
    outside: tuple[OutsideFit, ...]


def commands(
    best: Sequence[Candidate],
    scenario: Scenario,
    node: str | None,
    folder: Path | None = None,
    baseline: Candidate | None = None,
    plan_words: Sequence[str] = (),
    view: Mapping[str, Any] | None = None,
) -> str:
    """The commands to launch, sweep, plot and compare the best candidates.

    ``node``: the node type or the cluster file (None: the nodes are those of the tables). ``folder``: the
    configuration files of the candidates are written there (None: not at all). ``baseline``: the best collocated
    candidate, with which PD is compared. ``plan_words``: this plan's flags of model and hardware. ``view``:
    settings of viz.py for the plan's figures per GPU. Raises WriteError.
    """
    measured = [*best, *([baseline] if baseline is not None and baseline not in best else [])]
    folders = tuple(f"{defaults.RESULTS}/{candidate.deployment.label}" for candidate in measured)
    steps = []
    for candidate in measured:
        deployment, path = as_planned(candidate.deployment, scenario), None
        if folder is not None:
            path = str(folder / f"{deployment.label}.yaml")
            replace(Path(path), to_yaml(deployment.model_copy(update={"name": deployment.label})).encode())
        launch = planned_words(candidate.deployment, scenario, path)
        steps.append(
            Measurement(
                candidate=candidate,
                is_baseline=candidate is baseline,
                lines=[*_launches(candidate, launch, scenario, node), _sweep(candidate, scenario)],
                outside=outside(candidate, scenario),
            )
        )
    return rendered(
        TEMPLATES / "commands.txt",
        best=best,
        steps=steps,
        engine=scenario.hardware.engine,
        describe=typed("describe", "RESULTS"),
        by_hand=by_hand(scenario),
        engine_settings=ENGINE_SETTINGS,
        viz=command_line("viz", exps=folders, view=view),
        plan=typed("plan", *plan_words, *flag_words("plan", compare=folders)),
    )


def _launches(candidate: Candidate, words: Sequence[str], scenario: Scenario, node: str | None) -> Iterator[str]:
    """The dry run, if there are nodes for it, and the launch."""
    local = scenario.hardware.cpu
    cluster = cluster_for(candidate.deployment, node) if node and not local else None
    where = flag_words("launch", local=defaults.LOCAL_NODES if local else None)
    if cluster or local:
        yield typed("launch", *words, *where, *flag_words("launch", cluster=cluster, dry_run=True))
    yield typed("launch", *words, *where, *flag_words("launch", detach=True))


def _sweep(candidate: Candidate, scenario: Scenario) -> str:
    """Without simulated concurrencies, the plan's request rate is measured."""
    load: dict[str, Any] = {"type": "concurrency", "concurrency": tuple(sweep_levels(candidate))}
    if not load["concurrency"]:
        load = {"type": "request-rate", "request_rate": (rounded(candidate.outcomes[0].load.value, 4),)}
        if scenario.burstiness != 1:
            load["arrivals"] = {"burstiness": scenario.burstiness}
    if scenario.slo is not None and candidate.goodput_rps:
        start = {"start_rps": rounded(candidate.goodput_rps, 3)}
        load |= {"slo": scenario.slo.flag, "share": {"quantile": scenario.slo.quantile}, "search": start}
    return command_line("bench", name=candidate.deployment.label, **load, **scenario.workload.bench_fields)


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
        return node if fits(deployment, load_cluster(node)) else None
    slots = load_cluster(f"{node}-x1").nodes[0].total_slots
    least = max(2, -(-deployment.gpus // slots))
    names = (f"{node}-x{count}" for count in range(least, max(least, deployment.gpus) + 1))
    return next((name for name in names if fits(deployment, load_cluster(name))), None)
