"""By which GPUs of a deployment throughput and cost are divided, and the flag that chooses it."""

from __future__ import annotations

from typing import Literal

Count = Literal["used", "nodes"]
DEFAULT_COUNT: Count = "used"
"""Published figures divide by the GPUs of the deployment."""


COUNT_HELP = (
    "used: per node and per GPU count the GPUs that a deployment uses; nodes: those of the whole nodes that it takes, "
    "filled with copies of it: nodes are rented whole"
)


def other_count(count: Count) -> Count:
    """The one that was not chosen."""
    return "nodes" if count == "used" else "used"
