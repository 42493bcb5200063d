#!/usr/bin/env python3
"""What a request and a streamed token cost the processes on their way, in CPU time, on a rehearsed deployment.

    python launch_gptoss.py --pd-spread --p-tp 4 --d-tp 4 --rehearse --slow-down 8 --detach
    python benchmarks/streamed_tokens.py                    # three chunks a request
    python launch_gptoss.py --pd-spread --p-tp 4 --d-tp 4 --rehearse --slow-down 8 --chunk-per-token --detach
    python benchmarks/streamed_tokens.py                    # as many chunks as tokens, as vLLM streams

Sends one closed loop and prints, for every kind of process, CPU milliseconds per request; what they take in as many
seconds without any request is taken off. The difference of the two, by the chunks more, is the cost of a token.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from process_cpu import cpu_s  # noqa: E402

from pdlab.bench.client.processes import LoadClient  # noqa: E402
from pdlab.bench.client.protocol import ClientLevel, slowed  # noqa: E402
from pdlab.cluster import local_nodes  # noqa: E402
from pdlab.core.workload import Closed  # noqa: E402
from pdlab.deploy.endpoint import load_running  # noqa: E402

KINDS = ("HAProxy", "router", "ingress", "prefill", "decode")


def main() -> int:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("-u", "--base-url", default="http://127.0.0.1:8000")
    flags.add_argument("-c", "--concurrency", type=int, default=8)
    flags.add_argument("--prompts", type=int, default=96)
    flags.add_argument("--itl", type=int, default=1000)
    flags.add_argument("--otl", type=int, default=100)
    args = flags.parse_args()
    running, nodes = load_running(args.base_url), local_nodes.running()
    if running is None or nodes is None or running.manifest.rehearsal is None:
        raise SystemExit(f"no rehearsal is served at {args.base_url}: launch one with --rehearse --detach")
    rehearsal = running.manifest.rehearsal
    level = ClientLevel(
        name="level", base_url=args.base_url, model=running.model_id, tokenizer=running.tokenizer,
        input_tokens=args.itl, output_tokens=args.otl, num_requests=args.prompts, seed=time.time_ns() % 2**32,
        load=Closed(concurrency=args.concurrency),
    )  # fmt: skip
    with LoadClient() as client:
        warm = level.model_copy(update={"num_requests": 2 * args.concurrency, "seed": level.seed // 2})
        client.run(slowed(warm, rehearsal.slow_down or 1.0))
        before, began = cpu_s(local_nodes.processes(nodes)), time.monotonic()
        answer = client.run(slowed(level, rehearsal.slow_down or 1.0))
        took_s, after = time.monotonic() - began, cpu_s(local_nodes.processes(nodes))
        time.sleep(took_s)
        idle = cpu_s(local_nodes.processes(nodes))
    answered = [record for record in answer.records if record.ok]
    if len(answered) < args.prompts:
        raise SystemExit(f"{args.prompts - len(answered)} of {args.prompts} requests failed")
    chunks = sum(1 + len(record.itl_s) for record in answered) / len(answered)
    print(f"{running.manifest.label}, {running.manifest.serving_path}")
    print(f"{args.itl}:{args.otl}, concurrency {args.concurrency}, {chunks:.0f} chunks a request, "
          f"{len(answered) / took_s:.1f} requests/s real")  # fmt: skip
    for kind in KINDS:
        if kind in after:
            own_s = max(0.0, 2 * after[kind] - before[kind] - idle[kind])
            print(f"{kind}: {1e3 * own_s / len(answered):.2f} ms of CPU per request")
    return 0


if __name__ == "__main__":
    sys.exit(main())
