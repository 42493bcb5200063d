"""GPUs of whole nodes per copy."""

from __future__ import annotations

import pytest

from pdlab.core.deployment import Deployment, parse_label
from pdlab.core.nodes import ClusterNode, ClusterView
from pdlab.placement.copies import copies_of, whole_node_gpus


@pytest.mark.parametrize(
    ("label", "gpus"),
    [
        ("collocated-4xtp2", 8),
        ("collocated-3xtp2", 8),  # two GPUs are paid for and serve nobody
        ("pd-pack-p1xtp2-d1xtp4", 8),
        ("pd-pack-p1xtp2-d1xtp2", 4),  # another copy takes the other half
        ("pd-pack-p1xtp1-d1xtp2", 4),  # two copies of three GPUs
        ("pd-spread-p1xtp4-d1xtp4", 8),  # two copies on two nodes
        ("pd-spread-p1xtp8-d1xtp4", 16),
    ],
)
def test_what_no_copy_can_use_is_counted(label: str, gpus: float) -> None:
    assert whole_node_gpus(Deployment(topology=parse_label(label)), 8) == gpus


@pytest.mark.parametrize(("cpus", "copies"), [(96, 4), (12, 4), (11, 3), (5, 1), (2, 0)])
def test_engines_of_all_copies_have_cpus(cpus: int, copies: int) -> None:
    """A group of TP 2 takes a CPU for each of two workers, and one for the engine."""
    view = ClusterView(nodes=(ClusterNode(id="a", gpus=8, cpus=cpus, head=True),))
    assert copies_of(Deployment(topology=parse_label("collocated-1xtp2")), view, 8) == copies
