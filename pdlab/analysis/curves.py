"""From runs to comparable figures: means over repeats, GPUs by role, normalisation, names, cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Literal, NamedTuple, get_args

from pydantic import Field, InstanceOf

from pdlab.analysis.intervals import MIN_BEYOND, SURE_BEYOND, Estimate, carried, is_tail, of_repeats
from pdlab.analysis.requests import Requests, judged
from pdlab.analysis.shrinkage import RepeatStudy
from pdlab.analysis.ttft_breakdown import TtftSplit, mean_split, split
from pdlab.analysis.view import GPUS_PER_NODE, CountedRole, ThroughputMetric, View
from pdlab.core.bounds import METRICS, Metric
from pdlab.core.deployment import Deployment, Disaggregated, Fluid, Pool
from pdlab.core.errors import StoreError
from pdlab.core.gpu_count import DEFAULT_COUNT, Count
from pdlab.core.schema import Frozen
from pdlab.core.workload import LoadKind, RunKey, Workload
from pdlab.results.schema import Experiment, Manifest, Origin, Run, SloSearch, Summary, Tuning
from pdlab.results.stated_platform import CPU, GPU

Rate = Literal["requests", "output", "input", "total"]
RequestsOf = Mapping[RunKey, Requests]

UNKNOWN_MODEL = "unknown"  # of a published folder whose files name none
UNKNOWN_LENGTHS = "unknown"  # of one in which no request was answered, and whose names give no lengths


class Gpus(Frozen):
    """What an experiment ran on. On a CPU cluster the unit is an engine rank, the slot of one GPU.

    ``prefill`` and ``decode``: None for a collocated deployment and for unknown roles. ``node``: GPUs of one node.
    ``whole``: GPUs of the fewest whole nodes that hold it, per copy if filled with copies; None: those in use (ranks on
    CPUs, or not computed).
    """

    total: int = Field(ge=1)
    node: int = Field(default=GPUS_PER_NODE, ge=1)
    whole: float | None = Field(default=None, gt=0)
    prefill: int | None = None
    decode: int | None = None
    device: Literal["gpu", "cpu"] = "gpu"

    def of(self, role: CountedRole) -> int | None:
        """GPUs of that role, all of them for ``all``; None if the role is unknown."""
        return {"all": self.total, "prefill": self.prefill, "decode": self.decode}[role]

    def counted(self, count: Count) -> float:
        """The number by which the whole deployment is divided."""
        return self.total if count == "used" or self.whole is None else self.whole

    @property
    def unit(self) -> str:
        return "GPU" if self.device == "gpu" else "engine rank"


class Figures(Frozen):
    """Figures of one level, of the whole deployment, not normalised.

    ``latency_ms``: metric -> statistic -> ms, of what is known.
    """

    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    latency_ms: dict[Metric, dict[str, float]] = Field(default_factory=dict)

    def tokens_per_s(self, metric: ThroughputMetric) -> float:
        if metric == "total":
            return self.input_tokens_per_s + self.output_tokens_per_s
        return self.input_tokens_per_s if metric == "input" else self.output_tokens_per_s

    def ms(self, metric: Metric, statistic: str) -> float | None:
        """That statistic of that latency; None if unknown."""
        return self.latency_ms.get(metric, {}).get(statistic)

    def latency(self, view: View) -> float | None:
        """The value on the latency axis: ms, or tokens/s per user; None if unknown.

        A chunk is its first token and chunk_size - 1 more: (chunk_size - 1) * TPOT + TTFT, of the same statistic each
        (the p90 of a sum is not the sum of p90s: see docs/metrics.md).
        """
        tpot, ttft = self.ms("tpot", view.statistic), self.ms("ttft", view.statistic)
        if view.use_interactivity:
            return 1000 / tpot if tpot else None
        if view.latency_mode == "token":
            return tpot
        if view.latency_mode == "first_token" or ttft is None:
            return ttft
        return None if tpot is None else (view.chunk_size - 1) * tpot + ttft


class Sample(Figures):
    """One repeat of a level. ``requests``: its requests, if they were kept and loaded. ``count``: the number of
    requests behind its latencies, None: unknown."""

    repeat: int
    count: int | None = None
    requests: InstanceOf[Requests] | None = Field(default=None, exclude=True, repr=False)

    def scatter(self, metric: Metric, statistic: str) -> Estimate | None:
        """That latency in ms with the scatter within this run; None if unknown."""
        if self.requests is None or metric == "itl":
            return None
        estimate = self.requests.estimates(metric).get(statistic)
        return estimate.scaled(1000) if estimate and estimate.basis else None


class Point(Figures):
    """One level of one experiment: means over its repeats.

    If some repeats are valid, the means are over these and ``excluded`` counts the others. If none is valid, the means
    are over the invalid ones and ``valid`` is False. ``samples``: the repeats behind the means. ``study``: all levels
    beside it, which show how repeats scatter in general. ``first_reasons``: why the first results of repeats that were
    measured twice were invalid. ``above_capacity``: every repeat is invalid, and only because its rate is above the
    capacity. ``fresh``: some repeat began on a KV pool that had never been full. ``workloads``: the workloads of its
    repeats, each once.
    """

    kind: LoadKind
    value: float
    window: Literal["steady", "whole"]
    samples: tuple[Sample, ...]
    excluded: int = 0
    reasons: tuple[str, ...] = ()
    first_reasons: tuple[str, ...] = ()
    valid: bool = True
    above_capacity: bool = False
    fresh: bool = False
    workloads: tuple[Workload, ...] = ()
    study: InstanceOf[RepeatStudy[Sample]] | None = Field(default=None, exclude=True, repr=False)

    @property
    def repeats(self) -> int:
        return len(self.samples)

    @property
    def load(self) -> str:
        """``8`` in flight, ``2.5/s``, ``to 2.5/s`` for a ramp, ``replay x1``."""
        shown = {"concurrency": "{:g}", "rate": "{:g}/s", "ramp": "to {:g}/s", "replay": "replay x{:g}"}
        return shown[self.kind].format(self.value)

    def rate_estimate(self, metric: Rate) -> Estimate:
        """Requests/s or tokens/s of the whole deployment, with its scatter as far as known.

        The scatter is between repeats; for one repeat it is between stretches of its window.
        """

        def of(figures: Figures) -> float:
            return figures.requests_per_s if metric == "requests" else figures.tokens_per_s(metric)

        requests = self.samples[0].requests
        within = requests.rate if requests is not None and self.repeats == 1 else None
        return self._estimate(("rate", metric), of, of(self), within)

    def ms_estimate(self, metric: Metric, statistic: str) -> Estimate | None:
        """That statistic of that latency with its scatter as far as known; None if unknown."""
        value = self.ms(metric, statistic)
        if value is None:
            return None
        if not self.supports_interval(statistic):
            return Estimate(value=value)
        within = self.samples[0].scatter(metric, statistic) if self.repeats == 1 else None
        return self._estimate((metric, statistic), lambda figures: figures.ms(metric, statistic), value, within)

    def carries(self, statistic: str) -> bool:
        """Whether every repeat has enough requests beyond a tail percentile for a meaningful figure."""
        return self._beyond(statistic, MIN_BEYOND)

    def supports_interval(self, statistic: str) -> bool:
        """Whether an interval of that statistic would hold.

        A tail's interval takes more requests than the tail itself. A single run of an open loop has no interval for its
        tail, because slow requests come in bursts.
        """
        if is_tail(statistic) and self.repeats == 1 and self.kind != "concurrency":
            return False
        return self._beyond(statistic, SURE_BEYOND)

    def _beyond(self, statistic: str, least: float) -> bool:
        counts = [sample.count for sample in self.samples if sample.count is not None]
        return all(carried(statistic, count, least) for count in counts)

    def latency_estimate(self, view: View) -> Estimate | None:
        """`latency` with its scatter as far as known; None if the latency is unknown."""
        value = self.latency(view)
        if value is None:
            return None
        if not self.supports_interval(view.statistic):
            return Estimate(value=value)
        within = self._scatter(view) if self.repeats == 1 else None
        key = ("latency", view.latency_mode, view.chunk_size, view.use_interactivity, view.statistic)
        return self._estimate(key, lambda figures: figures.latency(view), value, within)

    def _estimate(
        self, key: Hashable, of: Callable[[Figures], float | None], value: float, within: Estimate | None
    ) -> Estimate:
        """``value`` with the scatter between repeats; for one repeat the relative scatter within the run."""
        values = [sample_value for sample in self.samples if (sample_value := of(sample)) is not None]
        if len(values) > 1:
            own = of_repeats(values)._replace(value=value)
            return own if self.study is None else self.study.moderate(own, key, of)
        if within is None or within.relative_error is None:
            return Estimate(value=value)
        return within.scaled(value / within.value)._replace(value=value)

    def _scatter(self, view: View) -> Estimate | None:
        """Within one run. TTFT and TPOT of a chunk's sum count as independent."""
        parts: dict[Metric, float] = {"ttft": 1.0} if view.latency_mode != "token" else {}
        if view.latency_mode != "first_token":
            parts["tpot"] = view.chunk_size - 1.0 if view.latency_mode == "chunk" else 1.0
        parts_scatter = [
            (part, self.samples[0].scatter(metric, view.statistic)) for metric, part in parts.items() if part
        ]
        scaled = [part.scaled(factor) for factor, part in parts_scatter if part is not None]
        if not scaled or len(scaled) < len(parts_scatter):
            return None
        value = sum(part.value for part in scaled)
        error = math.hypot(*(part.standard_error or 0.0 for part in scaled))
        dof = min(part.dof or math.inf for part in scaled)
        return Estimate(value=value, standard_error=error, dof=dof, basis="requests")


class Curve(Frozen):
    """One experiment ready to compare: points ordered by (load kind, load).

    ``name``: the folder's. ``label``: short and unique among the curves loaded with it. ``folder``: empty if the curve
    is the only one of its folder. ``settings``: key -> value in the files of others. ``model``: the served model, None
    if no file names it. ``published``: source of a published table; such a curve is shown, never ranked. ``splits``:
    breakdown of the TTFT by (kind of load, load), mean over valid repeats, if the engines reported it. ``searches``:
    for the highest rate within an SLO, of any repeat. ``tuning``: the search for its engine settings, if any.
    """

    name: str
    label: str
    folder: str = ""
    settings: dict[str, str] = Field(default_factory=dict)
    gpus: Gpus
    deployment: Deployment | None = None
    model: str | None = None
    workload: str
    points: tuple[Point, ...]
    published: str | None = None
    splits: dict[tuple[LoadKind, float], TtftSplit] = Field(default_factory=dict)
    searches: tuple[SloSearch, ...] = ()
    tuning: Tuning | None = None
    origin: Origin = "measured"
    rehearsed: bool = False

    def scale(self, view: View) -> float:
        """Factor from the whole deployment to the view's unit: per node of ``gpus_per_node``, or 1.

        With a role in the view, only the GPUs of that role count. Raises StoreError if the experiment has no such role
        (`has_role`).
        """
        if not view.normalized:
            return 1.0
        return view.gpus_per_node / self.counted(view)

    def counted(self, view: View) -> float:
        """GPUs by which the view divides: of whole nodes, in use, or a role's. Raises StoreError, see `scale`."""
        gpus = self.gpus.counted(view.count) if view.role == "all" else self.gpus.of(view.role)
        if not gpus:
            raise StoreError(f"{self.name}: the number of its {view.role} {self.gpus.unit}s is not known")
        return gpus

    def has_role(self, view: View) -> bool:
        """Whether the view's normalisation is defined: a collocated experiment has no prefill GPUs."""
        return not view.normalized or bool(self.gpus.of(view.role))

    def throughput(self, point: Point, view: View) -> float:
        """The value on the throughput axis, in tokens/s."""
        return point.tokens_per_s(view.throughput_metric) * self.scale(view)

    def lines(self) -> dict[LoadKind, list[Point]]:
        """Points by load kind: a concurrency and a request rate are never on one line."""
        points_by_kind: dict[LoadKind, list[Point]] = {}
        for point in self.points:
            points_by_kind.setdefault(point.kind, []).append(point)
        return points_by_kind


def curves(experiments: Sequence[Experiment], requests: Sequence[RequestsOf] = ()) -> tuple[Curve, ...]:
    """All experiments as curves, in the order given. Raises StoreError if GPUs are unknown.

    ``requests``: per experiment, in the same order, the loaded requests of its runs.
    """
    labels = short_labels(experiments)
    loaded = requests or [{}] * len(experiments)
    return in_one_study(
        Curve(
            name=experiment.name,
            label=label,
            folder=experiment.manifest.label if experiment.part else "",
            settings=experiment.settings,
            gpus=gpus_of(experiment),
            deployment=experiment.manifest.deployment,
            model=model_of(experiment),
            workload=workload_name(experiment),
            points=tuple(_points(experiment.runs, columns)),
            splits=_splits(experiment),
            searches=experiment.searches,
            tuning=experiment.manifest.tuning,
            origin=experiment.manifest.origin,
            rehearsed=experiment.manifest.rehearsal is not None,
        )
        for experiment, label, columns in zip(experiments, labels, loaded, strict=True)
    )


def model_of(experiment: Experiment) -> str | None:
    """The served model; None if no file names it."""
    deployment = experiment.manifest.deployment
    if experiment.model is not None or deployment is None or any(run.model for run in experiment.runs):
        return experiment.model
    return None if deployment.model == UNKNOWN_MODEL else deployment.model


def drawn_once(curves: Sequence[Curve]) -> tuple[Curve, ...]:
    """Merges curves of one measurement under several names; the label is ``A = B``.

    Such curves are equal in every figure of every level, in their GPUs and in their model.
    """
    groups: dict[Hashable, list[Curve]] = {}
    for curve in curves:
        groups.setdefault(_figures_of(curve), []).append(curve)
    return tuple(
        same[0] if len(same) == 1 else same[0].model_copy(update={"label": _joined(same)}) for same in groups.values()
    )


def _figures_of(curve: Curve) -> Hashable:
    points = tuple(
        (
            (p.kind, p.value, p.requests_per_s, p.input_tokens_per_s, p.output_tokens_per_s),
            (p.valid, str(sorted(p.latency_ms.items()))),
        )
        for p in curve.points
    )
    return curve.gpus.total, curve.published, curve.model, points


def _joined(same: Sequence[Curve]) -> str:
    names = {configuration(curve.deployment) if curve.deployment else "" for curve in same}
    if len(names) == 1 and (name := names.pop()) and all(curve.label.startswith(name) for curve in same):
        return f"{name} ({' = '.join(curve.name for curve in same)})"
    return " = ".join(dict.fromkeys(curve.label for curve in same))


def in_one_study(curves: Iterable[Curve]) -> tuple[Curve, ...]:
    """The same curves, each level's scatter moderated by that of all valid levels (`pdlab.analysis.shrinkage`)."""
    curves = tuple(curves)
    study = RepeatStudy([[point.samples for point in curve.points if point.valid] for curve in curves])
    return tuple(
        curve.model_copy(update={"points": tuple(point.model_copy(update={"study": study}) for point in curve.points)})
        for curve in curves
    )


def gpus_of(experiment: Experiment) -> Gpus:
    """GPUs (or engine ranks) by role, from the manifest. Raises StoreError if they are unknown."""
    manifest = experiment.manifest
    placement, cluster, deployment = manifest.placement, manifest.cluster, manifest.deployment
    device = placement.device if placement else cluster.device if cluster else _device_alone(manifest)
    if deployment is None:
        if not manifest.gpus:
            raise StoreError(f"{experiment.name}: the number of GPUs is not known; add --gpus {experiment.name}=N")
        return Gpus(total=manifest.gpus, device=device)
    node = max((node.gpus for node in cluster.engine_nodes), default=0) if cluster else 0
    known = {"node": node or GPUS_PER_NODE}
    topology = deployment.topology
    if isinstance(topology, Disaggregated):
        known |= {"prefill": topology.prefill.gpus, "decode": topology.decode.gpus}
    return Gpus(total=deployment.gpus, device=device, **known)


def _device_alone(manifest: Manifest) -> Literal["gpu", "cpu"]:
    """The device of a manifest without nodes."""
    return "cpu" if manifest.local or manifest.hardware.get(GPU) == CPU else "gpu"


def _points(runs: Iterable[Run], requests: RequestsOf) -> Iterable[Point]:
    # A repeat is one start. If a search has several looks in it, the longest represents it.
    longest: dict[tuple[LoadKind, float, int], Run] = {}
    for run in sorted(runs, key=lambda run: run.num_requests if run.key.look else 0):
        longest[run.key.kind, run.key.value, run.key.repeat] = run
    levels: dict[tuple[LoadKind, float], list[Run]] = {}
    for run in sorted(longest.values(), key=lambda run: run.key.repeat):
        levels.setdefault((run.key.kind, run.key.value), []).append(run)
    for kind, value in sorted(levels):
        yield _point(kind, value, levels[kind, value], requests)


def _point(kind: LoadKind, value: float, runs: list[Run], requests: RequestsOf) -> Point:
    valid = [run for run in runs if run.validity.valid]
    used = valid or runs
    steady = [run.steady for run in used if run.steady is not None and run.steady.ttft is not None]
    # All repeats of a level use one window: a mean of steady and whole-run figures would be neither.
    window: Literal["steady", "whole"] = "steady" if len(steady) == len(used) else "whole"
    summaries = steady if window == "steady" else [run.whole for run in used]
    samples = tuple(
        _sample(run, summary, requests.get(run.key) if window == "steady" or run.steady is None else None)
        for run, summary in zip(used, summaries, strict=True)
    )
    means = {metric: _means([sample.latency_ms.get(metric, {}) for sample in samples]) for metric in METRICS}
    point = Point(
        kind=kind,
        value=value,
        window=window,
        samples=samples,
        excluded=len(runs) - len(used),
        reasons=tuple(dict.fromkeys(reason for run in runs for reason in run.validity.reasons)),
        first_reasons=tuple(dict.fromkeys(r for run in runs if run.replaces for r in run.replaces.reasons)),
        valid=bool(valid),
        above_capacity=all(run.validity.above_capacity for run in runs),
        fresh=any(run.pool_age is not None and run.pool_age < 1 for run in used),
        workloads=tuple(dict.fromkeys(_known_workloads(used))),
        requests_per_s=fmean(s.requests_per_s for s in summaries),
        input_tokens_per_s=fmean(s.input_tokens_per_s for s in summaries),
        output_tokens_per_s=fmean(s.output_tokens_per_s for s in summaries),
        latency_ms={metric: values for metric, values in means.items() if values},
    )
    return without_tails(point)


def without_tails(point: Point) -> Point:
    """The point without the tails that its repeats do not carry."""
    kept = {
        metric: carried
        for metric, values in point.latency_ms.items()
        if (carried := {statistic: ms for statistic, ms in values.items() if point.carries(statistic)})
    }
    return point.model_copy(update={"latency_ms": kept})


def _splits(experiment: Experiment) -> dict[tuple[LoadKind, float], TtftSplit]:
    by_load: dict[tuple[LoadKind, float], list[TtftSplit]] = {}
    early = experiment.manifest.early_tokens
    for run in experiment.runs:
        if run.validity.valid and (one := split(run, early=early)):
            by_load.setdefault((run.key.kind, run.key.value), []).append(one)
    return {key: mean_split(repeats) for key, repeats in by_load.items()}


def _sample(run: Run, summary: Summary, requests: Requests | None) -> Sample:
    return Sample(
        repeat=run.key.repeat,
        count=judged(run, summary, requests),
        requests_per_s=summary.requests_per_s,
        input_tokens_per_s=summary.input_tokens_per_s,
        output_tokens_per_s=summary.output_tokens_per_s,
        latency_ms={
            metric: {name: seconds * 1000 for name, seconds in latency.statistics_s.items()}
            for metric, latency in summary.latencies.items()
        },
        requests=requests,
    )


def _means(repeats: Sequence[dict[str, float]]) -> dict[str, float]:
    """Statistic -> mean over repeats, for the statistics that every repeat has."""
    return {name: fmean(r[name] for r in repeats) for name in repeats[0] if all(name in r for r in repeats)}


def short_labels(experiments: Sequence[Experiment]) -> list[str]:
    """One short unique label each: what a person calls it, else the configuration, with the workload or name if several
    share it.

    If all experiments are parts of one folder of others, its name is left out.
    """
    one_folder = len({e.manifest.label for e in experiments}) == 1
    short = [_short_label(experiment, one_folder=one_folder) for experiment in experiments]
    labels: list[str] = []
    unnumbered: list[str] = []
    for experiment, label in zip(experiments, short, strict=True):
        namesakes = [e for e, other in zip(experiments, short, strict=True) if other == label]
        if len(namesakes) > 1:
            if len({workload_name(e) for e in namesakes}) == len(namesakes):
                own = workload_name(experiment)
            else:
                common = set(_words(namesakes[0].name)).intersection(*(_words(e.name) for e in namesakes))
                own = " ".join(word for word in _words(experiment.name) if word not in common)
            label = f"{label} ({own})" if own else label
        copies = unnumbered.count(label)
        unnumbered.append(label)
        labels.append(f"{label} #{copies + 1}" if copies else label)
    return labels


def _short_label(experiment: Experiment, *, one_folder: bool) -> str:
    part, deployment = experiment.part, experiment.manifest.deployment
    if experiment.label:
        label = experiment.label
    elif deployment:
        label = configuration(deployment)
    else:
        label = part if part and one_folder else experiment.name
    rehearsed = " rehearsed" if experiment.manifest.rehearsal else ""
    return label + rehearsed + (f" ({part})" if part and deployment and not experiment.label else "")


def shared_settings(curves: Sequence[Curve]) -> dict[str, str]:
    """Key -> value of the settings that all of these curves share."""
    first, *others = curves
    return {
        key: value for key, value in first.settings.items() if all(each.settings.get(key) == value for each in others)
    }


def _words(name: str) -> list[str]:
    return name.replace("-", "_").split("_")


def configuration(deployment: Deployment) -> str:
    """``P1xTP4 D2xTP2 spread``, ``8xTP2 fluid``, with fixed roles ``8xTP2 fluid 3:5``, or ``4xTP2 collocated``."""
    topology = deployment.topology
    if isinstance(topology, Disaggregated):
        return f"P{_pool(topology.prefill)} D{_pool(topology.decode)} {topology.placement}"
    if isinstance(topology, Fluid):
        return f"{_pool(topology.pool)} fluid" + ("" if topology.split is None else f" {topology.roles}")
    return f"{_pool(topology.pool)} collocated"


def _pool(pool: Pool) -> str:
    return pool.label.upper().replace("X", "x", 1)


def workload_name(experiment: Experiment) -> str:
    return workloads_name(_known_workloads(experiment.runs)) or UNKNOWN_LENGTHS


def _known_workloads(runs: Iterable[Run]) -> Iterator[Workload]:
    return (run.workload for run in runs if run.has_lengths)


def workloads_name(workloads: Iterable[Workload]) -> str:
    """``5000:250``; ``1000:62-66`` if mean lengths differ from level to level; with any other distinguishing
    property."""
    means: dict[str, list[tuple[int, int]]] = {}
    for each in workloads:
        words = [each.lengths.label, "" if each.mode == "mixed" else each.mode]
        words += [f"shared prefix {each.shared_prefix_tokens}"] if each.shared_prefix_tokens else []
        means.setdefault(" ".join(filter(None, words)), []).append((each.sent_input_tokens, each.sent_output_tokens))
    return ", ".join(
        " ".join(filter(None, [":".join(_span(side) for side in zip(*tokens, strict=True)), words]))
        for words, tokens in means.items()
    )


def _span(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low}-{high}"


def rankable(curves: Iterable[Curve]) -> list[Curve]:
    """The curves that may be ranked: not those of published tables."""
    return [curve for curve in curves if curve.published is None]


def per_million_tokens(price_per_gpu_hour: float, gpus: float, tokens_per_s: Estimate) -> Estimate:
    """price * GPUs / (tokens/s * 3600) * 10^6, in the price's currency; infinite at no throughput.

    The relative standard error is that of the throughput.
    """
    if tokens_per_s.value <= 0:
        return Estimate(value=float("inf"))
    value = price_per_gpu_hour * gpus / (tokens_per_s.value * 3600) * 1e6
    error = tokens_per_s.relative_error
    return tokens_per_s._replace(value=value, standard_error=None if error is None else error * value)


class LevelCost(NamedTuple):
    """Cost per million tokens at one level, by which tokens are counted."""

    curve: Curve
    point: Point
    per_million: dict[ThroughputMetric, Estimate]


def level_costs(curves: Sequence[Curve], price_per_gpu_hour: float, count: Count = DEFAULT_COUNT) -> list[LevelCost]:
    """The cost at every level, in the price's currency; all GPUs that ``count`` counts are paid for."""

    def costs(curve: Curve, point: Point) -> dict[ThroughputMetric, Estimate]:
        kinds: tuple[ThroughputMetric, ...] = get_args(ThroughputMetric)
        gpus = curve.gpus.counted(count)
        return {kind: per_million_tokens(price_per_gpu_hour, gpus, point.rate_estimate(kind)) for kind in kinds}

    return [LevelCost(curve, point, costs(curve, point)) for curve in curves for point in curve.points]
