"""What other stacks say about one that was never measured: its correction, and how far predictions are off. Pure.

**The correction.** Each of its parameters is, over stacks, a mean plus effects of the model, of the GPU, of the engine,
of its version, and of the stack alone (a random-effects layout; Searle, Casella and McCulloch, Variance Components,
1992). The best linear prediction of a new stack is its prior: a model that was seen on another GPU counts more than one
that was not, and a version that was never seen is as wide as versions have differed. Effects of different parameters
are independent, but not the errors of one stack's fit: levels tell the host's time and the factor together better than
each. So all parameters are predicted at once.

**The errors** of predictions by such priors are split the same way (`error_components`): of a stack as such, more of it
for a model, a GPU or an engine's version that was not among the others, and of parallelism, lengths, load and a level
within a stack. Every stack is left out alone, and with all of its model, GPU or version (`hold_outs`). The parts say
how errors of one stack compare with those of another. How wide a band is for them is counted
(`hierarchical_quantile`): errors of stacks are not normal.

Standard deviations are those that make the values most likely, with a weak pull: each is believed to be near
`Believed` within a factor of two. Few stacks do not tell it better, and none of them is nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Annotated, NamedTuple

import numpy as np
from annotated_types import Ge, Gt

from pdlab.core.schema import Frozen
from pdlab.plan.correction_fit import Array, CorrectionDistribution, LevelSetting
from pdlab.plan.prediction_intervals import NORMAL_90
from pdlab.plan.public_points import UNSTATED, Stack
from pdlab.sim.hardware import ErrorParts

FACTOR = math.log(2.0)
STEPS = 1.25  # between tried standard deviations
SWEEPS = 4


class StackFit(NamedTuple):
    """What a stack's own levels say: (host_ms, ln factor, ln prefill_factor, sync_us), and the covariance of its
    error."""

    stack: Stack
    mean: Array
    covariance: Array


class EffectSds(NamedTuple):
    """Standard deviations of one parameter over models, GPUs, engine versions, of a stack alone, and over engines."""

    model: float
    gpu: float
    engine: float
    alone: float
    family: float


# Of host_ms, ln factor, ln prefill_factor, sync_us: engines of 2025 and 2026 differed by some tenths of a millisecond a
# step. Engines are believed to differ as much as models do.
Believed = (
    EffectSds(0.6, 0.2, 0.3, 0.3, 0.6),
    EffectSds(0.04, 0.04, 0.04, 0.04, 0.04),
    EffectSds(0.2, 0.15, 0.15, 0.15, 0.2),
    EffectSds(1.0, 1.0, 1.0, 1.0, 1.0),
)


def group_of(stack: Stack, kind: str) -> str:
    """Its model, its GPU, or its engine with the version, by one of `SEEN_BY`. A version that nobody stated is the
    stack's own: two of them may differ."""
    if kind == "model":
        return stack.model.split()[0]
    if kind == "gpu":
        return stack.gpu
    return stack.label if stack.version == UNSTATED else f"{stack.engine} {stack.version}"


def _shared(stacks: Sequence[Stack], others: Sequence[Stack]) -> Array:
    """(stacks, others, 5): which of `EffectSds` two stacks have in common; a stack has all with itself."""
    one, other = (
        np.array([[*(group_of(each, kind) for kind in SEEN_BY), each.label, each.engine] for each in some])
        for some in (stacks, others)
    )
    shared: Array = (one[:, None, :] == other[None, :, :]).astype(float)
    return shared


def _covariance(shared: Array, effects: EffectSds) -> Array:
    variance: Array = shared @ np.square(np.array(effects))
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
    shared = _shared(*[[fit.stack for fit in fits]] * 2)
    found = []
    for index, start in enumerate(Believed):
        values = np.array([fit.mean[index] for fit in fits])
        noise = np.diag([fit.covariance[index, index] for fit in fits])

        def loss(sds: Sequence[float], values: Array = values, noise: Array = noise) -> float:
            covariance = _covariance(shared, EffectSds(*sds)) + noise
            return _unlikely(values - _mean(values, covariance), covariance)

        found.append(EffectSds(*most_likely(start, loss)))
    return tuple(found)


def _mean(values: Array, covariance: Array) -> float:
    weights = np.linalg.solve(covariance, np.ones(len(values)))
    return float(weights @ values / weights.sum())


def prior_of(stack: Stack, fits: Sequence[StackFit], effects: Sequence[EffectSds]) -> CorrectionDistribution:
    """Of a stack from the fits of others. The uncertainty of their mean is in it."""
    others, count, size = [fit.stack for fit in fits], len(fits), len(effects)
    among, toward_them = _shared(others, others), _shared([stack], others)
    covariance, toward = np.zeros((count, size, count, size)), np.zeros((size, count, size))
    for index, each in enumerate(effects):
        covariance[:, index, :, index] = _covariance(among, each)
        toward[index, :, index] = _covariance(toward_them, each)[0]
    for index, fit in enumerate(fits):
        covariance[index, :, index, :] += fit.covariance
    inverse = np.linalg.inv(covariance.reshape(count * size, -1))
    weights = toward.reshape(size, -1) @ inverse
    ones = np.tile(np.eye(size), (count, 1))
    of_mean = np.linalg.inv(ones.T @ inverse @ ones)
    values = np.concatenate([fit.mean for fit in fits])
    mean = of_mean @ ones.T @ inverse @ values
    missing = np.eye(size) - weights @ ones
    own = np.diag([sum(sd**2 for sd in each) for each in effects])
    left = own - weights @ toward.reshape(size, -1).T + missing @ of_mean @ missing.T
    return CorrectionDistribution(mean + weights @ (values - ones @ mean), left)


# --- errors of predictions ------------------------------------------------------------------------


class ErrorComponents(Frozen):
    """How far predictions of one metric are off, as standard deviations of logarithms in percent. ``stack``: what all
    levels of a stack have in common; ``model``, ``gpu``, ``engine``: further where that was not among the stacks that
    the prior comes from. The others are within a stack: what levels of one parallelism, length or load have in common,
    and one level alone. ``reach``: within how many of the whole standard deviations 90 % of a new stack's errors are;
    None: too few stacks say so."""

    stack: Annotated[float, Ge(0)]
    model: Annotated[float, Ge(0)]
    gpu: Annotated[float, Ge(0)]
    engine: Annotated[float, Ge(0)]
    parallelism: Annotated[float, Ge(0)]
    lengths: Annotated[float, Ge(0)]
    load: Annotated[float, Ge(0)]
    level: Annotated[float, Ge(0)]
    reach: Annotated[float, Gt(0)] | None

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
    setting: LevelSetting
    unseen: tuple[str, ...]
    error: float


BELIEVED_ERRORS = {
    "TPOT": (6.0, 5.0, 4.0, 4.0, 3.0, 3.0, 3.0, 3.0),
    "mean TTFT": (15.0, 12.0, 10.0, 10.0, 6.0, 6.0, 6.0, 8.0),
    "tokens/s": (6.0, 5.0, 4.0, 4.0, 3.0, 3.0, 3.0, 3.0),
}
# What a group of levels shares: of the stack, and within it (`pdlab.plan.correction_fit.LevelSetting`).
KINDS = {
    "model": "model",
    "gpu": "GPU",
    "engine": "version",
    "parallelism": "parallelism",
    "lengths": "lengths",
    "load": "load",
}
SEEN_BY = tuple(KINDS)[:3]
SOFT_ERRORS = 3.0


def unseen(stack: Stack, others: Sequence[Stack]) -> tuple[str, ...]:
    """What of model, GPU and engine with its version no other stack has. A version nobody stated was never seen."""
    return tuple(
        kind
        for kind in SEEN_BY
        if (kind == "engine" and stack.version == UNSTATED)
        or all(group_of(stack, kind) != group_of(other, kind) for other in others)
    )


def hold_outs(stack: Stack, fits: Sequence[StackFit]) -> dict[tuple[str, ...], list[StackFit]]:
    """Fits of the others where the stack alone is left out, and where all of its model, GPU or engine version is: by
    what of it is unseen then. The stack alone is the first."""
    others = [fit for fit in fits if fit.stack != stack]
    found = {unseen(stack, [fit.stack for fit in others]): others}
    for kind in SEEN_BY:
        rest = [fit for fit in others if group_of(fit.stack, kind) != group_of(stack, kind)]
        if rest:
            found.setdefault(unseen(stack, [fit.stack for fit in rest]), rest)
    return found


LEAST_LIKE = 3  # two are no rule


def is_represented(stack: Stack, others: Sequence[Stack]) -> bool:
    """Whether the errors of others say how far predictions of the stack are off: enough of them are of its engine and
    mode, and of what is unseen of it there are as many kinds among these, so that each was left out in turn."""
    alike = [each for each in others if (each.engine, each.mode) == (stack.engine, stack.mode)]
    kinds = [{group_of(each, kind) for each in alike} for kind in unseen(stack, others)]
    return min(map(len, [alike, *kinds])) >= LEAST_LIKE


HoldOuts = Mapping[tuple[str, ...], Sequence[StackError]]


def error_components(metric: str, errors: Sequence[StackError]) -> ErrorComponents:
    """``errors``: of stacks, each left out in one way or more (`hold_outs`).

    The mean error is taken to be 0, since no prediction is corrected by it. Errors beyond `SOFT_ERRORS` times the
    median one count as that: one broken level of the tables is no reason to widen every band. The reach is counted over
    all ways in which stacks were left out, so that bands hold for what is unseen as for what is not.
    """
    start = BELIEVED_ERRORS[metric]
    limit = SOFT_ERRORS * 1.4826 * float(np.median([abs(each.error) for each in errors]))
    stacks: dict[Stack, dict[tuple[str, ...], list[StackError]]] = {}
    for each in errors:
        stacks.setdefault(each.stack, {}).setdefault(each.unseen, []).append(each)
    sds = [round(value, 1) for value in most_likely(start, errors_loss(list(stacks.values()), limit))]
    plain = ErrorComponents(**dict(zip(ErrorComponents.model_fields, [*sds, None], strict=True)))
    scores = [
        [abs(each.error) / plain.sd(unseen=without) for without, members in ways.items() for each in members]
        for ways in stacks.values()
    ]
    return plain.model_copy(update={"reach": hierarchical_quantile(scores)})


def errors_loss(stacks: Sequence[HoldOuts], limit: float = math.inf) -> Callable[[Sequence[float]], float]:
    """-2 times the logarithm of a normal likelihood of the errors, but for a constant, as a function of the standard
    deviations of `ErrorComponents`. ``limit``: larger errors count as that.

    A stack that was left out in several ways, by the same levels, counts once: each way has its share. What its levels
    have in common has rank one, so one solution of the rest serves all ways (Sherman and Morrison).
    """
    sizes = [len(next(iter(ways.values()))) for ways in stacks]
    size, most = max(sizes), max(map(len, stacks))
    columns = np.zeros((len(stacks), size, 1 + most))  # ones, and the errors of each way
    shared = np.zeros((len(LevelSetting._fields), len(stacks), size, size))
    missing = np.zeros((len(stacks), most, len(SEEN_BY)))
    weights = np.zeros((len(stacks), most))
    for row, (count, ways) in enumerate(zip(sizes, stacks, strict=True)):
        columns[row, :count, 0] = 1.0
        for way, (without, members) in enumerate(ways.items()):
            columns[row, :count, 1 + way] = np.clip([each.error for each in members], -limit, limit) * 100
            missing[row, way] = [kind in without for kind in SEEN_BY]
            weights[row, way] = 1 / len(ways)
        settings = np.array([each.setting for each in members])
        for part in range(len(LevelSetting._fields)):
            shared[part, row, :count, :count] = settings[:, None, part] == settings[None, :, part]
    there, diagonal = columns[:, :, 0], np.eye(size)

    @lru_cache(maxsize=64)
    def solved(within: tuple[float, ...]) -> tuple[Array, Array]:
        *parts, level = np.square(within)
        base = np.tensordot(parts, shared, 1)
        base += diagonal * np.where(there > 0, level, 1.0)[:, None, :]
        _, logarithm = np.linalg.slogdet(base)
        return logarithm, columns.transpose(0, 2, 1) @ np.linalg.solve(base, columns)

    def loss(sds: Sequence[float]) -> float:
        logarithm, products = solved(tuple(sds[4:]))
        common = sds[0] ** 2 + missing @ np.square(sds[1:4])
        ones, mixed = products[:, :1, 0], products[:, 0, 1:]
        own = np.diagonal(products, axis1=1, axis2=2)[:, 1:]
        grows = 1 + common * ones
        return float((weights * (logarithm[:, None] + np.log(grows) + own - common * mixed**2 / grows)).sum())

    return loss


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
