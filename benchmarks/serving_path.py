#!/usr/bin/env python3
"""What the serving layer costs: 1P+1D through Ray Serve LLM against the same two engines bare.

One client for all (vLLM's own load generator), one machine, one run. The bare pair stands behind
the thinnest prefill-then-decode client: it posts to prefill, then streams from decode with the
transfer parameters that prefill answered. It is measured before and after each round of the serving
path's options, and a round is compared with the mean of the two: machines change their pace by more
than what is to be seen. With --two-hosts the bare engines are on two hosts as well: prompts, KV and
tokens take the same link. A second table has the CPU that each kind of process took, by /proc.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from bare_pair import MODEL, ROOT, BarePair, tiny_model
from process_cpu import cpu_s, used_s

from pdlab.bench.client.processes import LoadClient
from pdlab.bench.client.protocol import ClientLevel
from pdlab.cluster import local_nodes, two_hosts
from pdlab.cluster.local_nodes import hold_port
from pdlab.core.errors import UsageError
from pdlab.core.lengths import parse_lengths
from pdlab.core.workload import Closed, Level, Workload
from pdlab.deploy.endpoint import reach

# What a cluster serves with at --host 0.0.0.0 is what --local serves with; elsewhere it is an ingress.
INGRESS = ["--no-direct-streaming"]
OPTIONS = {
    "default with --local and at --host 0.0.0.0 (direct streaming)": [],
    "direct streaming, --early-token": ["--early-token"],
    "direct streaming, --reuse-first-token": ["--reuse-first-token", "--kv-poll-ms", "0.5"],
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


class Measured(NamedTuple):
    """Figures of each level; of each level, milliseconds of CPU that each kind of process took per request; and what
    each took per second without load."""

    figures: list[Figures]
    cpu_ms: list[dict[str, float]]
    idle_ms: dict[str, float]


class Server(NamedTuple):
    """Where the load goes, as fields of `ClientLevel`, and the ids of the processes that serve it."""

    target: Mapping[str, str]
    pids: Callable[[], Iterable[int]]


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
    parser.add_argument(
        "--idle", type=float, default=20.0, metavar="SECONDS", help="without load, for its CPU (default %(default)s)"
    )
    args = parser.parse_args()
    if args.two_hosts:
        try:
            two_hosts.require()
        except UsageError as error:
            parser.error(str(error))
    levels = [int(word) for word in args.concurrency.split(",")]
    hosts = ["--two-hosts"] if args.two_hosts else []
    names = list(OPTIONS)[: args.first]
    bare, served = [measure_bare(levels, args)], dict[str, list[Measured]]()
    for _ in range(args.rounds):
        for name in names:
            served.setdefault(name, []).append(measure_served([*hosts, *OPTIONS[name]], levels, args))
        bare.append(measure_bare(levels, args))
    print_table(levels, bare, served)
    print_cpu(levels, {"bare pair": bare, **served})


def measure_bare(levels: Sequence[int], args: argparse.Namespace) -> Measured:
    with BarePair(tuned=True, on_two_hosts=args.two_hosts) as pair, pair.network(), LoadClient() as client:
        urls = {"backend": "pd-bare", "prefill_url": pair.urls["producer"], "decode_url": pair.urls["consumer"]}
        return measure_with_cpu(client, Server(urls, pair.pids), levels, args, args.idle)


def measure_served(flags: Sequence[str], levels: Sequence[int], args: argparse.Namespace) -> Measured:
    held, port = hold_port()
    launch = [sys.executable, str(ROOT / "launch_gptoss.py"), "--port", str(port)]
    with held:
        start = [*launch, "--pd-spread", "--local", "--detach", *flags]
        subprocess.run(start, check=True, capture_output=True)
        try:
            base_url = f"http://127.0.0.1:{port}"
            nodes = local_nodes.running()
            assert nodes is not None
            server = Server({"base_url": base_url}, lambda: local_nodes.processes(nodes))
            with reach(base_url), LoadClient() as client:
                return measure_with_cpu(client, server, levels, args, args.idle)
        finally:
            subprocess.run([*launch, "--shutdown"], check=True, capture_output=True)


def measure(
    client: LoadClient, target: Mapping[str, str], levels: Sequence[int], args: argparse.Namespace
) -> list[Figures]:
    """Of a server whose processes do not matter: as `measure_with_cpu`."""
    return measure_with_cpu(client, Server(target, lambda: ()), levels, args, idle_s=0.0).figures


def measure_with_cpu(
    client: LoadClient, server: Server, levels: Sequence[int], args: argparse.Namespace, idle_s: float
) -> Measured:
    """One warm-up, ``idle_s`` seconds without load, then every level, the whole list ``repeats`` times: the median of
    each figure per level.

    Every server is asked the same requests; no prompt is sent to one of them twice.
    """
    lengths = parse_lengths(args.lengths)
    workload = Workload(input_tokens=args.itl, output_tokens=args.otl, lengths=lengths)
    measured: list[list[Figures]] = [[] for _ in levels]
    cpu: list[dict[str, float]] = [{} for _ in levels]

    def until_now() -> dict[str, float]:
        return cpu_s([*server.pids(), *([client.pid] if client.pid else [])])

    measure_level(client, server, workload, Level(load=Closed(concurrency=4), num_requests=16, seed=1))
    before = until_now()
    time.sleep(idle_s)
    idle_ms = {kind: 1e3 * used / idle_s for kind, used in used_s(before, until_now()).items()} if idle_s else {}
    for repeat in range(args.repeats):
        for index, concurrency in enumerate(levels):
            load = Closed(concurrency=concurrency)
            level = Level(load=load, num_requests=args.prompts * concurrency, seed=1000 * (repeat + 1) + index)
            before = until_now()
            measured[index].append(measure_level(client, server, workload, level))
            for kind, used in used_s(before, until_now()).items():
                cpu[index][kind] = cpu[index].get(kind, 0.0) + 1e3 * used / level.num_requests / args.repeats
    medians = [Figures(*map(statistics.median, zip(*repeats, strict=True))) for repeats in measured]
    shown = (f"{each.tokens_per_s:.0f} at {concurrency}" for concurrency, each in zip(levels, medians, strict=True))
    who = server.target.get("base_url", "bare pair")
    print(f"{who}: output tokens/s {', '.join(shown)}", file=sys.stderr, flush=True)
    return Measured(medians, cpu, idle_ms)


def measure_level(client: LoadClient, server: Server, workload: Workload, level: Level) -> Figures:
    """One level of requests; ends the program if one of them fails."""
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
            load=level.load,
            **server.target,
        )
    )
    records = [record for record in answer.records if record.ok]
    if len(records) != level.num_requests:
        raise SystemExit(
            f"{level.num_requests - len(records)} of {level.num_requests} requests failed against {server.target}"
        )
    duration_s = max(record.finish_s or 0.0 for record in records)
    tokens = sum(record.output_tokens for record in records)
    tpot = statistics.median(record.tpot_s or 0.0 for record in records)
    ttft = statistics.median(record.ttft_s or 0.0 for record in records)
    return Figures(tokens / duration_s, 1e3 * tpot, 1e3 * ttft)


def print_table(levels: Sequence[int], bare: Sequence[Measured], served: dict[str, list[Measured]]) -> None:
    """Markdown: medians over rounds, and those of the rounds' shares of the bare pair with the least and the most.

    ``bare``: one more than there are rounds, before and after each.
    """
    print("| serving path | concurrency | output tokens/s | of bare | TPOT, ms | of bare | TTFT, ms | of bare |")
    print("|---|---|---|---|---|---|---|---|")
    for index, concurrency in enumerate(levels):
        row("bare pair", concurrency, [run.figures[index] for run in bare])
    for name, rounds in served.items():
        for index, concurrency in enumerate(levels):
            around = [
                Figures(*map(statistics.mean, zip(before.figures[index], after.figures[index], strict=True)))
                for before, after in pairwise(bare)
            ]
            row(name, concurrency, [run.figures[index] for run in rounds], around)


def row(name: str, concurrency: int, runs: Sequence[Figures], around: Sequence[Figures] = ()) -> None:
    cells = []
    for field, digits in enumerate((0, 1, 0)):
        cells.append(f"{statistics.median(run[field] for run in runs):.{digits}f}")
        shares = [run[field] / base[field] for run, base in zip(runs, around, strict=False)]
        words = [f"{statistics.median(shares):.2f}"] if shares else ["-"]
        words += [f"({min(shares):.2f} to {max(shares):.2f})"] if len(shares) > 1 else []
        cells.append(" ".join(words))
    print(f"| {name} | {concurrency} | {' | '.join(cells)} |")


def print_cpu(levels: Sequence[int], runs: Mapping[str, Sequence[Measured]]) -> None:
    """Markdown: CPU of every kind of process, medians over rounds: ms per request of each level, ms per second idle."""
    columns = [
        (f"{name}, {what}", [pick(run) for run in rounds])
        for name, rounds in runs.items()
        for what, pick in _parts(levels)
    ]
    kinds = sorted({kind for _, cells in columns for cell in cells for kind in cell})
    print("\n| CPU of | " + " | ".join(head for head, _ in columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for kind in kinds:
        medians = [statistics.median(cell.get(kind, 0.0) for cell in cells) for _, cells in columns]
        print(f"| {kind} | " + " | ".join(f"{each:.1f}" for each in medians) + " |")
    sums = [statistics.median(sum(cell.values()) for cell in cells) for _, cells in columns]
    print("| together | " + " | ".join(f"{each:.1f}" for each in sums) + " |")


def _parts(levels: Sequence[int]) -> list[tuple[str, Callable[[Measured], dict[str, float]]]]:
    """Heads of the columns of CPU, and what is in them."""
    loaded: list[tuple[str, Callable[[Measured], dict[str, float]]]] = []
    for index, concurrency in enumerate(levels):
        loaded.append((f"ms a request at {concurrency}", lambda run, index=index: run.cpu_ms[index]))  # type: ignore[misc]
    return [*loaded, ("ms a second idle", lambda run: run.idle_ms)]


if __name__ == "__main__":
    main()
