#!/usr/bin/env python3
"""What roles that follow the load gain over every fixed split, and over an oracle that knows the schedule, simulated.

    python benchmarks/fluid_roles.py [--engines 16] [--every 60] [--seeds 11,12] [--out DIR]

gpt-oss-120b, TP2 engines on H100 (configs/catalog/h100-vllm-0.11.yaml), TTFT within 2 s and TPOT within 12 ms. All of
it is simulated; fixed splits, the controller (`pdlab.roles.policy`) and the oracle run on the same pool and requests.
KV blocks are taken to merge within a node (plan.py says what it costs where they do not).

- **Stationary**: the highest rate of each mix at which 95 % of requests are within both bounds.
- **Alternating**: each mix comes for --every seconds at its own rate, a share of what the best fixed split serves of
  it alone, the same share for both. Goodput is requests/s within both bounds; of all shares tried the most
  that is reached, and what is reached at the highest share at which nine of ten requests are within.
- **Oracle**: takes the best stationary split of each mix when its turn begins, or some seconds before.
- **Flash crowd**: prompts four times as long for 30 s.

The first turn of each mix is left out: the controller begins knowing nothing. --out keeps the runs at the controller's
best share, for viz.py. The policy was tuned on seeds 0 to 3.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pdlab.core.catalog import load_model  # noqa: E402
from pdlab.core.deployment import Deployment, Fluid, Pool  # noqa: E402
from pdlab.core.mixes import parse_mixes  # noqa: E402
from pdlab.core.workload import Level, Open, Workload  # noqa: E402
from pdlab.plan.rate_matching import Matcher  # noqa: E402
from pdlab.results import roles_log  # noqa: E402
from pdlab.results.schema import Manifest  # noqa: E402
from pdlab.results.store import Store  # noqa: E402
from pdlab.roles.observed import Observed  # noqa: E402
from pdlab.roles.policy import Decision, Policy, Rules  # noqa: E402
from pdlab.sim.fluid import Controller  # noqa: E402
from pdlab.sim.hardware import load_hardware  # noqa: E402
from pdlab.sim.level import SimulatedLevel, records, to_run  # noqa: E402
from pdlab.sim.simulator import simulate  # noqa: E402

TTFT_S, TPOT_S = 2.0, 0.012
MIXES = ((5000, 250), (1000, 1000))
HARDWARE, SHAPE = load_hardware("h100-vllm-0.11"), load_model("gpt-oss-120b")
STATIONARY_S, FILLS_S = 60.0, 25.0
QUANTILE, ALTERNATING_QUANTILE = 0.95, 0.9
SHARES = (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)
LEADS_S = (0.0, 2.0, 5.0)
CROWD_AT_S, CROWD_S, CROWD_FACTOR = 60.0, 30.0, 4
CROWD_MIX, CROWD_LOAD = (2000, 500), 0.35


class Judged(NamedTuple):
    """Of the requests that came from a moment on: the share within both bounds, and how many of these per second."""

    share: float
    per_s: float


class Oracle:
    """Takes the split of whichever mix has its turn, so many seconds before it begins."""

    def __init__(self, splits: Sequence[int], every_s: float, lead_s: float) -> None:
        self.splits, self.every_s, self.lead_s = splits, every_s, lead_s
        self.learns = Policy(Rules(slo_ttft_s=TTFT_S, slo_tpot_s=TPOT_S))

    def decide(self, observed: Observed) -> Decision:
        self.learns.decide(observed)  # when engines are done draining follows from rates
        prefill = self.splits[int((observed.now_s + self.lead_s) // self.every_s) % len(self.splits)]
        now = sum(each.role != "decode" for each in observed.engines)
        roles = self.learns.roles(observed.engines, prefill)
        return Decision(prefill, len(roles) - prefill, prefill != now, "by the schedule", roles)


def deployment(engines: int, roles: str) -> Deployment:
    return Deployment(
        topology=Fluid(pool=Pool(replicas=engines, tp=2), roles=roles, slo_ttft_s=TTFT_S, slo_tpot_s=TPOT_S)
    )


def run(
    engines: int, workload: Workload, level: Level, roles: str = "auto", controller: Controller | None = None
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


def judged(done: SimulatedLevel, from_s: float) -> Judged:
    kept = count = 0
    for arrival_s, first_s, finish_s, tokens in zip(
        done.arrival_s, done.first_token_s, done.finish_s, done.output_tokens, strict=True
    ):
        if arrival_s >= from_s:
            count += 1
            kept += first_s - arrival_s <= TTFT_S and (finish_s - first_s) / max(tokens - 1, 1) <= TPOT_S
    return Judged(kept / count, kept / (done.arrival_s[-1] - from_s))


# --- stationary -----------------------------------------------------------------------------------


@cache
def stationary(engines: int, mix: tuple[int, int], rate_rps: float, seed: int, roles: str) -> Judged:
    workload = Workload(input_tokens=mix[0], output_tokens=mix[1], seed=seed)
    fills_s = FILLS_S if roles != "auto" else 2 * FILLS_S
    level = Level(load=Open(rate_rps=rate_rps), num_requests=round(rate_rps * (fills_s + STATIONARY_S)), seed=0)
    return judged(run(engines, workload, level, roles), fills_s)


def most_rps(engines: int, mix: tuple[int, int], seeds: Sequence[int], roles: str, near_rps: float) -> float:
    """The highest rate at which enough requests are within both bounds, by halving to 1 %."""
    low, high = 0.3 * near_rps, 1.4 * near_rps
    while high / low > 1.01:
        rate_rps = (low + high) / 2
        enough = fmean(stationary(engines, mix, rate_rps, seed, roles).share for seed in seeds) >= QUANTILE
        low, high = (rate_rps, high) if enough else (low, rate_rps)
    return low


def matched(engines: int, mix: tuple[int, int]) -> tuple[int, float]:
    """The split and the rate that rate matching gives."""
    assert SHAPE is not None
    matcher = Matcher(HARDWARE, SHAPE, Workload(input_tokens=mix[0], output_tokens=mix[1]), ttft_s=TTFT_S)
    pool = Pool(tp=2)
    rates = matcher.rates(pool, pool, TPOT_S)

    def served(prefill: int) -> float:
        return min(prefill * rates.prefill_rps, (engines - prefill) * rates.decode_rps)

    best = max(range(1, engines), key=served)
    return best, served(best)


def best_fixed(engines: int, mix: tuple[int, int], seeds: Sequence[int]) -> tuple[int, float]:
    """The fixed split that serves most of a mix, and what it serves: uphill from rate matching."""
    split, near_rps = matched(engines, mix)

    @cache
    def served(prefill: int) -> float:
        return most_rps(engines, mix, seeds, f"{prefill}:{engines - prefill}", near_rps)

    return uphill(served, split, engines)


def uphill(value: Callable[[int], float], begin: int, engines: int) -> tuple[int, float]:
    """The split of most value: from one on to better neighbours, two steps far."""
    best = begin
    while True:
        near = [prefill for prefill in range(best - 2, best + 3) if 1 <= prefill < engines]
        better = max(near, key=value)
        if value(better) <= value(best):
            return best, value(best)
        best = better


# --- alternating ----------------------------------------------------------------------------------


class Alternating:
    """The pool under mixes that take turns, at shares of the rates that the best fixed splits serve of each."""

    def __init__(self, engines: int, every_s: float, rates_rps: Sequence[float], seeds: Sequence[int], turns: int):
        self.engines, self.every_s, self.rates_rps, self.seeds, self.turns = engines, every_s, rates_rps, seeds, turns
        self.outcome = cache(self._outcome)

    def level(self, share: float, seed: int) -> tuple[Workload, Level]:
        mixes = ",".join(f"{a}:{b}@{rate:.4f}" for (a, b), rate in zip(MIXES, self.rates_rps, strict=True))
        workload = Workload(lengths=parse_mixes(f"{mixes},every={self.every_s:g}"), seed=seed)
        requests = round(share * fmean(self.rates_rps) * self.every_s * self.turns)
        return workload, Level(load=Open(rate_rps=share), num_requests=requests, seed=0)

    def _outcome(self, share: float, roles: str, splits: tuple[int, ...] = (), lead_s: float = 0.0) -> Judged:
        outcomes = []
        for seed in self.seeds:
            controller = Oracle(splits, self.every_s, lead_s) if splits else None
            outcomes.append(
                judged(run(self.engines, *self.level(share, seed), roles, controller), len(MIXES) * self.every_s)
            )
        return Judged(fmean(each.share for each in outcomes), fmean(each.per_s for each in outcomes))

    def most_per_s(self, of: Callable[[float], Judged]) -> tuple[float, float]:
        """Over all shares: (requests/s within both bounds, the share)."""
        best = max(SHARES, key=lambda share: of(share).per_s)
        return of(best).per_s, best

    def within_per_s(self, of: Callable[[float], Judged]) -> float:
        """Requests/s within both bounds at the highest share at which enough are, straight between two shares."""
        before: tuple[float, Judged] | None = None
        for share in SHARES:
            now = of(share)
            if now.share < ALTERNATING_QUANTILE:
                if before is None:
                    return 0.0
                part = (before[1].share - ALTERNATING_QUANTILE) / (before[1].share - now.share)
                rate_rps = (before[0] + part * (share - before[0])) * fmean(self.rates_rps)
                return ALTERNATING_QUANTILE * rate_rps
            before = (share, now)
        assert before is not None
        return before[1].per_s


def alternating(engines: int, every_s: float, fixed: Sequence[tuple[int, float]], seeds: Sequence[int]) -> Alternating:
    pool = Alternating(engines, every_s, [rate for _, rate in fixed], seeds, turns=6)
    splits = tuple(split for split, _ in fixed)
    begin = round(fmean(splits))

    def rows(value: Callable[[Callable[[float], Judged]], float]) -> tuple[float, int, float, float]:
        split, best = uphill(
            cache(lambda prefill: value(lambda s: pool.outcome(s, f"{prefill}:{engines - prefill}"))), begin, engines
        )
        oracle = max(value(lambda s, lead_s=lead_s: pool.outcome(s, "auto", splits, lead_s)) for lead_s in LEADS_S)
        return best, split, value(lambda s: pool.outcome(s, "auto")), oracle

    for name, value in (
        ("most requests/s within the SLO", lambda of: pool.most_per_s(of)[0]),
        ("requests/s within it where nine of ten are", pool.within_per_s),
    ):
        best, split, auto, oracle = rows(value)
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
    late = [second for second, value in p90.items() if value > TTFT_S]
    return max(late, default=-1) + 1.0, max(p90.values())


def flash_crowd(engines: int, seeds: Sequence[int]) -> None:
    split, rate_rps = matched(engines, CROWD_MIX)
    rate_rps *= CROWD_LOAD
    rows = [
        (name, [recovers_s(run(engines, *crowd_level(engines, rate_rps, seed), roles)) for seed in seeds])
        for name, roles in ((f"{split}:{engines - split}", f"{split}:{engines - split}"), ("auto", "auto"))
    ]
    for name, outcomes in rows:
        print(
            f"| {engines} | {CROWD_MIX[0]}:{CROWD_MIX[1]}, {rate_rps:.0f} requests/s | {name} "
            f"| {max(seconds for seconds, _ in outcomes):.0f} | {max(most for _, most in outcomes):.1f} |",
            flush=True,
        )


def keep(out: Path, pool: Alternating, share: float, roles: Sequence[str]) -> None:
    """The runs at that share as experiments, for viz.py."""
    for each in roles:
        of = deployment(pool.engines, each)
        workload, level = pool.level(share, pool.seeds[0])
        done = run(pool.engines, workload, level, each)
        folder = out / of.label
        store = Store(folder)
        store.write_manifest(Manifest(origin="simulated", label=of.label, deployment=of, gpus=of.gpus))
        store.write(to_run(done, of.label, workload), records(done), force=True)
        roles_log.write(folder, level.key, [roles_log.RoleChange(*split) for split in done.splits])


def head(*names: str) -> None:
    print(f"| {' | '.join(names)} |\n|{'---|' * len(names)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=16)
    parser.add_argument("--every", default="60", help="seconds of a turn; several with commas between")
    parser.add_argument("--seeds", default="11,12", help="of requests and routing")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    engines, seeds = args.engines, tuple(int(seed) for seed in args.seeds.split(","))
    begins_s = time.perf_counter()
    head("engines", "load", "best fixed split", "auto", "oracle", "auto / fixed", "auto / oracle")
    fixed = []
    for mix in MIXES:
        split, rps = best_fixed(engines, mix, seeds)
        auto = most_rps(engines, mix, seeds, "auto", rps)
        fixed.append((split, rps))
        print(
            f"| {engines} | {mix[0]}:{mix[1]}: most requests/s at which {QUANTILE:.0%} are within the SLO "
            f"| {rps:.1f} ({split}:{engines - split}) | {auto:.1f} | | **{auto / rps:.2f}** | |",
            flush=True,
        )
    for every in args.every.split(","):
        pool = alternating(engines, float(every), fixed, seeds)
        if args.out:
            _, share = pool.most_per_s(lambda s, pool=pool: pool.outcome(s, "auto"))
            split = round(fmean(split for split, _ in fixed))
            keep(args.out, pool, share, ["auto", f"{split}:{engines - split}"])
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
