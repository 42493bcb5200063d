#!/usr/bin/env python3
"""What the serving layer costs: 1P+1D through Ray Serve LLM against the same two engines bare.

One client for all (vLLM's own load generator), one machine, one run. The bare pair stands behind
the thinnest prefill-then-decode client: it posts to prefill, then streams from decode with the
transfer parameters that prefill answered. It is measured before and after each round of the serving
path's options, and a round is compared with the mean of the two: machines change their pace by more
than what is to be seen. With --two-hosts the bare engines are on two hosts as well: prompts, KV and
tokens take the same link.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from bare_pair import MODEL, ROOT, BarePair, tiny_model

from pdlab.bench.client.processes import LoadClient
from pdlab.bench.client.protocol import ClientLevel
from pdlab.cluster import two_hosts
from pdlab.cluster.local_nodes import hold_port
from pdlab.core.errors import UsageError
from pdlab.core.lengths import parse_lengths
from pdlab.core.workload import Closed, Level, Workload
from pdlab.deploy.endpoint import reach

# What a cluster serves with at --host 0.0.0.0 is what --local serves with; elsewhere it is an ingress.
INGRESS = ["--no-direct-streaming"]
OPTIONS = {
    "default with --local and at --host 0.0.0.0 (direct streaming)": [],
    "default at any other --host (2 ingress replicas behind HAProxy)": INGRESS,
    "direct streaming, --no-tokenize-once": ["--no-tokenize-once"],
    "direct streaming, --stream-batching-ms 50": ["--stream-batching-ms", "50"],
    "ingress, --stream-batching-ms 50": [*INGRESS, "--stream-batching-ms", "50"],
    "ingress, --ingress-replicas 1": [*INGRESS, "--ingress-replicas", "1"],
}


class Figures(NamedTuple):
    """Output tokens/s over the whole level, medians in ms."""

    tokens_per_s: float
    tpot_ms: float
    ttft_ms: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-c", "--concurrency", default="4,16", help="levels (default %(default)s)")
    parser.add_argument(
        "--prompts", type=int, default=16, help="requests per unit of concurrency (default %(default)s)"
    )
    parser.add_argument("--itl", type=int, default=512, help="input tokens (default %(default)s)")
    parser.add_argument("--otl", type=int, default=64, help="output tokens (default %(default)s)")
    parser.add_argument(
        "--lengths",
        default="uniform:0.8-1.0",
        help="of single requests (default %(default)s; equal ones march in step, each run in a rhythm of its own)",
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="of every level; medians are shown (default %(default)s)"
    )
    parser.add_argument(
        "--two-hosts",
        action="store_true",
        help="prefill and decode on two hosts made of namespaces (root), reached at --host 0.0.0.0 as a cluster's are",
    )
    parser.add_argument("--rounds", type=int, default=1, help="all of it so many times, in turn (default %(default)s)")
    parser.add_argument("--first", type=int, default=len(OPTIONS), help="measure the first N options (default: all)")
    args = parser.parse_args()
    if args.two_hosts:
        try:
            two_hosts.require()
        except UsageError as error:
            parser.error(str(error))
    levels = [int(word) for word in args.concurrency.split(",")]
    hosts = ["--two-hosts"] if args.two_hosts else []
    names = list(OPTIONS)[: args.first]
    bare, served = [measure_bare(levels, args)], dict[str, list[list[Figures]]]()
    for _ in range(args.rounds):
        for name in names:
            served.setdefault(name, []).append(measure_served([*hosts, *OPTIONS[name]], levels, args))
        bare.append(measure_bare(levels, args))
    print_table(levels, bare, served)


def measure_bare(levels: Sequence[int], args: argparse.Namespace) -> list[Figures]:
    with BarePair(tuned=True, on_two_hosts=args.two_hosts) as pair, pair.network(), LoadClient() as client:
        urls = {"backend": "pd-bare", "prefill_url": pair.urls["producer"], "decode_url": pair.urls["consumer"]}
        return measure(client, urls, levels, args)


def measure_served(flags: Sequence[str], levels: Sequence[int], args: argparse.Namespace) -> list[Figures]:
    held, port = hold_port()
    launch = [sys.executable, str(ROOT / "launch_gptoss.py"), "--port", str(port)]
    with held:
        start = [*launch, "--pd-spread", "--local", "--detach", *flags]
        subprocess.run(start, check=True, capture_output=True)
        try:
            base_url = f"http://127.0.0.1:{port}"
            with reach(base_url), LoadClient() as client:
                return measure(client, {"base_url": base_url}, levels, args)
        finally:
            subprocess.run([*launch, "--shutdown"], check=True, capture_output=True)


def measure(
    client: LoadClient, target: dict[str, str], levels: Sequence[int], args: argparse.Namespace
) -> list[Figures]:
    """One warm-up, then every level, the whole list ``repeats`` times: the median of each figure per level.

    Every server is asked the same requests; no prompt is sent to one of them twice.
    """
    lengths = parse_lengths(args.lengths)
    workload = Workload(input_tokens=args.itl, output_tokens=args.otl, lengths=lengths)
    measured: list[list[Figures]] = [[] for _ in levels]
    _measure_level(client, target, workload, Level(load=Closed(concurrency=4), num_requests=16, seed=1))
    for repeat in range(args.repeats):
        for index, concurrency in enumerate(levels):
            load = Closed(concurrency=concurrency)
            level = Level(load=load, num_requests=args.prompts * concurrency, seed=1000 * (repeat + 1) + index)
            measured[index].append(_measure_level(client, target, workload, level))
    medians = [Figures(*map(statistics.median, zip(*repeats, strict=True))) for repeats in measured]
    told = (f"{each.tokens_per_s:.0f} at {concurrency}" for concurrency, each in zip(levels, medians, strict=True))
    print(f"{target.get('base_url', 'bare pair')}: output tokens/s {', '.join(told)}", file=sys.stderr, flush=True)
    return medians


def _measure_level(client: LoadClient, target: dict[str, str], workload: Workload, level: Level) -> Figures:
    assert isinstance(level.load, Closed)
    answer = client.run(
        ClientLevel(
            name=f"s{level.seed}",
            model=MODEL,
            tokenizer=tiny_model(),
            input_tokens=workload.input_tokens,
            output_tokens=workload.output_tokens,
            lengths=workload.draw(level) if workload.varied else None,
            num_requests=level.num_requests,
            seed=level.seed,
            concurrency=level.load.concurrency,
            **target,
        )
    )
    records = [record for record in answer.records if record.ok]
    if len(records) != level.num_requests:
        raise SystemExit(
            f"{level.num_requests - len(records)} of {level.num_requests} requests failed against {target}"
        )
    duration_s = max(record.finish_s or 0.0 for record in records)
    tokens = sum(record.output_tokens for record in records)
    tpot = statistics.median(record.tpot_s or 0.0 for record in records)
    ttft = statistics.median(record.ttft_s or 0.0 for record in records)
    return Figures(tokens / duration_s, 1e3 * tpot, 1e3 * ttft)


def print_table(levels: Sequence[int], bare: Sequence[list[Figures]], served: dict[str, list[list[Figures]]]) -> None:
    """Markdown: medians over rounds, and those of the rounds' shares of the bare pair with the least and the most.

    ``bare``: one more than there are rounds, before and after each.
    """
    print("| serving path | concurrency | output tokens/s | of bare | TPOT, ms | of bare | TTFT, ms | of bare |")
    print("|---|---|---|---|---|---|---|---|")
    for index, concurrency in enumerate(levels):
        row("bare pair", concurrency, [run[index] for run in bare])
    for name, rounds in served.items():
        for index, concurrency in enumerate(levels):
            around = [
                Figures(*map(statistics.mean, zip(before[index], after[index], strict=True)))
                for before, after in pairwise(bare)
            ]
            row(name, concurrency, [run[index] for run in rounds], around)


def row(name: str, concurrency: int, runs: Sequence[Figures], around: Sequence[Figures] = ()) -> None:
    cells = []
    for field, digits in enumerate((0, 1, 0)):
        cells.append(f"{statistics.median(run[field] for run in runs):.{digits}f}")
        shares = [run[field] / base[field] for run, base in zip(runs, around, strict=False)]
        words = [f"{statistics.median(shares):.2f}"] if shares else ["-"]
        words += [f"({min(shares):.2f} to {max(shares):.2f})"] if len(shares) > 1 else []
        cells.append(" ".join(words))
    print(f"| {name} | {concurrency} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
