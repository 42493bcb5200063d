"""GPUs of whole nodes per copy."""

from __future__ import annotations

import pytest

from pdlab.core.deployment import Deployment, parse_label
from pdlab.placement.copies import whole_node_gpus


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
