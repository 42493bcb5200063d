"""What vLLM makes of folders with a config.json: run as a program, it prints one JSON object a line.

Each model is built without weights, and its attention layers are asked for their KV cache. In a process of its own:
vLLM keeps its process groups for as long as the process is there.
"""

from __future__ import annotations

import json
import os
import sys


def main(folders: list[str]) -> None:
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR"}
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory, ensure_model_parallel_initialized
    from vllm.distributed import init_distributed_environment as init
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models import registry
    from vllm.utils.torch_utils import set_default_torch_dtype

    registry._run_in_subprocess = lambda of: of()  # each would import vLLM anew, for 10 s of CPU
    for folder in folders:
        arguments = EngineArgs(model=folder, skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True)
        config = arguments.create_engine_config()
        with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
            init(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
            ensure_model_parallel_initialized(1, 1)
            model = initialize_model(config)
            layers = config.compilation_config.static_forward_context.values()
            attention = [layer for layer in layers if isinstance(layer, AttentionLayerBase)]
            specs = [layer.get_kv_cache_spec(config) for layer in attention]
        # Biases and norms are vectors, as is what decides between experts; the numbers of a shape are of matrices.
        matrices = {name: p.numel() for name, p in model.named_parameters() if p.dim() > 1}
        found = {
            "context": config.model_config.max_model_len,
            "parameters": sum(count for name, count in matrices.items() if ".gate.weight" not in name),
            "bytes_per_token": [spec.page_size_bytes / spec.block_size for spec in specs],
            "windows": [getattr(spec, "sliding_window", None) for spec in specs],
        }
        print(json.dumps(found), flush=True)
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main(sys.argv[1:])
