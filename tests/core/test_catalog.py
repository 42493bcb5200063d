"""Names of configs/, and names that need no file: a number of nodes of a type, and a deployment by its label."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from pdlab.core import catalog
from pdlab.core.catalog import known_gpu, load_cluster, load_deployment, load_model, node_types
from pdlab.core.deployment import Deployment, parse_label
from pdlab.core.errors import UsageError
from pdlab.core.files import CONFIGS
from pdlab.core.nodes import MAX_NODES, ClusterNode, ClusterView, Nic


@pytest.mark.parametrize("count", [1, 2, 13])
def test_a_cluster_of_a_node_type_needs_no_file(count: int) -> None:
    efa = Nic(kind="efa", count=32, gbit_per_s=100)
    names = [f"node-{number}" for number in range(1, count + 1)]
    assert load_cluster(f"p5.48xlarge-x{count}") == ClusterView(
        name=f"p5.48xlarge-x{count}",
        nodes=tuple(
            ClusterNode(
                id=name, gpu_type="H100", gpus=8, cpus=192, nic=efa, head=name == "node-1", labels={"pdlab/node": name}
            )
            for name in names
        ),
    )


def test_the_node_types_are_the_files_of_one_counted_node() -> None:
    assert list(node_types()) == ["p5.48xlarge"]


def test_every_cluster_file_is_called_as_it_says() -> None:
    for path in (CONFIGS / "clusters").glob("*.yaml"):
        assert load_cluster(path.stem).name == path.stem


@pytest.mark.parametrize(
    "name", ["p5.48xlarge-x0", "p5.48xlarge-x", "p6-x2", "local-2-x2", f"p5.48xlarge-x{MAX_NODES + 1}"]
)
def test_other_cluster_names_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"TYPE-xN of a type there|count of a node must be"):
        load_cluster(name)


def cluster(tmp_path: Path, *nodes: object) -> ClusterView:
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump({"name": "own", "nodes": list(nodes)}))
    return load_cluster(str(path))


def test_a_file_counts_nodes_beside_single_ones(tmp_path: Path) -> None:
    view = cluster(
        tmp_path,
        {"id": "head", "cpus": 2, "head": True},
        {"id": "gpu", "count": 2, "gpus": 8, "cpus": 96, "labels": {"row": "a"}},
    )
    assert [(node.id, node.gpus, node.head, node.labels) for node in view.nodes] == [
        ("head", 0, True, {}), ("gpu-1", 8, False, {"row": "a"}), ("gpu-2", 8, False, {"row": "a"}),
    ]  # fmt: skip


@pytest.mark.parametrize("count", [0, -1, MAX_NODES + 1, 1.5, "two", True, None])
def test_a_count_that_is_none_is_one_line(tmp_path: Path, count: object) -> None:
    with pytest.raises(UsageError, match=rf"nodes: count of a node must be a whole number from 1 to {MAX_NODES}, got"):
        cluster(tmp_path, {"id": "gpu", "count": count, "gpus": 8})


@pytest.mark.parametrize("label", ["collocated-3xtp2", "pd-pack-p2xtp1-d3xtp2", "pd-fluid-8xtp2-p3d5"])
def test_a_deployment_is_known_by_its_label(label: str) -> None:
    assert load_deployment(label) == Deployment(topology=parse_label(label))


def test_a_file_of_that_name_comes_before_the_label(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deployments").mkdir()
    (tmp_path / "deployments" / "collocated-3xtp2.yaml").write_text(
        "model: tiny-gptoss\ntopology: {kind: collocated, pool: {replicas: 3, tp: 2}}\n"
    )
    monkeypatch.setattr(catalog, "CONFIGS", tmp_path)
    assert load_deployment("collocated-3xtp2").model == "tiny-gptoss"
    assert load_deployment("collocated-2xtp2").model == Deployment(topology=parse_label("collocated-2xtp2")).model


def test_no_deployment_file_repeats_its_name() -> None:
    for path in (CONFIGS / "deployments").glob("*.yaml"):
        assert load_deployment(path.stem) != Deployment(topology=parse_label(path.stem)), f"{path} says no more"


@pytest.mark.parametrize("name", ["pd-packed-p1xtp4", "collocated", "pd-pack-p1xtp0-d1xtp1"])
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(UsageError):
        load_deployment(name)


def test_a_model_and_a_gpu_type_are_read_without_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    read, load = [], catalog.load_yaml

    def noted(path: Path, *more: Any) -> Any:
        read.append(path.stem)
        return load(path, *more)

    for cached in (catalog._model_in, catalog._gpu_in, catalog.known_gpu):
        cached.cache_clear()
    monkeypatch.setattr(catalog, "load_yaml", noted)
    model, gpu = load_model("gpt-oss-20b"), known_gpu("H200")
    assert model is not None and gpu is not None
    assert (model.name, gpu.names, read) == ("gpt-oss-20b", ("H200",), ["gpt-oss-20b", "h200"])
    other = load_model("openai/gpt-oss-120b")
    assert other is not None and other.name == "gpt-oss-120b"
    assert known_gpu("GeForce-RTX-4090") == known_gpu("RTX4090") and known_gpu("none") is None is load_model("none")
