"""Routes requests to fluid engines: prompts to engines that prefill, clients' requests to engines that decode.

Loaded wherever a handle of the engines is, where Ray has sent it by value: imports Ray, which modules of pdlab's own
process do not.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import logging
import random
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

import ray
from ray import serve

from pdlab.deploy.serving.prefill_call import Route
from pdlab.deploy.serving.ray_names import NAMESPACE, ROUTERS
from pdlab.roles.messages import RoleNews
from pdlab.roles.prefixes import to_compute

_routers: Any = importlib.import_module(ROUTERS)

# The board answers within a second at the latest; one that does not is looked up anew.
ANSWER_S, AGAIN_S = 10.0, 0.2
# Roles that take no work (`pdlab.deploy.serving.role_board`): not warm yet, about to go, about to prefill.
IDLE = ("joining", "leaving", "draining")


class FluidRouter(_routers.PowerOfTwoChoicesRequestRouter):  # type: ignore[misc]
    """Roles and loads come from the role board (`pdlab.deploy.serving.role_board`), by long poll; while it is away, the
    last ones stay valid. A call with a route (`pdlab.deploy.serving.prefill_call.Route`) is a call of prefill.

    *Decode*: of two random engines the one with fewer requests to decode, or the engine of the request's session.
    *Prefill*: never the calling engine. Of two random engines the one with fewer waiting prompt tokens; but an engine
    on the caller's node, which has the shortest way for KV cache, if it has at most one such prompt more to do. If the
    route names the engines that have the prompt's beginning cached, the router takes one of those with most of it,
    chosen in the same way, if it finishes the rest no later; such a route also has the current queues. A role is no
    condition: without an engine of the wanted role, the router takes another one that is not joining, leaving or
    draining.
    """

    def initialize_state(self, *, board: str, prefill: int, by_session: bool = False) -> None:
        """``board``: name of the role board's actor. ``prefill``: until the board reports, this many engines, the first
        by id, prefill. ``by_session``: a session's requests are decoded by one engine as long as it decodes.
        """
        self._board = board
        self._by_session = by_session
        self._first_prefill = prefill
        self._known = RoleNews()
        self._sent: dict[tuple[str, int], int] = {}
        self._name = uuid.uuid4().hex
        self._following: asyncio.Task[None] | None = None
        try:
            self._own = serve.get_replica_context().replica_id.unique_id
        except Exception:  # a driver's handle
            self._own = None

    def update_replicas(self, replicas: list[Any]) -> None:
        super().update_replicas(replicas)
        self._follow()

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """Choose the replica that answers a client, for HAProxy."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        replica = self._to_decode(pending_request)
        return [] if replica is None else [[replica]]

    async def _choose_replica_for_request(self, pending_request: Any, *, is_retry: bool = False) -> Any:
        route = Route.of(pending_request)
        while not self._replicas:
            self._replicas_updated_event.clear()
            await self._replicas_updated_event.wait()
        if route is None:
            return self._to_decode(pending_request)
        replica = self._to_prefill(route)
        route.replica = replica.replica_id.unique_id
        return replica

    def _to_decode(self, pending_request: Any) -> Any:
        self._follow()
        session = pending_request.metadata.session_id if self._by_session and pending_request is not None else ""
        engines = self._with_role("decode", frozenset())
        if not engines:
            return None
        lighter = partial(self._lighter, engines, lambda each: self._load(each, 1))
        chosen = self._of_session(engines, session) if session else lighter()
        self._count(chosen, 1, 1)
        return chosen

    def _to_prefill(self, route: Any) -> Any:
        """Raises LookupError where there is no other engine."""
        self._follow()
        avoid = route.avoid | {self._own}
        engines = self._with_role("prefill", avoid)
        if route.only is not None:
            engines = [each for each in self._replicas.values() if each.replica_id.unique_id == route.only]
        if not engines:
            route.refuse()

        def load(replica: Any) -> int:
            waiting: int | None = route.waiting.get(replica.replica_id.unique_id)
            return self._load(replica, 0) if waiting is None else waiting

        def cached(replica: Any) -> int:
            tokens: int = route.cached.get(replica.replica_id.unique_id, 0)
            return tokens

        def work(replica: Any) -> int:
            return to_compute(route.tokens, cached(replica))

        chosen = self._lighter_or_near(engines, route.tokens, load)
        if most := max(map(cached, engines)):
            holders = [each for each in engines if cached(each) == most]
            holder = self._lighter_or_near(holders, work(holders[0]), load)
            if load(holder) + work(holder) <= load(chosen) + work(chosen):
                chosen = holder
        self._count(chosen, 0, work(chosen))
        return chosen

    def _of_session(self, engines: list[Any], session: str) -> Any:
        """By rendezvous hashing (D. Thaler, C. Ravishankar, 1998): an engine that comes or goes moves its own sessions
        alone, and all routers agree."""

        def score(replica: Any) -> bytes:
            return hashlib.blake2b(f"{replica.replica_id.unique_id} {session}".encode()).digest()

        return max(engines, key=score)

    def _lighter_or_near(self, engines: list[Any], tokens: int, load: Callable[[Any], int]) -> Any:
        """Who prefills so many tokens, wherever they are cached."""
        chosen = self._lighter(engines, load)
        near = [each for each in engines if each.node_id == self._self_node_id]
        if near and chosen not in near:
            nearest = self._lighter(near, load)
            if load(nearest) <= load(chosen) + tokens:
                return nearest
        return chosen

    def _lighter(self, engines: list[Any], load: Callable[[Any], int]) -> Any:
        """Of two at random: loads are a moment old, and all routers would send to the one that was lightest of all."""
        return min(random.sample(engines, min(2, len(engines))), key=load)

    def _load(self, replica: Any, kind: int) -> int:
        """``kind``: 0: prompt tokens that wait, 1: requests that it decodes; those sent since its report are added."""
        name = replica.replica_id.unique_id
        known: int = self._known.loads.get(name, (0, 0))[kind]
        return known + self._sent.get((name, kind), 0)

    def _count(self, replica: Any, kind: int, amount: int) -> None:
        sent = replica.replica_id.unique_id, kind
        self._sent[sent] = self._sent.get(sent, 0) + amount

    def _with_role(self, role: str, avoid: frozenset[Any]) -> list[Any]:
        """The engines with that role; where there are none, those that may do it."""
        engines = [each for each in self._replicas.values() if each.replica_id.unique_id not in avoid]
        roles = self._known.roles
        if not roles:
            ordered = sorted(each.replica_id.unique_id for each in self._replicas.values())
            first = max(1, min(self._first_prefill, len(ordered) - 1))
            roles = {name: "prefill" if place < first else "decode" for place, name in enumerate(ordered)}
        with_role = [each for each in engines if roles.get(each.replica_id.unique_id) == role]
        return with_role or [e for e in engines if roles.get(e.replica_id.unique_id) not in IDLE] or engines

    def _follow(self) -> None:
        if self._following is None or self._following.done():
            self._following = asyncio.get_running_loop().create_task(self._take_news())

    async def _take_news(self) -> None:
        while ray.is_initialized():  # else a driver has let go of its cluster, and asking for an actor would start one
            try:
                board = await asyncio.to_thread(ray.get_actor, self._board, namespace=NAMESPACE)
                while True:
                    news = await asyncio.wait_for(board.follow.remote(self._known.fields, self._name), ANSWER_S)
                    self._known = RoleNews(**news)
                    self._sent.clear()
            except asyncio.CancelledError:
                raise
            except Exception as error:
                logging.getLogger("ray.serve").debug("the role board does not answer: %r", error)
                await asyncio.sleep(AGAIN_S)
