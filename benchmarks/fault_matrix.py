#!/usr/bin/env python3
"""What becomes of requests when prefill dies, hangs or forgets: vLLM alone against vLLM with pdlab's KV guard.

Two bare vLLM servers on this machine, prefill and decode, the tiny model, no GPU. Many requests are prefilled, then
one fault happens, then all of them are sent to decode; every answer is compared with the engine alone. Writes a table
in Markdown, and ends with code 1 if the guard let a wrong answer or a hang through, or if vLLM alone had no
wrong answer (the faults then prove nothing).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from faulty_pair import FAULTS, FaultyPair, Tally, client  # noqa: E402

# Faults whose requests have answers, and which share of the requests each has; the others are tried with a few.
SHARES = {"kill": 0.24, "kill-first": 0.08, "kill-during": 0.16, "stop": 0.24, "expired": 0.16, "twice": 0.12}
FEW = 8
PER_ROUND = 80
RIGHT = ("equal", "rounded")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500, help="with the guard (default %(default)s)")
    parser.add_argument("--stock", type=int, default=60, help="with vLLM alone (default %(default)s; 0: leave it out)")
    parser.add_argument("--faults", default=",".join(FAULTS), help="default %(default)s")
    parser.add_argument("--deadline-s", type=float, default=10.0, help="of the guard (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="default %(default)s")
    parser.add_argument("--logs", type=Path, help="folder for the servers' logs (default: a new temporary one)")
    parser.add_argument("--out", type=Path, help="write the table there too, and its figures beside it as .json")
    args = parser.parse_args(argv)
    names = [name for name in args.faults.split(",") if name]
    if unknown := [name for name in names if name not in FAULTS]:
        parser.error(f"--faults {','.join(unknown)}: not known; there are {','.join(FAULTS)}")
    logs = args.logs or Path(tempfile.mkdtemp(prefix="pdlab-fault-matrix-"))
    print(f"logs: {logs}", file=sys.stderr)
    tallies: dict[str, dict[str, Tally]] = {}
    actions: dict[str, Counter[str]] = {}
    for engine, requests in (("vLLM alone", args.stock), ("with the guard", args.requests)):
        if requests:
            guarded = engine == "with the guard"
            with FaultyPair(
                logs / ("guarded" if guarded else "stock"), guarded=guarded, deadline_s=args.deadline_s
            ) as p:
                tallies[engine] = asyncio.run(measure(p, names, requests, args.seed))
                actions[engine] = p.actions()
    text = table(tallies, actions)
    print(text)
    if args.out:
        args.out.write_text(text, encoding="utf-8")
        rows = {engine: {n: vars(t) for n, t in by.items()} for engine, by in tallies.items()}
        args.out.with_suffix(".json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    complaints = list(judge(tallies))
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    return 1 if complaints else 0


async def measure(pair: FaultyPair, names: Sequence[str], requests: int, seed: int) -> dict[str, Tally]:
    """Rounds of every fault, until it has its share of the requests."""
    tallies: dict[str, Tally] = {}
    share = sum(SHARES.get(name, 0.0) for name in names) or 1.0
    async with client(pair, seed=seed) as to:
        await to.warm()
        for name in names:
            left = math.ceil(requests * SHARES[name] / share) if name in SHARES else FEW
            rounds = math.ceil(left / PER_ROUND)
            while left > 0:
                count = math.ceil(left / rounds)
                began = time.monotonic()
                tally = await FAULTS[name](to, count)
                took_s = time.monotonic() - began
                print(
                    f"{name}: {dict(tally.outcomes)}, slowest {tally.slowest_s:.1f} s, {took_s:.0f} s", file=sys.stderr
                )
                tallies.setdefault(name, Tally(tally.fault)).add(tally)
                left, rounds = left - count, rounds - 1
    return tallies


def table(tallies: dict[str, dict[str, Tally]], actions: dict[str, Counter[str]]) -> str:
    """One row per fault and kind of engine."""
    lines = [
        "| fault | engine | requests | right | wrong | error | hang | slowest (s) | KV free after (s): P, D |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(name for by in tallies.values() for name in by):
        for engine, by in tallies.items():
            if (tally := by.get(name)) is None:
                continue
            outcomes = tally.outcomes
            right = str(sum(outcomes[outcome] for outcome in RIGHT))
            if other := {
                outcome: count
                for outcome, count in outcomes.items()
                if outcome not in (*RIGHT, "wrong", "error", "hang")
            }:
                right = ", ".join(f"{count} {outcome}" for outcome, count in other.items())
            freed = ", ".join("never" if math.isinf(s) else f"{s:.1f}" for s in tally.freed_s.values())
            lines.append(
                f"| {tally.fault} | {engine} | {tally.requests} | {right} | {outcomes['wrong']} | "
                f"{outcomes['error']} | {outcomes['hang']} | {tally.slowest_s:.1f} | {freed} |"
            )
    for engine, counts in actions.items():
        if counts:
            lines += ["", f"{engine}: " + ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))]
    return "\n".join([*lines, ""])


def judge(tallies: dict[str, dict[str, Tally]]) -> list[str]:
    """What is wrong with the result."""
    complaints = []
    guarded, stock = tallies.get("with the guard", {}), tallies.get("vLLM alone", {})
    for tally in guarded.values():
        for outcome in ("wrong", "hang", "error"):
            if tally.outcomes[outcome]:
                complaints.append(f"with the guard: {tally.fault}: {tally.outcomes[outcome]} {outcome}")
        complaints += [
            f"with the guard: {tally.fault}: KV blocks of {role} are still in use"
            for role, seconds in tally.freed_s.items()
            if math.isinf(seconds)
        ]
    if stock and any(name in SHARES for name in stock) and not sum(tally.outcomes["wrong"] for tally in stock.values()):
        complaints.append("vLLM alone gave no wrong answer: these faults prove nothing")
    return complaints


if __name__ == "__main__":
    sys.exit(main())
