"""Clusters that a test makes up."""

from __future__ import annotations

from pdlab.core.nodes import NODE_NAME_LABEL, ClusterNode, ClusterView


def gpu_nodes(*free: int, cpus: float = 192, kind: str | None = "H100") -> ClusterView:
    """Nodes n0, n1, ... of 8 GPUs, so many of them free: the highest."""
    return ClusterView(
        name="test",
        nodes=tuple(
            ClusterNode(
                id=f"n{i}",
                gpu_type=kind,
                gpus=8,
                free_gpus=tuple(range(8 - count, 8)),
                cpus=cpus,
                labels={NODE_NAME_LABEL: f"n{i}"},
            )
            for i, count in enumerate(free)
        ),
    )
