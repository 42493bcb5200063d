"""The private modules of vLLM that engines are changed through: what a new version of vLLM may change.

Names only, no import: functions that are sent to replicas by value take the names with them. A contract test imports
each of them.
"""

from __future__ import annotations

ASYNC_LLM = "vllm.v1.engine.async_llm"
COMPLETION = "vllm.entrypoints.openai.completion.serving"
ENGINE_CORE = "vllm.v1.engine.core"
ENGINE_UTILS = "vllm.v1.engine.utils"
ENVIRONMENT = "vllm.envs"
HARMONY = "vllm.parser.harmony"
HARMONY_UTILS = "vllm.entrypoints.openai.parser.harmony_utils"
KV_OFFLOAD = "vllm.v1.kv_offload.base"
KV_OFFLOAD_CPU = "vllm.v1.kv_offload.cpu.spec"
PLATFORMS = "vllm.platforms"
RAY_METRICS = "vllm.v1.metrics.ray_wrappers"
RAY_UTILS = "vllm.v1.executor.ray_utils"
