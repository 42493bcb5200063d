"""A measured replay beside the simulation of the very same requests, on the deployment that was measured."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pdlab.analysis.replays import replay_facts
from pdlab.core.catalog import ModelShape
from pdlab.core.errors import StoreError
from pdlab.core.replayed import COMPILED, Replayed
from pdlab.core.workload import Replay
from pdlab.plan.accuracy import MeasuredSweep
from pdlab.plan.prediction_intervals import SEEDS
from pdlab.plan.traffic import trace_of_file
from pdlab.results.schema import Experiment, Run, Summary
from pdlab.results.store import Store
from pdlab.sim.hardware import Hardware
from pdlab.sim.level import Trace, to_run
from pdlab.sim.simulator import simulate

BLOCK_BYTES = 2**20
ONE_GROUP = "disable_hybrid_kv_cache_manager"


class PredictedMeasured(NamedTuple):
    """A figure as predicted (a mean over seeds) and as measured."""

    predicted: float
    measured: float

    @property
    def error_percent(self) -> float:
        return 100 * (self.predicted / self.measured - 1)


class ComparedReplay(NamedTuple):
    """Times in seconds, of answered requests. ``tpot_p50`` None: answers have one token. ``hit_share``: of prompt
    tokens, from caches; None: nobody counted them."""

    name: str
    load: str
    ttft_p50: PredictedMeasured
    ttft_p90: PredictedMeasured
    tpot_p50: PredictedMeasured | None
    requests_per_s: PredictedMeasured
    hit_share: PredictedMeasured | None


def trace_sent(folder: Path, experiment: Experiment) -> Trace | None:
    """The requests that an experiment replayed; None where it replayed none.

    Raises StoreError where the compiled workload is not in its folder, or is another one; UsageError where it cannot be
    read.
    """
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
            f"{path}: cannot be read ({error.strerror or error}); put the requests that were sent there"
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
    """Predicted and measured figures of each replay of an experiment that is valid. Raises UsageError where the model
    or a request does not fit.

    Caches are those of the engines that were measured, whatever those have that the hardware file describes:
    ``engine_kwargs`` are what the launch gave them beside the deployment's own.
    """
    deployment = sweep.deployment.with_engine_kwargs(engine_kwargs)
    hybrid = not any(pool.engine_kwargs.get(ONE_GROUP) for pool in deployment.pools.values())
    hardware = hardware.model_copy(update={"hybrid_kv": hybrid})
    trials = [
        simulate(
            deployment, sweep.levels, sweep.workload, hardware, shape, seed=seed, trace=sweep.trace
        )
        for seed in seeds
    ]  # fmt: skip
    runs = {run.key: run for run in experiment.runs}
    found = []
    for level, simulated in zip(sweep.levels, zip(*trials, strict=True), strict=True):
        run = runs[level.key]
        facts = replay_facts(Store(folder).read_records(run.key))
        ours = [to_run(each, sweep.name, sweep.workload).whole for each in simulated]
        hits = None if facts is None or facts.hit_share is None else facts.hit_share
        found.append(_compared(sweep.name, run, ours, hits, statistics.fmean(each.hit_share for each in simulated)))
    return found


def _compared(
    name: str, run: Run, ours: Sequence[Summary], hit_share: float | None, simulated_share: float
) -> ComparedReplay:
    def pair(metric: str, part: str) -> PredictedMeasured | None:
        values = [value for each in ours if (value := _percentile(each, metric, part)) is not None]
        measured = _percentile(run.whole, metric, part)
        return PredictedMeasured(statistics.fmean(values), measured) if values and measured else None

    ttft_p50, ttft_p90 = pair("ttft", "p50"), pair("ttft", "p90")
    assert ttft_p50 is not None and ttft_p90 is not None
    return ComparedReplay(
        name=name,
        load=run.key.stem,
        ttft_p50=ttft_p50,
        ttft_p90=ttft_p90,
        tpot_p50=pair("tpot", "p50"),
        requests_per_s=PredictedMeasured(
            statistics.fmean(each.requests_per_s for each in ours), run.whole.requests_per_s
        ),
        hit_share=None if hit_share is None else PredictedMeasured(simulated_share, hit_share),
    )


def _percentile(summary: Summary, metric: str, part: str) -> float | None:
    values = getattr(summary, metric)
    return None if values is None else values.percentiles_s[part]
