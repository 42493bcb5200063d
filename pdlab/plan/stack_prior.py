"""The prior of a stack that was never measured, by the corrections of other stacks; errors of its predictions. Pure.

**The correction.** Over stacks, each parameter of a correction is a mean plus effects of the model, of the GPU, of the
engine, of its version, and of the single stack (a random-effects layout; Searle, Casella and McCulloch, Variance
Components, 1992). The best linear prediction of a new stack is its prior. A model that was seen on another GPU narrows
the prior. An unseen version leaves it as wide as versions differ. Effects of different parameters are independent. The
errors of one stack's fit are not: levels determine the sum of the host's time and the factor better than each. So all
parameters are predicted at once.

**The errors** of predictions by such priors have parts of the same kinds (`ErrorComponents`): a part of the stack, a
further part for a model, a GPU or an engine's version that no other stack has, and parts within a stack.

benchmarks/stack_scores estimates both from public points. configs/errors/public.yaml has the results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import numpy as np
from annotated_types import Ge, Gt

from pdlab.core.catalog import known_gpu
from pdlab.core.schema import Frozen
from pdlab.core.text import version_numbers
from pdlab.plan.correction_fit import HOST, PREFILL, Array, CorrectionDistribution
from pdlab.plan.prediction_intervals import NORMAL_90
from pdlab.sim.hardware import ErrorParts

UNSTATED = "unstated"
PARAMETERS = 4  # of a correction
# The first and the last version of an engine that are of one group with the rows of a quarter that state no version. On
# PyPI vLLM 0.12.0 and 0.13.0 are of December 2025. vLLM 0.11 has a group of its own: the published runs behind Ray
# (docs/decisions/038-versions-of-a-quarter.md).
QUARTERS = {("vllm", "2025-Q4"): ((0, 12), (0, 13))}
LEAST_STACKS = 9  # fewer stacks do not determine within which range 90 % of a new stack's errors are


class Stack(NamedTuple):
    """The common properties of a group of points: model with its precision, GPU, engine, version, and mode."""

    model: str
    gpu: str
    engine: str
    version: str
    mode: str

    @property
    def label(self) -> str:
        """The stack in a table: ``gpt-oss-120b fp4, H100, vllm 0.18``."""
        mode = ", P:D" if self.mode == "pd" else ""
        return f"{self.model}, {self.gpu}, {self.engine} {self.version}{mode}"


class StackFit(NamedTuple):
    """The correction of a stack by its own levels: (host_ms, ln factor, ln prefill_factor, sync_us). ``covariance``: of
    the error of ``mean``."""

    stack: Stack
    mean: Array
    covariance: Array


class EffectSds(NamedTuple):
    """Standard deviations of one parameter: over models, GPUs and engine versions, of a single stack (``alone``), and
    over engines (``family``)."""

    model: float
    gpu: float
    engine: float
    alone: float
    family: float


def group_of(stack: Stack, kind: str) -> str:
    """The model, the GPU, or the engine with the version of a stack, by a kind of `SEEN_BY`. A version of `QUARTERS` is
    of the group of its quarter. A version of which neither number nor quarter is known is a group of its own: two such
    versions may differ."""
    if kind == "model":
        return stack.model.split()[0]
    if kind == "gpu":
        return stack.gpu
    return stack.label if stack.version == UNSTATED else f"{stack.engine} {_quarter_of(stack) or stack.version}"


def _quarter_of(stack: Stack) -> str | None:
    number = version_numbers(stack.version)
    for (engine, quarter), (first, last) in QUARTERS.items():
        if number and engine == stack.engine and first <= number <= last:
            return quarter
    return None


def version_of(stack: Stack) -> str | None:
    """Major and minor version; of a quarter of `QUARTERS` the first version; None: not known."""
    first, _ = QUARTERS.get((stack.engine, stack.version), (version_numbers(stack.version), None))
    return f"{first[0]}.{first[1]}" if first else None


def generation_of(gpu: str) -> str:
    """The generation of a GPU type; the type itself where it is not known."""
    type_ = known_gpu(gpu)
    return (type_.generation if type_ else None) or gpu


def shared_effects(stacks: Sequence[Stack], others: Sequence[Stack]) -> Array:
    """(4, stacks, others, 5): by parameter of a correction, 1 for each of `EffectSds` that two stacks have in
    common, else 0.

    What an engine adds to the tables is of a GPU's generation: H100 and H200 are one chip with other memory. So the
    effect of the GPU is one of its generation, except for prefill: there the tables of each GPU differ. A version of
    an engine has other kernels for each generation. Its host is the same.
    """

    def labels(stack: Stack, parameter: int) -> list[str]:
        generation, version = generation_of(stack.gpu), group_of(stack, "engine")
        return [
            group_of(stack, "model"),
            stack.gpu if parameter == PREFILL else generation,
            version if parameter == HOST else f"{version}, {generation}",
            stack.label,
            stack.engine,
        ]

    one, other = (
        np.array([[labels(each, parameter) for each in some] for parameter in range(PARAMETERS)])
        for some in (stacks, others)
    )
    shared: Array = (one[:, :, None, :] == other[:, None, :, :]).astype(float)
    return shared


def effects_covariance(shared: Array, effects: EffectSds) -> Array:
    variance: Array = shared @ np.square(np.array(effects))
    return variance


def prior_of(stack: Stack, fits: Sequence[StackFit], effects: Sequence[EffectSds]) -> CorrectionDistribution:
    """The prior of a stack by the fits of other stacks. ``effects``: one for each parameter. The covariance includes
    the uncertainty of the mean."""
    others, count, size = [fit.stack for fit in fits], len(fits), len(effects)
    among, toward_them = shared_effects(others, others), shared_effects([stack], others)
    covariance, toward = np.zeros((count, size, count, size)), np.zeros((size, count, size))
    for index, each in enumerate(effects):
        covariance[:, index, :, index] = effects_covariance(among[index], each)
        toward[index, :, index] = effects_covariance(toward_them[index], each)[0]
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
    and one level alone. ``fixed_ms``: further of a level, as a time that does not grow with the figure. ``reach``:
    within how many of the whole standard deviations 90 % of a new stack's errors are; None: too few stacks show it."""

    stack: Annotated[float, Ge(0)]
    model: Annotated[float, Ge(0)]
    gpu: Annotated[float, Ge(0)]
    engine: Annotated[float, Ge(0)]
    parallelism: Annotated[float, Ge(0)]
    lengths: Annotated[float, Ge(0)]
    load: Annotated[float, Ge(0)]
    level: Annotated[float, Ge(0)]
    fixed_ms: Annotated[float, Ge(0)] = 0.0
    reach: Annotated[float, Gt(0)] | None

    def parts(self, unseen: Sequence[str] = ()) -> ErrorParts | None:
        """As intervals of predictions take them: in common to the levels of a configuration, and of one level, as wide
        as `reach` gives. ``unseen``: what of model, GPU and engine no other stack has. None: there is no band."""
        if self.reach is None:
            return None
        wider = self.reach / NORMAL_90
        common = wider * math.hypot(self.stack, *(getattr(self, name) for name in unseen))
        level = wider * math.hypot(self.parallelism, self.lengths, self.load, self.level)
        fixed_ms = round(wider * self.fixed_ms, 2)
        return ErrorParts(common_percent=round(common, 2), level_percent=round(level, 2), fixed_ms=fixed_ms)

    def half_width(self, unseen: Sequence[str], predicted_s: float = math.inf) -> float:
        """Of the 90 % band, in logarithms; infinite where there is none."""
        return math.inf if self.reach is None else self.reach * self.sd(unseen=unseen, predicted_s=predicted_s)

    def sd(self, *, unseen: Sequence[str], predicted_s: float = math.inf) -> float:
        """Of the logarithm of measured over predicted, for a stack without own levels. ``unseen``: of model, gpu,
        engine. ``predicted_s``: the figure, seconds."""
        parts = [self.stack, self.parallelism, self.lengths, self.load, self.level, self.fixed_ms / 10 / predicted_s]
        parts += [getattr(self, name) for name in unseen]
        return math.hypot(*parts) / 100


# Kinds of groups of levels, with their words: of stacks, then within a stack
# (`pdlab.plan.correction_fit.LevelSetting`).
KINDS = {
    "model": "model",
    "gpu": "GPU",
    "engine": "version",
    "parallelism": "parallelism",
    "lengths": "lengths",
    "load": "load",
}
SEEN_BY = tuple(KINDS)[:3]


def unseen(stack: Stack, others: Sequence[Stack]) -> tuple[str, ...]:
    """The kinds of `SEEN_BY` in which no other stack is like this one. A version that is not stated is never seen."""
    return tuple(
        kind
        for kind in SEEN_BY
        if (kind == "engine" and stack.version == UNSTATED)
        or all(group_of(stack, kind) != group_of(other, kind) for other in others)
    )


LEAST_LIKE = 3  # stacks of one engine and mode, or groups of one kind, for a band
