"""Acts on real processes of this machine: by number and start time, and on nothing else."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.processes import eventually

from pdlab.faults import on_node
from pdlab.remote.kernel_files import started_ticks

WAIT_S = 30.0


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "300"])
    yield process
    process.kill()
    process.wait()


def state_of(pid: int) -> str:
    return psutil.Process(pid).status()


def test_stop_continue_kill(sleeper: subprocess.Popen[bytes]) -> None:
    started = started_ticks(sleeper.pid)
    assert started is not None
    now, other = on_node.states([(sleeper.pid, started), (sleeper.pid, started + 1)])
    assert now not in ("T", None) and other is None
    assert on_node.send([(sleeper.pid, started)], signal.SIGSTOP) == [sleeper.pid]
    assert eventually(lambda: state_of(sleeper.pid) == psutil.STATUS_STOPPED)
    assert on_node.states([(sleeper.pid, started)]) == ["T"]
    assert on_node.send([(sleeper.pid, started)], signal.SIGCONT) == [sleeper.pid]
    assert eventually(lambda: state_of(sleeper.pid) == psutil.STATUS_SLEEPING)
    assert on_node.send([(sleeper.pid, started)], signal.SIGKILL) == [sleeper.pid]
    assert eventually(lambda: state_of(sleeper.pid) == psutil.STATUS_ZOMBIE)
    assert on_node.send([(sleeper.pid, started)], signal.SIGKILL) == [], "a zombie is not hit"
    assert on_node.states([(sleeper.pid, started)]) == [None]
    assert sleeper.wait(WAIT_S) == -signal.SIGKILL
    assert on_node.states([(sleeper.pid, started)]) == [None]
    assert started_ticks(sleeper.pid) is None


def test_a_number_that_was_given_again_is_not_hit(sleeper: subprocess.Popen[bytes]) -> None:
    started = started_ticks(sleeper.pid)
    assert started is not None
    assert on_node.send([(sleeper.pid, started + 1)], signal.SIGKILL) == []
    on_node.send_later([(sleeper.pid, started + 1)], [(0.0, signal.SIGKILL)])
    time.sleep(0.5)
    assert sleeper.poll() is None


def test_what_is_stopped_goes_on_by_itself(sleeper: subprocess.Popen[bytes]) -> None:
    started = started_ticks(sleeper.pid)
    assert started is not None
    on_node.send_later([(sleeper.pid, started)], [(0.0, signal.SIGSTOP), (1.0, signal.SIGCONT)])
    assert eventually(lambda: state_of(sleeper.pid) == psutil.STATUS_STOPPED)
    assert eventually(lambda: state_of(sleeper.pid) == psutil.STATUS_SLEEPING)


def test_an_order_can_be_taken_back(sleeper: subprocess.Popen[bytes]) -> None:
    started = started_ticks(sleeper.pid)
    assert started is not None
    watcher = on_node.send_later([(sleeper.pid, started)], [(1.0, signal.SIGKILL)])
    assert on_node.send([watcher], signal.SIGKILL) == [watcher[0]]
    time.sleep(1.5)
    assert sleeper.poll() is None


def test_what_sends_signals_later_is_no_child() -> None:
    """Killed with the node or not: what sends is no child of the one that ordered it."""
    with subprocess.Popen(["sleep", "300"]) as sleeper:
        code = (
            f"import sys\nsys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r})\n"
            "import os\nfrom pdlab.faults import on_node\n"
            f"on_node.send_later([({sleeper.pid}, {started_ticks(sleeper.pid)})], [(0.5, 9)])\nos._exit(0)"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=WAIT_S)
        assert sleeper.wait(WAIT_S) == -signal.SIGKILL


def test_a_survey_finds_what_carries_the_mark(sleeper: subprocess.Popen[bytes]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        env = {**os.environ, "PDLAB_TEST_MARK": "x1"}
        with subprocess.Popen(["sleep", "300"], env=env, pass_fds=[server.fileno()]) as marked:
            try:
                facts = on_node.survey("PDLAB_TEST_MARK=x1")
                own = facts["processes"][marked.pid]
                assert own["parent"] == os.getpid() and own["title"] == "sleep 300" and own["rss_bytes"] > 0
                assert own["started"] == started_ticks(marked.pid)
                assert own["ports"] == [server.getsockname()[1]]
                assert on_node.survey("PDLAB_TEST_MARK=x1", ports=False)["processes"][marked.pid]["ports"] == []
                assert sleeper.pid not in facts["processes"] and facts["raylet"] is None
                assert facts["own"] == os.getpid() and facts["space"]
            finally:
                marked.kill()


def test_everything_below_a_raylet(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the parents of its process, as in a worker of Ray."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        parent = psutil.Process(child.pid).ppid()
        monkeypatch.setattr(on_node, "RAYLET", psutil.Process(parent).name())
        monkeypatch.setattr(os, "getpid", lambda: child.pid)
        facts = on_node.survey(None, ports=False)
        monkeypatch.undo()
        assert facts["raylet"] == parent and child.pid in facts["processes"]
        assert all(
            pid == parent or facts["processes"][pid]["parent"] in facts["processes"] for pid in facts["processes"]
        )
        child.communicate(b"\n")


def test_a_command() -> None:
    assert on_node.run(["echo", "a b"]) == "a b\n"
    with pytest.raises(OSError, match="`sh -c echo no >&2; exit 3` fails: no"):
        on_node.run(["sh", "-c", "echo no >&2; exit 3"])
