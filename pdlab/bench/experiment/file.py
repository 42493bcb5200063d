"""A whole experiment as a file: deployments x workloads x loads x repeats (configs/sweeps/*.yaml).

Pure: a file becomes launcher settings, workloads and loads, checked before anything is started. docs/methodology.md
describes how an experiment runs.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from pdlab.bench.levels import check_names, per_gpu_loads
from pdlab.bench.options import LevelOptions, SearchOptions
from pdlab.bench.slo_search import SloSearchOptions, check_apart
from pdlab.bench.traffic import read_traffic, replayed
from pdlab.core import defaults
from pdlab.core.arguments import MAX_REPEATS
from pdlab.core.bounds import parse_bounds
from pdlab.core.catalog import find_config
from pdlab.core.deployment import Deployment, parse_label
from pdlab.core.errors import UsageError
from pdlab.core.lengths import relative_to_folder
from pdlab.core.request_lengths import check_request_fits, configured_length, length_for, short_pools
from pdlab.core.schema import Frozen, Incidental, load_yaml, validate
from pdlab.core.served_model import served_model
from pdlab.core.settings import FlagsOf, flag_names, flags_in_part, to_words
from pdlab.core.text import counted
from pdlab.core.workload import BURSTINESS, SLO_BOUNDS, Burstiness, Closed, Load, Open, Ramp, Replay, Slo, Workload
from pdlab.deploy.export_options import ExportOptions
from pdlab.deploy.options import (
    LaunchRequest,
    LaunchSettings,
    laid_over,
    request_from,
    request_to_json,
    topology_settings,
)

NAME = r"[A-Za-z0-9][A-Za-z0-9._+=-]{0,63}"
Knob = Literal["max_num_batched_tokens", "max_num_seqs", "enable_chunked_prefill", "enable_prefix_caching"]
# Around vLLM 0.29's own (8192 and 1024 on an H100): smaller steps for gaps, larger ones for prompts; fewer sequences
# for TPOT. It takes enable_chunked_prefill=false with a warning that answers may be wrong, so
# it is tried only if a file lists it.
GRID: dict[Knob, tuple[bool | int, ...]] = {
    "max_num_batched_tokens": (2048, 4096, 16384),
    "max_num_seqs": (64, 1024),
}
MOST_SETTINGS, TUNED_LOADS = 16, 4
# Seconds of a start, where neither the file nor earlier visits have them: measured on the local stack
# (docs/startup.md), and a guess for a 120b model on a cluster.
LOCAL_LAUNCH_S, CLUSTER_LAUNCH_S = 45.0, 300.0
DAY_S = 86_400.0


class ExperimentHosts(Frozen):
    """``local`` Ray nodes on this machine, or a ``cluster`` (auto, a file, a name of configs/clusters/)."""

    local: int | None = Field(default=None, ge=1)
    cluster: str | None = None

    @model_validator(mode="after")
    def _one(self) -> ExperimentHosts:
        if (self.local is None) == (self.cluster is None):
            raise ValueError("give either local (a number of nodes) or cluster (auto, a file, or a name)")
        return self


# The experiment itself sets where, on which port and how its entries are launched.
OF_AN_ENTRY = FlagsOf(
    LaunchSettings,
    leave_out=(
        *("config", "local", "cluster", "port", "wait", "detach", "timeout_s", "dry_run", "shutdown"),
        *("request_from_stdin", *ExportOptions.model_fields),
    ),
)


class Entry(Frozen):
    """One configuration to deploy: a ``label`` (collocated-4xtp2, pd-pack-p1xtp1-d1xtp1) or a ``config``
    (a name of configs/deployments/ or a path relative to the experiment's file), and what differs from it.

    ``name``: name of its results (default: the label). ``workloads`` restricts it to some of the experiment's workloads
    (default: all that fit). All other keys are flags of launch_gptoss.py, with underscores for dashes; ``launch`` has
    them as fields of `LaunchSettings`.
    """

    name: str | None = Field(default=None, pattern=f"^{NAME}$")
    label: str | None = None
    config: str | None = None
    workloads: tuple[str, ...] | None = None
    launch: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _flags(cls, data: Any) -> Any:
        return flags_in_part("launch", OF_AN_ENTRY, data, tuple(cls.model_fields))

    @property
    def engine_arguments(self) -> dict[str, Any]:
        """The entry's engine arguments of every pool."""
        given: dict[str, Any] = self.launch.get("deployment", {}).get("engine_kwargs", {})
        return given

    def with_engine_arguments(self, more: Mapping[str, Any]) -> Entry:
        """The entry with these engine arguments too."""
        if not more:
            return self
        launch = laid_over(self.launch, {"deployment": {"engine_kwargs": {**self.engine_arguments, **more}}})
        return self.model_copy(update={"launch": launch})

    @model_validator(mode="after")
    def _one(self) -> Entry:
        if (self.label is None) == (self.config is None):
            raise ValueError("give either label (such as pd-pack-p1xtp4-d1xtp4) or config (a deployment file)")
        return self


class NamedWorkload(Workload):
    """A workload of the experiment, with the experiment's seed; ``name`` is the end of its results' folder if there are
    several.
    """

    name: str = Field(default="mixed", pattern=f"^{NAME}$")

    @model_validator(mode="after")
    def _one_seed(self) -> NamedWorkload:
        if "seed" in self.model_fields_set:
            raise ValueError("seed: prompts are drawn from the experiment's own; give it there")
        return self

    def workload(self, seed: int) -> Workload:
        """As the sweep takes it."""
        # Lengths as they are: a dump of a file's leaves its pairs out.
        return Workload(**self.model_dump(exclude={"name", "seed", "lengths"}), lengths=self.lengths, seed=seed)


class SloSettings(SearchOptions):
    """A search for the highest rate under an SLO. The keys of its bounds are the flags of `Slo`."""

    slo: Slo

    @model_validator(mode="before")
    @classmethod
    def _keys(cls, data: Any) -> Any:
        return flags_in_part("slo", FlagsOf(Slo), data, tuple(SearchOptions.model_fields))

    @model_validator(mode="after")
    def _some_bound(self) -> SloSettings:
        if not self.slo.bounded:
            raise ValueError(f"give at least one bound: {', '.join(f'{name}_ms' for name in SLO_BOUNDS)}")
        return self


class LoadSettings(Frozen):
    """One group of loads: exactly one of the lists, or a search for an SLO's highest rate.

    ``concurrency_per_gpu`` times the deployment's GPUs (rounded, at least 1) compares deployments of
    different sizes at the same pressure. ``workloads`` restricts the group (default: all).
    """

    concurrency: tuple[int, ...] | None = None
    concurrency_per_gpu: tuple[float, ...] | None = None
    rate_rps: tuple[float, ...] | None = None
    ramp: tuple[Ramp, ...] | None = None
    slo: SloSettings | None = None
    burstiness: Burstiness = BURSTINESS
    workloads: tuple[str, ...] | None = None

    @model_validator(mode="after")
    def _one(self) -> LoadSettings:
        kinds = ("concurrency", "concurrency_per_gpu", "rate_rps", "ramp", "slo")
        kinds_set = [kind for kind in kinds if getattr(self, kind) is not None]
        if len(kinds_set) != 1:
            raise ValueError(f"give one of {', '.join(kinds)}, not {' and '.join(kinds_set) or 'none'}")
        values = getattr(self, kinds_set[0])
        if kinds_set[0] != "slo":
            if not values:
                raise ValueError(f"{kinds_set[0]} is empty")
            if len(set(values)) != len(values):
                raise ValueError(f"{kinds_set[0]} has a value twice; repeats measure a level again")
            if kinds_set[0] != "ramp" and not all(0 < value < math.inf for value in values):
                raise ValueError(f"{kinds_set[0]}: numbers above 0, got {list(values)}")
        if self.burstiness != 1.0 and kinds_set[0].startswith("concurrency"):
            raise ValueError("burstiness belongs to rate_rps and ramp")
        if any("burstiness" in ramp.model_fields_set for ramp in self.ramp or ()):
            raise ValueError("burstiness is of the whole group: give it beside ramp")
        return self

    def loads(self, gpus: int) -> tuple[Load, ...]:
        """The levels of this group on a deployment of that many GPUs (none for a search)."""
        if self.concurrency is not None:
            return tuple(Closed(concurrency=value) for value in self.concurrency)
        if self.concurrency_per_gpu is not None:
            return per_gpu_loads(self.concurrency_per_gpu, gpus)
        if self.rate_rps is not None:
            return tuple(Open(rate_rps=value, burstiness=self.burstiness) for value in self.rate_rps)
        ramps = self.ramp or ()
        return tuple(ramp.model_copy(update={"burstiness": self.burstiness}) for ramp in ramps)

    def search(self) -> SloSearchOptions | None:
        """The search of this group, if it is one. Raises UsageError."""
        if self.slo is None:
            return None
        return validate(SloSearchOptions, {**dict(self.slo), "burstiness": self.burstiness}, where="slo")


class TuneBaseline(Frozen):
    """A search for the engine settings of collocated deployments, before anything is compared with them.

    All combinations of ``grid``, and the settings of the file, are launched and measured ``repeats`` times under
    ``loads`` (default: up to `TUNED_LOADS` of the file's) of one ``workload`` (default: the first mixed one). The
    combination with the most output tokens/s within the bounds ``at`` (default: the first of the file's) wins.
    ``deployments``: names (default: all collocated ones that run the workload).
    """

    grid: dict[Knob, tuple[bool | int, ...]] = Field(default_factory=lambda: dict(GRID), min_length=1)
    at: str | None = None
    deployments: tuple[str, ...] | None = None
    workload: str | None = None
    loads: LoadSettings | None = None
    repeats: int = Field(default=1, ge=1, le=MAX_REPEATS)

    @model_validator(mode="after")
    def _bounded(self) -> TuneBaseline:
        for knob, values in self.grid.items():
            if not values or len(set(map(str, values))) != len(values):
                raise ValueError(f"grid.{knob}: give values, none of them twice")
        if self.at is not None:
            try:
                parse_bounds(self.at, "p50", "at:")
            except UsageError as error:
                raise ValueError(str(error)) from error
        if len(self.settings) > MOST_SETTINGS:
            raise ValueError(
                f"grid: has {counted(len(self.settings), 'combination')}, each a launch; at most {MOST_SETTINGS} are "
                "tried"
            )
        if self.loads is not None and (self.loads.slo is not None or self.loads.ramp is not None):
            raise ValueError("loads: give concurrency, concurrency_per_gpu or rate_rps")
        return self

    @property
    def settings(self) -> tuple[dict[str, bool | int], ...]:
        """All combinations with which engines can start: a batch must have room for one token of every sequence."""
        combined = itertools.product(*self.grid.values())
        every: Iterator[dict[str, bool | int]] = (dict(zip(self.grid, values, strict=True)) for values in combined)
        return tuple(
            setting
            for setting in every
            if setting.get("max_num_batched_tokens", math.inf) >= setting.get("max_num_seqs", 0)
        )


class ExpectedTimes(Frozen):
    """Only for the time estimate: seconds of a start, to the first token, and per output token; a day at most.

    ``ttft_s`` and ``tpot_s`` of a rehearsal are in simulated seconds, ``launch_s`` is in real ones."""

    launch_s: float | None = Field(default=None, gt=0, le=DAY_S)
    ttft_s: float = Field(default=0.5, gt=0, le=DAY_S)
    tpot_s: float = Field(default=0.02, gt=0, le=DAY_S)


class ExperimentFile(LevelOptions):
    """configs/sweeps/*.yaml: every deployment under every workload and load, ``repeats`` times.

    A workload of a ``file`` is replayed, and has no other load.

    Each repeat visits all deployments in a new order, drawn from ``seed`` (see `order`), and takes the levels of a
    visit in an order drawn in the same way: drift affects all configurations equally. ``at``: latency bounds within
    which viz.py names the deployment with the highest throughput (`pdlab.core.bounds`). ``tune_baseline``: see
    `TuneBaseline`. Changes of the repeats, of the estimates and of the questions to the results leave it the same
    experiment: these fields are marked as `pdlab.core.schema.Incidental`.
    """

    name: str = Field(pattern=f"^{NAME}$")
    description: Annotated[str | None, Incidental] = None
    where: ExperimentHosts
    deployments: tuple[Entry, ...] = Field(min_length=1)
    workloads: tuple[NamedWorkload, ...] = Field(min_length=1)
    loads: tuple[LoadSettings, ...] = ()
    repeats: Annotated[int, Incidental] = Field(default=3, ge=1, le=MAX_REPEATS)
    seed: int = Field(default=0, ge=0)
    at: Annotated[tuple[str, ...], Incidental] = ()
    tune_baseline: TuneBaseline | None = None
    launch_timeout_s: float = Field(default=1800.0, gt=0)
    expect: Annotated[ExpectedTimes, Incidental] = ExpectedTimes()

    def loads_of(self, workload: NamedWorkload) -> list[LoadSettings]:
        """The groups of loads that a workload has."""
        return [group for group in self.loads if workload.name in (group.workloads or (workload.name,))]

    @field_validator("workloads")
    @classmethod
    def _distinct(cls, value: tuple[NamedWorkload, ...]) -> tuple[NamedWorkload, ...]:
        names = [workload.name for workload in value]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two workloads are called {twice[0]}; give each a name")
        return value

    @field_validator("at")
    @classmethod
    def _bounds(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        parsed = []
        for text in value:
            try:
                parsed.append(parse_bounds(text, "p50", "at:"))
            except UsageError as error:
                raise ValueError(str(error)) from error
            if parsed.count(parsed[-1]) > 1:
                raise ValueError(f"at: {text} is there twice; keep one")
        return value

    @model_validator(mode="after")
    def _tuned_within_bounds(self) -> ExperimentFile:
        if self.tune_baseline is not None and self.tune_baseline.at is None and not self.at:
            raise ValueError(
                "tune_baseline: needs bounds within which most is best: give at: tpot_ms=12,ttft_p95_ms=2000 there"
            )
        return self

    @model_validator(mode="after")
    def _loads_of_what_is_not_replayed(self) -> ExperimentFile:
        replays = {workload.name for workload in self.workloads if replayed(workload) is not None}
        if not self.loads and len(replays) < len(self.workloads):
            raise ValueError("loads: is missing; only workloads that are replayed from a file have none")
        for name in sorted(replays & {name for group in self.loads for name in group.workloads or ()}):
            raise ValueError(
                f"loads: workload {name} is replayed, and its file sets the times of the requests; leave the workload "
                "out of loads"
            )
        return self

    @model_validator(mode="after")
    def _known_workloads(self) -> ExperimentFile:
        known = {workload.name for workload in self.workloads}
        for names in [entry.workloads for entry in self.deployments] + [group.workloads for group in self.loads]:
            for name in names or ():
                if name not in known:
                    raise ValueError(f"workloads: {name!r} is none of {', '.join(sorted(known))}")
        return self


class Configuration(Frozen):
    """A prepared entry: its launcher settings, the launch request that they give, and its workloads."""

    name: str
    settings: LaunchSettings
    request: LaunchRequest
    entry: Entry
    workloads: tuple[NamedWorkload, ...]

    @property
    def deployment(self) -> Deployment:
        return self.request.deployment


def load_experiment_file(name_or_path: str) -> tuple[ExperimentFile, Path]:
    """Read an experiment and where it was found: a path, or a name of configs/sweeps/. Raises UsageError.

    A file of lengths, and one to replay, may be named relative to it.
    """
    path = find_config("sweeps", name_or_path, "experiment")

    def with_files(data: Any) -> Any:
        workloads = data.get("workloads") if isinstance(data, dict) else None
        return (
            {**data, "workloads": [_compiled(relative_to_folder(w, path.parent), path.parent) for w in workloads]}
            if isinstance(workloads, list)
            else data
        )

    return load_yaml(path, ExperimentFile, with_files), path


def _compiled(workload: Any, folder: Path) -> Any:
    """A workload as read from a YAML file in ``folder``; one of a ``file`` as the lengths of what it replays."""
    if not isinstance(workload, dict) or not isinstance(workload.get("file"), str):
        return workload
    others = {name: value for name, value in workload.items() if name != "file"}
    if unused := sorted(others.keys() - {"name"}):
        raise UsageError(f"workloads: the file sets the requests; leave {unused[0]} out")
    return {**others, "lengths": read_traffic(folder / workload["file"])}


def configurations(file: ExperimentFile, path: Path) -> tuple[Configuration, ...]:
    """Every entry of the file as what will be launched, in the file's order.

    Raises UsageError for an entry that cannot be launched, two of one name, or one without a workload.
    """
    configurations_: list[Configuration] = []
    for number, entry in enumerate(file.deployments, start=1):
        try:
            settings = launch_settings(file, entry, path)
            request = _request(started(file, settings, defaults.PORT))
        except UsageError as error:
            raise UsageError(f"{path}: deployments.{number}: {error}") from error
        deployment = request.deployment
        name = entry.name or deployment.label
        if name in [other.name for other in configurations_]:
            raise UsageError(f"{path}: two deployments are called {name}; give each a name")
        mine = [w for w in file.workloads if fits(deployment, w) and w.name in (entry.workloads or (w.name,))]
        chosen = set(entry.workloads or ())
        if wrong := sorted(chosen - {w.name for w in mine}):
            needs = "decode_bench: true" if not deployment.decode_bench else "a workload of mode decode-only"
            raise UsageError(f"{path}: {name} cannot run workload {wrong[0]}: that takes {needs}")
        if not mine:
            raise UsageError(
                f"{path}: no workload fits {name}: decode-only runs only on deployments with decode_bench: true, "
                "and nothing else does there"
            )
        for workload in mine:
            _check_length(deployment, workload, f"{path}: {name}", cpu=file.where.local is not None)
        configurations_.append(
            Configuration(name=name, settings=settings, request=request, entry=entry, workloads=tuple(mine))
        )
    used = {workload.name for configuration in configurations_ for workload in configuration.workloads}
    for workload in file.workloads:
        if workload.name not in used:
            raise UsageError(f"{path}: no deployment runs workload {workload.name}")
    return tuple(configurations_)


def _check_length(deployment: Deployment, workload: NamedWorkload, where: str, *, cpu: bool) -> None:
    """Raises UsageError for requests that are longer than the engines take, as far as their length is known."""
    shape = served_model(deployment).shape
    if shape is not None:
        try:
            check_request_fits(shape, sum(workload.longest))
        except UsageError as error:
            raise UsageError(f"{where}: workload {workload.name} ({workload.label}): {error}") from error
    for role, limit, needed in sorted(short_pools(deployment, shape, workload, cpu=cpu), key=lambda each: -each[2]):
        fix = "make one of them fit the other"
        by_default = configured_length(deployment, deployment.pools[role], None, cpu=cpu) is None
        if by_default and (shape is None or sum(workload.longest) <= shape.max_context):
            fix = f"give the deployment max_model_len: {length_for(workload, shape)}, or shorten the requests"
        raise UsageError(
            f"{where}: the longest request of workload {workload.name} ({workload.label}) has {needed} tokens"
            f"{' in prefill' if role == 'prefill' else ''}, its max_model_len is {limit}: {fix}"
        )


def fits(deployment: Deployment, workload: NamedWorkload) -> bool:
    """Whether a workload fits a deployment: decode-only needs engines that fill KV cache, and other modes need engines
    that do not.
    """
    return deployment.decode_bench == (workload.mode == "decode-only")


def launch_settings(file: ExperimentFile, entry: Entry, path: Path) -> LaunchSettings:
    """The settings of the launcher for an entry, without --detach and the port. Raises UsageError."""
    own: dict[str, Any] = {}
    if entry.config is not None:
        beside_file = path.parent / entry.config
        own["config"] = str(beside_file) if beside_file.is_file() else entry.config
    else:
        assert entry.label is not None
        own |= topology_settings(parse_label(entry.label))
    if file.where.local is not None:
        own["local"] = file.where.local
    elif file.where.cluster != "auto":
        own["cluster"] = str(file.where.cluster)
    return validate(LaunchSettings, laid_over(own, entry.launch), where="the entry", names=flag_names(LaunchSettings))


def started(file: ExperimentFile, settings: LaunchSettings, port: int) -> LaunchSettings:
    """The settings of one start: those of its entry, and those of the experiment."""
    return settings.model_copy(update={"detach": True, "port": port, "timeout_s": file.launch_timeout_s})


def _request(settings: LaunchSettings) -> LaunchRequest:
    """Raises UsageError for what cannot be handed to the launcher."""
    request = request_from(settings, to_words(settings))
    request_to_json(request)
    return request


def order(file: ExperimentFile, names: tuple[str, ...]) -> tuple[tuple[int, str], ...]:
    """(repeat, deployment) in the order of measurement, drawn from the seed.

    Every repeat visits all deployments once (complete blocks). The orders of as many repeats as there
    are deployments are the rotations of one random order, themselves in random order: a Latin square, in
    which every deployment comes first, second and so on equally often.
    """
    rng = random.Random(f"order {file.seed}")
    visits: list[tuple[int, str]] = []
    base, turns = list(names), [0]
    for repeat in range(file.repeats):
        if repeat % len(names) == 0:
            rng.shuffle(base)
            turns = rng.sample(range(len(names)), len(names))
        turn = turns[repeat % len(names)]
        visits += [(repeat, name) for name in base[turn:] + base[:turn]]
    return tuple(visits)


def folder_name(configuration: Configuration, workload: NamedWorkload, file: ExperimentFile) -> str:
    """Folder of one configuration's levels under one workload, within the experiment's folder."""
    return configuration.name if len(file.workloads) == 1 else f"{configuration.name}-{workload.name}"


def loads_and_searches(
    file: ExperimentFile, configuration: Configuration, workload: NamedWorkload
) -> tuple[tuple[Load, ...], tuple[SloSearchOptions, ...]]:
    """The loads and searches of one configuration under one workload. Raises UsageError when there are
    none, when two have one name, and for what cannot share a folder (`check_apart`)."""
    if (lengths := replayed(workload)) is not None:
        return (Replay(speed=lengths.speed),), ()
    groups = file.loads_of(workload)
    loads = tuple(load for group in groups for load in group.loads(configuration.deployment.gpus))
    searches = tuple(search for group in groups if (search := group.search()))
    where = f"{configuration.name} under workload {workload.name}"
    if not loads and not searches:
        raise UsageError(f"no load applies to {where}; name it in the workloads of a group of loads")
    try:
        check_names(loads)
        check_apart(searches, loads)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error
    return loads, searches
