"""What is known of types of GPU, and what a node says of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdlab.core.catalog import (
    GpuType,
    gpu_link,
    gpu_memory_gb,
    gpu_name,
    gpu_type_of,
    has_gpu,
    known_gpus,
    load_cluster,
    why_no_tables,
)
from pdlab.core.files import CONFIGS
from pdlab.core.nodes import ClusterNode
from pdlab.core.schema import load_yaml


def node(**facts: Any) -> ClusterNode:
    return ClusterNode(id="a", gpus=8, **facts)


def test_every_file_is_of_other_names_and_has_its_source() -> None:
    types = [load_yaml(path, GpuType) for path in sorted((CONFIGS / "gpus").glob("*.yaml"))]
    names = [name for each in types for name in each.names]
    assert len(names) == len(set(names)) == len(known_gpus())
    assert all(each.source and (each.memory_gb or each.link) for each in types)
    assert all(1 < size < 1000 for each in types for size in each.memory_gb)


def test_clusters_that_are_shipped_are_known() -> None:
    assert (gpu_memory_gb(node(gpu_type="H100")), gpu_link(node(gpu_type="H100"))) == (85.5, "nvlink")


@pytest.mark.parametrize("gpu_type", ["A100", "of-tomorrow", None])
def test_what_a_type_does_not_fix_is_not_known(gpu_type: str | None) -> None:
    assert gpu_memory_gb(node(gpu_type=gpu_type)) is None
    assert gpu_memory_gb(node(gpu_type=gpu_type, gpu_memory_gb=40)) == 40


@pytest.mark.parametrize(
    ("name", "gpu_type"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H200", "H200"), ("NVIDIA H20", "H20"), ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200"), ("NVIDIA A100-SXM4-40GB", "A100"), ("NVIDIA L40S", "L40S"), ("NVIDIA L4", "L4"),
        ("NVIDIA GeForce RTX 4090", "GeForce-RTX-4090"), ("NVIDIA RTX A6000", "RTX-A6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000"), ("NVIDIA T400 4GB", None), ("", None),
    ],
)  # fmt: skip
def test_a_drivers_name_is_a_type(name: str, gpu_type: str | None) -> None:
    assert gpu_type_of(name) == gpu_type


@pytest.mark.parametrize(
    ("gpu_type", "link"),
    [("B300", "nvlink"), ("GB200", "nvlink"), ("H20", "nvlink"), ("MI300X", "xgmi"),
     ("AMD-Instinct-MI325X-OAM", "xgmi"), ("MI355X", "xgmi"), ("L4", "pcie"), ("L40S", "pcie"),
     ("RTX-PRO-6000", "pcie"), ("RTX4090", "pcie")],
)  # fmt: skip
def test_types_of_public_recipes_have_a_memory_and_a_link(gpu_type: str, link: str) -> None:
    assert gpu_link(node(gpu_type=gpu_type)) == link and gpu_memory_gb(node(gpu_type=gpu_type)) is not None


def test_the_card_that_is_there_wins() -> None:
    mine = node(gpu_type="H100", gpu_memory_gb=100.5, gpu_link="pcie")
    assert (gpu_memory_gb(mine), gpu_link(mine)) == (100.5, "pcie")


def test_a_name_is_known_in_any_case() -> None:
    for name in known_gpus():
        assert gpu_name(name.lower()) == gpu_name(name.upper()) == gpu_name(name) == name
        assert gpu_memory_gb(node(gpu_type=name.lower())) == gpu_memory_gb(node(gpu_type=name))
    assert gpu_name("of-tomorrow") == "of-tomorrow"
    assert why_no_tables("amd-instinct-mi300x-oam").startswith("GPU type AMD-Instinct-MI300X-OAM: ")


def test_a_cluster_file_has_the_known_spelling(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    rows = ", ".join(
        f"{{id: n{n}, gpus: 8, cpus: 99, gpu_type: {name}}}" for n, name in enumerate(("h200", "H200", "mY"))
    )
    file.write_text(f"nodes: [{rows}]\n")
    assert [each.gpu_type for each in load_cluster(str(file)).nodes] == ["H200", "H200", "mY"]


@pytest.mark.parametrize(
    ("facts", "name", "has"),
    [
        ({"gpu_type": "A100", "gpu_memory_gb": 85.9}, "A100-80G", True),
        ({"gpu_type": "A100", "gpu_memory_gb": 84.6}, "A100-80G", True),
        ({"gpu_type": "A100", "gpu_memory_gb": 85.9}, "A100-40G", False),
        ({"gpu_type": "A100", "gpu_memory_gb": 42.9}, "A100-40G", True),
        ({"gpu_type": "A100", "gpu_memory_gb": 42.9}, "A100", True),
        ({"gpu_type": "A100"}, "A100-80G", False),
        ({"gpu_type": "A100-80G"}, "A100", False),
        ({"gpu_type": "H100", "gpu_memory_gb": 85.9}, "A100-80G", False),
        ({}, "A100-80G", False),
    ],
)
def test_a_size_of_a_type_has_its_own_name(facts: dict[str, Any], name: str, has: bool) -> None:
    assert has_gpu(node(**facts), name) is has
