"""On a real Ray with made-up GPUs, placement groups like the ones Serve makes sit where the plan says."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pdlab.core.deployment import Deployment, parse_label
from pdlab.core.nodes import NODE_ID_LABEL, ClusterNode, ClusterView, Nic, Placement, Role
from pdlab.deploy.serve_config import ServeApp, engine_configs, render
from pdlab.placement.place import place

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]

# No worker processes ahead of need: the nodes are many and the machine is small.
QUIET = {
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
}


@pytest.fixture(scope="class")
def two_nodes() -> Iterator[ClusterView]:
    with made_up_cluster(2) as view:
        yield view


@pytest.fixture(scope="class")
def thirteen_nodes() -> Iterator[ClusterView]:
    with made_up_cluster(13) as view:
        yield view


@contextmanager
def made_up_cluster(nodes: int) -> Iterator[ClusterView]:
    """A running Ray of so many nodes with 8 GPUs each that do not exist, as a ClusterView of its node ids."""
    import ray
    from ray.cluster_utils import Cluster

    folder = Path(tempfile.mkdtemp(prefix="pd"))  # short: socket paths have a limit
    # Cluster writes its address below RAY_TMPDIR, into a folder that it does not make; without RAY_TMPDIR that is
    # /tmp/ray, where it would also take the place of another cluster's address.
    (folder / "ray").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**QUIET, "RAY_TMPDIR": str(folder)}.items():
            patch.setenv(name, value)
        size = {"num_cpus": 192, "num_gpus": 8, "object_store_memory": 80 * 2**20}
        head = {**size, "temp_dir": str(folder), "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            for _ in range(nodes - 1):
                cluster.add_node(wait=False, **size)
            cluster.wait_for_nodes(timeout=180)
            ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
            yield live_view()
        finally:
            ray.shutdown()
            cluster.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


def live_view() -> ClusterView:
    import ray

    efa = Nic(kind="efa", count=32, gbit_per_s=100)
    return ClusterView(
        name="made-up",
        nodes=tuple(
            ClusterNode(
                id=node["NodeID"], gpu_type="H100", gpus=8, cpus=192, nic=efa, labels={NODE_ID_LABEL: node["NodeID"]}
            )
            for node in ray.nodes()
            if node["Alive"]
        ),
    )


def reserve(deployment: Deployment, app: ServeApp, role: Role) -> list[Any]:
    """The placement groups of one pool, as Serve makes them: one per replica, gangs of dp in one group."""
    from ray.util.placement_group import placement_group

    config = dict(zip(deployment.pools, engine_configs(app.args), strict=True))[role]
    pool = deployment.pools[role]
    worker = config["placement_group_config"]["bundle_per_worker"]
    bundles = [dict(worker) for _ in range(pool.tp * pool.pp)]
    bundles[0]["CPU"] += 1  # the replica's own actor
    selectors = config["deployment_config"]["placement_group_bundle_label_selector"]
    strategy = config["placement_group_config"]["strategy"] if pool.dp == 1 else "PACK"
    return [
        placement_group(bundles * pool.dp, strategy=strategy, bundle_label_selector=selectors * pool.dp)
        for _ in range(pool.replicas)
    ]


def check(deployment: Deployment, placement: Placement, role: Role, groups: list[Any]) -> set[str]:
    """Whether Ray put the pool where the plan has it; returns the nodes."""
    from ray.util.placement_group import placement_group_table

    pool = deployment.pools[role]
    used: set[str] = set()
    for group in groups:
        assert group.wait(timeout_seconds=60), placement_group_table(group)
        on_node = Counter(placement_group_table(group)["bundles_to_node_id"].values())
        assert all(count % min(pool.tp, 8) == 0 for count in on_node.values()), "a TP group crosses a node"
        used |= set(on_node)
        if all(len(replica.nodes) == 1 for replica in placement.of(role)):
            assert len(on_node) == 1
    per_replica = sorted(len(replica.nodes) for replica in placement.of(role))
    assert sorted(len(set(bundle_nodes(group))) for group in groups) == per_replica
    assert used == set(placement.nodes_of(role))
    return used


def bundle_nodes(group: Any) -> list[str]:
    from ray.util.placement_group import placement_group_table

    return list(placement_group_table(group)["bundles_to_node_id"].values())


def actor_node(group: Any) -> str:
    """Node of an actor in the group's first bundle, where Serve puts the replica."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    class Where:
        def node(self) -> str:
            return str(ray.get_runtime_context().get_node_id())

    strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=0)
    actor = ray.remote(Where).options(num_cpus=1, scheduling_strategy=strategy).remote()
    try:
        return str(ray.get(actor.node.remote(), timeout=60))
    finally:
        ray.kill(actor)


TWO = [
    "collocated-8xtp1",
    "collocated-3xtp4",
    "collocated-1xtp16",
    "collocated-1xtp4pp3",
    "collocated-3xdp4",
    "pd-pack-p1xtp4-d1xtp4",
    "pd-pack-p2xtp1-d3xtp2",
    "pd-spread-p1xtp4-d1xtp4",
    "pd-spread-p4xtp2-d2xtp4",
]
THIRTEEN = [
    "collocated-26xtp4",
    "pd-spread-p1xdp32ep-d1xdp72ep",
    "pd-spread-p3xdp24ep-d1xdp32ep",
    "collocated-6xtp8pp2",
    "pd-spread-p2xtp16-d4xtp16",
    "pd-pack-p1xtp4-d2xtp2",
    "collocated-2xdp12",
    "pd-spread-p2xtp4dp3-d1xtp8",
]


def on_ray(label: str, view: ClusterView, with_actors: bool) -> None:
    from ray.util.placement_group import remove_placement_group

    deployment = Deployment(topology=parse_label(label))
    placement = place(deployment, view)
    app = render(deployment, placement, view, None, "model")
    made: dict[Role, list[Any]] = {}
    try:
        for role in dict.fromkeys(replica.role for replica in placement.replicas):
            made[role] = reserve(deployment, app, role)
        nodes = {role: check(deployment, placement, role, groups) for role, groups in made.items()}
        if deployment.mode == "pd-spread":
            assert not nodes["prefill"] & nodes["decode"]
        if deployment.mode == "pd-pack":
            assert len(nodes["prefill"] | nodes["decode"]) == 1
        if with_actors:
            for role, groups in made.items():
                assert actor_node(groups[0]) in placement.nodes_of(role)
    finally:
        for group in (group for groups in made.values() for group in groups):
            remove_placement_group(group)


class TestTwoNodes:
    @pytest.mark.parametrize("label", TWO)
    def test_ray_places_as_planned(self, label: str, two_nodes: ClusterView) -> None:
        on_ray(label, two_nodes, with_actors=label == "pd-spread-p1xtp4-d1xtp4")

    def test_two_deployments_share_the_cluster(self, two_nodes: ClusterView) -> None:
        """What one deployment took is not free for the next: the plan is made of what is left."""
        from ray.util.placement_group import remove_placement_group

        first = Deployment(topology=parse_label("pd-spread-p1xtp4-d1xtp4"))
        placed = place(first, two_nodes)
        app = render(first, placed, two_nodes, None, "model")
        groups = [group for role in ("prefill", "decode") for group in reserve(first, app, role)]
        try:
            assert all(group.wait(timeout_seconds=60) for group in groups)
            left = tuple(
                node.model_copy(
                    update={"free_gpus": tuple(g for g in node.slots if g not in placed.used_slots[node.id])}
                )
                for node in two_nodes.nodes
            )
            on_ray("pd-spread-p2xtp2-d1xtp4", two_nodes.model_copy(update={"nodes": left}), with_actors=False)
        finally:
            for group in groups:
                remove_placement_group(group)


class TestThirteenNodes:
    @pytest.mark.parametrize("label", THIRTEEN)
    def test_ray_places_as_planned(self, label: str, thirteen_nodes: ClusterView) -> None:
        on_ray(label, thirteen_nodes, with_actors=label == "pd-spread-p1xdp32ep-d1xdp72ep")
