"""configs/errors/public.yaml: what public points say about stacks that were never measured here.

Written by benchmarks/score_model.py. A plan takes from it the prior of a stack's correction, how far predictions of
such a stack are off, and of what kinds the stacks were: outside of these there is no band.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
from pydantic import Field

from pdlab.core.files import CONFIGS
from pdlab.core.schema import Frozen, load_yaml
from pdlab.plan.correction_fit import Belief, Response, correction_of
from pdlab.plan.public_points import Stack
from pdlab.plan.scoring import StackScore, components_of, fit_of
from pdlab.plan.stack_prior import Effects, ErrorComponents, StackFit, effects_of, prior_of, unseen
from pdlab.sim.step_source import Correction

PUBLIC = CONFIGS / "errors" / "public.yaml"
PARAMETERS = ("host_ms", "ln_factor", "ln_prefill_factor")
SOURCE = "prior: corrections of the public stacks of configs/errors/public.yaml"


class KnownStack(Frozen):
    """One stack of the public points: its own correction (host_ms, ln factor, ln prefill factor) with standard
    deviations, what the points cover, and how it was predicted by the others (median absolute errors in percent)."""

    model: str
    gpu: str
    engine: str
    version: str
    mode: str
    correction: tuple[float, float, float]
    sd: tuple[float, float, float]
    points: int
    errors_percent: dict[str, float]
    alone_percent: dict[str, float]
    held: dict[str, float]
    unseen: tuple[str, ...]

    @property
    def stack(self) -> Stack:
        """Its key."""
        return Stack(self.model, self.gpu, self.engine, self.version, self.mode)

    @property
    def fit(self) -> StackFit:
        """As the prior of another stack takes it."""
        return StackFit(self.stack, np.array(self.correction), np.array(self.sd))


class ErrorCatalog(Frozen):
    """``effects``: standard deviations of the parameters of corrections over models, GPUs, engine versions, and of a
    stack alone, in the order of `PARAMETERS`. ``components``: by metric. ``points``: of a stack, at most."""

    points: int
    stacks: tuple[KnownStack, ...] = Field(min_length=1)
    effects: tuple[tuple[float, float, float, float], ...] = Field(min_length=3, max_length=3)
    components: dict[str, ErrorComponents]

    def prior(self, stack: Stack) -> Belief:
        """Of the correction of a stack, whether it is one of these or not."""
        return prior_of(stack, [each.fit for each in self.stacks], [Effects(*each) for each in self.effects])

    def correction(self, stack: Stack) -> Correction:
        """The prior as hardware has it."""
        return correction_of(self.prior(stack), 0, SOURCE)

    def unseen(self, stack: Stack) -> tuple[str, ...]:
        """What of model, GPU and engine version no stack here has."""
        return unseen(stack, [each.stack for each in self.stacks])

    def has_like(self, stack: Stack) -> bool:
        """Whether a stack that was left out was as far from the others as this one is from all: only then the errors
        say something about it."""
        without = set(self.unseen(stack))
        same_way = [each for each in self.stacks if (each.engine, each.mode) == (stack.engine, stack.mode)]
        return any(without <= set(each.unseen) for each in same_way)


def catalog_of(found: Mapping[Stack, Sequence[Response]], scores: Sequence[StackScore], points: int) -> ErrorCatalog:
    """Of all stacks together, for one that is none of them."""
    fits = [fit_of(stack, values) for stack, values in found.items()]
    effects = effects_of(fits)
    by_stack = {score.left_out.stack: score for score in scores}

    def rounded(values: Sequence[float], digits: int = 4) -> tuple[float, ...]:
        return tuple(round(float(value), digits) for value in values)

    return ErrorCatalog(
        points=points,
        stacks=tuple(
            KnownStack(
                **fit.stack._asdict(),
                correction=rounded(fit.mean),  # type: ignore[arg-type]
                sd=rounded(fit.sd),
                points=score.points,
                errors_percent={name: round(each.error, 1) for name, each in score.ours.items()},
                alone_percent={name: round(each.error, 1) for name, each in score.alone.items()},
                held={name: round(each, 2) for name, each in score.held.items()},
                unseen=score.left_out.unseen,
            )
            for fit in fits
            for score in [by_stack[fit.stack]]
        ),
        effects=tuple(rounded(each) for each in effects),  # type: ignore[misc]
        components=components_of(found, fits, effects),
    )


@cache
def public_errors() -> ErrorCatalog:
    """The catalog that is shipped. Raises UsageError where it is damaged."""
    return load_yaml(PUBLIC, ErrorCatalog)
