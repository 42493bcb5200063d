"""Make one fault: do its acts in order, on processes that exist at that moment."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pdlab.core.errors import ClusterError, PdlabError
from pdlab.core.text import counted
from pdlab.faults.kinds import FaultAction, FaultTarget, Role, Verb
from pdlab.faults.link import ShapedLink
from pdlab.faults.load import Load
from pdlab.faults.on_node import PREPARATION_S
from pdlab.faults.plan import DueFault, FaultPlan
from pdlab.faults.targets import DeploymentProcess, NodeActors, NodeSurvey, choose
from pdlab.results.chaos import InjectedFault

PREFILL_LEAST_S, PREFILL_ENOUGH_S, PREFILL_MOST_S = 2.0, 6.0, 12.0
STILL_S = 1.5  # without a finished prefill for this time, all requests in flight have been prefilled
CHUNKS_MOST_S, CHUNKS_MORE_S = 20.0, 0.2
LEAVE_MOST_S = 5.0  # limit for the load to close the connections of leaving clients
ENDS_MOST_S, STOPS_MOST_S = 20.0, 5.0  # limits for a signal to end or stop a raylet
STOPPED = ("T", "t")  # states of a stopped process in /proc
POLL_S, LOOK_AGAIN_S = 0.2, 1.0
SAFETY_S = 20.0  # a stopped process continues by itself this long after the longest planned stop
WIDE = ("raylet", "node")


class FaultContext(NamedTuple):
    """Facts and functions for faults.

    ``look``: the processes now. ``prefilled``: number of finished prefills (None: unknown). ``names``: Ray's node id
    -> name. ``restart``: starts a node again, by its name (None: not possible here). ``replicas``: of every pool.
    ``more``: number of requests that reuse the memory of expired blocks.
    """

    look: Callable[[], tuple[Sequence[NodeSurvey], Sequence[DeploymentProcess]]]
    prefilled: Callable[[], float | None]
    names: Callable[[], dict[str, str]]
    restart: Callable[[str], None] | None
    replicas: dict[Role, int]
    more: int


class NoTarget(Exception):
    """The target of a fault does not exist now."""


class Injector:
    """Makes faults. Call ``undo`` afterwards in any case, so that nothing stays stopped, slow, lossy or down."""

    def __init__(
        self, plan: FaultPlan, load: Load, node_actors: NodeActors, link: ShapedLink | None, context: FaultContext
    ) -> None:
        self.plan = plan
        self.load = load
        self.node_actors = node_actors
        self.link = link
        self.context = context
        self._stopped: dict[DeploymentProcess, tuple[int, int]] = {}
        self._link_touched = False

    def inject(self, due: DueFault) -> InjectedFault:
        """Make the fault now; returns the record of its acts. A PdlabError becomes the outcome ``failed``."""
        began_s = self.load.now_s()
        making = _FaultInProgress(self, due)
        outcome, detail = "injected", None
        try:
            making.prepare()
            began_s = self.load.now_s()
            for act in due.kind.acts:
                making.do(act)
        except NoTarget as why:
            outcome, detail = ("skipped" if not making.done else "failed"), str(why)
        except (PdlabError, OSError) as error:
            outcome, detail = "failed", " ".join(str(error).split())
        finally:
            if outcome != "injected":
                self.undo()
        return InjectedFault(
            number=due.number, kind=due.kind.name, planned_s=due.at_s, began_s=round(began_s, 3),
            ended_s=round(self.load.now_s(), 3), targets=tuple(making.named), acts=tuple(making.done),
            outcome=outcome, detail=detail, spared=due.kind.leaves_replicas(self.context.replicas),
        )  # fmt: skip

    def undo(self) -> None:
        """Continue stopped processes and restore the link. An unreachable process continues by itself later."""
        for member in list(self._stopped):
            with contextlib.suppress(ClusterError):
                self.continue_process(member)
            self._stopped.pop(member, None)
        if self.link is not None and self._link_touched:
            with contextlib.suppress(ClusterError):
                self.link.up()
            with contextlib.suppress(ClusterError):
                self.link.restore()
            if self.link.has_relay:
                with contextlib.suppress(ClusterError):
                    self.link.drop(0.0, self.node_actors.survey())
            self._link_touched = False

    def stop(self, member: DeploymentProcess, most_s: float) -> None:
        """Send SIGSTOP, after the start of a process that sends SIGCONT after ``most_s``.

        Raises NoTarget, ClusterError.
        """
        process = [(member.pid, member.started)]
        watcher = self.node_actors.call(member.node, "send_later", process, [(most_s, int(signal.SIGCONT))])
        self._stopped[member] = (watcher[0], watcher[1])
        if not self.node_actors.call(member.node, "send", process, int(signal.SIGSTOP)):
            raise NoTarget(f"process {member.pid} ended before SIGSTOP reached it")

    def continue_process(self, member: DeploymentProcess) -> None:
        """Send SIGCONT, and end the process that would send another one during a later stop."""
        self.node_actors.call(member.node, "send", [(member.pid, member.started)], int(signal.SIGCONT))
        watcher = self._stopped.pop(member, None)
        if watcher is not None:
            self.node_actors.call(member.node, "send", [watcher], int(signal.SIGKILL))

    def link_acts(self) -> ShapedLink:
        """The link; `undo` will restore it. Raises NoTarget without a link."""
        if self.link is None:
            raise NoTarget("there is no link between two hosts")
        self._link_touched = True
        return self.link


class _FaultInProgress:
    """One fault during its acts."""

    def __init__(self, injector: Injector, due: DueFault) -> None:
        self.injector = injector
        self.due = due
        self.plan = injector.plan
        self.done: list[str] = []
        self.named: list[str] = []
        self._chosen: dict[FaultTarget, DeploymentProcess] = {}
        self._surveys: Sequence[NodeSurvey] = ()
        self._prefilled_before: float | None = None
        self._node_name = ""

    def prepare(self) -> None:
        """Choose the processes. Raises NoTarget if one does not exist within ``recover_s``.

        A process may still be starting after an earlier fault, although requests already use other replicas.
        """
        names = self.injector.context.names()
        until_s = self.injector.load.now_s() + self.plan.recover_s
        self._surveys, members = self.injector.context.look()
        while self.injector.load.now_s() < until_s and any(
            choose(members, target, self.due.draw) is None for target in self.due.kind.targets
        ):
            self.injector.load.check()
            time.sleep(LOOK_AGAIN_S)
            self._surveys, members = self.injector.context.look()
        for target in self.due.kind.targets:
            chosen = choose(members, target, self.due.draw)
            if chosen is None:
                raise NoTarget(f"no {target.text} is there at this moment")
            self._chosen[target] = chosen
            self.named.append(
                f"whole node {names.get(chosen.node, chosen.node)}" if target.part == "node" else chosen.text(names)
            )
            if target.part in WIDE:
                self._node_name = names.get(chosen.node, "")
        if self.due.kind.needs_link:
            self.named.append("the link between the two hosts")
        if self.due.kind.disaggregated:
            self._prefilled_before = self.injector.context.prefilled()

    def do(self, act: FaultAction) -> None:
        """Do one act. Raises NoTarget, ClusterError, OSError."""
        began = self.injector.load.now_s()
        note = self._work_of(act)()
        self.done.append(f"{began:.2f} s {act.verb}{f' {act.target.text}' if act.target else ''}{note or ''}")

    def _work_of(self, act: FaultAction) -> Callable[[], str | None]:
        """The work of the act; it may return a note for the record."""
        link, load, plan = self.injector.link_acts, self.injector.load, self.plan
        work: dict[Verb, Callable[[], str | None]] = {
            "kill": lambda: self._kill(act),
            "stop": lambda: self._stop(act),
            "continue": lambda: self._continue(act),
            "restart": self._restart,
            "wait": lambda: time.sleep(plan.wait_s(act.wait)),
            "await_prefill": self._await_prefill,
            "link_down": lambda: link().down(plan.hold_s),
            "link_up": lambda: link().up(),
            "link_slow": lambda: link().slow(plan.link_mbit),
            "link_restore": lambda: link().restore(),
            "drop": lambda: link().drop(plan.drop_share, self._surveys),
            "drop_end": lambda: link().drop(0.0, self._surveys),
            "send_leaving": lambda: load.send_leaving(plan.leavers, self.due.kind.phase or ""),
            "await_chunks": self._await_chunks,
            "leave": self._leave,
            "send_more": self._send_more,
        }
        return work[act.verb]

    def _kill(self, act: FaultAction) -> None:
        member = self._of(act)
        if member.part == "raylet":
            self._later(act, member, [(PREPARATION_S, int(signal.SIGKILL))])
            self._confirm(member, (None,), ENDS_MOST_S)
        else:
            self._send(member, signal.SIGKILL)

    def _stop(self, act: FaultAction) -> None:
        member = self._of(act)
        if member.part == "raylet":
            # A stopped raylet may make its node unreachable, so SIGCONT is ordered beforehand.
            self._later(act, member, [(PREPARATION_S, int(signal.SIGSTOP)), (self.plan.hold_s, int(signal.SIGCONT))])
            # A shorter stop may be over before somebody looks.
            self._confirm(member, STOPPED, STOPS_MOST_S if self.plan.hold_s >= STOPS_MOST_S else 0.0)
            return
        acts = self.due.kind.acts
        waits = [PREFILL_MOST_S if each.verb == "await_prefill" else self.plan.wait_s(each.wait) for each in acts]
        self.injector.stop(member, sum(waits) + SAFETY_S)

    def _continue(self, act: FaultAction) -> None:
        member = self._of(act)
        if member.part != "raylet":
            self.injector.continue_process(member)

    def _restart(self) -> None:
        if self.injector.context.restart is None or not self._node_name:
            raise NoTarget("pdlab cannot start that node again")
        self.injector.context.restart(self._node_name)

    def _await_prefill(self) -> str:
        """Wait until the requests in flight have been prefilled: no prefill has finished for a while, or a limit.

        Raises NoTarget if none has finished within the limit. A count that is unknown, or that falls because an engine
        went, does not tell.
        """
        before = self._prefilled_before
        began = moved = time.monotonic()
        last, fell = before, False
        while True:
            time.sleep(POLL_S)
            now = time.monotonic()
            count = self.injector.context.prefilled()
            if count is not None and count != last:
                fell = fell or (last is not None and count < last)
                last, moved = count, now
            waited_s = now - began
            some = before is not None and last is not None and last > before
            still = waited_s >= PREFILL_LEAST_S and now - moved >= STILL_S
            if waited_s >= PREFILL_MOST_S or (some and (still or waited_s >= PREFILL_ENOUGH_S)):
                self._prefilled_before = last
                if before is None or last is None or fell:
                    return " (unknown prefills since)"
                if not some:
                    raise NoTarget(f"no prefill finished within {PREFILL_MOST_S:g} s")
                return f" ({last - before:g} prefills since)"

    def _await_chunks(self) -> str:
        """Wait until the leaving requests stream. Raises NoTarget if none does."""
        load = self.injector.load
        deadline = time.monotonic() + CHUNKS_MOST_S
        first = True
        while load.streaming < self.plan.leavers and load.leaving and time.monotonic() < deadline:
            if first and load.streaming:  # the first streams must not end before the last ones begin
                first, deadline = False, min(deadline, time.monotonic() + CHUNKS_MORE_S)
            time.sleep(0.002)
        if not load.streaming:
            raise NoTarget(f"no request of a leaving client streamed within {CHUNKS_MOST_S:g} s")
        return f" ({counted(load.streaming, 'stream')})"

    def _leave(self) -> str:
        """Let the clients leave. Raises NoTarget if all their requests had ended before."""
        load = self.injector.load
        load.leave()
        deadline = time.monotonic() + LEAVE_MOST_S
        while load.leaving and time.monotonic() < deadline:
            time.sleep(0.002)
        if not load.left and not load.leaving:
            raise NoTarget("all requests of leaving clients had ended before the clients left")
        return f" ({counted(load.left, 'client')})"

    def _send_more(self) -> str:
        self.injector.load.send_more(self.injector.context.more)
        return f" ({counted(self.injector.context.more, 'request')})"

    def _of(self, act: FaultAction) -> DeploymentProcess:
        assert act.target is not None
        return self._chosen[act.target]

    def _send(self, member: DeploymentProcess, number: signal.Signals) -> None:
        hit = self.injector.node_actors.call(member.node, "send", [(member.pid, member.started)], int(number))
        if not hit:
            raise NoTarget(f"process {member.pid} ended before {number.name} reached it")

    def _confirm(self, member: DeploymentProcess, right: tuple[str | None, ...], most_s: float) -> None:
        """Wait until a raylet has one of these states after a signal of `_later`, at most ``most_s`` (0: do not look).

        Its own node may be gone, so an actor of another node on the same machine looks. Without one, and without an
        answer, nothing is confirmed. Raises NoTarget if a raylet to stop has ended, ClusterError if the signal did
        nothing.
        """
        time.sleep(PREPARATION_S)
        space = next(each.space for each in self._surveys if each.node == member.node)
        beside = [each.node for each in self._surveys if each.space == space and each.node != member.node]
        until = time.monotonic() + most_s
        while beside and most_s:
            try:
                found = self._state(beside[0], member, timeout_s=STOPS_MOST_S)
            except ClusterError:
                return
            if found in right:
                return
            if found is None:
                raise NoTarget(f"process {member.pid} ended before a signal reached it")
            if time.monotonic() > until:
                raise ClusterError(f"process {member.pid} is in state {found} {most_s:g} s after the signal")
            time.sleep(POLL_S)

    def _state(self, node: str, member: DeploymentProcess, **limit: float) -> str | None:
        """The process's state letter, by the actor of that node; None: it has ended. Raises ClusterError."""
        (found,) = self.injector.node_actors.call(node, "states", [(member.pid, member.started)], **limit)
        return None if found is None else str(found)

    def _later(self, act: FaultAction, member: DeploymentProcess, signals: list[tuple[float, int]]) -> None:
        """Order signals to a raylet, or to its whole node. Raises NoTarget if the raylet has ended, ClusterError."""
        if self._state(member.node, member) is None:
            raise NoTarget(f"process {member.pid} ended before a signal reached it")
        processes = [(member.pid, member.started)]
        if act.target is not None and act.target.part == "node":
            survey = next(each for each in self._surveys if each.node == member.node)
            kills = int(signal.SIGKILL) in [number for _, number in signals]
            # This actor's own process is not stopped with its node, but it is killed with it.
            below = [pid for pid in survey.below(member.pid) if kills or pid != survey.own]
            processes += [(pid, int(survey.processes[pid]["started"])) for pid in below]
        self.injector.node_actors.call(member.node, "send_later", processes, signals)
