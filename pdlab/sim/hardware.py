"""Hardware files of configs/catalog/: calibrated constants, each with its source and basis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from pydantic import Field

from pdlab.core.catalog import find_config
from pdlab.core.errors import UsageError
from pdlab.core.schema import Frozen, load_yaml

ConstantBasis = Literal["roofline", "fitted", "measured", "published", "assumed"]


class Constant(Frozen):
    """One number with its source; ``relative_error`` is its standard error (None: unknown)."""

    value: float
    unit: str
    basis: ConstantBasis
    source: str
    relative_error: float | None = Field(default=None, ge=0)


class ErrorParts(Frozen):
    """Errors of one metric on runs left out of a fit, as standard deviations of logarithms in percent: ``common`` to
    the levels of a configuration, and of one ``level`` beyond what its prediction knows
    (`pdlab.plan.prediction_intervals`)."""

    common_percent: float = Field(ge=0)
    level_percent: float = Field(ge=0)


class PercentErrors(NamedTuple):
    """The median error on held-out points, and the median difference between days."""

    held_out: float
    days: float


class FitError(Frozen):
    """Median absolute percentage errors over the held-out points of a cross-validation; ``..._days_percent``: median
    difference of two measurements of one configuration on different days (0: not known). ``parts``: of what the errors
    are made, by metric (TPOT, mean TTFT, requests/s), where that is known."""

    tpot_percent: float
    ttft_percent: float
    requests_per_s_percent: float
    points: int
    how: str
    tpot_days_percent: float = 0.0
    ttft_days_percent: float = 0.0
    requests_per_s_days_percent: float = 0.0
    parts: dict[str, ErrorParts] = Field(default_factory=dict)

    def percent(self, metric: str) -> PercentErrors:
        """Those of TPOT, mean TTFT or requests/s."""
        return {
            "TPOT": PercentErrors(self.tpot_percent, self.tpot_days_percent),
            "mean TTFT": PercentErrors(self.ttft_percent, self.ttft_days_percent),
            "requests/s": PercentErrors(self.requests_per_s_percent, self.requests_per_s_days_percent),
        }[metric]


class Hardware(Frozen):
    """One kind of GPU (or CPU) with one serving stack: constants by name, see `NAMES` for the ones needed."""

    name: str
    gpu: str
    gpus_per_node: int = Field(ge=1)
    stack: str
    cpu: bool = False  # engines of --local; a rank stands for a GPU
    hybrid_kv: bool = False
    block_tokens: int = Field(default=16, ge=1)
    step_tokens: int = Field(default=8192, ge=1)
    fitted_on: tuple[str, ...] = ()
    constants: dict[str, Constant]
    error: FitError | None = None

    def value(self, name: str) -> float:
        """Raises UsageError when the file has no such constant."""
        try:
            return self.constants[name].value
        except KeyError as error:
            raise UsageError(f"hardware {self.name}: constant {name!r} is missing; known are {_names(self)}") from error

    def with_values(self, values: Mapping[str, float]) -> Hardware:
        """The same hardware with some constants replaced (their basis stays)."""
        changed = {name: self.constants[name].model_copy(update={"value": value}) for name, value in values.items()}
        return self.model_copy(update={"constants": self.constants | changed})


def _names(hardware: Hardware) -> str:
    return ", ".join(sorted(hardware.constants))


def load_hardware(name_or_path: str) -> Hardware:
    """A file of configs/catalog/ by name, or a YAML file. Raises UsageError."""
    return load_yaml(find_config("catalog", name_or_path, "hardware"), Hardware)


UNKNOWN_ERROR = FitError(
    tpot_percent=10, ttft_percent=30, requests_per_s_percent=10, points=0, how="never checked: assumed"
)
TO_SD = 1.4826  # median absolute error -> standard deviation of a normal one
TO_90 = TO_SD * 1.6449  # -> 90 % of cases
