"""A stack's correction of tabulated steps, from a prior and a handful of measured levels. Pure.

A correction (`pdlab.sim.step_source.Correction`) is (host_ms, ln factor, ln prefill_factor, sync_us). What a level says
about it is linear nearby: the logarithm of measured over predicted, and how the predicted one moves with each. With
a normal prior the posterior is one step of Gauss and Newton, as `pdlab.plan.calibration` takes many of. Levels of one
stack are off together where they share TP, lengths or load: their errors have a covariance (`ErrorSds`), so that four
levels of one configuration do not count as four of four. Large residuals count less (`SOFT`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple

import numpy as np
from annotated_types import Ge
from numpy.typing import NDArray

from pdlab.core.schema import Frozen
from pdlab.sim.step_source import SEQUENCE_US, Correction

Array = NDArray[np.float64]
SOFT = 2.0  # standard deviations beyond which a residual's weight falls as its inverse
ROUNDS = 20  # of the weights
LEAST_VARIANCE = 1e-12


class ErrorSds(Frozen):
    """How far predictions are off, as standard deviations of logarithms in percent: of one ``level`` alone, and in
    common to levels with the same ``parallelism``, ``lengths`` or ``load``."""

    level: Annotated[float, Ge(0)]
    parallelism: Annotated[float, Ge(0)] = 0.0
    lengths: Annotated[float, Ge(0)] = 0.0
    load: Annotated[float, Ge(0)] = 0.0


class LevelSetting(NamedTuple):
    """What a level has in common with others: its parallelism, lengths and load, as labels."""

    parallelism: str
    lengths: str
    load: str


class Response(NamedTuple):
    """One figure of one level. ``metric``: TPOT or mean TTFT. ``residual``: logarithm of measured over predicted at the
    correction that ``slopes`` are of; ``slopes``: change of the predicted logarithm with (host_ms, ln factor,
    ln prefill_factor, sync_us). ``level``: figures of one level have the same number. ``predicted_s``: at that
    correction, seconds. ``saturated``: the level is near saturation (`pdlab.plan.stack_bands.saturation`)."""

    metric: str
    setting: LevelSetting
    level: int
    residual: float
    slopes: tuple[float, float, float, float]
    predicted_s: float = math.inf
    saturated: bool = False


class CorrectionDistribution(NamedTuple):
    """A normal distribution of (host_ms, ln factor, ln prefill_factor, sync_us)."""

    mean: Array
    covariance: Array


TPOT, TTFT = "TPOT", "mean TTFT"
ASIDE = (0.3, 0.1, 0.2, 2.0)  # of host_ms, ln factor, ln prefill_factor and sync_us, for slopes
# What is believed of a stack that stands alone, and of its levels' errors, before any other is looked at.
WIDE = CorrectionDistribution(np.array([0.5, 0.0, 0.2, 3.0]), np.diag(np.square([1.5, 0.15, 0.5, 5.0])))
ERRORS = {
    TPOT: ErrorSds(level=4, parallelism=3, lengths=3, load=2),
    TTFT: ErrorSds(level=12, parallelism=5, lengths=6, load=6),
}


def correction_at(theta: Array) -> Correction:
    """The correction of (host_ms, ln factor, ln prefill_factor, sync_us)."""
    return Correction(
        host_ms=max(float(theta[0]), 0.0),
        factor=math.exp(float(theta[1])),
        prefill_factor=math.exp(float(theta[2])),
        sync_us=max(float(theta[3]), 0.0),
        sequence_us=SEQUENCE_US,
    )


def slopes_at(base: float, aside: Sequence[float]) -> tuple[float, float, float, float]:
    """Of the logarithm of a figure, from its values `ASIDE` of each parameter."""
    host, factor, prefill, sync = (math.log(value / base) / step for value, step in zip(aside, ASIDE, strict=True))
    return host, factor, prefill, sync


def perturbed(theta: Array) -> list[Array]:
    """The corrections aside of one."""
    return [theta + np.eye(len(ASIDE))[index] * step for index, step in enumerate(ASIDE)]


def distribution_of_correction(correction: Correction) -> CorrectionDistribution:
    """Of a correction whose covariance is known."""
    assert correction.covariance is not None
    factors = np.log([correction.factor, correction.prefill_factor])
    mean = np.array([correction.host_ms, *factors, correction.sync_us])
    return CorrectionDistribution(mean, np.array(correction.covariance))


def bounded(belief: CorrectionDistribution) -> Array:
    """The mean, where neither the host nor waiting takes less than no time: of a belief whose mean does, the others
    are what is likely if it takes none."""
    mean, covariance = belief.mean.copy(), belief.covariance.copy()
    for index in (HOST, SYNC, HOST):
        if mean[index] < 0 < covariance[index, index]:
            along = covariance[:, index] / covariance[index, index]
            mean -= along * mean[index]
            covariance -= np.outer(along, covariance[index])
            mean[index] = 0.0
    return mean


HOST, SYNC = 0, 3  # places in a belief


def correction_of(belief: CorrectionDistribution, levels: int, source: str) -> Correction:
    """The belief as a file has it."""
    host_ms, *logs, sync_us = bounded(belief)
    host_ms, factor, prefill, sync_us = (float(f"{each:.4g}") for each in (host_ms, *np.exp(logs), sync_us))
    rows = [tuple(float(f"{value:.4g}") for value in row) for row in belief.covariance]
    return Correction(
        host_ms=max(host_ms, 0.0),
        factor=factor,
        prefill_factor=prefill,
        sync_us=max(sync_us, 0.0),
        sequence_us=SEQUENCE_US,
        covariance=tuple((row[0], row[1], row[2], row[3]) for row in rows),
        fitted_levels=levels,
        source=source,
    )


def errors_covariance(responses: Sequence[Response], sds: Mapping[str, ErrorSds]) -> Array:
    """Of the residuals of levels of one stack, (n, n), in squares of logarithms. Metrics are independent."""
    size = len(responses)
    covariance = np.zeros((size, size))
    for i, one in enumerate(responses):
        each = sds[one.metric]
        covariance[i, i] = (each.level / 100) ** 2 + LEAST_VARIANCE
        for j, other in enumerate(responses):
            if one.metric != other.metric:
                continue
            for name in LevelSetting._fields:
                if getattr(one.setting, name) == getattr(other.setting, name):
                    covariance[i, j] += (getattr(each, name) / 100) ** 2
    return covariance


def posterior(
    prior: CorrectionDistribution, at: Array, responses: Sequence[Response], sds: Mapping[str, ErrorSds]
) -> CorrectionDistribution:
    """What is believed after these levels. ``at``: where the responses' residuals and slopes were computed."""
    if not responses:
        return prior
    slopes = np.array([each.slopes for each in responses])
    residual = np.array([each.residual for each in responses])
    noise = errors_covariance(responses, sds)
    softened = noise
    belief = prior
    for _ in range(ROUNDS):
        gain = prior.covariance @ slopes.T @ np.linalg.inv(slopes @ prior.covariance @ slopes.T + softened)
        left = residual - slopes @ (prior.mean - at)
        belief = CorrectionDistribution(prior.mean + gain @ left, prior.covariance - gain @ slopes @ prior.covariance)
        off = np.abs(residual - slopes @ (belief.mean - at)) / np.sqrt(np.diag(noise))
        wider = np.sqrt(np.maximum(off / SOFT, 1.0))
        after = noise * np.outer(wider, wider)
        if np.allclose(after, softened, rtol=1e-3):
            break
        softened = after
    return belief


def prediction_variance(belief: CorrectionDistribution, slopes: Array) -> Array:
    """Of the logarithms that the correction leaves unknown, for rows of slopes (n, 4)."""
    variance: Array = np.einsum("ij,jk,ik->i", slopes, belief.covariance, slopes)
    return variance


def gains(
    prior: CorrectionDistribution, at: Array, responses: Sequence[Response], sds: Mapping[str, ErrorSds], targets: Array
) -> list[float]:
    """Per level, in the order of their numbers: by what share it lowers the mean variance of the ``targets`` (rows of
    slopes) that the levels before it left."""
    numbers = sorted({each.level for each in responses})
    before = float(prediction_variance(prior, targets).mean())
    shares = []
    for count in range(1, len(numbers) + 1):
        taken = [each for each in responses if each.level in numbers[:count]]
        after = float(prediction_variance(posterior(prior, at, taken, sds), targets).mean())
        shares.append(1 - after / before)
        before = after
    return shares
