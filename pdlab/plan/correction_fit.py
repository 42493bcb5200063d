"""A stack's correction of tabulated steps, from a prior and a handful of measured levels. Pure.

A correction (`pdlab.sim.step_source.Correction`) has the parameters (host_ms, ln factor, ln prefill_factor, sync_us). A
level gives the logarithm of measured over predicted, which is linear in the parameters nearby. With a normal prior, the
posterior is one Gauss-Newton step (`pdlab.plan.calibration` takes many). The errors of levels of one stack are
correlated if the levels share TP, lengths or load (`ErrorSds`). So four levels of one configuration count less than
four levels of four configurations. Large residuals count less (`SOFT`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple

import numpy as np
from annotated_types import Ge
from numpy.typing import NDArray

from pdlab.core.schema import Frozen
from pdlab.sim.step_source import Correction

Array = NDArray[np.float64]
SOFT = 2.0  # standard deviations: the weight of a larger residual is inverse to the residual
ROUNDS = 20  # of the iteration for these weights
LEAST_VARIANCE = 1e-12


class ErrorSds(Frozen):
    """Errors of predictions, as standard deviations of logarithms in percent. ``level``: the part of a single level.
    ``parallelism``, ``lengths``, ``load``: the parts that levels with the same one have in common."""

    level: Annotated[float, Ge(0)]
    parallelism: Annotated[float, Ge(0)] = 0.0
    lengths: Annotated[float, Ge(0)] = 0.0
    load: Annotated[float, Ge(0)] = 0.0


class LevelSetting(NamedTuple):
    """The parallelism, the lengths and the load of a level, as labels. Levels with equal labels have common errors."""

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
SLOPE_STEPS = (0.3, 0.1, 0.2, 2.0)  # of host_ms, ln factor, ln prefill_factor and sync_us
# The prior of a stack, and the errors of its levels, without any knowledge of other stacks.
WIDE = CorrectionDistribution(np.array([0.5, 0.0, 0.2, 3.0]), np.diag(np.square([1.5, 0.15, 0.5, 5.0])))
ERRORS = {
    TPOT: ErrorSds(level=4, parallelism=3, lengths=3, load=2),
    TTFT: ErrorSds(level=12, parallelism=5, lengths=6, load=6),
}


def correction_at(theta: Array, sequence_us: float) -> Correction:
    """The correction with the parameters (host_ms, ln factor, ln prefill_factor, sync_us), and a sequence's time."""
    return Correction(
        host_ms=max(float(theta[0]), 0.0),
        factor=math.exp(float(theta[1])),
        prefill_factor=math.exp(float(theta[2])),
        sync_us=max(float(theta[3]), 0.0),
        sequence_us=sequence_us,
    )


def slopes_at(base: float, moved: Sequence[float]) -> tuple[float, float, float, float]:
    """The slopes of the logarithm of a figure. ``moved``: the figure after each step of `SLOPE_STEPS`."""
    host, factor, prefill, sync = (
        math.log(value / base) / step for value, step in zip(moved, SLOPE_STEPS, strict=True)
    )
    return host, factor, prefill, sync


def perturbed(theta: Array) -> list[Array]:
    """The parameters after a step of `SLOPE_STEPS` in each one of them."""
    return list(theta + np.diag(SLOPE_STEPS))


def distribution_of_correction(correction: Correction) -> CorrectionDistribution:
    """The distribution of a correction whose covariance is known."""
    assert correction.covariance is not None
    factors = np.log([correction.factor, correction.prefill_factor])
    mean = np.array([correction.host_ms, *factors, correction.sync_us])
    return CorrectionDistribution(mean, np.array(correction.covariance))


def bounded(distribution: CorrectionDistribution) -> Array:
    """The mean, with times of the host and of waiting that are at least 0. If the mean of such a time is below 0, the
    result is the mean under the condition that the time is 0."""
    mean, covariance = distribution.mean.copy(), distribution.covariance.copy()
    for index in (HOST, SYNC, HOST):
        if mean[index] < 0 < covariance[index, index]:
            along = covariance[:, index] / covariance[index, index]
            mean -= along * mean[index]
            covariance -= np.outer(along, covariance[index])
            mean[index] = 0.0
    return mean


HOST, PREFILL, SYNC = 0, 2, 3  # indices of host_ms, ln prefill_factor and sync_us among the parameters


def correction_of(distribution: CorrectionDistribution, levels: int, source: str, sequence_us: float) -> Correction:
    """The distribution as a correction of hardware, fitted to that number of levels."""
    host_ms, *logs, sync_us = bounded(distribution)
    host_ms, factor, prefill, sync_us = (float(f"{each:.4g}") for each in (host_ms, *np.exp(logs), sync_us))
    rows = [tuple(float(f"{value:.4g}") for value in row) for row in distribution.covariance]
    return Correction(
        host_ms=max(host_ms, 0.0),
        factor=factor,
        prefill_factor=prefill,
        sync_us=max(sync_us, 0.0),
        sequence_us=sequence_us,
        covariance=tuple((row[0], row[1], row[2], row[3]) for row in rows),
        fitted_levels=levels,
        source=source,
    )


def errors_covariance(responses: Sequence[Response], sds: Mapping[str, ErrorSds]) -> Array:
    """The covariance of the residuals of one stack's levels, (n, n), of logarithms. Metrics are independent."""
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
    """The distribution after these levels. ``at``: the parameters of the responses' residuals and slopes."""
    if not responses:
        return prior
    slopes = np.array([each.slopes for each in responses])
    residual = np.array([each.residual for each in responses])
    noise = errors_covariance(responses, sds)
    weighted_noise = noise
    after = prior
    for _ in range(ROUNDS):
        gain = prior.covariance @ slopes.T @ np.linalg.inv(slopes @ prior.covariance @ slopes.T + weighted_noise)
        innovation = residual - slopes @ (prior.mean - at)
        mean = prior.mean + gain @ innovation
        after = CorrectionDistribution(mean, prior.covariance - gain @ slopes @ prior.covariance)
        deviations = np.abs(residual - slopes @ (mean - at)) / np.sqrt(np.diag(noise))
        widening = np.sqrt(np.maximum(deviations / SOFT, 1.0))
        new_noise = noise * np.outer(widening, widening)
        if np.allclose(new_noise, weighted_noise, rtol=1e-3):
            break
        weighted_noise = new_noise
    return after


def prediction_variance(distribution: CorrectionDistribution, slopes: Array) -> Array:
    """The variance of the logarithms of predictions that is due to the correction, (n), for ``slopes`` (n, 4)."""
    variance: Array = np.einsum("ij,jk,ik->i", slopes, distribution.covariance, slopes)
    return variance


def gains(
    prior: CorrectionDistribution, at: Array, responses: Sequence[Response], sds: Mapping[str, ErrorSds], targets: Array
) -> list[float]:
    """The gain of each level, in the order of their numbers. It is the share by which the level lowers the mean
    variance of the ``targets`` (rows of slopes) that the levels before it left. ``at``: see `posterior`."""
    numbers = sorted({each.level for each in responses})
    before = float(prediction_variance(prior, targets).mean())
    shares = []
    for count in range(1, len(numbers) + 1):
        taken = [each for each in responses if each.level in numbers[:count]]
        after = float(prediction_variance(posterior(prior, at, taken, sds), targets).mean())
        shares.append(1 - after / before)
        before = after
    return shares
