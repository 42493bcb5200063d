"""configs/errors/public-pd.yaml: what public points of P:D say of predictions by tables.

benchmarks/score_model.py writes the file when it scores points of P:D. A prediction of P:D engines without Ray takes
from it a correction of the tables, and the errors of predictions that were corrected in this way.
"""

from __future__ import annotations

from functools import cache

from pydantic import Field

from pdlab.core.catalog import ModelShape
from pdlab.core.files import CONFIGS
from pdlab.core.schema import Frozen, load_yaml
from pdlab.plan.precisions import is_precision
from pdlab.plan.stack_prior import ErrorComponents, Stack, unseen
from pdlab.sim.hardware import Apart, Hardware
from pdlab.sim.step_source import Correction

PUBLIC_PD = CONFIGS / "errors" / "public-pd.yaml"
SOURCE = "public stacks of P:D (configs/errors/public-pd.yaml)"


class PdStackName(Frozen):
    """One stack of the public points of P:D. ``precision``: of its weights. ``errors_percent``: metric -> median
    absolute error of its points as the other stacks predict it, those near saturation left out."""

    model: str
    gpu: str
    engine: str
    version: str
    precision: str
    errors_percent: dict[str, float]

    @property
    def stack(self) -> Stack:
        """The stack itself."""
        return Stack(f"{self.model} {self.precision}", self.gpu, self.engine, self.version, "pd")


class CommonCorrection(Frozen):
    """What stacks have in common. ``engine``, ``precision``: of these stacks (None: of any). ``factor``,
    ``prefill_factor``: of the tables' times of decode and prefill. ``path_ms``: of a request to prefill and from there
    to decode, besides the KV transfer."""

    engine: str | None = None
    precision: str | None = None
    factor: float = Field(gt=0)
    prefill_factor: float = Field(gt=0)
    path_ms: float = Field(ge=0)


class PdCovered(Frozen):
    """The range of the points: as `pdlab.plan.error_catalog.CoveredRange`. ``gpus_per_engine``: GPU type -> the most
    GPUs of an engine."""

    input_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    in_flight_per_gpu: tuple[float, float]
    gpus_per_engine: dict[str, int] = Field(min_length=1)

    def largest_engine(self, gpu: str) -> int:
        """The most GPUs of an engine on that GPU type; on another one the least of these."""
        return self.gpus_per_engine.get(gpu, min(self.gpus_per_engine.values()))


class PdCatalog(Frozen):
    """The file. ``corrections``: the narrowest first; the last one is of all stacks. ``components``: metric -> errors
    of stacks that the others predict. ``median_percent``, ``held``: metric -> the median error, and the share of points
    in the bands of left-out stacks. ``left_out``: kind of group -> metric -> that share where a whole group is left
    out. ``points``: the number of points."""

    points: int
    stacks: tuple[PdStackName, ...] = Field(min_length=1)
    corrections: tuple[CommonCorrection, ...] = Field(min_length=1)
    components: dict[str, ErrorComponents]
    median_percent: dict[str, float]
    held: dict[str, float]
    left_out: dict[str, dict[str, float]]
    covered: PdCovered

    def correction(self, engine: str, dtype: str) -> CommonCorrection:
        """Of the stacks that are most like that engine and format of weights."""
        return next(
            each
            for each in self.corrections
            if each.engine in (None, engine) and (each.precision is None or is_precision(each.precision, dtype))
        )

    def served_as(self, engine: str) -> list[Stack]:
        """The stacks of that engine."""
        return [each.stack for each in self.stacks if each.engine == engine]

    def unseen(self, stack: Stack) -> tuple[str, ...]:
        """The kinds, of model, GPU and engine version, in which no stack here is like this one."""
        return unseen(stack, [each.stack for each in self.stacks])


@cache
def public_pd() -> PdCatalog:
    """The catalog that pdlab has. Raises UsageError if the file is damaged."""
    return load_yaml(PUBLIC_PD, PdCatalog)


def with_pd_correction(hardware: Hardware, shape: ModelShape) -> Hardware:
    """The hardware, whose P:D engines are corrected by what public stacks of P:D have in common. The hardware stays the
    same if Ray routes, if its steps are no tables, or if levels were measured for its correction."""
    steps = hardware.steps
    if steps is None or hardware.direct is None or steps.correction.fitted_levels:
        return hardware
    known = public_pd().correction(steps.engine, steps.quant.get("gemm") or shape.weight_dtype)
    correction = Correction(
        sequence_us=steps.correction.sequence_us,
        factor=known.factor,
        prefill_factor=known.prefill_factor,
        source=SOURCE,
    )
    return hardware.model_copy(update={"apart": Apart(correction=correction, pd_overhead_ms=known.path_ms)})
