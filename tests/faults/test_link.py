"""What the link's faults run, and that a link that is down comes up by itself."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from faults.test_targets import SURVEYS

from pdlab.cluster.local_nodes import LocalNodes
from pdlab.cluster.namespaces import INSIDE
from pdlab.cluster.two_hosts import Host, TwoHosts
from pdlab.core.errors import ClusterError
from pdlab.core.nodes import LinkShape
from pdlab.faults import link as module
from pdlab.faults.link import ShapedLink


class FakeNodeActors:
    class cluster:
        @staticmethod
        def alive() -> list[dict[str, str]]:
            return [{"NodeID": "n1"}, {"NodeID": "n2"}]

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def call(self, *words: Any) -> Any:
        self.calls.append(words)
        return [90]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    commands: list[list[str]] = []

    def popen(command: list[str], **_: Any) -> None:
        commands.append(["later", *command])

    monkeypatch.setattr(module, "run", commands.append)
    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setenv(INSIDE, "host-a")
    return commands


def made(folder: Path, rate: float | None = 1.0, relay: int | None = None) -> tuple[ShapedLink, FakeNodeActors]:
    hosts = (Host(name="host-a", address="10.77.0.1", pid=1), Host(name="host-b", address="10.77.0.2", pid=2))
    pair = TwoHosts(hosts=hosts, shape=LinkShape(gbit_per_s=rate), relay=relay)
    nodes = LocalNodes(id="a" * 12, count=2, gcs_port=1, temp_dir=str(folder), pids=(), two_hosts=pair)
    node_actors = FakeNodeActors()
    return ShapedLink(nodes, node_actors), node_actors  # type: ignore[arg-type]


def test_down_and_up(ran: list[list[str]], tmp_path: Path) -> None:
    link, _ = made(tmp_path)
    link.down(4)
    assert ran == [
        ["later", "sh", "-c", "sleep 34; exec ip link set pdlab0 up"],
        ["ip", "link", "set", "pdlab0", "down"],
    ]  # fmt: skip
    link.up()
    assert ran[-1] == ["ip", "link", "set", "pdlab0", "up"]


def test_slow_both_ways_and_back(ran: list[list[str]], tmp_path: Path) -> None:
    link, node_actors = made(tmp_path)
    link.slow(2)
    assert [call[0] for call in node_actors.calls] == ["n1", "n1", "n2", "n2"]
    assert "rate 2000000bit" in " ".join(node_actors.calls[1][2])
    node_actors.calls.clear()
    link.restore()
    assert "rate 1000000000bit" in " ".join(node_actors.calls[1][2])
    link, node_actors = made(tmp_path, None)
    link.restore()
    assert [call[2][0] for call in node_actors.calls] == ["sh", "sh"], "no rate: the queue is taken away"


def test_the_relay_gets_the_share(ran: list[list[str]], tmp_path: Path) -> None:
    link, node_actors = made(tmp_path, relay=90)
    with pytest.raises(ClusterError, match="the relay of the link is not there"):
        link.drop(0.2, SURVEYS)
    title = {"parent": 1, "started": 77, "title": "python -I /x/link_relay.py 5 pdlab0", "rss_bytes": 1, "ports": []}
    surveys = [SURVEYS[0]._replace(processes={90: title})]
    link.drop(0.2, surveys)
    assert (tmp_path / module.DROP_FILE).read_text() == "0.2\n"
    assert node_actors.calls == [("n1", "send", [(90, 77)], int(signal.SIGHUP))]


def test_a_command_that_fails_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ran: list[list[str]]
) -> None:
    def fails(command: list[str]) -> str:
        raise OSError("`ip` fails: no such device")

    link, _ = made(tmp_path)
    monkeypatch.setattr(module, "run", fails)
    with pytest.raises(ClusterError, match="the link between the two hosts: `ip` fails"):
        link.up()
