"""By which GPUs of a deployment throughput and cost are divided, and the flag that chooses it."""

from __future__ import annotations

from typing import Literal

Count = Literal["used", "nodes"]
DEFAULT_COUNT: Count = "used"
"""Published figures divide by the GPUs of the deployment."""


COUNT_HELP = (
    "divide throughput by these GPUs: used: the GPUs that the deployment uses; nodes: all GPUs of its nodes, filled "
    "with copies of the deployment, because nodes are rented whole"
)


def other_count(count: Count) -> Count:
    """The one that was not chosen."""
    return "nodes" if count == "used" else "used"
