"""Routing of the version of Ray that a deployment runs with."""

from __future__ import annotations

from statistics import fmean

import pytest

from pdlab.core.catalog import require_shape
from pdlab.core.deployment import Deployment, parse_label
from pdlab.core.version import STACK
from pdlab.core.workload import Closed, Level, Workload
from pdlab.sim.computed_hardware import computed
from pdlab.sim.hardware import load_hardware, routers_beside, routers_count_ends
from pdlab.sim.level import SimulatedLevel
from pdlab.sim.simulator import System, simulate

HOME = load_hardware("h100-vllm-0.11")
SHAPE = require_shape("gpt-oss-120b")
OLD, NEW = HOME.with_ray("2.51.1"), HOME.with_ray("2.60.0")


@pytest.mark.parametrize(
    ("version", "counts"),
    [("2.9.3", 0), ("2.51.1", 0), ("2.54.0", 0), ("2.55.0", 1), ("2.60.0", 1), ("3.0.0", 1), ("nightly", 0)],
)
def test_routing_changed_with_ray_2_55(version: str, counts: int) -> None:
    """Read in the wheels of 2.51.1, 2.52.0, 2.54.0, 2.55.0, 2.55.1, 2.56.0, 2.58.0 and 2.60.0."""
    assert routers_count_ends(version).value == counts


def test_hardware_has_the_routing_of_its_ray() -> None:
    assert not HOME.routers_count_ends, "its runs were of Ray 2.51"
    assert load_hardware("cpu-vllm-0.29").routers_count_ends
    assert OLD == HOME.with_ray(None) == HOME.with_ray("nightly") == HOME, "a fit stays one"
    assert NEW.routers_count_ends and NEW.with_ray("2.54.0").value("routers_count_ends") == 0


@pytest.mark.parametrize(("version", "counts"), [("0.11", False), ("0.17", False), ("0.18", True), ("0.29", True)])
def test_a_plan_by_tables_has_the_routing_of_the_ray_for_its_vllm(version: str, counts: bool) -> None:
    """Ray Serve LLM 2.54 requires vLLM 0.15 or later, and 2.55 requires 0.18 or later."""
    assert computed("H200", "vllm", version).routers_count_ends is counts
    bare = computed("H200", "vllm", version, bare=True)
    assert not bare.routers_count_ends and bare.with_ray("2.60.0") == bare, "engines without Ray"


def test_the_ray_that_is_launched_goes_with_its_vllm() -> None:
    assert routers_beside(STACK["vllm"]).value == routers_count_ends(STACK["ray"]).value == 1


def long_level(label: str, concurrency: int, waves: int = 40, *, new: bool) -> SimulatedLevel:
    level = Level(load=Closed(concurrency=concurrency), num_requests=waves * concurrency, seed=0)
    return simulate(Deployment(topology=parse_label(label)), [level], Workload(), NEW if new else OLD, SHAPE)[0]


def e2el_s(done: SimulatedLevel, part: slice) -> float:
    return fmean(end - came for end, came in zip(done.finish_s[part], done.arrival_s[part], strict=True))


def test_routers_that_count_ends_keep_replicas_even_under_a_load_that_is_held() -> None:
    """Routers that do not herd their requests to one replica, and then to the other: the longer, the worse."""
    early, late = slice(2 * 96, 6 * 96), slice(20 * 96, 38 * 96)
    counting, other = (long_level("collocated-2xtp4", 96, new=new) for new in (True, False))
    assert e2el_s(counting, late) < 1.12 * e2el_s(counting, early)
    assert e2el_s(other, late) > 1.2 * e2el_s(counting, late)


@pytest.mark.parametrize("label", ["collocated-1xtp4", "pd-spread-p1xtp4-d1xtp4"])
def test_the_routing_changes_nothing_where_there_is_nothing_to_choose(label: str) -> None:
    assert long_level(label, 8, 5, new=True) == long_level(label, 8, 5, new=False)


@pytest.mark.parametrize("label", ["collocated-3xtp2", "pd-spread-p2xtp4-d3xtp2"])
def test_no_request_is_counted_at_a_replica_after_its_end(label: str) -> None:
    system = System(Deployment(topology=parse_label(label)), NEW, SHAPE, 0, "fresh", 0.0, None)
    done = system.run(Level(load=Closed(concurrency=12), num_requests=60, seed=0), Workload(), None)
    assert len(done.finish_s) == 60
    assert [engine.load for engine in system.all_engines] == [0] * len(system.all_engines)
    remembered = [known for engine in system.all_engines for known, _ in engine.reported_loads.values()]
    assert remembered and min(remembered) >= 0


def test_in_pd_the_decode_replica_is_chosen_at_the_arrival() -> None:
    """One arrival in a cluster without load: its decode replica counts it before prefill has ended."""
    system = System(Deployment(topology=parse_label("pd-spread-p2xtp4-d2xtp4")), NEW, SHAPE, 0, "fresh", 0.0, None)
    system.run(Level(load=Closed(concurrency=1), num_requests=1, seed=0), Workload(), None)
    system.target.clear()
    prefills, decodes = system._chosen(0, 0.0)
    assert prefills in system.front and decodes in system.decode
    assert (prefills.load, decodes.load) == (1, 1)
