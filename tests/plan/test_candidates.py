"""Which engines a plan considers."""

from __future__ import annotations

from pdlab.core.catalog import load_model
from pdlab.core.deployment import Collocated, Deployment
from pdlab.core.vllm_limits import check_divisibility
from pdlab.core.workload import Workload
from pdlab.plan.candidates import engine_shapes
from pdlab.sim.hardware import load_hardware


def test_no_engine_that_the_launcher_would_refuse() -> None:
    """256 experts do not divide among 24, 40, 48 or 56 GPUs."""
    shape = load_model("deepseek-v3")
    assert shape is not None
    pools = engine_shapes(load_hardware("h100-vllm-0.11"), shape, 64, Workload(input_tokens=2000, output_tokens=200))
    for pool in pools:
        check_divisibility(Deployment(topology=Collocated(pool=pool)), shape)
    assert {pool.dp for pool in pools if pool.expert_parallel} == {16, 32, 64}
