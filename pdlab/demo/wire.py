"""``make wire``: three transfer checks on this machine: pack in memory, spread over a shaped link, planted corruption.

It runs the commands that a person would type, and prints them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pdlab.cluster.two_hosts import require
from pdlab.core.command_lines import child_words
from pdlab.core.nodes import LinkShape
from pdlab.steps.runner import StepRunner

# The settings of each check, and the exit code that it must end with.
CHECKS: tuple[tuple[dict[str, str], int], ...] = (
    ({"strategy": "pack"}, 0),
    ({"strategy": "spread"}, 0),
    ({"strategy": "spread", "fault": "swap-blocks"}, 4),
)
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
    code = runner.run_shown(*child_words("two-hosts", action="up", link=link.model_dump(exclude_defaults=True)))
    if code:
        return code  # two hosts that were up already belong to somebody else, and stay
    try:
        for settings, right in CHECKS:
            check = child_words("check-transfer", **settings, random_blocks=True, tokens=tuple(token_counts))
            command = (sys.executable, *check)
            code = runner.run_shown(*child_words("two-hosts", action="shell", command=command))
            if code != right:
                print(f"that check ended with code {code}, and should end with {right}", file=sys.stderr)
                return code or 1
    finally:
        runner.run_shown(*child_words("two-hosts", action="down"), always=True)
    print(MEANING)
    return 0
