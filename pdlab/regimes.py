"""Which configuration wins at which throughput: the regime map. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pdlab.perf import Hardware
from pdlab.planner import UNKNOWN_ERROR, Candidate
from pdlab.workload import Slo

STEPS = 80
Curve = Sequence[tuple[float, float]]  # (output tokens/s per node, TPOT s), by throughput


@dataclass(frozen=True, slots=True)
class Regime:
    """Between two throughputs (output tokens/s per node) ``label`` gives the lowest TPOT, or one within the error.

    ``rivals`` are others that are within the error all the way.
    """

    label: str
    from_tokens_per_s: float
    to_tokens_per_s: float
    tpot_s: tuple[float, float]
    rivals: tuple[str, ...]


def regimes(candidates: Sequence[Candidate], hardware: Hardware, slo: Slo) -> list[Regime]:
    """The regime map of the candidates, in as few stretches as the error of the model allows.

    From the lowest throughput up, the configuration that stays longest within the error of the lowest TPOT
    (sqrt(2) times the held-out median error: two predictions closer than that may be the same). Loads
    that miss the TTFT bound do not count. Between simulated loads a curve is straight, and nothing
    is extended beyond them.
    """
    error = hardware.error or UNKNOWN_ERROR
    return stretches(
        {c.deployment.label: curve_of(c, hardware.gpus_per_node, slo) for c in candidates},
        tolerance=math.sqrt(2) * error.tpot_percent / 100,
    )


def curve_of(candidate: Candidate, node_gpus: int, slo: Slo) -> Curve:
    """Throughput per node and TPOT of the candidate's loads."""
    scale = candidate.copies * node_gpus / candidate.total_gpus
    first_token = Slo(ttft_s=slo.ttft_s, quantile=slo.quantile)
    kept = [o for o in candidate.outcomes if first_token.stress_of(o.latencies) <= 1]
    return sorted((o.output_tokens_per_s * scale, o.tpot_s) for o in kept)


def stretches(curves: Mapping[str, Curve], tolerance: float) -> list[Regime]:
    """Fewest stretches of throughput within which one curve is within ``tolerance`` of the lowest TPOT."""
    drawn = {label: curve for label, curve in curves.items() if curve}
    if not drawn:
        return []
    low = min(curve[0][0] for curve in drawn.values())
    top = max(curve[-1][0] for curve in drawn.values())
    grid = [*(low + (top - low) * step / STEPS for step in range(STEPS)), top]
    tpots = [{label: t for label, curve in drawn.items() if (t := tpot_at(curve, x)) is not None} for x in grid]
    close = [{label for label, t in at.items() if t <= (1 + tolerance) * min(at.values())} for at in tpots]
    found: list[Regime] = []
    start = 0
    while start < len(grid):

        def reach(label: str, start: int = start) -> tuple[int, float]:
            end = start
            while end < len(grid) and label in close[end]:
                end += 1
            return end, -sum(tpots[i][label] for i in range(start, end)) / max(end - start, 1)

        label = max(sorted(close[start]), key=reach)
        end, _ = reach(label)
        rivals = set.intersection(*close[start:end]) - {label}
        found.append(
            Regime(
                label, grid[start], grid[end - 1], (tpots[start][label], tpots[end - 1][label]), tuple(sorted(rivals))
            )
        )
        start = end
    return found


def tpot_at(curve: Curve, wanted: float) -> float | None:
    """Lowest TPOT at a throughput of at least ``wanted``, straight between neighbours; None beyond the curve."""
    best = min((tpot_s for reached, tpot_s in curve if reached >= wanted), default=None)
    for (x0, y0), (x1, y1) in pairwise(curve):
        if x0 <= wanted <= x1 and x1 > x0:
            between = y0 + (y1 - y0) * (wanted - x0) / (x1 - x0)
            best = between if best is None else min(best, between)
    return best
