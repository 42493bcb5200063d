"""Compare a measured replay with a simulation of the same requests on the same deployment."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pdlab.analysis.replays import replay_facts
from pdlab.core.catalog import ModelShape
from pdlab.core.errors import StoreError, UsageError, reason_of
from pdlab.core.hybrid_kv import connectors_of, is_hybrid
from pdlab.core.replayed import COMPILED, Replayed
from pdlab.core.workload import Replay
from pdlab.plan.accuracy import MeasuredSweep
from pdlab.plan.prediction_intervals import SEEDS
from pdlab.plan.traffic import trace_of_file
from pdlab.results.schema import Experiment, Manifest, ReplayedRequest, RequestRecord, Run, Summary
from pdlab.results.store import Store
from pdlab.sim.hardware import Hardware
from pdlab.sim.level import SimulatedLevel, Trace, in_order, records, to_run
from pdlab.sim.simulator import simulate
from pdlab.traffic.compiled import compiled

BLOCK_BYTES = 2**20


class PredictedMeasured(NamedTuple):
    """A predicted figure (mean over seeds) and the measured one."""

    predicted: float
    measured: float

    @property
    def error_percent(self) -> float:
        return 100 * (self.predicted / self.measured - 1)


class ComparedReplay(NamedTuple):
    """The figures of the answered requests of a replay; times in seconds. ``load``: the name of the replay. ``run`` and
    ``records``: one of the simulations, as a result. ``tpot_p50``: None if answers have one token. ``hit_share``: share
    of prompt tokens from caches (None: not counted)."""

    name: str
    load: str
    run: Run
    records: tuple[RequestRecord, ...]
    ttft_p50: PredictedMeasured
    ttft_p90: PredictedMeasured
    tpot_p50: PredictedMeasured | None
    requests_per_s: PredictedMeasured
    hit_share: PredictedMeasured | None


def trace_sent(folder: Path, experiment: Experiment) -> Trace | None:
    """The requests that an experiment replayed; None if it replayed none. Raises StoreError if the compiled workload in
    its folder is missing or another one. Raises UsageError if it cannot be read."""
    replayed = [
        run.workload.lengths
        for run in experiment.runs
        if isinstance(run.load, Replay) and isinstance(run.workload.lengths, Replayed)
    ]
    if not replayed:
        return None
    path, digest = folder / COMPILED, hashlib.sha256()
    try:
        with path.open("rb") as stream:
            while block := stream.read(BLOCK_BYTES):
                digest.update(block)
    except OSError as error:
        raise StoreError(
            f"{path}: cannot be read ({reason_of(error)}); put the requests that were sent there"
        ) from error
    if (found := digest.hexdigest()) != replayed[0].sha256:
        raise StoreError(
            f"{path}: has SHA-256 {found[:8]}..., what was sent has {replayed[0].sha256[:8]}...; put that file there"
        )
    return trace_of_file(path)


def compared(
    folder: Path,
    experiment: Experiment,
    sweep: MeasuredSweep,
    hardware: Hardware,
    shape: ModelShape,
    engine_kwargs: Mapping[str, Any],
    seeds: Sequence[int] = SEEDS,
) -> list[ComparedReplay]:
    """Predicted and measured figures of each valid replay. The simulated caches are those of the measured engines. For
    a rehearsal they are those of ``hardware``. ``engine_kwargs``: engine arguments that the launch added to those of
    the deployment. Raises UsageError if the model or a request does not fit."""
    deployment = sweep.deployment.with_engine_kwargs(engine_kwargs)
    if experiment.manifest.rehearsal is None:  # rehearsed engines are those of the hardware file
        connectors = connectors_of(deployment)
        hybrid = all(is_hybrid(pool.engine_kwargs, connectors) for pool in deployment.pools.values())
        hardware = hardware.model_copy(update={"hybrid_kv": hybrid})
    trials = [
        simulate(deployment, sweep.levels, sweep.workload, hardware, shape, seed=seed, trace=sweep.trace)
        for seed in seeds
    ]
    runs = {run.key: run for run in experiment.runs}
    found = []
    for level, simulated in zip(sweep.levels, zip(*trials, strict=True), strict=True):
        run = runs[level.key]
        store = Store(folder)
        facts = replay_facts(store.requests(run.key))
        predicted = [to_run(each, run.label, run.workload) for each in simulated]
        ttft_p50, ttft_p90, tpot_p50 = (
            _pair(predicted, run, *figure) for figure in (("ttft", "p50"), ("ttft", "p90"), ("tpot", "p50"))
        )
        assert ttft_p50 is not None and ttft_p90 is not None
        hit_share = None
        if facts is not None and facts.hit_share is not None:
            hit_share = PredictedMeasured(statistics.fmean(each.hit_share for each in simulated), facts.hit_share)
        requests_per_s = statistics.fmean(each.whole.requests_per_s for each in predicted)
        found.append(
            ComparedReplay(
                name=sweep.name,
                load=run.key.stem,
                run=predicted[0],
                records=_as_replayed(simulated[0], store.records(run.key), sweep.trace, folder),
                ttft_p50=ttft_p50,
                ttft_p90=ttft_p90,
                tpot_p50=tpot_p50,
                requests_per_s=PredictedMeasured(requests_per_s, run.whole.requests_per_s),
                hit_share=hit_share,
            )
        )
    return found


def _pair(predicted: Sequence[Run], measured: Run, metric: str, percentile: str) -> PredictedMeasured | None:
    """A percentile of a metric; None if it is unknown on either side."""
    values = [_percentile(run.whole, metric, percentile) for run in predicted]
    known, truth = [value for value in values if value is not None], _percentile(measured.whole, metric, percentile)
    return PredictedMeasured(statistics.fmean(known), truth) if known and truth else None


def write_simulated(out: Path, experiment: Experiment, replays: Sequence[ComparedReplay]) -> Path:
    """Write one simulation of each replay of an experiment as a result folder in ``out``, and return the folder. The
    folder has the name of the experiment. Raises UsageError if it holds other results. Raises WriteError if it cannot
    be written."""
    folder, measured = out / experiment.name, experiment.manifest
    store = Store(folder)
    if folder.is_dir() and any(folder.iterdir()) and store.read_manifest().origin != "simulated":
        raise UsageError(f"--out {out}: {folder} holds what was measured; choose another folder")
    store.write_manifest(
        Manifest(
            origin="simulated",
            label=measured.label,
            deployment=measured.deployment,
            gpus=measured.gpus,
            local=measured.local,
            workload=measured.workload,
            traffic=measured.traffic,
        )
    )
    for each in replays:
        store.write(each.run, each.records, force=True)
    return folder


def _as_replayed(
    level: SimulatedLevel, sent: Iterable[RequestRecord], trace: Trace | None, folder: Path
) -> tuple[RequestRecord, ...]:
    """The simulated requests by arrival, as records of the requests that were sent."""
    assert trace is not None
    ids = [request.id for request in trace.requests or in_order(compiled(folder / COMPILED)[1])]
    replayed = {each.replayed.id: each.replayed for each in sent if each.replayed is not None}
    made = []
    for number, (name, record) in enumerate(zip(ids, records(level), strict=True)):
        measured = replayed.get(name) or ReplayedRequest(id=name, session=name)
        hit_tokens = max(0, round(record.input_tokens - level.computed_tokens[number]))
        own = {"sent": True, "cached_tokens": None, "foreseen_tokens": hit_tokens, "replica": None}
        own_request = measured.model_copy(update={**own, "prefill_replica": None})
        made.append(record.model_copy(update={"replayed": own_request}))
    return tuple(sorted(made, key=lambda record: record.arrival_s))


def _percentile(summary: Summary, metric: str, part: str) -> float | None:
    values = getattr(summary, metric)
    return None if values is None else values.percentiles_s[part]
