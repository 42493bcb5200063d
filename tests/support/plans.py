"""What the plans of tests are of: the shipped fit of H100, gpt-oss-120b and nodes of eight GPUs."""

from __future__ import annotations

from pdlab.core.catalog import load_cluster, require_shape
from pdlab.core.nodes import ClusterView
from pdlab.core.workload import Slo, Workload
from pdlab.plan.scenario import Scenario
from pdlab.sim.hardware import load_hardware

MODEL = "gpt-oss-120b"
HARDWARE, SHAPE = load_hardware("h100-vllm-0.11"), require_shape(MODEL)


def scenario(workload: Workload | None = None, seed: int = 0, **bounds_s: float) -> Scenario:
    """``bounds_s``: those of the SLO, as ``tpot_s=0.012``."""
    return Scenario(HARDWARE, SHAPE, workload or Workload(), Slo(**bounds_s), seed=seed)


def nodes(count: int) -> ClusterView:
    """``count`` nodes of 8 GPUs, none of them the client's."""
    base = load_cluster("p5.48xlarge-x2").engine_nodes[0]
    return ClusterView(
        nodes=tuple(base.model_copy(update={"id": f"node-{n}", "head": n == 0, "labels": {}}) for n in range(count))
    )
