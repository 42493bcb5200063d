"""A node of two hosts is started again from outside, or the reason comes back."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdlab.cluster import local_nodes
from pdlab.cluster.local_nodes import LocalNodes
from pdlab.core.errors import ClusterError
from pdlab.faults import node_restart as module
from pdlab.faults.node_restart import request_restart, restarting_nodes


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalNodes:
    monkeypatch.setattr(module, "POLL_S", 0.01)
    return LocalNodes(id="a" * 12, count=2, gcs_port=1, temp_dir=str(tmp_path), pids=(7, 8))


def test_it_is_started_from_what_was_started_last(nodes: LocalNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[LocalNodes, int]] = []

    def restart(before: LocalNodes, number: int) -> LocalNodes:
        given.append((before, number))
        return before.model_copy(update={"pids": (7, 8 + len(given))})

    monkeypatch.setattr(local_nodes, "restart", restart)
    with restarting_nodes(nodes):
        request_restart(nodes, 2)
        request_restart(nodes, 2)
    assert [(before.pids, number) for before, number in given] == [((7, 8), 2), ((7, 9), 2)]
    assert list(Path(nodes.temp_dir).iterdir()) == [], "no file of theirs is left"


def test_the_reason_comes_back(nodes: LocalNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    def restart(*_: object) -> LocalNodes:
        raise ClusterError("local Ray node 2 does not start again: no way to the head")

    monkeypatch.setattr(local_nodes, "restart", restart)
    with restarting_nodes(nodes), pytest.raises(ClusterError, match="no way to the head"):
        request_restart(nodes, 2)


def test_nobody_outside(nodes: LocalNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RESTART_TIMEOUT_S", 0.1)
    with pytest.raises(ClusterError, match="node 2 was not started again within"):
        request_restart(nodes, 2)
    assert list(Path(nodes.temp_dir).iterdir()) == []
