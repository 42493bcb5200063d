"""A start of CPU engines with fewer processes. Runs inside Ray Serve replicas on CPU nodes, never in pdlab's own
process.

GPU nodes do not use it and therefore need no pdlab installed.
"""

from __future__ import annotations

import importlib
from typing import Any

from pdlab.cluster.priority import ANSWERING, set_niceness
from pdlab.deploy.cpu_engine import prefork
from pdlab.deploy.serving.ray_names import CALLBACKS, ENGINE_MODELS, PD, SERVER
from pdlab.deploy.serving.vllm_names import ENGINE_UTILS

PREWARM_RETRY_S = 0.5
_callbacks: Any = importlib.import_module(CALLBACKS)


class LocalCallback(_callbacks.CallbackBase):  # type: ignore[misc]
    """Leaves out the steps of a replica's start that have no use for a model in a local folder.

    The download task of the model folder and the usage-telemetry actor are each a process that
    imports vLLM again, and the engine waits for both. With one rank per engine the worker lives in
    the engine core's process (executor ``uni``), which Ray Serve LLM does not offer for CPU
    engines; it saves a third process per engine. The engine core is forked from a process that has
    imported vLLM (`pdlab.deploy.cpu_engine.prefork`). Decode looks for prefill every half second. The replica runs
    before the engine cores (`pdlab.cluster.priority`).
    """

    async def on_before_node_init(self) -> None:
        set_niceness(ANSWERING)
        self.ctx.run_init_node = False
        prefork.use_in(importlib.import_module(ENGINE_UTILS))
        server: Any = importlib.import_module(SERVER)
        server.push_telemetry_report_for_all_models = _no_telemetry
        pd_server: Any = importlib.import_module(PD)
        pd_server._PREWARM_RETRY_INTERVAL_S = PREWARM_RETRY_S
        kwargs = self.llm_config.engine_kwargs
        ranks = kwargs.get("tensor_parallel_size", 1) * kwargs.get("pipeline_parallel_size", 1)
        if ranks == 1 and kwargs.get("data_parallel_size", 1) == 1:
            models: Any = importlib.import_module(ENGINE_MODELS)
            models.EXECUTOR_BACKEND_MP = "uni"


def _no_telemetry(**_: Any) -> None:
    """Stands in for Ray's usage report."""
