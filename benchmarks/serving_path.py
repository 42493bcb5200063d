#!/usr/bin/env python3
"""What the serving layer costs: 1P+1D through Ray Serve LLM against the same two engines bare.

One client for all (vLLM's own load generator), one machine, one run. The bare pair stands behind
the thinnest prefill-then-decode client: it posts to prefill, then streams from decode with the
transfer parameters that prefill answered. Every option of the serving path is measured too.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

from bare_pair import MODEL, ROOT, BarePair, tiny_model

from pdlab.bench.client.processes import LoadClient
from pdlab.bench.client.protocol import ClientLevel
from pdlab.cluster.local_nodes import hold_port
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
        "--two-hosts",
        action="store_true",
        help="prefill and decode on two hosts made of namespaces (root), reached at --host 0.0.0.0 as a cluster's are",
    )
    parser.add_argument("--first", type=int, default=len(OPTIONS), help="measure the first N options (default: all)")
    args = parser.parse_args()
    levels = [int(word) for word in args.concurrency.split(",")]
    hosts = ["--two-hosts"] if args.two_hosts else []
    rows: list[tuple[str, list[Figures]]] = []
    with BarePair(tuned=True) as pair, LoadClient() as client:
        urls = {"backend": "pd-bare", "prefill_url": pair.urls["producer"], "decode_url": pair.urls["consumer"]}
        rows.append(("bare pair", measure(client, urls, levels, args, 1)))
    for number, name in enumerate(list(OPTIONS)[: args.first], start=2):
        held, port = hold_port()
        launch = [sys.executable, str(ROOT / "launch_gptoss.py"), "--port", str(port)]
        with held:
            start = [*launch, "--pd-spread", "--local", "--detach", *hosts, *OPTIONS[name]]
            subprocess.run(start, check=True, capture_output=True)
            try:
                base_url = f"http://127.0.0.1:{port}"
                with reach(base_url), LoadClient() as client:
                    rows.append((name, measure(client, {"base_url": base_url}, levels, args, number)))
            finally:
                subprocess.run([*launch, "--shutdown"], check=True, capture_output=True)
    with BarePair(tuned=True) as pair, LoadClient() as client:
        urls = {"backend": "pd-bare", "prefill_url": pair.urls["producer"], "decode_url": pair.urls["consumer"]}
        rows.append(("bare pair again", measure(client, urls, levels, args, 99)))
    print_table(levels, rows)


def measure(
    client: LoadClient, target: dict[str, str], levels: Sequence[int], args: argparse.Namespace, run: int
) -> list[Figures]:
    """One warm-up, then every level; no prompt is used twice in a run of this script."""
    figures = []
    for index, concurrency in enumerate((4, *levels)):
        count = 16 if index == 0 else args.prompts * concurrency
        answer = client.run(
            ClientLevel(
                name=f"r{run}i{index}",
                model=MODEL,
                tokenizer=tiny_model(),
                input_tokens=args.itl,
                output_tokens=args.otl,
                num_requests=count,
                seed=1000 * run + index,
                concurrency=concurrency,
                **target,
            )
        )
        records = [record for record in answer.records if record.ok]
        if len(records) != count:
            raise SystemExit(f"{count - len(records)} of {count} requests failed against {target}")
        duration_s = max(record.finish_s or 0.0 for record in records)
        tokens = sum(record.output_tokens for record in records)
        tpot = statistics.median(record.tpot_s or 0.0 for record in records)
        ttft = statistics.median(record.ttft_s or 0.0 for record in records)
        figures.append(Figures(tokens / duration_s, 1e3 * tpot, 1e3 * ttft))
    return figures[1:]


def print_table(levels: Sequence[int], rows: Sequence[tuple[str, list[Figures]]]) -> None:
    """Markdown: figures, and the share of the bare pair (mean of its first and last measurement)."""
    bare = [figures for name, figures in rows if name.startswith("bare")]
    print("| serving path | concurrency | output tokens/s | of bare | TPOT, ms | of bare | TTFT, ms | of bare |")
    print("|---|---|---|---|---|---|---|---|")
    for name, figures in rows:
        for index, concurrency in enumerate(levels):
            mine = figures[index]
            base = [statistics.mean(run[index][field] for run in bare) for field in range(3)]
            print(
                f"| {name} | {concurrency} | {mine.tokens_per_s:.0f} | {mine.tokens_per_s / base[0]:.2f} "
                f"| {mine.tpot_ms:.1f} | {mine.tpot_ms / base[1]:.2f} "
                f"| {mine.ttft_ms:.0f} | {mine.ttft_ms / base[2]:.2f} |"
            )


if __name__ == "__main__":
    main()
