"""The orderings that were reported of gpt-oss-120b on H100 nodes, 5000:250: which of them the simulator reproduces.

    python benchmarks/orderings.py

Simulated as the reports were measured: five prompts per unit of concurrency, prompts of earlier
levels repeated, every figure the mean of four seeds. Exit code 1 when one does not hold.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pdlab.core.catalog import load_model  # noqa: E402
from pdlab.core.deployment import Deployment, parse_label  # noqa: E402
from pdlab.core.workload import Closed, Level, Workload  # noqa: E402
from pdlab.plan.accuracy import LevelPoint, throughput_at  # noqa: E402
from pdlab.sim.hardware import load_hardware  # noqa: E402
from pdlab.sim.kv_transfer import LinkKind  # noqa: E402
from pdlab.sim.level import figures  # noqa: E402
from pdlab.sim.simulator import simulate  # noqa: E402

SEEDS = (0, 1, 2, 3)
LOADS = (4, 8, 16, 32, 48, 64, 96, 128, 192)  # reported to 64; what leads at the top shows beyond
BY_TP = ("collocated-1xtp8", "collocated-2xtp4", "collocated-4xtp2", "collocated-8xtp1")
COLLOCATED = "collocated-4xtp2"
RATIOS = {  # P:D, all of TP2
    "1:3": "pd-pack-p1xtp2-d3xtp2",
    "1:2": "pd-pack-p1xtp2-d2xtp2",
    "1:1": "pd-pack-p1xtp2-d1xtp2",
    "2:1": "pd-pack-p2xtp2-d1xtp2",
    "3:1": "pd-pack-p3xtp2-d1xtp2",
}
TARGETS_S = tuple(n / 2000 for n in range(13, 61))  # 6.5 to 30 ms
PACK, SPREAD = "pd-pack-p1xtp4-d1xtp4", "pd-spread-p1xtp4-d1xtp4"
ALIKE = 0.03  # pack and spread: relative difference that is none
TEN = (5.0, 20.0)  # what counts as ten times


class Ordering(NamedTuple):
    """What was reported, whether the simulator does it too, and the figures."""

    reported: str
    holds: bool
    simulated: str


Curve = dict[int, LevelPoint]  # by concurrency


def curve(label: str, link: LinkKind | None = None) -> Curve:
    """TPOT and requests/s per node of 8 GPUs at every load."""
    hardware, shape = load_hardware("h100-vllm-0.11"), load_model("gpt-oss-120b")
    assert shape is not None
    deployment = Deployment(topology=parse_label(label))
    levels = [Level(load=Closed(concurrency=n), num_requests=5 * n, seed=0) for n in LOADS]
    points: dict[int, list[tuple[float, float]]] = {n: [] for n in LOADS}
    for seed in SEEDS:
        done = simulate(deployment, levels, Workload(), hardware, shape, seed=seed, prompts="repeated", link=link)
        for n, level in zip(LOADS, done, strict=True):
            tpot_s, _, rate_rps = figures(level)
            assert tpot_s is not None
            points[n].append((tpot_s, rate_rps * hardware.gpus_per_node / deployment.gpus))
    return {n: LevelPoint(*map(statistics.fmean, zip(*each, strict=True))) for n, each in points.items()}


def by_tp(curves: Sequence[Curve], loads: Sequence[int] = (32, 48, 64)) -> Ordering:
    """``curves``: collocated on one node, TP 8, 4, 2, 1."""
    tpots_ms = {n: [1e3 * each[n].tpot_s for each in curves] for n in loads}
    return Ordering(
        "TPOT of a node: TP8 < TP4 < TP2 < TP1, concurrency 32 to 64",
        all(a < b for tpots in tpots_ms.values() for a, b in pairwise(tpots)),
        "; ".join(f"{n}: " + ", ".join(f"{tpot:.1f}" for tpot in tpots) + " ms" for n, tpots in tpots_ms.items()),
    )


def winners(curves: Mapping[str, Curve]) -> list[tuple[str, float]]:
    """(who serves most per node at equal TPOT, from which TPOT on), as TPOT grows."""
    drawn = {name: list(each.values()) for name, each in curves.items()}
    leaders: list[tuple[str, float]] = []
    for tpot_s in TARGETS_S:
        rates = {name: rate for name, each in drawn.items() if (rate := throughput_at(each, tpot_s)) is not None}
        best = max(rates, key=lambda name: rates[name])
        if not leaders or leaders[-1][0] != best:
            leaders.append((best, tpot_s))
    return leaders


def by_ratio(curves: Mapping[str, Curve]) -> Ordering:
    """``curves``: by P:D, and collocated."""
    leaders = winners(curves)
    return Ordering(
        "most per node at equal TPOT, from the lowest TPOT up: P:D 1:3, 1:2, 1:1, collocated (all TP2)",
        [name for name, _ in leaders] == ["1:3", "1:2", "1:1", "collocated"],
        ", ".join(f"{name} from {1e3 * tpot_s:g} ms" for name, tpot_s in leaders),
    )


def dominated(curves: Mapping[str, Curve], name: str) -> Ordering:
    """Whether collocated serves more per node at every TPOT that both reach."""
    shares = []
    for tpot_s in TARGETS_S:
        ours = throughput_at(list(curves[name].values()), tpot_s)
        theirs = throughput_at(list(curves["collocated"].values()), tpot_s)
        if ours is not None and theirs is not None:
            shares.append(ours / theirs)
    return Ordering(
        f"P:D {name} dominated by collocated",
        bool(shares) and max(shares) < 1,
        f"{min(shares):.2f} to {max(shares):.2f} of its requests/s per node at equal TPOT",
    )


def alike(pack: Curve, spread: Curve) -> Ordering:
    """Whether a pack and a spread over SRD differ at any load."""
    apart = [max(abs(one / other - 1) for one, other in zip(pack[n], spread[n], strict=True)) for n in LOADS if n <= 64]
    return Ordering(
        "pack about equal to spread over SRD (1:1, TP4)",
        max(apart) <= ALIKE,
        f"TPOT and requests/s at most {max(apart):.1%} apart",
    )


def tcp(srd: Curve, wire: Curve) -> Ordering:
    """Over TCP the link is full from concurrency 16 on."""
    times = [srd[n].per_node_rps / wire[n].per_node_rps for n in LOADS if 16 <= n <= 64]
    return Ordering(
        "a TCP wire ten times worse in throughput (concurrency 16 to 64)",
        all(TEN[0] <= each <= TEN[1] for each in times),
        ", ".join(f"{each:.1f}" for each in times) + " times",
    )


def orderings() -> list[Ordering]:
    """All of them, from the shipped constants."""
    curves = {name: curve(label) for name, label in RATIOS.items()} | {"collocated": curve(COLLOCATED)}
    spread = curve(SPREAD)
    return [
        by_tp([curve(label) for label in BY_TP]),
        by_ratio(curves),
        dominated(curves, "2:1"),
        dominated(curves, "3:1"),
        alike(curve(PACK), spread),
        tcp(spread, curve(SPREAD, "tcp")),
    ]


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    compared = orderings()
    print("| reported | simulated | holds |\n|---|---|---|")
    for each in compared:
        print(f"| {each.reported} | {each.simulated} | {'yes' if each.holds else 'no'} |")
    return 0 if all(each.holds for each in compared) else 1


if __name__ == "__main__":
    sys.exit(main())
