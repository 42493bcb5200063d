"""The P:D ratio that measurements of the single phases imply: ``python -m pdlab ratio``.

One prefill replica serves r_P requests/s (prefill-only), one decode replica r_D (decode-only, at the real context
length). A deployment of p and d replicas serves at most min(p r_P, d r_D), and wastes nothing if p r_P = d r_D. The
rate-matched ratio P:D is therefore r_D : r_P (DistServe, Zhong et al., OSDI 2024, section 4). r_D depends on the batch
and so on the accepted TPOT: one line per level. Neither phase includes the KV transfer, so this is an upper bound,
printed beside measured deployments.

r_P is the most of any prefill level. If that is the highest valid one, a higher one may serve more. P:D is then an
upper bound, and what a deployment serves has none. r_D is of a level's own TPOT, so higher levels do not change it.

Every figure is the mean over the valid repeats of a level (`pdlab.analysis.curves`). The phases and the deployments
beside them must be comparable (`pdlab.analysis.comparable.phase_obstacles`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import NamedTuple

from pdlab.analysis.comparable import COMPARED_LOADS, PROPERTIES, phase_obstacles, property_words
from pdlab.analysis.curves import Curve, Point, curves
from pdlab.core.bounds import Metric
from pdlab.core.deployment import Disaggregated, Pool
from pdlab.core.errors import UsageError
from pdlab.core.schema import Frozen
from pdlab.core.text import aligned, counted, listed, ms, percent
from pdlab.core.workload import WorkloadMode
from pdlab.results.schema import Experiment, note_texts

MOST_REPLICAS = 8


class PhaseRate(Frozen):
    """One closed-loop level of a phase: ``per_replica_rps`` requests/s of one replica, mean over ``repeats`` valid
    repeats. ``whole``: of the whole run, because some repeat has no steady window."""

    value: float
    per_replica_rps: float
    tpot_p50_s: float | None
    ttft_p50_s: float | None
    repeats: int
    whole: bool


class RatioAtLevel(Frozen):
    """Rate-matched ratio at one decode level. ``prefill_per_decode``: r_D / r_P. ``ratio``: the nearest of small whole
    numbers. ``rps_per_gpu``: what that ratio could serve per GPU, without any transfer."""

    decode: PhaseRate
    prefill_per_decode: float
    ratio: Fraction
    rps_per_gpu: float


class MeasuredDeployment(Frozen):
    """A measured PD deployment: its replicas and its level of the most requests/s per GPU, mean over ``repeats`` valid
    repeats. ``whole``: see `PhaseRate`."""

    name: str
    label: str
    prefill: int
    decode: int
    best_rps_per_gpu: float
    at: str
    repeats: int
    tpot_p50_s: float | None
    whole: bool


class Measured(NamedTuple):
    """``deployments``: best first. ``left_out``: reason -> the others, each with what it has in its place."""

    deployments: tuple[MeasuredDeployment, ...]
    left_out: dict[str, list[str]]


def rates(experiment: Experiment, mode: WorkloadMode) -> tuple[PhaseRate, ...]:
    """Requests/s per replica of each closed-loop level. Raises UsageError for another phase or without a valid
    level."""
    return _rates(_phase(experiment, mode), _pool(experiment))


def _rates(curve: Curve, pool: Pool) -> tuple[PhaseRate, ...]:
    return tuple(
        PhaseRate(
            value=point.value,
            per_replica_rps=point.requests_per_s / pool.replicas,
            tpot_p50_s=_p50_s(point, "tpot"),
            ttft_p50_s=_p50_s(point, "ttft"),
            repeats=point.repeats,
            whole=point.window == "whole",
        )
        for point in curve.points
    )


class ImpliedRatios(NamedTuple):
    """The prefill rate of the best level, and the ratio at every decode level. ``top``: see `TopLevel`; None if a
    higher prefill level serves less."""

    prefill: PhaseRate
    levels: tuple[RatioAtLevel, ...]
    top: TopLevel | None = None


class TopLevel(NamedTuple):
    """The best prefill level is the highest valid one. ``below``: the next lower one; None for a single level."""

    below: PhaseRate | None


def implied(prefill: Experiment, decode: Experiment) -> ImpliedRatios:
    """The ratios of replicas that the rates of the two phases imply.

    Raises UsageError if the two may not be compared, or if one has no valid level of its phase.
    """
    p_curve, d_curve = _phase(prefill, "prefill-only"), _phase(decode, "decode-only")
    for obstacle in phase_obstacles(p_curve, d_curve):
        has = " and ".join(f"{each.name} ({property_words(each, obstacle)})" for each in (p_curve, d_curve))
        raise UsageError(f"{has}: the phases must be of one {PROPERTIES[obstacle]}; measure both with the same")
    p_pool, d_pool = _pool(prefill), _pool(decode)
    prefill_rates = _rates(p_curve, p_pool)
    best = max(prefill_rates, key=lambda rate: rate.per_replica_rps)
    *lower, highest = sorted(prefill_rates, key=lambda rate: rate.value)
    levels = []
    for rate in _rates(d_curve, d_pool):
        quotient = rate.per_replica_rps / best.per_replica_rps
        ratio = nearest(quotient)
        p, d = ratio.numerator, ratio.denominator
        served = min(p * best.per_replica_rps, d * rate.per_replica_rps)
        gpus = p * p_pool.gpus_per_replica + d * d_pool.gpus_per_replica
        levels.append(RatioAtLevel(decode=rate, prefill_per_decode=quotient, ratio=ratio, rps_per_gpu=served / gpus))
    top = TopLevel(lower[-1] if lower else None) if best is highest else None
    return ImpliedRatios(best, tuple(levels), top)


def nearest(prefill_per_decode: float) -> Fraction:
    """P:D of at most 8 replicas each, nearest on a logarithmic scale."""
    options = {Fraction(p, d) for p in range(1, MOST_REPLICAS + 1) for d in range(1, MOST_REPLICAS + 1)}

    def distance(option: Fraction) -> tuple[float, int]:
        quotient = prefill_per_decode / float(option)
        return max(quotient, 1 / quotient), option.numerator + option.denominator

    return min(sorted(options), key=distance)


def measured(experiments: Iterable[Experiment], phases: tuple[Experiment, Experiment] | None = None) -> Measured:
    """The PD deployments among them; with ``phases`` (prefill, decode) those that may be compared with both.

    Raises UsageError for a phase without a valid level.
    """
    beside = [] if phases is None else [_phase(phases[0], "prefill-only"), _phase(phases[1], "decode-only")]
    deployments: list[MeasuredDeployment] = []
    left_out: dict[str, list[str]] = {}
    for experiment in experiments:
        deployment = experiment.manifest.deployment
        if deployment is None or not isinstance(deployment.topology, Disaggregated):
            left_out.setdefault("not a recorded deployment with prefill and decode apart", []).append(experiment.name)
            continue
        curve = _of_mode(experiment, "mixed")
        points = [point for point in curve.points if point.kind in COMPARED_LOADS]
        if not points:
            left_out.setdefault("without a valid level of mode mixed", []).append(experiment.name)
            continue
        obstacles = [obstacle for phase in beside for obstacle in phase_obstacles(curve, phase)]
        if obstacles:
            reason = f"not of the {PROPERTIES[obstacles[0]]} of the phases"
            left_out.setdefault(reason, []).append(f"{experiment.name} ({property_words(curve, obstacles[0])})")
            continue
        best = max(points, key=lambda point: point.requests_per_s)
        deployments.append(
            MeasuredDeployment(
                name=experiment.name,
                label=deployment.label,
                prefill=deployment.topology.prefill.replicas,
                decode=deployment.topology.decode.replicas,
                best_rps_per_gpu=best.requests_per_s / deployment.gpus,
                at=_load_name(best),
                repeats=best.repeats,
                tpot_p50_s=_p50_s(best, "tpot"),
                whole=best.window == "whole",
            )
        )
    return Measured(tuple(sorted(deployments, key=lambda m: -m.best_rps_per_gpu)), left_out)


IMPLIED_HEAD = ("concurrency", "TPOT p50 ms", "requests/s per replica", "P per D", "nearest P:D")
MEASURED_HEAD = ("P:D", "requests/s per GPU", "at", "repeats", "TPOT p50 ms", "deployment")


def report(prefill: Experiment, decode: Experiment, measured_experiments: Sequence[Experiment]) -> str:
    """Both phases, the ratios that they imply, and the measured ratios, as text."""
    best, levels, top = implied(prefill, decode)
    lines = [
        f"prefill only ({prefill.name}): {best.per_replica_rps:.2f} requests/s per replica (concurrency "
        f"{best.value:g}, TTFT p50 {ms(best.ttft_p50_s)} ms, {counted(best.repeats, 'repeat')})",
        f"decode only ({decode.name}), and the rate-matched ratio",
    ]
    per_gpu = "requests/s per GPU" + (", at most" if top is None else "")
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
    lines += [f"  {line}" for line in aligned([(*IMPLIED_HEAD, per_gpu), *implied_rows])]
    deployments, left_out = measured(measured_experiments, (prefill, decode))
    measured_rows = [
        (
            f"{deployment.prefill}:{deployment.decode}",
            f"{deployment.best_rps_per_gpu:.2f}",
            deployment.at,
            str(deployment.repeats),
            ms(deployment.tpot_p50_s),
            f"{deployment.name} ({deployment.label})",
        )
        for deployment in deployments
    ]
    if measured_rows:
        lines += ["measured", *(f"  {line}" for line in aligned([MEASURED_HEAD, *measured_rows], left=(0, 2, 5)))]
    if top is not None:
        lines.append(f"note: {_top_note(prefill.name, best, top)}")
    lines += [f"note: left out, {reason}: {listed(names)}" for reason, names in left_out.items()]
    whole = [f"{prefill.name} at concurrency {best.value:g}"] * best.whole
    whole += [f"{decode.name} at concurrency {item.decode.value:g}" for item in levels if item.decode.whole]
    whole += [f"{deployment.name} at {deployment.at}" for deployment in deployments if deployment.whole]
    if whole:
        lines.append(f"note: figures of the whole run, ramp-up and drain included: {listed(whole)}")
    lines += [f"note: {note}" for note in note_texts(decode.runs)]
    lines.append("note: neither phase includes the KV transfer, and real batches mix lengths")
    return "\n".join(lines)


def _top_note(name: str, best: PhaseRate, top: TopLevel) -> str:
    if top.below is None:
        found = f"{name} has one valid level (concurrency {best.value:g})"
    else:
        more = percent(best.per_replica_rps / top.below.per_replica_rps - 1)
        found = (
            f"{name} serves the most at its highest valid level (concurrency {best.value:g}, {more} % above "
            f"concurrency {top.below.value:g})"
        )
    return (
        f"{found}, and may serve more at a higher one: P per D is an upper bound, and requests/s per GPU may be more; "
        "measure higher levels"
    )


def _pool(experiment: Experiment) -> Pool:
    deployment = experiment.manifest.deployment
    if deployment is None or deployment.mode != "collocated":
        raise UsageError(
            f"{experiment.name}: levels of one phase need a recorded collocated deployment; measure them on one"
        )
    return next(iter(deployment.pools.values()))


def _phase(experiment: Experiment, mode: WorkloadMode) -> Curve:
    """The valid closed-loop levels of that mode. Raises UsageError without one."""
    _pool(experiment)
    curve = _of_mode(experiment, mode)
    points = tuple(point for point in curve.points if point.kind == "concurrency")
    if not points:
        raise UsageError(f"{experiment.name}: no valid closed-loop level of mode {mode}")
    return curve.model_copy(update={"points": points})


def _of_mode(experiment: Experiment, mode: WorkloadMode) -> Curve:
    """The valid levels of that mode. Raises StoreError if GPUs are unknown."""
    runs = tuple(run for run in experiment.runs if run.validity.valid and run.workload.mode == mode)
    return curves([experiment.model_copy(update={"runs": runs})])[0]


def _load_name(point: Point) -> str:
    return f"concurrency {point.load}" if point.kind == "concurrency" else point.load


def _p50_s(point: Point, metric: Metric) -> float | None:
    value_ms = point.ms(metric, "p50")
    return None if value_ms is None else value_ms / 1000
