"""``make wire``: three transfer checks on this machine: pack in memory, spread over a shaped link, planted corruption.

It runs the commands that a person would type, and prints them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from pdlab.cluster.two_hosts import require
from pdlab.core import defaults
from pdlab.core.catalog import require_shape
from pdlab.core.command_lines import child_words
from pdlab.core.model_size import moved_bytes
from pdlab.core.nodes import LinkShape
from pdlab.steps.runner import StepRunner

# The settings of each check, and the exit code that it must end with.
CHECKS: tuple[tuple[dict[str, str], int], ...] = (
    ({"strategy": "pack"}, 0),
    ({"strategy": "spread"}, 0),
    ({"strategy": "spread", "fault": "swap-blocks"}, 4),
)
REPEATS = 5
# Of a step of a check: seconds besides the bytes on the link, and how much slower than its rate the link may be.
STEP_S, SLOWER = 60.0, 1.5
MEANING = """
What you saw: the KV cache of gpt-oss-120b prompts moved by NIXL, as vLLM's connector moves it, between two Ray
nodes on two hosts made of namespaces. Pack went through memory, spread over a shaped link, each with its
share of the ceiling; then two blocks were swapped on purpose, and the check reported which. On two
p5.48xlarge the same command, without the two hosts, shows whether EFA carries it."""


def prove(link: LinkShape, token_counts: Sequence[int]) -> int:
    """Make two hosts with that link, run each check between them, remove them. Returns the exit code.

    ``token_counts``: prompt lengths. Raises UsageError if this machine cannot make two hosts.
    """
    require()
    runner = StepRunner()
    limit = {} if link.gbit_per_s is None else {"timeout_s": limit_s(link.gbit_per_s, max(token_counts))}
    code = runner.run_shown(*child_words("two-hosts", action="up", link=link.model_dump(exclude_defaults=True)))
    if code:
        return code  # two hosts that were up already belong to somebody else, and stay
    try:
        for settings, right in CHECKS:
            check = child_words(
                "check-transfer",
                **settings,
                **limit,
                repeats=REPEATS,
                random_blocks=True,
                tokens=tuple(token_counts),
            )
            command = (sys.executable, *check)
            code = runner.run_shown(*child_words("two-hosts", action="shell", command=command))
            if code != right:
                print(f"that check ended with code {code}, and should end with {right}", file=sys.stderr)
                return code or 1
    finally:
        runner.run_shown(*child_words("two-hosts", action="down"), always=True)
    print(MEANING)
    return 0


def limit_s(gbit_per_s: float, tokens: int) -> float:
    """Time limit of a step of a check over a link of that rate, in whole seconds. The longest step measures UCX without
    NIXL: it moves the KV cache of the longest prompt once, and once per repeat."""
    size = moved_bytes(require_shape(defaults.MODEL), tokens, 1, hybrid=True)
    once_s = 8 * size / (gbit_per_s * 1e9)
    return float(math.ceil(STEP_S + SLOWER * (REPEATS + 1) * once_s))
