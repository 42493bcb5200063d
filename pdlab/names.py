"""How experiments are called where several stand side by side: short, unique, saying what differs."""

from __future__ import annotations

from collections.abc import Sequence

from pdlab.results import Experiment
from pdlab.spec import Deployment, Disaggregated, Pool


def short_labels(experiments: Sequence[Experiment]) -> list[str]:
    """One short unique label each: the configuration; where several share it, their workload or name too."""
    short = [_configuration(e.manifest.deployment) if e.manifest.deployment else e.name for e in experiments]
    labels: list[str] = []
    for experiment, label in zip(experiments, short, strict=True):
        namesakes = [e for e, other in zip(experiments, short, strict=True) if other == label]
        if len(namesakes) > 1:
            if len({workload_name(e) for e in namesakes}) == len(namesakes):
                own = workload_name(experiment)
            else:
                common = set(_words(namesakes[0].name)).intersection(*(_words(e.name) for e in namesakes))
                own = " ".join(word for word in _words(experiment.name) if word not in common)
            label = f"{label} ({own})" if own else label
        copies = sum(other == label or other.startswith(f"{label} #") for other in labels)
        labels.append(f"{label} #{copies + 1}" if copies else label)
    return labels


def _words(name: str) -> list[str]:
    return name.replace("-", "_").split("_")


def _configuration(deployment: Deployment) -> str:
    """``P1xTP4 D2xTP2 spread`` or ``4xTP2 collocated``."""
    topology = deployment.topology
    if isinstance(topology, Disaggregated):
        return f"P{_pool(topology.prefill)} D{_pool(topology.decode)} {topology.placement}"
    return f"{_pool(topology.pool)} collocated"


def _pool(pool: Pool) -> str:
    return pool.label.upper().replace("X", "x", 1)


def workload_name(experiment: Experiment) -> str:
    found = dict.fromkeys(
        f"{run.workload.sent_input_tokens}:{run.workload.sent_output_tokens}"
        + ("" if run.workload.mode == "mixed" else f" {run.workload.mode}")
        for run in experiment.runs
    )
    return ", ".join(found)
