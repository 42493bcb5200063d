"""The dimensions in which a prediction is outside of the runs to which the step times were fitted. Pure.

The hardware file has the domain of its fit (`pdlab.sim.hardware.FitDomain`). All outputs of a plan use `outside_fit`.
The errors of a fit are not valid outside of it, so there is no interval and no verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from pdlab.core.catalog import known_gpu
from pdlab.core.deployment import Deployment
from pdlab.core.errors import UsageError
from pdlab.core.nodes import GpuLink, common_network
from pdlab.core.rendering import macro
from pdlab.core.text import version_numbers
from pdlab.core.workload import Closed, Load, Workload
from pdlab.plan import TEMPLATES
from pdlab.results.stated_platform import engine_of, engine_version, gpu_types
from pdlab.sim.argument_effects import unknown_effects
from pdlab.sim.hardware import Hardware
from pdlab.sim.kv_transfer import link_of

if TYPE_CHECKING:
    from pdlab.core.catalog import ModelShape
    from pdlab.results.schema import Experiment

Dimension = Literal[
    "no fit",
    "errors",
    "model",
    "GPU",
    "engine",
    "mode",
    "TP",
    "PP",
    "DP",
    "EP",
    "network",
    "GPU link",
    "speculation",
    "engine arguments",
    "input length",
    "output length",
    "load",
]
# Lengths and loads are inside up to a tenth beyond their range: prompts of 0.8 to 1.0 of 5,000 tokens have 4,500 on
# average. Lengths may be one token farther, for rounding.
SLACK = 0.1
LEAST_IN_FLIGHT = 1.0  # per GPU: a fit with such a load has engines with one request, and no load has fewer


class OutsideFit(NamedTuple):
    """A dimension in which a prediction is extrapolated. ``text``: its value beside that of the fit."""

    dimension: Dimension
    text: str


class Platform(NamedTuple):
    """The platform of a run. None: unknown. ``gpu``: GPU type as Ray names it, ``cpu`` for engines on CPUs.
    ``version``: major and minor version of the engine. ``network``: see `pdlab.core.nodes.common_network`."""

    gpu: str | None = None
    engine: str | None = None
    version: str | None = None
    network: str | None = None


UNKNOWN_PLATFORM = Platform()


def outside_fit(
    hardware: Hardware,
    model: ModelShape | str,
    deployment: Deployment | None = None,
    workloads: Sequence[Workload] = (),
    *,
    ran_on: Platform = UNKNOWN_PLATFORM,
    in_flight_per_gpu: Sequence[float] = (),
    kv_dtype: str | None = None,
) -> tuple[OutsideFit, ...]:
    """The dimensions in which a prediction is extrapolated; empty: it is within the fit. Arguments that are not given,
    and unknown parts of ``ran_on``, are not judged. ``model``: a name if its shape is not known. ``workloads``: each
    counts with its mean and its longest request.
    ``in_flight_per_gpu``: loads, see `pdlab.sim.hardware.FitDomain`. ``kv_dtype``: the simulated format of KV cache."""
    fit = hardware.fit
    given = unknown_effects(hardware, deployment, kv_dtype) if deployment is not None else ()
    others = [each for each in given if fit is None or each not in fit.engine_arguments]
    arguments = [OutsideFit("engine arguments", ", ".join(others))] if others else []
    levels = hardware.steps.correction.fitted_levels if hardware.steps is not None else 0
    if fit is None and hardware.steps is not None and not levels:
        return (OutsideFit("no fit", f"no measured run on {hardware.gpu} corrects the tables"), *arguments)
    if fit is None and levels:
        return (OutsideFit("no fit", f"{hardware.name} was changed after its levels were fitted"), *arguments)
    if fit is None:
        return (OutsideFit("no fit", f"{hardware.name} was never fitted, or was changed after its fit"), *arguments)
    found = arguments

    def add(dimension: Dimension, value: str, fitted: str) -> None:
        found.append(OutsideFit(dimension, f"{value} (fit: {fitted})"))

    if hardware.error is None and levels:
        why = "contradict its correction or are outside of its bands"
        found.append(OutsideFit("errors", f"the measured levels of {hardware.name} {why}"))
    elif hardware.error is None:
        found.append(OutsideFit("errors", f"the errors of {hardware.name} were not measured"))
    if other := fit.unlike_model(model):
        add("model", f"model {other}", fit.model)
    pools = list(deployment.pools.values()) if deployment is not None else []
    gpus = {ran_on.gpu, *(pool.gpu_type for pool in pools)} - {None, fit.gpu}
    if gpus:
        add("GPU", f"GPU {' and '.join(sorted(filter(None, gpus)))}", fit.gpu)
    engine = (ran_on.engine or fit.engine, ran_on.version or fit.version)
    if engine != (fit.engine, fit.version):
        add("engine", " ".join(engine), f"{fit.engine} {fit.version}")
    if deployment is not None and not _mode_is_fitted(deployment, fit.modes):
        add("mode", deployment.mode, ", ".join(fit.modes))
    if deployment is not None and packs_over_nodes(deployment, hardware):
        add("mode", f"a pack of {deployment.gpus} GPUs", f"packs within a node of {hardware.gpus_per_node}")
    degrees: tuple[tuple[Dimension, set[int], tuple[int, ...]], ...] = (
        ("TP", {pool.tp for pool in pools}, fit.tp),
        ("PP", {pool.pp for pool in pools}, fit.pp),
        ("DP", {pool.dp for pool in pools}, fit.dp),
    )
    for dimension, planned, fitted in degrees:
        if unlike := sorted(planned - set(fitted)):
            add(dimension, f"{dimension} {', '.join(map(str, unlike))}", ", ".join(map(str, fitted)))
    if any(pool.expert_parallel not in fit.expert_parallel for pool in pools):
        add("EP", "EP" if False in fit.expert_parallel else "no EP", "no EP" if False in fit.expert_parallel else "EP")
    network = network_of(deployment, ran_on.network, hardware.gpus_per_node) if deployment is not None else None
    if network is not None and fit.networks and network not in fit.networks:
        add("network", f"network {network}", ", ".join(fit.networks))
    if deployment is not None and (link := unlike_gpu_link(hardware, deployment)) is not None:
        add("GPU link", f"GPU link {link.nodes}", link.steps)
    if hardware.speculation is not None:
        add("speculation", "speculative decoding", "none")
    lengths = [pair for workload in workloads for pair in (workload.mean_tokens, workload.longest)]
    sides: tuple[tuple[Dimension, list[float], tuple[int, int]], ...] = (
        ("input length", [pair[0] for pair in lengths], fit.input_tokens),
        ("output length", [pair[1] for pair in lengths], fit.output_tokens),
    )
    for dimension, tokens, ends in sides:
        beyond = [each for each in tokens if not _within(each, ends, rounding=1)]
        if beyond:
            add(dimension, f"{dimension} {max(beyond):.0f}", _ends(ends))
    least, most = fit.in_flight_per_gpu
    loads = [each for each in in_flight_per_gpu if not _within(each, (least if least > LEAST_IN_FLIGHT else 0.0, most))]
    if loads:
        add("load", f"{max(loads):.3g} requests in flight per GPU", _ends(fit.in_flight_per_gpu))
    return tuple(found)


class UnlikeGpuLink(NamedTuple):
    """The link between the GPUs of the planned nodes, and that of the GPUs on which the step times were measured."""

    nodes: GpuLink
    steps: GpuLink


def unlike_gpu_link(hardware: Hardware, deployment: Deployment) -> UnlikeGpuLink | None:
    """The two links if they differ and the ranks of an engine, or KV cache, cross them; else None. None too if one of
    them is unknown."""
    moves_kv = deployment.mode in ("pd-pack", "pd-fluid")
    for pool in deployment.pools.values():
        own = hardware.typed(pool)
        known = known_gpu(own.gpu_type)
        steps = (own.fit.gpu_link if own.fit is not None else None) or (known.link if known is not None else None)
        nodes = own.wires.gpu_link if own.wires is not None else None
        if steps and nodes and nodes != steps and (moves_kv or pool.tp > 1 or pool.expert_parallel):
            return UnlikeGpuLink(nodes, steps)
    return None


def packs_over_nodes(deployment: Deployment, hardware: Hardware) -> bool:
    """Whether prefill and decode are packed on one node that cannot hold them."""
    return deployment.mode == "pd-pack" and deployment.gpus > hardware.gpus_per_node


def outside_text(outside: Sequence[OutsideFit]) -> str:
    """One line: ``extrapolated: model gpt-oss-20b (fit: gpt-oss-120b), EP (fit: no EP)``; empty if it is inside."""
    return macro(TEMPLATES / "words.txt", "extrapolated", outside) if outside else ""


def _mode_is_fitted(deployment: Deployment, modes: Sequence[str]) -> bool:
    """Whether the mode is one of the fit. The engines of fluid roles are those of PD, in a pack or a spread."""
    if deployment.mode == "pd-fluid":
        return any(mode.startswith("pd-") for mode in modes)
    return deployment.mode in modes


def _within(value: float, ends: tuple[float, float], rounding: float = 0) -> bool:
    return ends[0] * (1 - SLACK) - rounding <= value <= ends[1] * (1 + SLACK) + rounding


def _ends(ends: tuple[float, float]) -> str:
    low, high = (f"{end:g}" for end in ends)
    return low if low == high else f"{low} to {high}"


def network_of(deployment: Deployment, network: str | None, node_gpus: int) -> str | None:
    """The network that KV cache crosses between the nodes of a deployment; None: there is none, or it is unknown.
    ``network``: of the nodes, see `Platform`. ``node_gpus``: the GPUs of a node, over which a fluid pool may span."""
    fluid_over_nodes = deployment.mode == "pd-fluid" and deployment.gpus > node_gpus
    if deployment.mode != "pd-spread" and not fluid_over_nodes:
        return None
    return "tcp" if link_of(deployment) == "tcp" else network


def in_flight_per_gpu(load: Load, gpus: int, requests_per_s: float, e2el_s: float) -> float:
    """Requests in flight per GPU: for a closed loop its concurrency, for an open loop the mean by Little's law."""
    in_flight = load.concurrency if isinstance(load, Closed) else requests_per_s * e2el_s
    return in_flight / gpus


def major_minor(version: str) -> str | None:
    """Major and minor version: ``0.29`` for ``0.29.0+cpu``; None for text that does not begin with two numbers."""
    numbers = version_numbers(version)
    return f"{numbers[0]}.{numbers[1]}" if numbers else None


def ran_on(experiment: Experiment) -> Platform:
    """The platform that an experiment records, or that its files state.

    Raises UsageError if its engines ran on GPUs of several types.
    """
    from pdlab.analysis.curves import gpus_of

    manifest = experiment.manifest
    version = major_minor(engine_version(experiment) or "")
    gpu: str | None = None
    nodes = manifest.cluster.engine_nodes if manifest.cluster is not None else ()
    network = common_network(nodes) if nodes else None
    if gpus_of(experiment).device == "cpu":
        gpu = "cpu"
    else:
        types = gpu_types(manifest)
        if len(types) > 1:
            raise UsageError(f"{experiment.name}: ran on {' and '.join(sorted(types))}; step times are of one GPU type")
        gpu = next(iter(types), None)
    return Platform(gpu, engine_of(experiment) if version else None, version, network)
