"""Ray's own routers for prefill replicas, without the replicas that a call must avoid.

Loaded in decode's replicas, where Ray has sent it by value: imports Ray and the standard library alone, and is a module
of its own because Ray takes back that the router's module travels so.
"""

from __future__ import annotations

import importlib
import random
from typing import Any

from pdlab.deploy.serving.ray_names import HASH_ROUTERS, ROUTERS, TURN_ROUTERS

_routers: Any = importlib.import_module(ROUTERS)
_by_session: Any = importlib.import_module(HASH_ROUTERS)
_in_turn: Any = importlib.import_module(TURN_ROUTERS)

ROUTE = "pdlab_route"


class FollowsRoute:
    """Mixed into a router of Ray. If a call has a route (`pdlab.deploy.serving.prefill_call.Route`), the router writes
    the chosen replica into it, and takes none of ``route.avoid``.
    """

    async def _choose_replica_for_request(self, pending_request: Any, *, is_retry: bool = False) -> Any:
        # Taken out of what is sent to the replica; Ray asks again with the same object where a replica has no room.
        route = pending_request.kwargs.pop(ROUTE, None) or getattr(pending_request, ROUTE, None)
        if route is None:
            return await super()._choose_replica_for_request(  # type: ignore[misc]
                pending_request, is_retry=is_retry
            )
        setattr(pending_request, ROUTE, route)
        route.replica = None  # of a choice before: that replica had died, or refused
        if route.avoid:
            replica = await self._another(route)
        else:
            replica = await super()._choose_replica_for_request(  # type: ignore[misc]
                pending_request, is_retry=is_retry
            )
        route.replica = replica.replica_id.unique_id
        return replica

    async def _another(self: Any, route: Any) -> Any:
        """One of the replicas that are not to be avoided, beside Ray's queue, whose first in line takes any replica.

        Raises LookupError where there is none, and then says so in the route."""
        attempt = 0
        while True:
            others = [r for r in self._replicas.values() if r.replica_id.unique_id not in route.avoid]
            if not others:
                route.no_other = True
                raise LookupError("there is no other replica")
            replica = await self._select_from_candidate_replicas(random.sample(others, min(2, len(others))), attempt)
            if replica is not None:
                return replica
            await self._backoff(attempt)
            attempt += 1


class PrefillRouter(FollowsRoute, _routers.PowerOfTwoChoicesRequestRouter):  # type: ignore[misc]
    """Power of two choices, as Ray's default."""


class PrefillBySession(FollowsRoute, _by_session.ConsistentHashRouter):  # type: ignore[misc]
    """The replica of the request's session."""


class PrefillInTurn(FollowsRoute, _in_turn.RoundRobinRouter):  # type: ignore[misc]
    """Each replica in turn."""
