"""The model of a deployment. Its weights may be in a bucket, or in a folder that only the nodes have."""

from __future__ import annotations

import contextlib
from pathlib import Path

from pdlab.core.catalog import ModelShape, ResolvedModel, require_shape, resolve_model, why_no_shape
from pdlab.core.deployment import Deployment
from pdlab.core.errors import UsageError
from pdlab.core.schema import is_yaml_path

# Addresses from which Ray Serve LLM downloads a model to each node (ray/llm/_internal/common/utils/cloud_utils.py).
BUCKETS = ("s3://", "gs://", "abfss://", "azure://")


def in_bucket(model: str) -> bool:
    """Whether the model's files are in a bucket."""
    return model.startswith(BUCKETS)


def not_on_this_machine(model: str) -> bool:
    """Whether only the nodes have, or download, the model's files."""
    try:
        return in_bucket(model) or (model.startswith("/") and not Path(model).exists() and not is_yaml_path(model))
    except (OSError, ValueError):
        return False  # not a path


def served_model(deployment: Deployment) -> ResolvedModel:
    """Shape and source of a deployment's model. Raises UsageError as `resolve_model`.

    For weights that this machine does not have, the shape is that of the engine argument ``hf_config_path``, else that
    of the model ``model_id``; None if neither gives a shape.
    """
    model = deployment.model
    if not not_on_this_machine(model):
        return resolve_model(model)
    named = (deployment.engine_kwargs.get("hf_config_path"), deployment.model_id)
    return ResolvedModel(next((shape for name in named if name and (shape := _shape(str(name)))), None), model)


def require_served_shape(deployment: Deployment) -> ModelShape:
    """The whole shape of a deployment's model. Raises UsageError if a part of it is unknown."""
    if not not_on_this_machine(deployment.model):
        return require_shape(deployment.model)
    shape = served_model(deployment).shape
    if shape is None:
        raise UsageError(f"--model {deployment.model}: {why_unknown_shape(deployment)}")
    return shape


def why_unknown_shape(deployment: Deployment) -> str:
    """Why `served_model` finds no shape, and the fix."""
    if not not_on_this_machine(deployment.model):
        return why_no_shape(deployment.model)
    return (
        "the weights are not on this machine: give --model-id a name of configs/models/ or a Hugging Face id, or "
        "--engine-arg hf_config_path=FOLDER with the model's config.json"
    )


def where_checked(deployment: Deployment, shape: ModelShape | None) -> str | None:
    """For weights that this machine does not have: a sentence about who checks them; None for other weights."""
    model = deployment.model
    if not not_on_this_machine(model):
        return None
    if in_bucket(model):
        where = f"{model}: Ray downloads the model on each node at the start; nothing checks before that it is there"
    else:
        where = f"{model}: this machine has no such folder; a launch checks that each node has it, with all its files"
    if shape is None:
        why = why_unknown_shape(deployment)
        where += f"; the model's shape is not known, so memory and parallelism are checked at the start only: {why}"
    return where


def _shape(name: str) -> ModelShape | None:
    with contextlib.suppress(UsageError):
        return resolve_model(name).shape
    return None
