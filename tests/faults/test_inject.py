"""One fault from its first act to its last, on made-up processes; whatever happens, nothing stays stopped."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from faults.test_targets import SURVEYS
from faults.test_targets import found as found_now

from pdlab.core.errors import ClusterError
from pdlab.faults import inject
from pdlab.faults.inject import FaultContext, Injector
from pdlab.faults.kinds import KINDS
from pdlab.faults.plan import DueFault, FaultPlan

PLAN = FaultPlan(faults=("all",), hold_s=0.02, lease_s=0.01, limit_s=5, leavers=2)
WATCHER = 4242
STOP, CONT, KILL = int(signal.SIGSTOP), int(signal.SIGCONT), int(signal.SIGKILL)


class FakeNodeActors:
    def __init__(self, fail_at: int | None = None, gone: tuple[int, ...] = ()) -> None:
        self.sent: list[tuple[str, list[int], Any]] = []
        self.fail_at = fail_at
        self.gone = gone
        self.immune = False  # no signal of `send_later` does anything
        self.asked: list[str] = []  # nodes that were asked for the state of a process

    def call(self, node: str, method: str, *args: Any, **_: Any) -> Any:
        if self.fail_at is not None and len([s for s in self.sent if s[0] == "send"]) == self.fail_at:
            self.fail_at = None
            raise ClusterError("node n1 does not answer")
        pids = [pid for pid, _ in args[0]]
        if method == "states":
            self.asked.append(node)
            return [self.state(pid) for pid in pids]
        self.sent.append((method, pids, args[1]))
        if method == "send_later":
            return (WATCHER, 5)
        return [pid for pid in pids if pid not in self.gone]

    def state(self, pid: int) -> str | None:
        later = [signals[0][1] for method, pids, signals in self.sent if method == "send_later" and pid in pids]
        if pid in self.gone or (KILL in later and not self.immune):
            return None
        return "T" if STOP in later and not self.immune else "S"

    def signals(self) -> list[tuple[int, int]]:
        """To the deployment's processes."""
        sent = [(pids[0], number) for method, pids, number in self.sent if method == "send"]
        return [each for each in sent if each[0] != WATCHER]


class FakeLoad:
    def __init__(self) -> None:
        self.did: list[str] = []
        self.streaming = self.leaving = 1
        self.left = 0
        self.ended = False  # the requests of leaving clients end before the clients leave

    def now_s(self) -> float:
        return time.monotonic()

    def check(self) -> None:
        self.did.append("check")

    def send_leaving(self, count: int, phase: str) -> None:
        self.did.append(f"send {count} {phase}")

    def leave(self) -> None:
        self.did.append("leave")
        self.left, self.leaving = int(not self.ended), 0

    def send_more(self, count: int) -> None:
        self.did.append(f"more {count}")


class FakeLink:
    has_relay = True

    def __init__(self) -> None:
        self.did: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: self.did.append(name)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PREFILL_LEAST_S", "STILL_S", "PREPARATION_S", "STOPS_MOST_S", "ENDS_MOST_S"):
        monkeypatch.setattr(inject, name, 0.01)
    monkeypatch.setattr(inject, "POLL_S", 0.005)
    monkeypatch.setattr(inject, "PREFILL_MOST_S", 0.2)


def made(node_actors: FakeNodeActors, link: FakeLink | None = None, **context: Any) -> tuple[Injector, FakeLoad]:
    load = FakeLoad()
    asked = itertools.count()

    def prefilled() -> float:
        """Two requests after the first question, and all those that are sent in addition."""
        more = sum(int(act.partition(" ")[2]) for act in load.did if act.startswith("more"))
        return (5.0 if next(asked) else 3.0) + more

    fields: dict[str, Any] = {
        "look": lambda: (SURVEYS, found_now()), "prefilled": prefilled, "names": lambda: {"n2": "local-2"},
        "restart": None, "replicas": {"prefill": 1, "decode": 1}, "more": 7,
    }  # fmt: skip
    surroundings = FaultContext(**{**fields, **context})
    return Injector(PLAN, load, node_actors, link, surroundings), load  # type: ignore[arg-type]


def due(name: str) -> DueFault:
    return DueFault(1, KINDS[name], 4.0, 0.0)


def test_the_kill_before_the_read() -> None:
    node_actors = FakeNodeActors()
    injector, _ = made(node_actors)
    fault = injector.inject(due("kill_prefill_before_read"))
    assert fault.outcome == "injected" and fault.planned_s == 4.0 and fault.began_s <= fault.ended_s
    assert node_actors.signals() == [(22, STOP), (12, KILL), (22, CONT)]
    assert node_actors.sent[0][0] == "send_later" and node_actors.sent[0][2][0][1] == CONT, (
        "before the stop: it goes on anyhow"
    )
    assert fault.targets == (
        "decode engine core of d1 (process 22 on local-2)",
        "prefill engine core of p1 (process 12 on n1)",
    )
    assert "await_prefill (2 prefills since)" in fault.acts[1]


@pytest.mark.parametrize(
    ("name", "signals", "did"),
    [
        ("kill_decode_engine", [(22, KILL)], []),
        ("stop_prefill_replica", [(11, STOP), (11, CONT)], []),
        ("kill_prefill_worker", [(13, KILL)], []),
        ("kill_router", [(17, KILL)], []),
        ("stop_balancer", [(16, STOP), (16, CONT)], []),
        ("expire_before_read", [(22, STOP), (22, CONT)], ["more 7"]),
        ("leave_before_prefill", [(12, STOP), (12, CONT)], ["send 2 before prefill", "leave"]),
        ("leave_between", [(22, STOP), (22, CONT)], ["send 2 between", "leave"]),
        ("leave_in_transfer", [(22, STOP), (12, STOP), (22, CONT), (12, CONT)], ["send 2 in transfer", "leave"]),
        ("leave_while_streaming", [], ["send 2 while streaming", "leave"]),
    ],
)
def test_signals_in_their_order(
    name: str, signals: list[tuple[int, int]], did: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inject.time, "sleep", lambda _: None)  # type: ignore[attr-defined]
    node_actors = FakeNodeActors()
    injector, load = made(node_actors)
    assert injector.inject(due(name)).outcome == "injected"
    assert node_actors.signals() == signals and load.did == did


def test_no_watcher_of_an_earlier_stop_ends_a_later_one() -> None:
    """A decode engine core that was to stand still for longer than a lease went on after 25 s once."""
    node_actors = FakeNodeActors()
    injector, _ = made(node_actors)
    injector.inject(due("stop_decode_engine"))
    sent = [(method, pids, number) for method, pids, number in node_actors.sent if method == "send"]
    assert sent == [("send", [22], STOP), ("send", [22], CONT), ("send", [WATCHER], KILL)]


def test_a_whole_node_is_hit_by_a_process_of_its_own() -> None:
    node_actors, restarted = FakeNodeActors(), []
    injector, _ = made(node_actors, restart=restarted.append)
    fault = injector.inject(due("kill_node"))
    assert fault.targets == ("whole node local-2",) and restarted == ["local-2"]
    assert node_actors.sent == [("send_later", [20, 21, 22, 23, 29], [(inject.PREPARATION_S, KILL)])]
    node_actors.sent.clear()
    injector.inject(due("stop_node"))
    assert node_actors.sent == [("send_later", [20, 21, 22, 23], [(inject.PREPARATION_S, STOP), (PLAN.hold_s, CONT)])]


@pytest.mark.parametrize("name", ["kill_raylet", "stop_raylet", "kill_node", "stop_node"])
class TestRaylet:
    def test_one_that_has_ended_is_no_target(self, name: str) -> None:
        node_actors, restarted = FakeNodeActors(gone=(20,)), []
        injector, _ = made(node_actors, restart=restarted.append)
        fault = injector.inject(due(name))
        assert (fault.outcome, fault.detail) == ("skipped", "process 20 ended before a signal reached it")
        assert node_actors.sent == restarted == []

    def test_one_that_the_signal_does_not_reach_is_a_failure(self, name: str) -> None:
        node_actors = FakeNodeActors()
        node_actors.immune = True
        injector, _ = made(node_actors, restart=lambda _: None)
        fault = injector.inject(due(name))
        assert fault.outcome == "failed" and "process 20 is in state S" in str(fault.detail)
        assert node_actors.asked[0] == "n2" and set(node_actors.asked[1:]) == {"n1"}, "another node looks afterwards"

    def test_one_that_no_other_node_can_see_is_believed(self, name: str) -> None:
        apart = [survey._replace(space=survey.node) for survey in SURVEYS]
        node_actors = FakeNodeActors()
        node_actors.immune = True
        injector, _ = made(node_actors, restart=lambda _: None, look=lambda: (apart, found_now()))
        assert injector.inject(due(name)).outcome == "injected" and node_actors.asked == ["n2"]


def test_a_raylet_that_ends_before_it_is_stopped_is_no_target() -> None:
    node_actors = FakeNodeActors()
    states = iter(["S", None])
    node_actors.state = lambda _: next(states)  # type: ignore[method-assign]
    injector, _ = made(node_actors)
    assert injector.inject(due("stop_raylet")).outcome == "skipped"


def test_a_stop_that_may_be_over_before_anybody_looks_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inject, "STOPS_MOST_S", 2 * PLAN.hold_s)
    node_actors = FakeNodeActors()
    node_actors.immune = True
    injector, _ = made(node_actors)
    assert injector.inject(due("stop_raylet")).outcome == "injected"


@pytest.mark.parametrize("name", ["kill_prefill_before_read", "leave_between", "leave_in_transfer"])
def test_without_a_prefill_nothing_waits_to_be_read(name: str) -> None:
    node_actors = FakeNodeActors()
    injector, load = made(node_actors, prefilled=lambda: 3.0)
    fault = injector.inject(due(name))
    assert (fault.outcome, fault.detail) == ("failed", "no prefill finished within 0.2 s")
    assert node_actors.signals() == [(22, STOP), (22, CONT)] and "leave" not in load.did


def test_a_count_that_falls_does_not_tell() -> None:
    """A prefill engine has gone since, and its count with it."""
    counts = itertools.chain([9.0], itertools.repeat(2.0))
    injector, _ = made(FakeNodeActors(), prefilled=lambda: next(counts))
    fault = injector.inject(due("kill_prefill_before_read"))
    assert fault.outcome == "injected" and "(unknown prefills since)" in fault.acts[1]


def test_clients_leave_streams_only_if_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inject, "CHUNKS_MOST_S", 0.1)
    injector, load = made(FakeNodeActors())
    load.streaming = 0
    fault = injector.inject(due("leave_while_streaming"))
    assert (fault.outcome, fault.detail) == ("failed", "no request of a leaving client streamed within 0.1 s")
    assert load.did == ["send 2 while streaming"]


@pytest.mark.parametrize("name", ["leave_while_streaming", "leave_before_prefill", "leave_in_transfer"])
def test_clients_whose_requests_have_ended_do_not_leave(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inject.time, "sleep", lambda _: None)  # type: ignore[attr-defined]
    injector, load = made(FakeNodeActors())
    load.ended = True
    fault = injector.inject(due(name))
    assert fault.outcome == "failed" and "had ended before the clients left" in str(fault.detail)


def test_what_is_not_there_is_skipped() -> None:
    node_actors = FakeNodeActors()
    injector, _ = made(node_actors, look=lambda: (SURVEYS, [each for each in found_now() if each.role != "prefill"]))
    fault = injector.inject(due("kill_prefill_before_read"))
    assert (fault.outcome, node_actors.sent) == ("skipped", [])
    assert fault.detail == "no prefill engine core is there at this moment"


def test_what_is_being_started_again_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a way around a dead prefill, requests are right again before its engine is."""
    monkeypatch.setattr(inject, "LOOK_AGAIN_S", 0.01)
    looks: Iterator[int] = itertools.count()

    def look() -> Any:
        without = [each for each in found_now() if each.role != "prefill"]
        return SURVEYS, (without if next(looks) < 3 else found_now())

    injector, _ = made(FakeNodeActors(), look=look)
    injector.plan = PLAN.model_copy(update={"recover_s": 60.0})
    assert injector.inject(due("stop_prefill_engine")).outcome == "injected"


@pytest.mark.parametrize("fail_at", [1, 2])
def test_what_fails_in_between_leaves_nothing_stopped(fail_at: int) -> None:
    node_actors = FakeNodeActors(fail_at)
    injector, _ = made(node_actors)
    fault = injector.inject(due("stop_prefill_before_read"))
    assert fault.outcome == "failed" and "does not answer" in str(fault.detail)
    stopped = {pid for pid, number in node_actors.signals() if number == STOP}
    assert stopped == {pid for pid, number in node_actors.signals() if number == CONT} != set()


def test_a_process_that_ended_meanwhile_is_reported() -> None:
    node_actors = FakeNodeActors(gone=(12,))
    injector, _ = made(node_actors)
    fault = injector.inject(due("kill_prefill_before_read"))
    assert fault.outcome == "failed" and "process 12 ended before SIGKILL" in str(fault.detail)
    assert node_actors.signals()[-1] == (22, CONT)


def test_the_link_is_mended_once_more_at_the_end() -> None:
    link = FakeLink()
    injector, _ = made(FakeNodeActors(), link)
    fault = injector.inject(due("link_down"))
    assert (fault.outcome, fault.targets) == ("injected", ("the link between the two hosts",))
    assert link.did == ["down", "up"]
    assert injector.inject(due("relay_drop")).outcome == "injected"
    assert link.did[2:] == ["drop", "drop"]


def test_without_a_link_nothing_is_cut() -> None:
    injector, _ = made(FakeNodeActors())
    assert injector.inject(due("link_down")).outcome == "skipped"


def test_prefill_without_counters_is_waited_for_so_long_and_no_longer() -> None:
    node_actors = FakeNodeActors()
    injector, _ = made(node_actors, prefilled=lambda: None)
    fault = injector.inject(due("kill_prefill_before_read"))
    assert fault.outcome == "injected" and "(unknown prefills since)" in fault.acts[1]
