#!/usr/bin/env python3
"""Published results of wide expert parallelism beside predictions that were not fitted to them, as tables.

Sources: LMSYS, "Deploying DeepSeek with PD Disaggregation and Large-Scale Expert Parallelism on 96
H100 GPUs" (2025-05-05), SGLang; Lei Wang and others, "H800 x 104 DGX SuperPod Disaggregation Strategy
in SGLang v0.4.8" (2025-07-19). Hardware constants are those fitted to gpt-oss-120b on vLLM, but for
experts in use: with EPLB's redundant experts all of them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pdlab.core.catalog import load_model  # noqa: E402
from pdlab.core.deployment import Deployment, Pool, parse_label  # noqa: E402
from pdlab.core.workload import Closed, Level, Workload  # noqa: E402
from pdlab.sim.hardware import load_hardware  # noqa: E402
from pdlab.sim.level import figures, to_run  # noqa: E402
from pdlab.sim.simulator import simulate  # noqa: E402
from pdlab.sim.step_time import step_costs  # noqa: E402

SHAPE = load_model("deepseek-v3")
HARDWARE = load_hardware("h100-vllm-0.11").with_values(
    {"experts_in_use": 1.0, "overhead_gb": 4.0, "memory_utilization": 0.95}
)
# (input tokens, published tokens/s per node)
PREFILL = ((1024, 57_674), (2048, 54_543), (4096, 50_302))
# (input tokens, sequences per GPU, published tokens/s per node)
DECODE = ((2048, 256, 22_282), (2048, 128, 22_310), (4096, 256, 17_552))
# (deployment, concurrency, input, output, published output tokens/s, published p95 TTFT in s)
STUDY = (
    ("pd-spread-p3xdp24ep-d1xdp32ep", 8, 2000, 200, 160.74, 2.69),
    ("pd-spread-p3xdp24ep-d1xdp32ep", 64, 2000, 200, 938.58, 2.91),
    ("pd-spread-p3xdp24ep-d1xdp32ep", 128, 2000, 200, 1372.96, 7.69),
    ("pd-spread-p3xdp24ep-d1xdp32ep", 256, 2000, 200, 2370.23, 8.4),
    ("pd-spread-p3xdp24ep-d1xdp32ep", 512, 2000, 500, 7852.82, 4.97),
    ("pd-spread-p3xdp24ep-d1xdp32ep", 1024, 2000, 500, 13543.28, 9.85),
    ("pd-spread-p1xdp32ep-d1xdp48ep", 1024, 1024, 128, 16626.85, 10.42),
    ("pd-spread-p1xdp32ep-d1xdp48ep", 1024, 1024, 512, 19654.31, 13.16),
    ("pd-spread-p1xdp32ep-d1xdp72ep", 512, 4096, 128, 5332.19, 24.46),
    ("pd-spread-p1xdp32ep-d1xdp72ep", 2048, 2048, 256, 20513.48, 46.97),
)


def error(predicted: float, published: float) -> str:
    return f"{100 * (predicted / published - 1):+.0f} %"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    assert SHAPE is not None
    print("Prefill, 4 nodes, EP32, 16,384 tokens per GPU and step\n")
    print("| input | published, tokens/s per node | predicted | error |\n|---|---|---|---|")
    costs = step_costs(HARDWARE, SHAPE, Pool(dp=32, expert_parallel=True))
    for length, published in PREFILL:
        prefilled = 8 * 16_384 / costs.step_s(0, 16_384, 0, length / 2)
        print(f"| {length} | {published:,} | {prefilled:,.0f} | {error(prefilled, published)} |")
    print("\nDecode, 9 nodes, EP72\n")
    print("| input | sequences per GPU | published, tokens/s per node | predicted | error |\n|---|---|---|---|---|")
    costs = step_costs(HARDWARE, SHAPE, Pool(dp=72, expert_parallel=True))
    for length, batch, published in DECODE:
        predicted = 8 * batch / costs.step_s(batch, 0, length + 100)
        print(f"| {length} | {batch} | {published:,} | {predicted:,.0f} | {error(predicted, published)} |")
    print("\n104 x H800, closed loop\n")
    print("| deployment | concurrency | input:output | output tokens/s, published / predicted | p95 TTFT, s |")
    print("|---|---|---|---|---|")
    for label, concurrency, input_tokens, output_tokens, output_rate, ttft_s in STUDY:
        workload = Workload(input_tokens=input_tokens, output_tokens=output_tokens)
        level = Level(load=Closed(concurrency=concurrency), num_requests=2 * concurrency, seed=0)
        deployment = Deployment(model="deepseek-v3", topology=parse_label(label))
        (done,) = simulate(deployment, [level], workload, HARDWARE, SHAPE)
        rate = figures(done)[2] * output_tokens
        ttft = to_run(done, label, workload).whole.ttft
        assert ttft is not None
        p95_s = ttft.percentiles_s["p95"]
        print(
            f"| {label} | {concurrency} | {input_tokens}:{output_tokens} "
            f"| {output_rate:,.0f} / {rate:,.0f} ({error(rate, output_rate)}) "
            f"| {ttft_s} / {p95_s:.2f} ({error(p95_s, ttft_s)}) |"
        )


if __name__ == "__main__":
    main()
