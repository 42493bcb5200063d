"""Hardware files of configs/catalog/: calibrated constants, each with its source and basis."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from pydantic import Field, model_validator

from pdlab.core.catalog import ModelNumbers, ModelShape, find_config, gpu_name, known_gpus, load_model
from pdlab.core.deployment import Deployment, Disaggregated, Mode, Pool, Transport
from pdlab.core.errors import UsageError
from pdlab.core.hybrid_kv import connectors_of, is_hybrid
from pdlab.core.nodes import GpuLink, WireKind
from pdlab.core.normal_errors import TO_SD
from pdlab.core.schema import Frozen, load_yaml
from pdlab.core.text import choices, counted, version_numbers
from pdlab.core.vllm_limits import default_utilization
from pdlab.sim.engine_host import DirectRouting, host_of, is_asynchronous
from pdlab.sim.step_source import NO_CORRECTION, Correction

TableMode = Literal["SILICON", "HYBRID", "EMPIRICAL", "SOL"]
ConstantBasis = Literal["roofline", "fitted", "measured", "published", "assumed"]


class Constant(Frozen):
    """One number with its source; ``relative_error`` is its standard error (None: unknown)."""

    value: float
    unit: str
    basis: ConstantBasis
    source: str
    relative_error: float | None = Field(default=None, ge=0)


class ErrorParts(Frozen):
    """Errors of one metric on runs left out of a fit, as standard deviations of logarithms in percent: ``common`` to
    the levels of a configuration, and of one ``level`` beyond what its prediction knows
    (`pdlab.plan.prediction_intervals`). ``fixed_ms``: further of a level, as a time, whatever the figure is."""

    common_percent: float = Field(ge=0)
    level_percent: float = Field(ge=0)
    fixed_ms: float = Field(default=0.0, ge=0)


class PercentErrors(NamedTuple):
    """The median error on held-out points, and the median difference between days."""

    held_out: float
    days: float


class FitError(Frozen):
    """Median absolute percentage errors over the held-out points of a cross-validation; ``..._days_percent``: median
    difference of two measurements of one configuration on different days (0: not known). ``parts``: of what the errors
    are made, by metric (TPOT, mean TTFT, requests/s), where that is known."""

    tpot_percent: float
    ttft_percent: float
    requests_per_s_percent: float
    points: int
    how: str
    tpot_days_percent: float = 0.0
    ttft_days_percent: float = 0.0
    requests_per_s_days_percent: float = 0.0
    parts: dict[str, ErrorParts] = Field(default_factory=dict)

    def percent(self, metric: str) -> PercentErrors:
        """Those of TPOT, mean TTFT or requests/s."""
        return {
            "TPOT": PercentErrors(self.tpot_percent, self.tpot_days_percent),
            "mean TTFT": PercentErrors(self.ttft_percent, self.ttft_days_percent),
            "requests/s": PercentErrors(self.requests_per_s_percent, self.requests_per_s_days_percent),
        }[metric]


class FitDomain(Frozen):
    """The range of the runs of a fit; outside of it a prediction is extrapolated (`pdlab.plan.extrapolation`).

    ``model``: its name. ``numbers``, ``formats``: its identity, see `pdlab.core.catalog.ModelShape` (None: those of the
    name in configs/models/). ``gpu``: the GPU type as Ray names it, ``cpu`` for engines on CPUs.
    ``version``: major and minor version of the ``engine``. ``modes``, ``tp``, ``pp``, ``dp``, ``expert_parallel``: of
    the deployments. ``networks``: kinds of NIC by which KV cache crossed between nodes, or "tcp" where UCX was held to
    TCP or the kinds differ (empty: not known). ``gpu_link``: between the GPUs of a node (None: that of the GPU type).
    ``input_tokens``, ``output_tokens``: smallest and largest number of a request. ``in_flight_per_gpu``: smallest and
    largest number of requests in flight, over the GPUs of the deployment; for an open loop the mean.
    ``engine_arguments``: those of the runs that `pdlab.sim.argument_effects.unknown_effects` names.
    ``digest``: `digest_of` the file that the fit wrote.
    """

    model: str
    numbers: ModelNumbers | None = None
    formats: tuple[str, str, str, str] | None = None
    gpu: str
    engine: str = "vllm"
    version: str
    modes: tuple[Mode, ...]
    tp: tuple[int, ...]
    pp: tuple[int, ...] = (1,)
    dp: tuple[int, ...] = (1,)
    expert_parallel: tuple[bool, ...] = (False,)
    networks: tuple[str, ...] = ()
    gpu_link: GpuLink | None = None
    input_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    in_flight_per_gpu: tuple[float, float]
    engine_arguments: tuple[str, ...] = ()
    digest: str = ""

    def unlike_model(self, model: ModelShape | str) -> str:
        """In what a model differs from the fitted one: its name, or what else differs where the names are equal; empty:
        it is that model, by its numbers and formats. The names decide where the numbers of either are not known.
        ``model``: a name, if its shape is not known."""
        shape = load_model(model) if isinstance(model, str) else model
        name = model if isinstance(model, str) else model.name
        fitted = load_model(self.model) if self.numbers is None else None
        numbers = self.numbers or (fitted.numbers if fitted is not None else None)
        formats = self.formats or (fitted.formats if fitted is not None else None)
        if shape is None or numbers is None:
            return name if name != self.model else ""
        if (numbers, formats or shape.formats) == (shape.numbers, shape.formats):
            return ""
        if name != self.model:
            return name
        return f"{name} with {'other formats' if numbers == shape.numbers else 'other numbers'}"

    def joined(self, earlier: FitDomain) -> FitDomain:
        """The range of these runs and of the runs of an earlier fit to the same stack."""
        sets = ("modes", "tp", "pp", "dp", "expert_parallel", "networks", "engine_arguments")
        ranges = ("input_tokens", "output_tokens", "in_flight_per_gpu")
        both = {each: (*getattr(earlier, each), *getattr(self, each)) for each in (*sets, *ranges)}
        joined = {each: tuple(sorted(set(both[each]))) for each in sets}
        return self.model_copy(update={**joined, **{each: (min(both[each]), max(both[each])) for each in ranges}})


class StepTables(Frozen):
    """The source of step times that were not fitted: tables of a performance database.

    ``system``: the database's name of the GPU. ``version``: version of the tables, one that the database has, or
    ``current``. ``engine_version``: major and minor version of the planned engine (None: that of the tables). ``mode``:
    SILICON, measured tables of this GPU only; HYBRID fills what is missing from other GPUs and quantisations; EMPIRICAL
    and SOL calculate all of it. ``quant``: the database's names of the formats, by ``gemm``, ``moe``, ``kvcache`` and
    ``fmha`` (those not given: as the model's config.json says). ``correction``: a correction of the tables by measured
    levels, or by earlier versions of the engine.
    """

    source: Literal["aic"] = "aic"
    system: str
    engine: Literal["vllm", "sglang", "trtllm"] = "vllm"
    version: str = "current"
    engine_version: str | None = None
    mode: TableMode = "SILICON"
    quant: dict[Literal["gemm", "moe", "kvcache", "fmha"], str] = Field(default_factory=dict)
    correction: Correction = NO_CORRECTION


class Speculation(Frozen):
    """Speculative decoding: in a step every sequence gets ``acceptance_length`` tokens on average (1: no guessed token
    is accepted), from ``draft_tokens`` guessed tokens and one more. The time to guess is not counted.
    """

    acceptance_length: float = Field(ge=1)
    draft_tokens: int = Field(ge=1)

    @model_validator(mode="after")
    def _within_the_draft(self) -> Speculation:
        if self.acceptance_length > self.draft_tokens + 1:
            raise ValueError(
                f"{counted(self.acceptance_length, 'token')} per step are more than {self.draft_tokens} guessed and one"
            )
        return self


class Apart(Frozen):
    """What engines that only prefill and only decode have in place of the other values: the correction of the tables,
    and the constant ``pd_overhead_ms``."""

    correction: Correction
    pd_overhead_ms: float = Field(ge=0)


class NodeWires(Frozen):
    """The wires of the planned nodes. ``gpu_link``: between the GPUs of a node (None: that of the GPU type).
    ``network``: between nodes. ``node_gb_per_s``: line rate of all NICs of the slowest node, in one direction (None:
    unknown)."""

    gpu_link: GpuLink | None = None
    network: WireKind = "efa"
    node_gb_per_s: float | None = Field(default=None, gt=0)


class Hardware(Frozen):
    """One kind of GPU (or CPU) with one serving stack: constants by name.

    ``gpu`` describes the GPU, ``gpu_type`` is its type as Ray names it (None: engines on CPUs). ``fit``: the range of
    the fit of the constants; None: they are not the result of a fit, and ``error`` is None too. ``steps``: tables of
    step times, which replace the constants of a step. ``speculation``: that of its engines (None: none). ``beside``:
    other GPU types of the same cluster; a pool of such a type has their step times and memory. ``direct``: the routing
    of engines without Ray (None: Ray routes). ``apart``: values of P:D engines (None: the same as of others).
    ``hybrid_kv``: layers with sliding attention keep only their window; with tables, of engines without a KV connector.
    ``wires``: of the planned nodes (None: the network of the constants, and the link of the GPU type).
    """

    name: str
    gpu: str
    gpu_type: str | None = None
    gpus_per_node: int = Field(ge=1)
    stack: str
    cpu: bool = False  # engines of --local; a rank stands for a GPU
    hybrid_kv: bool = False
    block_tokens: int = Field(default=16, ge=1)
    step_tokens: int = Field(default=8192, ge=1)
    fitted_on: tuple[str, ...] = ()
    fit: FitDomain | None = None
    steps: StepTables | None = None
    speculation: Speculation | None = None
    direct: DirectRouting | None = None
    apart: Apart | None = None
    wires: NodeWires | None = None
    beside: tuple[Hardware, ...] = ()
    constants: dict[str, Constant]
    error: FitError | None = None

    @property
    def types(self) -> tuple[Hardware, ...]:
        """The hardware of every GPU type, this one first."""
        return (self, *self.beside)

    @property
    def common_node_gpus(self) -> int | None:
        """The GPUs of every node; None: nodes of the GPU types differ in size, so nothing is defined per node."""
        sizes = {each.gpus_per_node for each in self.types}
        return self.gpus_per_node if len(sizes) == 1 else None

    def typed(self, pool: Pool) -> Hardware:
        """The hardware of the pool's GPU type."""
        return next((each for each in self.beside if each.gpu_type == pool.gpu_type), self)

    def of(self, pool: Pool) -> Hardware:
        """The hardware of the pool's GPU type, with the engine arguments of the pool."""
        own = self.typed(pool)
        return own.with_arguments(pool.engine_kwargs) if pool.engine_kwargs else own

    def with_arguments(self, arguments: Mapping[str, Any]) -> Hardware:
        """The hardware of engines with these arguments of vLLM: the largest step, the share of the memory, the number
        of steps in flight, and whether windows are kept alone."""
        made = self
        if self.hybrid_kv and not is_hybrid(arguments):
            made = made.model_copy(update={"hybrid_kv": False})
        if (tokens := arguments.get("max_num_batched_tokens")) is not None:
            made = made.model_copy(update={"step_tokens": int(tokens)})
        # Engines on CPUs have memory of their own for the KV cache.
        if not self.cpu and (share := arguments.get("gpu_memory_utilization")) is not None:
            made = made.with_values({"memory_utilization": float(share)})
        steps = self.scheduled_by(arguments)
        if steps == self.steps_in_flight:
            return made
        made = made.with_values({"steps_in_flight": steps})
        if made.steps is None:
            return made
        host, version = host_of(made.engine), made.steps.engine_version or made.steps.version
        added_us = host.sequence_us(version, steps > 1) - host.sequence_us(version, self.steps_in_flight > 1)
        correction = made.steps.correction
        changed = correction.model_copy(update={"sequence_us": correction.sequence_us + added_us})
        return made.model_copy(update={"steps": made.steps.model_copy(update={"correction": changed})})

    def scheduled_by(self, arguments: Mapping[str, Any]) -> int:
        """`steps_in_flight` of engines with these arguments. ``async_scheduling`` changes it, unless the constants were
        fitted without it."""
        given = arguments.get("async_scheduling")
        if given is None or not self.steps_in_flight:
            return self.steps_in_flight
        return 2 if given else 1

    @property
    def engine(self) -> str:
        """The engine of the step times: vllm, sglang or trtllm."""
        if self.steps is not None:
            return self.steps.engine
        return self.fit.engine if self.fit is not None else "vllm"

    @property
    def engine_version(self) -> str | None:
        """Major and minor version of the engine; None: the runs of the fit are unknown."""
        if self.steps is not None:
            return self.steps.engine_version or ".".join(self.steps.version.split(".")[:2])
        return self.fit.version if self.fit is not None else None

    def value(self, name: str) -> float:
        """Raises UsageError when the file has no such constant."""
        try:
            return self.constants[name].value
        except KeyError as error:
            raise UsageError(f"hardware {self.name}: constant {name!r} is missing; known are {_names(self)}") from error

    @property
    def steps_in_flight(self) -> int:
        """`pdlab.sim.engine.Engine.steps_in_flight`; 0 if the file does not have it, because its constants were fitted
        without it.
        """
        constant = self.constants.get("steps_in_flight")
        return round(constant.value) if constant is not None else 0

    @property
    def routers_count_ends(self) -> bool:
        """Whether Ray Serve routes as since 2.55 (`routers_count_ends`); False if the file does not say so, because its
        runs were of an earlier Ray, or its constants were fitted with that routing."""
        constant = self.constants.get("routers_count_ends")
        return constant is not None and constant.value > 0

    def with_ray(self, version: str | None) -> Hardware:
        """The same hardware with the routing of that version of Ray (None: unknown). Engines without Ray stay as they
        are."""
        if version is None or version_numbers(version) is None or self.direct is not None:
            return self
        routing = routers_count_ends(version)
        if self.routers_count_ends == bool(routing.value):
            return self
        return self.model_copy(update={"constants": self.constants | {"routers_count_ends": routing}})

    def with_values(self, values: Mapping[str, float]) -> Hardware:
        """The same hardware with some constants replaced (their basis stays)."""
        changed = {name: self.constants[name].model_copy(update={"value": value}) for name, value in values.items()}
        return self.model_copy(update={"constants": self.constants | changed})

    def with_correction(self, correction: Correction) -> Hardware:
        """The same hardware, whose steps are tables, with that correction of them for all engines."""
        assert self.steps is not None
        steps = self.steps.model_copy(update={"correction": correction})
        return self.model_copy(update={"steps": steps, "apart": None})

    def serving(self, deployment: Deployment) -> Hardware:
        """The hardware with the values of that deployment's engines."""
        made = self.of_pd() if isinstance(deployment.topology, Disaggregated) else self
        return made.beside_connectors(connectors_of(deployment))

    def beside_connectors(self, connectors: Sequence[str]) -> Hardware:
        """The hardware of engines with these KV connectors. What was fitted stays."""
        if self.steps is None or not self.hybrid_kv:
            return self
        hybrid = is_hybrid({}, connectors, self.steps.engine_version or self.steps.version)
        return self if hybrid else self.model_copy(update={"hybrid_kv": False})

    def of_pd(self) -> Hardware:
        """The hardware with the values of P:D engines."""
        made = self.beside_connectors((Transport().connector,))
        if self.beside:
            made = made.model_copy(update={"beside": tuple(each.of_pd() for each in self.beside)})
        if self.apart is None:
            return made
        return made.with_values({"pd_overhead_ms": self.apart.pd_overhead_ms}).with_correction(self.apart.correction)

    def with_speculation(self, speculation: Speculation) -> Hardware:
        """The same hardware, with speculative decoding by the engines of every GPU type."""
        others = tuple(each.with_speculation(speculation) for each in self.beside)
        return self.model_copy(update={"speculation": speculation, "beside": others})


STEPS_UNIT = "steps that the engine core has launched at once"


def steps_in_flight(version: str) -> Constant:
    """The default `Hardware.steps_in_flight` of that version of vLLM (major and minor) on GPUs."""
    asynchronous = is_asynchronous(version)
    return Constant(
        value=2 if asynchronous else 1,
        unit=STEPS_UNIT,
        basis="published",
        source=f"vLLM {version} schedules {'asynchronously' if asynchronous else 'one step at a time'} by default",
    )


def memory_utilization(version: str) -> Constant:
    """The share of a GPU's memory that engines of that version of vLLM (major and minor) take by default."""
    return Constant(
        value=default_utilization(version),
        unit="share",
        basis="published",
        source=f"vLLM {version} default gpu_memory_utilization",
    )


def routers_count_ends(ray_version: str) -> Constant:
    """The `Hardware.routers_count_ends` of that version of Ray. Since 2.55 a router counts down when a request of its
    own ends (decrement_queue_len_cache of its request router). In P:D it then chooses the decode replica,
    which calls prefill (pd_server.py of Ray Serve LLM; 2.54 had a proxy that chose both)."""
    return _counting((version_numbers(ray_version) or (0, 0)) >= (2, 55), f"Ray {ray_version}; since 2.55")


def routers_beside(vllm_version: str) -> Constant:
    """The same of the newest Ray for that version of vLLM: Ray Serve LLM 2.55 and later require vLLM 0.18 or later, and
    2.54 requires 0.15 (their wheels' metadata)."""
    newer = (version_numbers(vllm_version) or (0, 0)) >= (0, 18)
    return _counting(newer, f"vLLM {vllm_version}: Ray {'2.55 or later' if newer else '2.54 or earlier'}")


def _counting(counts: bool, source: str) -> Constant:
    unit = "1: routers count the ends of their requests, and in P:D decode calls prefill; 0: neither"
    return Constant(value=1 if counts else 0, unit=unit, basis="published", source=source)


def _names(hardware: Hardware) -> str:
    return ", ".join(sorted(hardware.constants))


LATER_FIELDS = ("engine_arguments", "numbers", "formats", "gpu_link")


def digest_of(hardware: Hardware) -> str:
    """A digest of a fit, and of everything that changes a prediction; without names of files and sources of
    constants."""
    kept = {"gpu", "gpu_type", "gpus_per_node", "stack", "cpu", "hybrid_kv", "block_tokens", "step_tokens", "steps"}
    kept |= {"error", "wires"}
    data = hardware.model_dump(mode="json", exclude_defaults=True, include=kept)
    fit = hardware.fit
    # A field that older files lack does not change their digest.
    left_out = {"digest", *(each for each in LATER_FIELDS if fit and not getattr(fit, each))}
    data["fit"] = fit.model_dump(mode="json", exclude=left_out) if fit else None
    data["constants"] = {name: constant.value for name, constant in hardware.constants.items()}
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def signed(hardware: Hardware, fit: FitDomain) -> Hardware:
    """The hardware as the result of that fit."""
    fitted = hardware.model_copy(update={"fit": fit})
    return fitted.model_copy(update={"fit": fit.model_copy(update={"digest": digest_of(fitted)})})


def load_hardware(name_or_path: str, others: Mapping[str, Sequence[str]] = MappingProxyType({})) -> Hardware:
    """A file of configs/catalog/ by name, or a YAML file. It has no ``fit`` and no ``error`` if it was changed after
    the fit. ``others``: other values that the caller accepts, with examples, for the message. Raises UsageError."""
    hardware = load_yaml(find_config("catalog", name_or_path, "hardware", others), Hardware)
    systems = sorted({each.step_tables for each in known_gpus().values() if each.step_tables})
    if hardware.steps is not None and hardware.steps.system not in systems:
        system = hardware.steps.system
        raise UsageError(f"{name_or_path}: steps.system {system}: no GPU of configs/gpus/; {choices(system, systems)}")
    if hardware.fit is None or hardware.fit.digest != digest_of(hardware):
        hardware = hardware.model_copy(update={"fit": None, "error": None})
    if hardware.gpu_type is not None:
        hardware = hardware.model_copy(update={"gpu_type": gpu_name(hardware.gpu_type)})
    steps = hardware.steps
    if steps is None or steps.engine != "vllm" or "hybrid_kv" in hardware.model_fields_set:
        return hardware
    # With tables windows are the engine's, and not of a fit; files of older versions of pdlab lack them.
    return hardware.model_copy(update={"hybrid_kv": is_hybrid({}, version=steps.engine_version or steps.version)})


TO_90 = TO_SD * 1.6449  # -> 90 % of cases
