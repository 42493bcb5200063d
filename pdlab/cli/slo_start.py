"""Where a search for an SLO's highest rate begins: at what the same search finds on the simulator."""

from __future__ import annotations

import math

from pdlab.bench.slo_offline import search_over
from pdlab.bench.slo_search import Search
from pdlab.core.catalog import load_model
from pdlab.core.errors import UsageError
from pdlab.core.workload import Level, Workload
from pdlab.deploy.endpoint import load_running
from pdlab.results.metrics import Columns
from pdlab.results.schema import Manifest, SloSearch
from pdlab.sim.hardware import load_hardware
from pdlab.sim.level import columns
from pdlab.sim.simulator import simulate

GPU_HARDWARE, LOCAL_HARDWARE = "h100-vllm-0.11", "cpu-vllm-0.29"
STEP = 1.25
# The simulator's error is more than what a finer search would tell.
QUICK = {"confidence": 0.8, "resolution": 0.2, "max_points": 12, "longest_s": 60.0, "requests": None, "start_rps": None}


def from_plan(search: Search, workload: Workload, base_url: str, hardware: str | None) -> tuple[Search, str]:
    """The search with its start and a small first step, and what the simulator said, in words.

    Raises UsageError where it is not known what is served, or the simulator knows nothing of it.
    """
    running = load_running(base_url)
    if running is None:
        raise UsageError(
            f"--start-from plan: nothing says what is deployed at {base_url}; launch it with launch_gptoss.py, or give "
            "--slo-start RATE"
        )
    found = simulated(search, workload, running.manifest, hardware)
    ends = [end for end in (found.low_rps, found.high_rps) if end is not None]
    if not ends:
        raise UsageError(
            "--start-from plan: the simulator found no rate that meets or misses it; give --slo-start RATE"
        )
    start_rps = math.prod(ends) ** (1 / len(ends))
    begun = search.model_copy(update={"start_rps": start_rps, "step": STEP})
    return begun, f"{search.slo.label}: on the simulator {found.detail.split(';')[0]}; measuring begins there"


def simulated(search: Search, workload: Workload, manifest: Manifest, hardware: str | None) -> SloSearch:
    """A quick search on the simulator. Bounds on gaps between chunks are left out: it has none. Raises UsageError."""
    deployment = manifest.deployment
    shape = load_model(deployment.model) if deployment else None
    if deployment is None or shape is None:
        model = f"the shape of {deployment.model}" if deployment else "the deployment"
        raise UsageError(f"--start-from plan: {model} is not known; give --slo-start RATE")
    if workload.mode.startswith("decode"):
        raise UsageError(f"--start-from plan: --mode {workload.mode} is not simulated; give --slo-start RATE")
    slo = search.slo.model_copy(update={"itl_p99_s": None, "stall_s": None})
    if not slo.bounded:
        raise UsageError("--start-from plan: gaps between chunks are not simulated; bound TTFT, TPOT or E2EL too")
    calibrated = load_hardware(hardware or (LOCAL_HARDWARE if manifest.local else GPU_HARDWARE))

    def drive(level: Level) -> Columns:
        (done,) = simulate(
            deployment,
            [level],
            workload,
            calibrated,
            shape,
            seed=level.seed,
            prefix_hit_rate=workload.declared_cached_share,
        )
        return columns(done)

    quick = search.model_copy(update={**QUICK, "slo": slo})
    return search_over(drive, quick, workload, label=deployment.label, seed=workload.seed)
