"""The private modules and attributes of Ray that serving uses: what a new version of Ray may change.

Names only, no import: functions that are sent to replicas by value take the names with them. A contract test imports
each of them.
"""

from __future__ import annotations

from typing import Any

BUILDER = "ray.llm._internal.serve.core.server.builder"
CALLBACKS = "ray.llm._internal.common.callbacks.base"
COMMON = "ray.serve._private.common"
ENGINE_MODELS = "ray.llm._internal.serve.engines.vllm.vllm_models"
HASH_ROUTERS = "ray.serve.experimental.consistent_hash_router"
INGRESS = "ray.llm._internal.serve.core.ingress.builder"
INGRESS_UTILS = "ray.llm._internal.serve.core.ingress.utils"
MODELS = "ray.llm._internal.serve.core.configs.openai_api_models"
NIXL = "ray.llm._internal.serve.engines.vllm.kv_transfer.nixl"
PD = "ray.llm._internal.serve.serving_patterns.prefill_decode.pd_server"
RAYLET = "ray._raylet"
ROUTERS = "ray.serve._private.request_router.pow_2_router"
SERVER = "ray.llm._internal.serve.core.server.llm_server"
SERVER_UTILS = "ray.llm._internal.serve.utils.server_utils"
TURN_ROUTERS = "ray.serve.experimental.round_robin_router"
TELEMETRY = "ray._private.telemetry"
WORKER = "ray._private.worker"
NAMESPACE = "serve"  # of Ray Serve's actors


def bound_deployment(application: Any) -> Any:
    """The deployment at the top of a Serve application; its others are among the arguments."""
    return application._bound_deployment


def bind_class(application: Any, kind: type[Any]) -> None:
    """Make ``kind`` the class of the deployment at the top of a Serve application."""
    application._bound_deployment = bound_deployment(application).options(func_or_class=kind, _internal=True)
