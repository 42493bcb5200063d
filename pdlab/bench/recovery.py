"""After a replica died: wait until all replicas run again, run the canary, and return the new replicas.

Ray Serve replaces a replica by itself. The new one has another name, so the launcher's published record is updated.
Otherwise every further level would count it as an unknown replica.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pdlab.bench.target import Target, answers
from pdlab.bench.watch import HEALTH_LAG_S, ReplicaHealth, read_health
from pdlab.core.errors import DeploymentDied, UsageError
from pdlab.deploy import canary
from pdlab.deploy.application import APP, deployment_names
from pdlab.deploy.endpoint import key_of, load_running, publish_replicas

LOOK_EVERY_S = 2.0
NOTE_EVERY_S = 15.0


class LiveReplicas(NamedTuple):
    """The current replicas, the pool of each that belongs to one, and what is still missing (None: nothing)."""

    replicas: tuple[str, ...]
    pools: dict[str, str]
    missing: str | None


def state(target: Target, health: Sequence[ReplicaHealth]) -> LiveReplicas:
    """Whether as many replicas of each pool are healthy as the deployment has, and as many others (an ingress, a
    router) as were published. Where Ray Serve's health of replicas is not exported, nothing is missed."""
    deployment = target.manifest.deployment
    if deployment is None or not target.replicas or not health:
        return LiveReplicas(target.replicas, dict(target.pools), None)
    roles = {name: role for role, name in deployment_names(deployment, target.model_id).items()}
    healthy = [one for one in health if one.healthy and one.application in ("", APP)]
    counts = Counter(one.deployment for one in healthy)
    # Ray Serve LLM makes one replica per data parallel rank.
    expected = {name: deployment.pools[role].ranks for name, role in roles.items()}
    beside = sum(count for name, count in counts.items() if name not in roles)
    published_beside = len(set(target.replicas) - set(target.pools))
    lacking = [f"{counts[name]} of {count} of {name}" for name, count in expected.items() if counts[name] != count]
    if beside < published_beside:
        lacking.append(f"{beside} of {published_beside} that hand requests on")
    return LiveReplicas(
        replicas=tuple(sorted(one.replica for one in healthy)),
        pools={one.replica: roles[one.deployment] for one in healthy if one.deployment in roles},
        missing=f"healthy are {', '.join(lacking)}" if lacking else None,
    )


def await_whole(target: Target, why: str, limit_s: float, note: Callable[[str], None]) -> Target:
    """The target after all replicas run again, with its replicas published and the canary's prompts answered as before.

    If the replicas are the old ones, they must stay healthy for as long as Ray Serve may take to notice a death. Raises
    DeploymentDied, with ``why`` and what is missing, if the deployment is not complete within ``limit_s`` seconds, if
    its launcher has stopped it, or if its answers are wrong.
    """
    began = noted_at = time.monotonic()
    note(f"{why}: waiting until the deployment is whole again, {limit_s:g} s at most")
    whole_since: float | None = None
    before: frozenset[str] = frozenset()
    missing = "its state is not known"
    while True:
        now = time.monotonic()
        if target.replicas and load_running(target.base_url) is None:
            raise DeploymentDied(f"{why}; its launcher has taken it down")
        whole, missing = _current_state(target)
        if missing:
            whole_since = None
        elif whole_since is None or frozenset(whole.replicas) != before:
            whole_since, before = now, frozenset(whole.replicas)
        if not missing and whole_since is not None:
            same = set(whole.replicas) >= set(target.replicas)
            if now - whole_since >= (HEALTH_LAG_S if same else LOOK_EVERY_S):
                right, detail = _canary(target)
                if right is False:
                    raise DeploymentDied(f"{why}; it is whole again and answers wrongly: {detail}")
                if right:
                    note(f"whole again after {now - began:.0f} s; canary: {detail}")
                    publish_replicas(target.base_url, whole.replicas, whole.pools)
                    return target.model_copy(update={"replicas": whole.replicas, "pools": whole.pools})
                missing = detail
        if now - began >= limit_s:
            raise DeploymentDied(f"{why}; not whole again within {limit_s:g} s (--recover-s): {missing}")
        if now - noted_at >= NOTE_EVERY_S:
            noted_at = now
            note(
                f"waiting for the deployment, {now - began:.0f} s of {limit_s:g}: {missing or 'whole, let it stay so'}"
            )
        time.sleep(LOOK_EVERY_S)


def _canary(target: Target) -> tuple[bool | None, str]:
    """Whether the canary's prompts are answered as at the launch, and in words; None: they are not answered yet."""
    if not target.answers:
        return True, "none is known"
    result = canary.ask_again(target.base_url, target.model_id, target.answers, key_of(target.base_url))
    return (None if result.equal is None and not result.compared else result.equal is not False), result.detail


def _current_state(target: Target) -> tuple[LiveReplicas, str]:
    """The replicas now, and what is missing: an empty text where nothing is."""
    whole = state(target, read_health(target.metrics_urls) if target.replicas else ())
    try:
        silent = "" if answers(target.base_url) else f"{target.base_url} does not list its models"
    except UsageError as error:
        silent = str(error)
    return whole, whole.missing or silent
