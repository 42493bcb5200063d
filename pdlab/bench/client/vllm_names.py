"""What the load generator takes of vLLM's internals, which a new version of vLLM may change.

Name -> the module of vLLM that defines it. ``from pdlab.bench.client.vllm_names import NAME`` imports that module at
that time. A contract test imports each name.
"""

from __future__ import annotations

from pdlab.core.lazy_names import lazy_names

BENCHMARK = "vllm.benchmarks.serve"
# Modules that vLLM's benchmark imports and a load generator has no use for, with what is taken from them: torch's
# compiler and LoRA layers, 3 of 10 seconds of imports (CPU time, measured on 2 cores, python -X importtime).
ENGINES_OWN = {"vllm.env_override": (), "vllm.lora.utils": ("get_adapter_absolute_path",)}
REQUESTS = "vllm.benchmarks.lib.endpoint_request_func"
NAMES = {
    "ASYNC_REQUEST_FUNCS": REQUESTS,
    "RequestFuncInput": REQUESTS,
    "RequestFuncOutput": REQUESTS,
    "StreamedResponseHandler": REQUESTS,
    "async_request_openai_completions": REQUESTS,
    "async_request_openai_chat_completions": REQUESTS,
    "TaskType": BENCHMARK,
    "benchmark": BENCHMARK,
    "RandomDataset": "vllm.benchmarks.datasets",
    "SampleRequest": "vllm.benchmarks.datasets",
    "gen_prompt_decode_to_target_len": "vllm.benchmarks.datasets.datasets",
    "get_tokenizer": "vllm.tokenizers",
    "freeze_gc_heap": "vllm.utils.gc_utils",
}

__getattr__ = lazy_names(__name__, NAMES)
