"""Ray's own routers for prefill replicas, without the replicas that a call must avoid.

Loaded in decode's replicas, where Ray has sent it by value: imports Ray, which modules of pdlab's own process do not.
"""

from __future__ import annotations

import importlib
import random
from typing import Any

from pdlab.deploy.serving.prefill_call import Route
from pdlab.deploy.serving.ray_names import HASH_ROUTERS, ROUTERS, TURN_ROUTERS

_routers: Any = importlib.import_module(ROUTERS)
_by_session: Any = importlib.import_module(HASH_ROUTERS)
_in_turn: Any = importlib.import_module(TURN_ROUTERS)


class FollowsRoute:
    """Mixed into a router of Ray. If a call has a route (`pdlab.deploy.serving.prefill_call.Route`), the router writes
    the chosen replica into it, and takes none of ``route.avoid``.
    """

    async def _choose_replica_for_request(self, pending_request: Any, *, is_retry: bool = False) -> Any:
        route = Route.of(pending_request)
        if route is not None and route.avoid:
            replica = await self._another(route)
        else:
            replica = await super()._choose_replica_for_request(  # type: ignore[misc]
                pending_request, is_retry=is_retry
            )
        if route is not None:
            route.replica = replica.replica_id.unique_id
        return replica

    async def _another(self: Any, route: Any) -> Any:
        """One of the replicas that are not to be avoided, beside Ray's queue, whose first in line takes any replica.
        Raises LookupError."""
        attempt = 0
        while True:
            others = [r for r in self._replicas.values() if r.replica_id.unique_id not in route.avoid]
            if not others:
                route.refuse()
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
