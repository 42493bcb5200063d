"""Names of vLLM's internals that the guard uses. A new version of vLLM may change them; a contract test imports each.

`NAMES`: name -> module of vLLM. ``from pdlab.guard.vllm_names import NAME`` imports this module.
"""

from __future__ import annotations

import importlib
from typing import Any

_CONNECTORS = "vllm.distributed.kv_transfer.kv_connector.v1"
NAMES = {
    "KVConnectorRole": f"{_CONNECTORS}.base",
    "KVConnectorWorkerMetadata": f"{_CONNECTORS}.base",
    "MultiConnector": f"{_CONNECTORS}.multi_connector",
    "NixlBaseConnector": f"{_CONNECTORS}.nixl.connector",
    "NixlPullConnector": f"{_CONNECTORS}.nixl.connector",
    "NixlPullConnectorScheduler": f"{_CONNECTORS}.nixl.pull_scheduler",
    "NixlPullConnectorWorker": f"{_CONNECTORS}.nixl.pull_worker",
    "NixlKVConnectorStats": f"{_CONNECTORS}.nixl.stats",
    "NixlPromMetrics": f"{_CONNECTORS}.nixl.stats",
    "make_zmq_socket": f"{_CONNECTORS}.nixl.utils",
    "SpinCondition": "vllm.distributed.device_communicators.shm_broadcast",
    "AsyncScheduler": "vllm.v1.core.sched.async_scheduler",
    "Scheduler": "vllm.v1.core.sched.scheduler",
    "EngineCoreEventType": "vllm.v1.engine",
    "EngineCoreOutput": "vllm.v1.engine",
    "EngineCoreOutputs": "vllm.v1.engine",
    "create_metric_per_engine": "vllm.v1.metrics.utils",
    "KVConnectorOutput": "vllm.v1.outputs",
    "RequestStatus": "vllm.v1.request",
}


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__} names no {name} of vLLM")
    return getattr(importlib.import_module(NAMES[name]), name)
