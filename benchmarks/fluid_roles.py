#!/usr/bin/env python3
"""What roles that follow the load gain over every fixed split, and over an oracle that knows the schedule, simulated.

    python benchmarks/fluid_roles.py [--engines 16] [--every 60] [--seeds 11,12] [--known 8:57,1:41] [--out DIR]
    python benchmarks/fluid_roles.py --known 8:57,1:41.1 --load 0.85 --roles auto,5:11 --out DIR

gpt-oss-120b, TP2 engines on H100 (configs/catalog/h100-vllm-0.11.yaml), TTFT within 2 s and TPOT within 12 ms. All of
it is simulated; fixed splits, the controller (`pdlab.roles.policy`) and the oracle run on the same pool and requests.
KV blocks are taken to merge within a node (plan.py says what it costs where they do not).

- **Stationary**: the highest rate of each mix at which 95 % of requests are within both bounds.
- **Alternating**: each mix comes for --every seconds at its own rate, a share of what the best fixed split serves of
  it alone, the same share for both. Goodput is requests/s within both bounds: the most that any share gives, and what
  the highest share gives at which nine of ten requests are within.
- **Oracle**: takes the best stationary split of each mix when its turn begins, or some seconds before.
- **Flash crowd**: prompts four times as long for 30 s.

The first round is left out: the controller begins knowing nothing. --out keeps the runs at the controller's best
share, for viz.py; with --load it only keeps the runs of --roles at that share. The policy was tuned on seeds 0 to 2.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pdlab.core.catalog import load_model  # noqa: E402
from pdlab.core.deployment import Deployment, Fluid, Pool  # noqa: E402
from pdlab.core.mixes import parse_mixes  # noqa: E402
from pdlab.core.workload import Level, Open, Slo, Workload  # noqa: E402
from pdlab.plan.fluid_pools import MatchedSplit, hill_climb, matched, most_rps, share_within  # noqa: E402
from pdlab.results import roles_log  # noqa: E402
from pdlab.results.schema import Manifest  # noqa: E402
from pdlab.results.store import Store  # noqa: E402
from pdlab.roles.observed import ObservedPool  # noqa: E402
from pdlab.roles.policy import Policy, RoleDecision  # noqa: E402
from pdlab.roles.spec import AUTO, FluidSpec  # noqa: E402
from pdlab.sim.fluid import Controller  # noqa: E402
from pdlab.sim.hardware import load_hardware  # noqa: E402
from pdlab.sim.level import SimulatedLevel, records, to_run  # noqa: E402
from pdlab.sim.simulator import simulate  # noqa: E402

SLO = Slo(ttft_s=2.0, tpot_s=0.012)
MIXES = ((5000, 250), (1000, 1000))
HARDWARE, SHAPE = load_hardware("h100-vllm-0.11"), load_model("gpt-oss-120b")
STATIONARY_S, FILLS_S, ROUNDS = 60.0, 40.0, 2
QUANTILE, ALTERNATING_QUANTILE = 0.95, 0.9
LOADS = (0.4, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)  # of what fixed splits serve of a mix alone
PAST = 0.85  # of the most: more load than that is past it
LEADS_S = (0.0, 2.0)
CROWD_AT_S, CROWD_S, CROWD_FACTOR = 60.0, 30.0, 4
CROWD_MIX, CROWD_LOAD = (2000, 500), 0.35


class Oracle:
    """Takes the split of whichever mix has its turn, so many seconds before it begins."""

    def __init__(self, splits: Sequence[int], every_s: float, lead_s: float) -> None:
        self.splits, self.every_s, self.lead_s = splits, every_s, lead_s
        self.learns = Policy(FluidSpec(slo_ttft_s=SLO.ttft_s, slo_tpot_s=SLO.tpot_s))

    def decide(self, observed: ObservedPool) -> RoleDecision:
        self.learns.decide(observed)  # when engines are done draining follows from rates
        prefill = self.splits[int((observed.now_s + self.lead_s) // self.every_s) % len(self.splits)]
        now = sum(each.role != "decode" for each in observed.engines)
        roles = self.learns.roles(observed.engines, prefill)
        return RoleDecision(prefill, len(roles) - prefill, prefill != now, "by the schedule", roles)


def deployment(engines: int, roles: str) -> Deployment:
    return Deployment(
        topology=Fluid(pool=Pool(replicas=engines, tp=2), roles=roles, slo_ttft_s=SLO.ttft_s, slo_tpot_s=SLO.tpot_s)
    )


def run(
    engines: int, workload: Workload, level: Level, roles: str = AUTO, controller: Controller | None = None
) -> SimulatedLevel:
    assert SHAPE is not None
    (done,) = simulate(
        deployment(engines, roles),
        [level],
        workload,
        HARDWARE,
        SHAPE,
        seed=workload.seed,
        controller=controller,
        scattered=False,
    )
    return done


# --- stationary -----------------------------------------------------------------------------------


def stationary_rps(engines: int, mix: tuple[int, int], seeds: Sequence[int], roles: str, near_rps: float) -> float:
    """The highest rate at which enough requests are within both bounds."""

    def share(rate_rps: float) -> float:
        level = Level(load=Open(rate_rps=rate_rps), num_requests=round(rate_rps * (FILLS_S + STATIONARY_S)), seed=0)
        workloads = [Workload(input_tokens=mix[0], output_tokens=mix[1], seed=seed) for seed in seeds]
        return fmean(share_within(run(engines, workload, level, roles), SLO, FILLS_S) for workload in workloads)

    return most_rps(share, QUANTILE, near_rps)


def matched_to(engines: int, mix: tuple[int, int]) -> MatchedSplit:
    assert SHAPE is not None
    pool, workload = Pool(replicas=engines, tp=2), Workload(input_tokens=mix[0], output_tokens=mix[1])
    return matched(HARDWARE, SHAPE, workload, pool, SLO)


def best_fixed(engines: int, mix: tuple[int, int], seeds: Sequence[int]) -> MatchedSplit:
    """The fixed split that serves most of a mix, and what it serves."""
    begin, near_rps = matched_to(engines, mix)

    @cache
    def served(prefill: int) -> float:
        return stationary_rps(engines, mix, seeds, f"{prefill}:{engines - prefill}", near_rps)

    best = hill_climb(served, begin, engines)
    return MatchedSplit(best, served(best))


# --- alternating ----------------------------------------------------------------------------------


class Alternating:
    """The pool under mixes that take turns, at shares of the rates that the best fixed splits serve of each."""

    def __init__(self, engines: int, every_s: float, rates_rps: Sequence[float], seeds: Sequence[int]) -> None:
        self.engines, self.every_s, self.rates_rps, self.seeds = engines, every_s, rates_rps, seeds
        self.within = cache(self._within)

    def level(self, share: float, seed: int) -> tuple[Workload, Level]:
        mixes = ",".join(f"{a}:{b}@{rate:.4f}" for (a, b), rate in zip(MIXES, self.rates_rps, strict=True))
        workload = Workload(lengths=parse_mixes(f"{mixes},every={self.every_s:g}"), seed=seed)
        requests = round(share * sum(self.rates_rps) * self.every_s * ROUNDS)
        return workload, Level(load=Open(rate_rps=share), num_requests=requests, seed=0)

    def _within(self, share: float, roles: str, splits: tuple[int, ...] = (), lead_s: float = 0.0) -> float:
        """Share of the requests within both bounds, the first round left out."""
        shares = []
        for seed in self.seeds:
            controller = Oracle(splits, self.every_s, lead_s) if splits else None
            done = run(self.engines, *self.level(share, seed), roles, controller)
            shares.append(share_within(done, SLO, len(MIXES) * self.every_s))
        return fmean(shares)

    def most(self, of: Callable[[float], float]) -> tuple[float, float]:
        """(the most requests/s within both bounds that any load gives, that load). Loads grow until it is less."""
        best = (0.0, LOADS[0])
        for load in LOADS:
            reached = load * of(load)
            if reached < PAST * best[0]:
                break
            best = max(best, (reached, load))
        return best[0] * fmean(self.rates_rps), best[1]

    def kept(self, of: Callable[[float], float]) -> float:
        """Requests/s within both bounds at the highest load at which nine of ten are, straight between two loads."""
        before = (0.0, 1.0)
        for load in LOADS:
            share = of(load)
            if share < ALTERNATING_QUANTILE:
                part = (before[1] - ALTERNATING_QUANTILE) / (before[1] - share)
                return ALTERNATING_QUANTILE * (before[0] + part * (load - before[0])) * fmean(self.rates_rps)
            before = (load, share)
        return before[0] * before[1] * fmean(self.rates_rps)


def between(engines: int, splits: Sequence[int]) -> int:
    """The split that serves the same share of both mixes, by what their best ones have of the kind they need most."""
    most_prefill, most_decode = max(splits), engines - min(splits)
    return round(engines * most_prefill / (most_prefill + most_decode))


def alternating(engines: int, every_s: float, fixed: Sequence[MatchedSplit], seeds: Sequence[int]) -> Alternating:
    pool = Alternating(engines, every_s, [each.rps for each in fixed], seeds)
    splits = tuple(each.prefill for each in fixed)
    begin = between(engines, splits)
    goodputs: tuple[tuple[str, Callable[[Callable[[float], float]], float]], ...] = (
        ("most requests/s within the SLO", lambda of: pool.most(of)[0]),
        ("requests/s within it where nine of ten are", pool.kept),
    )
    for name, goodput in goodputs:

        @cache
        def of_split(prefill: int, goodput: Callable[[Callable[[float], float]], float] = goodput) -> float:
            return goodput(lambda load: pool.within(load, f"{prefill}:{engines - prefill}"))

        split = hill_climb(of_split, begin, engines, max(engines // 16, 1))
        best = of_split(split)
        auto = goodput(lambda load: pool.within(load, AUTO))

        def of_lead(lead_s: float, goodput: Callable[[Callable[[float], float]], float] = goodput) -> float:
            return goodput(lambda load: pool.within(load, AUTO, splits, lead_s))

        oracle = max(map(of_lead, LEADS_S))
        print(
            f"| {engines} | alternating every {every_s:g} s: {name} | {best:.1f} ({split}:{engines - split}) "
            f"| {auto:.1f} | {oracle:.1f} | **{auto / best:.2f}** | **{auto / oracle:.2f}** |",
            flush=True,
        )
    return pool


# --- flash crowd ----------------------------------------------------------------------------------


def crowd_level(engines: int, rate_rps: float, seed: int) -> tuple[Workload, Level]:
    crowd = f"crowd=prompts*{CROWD_FACTOR}@{CROWD_AT_S:g}+{CROWD_S:g}"
    workload = Workload(lengths=parse_mixes(f"{CROWD_MIX[0]}:{CROWD_MIX[1]},{crowd}"), seed=seed)
    return workload, Level(load=Open(rate_rps=rate_rps), num_requests=round(rate_rps * 120), seed=0)


def recovers_s(done: SimulatedLevel) -> tuple[float, float]:
    """(seconds from the begin of the crowd until nine of ten prompts of every later second are within the bound of
    TTFT, the highest p90 of a second)"""
    seconds: dict[int, list[float]] = {}
    for arrival_s, first_s in zip(done.arrival_s, done.first_token_s, strict=True):
        if arrival_s >= CROWD_AT_S:
            seconds.setdefault(int(arrival_s - CROWD_AT_S), []).append(first_s - arrival_s)
    p90 = {second: sorted(values)[int(0.9 * (len(values) - 1))] for second, values in seconds.items()}
    assert SLO.ttft_s is not None
    late = [second for second, value in p90.items() if value > SLO.ttft_s]
    return max(late, default=-1) + 1.0, max(p90.values())


def flash_crowd(engines: int, seeds: Sequence[int]) -> None:
    split, rate_rps = matched_to(engines, CROWD_MIX)
    rate_rps *= CROWD_LOAD
    rows = [
        (name, [recovers_s(run(engines, *crowd_level(engines, rate_rps, seed), roles)) for seed in seeds])
        for name, roles in ((f"{split}:{engines - split}", f"{split}:{engines - split}"), (AUTO, AUTO))
    ]
    for name, outcomes in rows:
        print(
            f"| {engines} | {CROWD_MIX[0]}:{CROWD_MIX[1]}, {rate_rps:.0f} requests/s | {name} "
            f"| {max(seconds for seconds, _ in outcomes):.0f} | {max(most for _, most in outcomes):.1f} |",
            flush=True,
        )


def keep(out: Path, pool: Alternating, roles: Sequence[str], share: float) -> None:
    """The runs at that share as experiments, for viz.py."""
    for each in roles:
        of = deployment(pool.engines, each)
        workload, level = pool.level(share, pool.seeds[0])
        done = run(pool.engines, workload, level, each)
        folder = out / of.label
        store = Store(folder)
        store.write_manifest(Manifest(origin="simulated", label=of.label, deployment=of, gpus=of.gpus))
        store.write(to_run(done, of.label, workload), records(done), force=True)
        roles_log.write(folder, level.key, done.splits)


def head(*names: str) -> None:
    print(f"| {' | '.join(names)} |\n|{'---|' * len(names)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=16)
    parser.add_argument("--every", default="60", help="seconds of a turn; several with commas between")
    parser.add_argument("--seeds", default="11", help="of requests and routing")
    parser.add_argument("--known", help="best split and requests/s of each mix, not to search: 8:57,1:41")
    parser.add_argument("--load", type=float, help="keep the runs at this share in --out, and measure nothing")
    parser.add_argument("--roles", default=AUTO, help="with --load: splits, with commas between")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.load and not (args.known and args.out):
        parser.error("--load needs --known and --out")
    engines, seeds = args.engines, tuple(int(seed) for seed in args.seeds.split(","))
    begins_s = time.perf_counter()
    head("engines", "load", "best fixed split", "auto", "oracle", "auto / fixed", "auto / oracle")
    fixed = []
    for known in args.known.split(",") if args.known else ():
        prefill, _, rps = known.partition(":")
        fixed.append(MatchedSplit(int(prefill), float(rps)))
    for mix in MIXES[len(fixed) :]:
        best = best_fixed(engines, mix, seeds)
        auto_rps = stationary_rps(engines, mix, seeds, AUTO, best.rps)
        fixed.append(best)
        print(
            f"| {engines} | {mix[0]}:{mix[1]}: most requests/s at which {QUANTILE:.0%} are within the SLO "
            f"| {best.rps:.1f} ({best.prefill}:{engines - best.prefill}) | {auto_rps:.1f} | "
            f"| **{auto_rps / best.rps:.2f}** | |",
            flush=True,
        )
    rates = [each.rps for each in fixed]
    for every in args.every.split(","):
        if args.load:
            keep(args.out, Alternating(engines, float(every), rates, seeds), args.roles.split(","), args.load)
            continue
        pool = alternating(engines, float(every), fixed, seeds)
        if args.out:
            split = between(engines, [each.prefill for each in fixed])
            keep(args.out, pool, [AUTO, f"{split}:{engines - split}"], pool.most(partial(pool.within, roles=AUTO))[1])
    if args.load:
        return
    print()
    head(
        "engines",
        f"prompts x {CROWD_FACTOR} for {CROWD_S:g} s",
        "roles",
        "s until TTFT within 2 s",
        "highest p90 TTFT, s",
    )
    flash_crowd(engines, seeds)
    print(f"\n{time.perf_counter() - begins_s:.0f} s, seeds {args.seeds}")


if __name__ == "__main__":
    main()
