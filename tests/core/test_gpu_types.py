"""What is known of types of GPU, and what a node says of its own."""

from __future__ import annotations

from typing import Any

import pytest

from pdlab.core.catalog import GpuType, gpu_link, gpu_memory_gb, known_gpus
from pdlab.core.files import CONFIGS
from pdlab.core.nodes import ClusterNode
from pdlab.core.schema import load_yaml


def node(**facts: Any) -> ClusterNode:
    return ClusterNode(id="a", gpus=8, **facts)


def test_every_file_is_of_other_names_and_says_its_source() -> None:
    types = [load_yaml(path, GpuType) for path in sorted((CONFIGS / "gpus").glob("*.yaml"))]
    names = [name for each in types for name in each.names]
    assert len(names) == len(set(names)) == len(known_gpus())
    assert all(each.source and (each.memory_gb or each.link) for each in types)
    assert all(1 < size < 1000 for each in types for size in each.memory_gb)


def test_clusters_that_are_shipped_are_known() -> None:
    assert (gpu_memory_gb(node(gpu_type="H100")), gpu_link(node(gpu_type="H100"))) == (85.5, "nvlink")


@pytest.mark.parametrize("gpu_type", ["A100", "GB200", "of-tomorrow", None])
def test_what_a_type_does_not_say_is_not_known(gpu_type: str | None) -> None:
    assert gpu_memory_gb(node(gpu_type=gpu_type)) is None
    assert gpu_memory_gb(node(gpu_type=gpu_type, gpu_memory_gb=40)) == 40


def test_the_card_that_is_there_wins() -> None:
    mine = node(gpu_type="H100", gpu_memory_gb=100.5, gpu_link="pcie")
    assert (gpu_memory_gb(mine), gpu_link(mine)) == (100.5, "pcie")
