"""A deployment prepared for its nodes, before anything is started: the dry run shows it, the launch submits it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from pdlab.core import defaults
from pdlab.core.catalog import ModelShape, encoder_not_counted, format_only_in_name
from pdlab.core.deployment import Deployment
from pdlab.core.errors import UsageError
from pdlab.core.files import cache_dir
from pdlab.core.nodes import ClusterView, Placement
from pdlab.core.request_lengths import held_workload
from pdlab.core.served_model import served_model, where_checked
from pdlab.core.vllm_limits import check_context, check_divisibility, check_experts_on_cpu, check_ports
from pdlab.core.workload import Workload
from pdlab.deploy import engine_memory
from pdlab.deploy.cpu_engine.tiny_model import tiny_model_folder
from pdlab.deploy.engine_memory import EngineMemory
from pdlab.deploy.options import LaunchRequest
from pdlab.deploy.pool_agreement import check_pools
from pdlab.deploy.serve_config import ServeApp, model_id, render
from pdlab.placement.place import cautions, place


@dataclass(frozen=True)
class CheckedModel:
    """What the engines of a deployment load. ``shape``: None for a model whose config.json is not at hand; ``source``:
    a Hugging Face id or a folder. ``warnings`` are of the model and the parallelism."""

    shape: ModelShape | None
    source: str
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Prepared:
    """``deployment`` placed on the nodes of ``view`` and rendered as ``app``.

    ``shape`` is None for a model whose config.json is not at hand; ``model_source`` is the Hugging Face id or the
    folder that the engines load. ``memory`` is of the pools for which it is known, for requests of ``workload``, which
    is as given, or as long as the engines accept;
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


def checked_model(request: LaunchRequest) -> CheckedModel:
    """The model of a launch, checked as far as that needs no nodes. Raises UsageError if no nodes can serve it so."""
    deployment = request.deployment
    shape, source = served_model(deployment)
    if request.local_nodes and not ((shape and shape.local) or (source and Path(source).is_dir())):
        raise UsageError(
            f"--local serves on this machine's CPUs, too little for {deployment.model}: "
            f"leave --model out ({defaults.LOCAL_MODEL}) or give a folder"
        )
    check_context(deployment, shape)
    warnings = [where_checked(deployment, shape)]
    if shape is not None:
        warnings += [format_only_in_name(shape), encoder_not_counted(shape)]
    warnings += check_divisibility(deployment, shape)
    if source is None:
        assert shape is not None
        source = str(tiny_model_folder(shape, cache_dir()))
    return CheckedModel(shape, source, tuple(text for text in warnings if text))


def prepared_launch(request: LaunchRequest, model: CheckedModel, view: ClusterView) -> Prepared:
    """`prepare_deployment` of a launch's model on the nodes of ``view``."""
    return prepare_deployment(request.deployment, view, model.shape, model.source, request.workload)


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
    # A given workload is refused where it is too long: a longer one is the default.
    workload = held_workload(deployment, shape, workload, cpu=view.device == "cpu")
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
