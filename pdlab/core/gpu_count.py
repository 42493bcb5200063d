"""By which GPUs of a deployment throughput and cost are divided, and the flag that chooses it."""

from __future__ import annotations

import argparse
from typing import Literal, get_args

Count = Literal["used", "nodes"]
DEFAULT_COUNT: Count = "used"
"""Published figures divide by the GPUs of the deployment."""


COUNT_HELP = (
    "used: per node and per GPU count the GPUs that a deployment uses; nodes: those of the whole nodes that it takes, "
    "filled with copies of it: nodes are rented whole"
)


def add_count_gpus(flags: argparse._ArgumentGroup) -> None:
    """Add ``--count-gpus`` to a group of flags."""
    flags.add_argument(
        "--count-gpus",
        choices=get_args(Count),
        default=DEFAULT_COUNT,
        help=f"{COUNT_HELP} (default %(default)s)",
    )


def other_count(count: Count) -> Count:
    """The one that was not chosen."""
    return "nodes" if count == "used" else "used"
