"""configs/errors/public.yaml: the errors of predictions of public points, for stacks that were never measured here.

benchmarks/score_model.py writes the file. A plan takes from it the prior of a stack's correction, the errors of
predictions of such a stack, and the range of the public points. Outside of that range there is no band.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
from pydantic import Field

from pdlab.core.catalog import ModelNumbers, ModelShape
from pdlab.core.deployment import Deployment
from pdlab.core.files import CONFIGS
from pdlab.core.schema import Frozen, load_yaml
from pdlab.core.text import version_numbers
from pdlab.plan.correction_fit import HOST, TPOT, TTFT, WIDE, CorrectionDistribution, correction_of
from pdlab.plan.extrapolation import major_minor
from pdlab.plan.pd_catalog import with_pd_correction
from pdlab.plan.precisions import is_precision
from pdlab.plan.stack_prior import (
    UNSTATED,
    EffectSds,
    ErrorComponents,
    Stack,
    StackFit,
    prior_of,
    unseen,
)
from pdlab.sim.aic import literal_version
from pdlab.sim.engine_host import host_of
from pdlab.sim.hardware import FitError, Hardware
from pdlab.sim.step_source import Correction

NEAR = (0.86, 0.94)  # a 90 % band is right if it holds a share of the points in this range
PUBLIC = CONFIGS / "errors" / "public.yaml"
MODELS = CONFIGS / "errors" / "models.yaml"
SOURCE = "prior: corrections of the public stacks of configs/errors/public.yaml"


class KnownStack(Frozen):
    """One stack of the public points.

    ``correction``: (host_ms, ln factor, ln prefill_factor, sync_us) of its own points. ``covariance``: of the error of
    ``correction``, (4, 4). ``points``: the number of its points. ``errors_percent``: metric -> median absolute error
    of predictions with the prior that the other stacks give. ``alone_percent``: the same for the estimator
    of the tables' own project. ``held``: metric -> share of its points in their bands. ``unseen``: see `unseen`.
    """

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
        """The stack itself."""
        return Stack(self.model, self.gpu, self.engine, self.version, self.mode)

    @property
    def fit(self) -> StackFit:
        """The fit to its own points, for the prior of another stack."""
        return StackFit(self.stack, np.array(self.correction), np.array(self.covariance))


class ErrorsAfterLevels(Frozen):
    """The errors of predictions of a stack after some of its levels were measured, by metric. ``median_percent``:
    median absolute error on the other levels of a stack, as a median over stacks. ``held``: share of these levels in
    bands of other stacks' errors, as a mean over stacks. ``near``: the number of stacks with that share in `NEAR`."""

    components: dict[str, ErrorComponents]
    median_percent: dict[str, float]
    held: dict[str, float]
    near: dict[str, int] = Field(default_factory=dict)


class CoveredRange(Frozen):
    """The range of the public points. ``tp``: TP degrees. ``weights``: formats of weights (`weights_of`).
    ``input_tokens``, ``output_tokens``: the least and the most requested tokens. ``in_flight_per_gpu``: the least and
    the most requests in flight per GPU."""

    tp: tuple[int, ...]
    weights: tuple[str, ...]
    input_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    in_flight_per_gpu: tuple[float, float]


def home_fit() -> StackFit:
    """The fit of the stack that was measured here: its host time over the tables. Its other parameters are unknown."""
    host = host_of("vllm").versions["0.11"]
    stack = Stack("gpt-oss-120b fp4", "H100", "vllm", "0.11", "collocated")
    return StackFit(
        stack,
        np.array([host.step_ms, *WIDE.mean[1:]]),
        np.diag([host.sd_ms**2, *np.diag(WIDE.covariance)[1:]]),
    )


class ErrorCatalog(Frozen):
    """The file.

    ``points``: the most points of a stack. ``effects``: for each parameter of a correction its
    `pdlab.plan.stack_prior.EffectSds`. ``components``: metric -> errors of predictions. ``after``: number of measured
    levels -> errors after them. ``left_out``: kind of group -> metric -> share of points in their bands, if a whole
    group is left out.
    """

    points: int
    stacks: tuple[KnownStack, ...] = Field(min_length=1)
    effects: tuple[tuple[float, float, float, float, float], ...] = Field(min_length=4, max_length=4)
    components: dict[str, ErrorComponents]
    after: dict[int, ErrorsAfterLevels]
    left_out: dict[str, dict[str, float]] = Field(default_factory=dict)
    covered: CoveredRange

    def prior(self, stack: Stack) -> CorrectionDistribution:
        """The prior of the correction of a stack, which may be one of these. The stack that was measured here counts
        for its own engine version and for earlier ones, which have its version's effect. That version is older than all
        others, and its host takes longer: for its model or GPU it would make predictions of later versions worse. So
        versions differ there as `pdlab.sim.engine_host.EngineHost.spread_ms` gives.

        Of one of these stacks the mean is what its own points say. But these are of another installation, and no stack
        was measured in two. Two installations are taken to differ as much as single stacks do (`EffectSds.alone`)."""
        fits, effects = [each.fit for each in self.stacks], [EffectSds(*each) for each in self.effects]
        home = home_fit()
        number, oldest = version_numbers(stack.version), version_numbers(home.stack.version)
        if stack.engine == home.stack.engine and number and oldest and number <= oldest:
            stack = stack._replace(version=home.stack.version)
            fits.append(home)
            spread_ms = host_of(stack.engine).spread_ms
            effects[HOST] = effects[HOST]._replace(engine=max(effects[HOST].engine, spread_ms))
        prior = prior_of(stack, fits, effects)
        if any(fit.stack.label == stack.label for fit in fits):
            of_installation = np.diag([each.alone**2 for each in effects])
            prior = prior._replace(covariance=prior.covariance + of_installation)
        return prior

    def correction(self, stack: Stack, sequence_us: float) -> Correction:
        """The mean and the covariance of the prior, as a correction of hardware with that time of a sequence."""
        return correction_of(self.prior(stack), 0, SOURCE, sequence_us)

    def unseen(self, stack: Stack) -> tuple[str, ...]:
        """The kinds, of model, GPU and engine version, in which no stack here is like this one."""
        return unseen(stack, [each.stack for each in self.stacks])

    def served_as(self, stack: Stack) -> list[KnownStack]:
        """The stacks of the same engine and mode."""
        return [each for each in self.stacks if (each.engine, each.mode) == (stack.engine, stack.mode)]

    def error(
        self,
        how: str,
        medians: Mapping[str, float],
        components: Mapping[str, ErrorComponents],
        unseen: Sequence[str] = (),
    ) -> FitError:
        """Errors of predictions for a band, by metric. Requests/s have the errors of TPOT. ``how``: their source.
        ``unseen``: the kinds, of model, GPU and engine version, in which no stack here is like this one."""
        parts = {metric: part for metric, each in components.items() if (part := each.parts(unseen)) is not None}
        return FitError(
            tpot_percent=medians[TPOT],
            ttft_percent=medians[TTFT],
            requests_per_s_percent=medians[TPOT],
            points=sum(each.points for each in self.stacks),
            how=f"{how}; requests/s as TPOT",
            parts={**parts, "requests/s": parts[TPOT]} if TPOT in parts else parts,
        )


def weights_of(hardware: Hardware, shape: ModelShape) -> str:
    """The format of weights for which the tables are read."""
    assert hardware.steps is not None
    return hardware.steps.quant.get("gemm") or shape.weight_dtype


@cache
def public_errors() -> ErrorCatalog:
    """The catalog that pdlab has. Raises UsageError if the file is damaged."""
    return load_yaml(PUBLIC, ErrorCatalog)


class PublicModels(Frozen):
    """configs/errors/models.yaml: the models of public points, by the names in configs/errors/. They are known by their
    numbers: public checkpoints of one model have several names."""

    models: dict[str, ModelNumbers] = Field(min_length=1)

    def name_of(self, shape: ModelShape) -> str:
        """The name here of a model; of another model its own name, which is none of these."""
        numbers = shape.numbers
        if known := next((name for name, each in self.models.items() if each == numbers), None):
            return known
        word = (shape.hf_id or shape.name).replace("--", "/").rstrip("/").rsplit("/", 1)[-1]
        return f"{word}-with-other-numbers" if word in self.models else word


@cache
def public_models() -> PublicModels:
    """The models that pdlab has. Raises UsageError if the file is damaged."""
    return load_yaml(MODELS, PublicModels)


def stack_of(hardware: Hardware, shape: ModelShape, deployment: Deployment | None = None) -> Stack:
    """The stack of hardware with tables, and of a model. A checkpoint of a known model (another precision, tuned) is
    that model, by its numbers. With the precision of one of its stacks it may be that stack. ``deployment``: None:
    collocated."""
    assert hardware.steps is not None
    base = public_models().name_of(shape)
    models = sorted({each.model for each in public_errors().stacks})
    of_precision = (
        name for name in models if name.split()[0] == base and is_precision(name.split()[-1], shape.weight_dtype)
    )
    steps = hardware.steps
    tables = literal_version(steps.system, steps.engine, steps.version)
    version = steps.engine_version or major_minor(tables) or UNSTATED
    pd = deployment is not None and deployment.transport is not None
    return Stack(
        next(of_precision, base),
        hardware.gpu_type or hardware.gpu,
        steps.engine,
        version,
        "pd" if pd else "collocated",
    )


def with_stack_prior(hardware: Hardware, shape: ModelShape) -> Hardware:
    """The hardware with the prior of the public stacks as the correction of its tables, and with that of the public
    stacks of P:D for P:D engines. The hardware stays the same if its steps are no tables, or if levels were measured
    for its correction. Without a public stack of its engine the correction stays the same."""
    if hardware.beside:
        beside = tuple(with_stack_prior(each, shape) for each in hardware.beside)
        hardware = hardware.model_copy(update={"beside": beside})
    steps = hardware.steps
    if steps is None or steps.correction.fitted_levels:
        return hardware
    catalog, stack = public_errors(), stack_of(hardware, shape)
    if any(each.engine == stack.engine for each in catalog.stacks):
        hardware = hardware.with_correction(catalog.correction(stack, steps.correction.sequence_us))
    return with_pd_correction(hardware, shape)


def error_after(levels: int) -> FitError:
    """The errors of predictions after a number of measured levels: those of the public stacks after as many. The levels
    of the public stacks are of collocated engines, and spread over parallelism and lengths. So ``levels`` are of such
    engines, and those that share both count as one."""
    catalog = public_errors()
    count = max(each for each in catalog.after if each <= max(levels, min(catalog.after)))
    after = catalog.after[count]
    how = f"public stacks, each by the others and {count} of its own levels (configs/errors/public.yaml)"
    return catalog.error(how, after.median_percent, after.components)
