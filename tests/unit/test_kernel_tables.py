"""The second source of kernel times: its interface without the package, its numbers with it."""

from __future__ import annotations

import importlib.util

import pytest

from pdlab.catalog import ModelShape, load_model
from pdlab.errors import UsageError
from pdlab.kernel_tables import KernelTables, read_tables
from pdlab.perf import Hardware, load_hardware
from pdlab.sim import simulate
from pdlab.simulated import figures
from pdlab.spec import Deployment, Pool, parse_label
from pdlab.workload import Closed, Level, Workload

HARDWARE = load_hardware("h100-vllm-0.11")
INSTALLED = importlib.util.find_spec("aiconfigurator") is not None


def gpt_oss() -> ModelShape:
    shape = load_model("gpt-oss-120b")
    assert shape is not None
    return shape


def made_up(hardware: Hardware, shape: ModelShape, pool: Pool) -> KernelTables:
    """10 ms of decode per step, 20 us per prefill token."""
    return KernelTables((1, 64), (1, 9000), ((0.01, 0.01), (0.01, 0.01)), (0, 8192), (0.0, 0.16384), 0.001, 0.0, 0.0)


def test_tables_are_interpolated_scaled_and_extended() -> None:
    tables = KernelTables(
        (1, 3), (1000, 2000), ((0.01, 0.02), (0.02, 0.03)), (100, 200), (0.1, 0.3), 0.5, 0.25, 0.0, 2.0, 3.0
    )
    assert tables.step_s(2, 0, 1500) == pytest.approx(0.5 + 2 * 0.25 + 2 * 0.02)
    assert tables.step_s(0, 150, 0) == pytest.approx(0.5 + 3 * 0.2)
    assert tables.step_s(0, 300, 0) == pytest.approx(0.5 + 3 * 0.5), "beyond the grid the last slope holds"


def test_the_simulator_takes_step_times_from_either_source() -> None:
    deployment = Deployment(topology=parse_label("collocated-1xtp4"))
    level = Level(load=Closed(concurrency=1), num_requests=2, seed=0)
    (one,) = simulate(deployment, [level], Workload(), HARDWARE, gpt_oss(), kernels=made_up)
    assert figures(one)[0] == pytest.approx(0.011)


@pytest.mark.skipif(INSTALLED, reason="aiconfigurator is installed")
def test_without_the_package_the_message_says_what_to_do() -> None:
    with pytest.raises(UsageError, match="pip install aiconfigurator"):
        read_tables(HARDWARE, gpt_oss(), Pool(tp=4))


@pytest.mark.skipif(not INSTALLED, reason="aiconfigurator is not installed (an optional extra)")
def test_tables_of_the_package_have_the_right_shape() -> None:
    tables = {tp: read_tables(HARDWARE, gpt_oss(), Pool(tp=tp)) for tp in (2, 4)}
    for costs in tables.values():
        assert costs.step_s(32, 0, 5000) > costs.step_s(4, 0, 5000)
        assert costs.step_s(0, 8192, 0) > costs.step_s(0, 2048, 0)
    assert tables[4].step_s(32, 0, 5000) < tables[2].step_s(32, 0, 5000)
