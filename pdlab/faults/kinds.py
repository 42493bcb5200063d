"""Every kind of fault: its acts in order, and what a deployment needs for it. Pure.

A fault of an engine's processes has a name ACTION_ROLE_PART (``kill_prefill_engine``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from pdlab.core.commands import LAUNCH, PDLAB
from pdlab.core.errors import UsageError
from pdlab.core.text import choices

Role = Literal["prefill", "decode", "collocated", "fluid"]
Part = Literal["replica", "engine", "worker", "router", "board", "proxy", "balancer", "raylet", "node"]
Verb = Literal[
    "kill",  # SIGKILL
    "stop",  # SIGSTOP; the process continues by itself some seconds after `continue` was due
    "continue",  # SIGCONT
    "restart",  # start the node again, if this machine can
    "wait",
    "await_prefill",  # wait until prefill engines have answered, so that decode's reads are due
    "link_down", "link_up",
    "link_slow", "link_restore",
    "drop", "drop_end",
    "send_leaving",  # requests whose client will leave
    "await_chunks",  # wait until these requests stream
    "leave",  # their client closes the connections
    "send_more",  # ordinary requests in addition to the load
]  # fmt: skip
ROLES: tuple[Role, ...] = ("prefill", "decode", "collocated", "fluid")
PART_NAMES: dict[Part, str] = {
    "replica": "replica", "engine": "engine core", "worker": "TP worker", "router": "request router",
    "board": "board of the roles",
    "proxy": "Serve proxy", "balancer": "HAProxy process", "raylet": "raylet", "node": "whole node",
}  # fmt: skip
PARTS: tuple[Part, ...] = ("replica", "engine", "worker")
SHARED_PARTS: tuple[Part, ...] = ("router", "board", "proxy", "balancer", "raylet", "node")
READ_BEGINS_S = 2.0  # time until decode's first step after SIGCONT, on a busy machine


class FaultTarget(NamedTuple):
    """The processes that an act hits. ``role``: None for a part that the whole deployment shares."""

    part: Part
    role: Role | None = None

    @property
    def text(self) -> str:
        return f"{self.role} {PART_NAMES[self.part]}" if self.role else PART_NAMES[self.part]


class FaultAction(NamedTuple):
    """One act. ``wait`` (only of the verb ``wait``): seconds, or the plan's time ``hold`` or ``lease``."""

    verb: Verb
    target: FaultTarget | None = None
    wait: Literal["hold", "lease"] | float = 0.0


class FaultKind(NamedTuple):
    """A kind of fault. ``phase``: of the request when its client leaves. ``needs_link``: it needs two hosts with a
    link. ``needs_relay``: the link needs a delay."""

    name: str
    what: str
    acts: tuple[FaultAction, ...]
    phase: str | None = None
    needs_link: bool = False
    needs_relay: bool = False

    @property
    def targets(self) -> tuple[FaultTarget, ...]:
        """The targets of its acts, each once."""
        return tuple(dict.fromkeys(act.target for act in self.acts if act.target is not None))

    @property
    def disaggregated(self) -> bool:
        """Whether it needs separate prefill and decode engines."""
        return any(act.verb == "await_prefill" for act in self.acts)

    def leaves_replicas(self, replicas: dict[Role, int]) -> bool:
        """Whether every pool keeps a replica that the fault does not hit. ``replicas``: number of every pool."""
        hit = {target.role for target in self.targets}
        if not self.targets or any(target.part in SHARED_PARTS for target in self.targets) or self.phase:
            return False
        return all(count > 1 for role, count in replicas.items() if role in hit)


def _signals() -> Iterator[FaultKind]:
    targets = [*(FaultTarget(part, role) for role in ROLES for part in PARTS), *map(FaultTarget, SHARED_PARTS)]
    for target in targets:
        name = "_".join(filter(None, [target.role, target.part]))
        back = (_HOLD, FaultAction("restart", target)) if target.part in ("raylet", "node") else ()
        yield FaultKind(f"kill_{name}", f"kill -9 of a {target.text}", (FaultAction("kill", target), *back))
        acts = (FaultAction("stop", target), _HOLD, FaultAction("continue", target))
        yield FaultKind(f"stop_{name}", f"SIGSTOP of a {target.text}, SIGCONT later", acts)


def _wait(wait: Literal["hold", "lease"] | float) -> FaultAction:
    return FaultAction("wait", wait=wait)


_P, _D = FaultTarget("engine", "prefill"), FaultTarget("engine", "decode")
_STOP_P, _CONTINUE_P, _KILL_P = FaultAction("stop", _P), FaultAction("continue", _P), FaultAction("kill", _P)
_STOP_D, _CONTINUE_D = FaultAction("stop", _D), FaultAction("continue", _D)
_SEND, _LEAVE, _PREFILLED, _HOLD = (
    FaultAction("send_leaving"), FaultAction("leave"), FaultAction("await_prefill"), _wait("hold"),
)  # fmt: skip


def _composed() -> Iterator[FaultKind]:
    yield FaultKind(
        "kill_prefill_before_read",
        "kill -9 of a prefill engine core between its answer and decode's read of its KV blocks",
        (_STOP_D, _PREFILLED, _KILL_P, _wait(0.5), _CONTINUE_D),
    )
    yield FaultKind(
        "stop_prefill_before_read",
        "SIGSTOP of a prefill engine core between its answer and decode's read, SIGCONT later",
        (_STOP_D, _PREFILLED, _STOP_P, _CONTINUE_D, _HOLD, _CONTINUE_P),
    )
    yield FaultKind(
        "expire_before_read",
        "decode's engine core is stopped for longer than the lease of the KV blocks that it must read; other "
        "requests then take their memory",
        (_STOP_D, _PREFILLED, _wait("lease"), FaultAction("send_more"), _PREFILLED, _CONTINUE_D),
    )
    yield FaultKind(
        "leave_before_prefill",
        "clients leave before prefill has computed their prompts",
        (_STOP_P, _SEND, _wait(1.0), _LEAVE, _wait(0.5), _CONTINUE_P),
        phase="before prefill",
    )
    yield FaultKind(
        "leave_between",
        "clients leave between prefill's answer and decode's read",
        (_STOP_D, _SEND, _PREFILLED, _LEAVE, _wait(0.5), _CONTINUE_D),
        phase="between",
    )
    yield FaultKind(
        "leave_in_transfer",
        "clients leave while decode reads KV blocks of a stopped prefill engine core",
        (_STOP_D, _SEND, _PREFILLED, _STOP_P, _CONTINUE_D, _wait(READ_BEGINS_S), _LEAVE, _wait(0.5), _CONTINUE_P),
        phase="in transfer",
    )
    yield FaultKind(
        "leave_while_streaming",
        "clients leave after the first tokens of their answers",
        (_SEND, FaultAction("await_chunks"), _LEAVE),
        phase="while streaming",
    )
    yield FaultKind(
        "link_down",
        "the link between the two hosts goes down, and up again",
        (FaultAction("link_down"), _HOLD, FaultAction("link_up")),
        needs_link=True,
    )
    yield FaultKind(
        "link_slow",
        "the link between the two hosts gets slow, and as fast as before",
        (FaultAction("link_slow"), _HOLD, FaultAction("link_restore")),
        needs_link=True,
    )
    yield FaultKind(
        "relay_drop",
        "the relay that delays the link drops a share of the frames",
        (FaultAction("drop"), _HOLD, FaultAction("drop_end")),
        needs_link=True,
        needs_relay=True,
    )


KINDS: dict[str, FaultKind] = {kind.name: kind for kind in (*_composed(), *_signals())}


def kind_of(name: str) -> FaultKind:
    """The kind with that name. Raises UsageError with the nearest names."""
    if name not in KINDS:
        raise UsageError(f"fault {name!r} is not known; {choices(name, KINDS)}")
    return KINDS[name]


class DeploymentFeatures(NamedTuple):
    """Features of a deployment. ``parts``: role and part of every process found. ``replicas``: number of every pool.
    ``restarts``: this machine can start a killed node again. ``link``, ``relay``: between two hosts."""

    parts: frozenset[tuple[Role | None, Part]]
    replicas: dict[Role, int]
    restarts: bool = False
    link: bool = False
    relay: bool = False


def why_not(kind: FaultKind, possible: DeploymentFeatures) -> str | None:
    """Why a deployment cannot have a kind of fault; None if it can."""
    if kind.needs_link and not possible.link:
        return f"there is no link between two hosts here ({LAUNCH} --local --two-hosts)"
    if kind.needs_relay and not possible.relay:
        return f"the link has no relay: it has no delay ({PDLAB} two-hosts shape --delay-ms)"
    if kind.disaggregated and "prefill" not in possible.replicas:
        return "prefill and decode are not separate"
    for target in kind.targets:
        if target.role is not None and target.role not in possible.replicas:
            return f"the deployment has no {target.role} pool"
        if (target.role, target.part) not in possible.parts:
            return _missing(target)
    restarts = any(act.verb == "restart" for act in kind.acts)
    if restarts and not possible.restarts:
        return "pdlab can start that node again only on local nodes"
    return None


def _missing(target: FaultTarget) -> str:
    if target.part == "worker":
        return f"{target.role} engines have no separate worker process (TP 1: the engine core runs the worker)"
    if target.part == "balancer":
        return "no HAProxy runs here"
    if target.part in ("raylet", "node"):
        return "the only raylet is on the head node, and its end would end the cluster"
    if target.part == "board":
        return f"engines do not change roles here ({LAUNCH} --pd-fluid)"
    if target.part == "router":
        return "no request router or ingress replica runs here"
    return f"no {target.text} runs here"
