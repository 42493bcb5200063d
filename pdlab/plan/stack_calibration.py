"""A correction of tabulated steps from a handful of measured levels: what they say, how much each helped, what next.

The prior is the correction that the hardware has: that of the public stacks, or of levels measured before. Two to four
levels, spread over TP and lengths, move it (`pdlab.plan.correction_fit`). How much a level helped, and which one would
help most, is by the mean variance of the predicted TPOT over `candidates`: deployments, lengths and loads around those
that were measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pdlab.core.catalog import ModelShape
from pdlab.core.deployment import Collocated, Deployment, Disaggregated, Pool
from pdlab.core.errors import UsageError
from pdlab.core.vllm_limits import check_divisibility
from pdlab.core.workload import Closed, Level, Workload
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
    gains,
    perturbed,
    posterior,
    prediction_variance,
    slopes_at,
)
from pdlab.sim.hardware import Hardware
from pdlab.sim.level import figures
from pdlab.sim.simulator import simulate
from pdlab.sim.step_source import NO_CORRECTION, Correction

SEED = (0,)
ROUNDS = 3  # of Gauss and Newton: responses are straight lines only nearby
LOADS = (4, 16, 64)  # requests in flight, of what may be measured next
LENGTHS = ((1024, 1024), (8192, 1024))
TPS = (1, 2, 4, 8)
PROMPTS = 3  # per request in flight, of a level that is only looked at
SOURCE = "python -m pdlab calibrate"


class LevelInformation(NamedTuple):
    """By what share of the variance of predictions a measured level lowered what the levels before it had left."""

    sweep: str
    load: str
    share: float


class LevelToMeasure(NamedTuple):
    """A level that was not measured, and by what share it would lower the variance that is left."""

    label: str
    input_tokens: int
    output_tokens: int
    concurrency: int
    share: float


class StackCalibration(NamedTuple):
    """``spread``: standard deviations of the logarithm of a predicted TPOT that the correction alone leaves unknown,
    before and after, as a mean over the candidates."""

    correction: Correction
    helped: tuple[LevelInformation, ...]
    next_level: LevelToMeasure | None
    spread: tuple[float, float]


def calibrated(
    hardware: Hardware,
    shape: ModelShape,
    sweeps: Sequence[MeasuredSweep],
    errors: dict[str, ErrorSds] | None = None,
) -> StackCalibration:
    """The correction after these levels. ``errors``: of levels within a stack (None: `ERRORS`).

    Raises UsageError for hardware whose steps are no tables, or whose correction has no covariance.
    """
    sds = errors or ERRORS
    prior = prior_belief(hardware)
    theta, responses = prior.mean.copy(), list[Response]()
    for _ in range(ROUNDS):
        responses = sweep_responses(hardware, shape, sweeps, theta)
        after = posterior(prior, theta, responses, sds)
        earlier_theta, theta = theta, bounded(after)
        still = bool(np.all(np.abs(theta - earlier_theta) < 0.01))
        if still:
            break
    targets = candidates(hardware, shape, sweeps, theta)
    slopes = np.array([each.response.slopes for each in targets]) if targets else np.eye(len(theta))
    names = [(sweep.name, name_of(level.load)) for sweep in sweeps for level in sweep.levels]
    shares = gains(prior, theta, responses, sds, slopes)
    before, left = (float(np.sqrt(prediction_variance(belief, slopes).mean())) for belief in (prior, after))
    earlier = hardware.steps.correction if hardware.steps else NO_CORRECTION
    settings = {(sweep.deployment.label, sweep.workload.label) for sweep in sweeps}
    correction = correction_of(after, earlier.fitted_levels + len(names), SOURCE)
    return StackCalibration(
        correction=correction.model_copy(update={"fitted_settings": earlier.fitted_settings + len(settings)}),
        helped=tuple(LevelInformation(*name, share) for name, share in zip(names, shares, strict=True)),
        next_level=_next(prior, theta, responses, targets, sds, slopes),
        spread=(before, left),
    )


def prior_belief(hardware: Hardware) -> CorrectionDistribution:
    """What is believed of the correction before these levels. Raises UsageError."""
    if hardware.steps is None:
        raise UsageError(f"{hardware.name}: its steps are constants of a fit; a correction is of tabulated steps")
    if hardware.steps.correction.covariance is None:
        raise UsageError(
            f"{hardware.name}: its correction has no covariance, so the weight of measured levels is unknown; start "
            "from a GPU type, such as --start H200"
        )
    return distribution_of_correction(hardware.steps.correction)


def sweep_responses(
    hardware: Hardware, shape: ModelShape, sweeps: Sequence[MeasuredSweep], theta: Array
) -> list[Response]:
    """TPOT and mean TTFT of every level, four simulations of each sweep."""
    found: list[Response] = []
    number = 0
    for sweep in sweeps:
        base, *aside = (
            predict(hardware.with_correction(correction_at(each)), shape, sweep, SEED)
            for each in (theta, *perturbed(theta))
        )
        for index, (level, truth) in enumerate(zip(sweep.levels, sweep.values, strict=True)):
            setting = LevelSetting(sweep.deployment.label, sweep.workload.label, name_of(level.load))
            for metric, place in ((TPOT, 0), (TTFT, 1)):
                measured, predicted = truth[place], base[index][place]
                others = [each[index][place] for each in aside]
                if measured is None or predicted is None:
                    continue
                known = [each for each in others if each is not None]
                found.append(
                    Response(metric, setting, number, math.log(measured / predicted), slopes_at(predicted, known))
                )
            number += 1
    return found


class PossibleLevel(NamedTuple):
    """A level that could be measured, as a response without a measured value."""

    level: LevelToMeasure
    response: Response


def candidates(
    hardware: Hardware, shape: ModelShape, sweeps: Sequence[MeasuredSweep], theta: Array
) -> list[PossibleLevel]:
    """TPOT of deployments of the measured kind at every TP that runs, at the measured and at usual lengths and loads.
    What does not run is left out."""
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
                        _tpot_s(hardware.with_correction(correction_at(each)), shape, deployment, workload, load)
                        for each in (theta, *perturbed(theta))
                    ]
                except UsageError:
                    continue
                setting = LevelSetting(deployment.label, workload.label, name_of(Closed(concurrency=load)))
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


def _next(
    prior: CorrectionDistribution,
    theta: Array,
    responses: Sequence[Response],
    targets: Sequence[PossibleLevel],
    sds: dict[str, ErrorSds],
    slopes: Array,
) -> LevelToMeasure | None:
    """The candidate that would lower the variance most; None where nothing can be measured."""
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
    """The correction, how much each level helped, and what to measure next: one fact a line."""
    correction = calibration.correction
    assert correction.covariance is not None
    host, factor, prefill, sync = (math.sqrt(row[index]) for index, row in enumerate(correction.covariance))
    lines = [
        f"correction of the tabulated steps after {correction.fitted_levels} levels:",
        f"  host {correction.host_ms:.2f} ms per step (+-{host:.2f}), decode x {correction.factor:.3f} "
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
    return "\n".join(lines)
