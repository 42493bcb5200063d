"""From runs to comparable figures: means over repeats, GPUs by role, normalisation.

Units: latencies in milliseconds, rates per second. Nothing here draws or prints.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Literal

from pydantic import Field, model_validator

from pdlab.errors import StoreError
from pdlab.results import Distribution, Experiment, Run, Summary
from pdlab.spec import Deployment, Disaggregated, Frozen, Pool

LatencyMode = Literal["token", "first_token", "chunk"]
ThroughputMetric = Literal["output", "input", "total"]
Statistic = Literal["mean", "p50", "p90", "p95", "p99"]
Metric = Literal["ttft", "tpot", "itl", "e2el"]
LoadKind = Literal["concurrency", "rate", "ramp"]

DEFAULT_CHUNK = 16


class View(Frozen):
    """What to look at: which latency, which statistic of it, which throughput, per node or not."""

    latency_mode: LatencyMode = "token"
    chunk_size: int = Field(default=DEFAULT_CHUNK, ge=1)
    use_interactivity: bool = False
    throughput_metric: ThroughputMetric = "output"
    statistic: Statistic = "p50"
    normalized: bool = True
    gpus_per_node: int = Field(default=8, ge=1)

    @model_validator(mode="after")
    def _interactivity_is_of_tokens(self) -> View:
        if self.use_interactivity and self.latency_mode != "token":
            raise ValueError("interactivity is 1000/TPOT: it goes with the latency mode token alone")
        return self

    @property
    def lower_is_better(self) -> bool:
        """Direction of `Point.latency`: interactivity is better when higher."""
        return not self.use_interactivity

    @property
    def latency_name(self) -> str:
        """Name of what `latency` returns, without unit."""
        if self.use_interactivity:
            return "interactivity"
        return {"token": "TPOT", "first_token": "TTFT", "chunk": f"{self.chunk_size}-token chunk latency"}[
            self.latency_mode
        ]

    @property
    def latency_unit(self) -> str:
        return "tokens/s per user" if self.use_interactivity else "ms"


class Gpus(Frozen):
    """What an experiment ran on. On a CPU cluster the unit is an engine rank, the slot of one GPU.

    ``prefill`` and ``decode`` are None for a collocated deployment and where roles are not known.
    """

    total: int = Field(ge=1)
    prefill: int | None = None
    decode: int | None = None
    device: Literal["gpu", "cpu"] = "gpu"

    @property
    def unit(self) -> str:
        return "GPU" if self.device == "gpu" else "engine rank"


class Point(Frozen):
    """One level of one experiment: means over its repeats, whole deployment, not normalised.

    Where some repeats are valid, the means are over these and ``excluded`` counts the others;
    where none is, they are over the invalid ones and ``valid`` is False. ``latency_ms`` is
    metric -> statistic -> ms and holds what is known. ``noise`` is (max - min) / mean over
    repeats of ``requests`` (per second) and of the medians of ``ttft`` and ``tpot``; empty for one repeat.
    """

    kind: LoadKind
    value: float
    window: Literal["steady", "whole"]
    repeats: int
    excluded: int = 0
    reasons: tuple[str, ...] = ()
    valid: bool = True
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    latency_ms: dict[Metric, dict[str, float]] = Field(default_factory=dict)
    noise: dict[str, float] = Field(default_factory=dict)

    @property
    def load(self) -> str:
        """``8`` in flight, or ``2.5/s``."""
        return f"{self.value:g}" + ("/s" if self.kind == "rate" else "")

    def tokens_per_s(self, metric: ThroughputMetric) -> float:
        if metric == "total":
            return self.input_tokens_per_s + self.output_tokens_per_s
        return self.input_tokens_per_s if metric == "input" else self.output_tokens_per_s

    def ms(self, metric: Metric, statistic: str) -> float | None:
        """That statistic of that latency; None when not known."""
        return self.latency_ms.get(metric, {}).get(statistic)

    def latency(self, view: View) -> float | None:
        """What the latency axis shows: ms, or tokens/s per user; None when not known.

        A chunk is its first token and chunk_size - 1 more: (chunk_size - 1) * TPOT + TTFT, of the
        same statistic each (the p90 of a sum is not the sum of p90s: see docs/metrics.md).
        """
        tpot, ttft = self.ms("tpot", view.statistic), self.ms("ttft", view.statistic)
        if view.use_interactivity:
            return 1000 / tpot if tpot else None
        if view.latency_mode == "token":
            return tpot
        if view.latency_mode == "first_token" or ttft is None:
            return ttft
        return None if tpot is None else (view.chunk_size - 1) * tpot + ttft


class Curve(Frozen):
    """One experiment ready to compare: points ordered by (load kind, load).

    ``name`` is the folder's, ``label`` a short one that is unique among the curves loaded with it.
    """

    name: str
    label: str
    gpus: Gpus
    deployment: Deployment | None = None
    workload: str
    points: tuple[Point, ...]

    def scale(self, view: View) -> float:
        """Factor from whole deployment to what the view shows: per node of ``gpus_per_node``, or 1."""
        return view.gpus_per_node / self.gpus.total if view.normalized else 1.0

    def throughput(self, point: Point, view: View) -> float:
        """What the throughput axis shows, in tokens/s."""
        return point.tokens_per_s(view.throughput_metric) * self.scale(view)

    def lines(self) -> dict[LoadKind, list[Point]]:
        """Points by load kind: a concurrency and a request rate are never on one line."""
        found: dict[LoadKind, list[Point]] = {}
        for point in self.points:
            found.setdefault(point.kind, []).append(point)
        return found


def curves(experiments: Sequence[Experiment]) -> tuple[Curve, ...]:
    """All experiments as curves, in the order given. Raises StoreError when GPUs are not known."""
    labels = short_labels(experiments)
    return tuple(
        Curve(
            name=experiment.name,
            label=label,
            gpus=gpus_of(experiment),
            deployment=experiment.manifest.deployment,
            workload=_workload(experiment),
            points=tuple(_points(experiment.runs)),
        )
        for experiment, label in zip(experiments, labels, strict=True)
    )


def gpus_of(experiment: Experiment) -> Gpus:
    """GPUs (or engine ranks) by role, from the manifest. Raises StoreError when it does not say."""
    manifest = experiment.manifest
    placement, cluster, deployment = manifest.placement, manifest.cluster, manifest.deployment
    device = placement.device if placement else cluster.device if cluster else "cpu" if manifest.local else "gpu"
    if deployment is None:
        if not manifest.gpus:
            raise StoreError(f"{experiment.name}: the number of GPUs is not known; add --gpus {experiment.name}=N")
        return Gpus(total=manifest.gpus, device=device)
    topology = deployment.topology
    if isinstance(topology, Disaggregated):
        return Gpus(total=deployment.gpus, prefill=topology.prefill.gpus, decode=topology.decode.gpus, device=device)
    return Gpus(total=deployment.gpus, device=device)


def short_labels(experiments: Sequence[Experiment]) -> list[str]:
    """One short unique label each: the configuration; where several share it, their workload or name too."""
    short = [_configuration(e.manifest.deployment) if e.manifest.deployment else e.name for e in experiments]
    labels: list[str] = []
    for experiment, label in zip(experiments, short, strict=True):
        namesakes = [e for e, other in zip(experiments, short, strict=True) if other == label]
        if len(namesakes) > 1:
            if len({_workload(e) for e in namesakes}) == len(namesakes):
                own = _workload(experiment)
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


def _workload(experiment: Experiment) -> str:
    found = dict.fromkeys(
        f"{run.workload.sent_input_tokens}:{run.workload.sent_output_tokens}"
        + ("" if run.workload.mode == "mixed" else f" {run.workload.mode}")
        for run in experiment.runs
    )
    return ", ".join(found)


def _points(runs: Iterable[Run]) -> Iterable[Point]:
    levels: dict[tuple[LoadKind, float], list[Run]] = {}
    for run in runs:
        levels.setdefault((run.key.kind, run.key.value), []).append(run)
    for kind, value in sorted(levels):
        yield _point(kind, value, levels[kind, value])


def _point(kind: LoadKind, value: float, runs: list[Run]) -> Point:
    valid = [run for run in runs if run.validity.valid]
    used = valid or runs
    steady = [run.steady for run in used if run.steady is not None and run.steady.ttft is not None]
    # A mean of steady and whole-run figures would be neither: all repeats of a level use one window.
    window: Literal["steady", "whole"] = "steady" if len(steady) == len(used) else "whole"
    summaries = steady if window == "steady" else [run.whole for run in used]
    latencies: dict[Metric, dict[str, float]] = {
        "ttft": _mean_of([s.ttft for s in summaries]),
        "tpot": _mean_of([s.tpot for s in summaries]),
        "itl": _mean_of([s.itl for s in summaries]),
        "e2el": _mean_of([s.e2el for s in summaries]),
    }
    return Point(
        kind=kind,
        value=value,
        window=window,
        repeats=len(used),
        excluded=len(runs) - len(used),
        reasons=tuple(dict.fromkeys(reason for run in runs for reason in run.validity.reasons)),
        valid=bool(valid),
        requests_per_s=fmean(s.requests_per_s for s in summaries),
        input_tokens_per_s=fmean(s.input_tokens_per_s for s in summaries),
        output_tokens_per_s=fmean(s.output_tokens_per_s for s in summaries),
        latency_ms={metric: values for metric, values in latencies.items() if values},
        noise=_noise(summaries),
    )


def _mean_of(distributions: Sequence[Distribution | None]) -> dict[str, float]:
    """Statistic -> mean over repeats in ms, for the statistics that every repeat has."""
    known = [d for d in distributions if d is not None]
    if not known or len(known) < len(distributions):
        return {}
    common = [name for name in known[0].percentiles_s if all(name in d.percentiles_s for d in known)]
    means = {name: fmean(d.percentiles_s[name] for d in known) * 1000 for name in common}
    return {"mean": fmean(d.mean_s for d in known) * 1000, **means}


def _noise(summaries: Sequence[Summary]) -> dict[str, float]:
    if len(summaries) < 2:
        return {}
    series = {
        "requests": [s.requests_per_s for s in summaries],
        "ttft": [s.ttft.p50_s for s in summaries if s.ttft],
        "tpot": [s.tpot.p50_s for s in summaries if s.tpot],
    }
    return {name: (max(v) - min(v)) / fmean(v) for name, v in series.items() if v and fmean(v) > 0}
