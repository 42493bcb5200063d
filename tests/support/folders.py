"""Result folders made up on the spot, in pdlab's own format: curves that follow from a few numbers."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support import records
from support.validity import failing

from pdlab.core.deployment import Collocated, Deployment, Disaggregated, Pool, parse_label
from pdlab.core.nodes import ClusterNode, ClusterView, GpuLink, Nic
from pdlab.core.workload import Closed, Workload
from pdlab.results.schema import CanaryResult, Manifest, RequestRecord
from pdlab.results.store import Store

INPUT, OUTPUT = 512, 64


def deployments(count: int) -> list[Deployment]:
    """That many different configurations: every third collocated."""
    deployments = []
    for i in range(count):
        tp, replicas = 2 ** (i % 3), 1 + i // 3
        pool = Pool(replicas=replicas, tp=tp)
        if i % 3 == 0:
            topology: Any = Collocated(pool=pool)
        else:
            placement = "spread" if i % 2 else "pack"
            topology = Disaggregated(prefill=Pool(replicas=1, tp=tp), decode=pool, placement=placement)
        deployments.append(Deployment(model="tiny-gptoss", topology=topology))
    return deployments


def write(
    folder: Path,
    deployment: Deployment,
    *,
    loads: tuple[int, ...] = (1, 4, 16),
    repeats: int = 3,
    faster: float = 1.0,
    ttft_s: float = 0.2,
    noise: float = 0.02,
    reasons: dict[tuple[int, int], tuple[str, ...]] | None = None,
    **changes: Any,
) -> Path:
    """An experiment whose latencies are divided by ``faster``. ``ttft_s``: of a request without others. ``reasons``:
    (load, repeat) -> why it is not valid."""
    store, chance = Store(folder), random.Random(folder.name)
    values: dict[str, Any] = {
        "origin": "measured",
        "label": deployment.label,
        "deployment": deployment,
        "gpus": deployment.gpus,
        "workload": Workload(input_tokens=INPUT, output_tokens=OUTPUT),
        "commands": (f"python launch_gptoss.py --config {deployment.label}.yaml", f"./run_bm.sh -e {deployment.label}"),
        "git_commit": "0123abc",
        "git_dirty": False,
        "versions": {"ray": "2.60.0", "vllm": "0.29.0"},
        "hardware": {"gpus": "none"},
        "canary": CanaryResult(equal=True, compared=3, detail="3 of 3 prompts give the same tokens"),
        "started_at": "2026-01-02T03:04:05+00:00",
        "finished_at": "2026-01-02T03:14:05+00:00",
    }
    store.write_manifest(Manifest(**{**values, **changes}))
    for concurrency in loads:
        for repeat in range(repeats):
            slower = (1 + concurrency / 16) * chance.gauss(1, noise) / faster
            sent = requests(concurrency, ttft_s * slower, 0.01 * slower)
            run = records.run(
                sent, Closed(concurrency=concurrency), repeat=repeat, window=True, label=deployment.label,
                workload=values["workload"], seed=1000 * repeat + concurrency,
                validity=failing(*(reasons or {}).get((concurrency, repeat), ())),
            )  # fmt: skip
            store.write(run, sent)
    return folder


def run_on(
    folder: Path,
    gpu: str | None = "H200",
    version: str | None = "0.29.0",
    *,
    label: str = "collocated-1xtp4",
    model: str = "gpt-oss-120b",
    gpus: int = 8,
    loads: tuple[int, ...] = (2, 4),
    faster: float = 1.0,
    ttft_s: float = 0.2,
    arguments: Mapping[str, Any] | None = None,
    nic: Nic = Nic(),  # noqa: B008
    gpu_link: GpuLink | None = None,
) -> str:
    """The folder of a sweep measured on a node of that many GPUs, by that version of vLLM with those engine
    arguments."""
    node = ClusterNode(id="a", gpu_type=gpu, gpus=gpus, head=True, nic=nic, gpu_link=gpu_link)
    view = ClusterView(nodes=(node,))
    deployment = Deployment(model=model, topology=parse_label(label), engine_kwargs=dict(arguments or {}))
    versions = {"vllm": version, "ray": "2.60.0"}
    made = write(
        folder, deployment, loads=loads, faster=faster, ttft_s=ttft_s, repeats=1, cluster=view, versions=versions
    )
    return str(made)


def requests(concurrency: int, ttft_s: float, tpot_s: float) -> list[RequestRecord]:
    """Twenty requests, one after another, in each of the places of a closed loop."""
    stays_s = ttft_s + tpot_s * (OUTPUT - 1)
    return [
        records.record(
            wave * stays_s,
            ttft_s,
            tpot_s,
            OUTPUT,
            finish_s=(wave + 1) * stays_s,
            input_tokens=INPUT,
            itl_s=(tpot_s,) * (OUTPUT - 1),
        )
        for wave in range(20)
        for _ in range(concurrency)
    ]
