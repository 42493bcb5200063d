"""Correct tabulated steps by a few measured levels; how much each level helped, and which level to measure next.

The prior is the correction that the hardware has: that of the public stacks, or of levels measured before. Two to four
levels, spread over TP and lengths, change it (`pdlab.plan.correction_fit`). A level helps as much as it lowers the mean
variance of the predicted TPOT over `possible_levels`: deployments, lengths and loads around the measured ones.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Container, Sequence
from typing import NamedTuple

import numpy as np

from pdlab.core.catalog import ModelShape
from pdlab.core.deployment import Collocated, Deployment, Disaggregated, Pool
from pdlab.core.errors import UsageError
from pdlab.core.text import counted
from pdlab.core.vllm_limits import check_divisibility
from pdlab.core.workload import Closed, Level, Load, Workload
from pdlab.plan.accuracy import MeasuredSweep, name_of
from pdlab.plan.calibration import predict
from pdlab.plan.correction_fit import (
    ERRORS,
    TPOT,
    TTFT,
    Array,
    CorrectionDistribution,
    ErrorSds,
    LevelSetting,
    Response,
    bounded,
    correction_at,
    correction_of,
    distribution_of_correction,
    errors_covariance,
    gains,
    perturbed,
    posterior,
    prediction_variance,
    slopes_at,
)
from pdlab.plan.error_catalog import error_after
from pdlab.plan.prediction_intervals import half_width
from pdlab.plan.stack_bands import saturation
from pdlab.sim.hardware import FitError, Hardware
from pdlab.sim.level import figures
from pdlab.sim.simulator import simulate
from pdlab.sim.step_source import NO_CORRECTION, Correction, FittedLevel, parallelism_of

SEED = (0,)
ROUNDS = 3  # Gauss-Newton steps: responses are linear only near the correction
# A level that is farther off, in standard deviations, contradicts the stack. Published levels that a correction of
# their own stack leaves off by more than 3 are near saturation, of P:D or of the lowest load: by up to 4.7.
MOST_SDS, MOST_SDS_UNSURE = 3.0, 6.0
# The levels that may be measured next:
LOADS = (4, 16, 64)  # requests in flight
LENGTHS = ((1024, 1024), (8192, 1024))
TPS = (1, 2, 4, 8)
PROMPTS = 3  # requests of a simulation, per request in flight
SOURCE = "python -m pdlab calibrate"


class LevelInformation(NamedTuple):
    """A measured level. ``share``: by this share it lowered the variance that the levels before it left."""

    sweep: str
    load: str
    share: float


class LevelToMeasure(NamedTuple):
    """A level that was not measured. ``share``: by this share it would lower the variance that is left."""

    label: str
    input_tokens: int
    output_tokens: int
    concurrency: int
    share: float


class ContradictingLevel(NamedTuple):
    """A level that the corrected tables do not explain. ``sds``: the distance of measured and predicted, in standard
    deviations of what a level of the stack may differ by. ``measured_s``, ``predicted_s``: of ``metric``."""

    sweep: str
    load: str
    metric: str
    measured_s: float
    predicted_s: float
    sds: float


class LevelsOutsideBand(NamedTuple):
    """More than half of the levels are outside of their own bands after the correction. ``outside``: how many of
    ``levels``, the levels whose ``metric`` has a band. ``error``: their median error, the predicted over the measured
    figure minus 1."""

    metric: str
    outside: int
    levels: int
    error: float


class StackCalibration(NamedTuple):
    """A correction after measured levels. ``helped``: how much each level helped. ``contradicting``: the levels that
    contradict it, each with its worst figure. ``next_level``: the level that would help most (None: none can be
    measured). ``spread``: the standard deviation of the logarithm of a predicted TPOT that is due to the correction,
    before and after the levels, as a mean over `possible_levels`. ``error``: the errors of predictions with the
    correction, if the levels do not contradict it. ``outside``: the metrics of which most levels are outside of bands
    of these errors."""

    correction: Correction
    helped: tuple[LevelInformation, ...]
    next_level: LevelToMeasure | None
    spread: tuple[float, float]
    error: FitError
    contradicting: tuple[ContradictingLevel, ...] = ()
    outside: tuple[LevelsOutsideBand, ...] = ()

    @property
    def contradicted_by_all(self) -> bool:
        """Whether no level is explained by the correction."""
        return bool(self.helped) and len(self.contradicting) == len(self.helped)


def calibrated(
    hardware: Hardware,
    shape: ModelShape,
    sweeps: Sequence[MeasuredSweep],
    errors: dict[str, ErrorSds] | None = None,
) -> StackCalibration:
    """The correction after these levels. Levels that it has already, and levels that are given twice, bring nothing.
    ``errors``: metric -> the errors of levels within a stack (None: `ERRORS`). Raises UsageError for hardware whose
    steps are no tables, or whose correction has no covariance."""
    sds = errors or ERRORS
    prior = prior_correction(hardware)
    earlier = hardware.steps.correction if hardware.steps else NO_CORRECTION
    new = new_levels(earlier, sweeps)
    theta, responses = prior.mean.copy(), list[Response]()
    for _ in range(ROUNDS):
        responses = [each for each in sweep_responses(hardware, shape, sweeps, theta) if each.level in new]
        after = posterior(prior, theta, responses, sds)
        before_step, theta = theta, bounded(after)
        if np.all(np.abs(theta - before_step) < 0.01):
            break
    targets = possible_levels(hardware, shape, sweeps, theta)
    slopes = np.array([each.response.slopes for each in targets]) if targets else np.eye(len(theta))
    every = [(sweep.name, name_of(level.load)) for sweep in sweeps for level in sweep.levels]
    names = [every[number] for number in new]
    shares = gains(prior, theta, responses, sds, slopes)
    before, left = (float(np.sqrt(prediction_variance(each, slopes).mean())) for each in (prior, after))
    correction = correction_of(after, 0, SOURCE, earlier.sequence_us).with_levels(earlier, list(new.values()))
    error = error_after(correction.fitted_settings)
    judged = _judged(hardware, shape, sweeps, new, after)
    return StackCalibration(
        correction=correction,
        helped=tuple(LevelInformation(*name, share) for name, share in zip(names, shares, strict=True)),
        next_level=_next_level(prior, theta, responses, targets, sds, slopes),
        spread=(before, left),
        error=error,
        contradicting=_contradicting(judged, after, sds),
        outside=_outside(judged, error),
    )


def new_levels(earlier: Correction, sweeps: Sequence[MeasuredSweep]) -> dict[int, FittedLevel]:
    """The levels that a correction does not have, by their numbers over all sweeps; each once."""
    known = set(earlier.levels)
    new: dict[int, FittedLevel] = {}
    for number, each in enumerate(level for sweep in sweeps for level in _levels_of(sweep)):
        if each not in known:
            known.add(each)
            new[number] = each
    return new


def _levels_of(sweep: MeasuredSweep) -> list[FittedLevel]:
    def significant(value: float) -> float:
        return float(f"{value:.6g}")

    return [
        FittedLevel(
            deployment=sweep.deployment.label,
            lengths=sweep.workload.label,
            load=name_of(level.load),
            tpot_s=None if tpot_s is None else significant(tpot_s),
            ttft_s=significant(ttft_s),
        )
        for level, (tpot_s, ttft_s, *_) in zip(sweep.levels, sweep.values, strict=True)
    ]


class JudgedFigure(NamedTuple):
    """A figure of a level after the correction. ``sweep``, ``load``: names of the level. ``unsure``: predictions of it
    have no band, or it is the TTFT of a sweep's lowest load, whose first requests warm up the engines."""

    response: Response
    sweep: str
    load: str
    unsure: bool


def _judged(
    hardware: Hardware,
    shape: ModelShape,
    sweeps: Sequence[MeasuredSweep],
    judged: Container[int],
    after: CorrectionDistribution,
) -> list[JudgedFigure]:
    """The figures of the ``judged`` levels. ``after``: the correction. Near saturation and of P:D there is no band."""
    theta = bounded(after)
    responses = [each for each in sweep_responses(hardware, shape, sweeps, theta) if each.level in judged]
    if not responses:
        return []
    names: list[tuple[str, str]] = []
    lowest: set[int] = set()
    unsure: set[int] = set()
    corrected = _corrected(hardware, theta)
    for sweep in sweeps:
        lowest.add(len(names) + min(range(len(sweep.levels)), key=lambda index: sweep.levels[index].load.value))
        for level, simulated in zip(sweep.levels, sweep.simulated(corrected, shape, seed=SEED[0]), strict=True):
            prefills_apart = sweep.deployment.transport is not None
            if prefills_apart or saturation([simulated], corrected, shape, sweep.deployment) is not None:
                unsure.add(len(names))
            names.append((sweep.name, name_of(level.load)))
    return [
        JudgedFigure(each, *names[each.level], each.level in unsure or (each.metric == TTFT and each.level in lowest))
        for each in responses
    ]


def _contradicting(
    judged: Sequence[JudgedFigure], after: CorrectionDistribution, sds: dict[str, ErrorSds]
) -> tuple[ContradictingLevel, ...]:
    """The levels with a figure that is off by more than `MOST_SDS`; where it is unsure, `MOST_SDS_UNSURE`."""
    if not judged:
        return ()
    responses = [each.response for each in judged]
    variances = np.diag(errors_covariance(responses, sds)) + prediction_variance(
        after, np.array([each.slopes for each in responses])
    )
    worst: dict[int, ContradictingLevel] = {}
    for (each, sweep, load, unsure), sd in zip(judged, np.sqrt(variances), strict=True):
        distance = abs(each.residual) / float(sd)
        most = MOST_SDS_UNSURE if unsure else MOST_SDS
        if distance > max(most, worst[each.level].sds if each.level in worst else 0.0):
            worst[each.level] = ContradictingLevel(
                sweep, load, each.metric, each.predicted_s * math.exp(each.residual), each.predicted_s, distance
            )
    return tuple(worst[number] for number in sorted(worst))


def _outside(judged: Sequence[JudgedFigure], error: FitError) -> tuple[LevelsOutsideBand, ...]:
    """The metrics of which more than half of the levels are outside of their bands. Right bands hold 90 % of levels
    that a correction was not fitted to, and more of these."""
    found = []
    for metric in (TPOT, TTFT):
        sure = [each.response for each in judged if each.response.metric == metric and not each.unsure]
        beyond = [
            abs(each.residual) > half_width(error.parts[metric], predicted_ms=1e3 * each.predicted_s) for each in sure
        ]
        if 2 * sum(beyond) > len(sure):
            median = math.expm1(-statistics.median(each.residual for each in sure))
            found.append(LevelsOutsideBand(metric, sum(beyond), len(sure), median))
    return tuple(found)


def prior_correction(hardware: Hardware) -> CorrectionDistribution:
    """The distribution of the correction before these levels. Raises UsageError."""
    if hardware.steps is None:
        raise UsageError(f"{hardware.name}: its steps are constants of a fit; a correction is of tabulated steps")
    if hardware.steps.correction.covariance is None:
        raise UsageError(
            f"{hardware.name}: its correction has no covariance, so the weight of measured levels is unknown; start "
            "from a GPU type, such as --start H200"
        )
    return distribution_of_correction(hardware.steps.correction)


def _corrected(hardware: Hardware, theta: Array) -> Hardware:
    """The hardware with these parameters of its correction."""
    assert hardware.steps is not None
    return hardware.with_correction(correction_at(theta, hardware.steps.correction.sequence_us))


def sweep_responses(
    hardware: Hardware, shape: ModelShape, sweeps: Sequence[MeasuredSweep], theta: Array
) -> list[Response]:
    """The responses of TPOT and mean TTFT of every level to the parameters ``theta`` of a correction. Each sweep is
    simulated at ``theta``, and with a step in each parameter. Raises UsageError if it cannot run."""
    found: list[Response] = []
    number = 0
    for sweep in sweeps:
        at_theta, *after_steps = (
            predict(_corrected(hardware, each), shape, sweep, SEED) for each in (theta, *perturbed(theta))
        )
        for index, (level, figures_measured) in enumerate(zip(sweep.levels, sweep.values, strict=True)):
            setting = _setting(sweep.deployment, sweep.workload, level.load)
            for metric, place in ((TPOT, 0), (TTFT, 1)):
                measured, predicted = figures_measured[place], at_theta[index][place]
                if measured is None or predicted is None:
                    continue
                moved = [value for each in after_steps if (value := each[index][place]) is not None]
                slopes = slopes_at(predicted, moved)
                found.append(Response(metric, setting, number, math.log(measured / predicted), slopes, predicted))
            number += 1
    return found


def _setting(deployment: Deployment, workload: Workload, load: Load) -> LevelSetting:
    """What levels of equal engines have in common: the load is that of one replica that decodes."""
    *_, decode = deployment.pools.values()
    return LevelSetting(parallelism_of(deployment), workload.label, f"{load.kind} {load.value / decode.replicas:g}")


class PossibleLevel(NamedTuple):
    """A level that may be measured, with the response of its TPOT, whose residual is 0."""

    level: LevelToMeasure
    response: Response


def possible_levels(
    hardware: Hardware, shape: ModelShape, sweeps: Sequence[MeasuredSweep], theta: Array
) -> list[PossibleLevel]:
    """Levels of deployments of the measured kind at every TP, at the measured and usual lengths, and at usual loads.
    Levels that cannot run are left out."""
    lengths = dict.fromkeys(
        [(each.workload.input_tokens, each.workload.output_tokens) for each in sweeps] + list(LENGTHS)
    )
    found: list[PossibleLevel] = []
    for deployment in _deployments(shape, sweeps[0].deployment):
        for input_tokens, output_tokens in lengths:
            workload = Workload(input_tokens=input_tokens, output_tokens=output_tokens)
            for load in LOADS:
                try:
                    values = [
                        _tpot_s(_corrected(hardware, each), shape, deployment, workload, load)
                        for each in (theta, *perturbed(theta))
                    ]
                except UsageError:
                    continue
                setting = _setting(deployment, workload, Closed(concurrency=load))
                level = LevelToMeasure(deployment.label, input_tokens, output_tokens, load, 0.0)
                slopes = slopes_at(values[0], values[1:])
                found.append(PossibleLevel(level, Response(TPOT, setting, -1 - len(found), 0.0, slopes)))
    return found


def _deployments(shape: ModelShape, like: Deployment) -> list[Deployment]:
    """One engine, or one of each role, at every TP that the model takes."""
    found = []
    for tp in TPS:
        pool = Pool(replicas=1, tp=tp)
        topology = (
            Disaggregated(prefill=pool, decode=pool, placement=like.topology.placement)
            if isinstance(like.topology, Disaggregated)
            else Collocated(pool=pool)
        )
        deployment = like.model_copy(update={"topology": topology})
        try:
            check_divisibility(deployment, shape)
        except UsageError:
            continue
        found.append(deployment)
    return found


def _tpot_s(hardware: Hardware, shape: ModelShape, deployment: Deployment, workload: Workload, load: int) -> float:
    level = Level(load=Closed(concurrency=load), num_requests=PROMPTS * load, seed=0)
    (simulated,) = simulate(deployment, [level], workload, hardware, shape)
    tpot_s = figures(simulated).tpot_s
    if tpot_s is None:
        raise UsageError("answers of one token have no TPOT")
    return tpot_s


def _next_level(
    prior: CorrectionDistribution,
    theta: Array,
    responses: Sequence[Response],
    targets: Sequence[PossibleLevel],
    sds: dict[str, ErrorSds],
    slopes: Array,
) -> LevelToMeasure | None:
    """The level that would lower the variance most; None if no level can be measured."""
    measured = {each.setting for each in responses}
    left = float(prediction_variance(posterior(prior, theta, responses, sds), slopes).mean())
    best: LevelToMeasure | None = None
    for each in targets:
        if each.response.setting in measured:
            continue
        with_it = posterior(prior, theta, [*responses, each.response], sds)
        share = 1 - float(prediction_variance(with_it, slopes).mean()) / left
        if best is None or share > best.share:
            best = each.level._replace(share=share)
    return best


def calibration_text(calibration: StackCalibration) -> str:
    """The correction, how much each level helped, and which level to measure next; one fact a line."""
    correction = calibration.correction
    assert correction.covariance is not None
    host, factor, prefill, sync = (math.sqrt(row[index]) for index, row in enumerate(correction.covariance))
    lines = [
        f"correction of the tabulated steps after {counted(correction.fitted_levels, 'level')}:",
        f"  host {correction.host_ms:.2f} ms per step (+-{host:.2f}) and {correction.sequence_us:g} us per decoding "
        f"sequence, decode x {correction.factor:.3f} "
        f"(+-{factor:.0%}), prefill x {correction.prefill_factor:.3f} (+-{prefill:.0%}), {correction.sync_us:.1f} us "
        f"per layer and doubling of TP (+-{sync:.1f})",
        "  what it leaves unknown of a TPOT: {:.1%} before, {:.1%} after".format(*calibration.spread),
        "each level lowered the variance that the levels before it left, by",
    ]
    lines += [f"  {each.share:4.0%}  {each.sweep}, {each.load}" for each in calibration.helped]
    best = calibration.next_level
    if best is not None:
        lines.append(
            f"measure next: {best.label}, {best.input_tokens}:{best.output_tokens}, concurrency {best.concurrency} "
            f"(expected: {best.share:.0%} of what is left)"
        )
    lines += [contradiction_text(each) for each in calibration.contradicting]
    lines += [outside_text(each) for each in calibration.outside]
    return "\n".join(lines)


def contradiction_text(level: ContradictingLevel) -> str:
    """One line: the level, what was measured, and what the correction predicts."""
    return (
        f"{level.sweep}, {level.load}, contradicts the stack: {level.metric} {1e3 * level.measured_s:.4g} ms measured, "
        f"{1e3 * level.predicted_s:.4g} ms predicted, {level.sds:.1f} standard deviations apart"
    )


def outside_text(levels: LevelsOutsideBand) -> str:
    """One line: how many levels are outside of their bands, and by how much they are off."""
    side = "short" if levels.error < 0 else "long"
    return (
        f"{levels.outside} of {counted(levels.levels, 'level')} outside of the band after the correction: "
        f"{levels.metric} {abs(levels.error):.0%} too {side} in the median"
    )
