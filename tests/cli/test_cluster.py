"""`pdlab cluster`: the file of the cluster that is there, which launch and plan take."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdlab.cli import cluster, plan
from pdlab.cli import launch as launch_cli
from pdlab.core.catalog import load_cluster
from pdlab.core.nodes import NODE_ID_LABEL, NODE_NAME_LABEL, ClusterNode, ClusterView, Nic
from pdlab.deploy import launch

EFA = Nic(kind="efa", count=32, gbit_per_s=100)


def live(named: bool) -> ClusterView:
    """As a running Ray is seen: a head without GPUs, and two workers of which one is half taken."""
    nodes = [ClusterNode(id="0" * 56, cpus=4, free_cpus=3, head=True, labels={NODE_ID_LABEL: "0" * 56}, host="head")]
    for number in (1, 2):
        ray_id = str(number) * 56
        labels = {NODE_ID_LABEL: ray_id} | ({NODE_NAME_LABEL: f"w{number}"} if named else {})
        nodes.append(
            ClusterNode(
                id=f"w{number}" if named else ray_id, gpu_type="H100", gpus=8, gpu_memory_gb=85.5, gpu_link="nvlink",
                free_gpus=tuple(range(4 * number)), cpus=192, free_cpus=100, nic=EFA, host=f"h{number}", labels=labels,
            )
        )  # fmt: skip
    return ClusterView(name="ray", nodes=tuple(nodes))


@pytest.mark.parametrize("named", [True, False])
def test_the_file_is_the_cluster_with_nothing_taken(
    named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    view = live(named)
    monkeypatch.setattr(launch, "live_view", lambda: view)
    assert cluster.main(["--name", "mine"]) == 0
    file = tmp_path / "mine.yaml"
    file.write_text(capsys.readouterr().out)
    read = load_cluster(str(file))
    assert read.name == "mine" and len(read.nodes) == 3
    for there, node in zip(view.nodes, read.nodes, strict=True):
        kept = {key: value for key, value in there.labels.items() if not (named and there.gpus) or key != NODE_ID_LABEL}
        assert node == there.model_copy(update={"free_gpus": None, "free_cpus": None, "labels": kept})
    words = ["--cluster", str(file)]
    assert launch_cli.main(["--pd-spread", "--p-tp", "8", "--d-tp", "8", *words, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert ("pdlab/node: w1" in shown) is named and ("ray.io/node-id: '111" in shown) is not named
    assert plan.main([*words, "--gpus", "8", "--top", "1", "--itl", "500", "--otl", "50", "--concurrency", "4"]) == 0
