"""Bounds on the latencies of a level, such as ``tpot_ms=12,ttft_p95_ms=2000``."""

from __future__ import annotations

from typing import Literal, Protocol, get_args

from pydantic import Field

from pdlab.core.errors import UsageError
from pdlab.core.schema import Frozen, validate
from pdlab.core.text import plain
from pdlab.core.workload import bounds_in_ms

Metric = Literal["ttft", "tpot", "itl", "e2el"]
Statistic = Literal["mean", "p50", "p90", "p95", "p99"]
METRICS: tuple[Metric, ...] = get_args(Metric)
EXAMPLE = "tpot_ms=12,ttft_p95_ms=2000"


class BoundedFigures(Protocol):
    """The figures of a level, which bounds are compared with."""

    def ms(self, metric: Metric, statistic: str) -> float | None:
        """The statistic of the latency, in ms; None if it is unknown."""


class Bound(Frozen):
    """``statistic`` of ``metric`` over the requests of a level (for ITL over their gaps) must be at most ``ms``."""

    metric: Metric
    statistic: Statistic
    ms: float = Field(gt=0, allow_inf_nan=False)

    @property
    def label(self) -> str:
        return f"{self.metric.upper()} {self.statistic} <= {plain(self.ms)} ms"


class Bounds(Frozen):
    """At least one bound, no two of one figure. A level is within the bounds if each of them holds."""

    bounds: tuple[Bound, ...] = Field(min_length=1)

    @property
    def label(self) -> str:
        """``TPOT p50 <= 12 ms and TTFT p95 <= 2,000 ms``."""
        return " and ".join(bound.label for bound in self.bounds)

    @property
    def of_first_token(self) -> bool:
        """Whether TTFT is bounded, directly or as part of E2EL."""
        return any(bound.metric in ("ttft", "e2el") for bound in self.bounds)

    @property
    def with_ttft(self) -> str:
        """The bounds as text for --at, with another bound on TTFT."""
        parts = [f"{bound.metric}_{bound.statistic}_ms={bound.ms:g}" for bound in self.bounds]
        return ",".join([*parts, "ttft_p95_ms=2000"])

    def known(self, figures: BoundedFigures) -> bool:
        """Whether every bounded figure is known."""
        return all(figures.ms(bound.metric, bound.statistic) is not None for bound in self.bounds)

    def hold(self, figures: BoundedFigures) -> bool:
        """Whether every bounded figure is known and within its bound."""
        limits = [(figures.ms(bound.metric, bound.statistic), bound.ms) for bound in self.bounds]
        return all(value is not None and value <= ms for value, ms in limits)


def parse_bounds(text: str, statistic: Statistic, where: str = "--at") -> Bounds:
    """Parse ``tpot_ms=12,ttft_p95_ms=2000``. Raises UsageError.

    ``statistic``: for parts without one. ``where``: the flag or key, for messages.
    """
    metrics, statistics = "|".join(get_args(Metric)), "|".join(get_args(Statistic))
    bounds: list[dict[str, object]] = []
    expected = (
        "METRIC_ms=N or METRIC_STATISTIC_ms=N above 0, "
        f"with {metrics.replace('|', ', ')} and {statistics.replace('|', ', ')}: {EXAMPLE}"
    )
    for match, ms in bounds_in_ms(text, where, f"({metrics})(?:_({statistics}))?", expected):
        named = {"metric": match[1], "statistic": match[2] or statistic}
        if any(named.items() <= other.items() for other in bounds):
            raise UsageError(f"{where} {text}: {match[1]} {named['statistic']} is there twice; keep one")
        bounds.append({**named, "ms": ms})
    return validate(Bounds, {"bounds": bounds}, where=f"{where} {text}")
