"""What is known of types of GPU, and what a node says of its own."""

from __future__ import annotations

from typing import Any

import pytest

from pdlab.core.catalog import GpuType, gpu_link, gpu_memory_gb, gpu_type_of, known_gpus
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
