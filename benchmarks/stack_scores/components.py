"""Standard deviations of corrections and of errors over public stacks: what a plan believes of a new one. Pure.

**Effects** (`effects_of`) are those of `pdlab.plan.stack_prior`: of the model, the GPU, the engine, its version and the
stack alone, of each parameter of a correction.

**Error components** (`error_components`) split the errors of predictions by such priors the same way: of a stack as
such, more of it for a model, a GPU or an engine's version that was not among the others, and of parallelism, lengths,
load and a level within a stack. Every stack is left out alone, and with all of its model, GPU or version
(`hold_outs`). The parts say how errors of one stack compare with those of another. How wide a band is for them is
counted (`hierarchical_quantile`): errors of stacks are not normal.

Standard deviations are those that make the values most likely, with a weak pull: each is believed to be near
`Believed` within a factor of two. Few stacks do not tell it better, and none of them is nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from pdlab.plan.correction_fit import Array, LevelSetting
from pdlab.plan.stack_prior import (
    LEAST_LIKE,
    LEAST_STACKS,
    SEEN_BY,
    EffectSds,
    ErrorComponents,
    Stack,
    StackFit,
    effects_covariance,
    group_of,
    shared_effects,
    unseen,
)

FACTOR = math.log(2.0)
STEPS = 1.25  # between tried standard deviations
MOST_POWER = 8  # of `STEPS`, up and down
SWEEPS = 4
# Of host_ms, ln factor, ln prefill_factor, sync_us: engines of 2025 and 2026 differed by some tenths of a millisecond a
# step. Engines are believed to differ as much as models do.
Believed = (
    EffectSds(0.6, 0.2, 0.3, 0.3, 0.6),
    EffectSds(0.04, 0.04, 0.04, 0.04, 0.04),
    EffectSds(0.2, 0.15, 0.15, 0.15, 0.2),
    EffectSds(1.0, 1.0, 1.0, 1.0, 1.0),
)


def most_likely(start: Sequence[float], loss: Callable[[Sequence[float]], float]) -> list[float]:
    """Standard deviations that make the loss least, one at a time in steps from their start as long as it falls. The
    pull is added. One that starts at 0 stays there."""

    def whole(values: Sequence[float]) -> float:
        return loss(values) + sum((math.log(v / s) / FACTOR) ** 2 for v, s in zip(values, start, strict=True) if s)

    best = list(start)
    least = whole(best)
    powers = [0] * len(best)
    for _ in range(SWEEPS):
        before = least
        for index in (place for place, each in enumerate(start) if each):
            for aside in (1, -1):
                while abs(powers[index] + aside) <= MOST_POWER:
                    trial = best.copy()
                    trial[index] = start[index] * STEPS ** (powers[index] + aside)
                    if (now := whole(trial)) >= least:
                        break
                    best, least = trial, now
                    powers[index] += aside
        if before - least < 1e-3:
            break
    return best


def _unlikely(residual: Array, covariance: Array) -> float:
    """-2 times the logarithm of a normal likelihood, but for a constant."""
    _, logarithm = np.linalg.slogdet(covariance)
    return float(logarithm + residual @ np.linalg.solve(covariance, residual))


def effects_of(fits: Sequence[StackFit]) -> tuple[EffectSds, ...]:
    """Of each parameter."""
    shared = shared_effects(*[[fit.stack for fit in fits]] * 2)
    found = []
    for index, start in enumerate(Believed):
        values = np.array([fit.mean[index] for fit in fits])
        noise = np.diag([fit.covariance[index, index] for fit in fits])

        def loss(
            sds: Sequence[float], values: Array = values, noise: Array = noise, of_parameter: Array = shared[index]
        ) -> float:
            covariance = effects_covariance(of_parameter, EffectSds(*sds)) + noise
            return _unlikely(values - _mean(values, covariance), covariance)

        found.append(EffectSds(*most_likely(start, loss)))
    return tuple(found)


def _mean(values: Array, covariance: Array) -> float:
    weights = np.linalg.solve(covariance, np.ones(len(values)))
    return float(weights @ values / weights.sum())


class StackError(NamedTuple):
    """Of one level of a stack that was predicted by the others. ``error``: logarithm of measured over predicted;
    ``predicted_s``: what was predicted, seconds."""

    stack: Stack
    setting: LevelSetting
    unseen: tuple[str, ...]
    error: float
    predicted_s: float = math.inf


# In percent, and the last one in ms. A bare engine takes 10 ms of path and 5 us a prompt token (docs/model.md), which
# differs from stack to stack. Nothing in steps of decoding showed a time of its own.
BELIEVED_ERRORS = {
    "TPOT": (6.0, 5.0, 4.0, 4.0, 3.0, 3.0, 3.0, 3.0, 0.0),
    "mean TTFT": (15.0, 12.0, 10.0, 10.0, 6.0, 6.0, 6.0, 8.0, 10.0),
}
SOFT_ERRORS = 3.0


class OfStack(Protocol):
    """What is known of a stack."""

    @property
    def stack(self) -> Stack:
        """The stack."""


S = TypeVar("S", bound=OfStack)


def hold_outs(stack: Stack, fits: Sequence[S]) -> dict[tuple[str, ...], list[S]]:
    """What is known of the others where the stack alone is left out, and where all of its model, GPU or engine version
    is: by what of it is unseen then. The stack alone is the first."""
    others = [fit for fit in fits if fit.stack != stack]
    found = {unseen(stack, [fit.stack for fit in others]): others}
    for kind in SEEN_BY:
        rest = [fit for fit in others if group_of(fit.stack, kind) != group_of(stack, kind)]
        if rest:
            found.setdefault(unseen(stack, [fit.stack for fit in rest]), rest)
    return found


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
        [
            abs(each.error) / plain.sd(unseen=without, predicted_s=each.predicted_s)
            for without, members in ways.items()
            for each in members
        ]
        for ways in stacks.values()
    ]
    return plain.model_copy(update={"reach": hierarchical_quantile(scores)})


def errors_loss(stacks: Sequence[HoldOuts], limit: float = math.inf) -> Callable[[Sequence[float]], float]:
    """-2 times the logarithm of a normal likelihood of the errors, but for a constant, as a function of the standard
    deviations of `ErrorComponents`. ``limit``: larger errors count as that.

    A stack that was left out in several ways, by the same levels, counts once: each way has its share. What its levels
    have in common has rank one, so one solution of the rest serves all ways (Sherman and Morrison). The figures of the
    other ways are taken to be those of the first one.
    """
    sizes = [len(next(iter(ways.values()))) for ways in stacks]
    size, most = max(sizes), max(map(len, stacks))
    columns = np.zeros((len(stacks), size, 1 + most))  # ones, and the errors of each way
    per_ms = np.zeros((len(stacks), size))  # percent of a level for each ms
    shared = np.zeros((len(LevelSetting._fields), len(stacks), size, size))
    missing = np.zeros((len(stacks), most, len(SEEN_BY)))
    weights = np.zeros((len(stacks), most))
    for row, (count, ways) in enumerate(zip(sizes, stacks, strict=True)):
        columns[row, :count, 0] = 1.0
        for way, (without, members) in enumerate(ways.items()):
            columns[row, :count, 1 + way] = np.clip([each.error for each in members], -limit, limit) * 100
            missing[row, way] = [kind in without for kind in SEEN_BY]
            weights[row, way] = 1 / len(ways)
        first = next(iter(ways.values()))
        settings = np.array([each.setting for each in first])
        per_ms[row, :count] = [1 / 10 / each.predicted_s for each in first]
        for part in range(len(LevelSetting._fields)):
            shared[part, row, :count, :count] = settings[:, None, part] == settings[None, :, part]
    there, diagonal = columns[:, :, 0], np.eye(size)

    @lru_cache(maxsize=64)
    def solved(within: tuple[float, ...]) -> tuple[Array, Array]:
        *parts, level, fixed = np.square(within)
        base = np.tensordot(parts, shared, 1)
        base += diagonal * np.where(there > 0, level + fixed * per_ms**2, 1.0)[:, None, :]
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


HELD = 0.9


def hierarchical_quantile(groups: Sequence[Sequence[float]]) -> float | None:
    """Below which `HELD` of the scores are, where each group weighs the same, whatever their distribution.

    A new group is not among them. Where scores of a group are alike, the r-th of K holds r / (K + 1) of new groups.
    Over 9 to 20 groups the plain quantile therefore holds 87 %, and one that counts the new group as beyond all others
    92 %. (That one is a guaranteed bound: Lee, Barber and Willett, Distribution-free inference with hierarchical data,
    2023.) Half of the new group is counted: 90 %. None for fewer than `LEAST_STACKS` groups, of which the worst holds
    less.
    """
    if len(groups) < LEAST_STACKS:
        return None
    weighted = sorted((score, 1 / len(groups) / len(group)) for group in groups for score in group)
    reached, needed = accumulate(weight for _, weight in weighted), HELD * (1 + 0.5 / len(groups))
    return round(next(score for (score, _), share in zip(weighted, reached, strict=True) if share >= needed - 1e-9), 3)
