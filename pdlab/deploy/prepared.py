"""A deployment prepared for its nodes, before anything is started: the dry run shows it, the launch submits it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from pdlab.core.catalog import ModelShape
from pdlab.core.deployment import Deployment
from pdlab.core.nodes import ClusterView, Placement
from pdlab.core.vllm_limits import check_experts_on_cpu, check_ports
from pdlab.core.workload import Workload
from pdlab.deploy import engine_memory
from pdlab.deploy.engine_memory import EngineMemory
from pdlab.deploy.pool_agreement import check_pools
from pdlab.deploy.serve_config import ServeApp, model_id, render
from pdlab.placement.place import cautions, place


@dataclass(frozen=True)
class Prepared:
    """``deployment`` placed on the nodes of ``view`` and rendered as ``app``.

    ``shape`` is None for a model whose config.json is not at hand; ``model_source`` is the Hugging Face id or the
    folder that the engines load. ``memory`` is of the pools for which it is known, for requests of ``workload``;
    ``cautions`` are warnings about the placement.
    """

    deployment: Deployment
    view: ClusterView
    shape: ModelShape | None
    model_source: str
    workload: Workload
    placement: Placement
    memory: tuple[EngineMemory, ...]
    cautions: tuple[str, ...]
    app: ServeApp

    @property
    def model_id(self) -> str:
        """The name that clients use."""
        return model_id(self.deployment, self.shape)

    def with_transport_of(self, deployment: Deployment) -> Prepared:
        """The same placement, rendered for ``deployment``, which differs only in the KV transfer."""
        app = render(deployment, self.placement, self.view, self.shape, self.model_source)
        return dataclasses.replace(self, deployment=deployment, app=app)


def prepare_deployment(
    deployment: Deployment, view: ClusterView, shape: ModelShape | None, model_source: str, workload: Workload
) -> Prepared:
    """Place, check and render ``deployment``. Raises PlacementError where it does not fit ``view``, UsageError where
    ports collide, pools differ in what they must have in common, an engine cannot hold a request, or CPUs cannot run
    what is asked for."""
    check_pools(deployment, shape, cpu=view.device == "cpu")
    placement = place(deployment, view)
    check_ports(deployment, placement)
    check_experts_on_cpu(deployment, shape, placement)
    return Prepared(
        deployment=deployment,
        view=view,
        shape=shape,
        model_source=model_source,
        workload=workload,
        placement=placement,
        memory=tuple(engine_memory.examine(deployment, shape, view, placement, workload)),
        cautions=tuple(cautions(deployment, placement, view)),
        app=render(deployment, placement, view, shape, model_source),
    )
