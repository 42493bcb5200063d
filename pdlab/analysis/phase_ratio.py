"""The P:D ratio that measurements of the single phases imply: ``python -m pdlab ratio``.

One prefill replica serves r_P requests/s (prefill-only), one decode replica r_D (decode-only, at the real context
length). A deployment of p and d replicas serves at most min(p r_P, d r_D), and wastes nothing if p r_P = d r_D. The
rate-matched ratio P:D is therefore r_D : r_P (DistServe, Zhong et al., OSDI 2024, section 4). r_D depends on the batch
and so on the accepted TPOT: one line per level. Neither phase includes the KV transfer, so this is an upper bound,
printed beside measured deployments.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from statistics import fmean
from typing import NamedTuple

from pdlab.analysis.comparable import near, one_model
from pdlab.analysis.curves import model_of
from pdlab.core.deployment import Disaggregated, Pool
from pdlab.core.errors import UsageError
from pdlab.core.schema import Frozen
from pdlab.core.text import aligned, counted, listed, ms
from pdlab.results.schema import Experiment, Run, Summary, note_texts

MOST_REPLICAS = 8


class PhaseRate(Frozen):
    """One level of a phase: ``per_replica_rps`` requests/s of one replica, mean over ``repeats`` valid repeats."""

    value: float
    per_replica_rps: float
    tpot_p50_s: float | None
    ttft_p50_s: float | None
    repeats: int


class RatioAtLevel(Frozen):
    """Rate-matched ratio at one decode level. ``prefill_per_decode``: r_D / r_P. ``ratio``: the nearest of small whole
    numbers. ``rps_per_gpu``: what that ratio could serve per GPU, without any transfer."""

    decode: PhaseRate
    prefill_per_decode: float
    ratio: Fraction
    rps_per_gpu: float


class MeasuredDeployment(Frozen):
    """A measured PD deployment: its replicas and the highest requests/s per GPU among its valid levels."""

    name: str
    label: str
    prefill: int
    decode: int
    best_rps_per_gpu: float
    at: str
    tpot_p50_s: float | None


def rates(experiment: Experiment, mode: str) -> tuple[PhaseRate, ...]:
    """Requests/s per replica of each closed-loop level. Raises UsageError for another phase or without a valid
    level."""
    pool = _pool(experiment)
    runs = [r for r in experiment.runs if r.workload.mode == mode and r.validity.valid and r.key.kind == "concurrency"]
    if not runs:
        raise UsageError(f"{experiment.name}: no valid closed-loop level of mode {mode}")
    levels = []
    for value in sorted({run.key.value for run in runs}):
        windows = [_window(run) for run in runs if run.key.value == value]
        levels.append(
            PhaseRate(
                value=value,
                per_replica_rps=fmean(w.requests_per_s for w in windows) / pool.ranks,
                tpot_p50_s=_mean_or_none(w.tpot.p50_s if w.tpot else None for w in windows),
                ttft_p50_s=_mean_or_none(w.ttft.p50_s if w.ttft else None for w in windows),
                repeats=len(windows),
            )
        )
    return tuple(levels)


class ImpliedRatios(NamedTuple):
    """The prefill rate of the best level, and the ratio at every decode level."""

    prefill: PhaseRate
    levels: tuple[RatioAtLevel, ...]


def implied(prefill: Experiment, decode: Experiment) -> ImpliedRatios:
    """The ratios of replicas that the rates of the two phases imply.

    Raises UsageError if the two are of different models or prompt lengths.
    """
    if not _of_one_model(prefill, decode):
        names = " and ".join(each.model or "a model that is not known" for each in (prefill, decode))
        raise UsageError(f"{prefill.name} and {decode.name} are of {names}: the phases must be of one model")
    p_workload, d_workload = prefill.runs[0].workload, decode.runs[0].workload
    if not near(p_workload.input_tokens, d_workload.input_tokens):
        raise UsageError(
            f"{prefill.name} has {counted(p_workload.input_tokens, 'input token')}, {decode.name} "
            f"{d_workload.input_tokens}: the phases must be of the same workload"
        )
    if p_workload.lengths != d_workload.lengths:
        raise UsageError(
            f"{prefill.name} has lengths {p_workload.lengths.flag_value}, "
            f"{decode.name} {d_workload.lengths.flag_value}: the phases must be of the same workload"
        )
    best = max(rates(prefill, "prefill-only"), key=lambda rate: rate.per_replica_rps)
    p_gpus, d_gpus = _pool(prefill).gpus_per_replica, _pool(decode).gpus_per_replica
    levels = []
    for rate in rates(decode, "decode-only"):
        quotient = rate.per_replica_rps / best.per_replica_rps
        ratio = nearest(quotient)
        p, d = ratio.numerator, ratio.denominator
        served = min(p * best.per_replica_rps, d * rate.per_replica_rps)
        levels.append(
            RatioAtLevel(
                decode=rate, prefill_per_decode=quotient, ratio=ratio, rps_per_gpu=served / (p * p_gpus + d * d_gpus)
            )
        )
    return ImpliedRatios(best, tuple(levels))


def nearest(prefill_per_decode: float) -> Fraction:
    """P:D of at most 8 replicas each, nearest on a logarithmic scale."""
    options = {Fraction(p, d) for p in range(1, MOST_REPLICAS + 1) for d in range(1, MOST_REPLICAS + 1)}

    def distance(option: Fraction) -> tuple[float, int]:
        quotient = prefill_per_decode / float(option)
        return max(quotient, 1 / quotient), option.numerator + option.denominator

    return min(sorted(options), key=distance)


def _of_one_model(first: Experiment, second: Experiment) -> bool:
    return one_model(model_of(first), model_of(second))


def measured(experiments: Iterable[Experiment], phase: Experiment | None = None) -> tuple[MeasuredDeployment, ...]:
    """The PD deployments among them, best first; with ``phase`` only those of its model."""
    deployments = []
    for experiment in experiments:
        if phase is not None and not _of_one_model(experiment, phase):
            continue
        deployment = experiment.manifest.deployment
        runs = [run for run in experiment.runs if run.validity.valid and run.workload.mode == "mixed"]
        if deployment is None or not isinstance(deployment.topology, Disaggregated) or not runs:
            continue
        best = max(runs, key=lambda run: _window(run).requests_per_s)
        window = _window(best)
        deployments.append(
            MeasuredDeployment(
                name=experiment.name,
                label=deployment.label,
                prefill=deployment.topology.prefill.ranks,
                decode=deployment.topology.decode.ranks,
                best_rps_per_gpu=window.requests_per_s / deployment.gpus,
                at=best.key.stem,
                tpot_p50_s=window.tpot.p50_s if window.tpot else None,
            )
        )
    return tuple(sorted(deployments, key=lambda m: -m.best_rps_per_gpu))


IMPLIED_HEAD = (
    "concurrency", "TPOT p50 ms", "requests/s per replica", "P per D", "nearest P:D", "requests/s per GPU, at most"
)  # fmt: skip
MEASURED_HEAD = ("P:D", "requests/s per GPU", "at", "TPOT p50 ms", "deployment")


def report(prefill: Experiment, decode: Experiment, measured_experiments: Sequence[Experiment]) -> str:
    """Both phases, the ratios that they imply, and the measured ratios, as text."""
    best, levels = implied(prefill, decode)
    lines = [
        f"prefill only ({prefill.name}): {best.per_replica_rps:.2f} requests/s per replica (concurrency "
        f"{best.value:g}, TTFT p50 {ms(best.ttft_p50_s)} ms, {counted(best.repeats, 'repeat')})",
        f"decode only ({decode.name}), and the rate-matched ratio",
    ]
    implied_rows = [
        (
            f"{item.decode.value:g}",
            ms(item.decode.tpot_p50_s),
            f"{item.decode.per_replica_rps:.2f}",
            f"{item.prefill_per_decode:.2f}",
            f"{item.ratio.numerator}:{item.ratio.denominator}",
            f"{item.rps_per_gpu:.2f}",
        )
        for item in levels
    ]
    lines += [f"  {line}" for line in aligned([IMPLIED_HEAD, *implied_rows])]
    measured_rows = [
        (
            f"{deployment.prefill}:{deployment.decode}",
            f"{deployment.best_rps_per_gpu:.2f}",
            deployment.at,
            ms(deployment.tpot_p50_s),
            f"{deployment.name} ({deployment.label})",
        )
        for deployment in measured(measured_experiments, prefill)
    ]
    if measured_rows:
        lines += ["measured", *(f"  {line}" for line in aligned([MEASURED_HEAD, *measured_rows], left=(0, 2, 4)))]
    others = [each.name for each in measured_experiments if not _of_one_model(each, prefill)]
    if others:
        lines.append(f"note: left out, not of the model of {prefill.name}: {listed(others)}")
    for note in note_texts(decode.runs):
        lines.append(f"note: {note}")
    lines.append("note: neither phase includes the KV transfer, and real batches mix lengths")
    return "\n".join(lines)


def _pool(experiment: Experiment) -> Pool:
    deployment = experiment.manifest.deployment
    if deployment is None or deployment.mode != "collocated":
        raise UsageError(
            f"{experiment.name}: levels of one phase need a recorded collocated deployment; measure them on one"
        )
    return next(iter(deployment.pools.values()))


def _window(run: Run) -> Summary:
    return run.steady or run.whole


def _mean_or_none(values: Iterable[float | None]) -> float | None:
    known_values = [value for value in values if value is not None]
    return fmean(known_values) if known_values else None
