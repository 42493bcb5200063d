"""No test is judged by its time: hypothesis counts examples, not milliseconds.

The examples are the same in every run, so that a change and not chance turns a test red; PDLAB_EXPLORE=1 draws new
ones, to search for what nobody thought of. Quick tests run first, live ones last; several processes begin with the
files that take longest.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from pathlib import Path

import pytest
from hypothesis import settings
from support.clock import Clock

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test asks the hub for a model's config.json
settings.register_profile("pdlab", deadline=None, derandomize="PDLAB_EXPLORE" not in os.environ)
settings.load_profile("pdlab")
TESTS = Path(__file__).parent
SLOW_FOLDERS = ("bench", "contract", "transfer")
# The files that take longest, the longest first: begun last, one would keep one process busy alone. Those that wait
# stand beside those that compute.
LONGEST = (
    *("bench/test_sweep_truth.py", "cli/test_demo.py", "bench/test_sweep_alone.py", "contract/test_hit_oracle.py"),
    *("bench/experiment/test_run.py", "cli/test_plan.py", "transfer/rank/test_real_nixl.py", "test_packaging.py"),
    *("bench/test_warm_up.py", "contract/test_builders.py", "bench/test_sweep_soak.py", "contract/test_traces.py"),
    *("contract/test_ray_placement.py", "contract/test_decode_steps.py", "bench/client/test_processes.py"),
    *("contract/test_guarded_servers.py", "bench/test_sweep_interrupted.py", "report/test_plots.py"),
    *("bench/client/test_replay.py", "plan/test_fluid_pools.py", "bench/test_retry_invalid.py", "cli/test_viz.py"),
    *("contract/test_fast_start.py", "core/test_arguments.py", "contract/test_exports.py", "contract/test_nodes.py"),
    *("contract/test_code_zip.py", "contract/test_model_shapes.py", "contract/test_prefork.py", "bench/test_fill.py"),
    *("deploy/test_orphan_cleanup.py", "plan/test_calibration.py", "transfer/doctor/test_diagnosis.py"),
    *("contract/test_load_generator.py", "test_lints.py", "test_architecture.py", "report/test_ttft_parts.py"),
)
# What imports Ray, vLLM or NIXL, or starts programs that do, or sweeps a served queue in real time. The other tests
# are the tier `make test-unit`.
STACK = (
    *("contract", "live", "rehearsal", "test_packaging.py", "test_benchmarks.py", "test_fresh.py"),
    *("bench/client", "bench/experiment/test_run.py", "bench/test_bad_input.py", "bench/test_fill.py"),
    *("bench/test_measure.py", "bench/test_recovery.py", "bench/test_retry_invalid.py", "bench/test_sweep_alone.py"),
    *("bench/test_sweep_interrupted.py", "bench/test_sweep_soak.py", "bench/test_sweep_truth.py"),
    *(
        "bench/test_sweep_replay.py",
        "bench/test_warm_up.py",
        "bench/test_watch.py",
        "cluster",
        "deploy/cpu_engine",
        "deploy/test_orphan_cleanup.py",
    ),
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


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """A command that runs in this process sets variables for what it starts: the next test does not get them."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pdlab's cache folder, the test's own."""
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setenv("PDLAB_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tabulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step times that come from tables come from those of a made-up GPU."""
    from support.made_up_tables import made_up_tables

    from pdlab.sim import aic

    monkeypatch.setattr(aic, "tabulate", lambda model, system, engine, version, pool, *_: made_up_tables(pool.tp))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    one_of_several = hasattr(config, "workerinput")

    def place(item: pytest.Item) -> tuple[bool, int | bool]:
        file = item.path.relative_to(TESTS)
        if one_of_several:
            name = file.as_posix()
            return False, LONGEST.index(name) if name in LONGEST else len(LONGEST)
        return item.get_closest_marker("live") is not None, file.parts[0] in SLOW_FOLDERS

    items.sort(key=place)


def pytest_configure(config: pytest.Config) -> None:
    # What this machine's cache folder holds, as step times of tables that are not installed, stands in for nothing.
    # All processes of a run have one folder: the lock of clusters on this machine is in it.
    if not hasattr(config, "workerinput"):
        folder = os.environ["PDLAB_CACHE_DIR"] = tempfile.mkdtemp(prefix="pdlab-tests-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    # A shell without job control has what runs in its background ignore an interrupt, and every child inherits that.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _interrupts_as_before() -> Iterator[None]:
    """A test that leaves another handler behind fails itself, not one that comes after it."""
    yield
    left = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert left is signal.default_int_handler


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a small file system cannot be mounted here (it requires root): {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine runs in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = pyfuncitem.funcargs
    asyncio.run(pyfuncitem.obj(**{name: given[name] for name in inspect.signature(pyfuncitem.obj).parameters}))
    return True
