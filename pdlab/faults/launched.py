"""``python -m pdlab chaos --launch``: launch deployments on this machine in turn, and run fault plans on each.

Runs the commands that a user would type, and prints them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

from pdlab.cluster import two_hosts
from pdlab.core import defaults
from pdlab.core.commands import python_words
from pdlab.core.errors import UsageError
from pdlab.steps.runner import StepRunner

# A small KV pool: expired blocks are soon reused, and a KV leak is soon visible.
KV_BYTES = 48 * 2**20
SMALL = ("--engine-arg", f"kv_cache_memory_bytes={KV_BYTES}")
HAS_FINDINGS = 3


class ChaosDeployment(NamedTuple):
    """One deployment and its fault plans. ``root``: it needs root; without root it is left out."""

    name: str
    launch: tuple[str, ...]
    plans: tuple[str, ...]
    root: bool = False


DEPLOYMENTS = (
    ChaosDeployment("one prefill and one decode replica", ("--pd-spread",), ("all", "soak")),
    ChaosDeployment("two of each", ("--pd-spread", "--p-num", "2", "--d-num", "2"), ("all", "replicas", "soak")),
    ChaosDeployment("engines of two ranks", ("--pd-spread", "--p-tp", "2", "--d-tp", "2"), ("workers",)),
    ChaosDeployment(
        "two hosts with a link of 1 Gbit/s and 0.2 ms",
        ("--pd-spread", "--two-hosts", "--link-rate", "1gbit", "--link-delay-ms", "0.2"),
        ("all",),
        root=True,
    ),
)
SHORT = (DEPLOYMENTS[0]._replace(plans=("short",)),)


def launch_and_break(words: Sequence[str], flags: Sequence[str], port: int, *, short: bool) -> int:
    """Launch each deployment, run its fault plans, and shut it down. Returns the worst exit code.

    ``words``: more flags of ``chaos``. ``flags``: more flags of the launch. ``short``: only the `SHORT` deployments.
    """
    worst = 0
    runner = StepRunner()
    for deployment in SHORT if short else DEPLOYMENTS:
        if deployment.root:
            try:
                two_hosts.require()
            except UsageError as error:
                print(f"left out, {deployment.name}: {error}", file=sys.stderr)
                continue
        print(f"\n{deployment.name}", file=sys.stderr, flush=True)
        where = ["--local", "--detach", "--port", str(port)]
        code = runner.run_shown(*python_words("launch"), *deployment.launch, *where, *SMALL, *flags)
        try:
            if code:
                return code
            for plan in deployment.plans:
                url = ["--base-url", defaults.base_url(port)]
                code = runner.run_shown("-m", "pdlab", "chaos", plan, *url, *words)
                if code not in (0, HAS_FINDINGS):
                    return code
                worst = max(worst, code)
        finally:
            runner.run_shown(*python_words("launch"), "--shutdown", "--port", str(port), always=True)
    return worst
