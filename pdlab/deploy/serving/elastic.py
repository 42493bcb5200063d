"""A fluid pool whose number of engines changes: which engines are new and not warm yet, which will stop, and how many
Ray Serve runs.

The role board (`pdlab.deploy.serving.role_board`) decides, this module applies the decision. A new engine is *joining*
until it has made a first transfer to and from each of the others; the engines do these at the board's request. If the
number falls, Ray Serve chooses the replica that stops. The engine that it will probably choose gets no new work before
(*leaving*) and finishes its requests. Sent by value: imports the standard library, and Ray inside functions.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pdlab.deploy.serving.ray_names import COMMON, NAMESPACE

# How long the first transfer over a pair may take, and how long after it failed it is tried again.
WARM_S, WARM_AGAIN_S = 60.0, 10.0
# How often Ray Serve's controller is looked at while a number changes, and while none does.
MOVING_S, STEADY_S = 1.0, 5.0
ANSWER_S = 30.0
# After how long routers know that an engine leaves, and how long it may need to end what it has.
HEARD_S, LEAVES_S = 2.0, 600.0
CONTROLLER = "SERVE_CONTROLLER_ACTOR"  # the name of Ray Serve's actor
RUNNING, STOPPING = "RUNNING", "STOPPING"

Pair = tuple[str, str]
"""(engine that prefills, engine that decodes)."""


class EngineAdmission:
    """Decides which engines may take work. The first ``founders`` engines may at once, because the launch warms them
    (None: all may).
    """

    def __init__(self, founders: int | None) -> None:
        self._founders = founders or 0
        self._all = founders is None
        self._members: set[str] = set()
        self._done: set[Pair] = set()
        self._next_warm_s: dict[Pair, float] = {}  # when it may be asked for again

    def knew(self, roles: Mapping[str, str]) -> None:
        """An earlier board gave these roles: its engines may take work."""
        self._members |= {name for name, role in roles.items() if role != "joining"}
        self._founders = 0

    def joins(self, engine: str) -> bool:
        """Whether the engine may not take work yet."""
        return not (self._all or self._founders or engine in self._members)

    def look(self, present: Collection[str]) -> list[str]:
        """The engines that may take work from now on. ``present``: the engines that report."""
        if self._founders:
            self._members |= set(present)
            self._founders = 0 if len(present) >= self._founders else self._founders
            return []
        new = []
        for engine in sorted(each for each in present if self.joins(each)):
            if self._pairs(engine, present) <= self._done:
                self._members.add(engine)
                new.append(engine)
        return new

    def orders(self, engine: str, present: Collection[str], now_s: float) -> list[str]:
        """The engines from which ``engine`` must now make a first transfer, and report the result."""
        wanted = {pair for each in present if self.joins(each) for pair in self._pairs(each, present)} - self._done
        mine = sorted(pair for pair in wanted if pair[1] == engine and self._next_warm_s.get(pair, now_s) <= now_s)
        for pair in mine:
            if pair in self._next_warm_s:
                _log().warning("a first transfer from %s to %s is requested again", *pair)
            self._next_warm_s[pair] = now_s + WARM_S + WARM_AGAIN_S
        return [prefill for prefill, _ in mine]

    def transfers_ended(self, engine: str, outcomes: Mapping[str, str], now_s: float) -> None:
        """Results of the first transfers to ``engine``: the engine that prefilled -> the error, empty without one."""
        for prefill, error in outcomes.items():
            if not error:
                self._done.add((prefill, engine))
                continue
            self._next_warm_s[prefill, engine] = now_s + WARM_AGAIN_S
            text = "no first transfer from %s to %s: the new one of them takes no work yet (%s)"
            _log().warning(text, prefill, engine, error)

    def _pairs(self, engine: str, present: Collection[str]) -> set[Pair]:
        others = [each for each in present if each in self._members and each != engine]
        return {(engine, each) for each in others} | {(each, engine) for each in others}


@dataclass(frozen=True)
class Replica:
    """One replica of Ray Serve: its unique id, its state, the Ray node that it is on."""

    name: str
    state: str
    node: str


@dataclass(frozen=True)
class ReplicasOfPool:
    """What Ray Serve runs: ``target`` replicas of the engines' deployment; ``replicas`` of it, in the order in which
    they came to run; how many of ``others`` run on each node; ``head``: the head node."""

    target: int
    replicas: tuple[Replica, ...]
    others: Mapping[str, int]
    head: str


class ServesReplicas(Protocol):
    """The part of Ray Serve that runs replicas."""

    async def look(self) -> ReplicasOfPool:
        """The replicas that it runs now."""

    async def set_target(self, replicas: int) -> None:
        """Set the number of engines."""


class RayServe:
    """Ray Serve's controller: ``external_scaler_enabled`` applications have their numbers from outside."""

    def __init__(self, app: str, deployment: str) -> None:
        self.app, self.deployment = app, deployment
        self._controller: Any = None

    async def look(self) -> ReplicasOfPool:
        ray: Any = importlib.import_module("ray")
        details = await self._call("get_serve_instance_details")
        others: Counter[str] = Counter()
        for app, of_app in details["applications"].items():
            for name, deployment in of_app["deployments"].items():
                if (app, name) != (self.app, self.deployment):
                    others.update(str(each.get("node_id")) for each in _running(deployment["replicas"]))
        ours = details["applications"][self.app]["deployments"][self.deployment]
        nodes = await asyncio.to_thread(ray.nodes)
        head = next((each["NodeID"] for each in nodes if "node:__internal_head__" in each["Resources"]), "")
        replicas = tuple(
            Replica(each["replica_id"], value_of(each["state"]), str(each.get("node_id"))) for each in ours["replicas"]
        )
        return ReplicasOfPool(ours["target_num_replicas"], replicas, others, head)

    async def set_target(self, replicas: int) -> None:
        # In a thread: it takes seconds, in which engines and routers would wait for the board.
        common: Any = await asyncio.to_thread(importlib.import_module, COMMON)
        await self._call("update_deployment_replicas", common.DeploymentID(self.deployment, self.app), replicas)

    async def _call(self, method: str, *arguments: Any) -> Any:
        ray: Any = importlib.import_module("ray")
        if self._controller is None:
            self._controller = await asyncio.to_thread(ray.get_actor, CONTROLLER, namespace=NAMESPACE)
        try:
            return await asyncio.wait_for(getattr(self._controller, method).remote(*arguments), ANSWER_S)
        except ray.exceptions.RayActorError:
            self._controller = None
            raise


class ReplicaScaling:
    """Has Ray Serve run as many engines as are wanted, one step after the other. ``clock``: seconds."""

    def __init__(self, serves: ServesReplicas, clock: Callable[[], float]) -> None:
        self._serves = serves
        self._clock = clock
        self._looked_s = -math.inf
        self._moving = True
        self._target: int | None = None
        self._since_s: tuple[str, float] | None = None  # the engine that leaves next
        self.wanted: int | None = None
        self.leaving: frozenset[str] = frozenset()

    async def step(self, idle: Callable[[str], bool]) -> None:
        """Read Ray Serve's state if that is due, and set one engine more or fewer. ``idle``: whether an engine has no
        requests. Raises what Ray raises.
        """
        now_s = self._clock()
        moving = self._moving or self.wanted != self._target
        if now_s - self._looked_s < (MOVING_S if moving else STEADY_S):
            return
        self._looked_s = now_s
        served = await self._serves.look()
        if served.target != self._target:  # the first look, or somebody else has changed it
            self._target = self.wanted = served.target
        assert self.wanted is not None
        alive = [each for each in served.replicas if each.state != STOPPING]
        # An engine that Ray Serve no longer has may still report for a moment.
        leaving = {*self.leaving, *(each.name for each in served.replicas)} - {each.name for each in alive}
        self._moving = len(alive) != self.wanted or len(alive) < len(served.replicas)
        next_one = next_to_stop(served) if len(alive) > self.wanted else None
        if next_one is not None:
            leaving.add(next_one)
        if self._since_s is None or self._since_s[0] != next_one:
            self._since_s = None if next_one is None else (next_one, now_s)
        self.leaving = frozenset(leaving)
        if self.wanted > served.target:
            await self._set_target(served.target + 1)
        elif self.wanted < served.target:
            left_s = LEAVES_S if self._since_s is None else now_s - self._since_s[1]
            if left_s >= LEAVES_S or (left_s >= HEARD_S and next_one is not None and idle(next_one)):
                await self._set_target(served.target - 1)

    async def _set_target(self, replicas: int) -> None:
        await self._serves.set_target(replicas)
        self._target = replicas


def next_to_stop(served: ReplicasOfPool) -> str | None:
    """The running replica that Ray Serve stops if it must run one fewer. It begins with the node with the fewest
    replicas of all deployments (the head node comes last), and takes the newest replica there. None: it stops one that
    does not run yet.
    """
    alive = [each for each in served.replicas if each.state != STOPPING]
    if any(each.state != RUNNING for each in alive):
        return None
    on_node = Counter(dict(served.others))
    nodes = [each.node for each in alive]
    on_node.update(nodes)
    chosen = min(dict.fromkeys(nodes), key=lambda node: (node == served.head, on_node[node]), default=None)
    return next((each.name for each in reversed(alive) if each.node == chosen), None)


def _running(replicas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for each in replicas if value_of(each["state"]) == RUNNING]


def value_of(value: Any) -> str:
    """The value of a state, which Ray gives as a member of an enumeration or as its value."""
    return str(getattr(value, "value", value))


def _log() -> logging.Logger:
    return logging.getLogger("ray.serve")
