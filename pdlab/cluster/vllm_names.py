"""Name of the private module of vLLM that pdlab changes on local nodes. A contract test imports it."""

from __future__ import annotations

SIDE_CHANNEL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl.utils"
