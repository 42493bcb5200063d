"""Mends of tabulated times of routed experts. Pure.

aiconfigurator-core has times of experts where a few of them get most tokens (``power_law``), and where all get as many
(``balanced``). Two things of the former are not of an engine:

- **A kink.** One more token touches one expert after the other for the first time, and the more tokens there are the
  fewer. As long as the weights of the touched experts are most of the time, it is a concave function of the tokens. The
  database drew its loads in another way up to one token per expert. MiniMax-M2.5 (256 experts, 8 of them per token)
  on B200 at TP 2 takes 118 us for 16 tokens, 152 for 32, and 214 for 48.
- **The busiest rank.** With whole experts on each rank, the database times the rank that has the most popular ones:
  1.5 times the mean for 8,192 tokens on 4 ranks. Experts of a benchmark's random tokens are spread more evenly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pdlab.sim.step_time import busiest_rank

KINKED = 2.0  # tokens per expert up to which times are made concave: their kink is at one


class RoutedExperts(NamedTuple):
    """Seconds of the experts of all layers by the tokens of a rank's step, as the database has them: ``skewed_s`` where
    few experts get most tokens, ``equal_s`` where all get as many. ``tokens_each``: of a step that gives every expert
    one token on average. ``ranks``: over which ``experts`` are spread whole."""

    skewed_s: Callable[[float], float]
    equal_s: Callable[[float], float]
    tokens_each: float
    ranks: int
    experts: int


class OtherWay(NamedTuple):
    """A part of a step that engines do in another way than the tables. Seconds of all layers by the tokens of a rank's
    step: ``table_s`` in the tables, ``other_s`` in the other way, which is for at most so many tokens."""

    table_s: Callable[[float], float]
    other_s: Callable[[float], float]
    most: float = math.inf

    def more_s(self, tokens: float) -> float:
        """The seconds that the other way takes more (below 0: less)."""
        return self.other_s(tokens) - self.table_s(tokens) if tokens <= self.most else math.inf

    def without_faults_s(self, tokens: float, fault: float) -> float:
        """As `more_s`, where the table's time is a fault: at least ``fault`` times that of the other way. Else 0."""
        other_s, table_s = self.other_s(tokens), self.table_s(tokens)
        return other_s - table_s if table_s > fault * other_s else 0.0


Seconds = Callable[[float], float]


def between(fewer_s: Seconds | None, more_s: Seconds | None) -> Seconds | None:
    """Experts over a number of ranks of which only half and twice as many were measured, for the same tokens in all.
    The ranks have twice and half as many experts, each of as many tokens. So their times are in proportion."""
    if fewer_s is None or more_s is None:
        return None
    return lambda tokens: math.sqrt(fewer_s(tokens) * more_s(tokens))


def mended(of: RoutedExperts, rows: Sequence[float]) -> dict[float, float]:
    """By each of the growing numbers of tokens the seconds that are missing in the tables (below 0: that are too
    many)."""
    table_s = {each: of.skewed_s(each) for each in rows}
    few = [each for each in rows if each <= KINKED * of.tokens_each]
    better_s = table_s | dict(zip(few, concave(few, [table_s[each] for each in few]), strict=True))
    if of.ranks > 1:
        busiest = busiest_rank(of.ranks, of.experts)
        better_s |= {each: min(table_s[each], of.equal_s(each * busiest)) for each in rows if each not in few}
    return {each: better_s[each] - table_s[each] for each in rows}


def concave(xs: Sequence[float], ys: Sequence[float]) -> list[float]:
    """The least concave values that are not below ``ys``, at the growing ``xs``."""
    import numpy as np

    hull: list[tuple[float, float]] = []
    for x, y in zip(xs, ys, strict=True):
        while len(hull) > 1 and _below(hull[-1], hull[-2], (x, y)):
            hull.pop()
        hull.append((x, y))
    at, values = [x for x, _ in hull], [y for _, y in hull]
    return [float(each) for each in np.interp(xs, at, values)] if hull else []


def _below(point: tuple[float, float], before: tuple[float, float], after: tuple[float, float]) -> bool:
    """Whether the point is not above the line between the two others."""
    rise = (point[1] - before[1]) * (after[0] - point[0])
    return rise <= (after[1] - point[1]) * (point[0] - before[0])
