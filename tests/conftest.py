"""No test is judged by its time: hypothesis counts examples, not milliseconds.

The examples are the same in every run, so that a change and not chance turns a test red; PDLAB_EXPLORE=1 draws new
ones, to search for what nobody thought of. Quick tests run first, live ones last.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test asks the hub for a model's config.json
settings.register_profile("pdlab", deadline=None, derandomize="PDLAB_EXPLORE" not in os.environ)
settings.load_profile("pdlab")
SLOW_FOLDERS = ("bench", "contract", "transfer")
# What imports Ray, vLLM or NIXL, or starts programs that do, or sweeps a served queue in real time. The other tests
# are the tier `make test-unit`.
STACK = (
    *("contract", "live", "rehearsal", "test_packaging.py", "test_benchmarks.py", "test_fresh.py"),
    *("bench/client", "bench/experiment/test_run.py", "bench/test_bad_input.py", "bench/test_fill.py"),
    *("bench/test_measure.py", "bench/test_recovery.py", "bench/test_retry_invalid.py", "bench/test_sweep_alone.py"),
    *("bench/test_sweep_interrupted.py", "bench/test_sweep_soak.py", "bench/test_sweep_truth.py"),
    *("bench/test_warm_up.py", "bench/test_watch.py", "cluster", "deploy/cpu_engine", "deploy/test_orphan_cleanup.py"),
    *("cli/test_demo.py", "faults", "guard/test_live_guard.py", "steps", "transfer/doctor/test_diagnosis.py"),
    *("transfer/rank/test_real_nixl.py", "transfer/test_across_a_wire.py", "transfer/test_build_script.py"),
    "transfer/test_on_ray.py",
)
UNIT = "PDLAB_TEST_UNIT"  # set by `make test-unit`
NOT_IN_UNIT = ("nixl", "ray", "torch", "vllm")


class _NoStack(MetaPathFinder):
    """Refuses what the unit tier must not import."""

    def find_spec(self, name: str, *_: object) -> None:
        if name.partition(".")[0] in NOT_IN_UNIT:
            raise ImportError(
                f"{name} is not imported in the unit tier: list the test under STACK in tests/conftest.py"
            )


if UNIT in os.environ:
    sys.meta_path.insert(0, _NoStack())
    collect_ignore = [*STACK]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = {item: item.path.relative_to(Path(__file__).parent).parts[0] for item in items}
    items.sort(key=lambda item: (item.get_closest_marker("live") is not None, folder[item] in SLOW_FOLDERS))


def pytest_configure() -> None:
    # A shell without job control has what runs in its background ignore an interrupt, and every child inherits that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _interrupts_as_before() -> Iterator[None]:
    """A test that leaves another handler behind fails itself, not one that comes after it."""
    yield
    left = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert left is signal.default_int_handler
