"""The quick part of debug/doctor.py, before a PD deployment starts: what would break it stops the launch."""

from __future__ import annotations

import time
from collections.abc import Callable

from pdlab.cluster.connection import Cluster
from pdlab.core.deployment import Deployment, Disaggregated
from pdlab.core.errors import DeployError
from pdlab.remote import node
from pdlab.transfer.doctor import diagnosis, settings_rules
from pdlab.transfer.doctor.findings import Facts, Finding

PORT_WAIT_S = 20.0
"""Engines of an application that was just taken down hold their side-channel ports until their process has ended:
seconds on a loaded machine."""


def examine(cluster: Cluster, deployment: Deployment, say: Callable[[str], None]) -> None:
    """Ask every node, tell the warnings. Raises DeployError on what would break the deployment."""
    if not isinstance(deployment.topology, Disaggregated):
        return
    ports = settings_rules.side_channel_ports({role: pool.gpus for role, pool in deployment.pools.items()})

    def ask() -> Facts:
        if cluster.local:
            return {"this machine": node.quick(ports)}
        return cluster.ask_nodes(node.quick, ports)

    judge(lambda: diagnosis.diagnose(ask()), say)


def judge(findings_now: Callable[[], list[Finding]], say: Callable[[str], None], wait_s: float = PORT_WAIT_S) -> None:
    """Tell the warnings among the findings. Raises DeployError on the first that stands in the way.

    A taken side-channel port is looked at again until ``wait_s`` have passed: its holder may be ending.
    """
    deadline = time.monotonic() + wait_s
    findings = findings_now()
    if any(map(_port, findings)):
        say("waiting for side-channel ports: engines of an earlier application are still ending")
    while any(map(_port, findings)) and time.monotonic() < deadline:
        time.sleep(0.25)
        findings = findings_now()
    for finding in findings:
        # A launch has its own rule for open clusters, and local nodes have no open ports.
        if finding.severity == "warning" and finding.topic != settings_rules.OPEN_PORT:
            say(f"doctor: {finding.topic}: {finding.evidence}; {finding.consequence}")
    # Nothing of this application serves any more: an engine on one of its ports was left behind.
    broken = next((finding for finding in findings if finding.severity == "error" or _port(finding)), None)
    if broken is not None:
        raise DeployError(
            f"{broken.topic} on {', '.join(broken.nodes)}: {broken.evidence}; {broken.consequence}; {broken.fix} "
            "(everything: python debug/doctor.py)"
        )


def _port(finding: Finding) -> bool:
    return finding.topic == settings_rules.SIDE_CHANNEL_PORT
