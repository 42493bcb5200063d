"""configs/errors/public.yaml: what public points say about stacks that were never measured here.

Written by benchmarks/score_model.py. A plan takes from it the prior of a stack's correction, how far predictions of
such a stack are off, and of what kinds the stacks were: outside of these there is no band.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
from pydantic import Field

from pdlab.core.catalog import ModelShape
from pdlab.core.deployment import Deployment
from pdlab.core.files import CONFIGS
from pdlab.core.schema import Frozen, load_yaml
from pdlab.plan.correction_fit import TPOT, TTFT, WIDE, CorrectionDistribution, correction_of
from pdlab.plan.extrapolation import major_minor
from pdlab.plan.precisions import is_precision
from pdlab.plan.stack_prior import (
    UNSTATED,
    EffectSds,
    ErrorComponents,
    Stack,
    StackFit,
    group_of,
    prior_of,
    unseen,
)
from pdlab.sim.aic import literal_version
from pdlab.sim.computed_hardware import host_of
from pdlab.sim.hardware import ErrorParts, FitError, Hardware
from pdlab.sim.step_source import Correction

NEAR = (0.86, 0.94)  # share of points in a 90 % band that counts as held
PUBLIC = CONFIGS / "errors" / "public.yaml"
PARAMETERS = ("host_ms", "ln_factor", "ln_prefill_factor", "sync_us")
SOURCE = "prior: corrections of the public stacks of configs/errors/public.yaml"


class KnownStack(Frozen):
    """One stack of the public points: its own correction (`PARAMETERS`) with the covariance of
    its error, what the points cover, and how it was predicted by the others (median absolute errors in percent)."""

    model: str
    gpu: str
    engine: str
    version: str
    mode: str
    correction: tuple[float, float, float, float]
    covariance: tuple[tuple[float, float, float, float], ...] = Field(min_length=4, max_length=4)
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
        return StackFit(self.stack, np.array(self.correction), np.array(self.covariance))


class ErrorsAfterLevels(Frozen):
    """How far predictions of a stack are off after some of its levels were measured. ``components``: by metric.
    ``median_percent``: median absolute error on the other levels, the median over stacks. ``held``: share of them in
    bands that are made of other stacks' errors, the mean over stacks; ``near``: in how many stacks that share is in
    `NEAR`."""

    components: dict[str, ErrorComponents]
    median_percent: dict[str, float]
    held: dict[str, float]
    near: dict[str, int] = Field(default_factory=dict)


class CoveredRange(Frozen):
    """What the public points are of: least and most of input and output tokens as they are asked for, and of requests
    in flight per GPU; TP degrees; formats of weights (`weights_of`)."""

    tp: tuple[int, ...]
    weights: tuple[str, ...]
    input_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    in_flight_per_gpu: tuple[float, float]


def home_fit() -> StackFit:
    """The stack that was measured here, by its host time over the tables; its factors were not looked at."""
    host = host_of("vllm").versions["0.11"]
    stack = Stack("gpt-oss-120b fp4", "H100", "vllm", "0.11", "collocated")
    return StackFit(
        stack,
        np.array([host.step_ms, *WIDE.mean[1:]]),
        np.diag([host.sd_ms**2, *np.diag(WIDE.covariance)[1:]]),
    )


class ErrorCatalog(Frozen):
    """``effects``: standard deviations of the parameters of corrections over models, GPUs, engine versions, of a stack
    alone and over engines, in the order of `PARAMETERS`. ``components``: by metric. ``after``: by the number of
    measured levels. ``left_out``: by kind of group and metric, the share of points in their bands where whole groups
    were left out. ``points``: of a stack, at most."""

    points: int
    stacks: tuple[KnownStack, ...] = Field(min_length=1)
    effects: tuple[tuple[float, float, float, float, float], ...] = Field(min_length=4, max_length=4)
    components: dict[str, ErrorComponents]
    after: dict[int, ErrorsAfterLevels]
    left_out: dict[str, dict[str, float]] = Field(default_factory=dict)
    covered: CoveredRange

    def prior(self, stack: Stack) -> CorrectionDistribution:
        """Of the correction of a stack, whether it is one of these or not. Of home's engine version also by home, whose
        host takes longer for it is older: as a stack of that model it would make predictions of later ones worse."""
        fits, home = [each.fit for each in self.stacks], home_fit()
        if group_of(stack, "engine") == group_of(home.stack, "engine"):
            fits.append(home)
        return prior_of(stack, fits, [EffectSds(*each) for each in self.effects])

    def correction(self, stack: Stack) -> Correction:
        """The prior as hardware has it."""
        return correction_of(self.prior(stack), 0, SOURCE)

    def unseen(self, stack: Stack) -> tuple[str, ...]:
        """What of model, GPU and engine version no stack here has."""
        return unseen(stack, [each.stack for each in self.stacks])

    def served_as(self, stack: Stack) -> list[KnownStack]:
        """Those of the same engine and mode."""
        return [each for each in self.stacks if (each.engine, each.mode) == (stack.engine, stack.mode)]


def weights_of(hardware: Hardware, shape: ModelShape) -> str:
    """The format of the weights that the tables are asked for."""
    assert hardware.steps is not None
    return hardware.steps.quant.get("gemm") or shape.weight_dtype


@cache
def public_errors() -> ErrorCatalog:
    """The catalog that is shipped. Raises UsageError where it is damaged."""
    return load_yaml(PUBLIC, ErrorCatalog)


def model_word(shape: ModelShape) -> str:
    """What a table calls the model: the last part of its id or of its folder's name."""
    return (shape.hf_id or shape.name).replace("--", "/").rstrip("/").rsplit("/", 1)[-1]


def stack_of(hardware: Hardware, shape: ModelShape, deployment: Deployment | None = None) -> Stack:
    """The stack that a hardware with tables and a model are. A checkpoint of a known model (other precision, tuned) is
    that model; with the precision of one of its stacks it may be that stack."""
    assert hardware.steps is not None
    word = model_word(shape)
    models = sorted({each.model for each in public_errors().stacks})
    known = [name.split()[0] for name in models if word.lower().startswith(name.split()[0].lower())]
    base = max(known, key=len, default=word)
    precise = [
        name for name in models if name.split()[0] == base and is_precision(name.split()[-1], shape.weight_dtype)
    ]
    steps = hardware.steps
    tables = literal_version(steps.system, steps.engine, steps.version)
    version = steps.engine_version or major_minor(tables) or UNSTATED
    pd = deployment is not None and deployment.transport is not None
    return Stack(
        next(iter(precise), base),
        hardware.gpu_type or hardware.gpu,
        hardware.steps.engine,
        version,
        "pd" if pd else "collocated",
    )


def with_stack_prior(hardware: Hardware, shape: ModelShape) -> Hardware:
    """Hardware with tables whose correction no level was measured for, with what the public stacks say about it. The
    same hardware where its steps are no tables, where levels were measured, or where no public stack has its engine."""
    if hardware.beside:
        beside = tuple(with_stack_prior(each, shape) for each in hardware.beside)
        hardware = hardware.model_copy(update={"beside": beside})
    steps = hardware.steps
    if steps is None or steps.correction.fitted_levels:
        return hardware
    catalog, stack = public_errors(), stack_of(hardware, shape)
    if not any(each.engine == stack.engine for each in catalog.stacks):
        return hardware
    return hardware.with_correction(catalog.correction(stack))


def error_after(levels: int) -> FitError:
    """Of hardware whose correction has so many measured levels: what public stacks were off by after as many. These
    levels are spread over parallelism and lengths, so levels that share both count as one."""
    catalog = public_errors()
    count = max(each for each in catalog.after if each <= max(levels, min(catalog.after)))
    after = catalog.after[count]
    parts = parts_of(after.components)
    return FitError(
        tpot_percent=after.median_percent[TPOT],
        ttft_percent=after.median_percent[TTFT],
        requests_per_s_percent=after.median_percent[TPOT],
        points=sum(each.points for each in catalog.stacks),
        how=f"public stacks, each by the others and {count} of its own levels (configs/errors/public.yaml); requests/s "
        "as TPOT",
        parts=parts,
    )


def parts_of(components: Mapping[str, ErrorComponents], unseen: Sequence[str] = ()) -> dict[str, ErrorParts]:
    """As a band takes them, by metric. Requests/s are off as TPOT is."""
    known = {metric: parts for metric, each in components.items() if (parts := each.parts(unseen)) is not None}
    return {**known, "requests/s": known[TPOT]} if TPOT in known else known
