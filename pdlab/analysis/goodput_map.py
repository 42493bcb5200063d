"""Goodput per GPU over a grid of bounds on TTFT and TPOT, and the best configuration in each cell.

Goodput is of open loops (DistServe, Zhong et al., OSDI 2024): only levels at request rates count. Between two levels
the share within the bounds is a straight line; nothing is extended beyond the levels. Goodput is at most what a level
serves at which a queue grows: a short level may meet loose bounds only because it ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from pdlab.core.workload import Open, Slo
from pdlab.results.slo import within

if TYPE_CHECKING:
    from pdlab.analysis.intervals import Array
    from pdlab.analysis.loading import Loaded

MILLION, HOUR_S = 1e6, 3600.0
ALIKE = 0.05  # configurations within this relative difference count as equal (single runs, or one is simulated)


@dataclass(frozen=True, slots=True, eq=False)
class RateLevel:
    """One open-loop level: ``rate_rps`` requests/s arrive at the whole deployment. ``ttft_s``, ``tpot_s``: of its
    requests (TPOT NaN for one token). ``failed``: requests without an answer. ``behind_rps``: the served requests/s if
    a queue grows; None: the level keeps up."""

    rate_rps: float
    ttft_s: Array
    tpot_s: Array
    failed: int = 0
    behind_rps: float | None = None

    def share(self, slo: Slo) -> float:
        """Share of its requests within every bound."""
        count = len(self.ttft_s) + self.failed
        # There is no bound on E2EL: any number will do.
        return float(within(slo, self.ttft_s, self.tpot_s, self.ttft_s).sum()) / count if count else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class RateSweep:
    """One configuration under increasing request rates. ``gpus``: the number counted. ``output_tokens``: mean of an
    answer."""

    label: str
    origin: Literal["measured", "simulated"]
    gpus: float
    output_tokens: float
    levels: tuple[RateLevel, ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """Goodput in requests/s per counted GPU; 0 if the lowest rate misses the bounds. ``more``: the highest rate meets
    them, so there may be more."""

    goodput: float
    more: bool = False

    def cost(self, price_per_gpu_hour: float, output_tokens: float) -> float | None:
        """Of a million output tokens; None if nothing is served."""
        per_s = self.goodput * output_tokens
        return price_per_gpu_hour / HOUR_S / per_s * MILLION if per_s else None


@dataclass(frozen=True, slots=True)
class GoodputMap:
    """For each configuration a cell per (TPOT bound, TTFT bound), in their order."""

    ttft_s: tuple[float, ...]
    tpot_s: tuple[float, ...]
    quantile: float
    served: tuple[RateSweep, ...]
    cells: tuple[tuple[tuple[Cell, ...], ...], ...]

    def winners(self, row: int, column: int) -> tuple[int, ...]:
        """Configurations with the most goodput there or within 5 % of it, best first, and those that may have as much
        (`Cell.more`); empty if none serves any."""
        here = [cells[row][column] for cells in self.cells]
        most = max((each.goodput for each in here), default=0.0)
        if not most:
            return ()
        order = sorted(range(len(here)), key=lambda number: -here[number].goodput)
        return tuple(number for number in order if here[number].more or here[number].goodput >= (1 - ALIKE) * most)

    @property
    def winners_anywhere(self) -> frozenset[int]:
        """The `winners` of all cells."""
        cells = ((row, column) for row in range(len(self.tpot_s)) for column in range(len(self.ttft_s)))
        return frozenset(number for cell in cells for number in self.winners(*cell))


def goodput_map(
    served: Sequence[RateSweep], ttft_s: Sequence[float], tpot_s: Sequence[float], quantile: float
) -> GoodputMap:
    """Every configuration over every pair of bounds."""
    cells = tuple(
        tuple(tuple(cell(each, Slo(ttft_s=ttft, tpot_s=tpot, quantile=quantile)) for ttft in ttft_s) for tpot in tpot_s)
        for each in served
    )
    return GoodputMap(tuple(ttft_s), tuple(tpot_s), quantile, tuple(served), cells)


def cell(served: RateSweep, slo: Slo) -> Cell:
    """`crossing` of the levels, per GPU, at most what the lowest level serves that does not keep up. It is no lower
    than a rate that keeps up within the bounds."""
    levels = sorted(served.levels, key=lambda level: level.rate_rps)
    most_rps, more = crossing([ShareAtRate(level.rate_rps, level.share(slo)) for level in levels], slo.quantile)
    # At still higher rates a longer queue says nothing new.
    behind_rps = next((level.behind_rps for level in levels if level.behind_rps is not None), None)
    if behind_rps is None:
        return Cell(most_rps / served.gpus, more)
    kept_up = [level.rate_rps for level in levels if level.behind_rps is None and level.rate_rps <= most_rps]
    return Cell(max(min(most_rps, behind_rps), *kept_up, 0.0) / served.gpus)


class ShareAtRate(NamedTuple):
    """``share``: of the requests within the bounds at ``rate_rps``."""

    rate_rps: float
    share: float


def crossing(levels: Sequence[ShareAtRate], quantile: float) -> tuple[float, bool]:
    """The highest rate with a share of at least the quantile, below the first rate that misses, straight between the
    two.

    ``levels`` are by rate. The rate is 0 if the lowest one misses. The second value: whether every rate meets the SLO.
    """
    most, meeting = 0.0, None
    for level in levels:
        if level.share < quantile:
            if meeting is not None:
                part = (meeting.share - quantile) / (meeting.share - level.share)
                most = meeting.rate_rps + part * (level.rate_rps - meeting.rate_rps)
            return most, False
        most, meeting = level.rate_rps, level
    return most, bool(levels)


def measured(loaded: Loaded) -> RateSweep | None:
    """The valid open-loop levels of an experiment whose requests were kept; None if there is none. With them are rates
    above the capacity, which limit the goodput."""
    from pdlab.analysis.curves import gpus_of

    experiment = loaded.experiment
    runs = [
        (run, loaded.requests[run.key])
        for run in experiment.runs
        if isinstance(run.load, Open) and run.key in loaded.requests
    ]
    kept = {run.key.value for run, _ in runs if run.validity.valid}
    if not kept:
        return None
    levels = [
        RateLevel(
            requests.rate.value if run.validity.valid else run.key.value,
            requests.ttft_s,
            requests.tpot_s,
            requests.failed,
            # The whole run has the time in which the queue fills and empties.
            behind_rps=None if run.validity.valid else (run.steady or run.whole).requests_per_s,
        )
        for run, requests in runs
        if run.validity.valid or (run.validity.above_capacity and run.key.value not in kept)
    ]
    workload = experiment.manifest.workload
    return RateSweep(
        label=experiment.manifest.label,
        origin="simulated" if experiment.manifest.origin == "simulated" else "measured",
        gpus=gpus_of(experiment).total,
        output_tokens=workload.mean_tokens.output if workload else 1.0,
        levels=tuple(levels),
    )
