"""Ray's request routers, without replicas: what they choose between and for."""

from __future__ import annotations

from typing import Any

from contract.conftest import quietly

from pdlab.deploy.serving import prefill_call

ROUTERS = "ray.serve._private.request_router"


class Replica:
    """Stands for Ray's RunningReplica. ``length`` of its queue; ``probes``: how often a router has read it."""

    def __init__(self, name: str, *, node: str = "n", length: int = 0) -> None:
        self.replica_id = quietly("ray.serve._private.common").ReplicaID(unique_id=name, deployment_id=_deployment())
        self.length, self.max_ongoing_requests, self.probes = length, 10, 0
        self.node_id, self.availability_zone = node, None
        self.multiplexed_model_ids: set[str] = set()

    async def get_queue_len(self, *, deadline_s: float) -> int:
        self.probes += 1
        return self.length


def new_router(module: str, kind: str, **options: Any) -> Any:
    """A router of `pdlab.deploy.serving` for a handle of a replica; its replicas are the caller's to give."""
    return getattr(quietly(f"pdlab.deploy.serving.{module}"), kind)(
        deployment_id=_deployment(),
        handle_source=quietly("ray.serve._private.common").DeploymentHandleSource.REPLICA,
        **options,
    )


def pending(route: prefill_call.Route | None = None, session: str = "") -> Any:
    """A request that waits for a replica; of pdlab's own calls with their route."""
    metadata = quietly("ray.serve._private.common").RequestMetadata(
        request_id="r", internal_request_id="i", session_id=session
    )
    kwargs = {} if route is None else {prefill_call.ROUTE: route}
    return quietly(f"{ROUTERS}.common").PendingRequest(args=["a prompt"], kwargs=kwargs, metadata=metadata)


def _deployment() -> Any:
    return quietly("ray.serve._private.common").DeploymentID(name="Engines:m")
