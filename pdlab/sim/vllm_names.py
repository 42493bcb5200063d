"""The parts of vLLM's internals that the simulator uses. A new version of vLLM may change them.

Name -> the module of vLLM that defines it. ``from pdlab.sim.vllm_names import NAME`` imports that module at that time.
A contract test imports each name.
"""

from __future__ import annotations

from pdlab.core.lazy_names import lazy_names

NAMES = {
    "KVConnectorBase_V1": "vllm.distributed.kv_transfer.kv_connector.v1.base",
    "KVConnectorMetadata": "vllm.distributed.kv_transfer.kv_connector.v1.base",
    "SupportsHMA": "vllm.distributed.kv_transfer.kv_connector.v1.base",
    "KVTransferConfig": "vllm.config",
    "EngineArgs": "vllm.engine.arg_utils",
    "SamplingParams": "vllm.sampling_params",
    "get_hash_fn_by_name": "vllm.utils.hashing",
    "get_kv_cache_groups": "vllm.v1.core.kv_cache_utils",
    "get_request_block_hasher": "vllm.v1.core.kv_cache_utils",
    "init_none_hash": "vllm.v1.core.kv_cache_utils",
    "resolve_kv_cache_block_sizes": "vllm.v1.core.kv_cache_utils",
    "FullAttentionSpec": "vllm.v1.kv_cache_interface",
    "KVCacheConfig": "vllm.v1.kv_cache_interface",
    "SlidingWindowSpec": "vllm.v1.kv_cache_interface",
    "KVConnectorOutput": "vllm.v1.outputs",
    "ModelRunnerOutput": "vllm.v1.outputs",
    "Request": "vllm.v1.request",
    "StructuredOutputManager": "vllm.v1.structured_output",
}

__getattr__ = lazy_names(__name__, NAMES)
