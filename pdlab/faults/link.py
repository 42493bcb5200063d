"""Faults of the link between two hosts of this machine: down, slow, lossy, restored. Runs on the first host."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from pdlab.cluster.link_relay import DROP_FILE
from pdlab.cluster.local_nodes import LocalNodes
from pdlab.cluster.namespaces import INSIDE
from pdlab.cluster.two_hosts import INTERFACE, shaper
from pdlab.core.errors import ClusterError
from pdlab.faults.on_node import run
from pdlab.faults.targets import NodeActors, NodeSurvey

RELAY = "link_relay.py"
GRACE_S = 30.0  # a link comes up by itself this long after it should have come up


class ShapedLink:
    """The link. All methods raise ClusterError if a command fails."""

    def __init__(self, local: LocalNodes, node_actors: NodeActors) -> None:
        assert local.two_hosts is not None
        assert INSIDE in os.environ, "on the host itself"
        self.shape = local.two_hosts.shape
        self.folder = Path(local.temp_dir)
        self.has_relay = local.two_hosts.relay is not None
        self._node_actors = node_actors

    def down(self, most_s: float) -> None:
        """Set the link down until `up`. After ``most_s`` + GRACE_S it comes up by itself, also without this process."""
        later = f"sleep {most_s + GRACE_S:g}; exec ip link set {INTERFACE} up"
        subprocess.Popen(
            ["sh", "-c", later], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True, env={"PATH": os.environ.get("PATH", os.defpath)},  # not marked as a node's process
        )  # fmt: skip
        _run_outside(["ip", "link", "set", INTERFACE, "down"])

    def up(self) -> None:
        _run_outside(["ip", "link", "set", INTERFACE, "up"])

    def slow(self, mbit: float) -> None:
        """Limit both directions to ``mbit`` Mbit/s."""
        self._shape(shaper(mbit / 1000))

    def restore(self) -> None:
        """Set the original rate."""
        self._shape(None if self.shape.gbit_per_s is None else shaper(self.shape.gbit_per_s))

    def drop(self, share: float, surveys: Sequence[NodeSurvey]) -> None:
        """Let the relay drop this share of the frames (0: none)."""
        relays = [
            (survey, pid, facts["started"])
            for survey in surveys
            for pid, facts in survey.processes.items()
            if RELAY in facts["title"]
        ]
        if not relays:
            raise ClusterError("the relay of the link is not there")
        (self.folder / DROP_FILE).write_text(f"{share!r}\n", encoding="utf-8")
        survey, pid, started = relays[0]
        if not self._node_actors.call(survey.node, "send", [(pid, started)], int(signal.SIGHUP)):
            raise ClusterError(f"the relay of the link (process {pid}) is gone")

    def _shape(self, command: Sequence[str] | None) -> None:
        clear = ["sh", "-c", f"tc qdisc del dev {INTERFACE} root 2>/dev/null; true"]
        for node in [each["NodeID"] for each in self._node_actors.cluster.alive()]:
            self._node_actors.call(node, "run", clear)
            if command is not None:
                self._node_actors.call(node, "run", list(command))


def _run_outside(command: list[str]) -> None:
    try:
        run(command)
    except OSError as error:
        raise ClusterError(f"the link between the two hosts: {error}") from error
