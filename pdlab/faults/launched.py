"""``python -m pdlab chaos --launch``: launch deployments on this machine in turn, and run fault plans on each.

Runs the commands that a user would type, and prints them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pdlab.cluster import two_hosts
from pdlab.core import defaults
from pdlab.core.command_lines import child_words
from pdlab.core.errors import UsageError
from pdlab.core.exit_code import NOT_CLEAN
from pdlab.steps.runner import StepRunner

# A small KV pool: expired blocks are soon reused, and a KV leak is soon visible.
KV_BYTES = 48 * 2**20
SMALL = {"engine_kwargs": {"kv_cache_memory_bytes": KV_BYTES}}


class ChaosDeployment(NamedTuple):
    """One deployment, its settings for the launch, and its fault plans. ``root``: it needs root, or it is left out."""

    name: str
    launch: Mapping[str, Any]
    plans: tuple[str, ...]
    root: bool = False


_SPREAD = {"mode": "pd-spread"}


def _spread_of(**pool: int) -> Mapping[str, Any]:
    return {**_SPREAD, "prefill": pool, "decode": pool}


DEPLOYMENTS = (
    ChaosDeployment("one prefill and one decode replica", _SPREAD, ("all", "soak")),
    ChaosDeployment("two of each", _spread_of(replicas=2), ("all", "replicas", "soak")),
    ChaosDeployment("engines of two ranks", _spread_of(tp=2), ("workers",)),
    ChaosDeployment(
        "two hosts with a link of 1 Gbit/s and 0.2 ms",
        {**_SPREAD, "two_hosts": True, "link": {"gbit_per_s": 1.0, "delay_s": 0.0002}},
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
        where = {"local": defaults.LOCAL_NODES, "detach": True, "port": port}
        code = runner.run_shown(*child_words("launch", **deployment.launch, **where, deployment=SMALL), *flags)
        try:
            if code:
                return code
            for plan in deployment.plans:
                url = defaults.base_url(port)
                code = runner.run_shown(*child_words("chaos", plan=plan, base_url=url), *words)
                if code not in (0, NOT_CLEAN):
                    return code
                worst = max(worst, code)
        finally:
            runner.run_shown(*child_words("launch", shutdown=True, port=port), always=True)
    return worst
