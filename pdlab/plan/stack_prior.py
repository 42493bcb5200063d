"""What other stacks say about one that was never measured: its correction, and how far predictions are off. Pure.

**The correction.** Each of its parameters is, over stacks, a mean plus effects of the model, of the GPU, of the
engine's version, and of the stack alone (a random-effects layout; Searle, Casella and McCulloch, Variance Components,
1992). The best linear prediction of a new stack is its prior: a model that was seen on another GPU counts more than one
that was not, and a version that was never seen is as wide as versions have differed.

**The errors** of predictions by such priors, every stack by the others, are split the same way (`error_components`): of
a stack as such, more of it for a model, a GPU or an engine's version that was not among the others, and of parallelism,
lengths, load and a level within a stack. These say how errors of one stack compare with those of another. How wide a
band is for them is counted (`hierarchical_quantile`): errors of stacks are not normal.

Standard deviations are those that make the values most likely, with a weak pull: each is believed to be near
`Believed` within a factor of two. Few stacks do not tell it better, and none of them is nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Annotated, NamedTuple

import numpy as np
from annotated_types import Ge, Gt

from pdlab.core.schema import Frozen
from pdlab.plan.correction_fit import Array, CorrectionDistribution, ErrorSds, Setting
from pdlab.plan.prediction_intervals import NORMAL_90
from pdlab.plan.public_points import UNSTATED, Stack
from pdlab.sim.hardware import ErrorParts

FACTOR = math.log(2.0)
STEPS = 1.25  # between tried standard deviations
SWEEPS = 4


class StackFit(NamedTuple):
    """What a stack's own levels say: (host_ms, ln factor, ln prefill_factor, sync_us), and standard deviations."""

    stack: Stack
    mean: Array
    sd: Array


class EffectSds(NamedTuple):
    """Standard deviations of one parameter over models, GPUs, engine versions, and of a stack alone."""

    model: float
    gpu: float
    engine: float
    alone: float


# Of host_ms, ln factor, ln prefill_factor, sync_us: engines of 2025 and 2026 differed by some tenths of a millisecond a
# step.
Believed = (
    EffectSds(0.6, 0.2, 0.3, 0.3),
    EffectSds(0.04, 0.04, 0.04, 0.04),
    EffectSds(0.2, 0.15, 0.15, 0.15),
    EffectSds(1.0, 1.0, 1.0, 1.0),
)


def _same(stack: Stack, other: Stack) -> tuple[bool, bool, bool, bool]:
    return (
        stack.model.split()[0] == other.model.split()[0],
        stack.gpu == other.gpu,
        (stack.engine, stack.version) == (other.engine, other.version) and stack.version != UNSTATED,
        stack == other,
    )


def _covariance(stacks: Sequence[Stack], others: Sequence[Stack], effects: EffectSds) -> Array:
    same = np.array([[_same(one, other) for other in others] for one in stacks], dtype=float)
    variance: Array = same @ np.square(np.array(effects))
    return variance


def most_likely(start: Sequence[float], loss: Callable[[Sequence[float]], float]) -> list[float]:
    """Standard deviations, each tried around its start one at a time, that make the loss least. The pull is added."""

    def whole(values: Sequence[float]) -> float:
        return loss(values) + sum((math.log(v / s) / FACTOR) ** 2 for v, s in zip(values, start, strict=True))

    best = list(start)
    least = whole(best)
    for _ in range(SWEEPS):
        before = least
        for index in range(len(best)):
            for power in range(-8, 9):
                trial = best.copy()
                trial[index] = start[index] * STEPS**power
                if (now := whole(trial)) < least:
                    best, least = trial, now
        if before - least < 1e-3:
            break
    return best


def _unlikely(residual: Array, covariance: Array) -> float:
    """-2 times the logarithm of a normal likelihood, but for a constant."""
    _, logarithm = np.linalg.slogdet(covariance)
    return float(logarithm + residual @ np.linalg.solve(covariance, residual))


def effects_of(fits: Sequence[StackFit]) -> tuple[EffectSds, ...]:
    """Of each parameter."""
    stacks = [fit.stack for fit in fits]
    found = []
    for index, start in enumerate(Believed):
        values = np.array([fit.mean[index] for fit in fits])
        noise = np.diag([fit.sd[index] ** 2 for fit in fits])

        def loss(sds: Sequence[float], values: Array = values, noise: Array = noise) -> float:
            covariance = _covariance(stacks, stacks, EffectSds(*sds)) + noise
            return _unlikely(values - _mean(values, covariance), covariance)

        found.append(EffectSds(*most_likely(start, loss)))
    return tuple(found)


def _mean(values: Array, covariance: Array) -> float:
    weights = np.linalg.solve(covariance, np.ones(len(values)))
    return float(weights @ values / weights.sum())


def prior_of(stack: Stack, fits: Sequence[StackFit], effects: Sequence[EffectSds]) -> CorrectionDistribution:
    """Of a stack from the fits of others. The uncertainty of their mean is in it."""
    others = [fit.stack for fit in fits]
    means, variances = [], []
    for index, each in enumerate(effects):
        values = np.array([fit.mean[index] for fit in fits])
        covariance = _covariance(others, others, each) + np.diag([fit.sd[index] ** 2 for fit in fits])
        toward = _covariance([stack], others, each)[0]
        inverse = np.linalg.inv(covariance)
        mean = _mean(values, covariance)
        means.append(mean + float(toward @ inverse @ (values - mean)))
        missing = 1 - float(toward @ inverse @ np.ones(len(values)))
        variances.append(
            sum(sd**2 for sd in each) - float(toward @ inverse @ toward) + missing**2 / float(inverse.sum())
        )
    return CorrectionDistribution(np.array(means), np.diag(variances))


# --- errors of predictions ------------------------------------------------------------------------


class ErrorComponents(Frozen):
    """How far predictions of one metric are off, as standard deviations of logarithms in percent. ``stack``: what all
    levels of a stack have in common; ``model``, ``gpu``, ``engine``: further where that was not among the stacks that
    the prior comes from. The others are within a stack (`pdlab.plan.correction_fit.ErrorSds`). ``reach``: within how
    many of the whole standard deviations 90 % of a new stack's errors are; None: too few stacks say so."""

    stack: Annotated[float, Ge(0)]
    model: Annotated[float, Ge(0)]
    gpu: Annotated[float, Ge(0)]
    engine: Annotated[float, Ge(0)]
    parallelism: Annotated[float, Ge(0)]
    lengths: Annotated[float, Ge(0)]
    load: Annotated[float, Ge(0)]
    level: Annotated[float, Ge(0)]
    reach: Annotated[float, Gt(0)] | None

    @property
    def within(self) -> ErrorSds:
        """Those within a stack."""
        return ErrorSds(level=self.level, parallelism=self.parallelism, lengths=self.lengths, load=self.load)

    def parts(self, unseen: Sequence[str] = ()) -> ErrorParts | None:
        """As intervals of predictions take them: in common to the levels of a configuration, and of one level, as wide
        as `reach` says. ``unseen``: what of model, GPU and engine no other stack has. None: there is no band."""
        if self.reach is None:
            return None
        wider = self.reach / NORMAL_90
        common = wider * math.hypot(self.stack, *(getattr(self, name) for name in unseen))
        level = wider * math.hypot(self.parallelism, self.lengths, self.load, self.level)
        return ErrorParts(common_percent=round(common, 2), level_percent=round(level, 2))

    def half_width(self, unseen: Sequence[str]) -> float:
        """Of the 90 % band, in logarithms; infinite where there is none."""
        return math.inf if self.reach is None else self.reach * self.sd(unseen=unseen)

    def sd(self, *, unseen: Sequence[str]) -> float:
        """Of the logarithm of measured over predicted, for a stack without own levels. ``unseen``: of model, gpu,
        engine."""
        parts = [self.stack, self.parallelism, self.lengths, self.load, self.level]
        parts += [getattr(self, name) for name in unseen]
        return math.hypot(*parts) / 100


class StackError(NamedTuple):
    """Of one level of a stack that was predicted by the others. ``error``: logarithm of measured over predicted."""

    stack: Stack
    setting: Setting
    unseen: tuple[str, ...]
    error: float


BELIEVED_ERRORS = {
    "TPOT": (6.0, 5.0, 4.0, 4.0, 3.0, 3.0, 3.0, 3.0),
    "mean TTFT": (15.0, 12.0, 10.0, 10.0, 6.0, 6.0, 6.0, 8.0),
    "tokens/s": (6.0, 5.0, 4.0, 4.0, 3.0, 3.0, 3.0, 3.0),
}
SEEN_BY = ("model", "gpu", "engine")
SOFT_ERRORS = 3.0


def unseen(stack: Stack, others: Sequence[Stack]) -> tuple[str, ...]:
    """What of model, GPU and engine with its version no other stack has."""
    same = [_same(stack, other) for other in others]
    return tuple(name for index, name in enumerate(SEEN_BY) if not any(each[index] for each in same))


def error_components(metric: str, errors: Sequence[StackError]) -> ErrorComponents:
    """The mean error is taken to be 0, since no prediction is corrected by it. Errors beyond `SOFT_ERRORS` times the
    median one count as that: one broken level of the tables is no reason to widen every band."""
    start = BELIEVED_ERRORS[metric]
    limit = SOFT_ERRORS * 1.4826 * float(np.median([abs(each.error) for each in errors]))
    by_stack: dict[Stack, list[StackError]] = {}
    for each in errors:
        by_stack.setdefault(each.stack, []).append(each)
    blocks = []
    for members in by_stack.values():
        values = np.clip([each.error for each in members], -limit, limit) * 100
        shared = [
            np.array([[one[index] == other[index] for other in settings] for one in settings], dtype=float)
            for settings in [[each.setting for each in members]]
            for index in range(3)
        ]
        blocks.append((values, members[0].unseen, shared))

    def loss(sds: Sequence[float]) -> float:
        total = 0.0
        for values, without, shared in blocks:
            size = len(values)
            common = sds[0] ** 2 + sum(sds[1 + index] ** 2 for index, name in enumerate(SEEN_BY) if name in without)
            covariance = common * np.ones((size, size)) + sds[7] ** 2 * np.eye(size)
            for sd, same in zip(sds[4:7], shared, strict=True):
                covariance += sd**2 * same
            total += _unlikely(values, covariance)
        return total

    found = [round(value, 1) for value in most_likely(start, loss)]
    plain = ErrorComponents(**dict(zip(ErrorComponents.model_fields, [*found, None], strict=True)))
    scores = [[abs(each.error) / plain.sd(unseen=each.unseen) for each in members] for members in by_stack.values()]
    return plain.model_copy(update={"reach": hierarchical_quantile(scores)})


HELD, LEAST_STACKS = 0.9, 9


def hierarchical_quantile(groups: Sequence[Sequence[float]]) -> float | None:
    """Below which `HELD` of the scores are, where each group weighs the same, whatever their distribution.

    None for fewer than 9 groups: of those the worst has a rank of 9 in 10, with the new one counted. A bound that is
    guaranteed counts the new group too, as one of anything (Lee, Barber and Willett, Distribution-free inference with
    hierarchical data, 2023). It is wider than it says here: it held 95 % of the public stacks' points.
    """
    if len(groups) < LEAST_STACKS:
        return None
    weighted = sorted((score, 1 / len(groups) / len(group)) for group in groups for score in group)
    reached = accumulate(weight for _, weight in weighted)
    return round(next(score for (score, _), share in zip(weighted, reached, strict=True) if share >= HELD - 1e-9), 3)
