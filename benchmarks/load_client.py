#!/usr/bin/env python3
"""Does the load generator keep up, and how late are its clocks? Against a server that streams at a known rate.

Each level holds enough streams for a total rate of tokens, at a fixed time per token. The server logs when
it sent what: the difference to what the load generator says is the load generator's own error. Both, and
whatever else runs on this machine, share its cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pdlab.bench.client.processes import LoadClient  # noqa: E402
from pdlab.bench.client.protocol import ClientLevel  # noqa: E402
from pdlab.bench.gates import Evidence, client_saturation, clock  # noqa: E402
from pdlab.core.workload import Closed, RunKey, Workload  # noqa: E402
from pdlab.deploy.cpu_engine.tiny_model import build_tokenizer  # noqa: E402
from pdlab.results.level_data import LevelData  # noqa: E402
from pdlab.results.metrics import percentile, steady, whole  # noqa: E402
from pdlab.results.schema import Run  # noqa: E402

TTFT_S = 0.05
INPUT = 32
COLUMNS = (
    "processes", "streams", "asked tokens/s", "got", "CPU of a core", "loop lag p95, ms", "TTFT error p50 / p99, ms",
    "TPOT error p50, ms", "verdict",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", default="500,1000,2000,4000", help="streamed tokens/s (default %(default)s)")
    parser.add_argument("--processes", default="1,2", help="load-generator processes (default %(default)s)")
    parser.add_argument("--tpot-ms", type=float, default=20.0, help="of the server (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=100, help="output tokens of a request (default %(default)s)")
    parser.add_argument(
        "--must", type=float, default=2000.0, help="exit 1 if this rate is not kept (default %(default)s)"
    )
    args = parser.parse_args()
    tpot_s = args.tpot_ms / 1000
    kept: set[float] = set()
    server = subprocess.Popen(
        [sys.executable, str(ROOT / "tests/support/oracle.py")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        configure(url, {"": {"ttft_s": TTFT_S, "tpot_s": tpot_s}})
        print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
        with tempfile.TemporaryDirectory() as folder:
            build_tokenizer(Path(folder), 4096)
            (Path(folder) / "config.json").write_text('{"model_type": "gpt2"}')
            for processes in (int(word) for word in args.processes.split(",")):
                with LoadClient(processes) as client:
                    client.wait_ready()
                    for rate in (float(word) for word in args.rates.split(",")):
                        if measure(client, url, folder, rate, tpot_s, args.tokens):
                            kept.add(rate)
    finally:
        server.kill()
        server.wait()
    if any(rate >= args.must for rate in kept):
        return 0
    print(f"the load generator does not keep up with {args.must:g} streamed tokens/s here")
    return 1


def measure(client: LoadClient, url: str, tokenizer: str, rate: float, tpot_s: float, tokens: int) -> bool:
    """One level; prints its row and returns whether the load generator kept up."""
    service_s = TTFT_S + (tokens - 1) * tpot_s
    streams = max(1, round(rate * service_s / tokens))
    requested_tokens_per_s = streams * tokens / service_s
    name = f"p{client.processes}r{rate:g}"
    answer = client.run(
        ClientLevel(
            name=name, base_url=url, model="oracle", tokenizer=tokenizer, input_tokens=INPUT, output_tokens=tokens,
            num_requests=6 * streams, seed=int(rate) + client.processes, load=Closed(concurrency=streams),
        )
    )  # fmt: skip
    truth = sorted((e for e in log(url) if e["id"].startswith(f"{name}-")), key=lambda entry: entry["arrived"])
    records = answer.records
    requests, load = LevelData.of(records), Closed(concurrency=streams)
    window = steady(requests, load)
    ttft = sorted(e["sent"][0] - e["arrived"] for e in truth)
    tpot = [(e["sent"][-1] - e["sent"][0]) / (tokens - 1) for e in truth]
    measured = sorted(record.ttft_s or 0.0 for record in records)
    late = [1000 * (percentile(measured, q) - percentile(ttft, q)) for q in (50, 99)]
    tpot_error = 1000 * (statistics.median(r.tpot_s or 0.0 for r in records) - statistics.median(tpot))
    received_tokens_per_s = window.output_tokens_per_s if window else 0.0
    completed = sum(record.ok for record in records)
    run = Run(
        origin="measured", label="oracle", key=RunKey(kind=load.kind, value=load.value),
        workload=Workload(input_tokens=INPUT, output_tokens=tokens), load=load, num_requests=6 * streams,
        completed=completed, failed=6 * streams - completed, whole=whole(requests), client=answer.load,
    )  # fmt: skip
    outcome = Evidence(run=run, requests=requests)
    reasons = [finding.text for finding in (*client_saturation(outcome), *clock(outcome))]
    fine = not reasons and received_tokens_per_s >= 0.95 * requested_tokens_per_s
    verdict = "keeps up" if fine else "; ".join(reasons) or "too slow, server or client"
    print(
        f"| {answer.processes} | {streams} | {requested_tokens_per_s:.0f} | {received_tokens_per_s:.0f} "
        f"| {answer.cpu_share} | {1000 * (answer.loop_lag_s or 0):.1f} | {late[0]:.1f} / {late[1]:.1f} "
        f"| {tpot_error:.2f} | {verdict} |",
        flush=True,
    )
    return fine


def configure(url: str, config: dict[str, Any]) -> None:
    request = urllib.request.Request(f"{url}/oracle/config", data=json.dumps(config).encode())
    urllib.request.urlopen(request, timeout=10).close()


def log(url: str) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{url}/oracle/log", timeout=60) as answer:
        entries: list[dict[str, Any]] = json.load(answer)
    return entries


if __name__ == "__main__":
    sys.exit(main())
