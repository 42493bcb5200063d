"""Configurations that others publish (llm-d, Dynamo, KubeRay, Ray, InferenceX, vLLM recipes), as dry runs.

Each is rendered with its memory known, or refused with a next step. The models are config.json files with the published
numbers; what the flags cannot say of a configuration is said in the table.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from pdlab.cli import launch

FP8 = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}
NVFP4 = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
_DENSE = {"torch_dtype": "bfloat16", "tie_word_embeddings": False}
LLAMA_70B = {
    **_DENSE, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 80,
    "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip
LLAMA_8B = LLAMA_70B | {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
}
QWEN3_32B = {
    **_DENSE, **FP8, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 64,
    "hidden_size": 5120, "intermediate_size": 25600, "num_attention_heads": 64, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
}  # fmt: skip
QWEN3_235B = {
    **_DENSE, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 94,
    "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 64, "num_key_value_heads": 4,
    "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1536,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 151936, "max_position_embeddings": 40960,
}  # fmt: skip
MINIMAX_M2 = {
    **_DENSE, **FP8, "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "num_hidden_layers": 62,
    "hidden_size": 3072, "intermediate_size": 1536, "num_attention_heads": 48, "num_key_value_heads": 8,
    "head_dim": 128, "num_local_experts": 256, "num_experts_per_tok": 8, "vocab_size": 200064,
    "max_position_embeddings": 196608,
}  # fmt: skip
DEEPSEEK = {
    **_DENSE, **FP8, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_hidden_layers": 61,
    "hidden_size": 7168, "intermediate_size": 18432, "num_attention_heads": 128, "num_key_value_heads": 128,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1,
    "first_k_dense_replace": 3, "vocab_size": 129280, "max_position_embeddings": 163840,
}  # fmt: skip
KIMI_K2 = DEEPSEEK | {
    "model_type": "kimi_k2", "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384,
    "first_k_dense_replace": 1, "vocab_size": 163840, "max_position_embeddings": 131072,
}  # fmt: skip
GLM_46 = {
    **_DENSE, **FP8, "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "num_hidden_layers": 92,
    "hidden_size": 5120, "intermediate_size": 12288, "num_attention_heads": 96, "num_key_value_heads": 8,
    "head_dim": 128, "n_routed_experts": 160, "num_experts_per_tok": 8, "moe_intermediate_size": 1536,
    "n_shared_experts": 1, "first_k_dense_replace": 3, "vocab_size": 151552, "max_position_embeddings": 202752,
}  # fmt: skip
LLAMA4_SCOUT = {
    "architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4",
    "text_config": {
        **_DENSE, "model_type": "llama4_text", "num_hidden_layers": 48, "hidden_size": 5120, "intermediate_size": 8192,
        "intermediate_size_mlp": 16384, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
        "num_local_experts": 16, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1,
        "attention_chunk_size": 8192, "vocab_size": 202048, "max_position_embeddings": 10485760,
    },
}  # fmt: skip
QWEN3_NEXT = QWEN3_235B | {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_hidden_layers": 48, "hidden_size": 2048,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "num_experts": 512,
    "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "full_attention_interval": 4, "linear_num_value_heads": 32, "linear_num_key_heads": 16,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262144,
}  # fmt: skip
DEEPSEEK_V4 = DEEPSEEK | {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "compress_ratios": [4, 128],
}
EAGLE3 = LLAMA_8B | {
    "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "hidden_size": 2880, "vocab_size": 201088,
    "draft_vocab_size": 32000, "head_dim": 64, "num_attention_heads": 64, "intermediate_size": 17280,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama-70b": LLAMA_70B,
    "llama-70b-fp8": LLAMA_70B | FP8,
    "llama-70b-nvfp4": LLAMA_70B | NVFP4,
    "llama-8b": LLAMA_8B,
    "qwen3-32b-fp8": QWEN3_32B,
    "qwen3-235b": QWEN3_235B,
    "qwen3-235b-fp8": QWEN3_235B | FP8,
    "qwen3-next": QWEN3_NEXT,
    "minimax-m2": MINIMAX_M2,
    "deepseek-v3-0324": DEEPSEEK,
    "deepseek-nvfp4": DEEPSEEK | NVFP4,
    "deepseek-v4": DEEPSEEK_V4,
    "kimi-k2": KIMI_K2,
    "glm-4.6-fp8": GLM_46,
    "llama4-scout": LLAMA4_SCOUT,
    "mistral-large-3": DEEPSEEK | {"architectures": ["MistralLarge3ForCausalLM"], "n_routed_experts": 128,
                                   "num_experts_per_tok": 4, "moe_intermediate_size": 4096, "vocab_size": 131072},
    "eagle3": EAGLE3,
}  # fmt: skip
# GPU type, GPUs of a node, NIC, NICs of a node.
NODES: dict[str, tuple[str, int, str, int]] = {
    "p5": ("H100", 8, "efa", 32),
    "p5en": ("H200", 8, "efa", 16),
    "nd-h100": ("H100", 8, "infiniband", 8),
    "h200-ib": ("H200", 8, "infiniband", 8),
    "h100-roce": ("H100", 8, "roce", 8),
    "p4d": ("A100-40G", 8, "efa", 4),
    "a100": ("A100-80G", 8, "infiniband", 8),
    "b200": ("B200", 8, "efa", 8),
    "gb200": ("GB200", 4, "efa", 4),
    "mi300x": ("MI300X", 8, "roce", 8),
    "l4": ("L4", 1, "ethernet", 1),
    "l40s": ("L40S", 8, "roce", 4),
    "rtx4090": ("RTX4090", 8, "ethernet", 1),
    "h100-2": ("H100", 2, "ethernet", 1),
    "h100-4": ("H100", 4, "infiniband", 4),
    "a3-mega": ("H100", 8, "tcpxo", 8),
}


class Public(NamedTuple):
    """``nodes``: names of `NODES`, as the cluster has them. ``refused``: a part of the sentence; ``unknown``: what
    no config.json and no driver could tell, and memory therefore is not known. ``shows``: what the dry run has."""

    id: str
    flags: str
    nodes: str
    model: str | None = None
    refused: str | None = None
    unknown: str | None = None
    shows: tuple[str, ...] = ()


def of_recipe(*names: str) -> str:
    return "".join(f" --env {name}" for name in names)


DEEP_EP = of_recipe(
    *("VLLM_USE_DEEP_GEMM=1", "VLLM_ALL2ALL_BACKEND=deepep_low_latency", "NVIDIA_GDRCOPY=enabled"),
    *("NVSHMEM_REMOTE_TRANSPORT=ibgda", "NVSHMEM_IB_ENABLE_IBGDA=true", "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=eth0"),
    *("GLOO_SOCKET_IFNAME=eth0", "NCCL_SOCKET_IFNAME=eth0"),
)
MTP = "speculative_config={method: mtp, num_speculative_tokens: 1}"
EAGLE = "speculative_config={method: eagle3, model: MODEL/eagle3, num_speculative_tokens: 3}"
ROWS = [
    Public("01", "--pd-pack --p-num 8 --p-tp 1 --d-num 2 --d-tp 4", "p5 p5", refused="does not fit"),
    Public("01-spread", "--pd-spread --p-num 8 --p-tp 1 --d-num 2 --d-tp 4", "p5 p5", shows=("EFA/SRD",)),
    Public("02", "--pd-spread --p-num 8 --p-tp 1 --d-num 2 --d-tp 4 --use-libfabric", "p5 p5", shows=("LIBFABRIC",)),
    Public("03", "--pd-pack --p-num 4 --p-tp 1 --d-num 4 --d-tp 1 --max-model-len 131072 --engine-arg "
           f"kv_cache_dtype=fp8 --engine-arg '{EAGLE}'" + of_recipe(
               "VLLM_ATTENTION_BACKEND=FLASHINFER", "CUDA_SCALE_LAUNCH_QUEUES=4x", "TORCH_CUDA_ARCH_LIST=9.0"), "p5en"),
    Public("04", "--pd-pack --p-tp 4 --d-tp 4", "nd-h100", shows=("NVLink",)),
    Public("05", "--pd-spread --p-tp 8 --d-tp 8 --env UCX_NET_DEVICES=mlx5_0:1 --env NCCL_SOCKET_IFNAME=eth0",
           "nd-h100 nd-h100", "llama-70b-fp8", shows=("InfiniBand RDMA", "NCCL_SOCKET_IFNAME: eth0")),
    Public("06", "--pd-pack --p-num 2 --p-tp 2 --d-tp 4", "a100", "qwen3-32b-fp8"),
    Public("07", "--pd-spread --p-tp 1 --p-dp 16 --p-ep --d-tp 1 --d-dp 32 --d-ep --max-model-len 16384" + DEEP_EP,
           "p5en p5en p5en p5en p5en p5en", "deepseek-v3-0324", shows=("VLLM_ALL2ALL_BACKEND",)),
    Public("07b", "--pd-spread --p-tp 1 --p-dp 16 --p-ep --d-tp 1 --d-dp 32 --d-ep --max-model-len 16384 "
           "--model deepseek-v3", "p5en p5en p5en p5en p5en p5en"),
    Public("08", "--pd-spread --p-tp 1 --p-dp 16 --p-ep --d-tp 1 --d-dp 16 --d-ep --max-model-len 16384" + DEEP_EP,
           "h200-ib h200-ib h200-ib h200-ib", "deepseek-v3-0324"),
    Public("09", "--pd-spread --p-tp 4 --d-tp 4 --kv-offload-gb 100", "p5 p5", shows=("MultiConnector",)),
    Public("09b", "--pd-spread --p-tp 4 --d-tp 4 --kv-connector LMCacheConnectorV1", "p5 p5",
           shows=("LMCacheConnectorV1",)),
    Public("09c", "--pd-spread --p-tp 4 --d-tp 4 --engine-arg kv_offloading_size=100", "p5 p5",
           refused="--kv-offload-gb"),
    Public("10", "--collocated --num 8 --tp 4 --engine-arg kv_cache_dtype=fp8", "p5 p5 p5 p5"),
    Public("11", "--collocated --tp 8", "p5en", "llama-70b"),
    Public("11b", "--collocated --num 4 --tp 1 --max-model-len 8192", "l4 l4 l4 l4", "llama-8b",
           refused="gpu_memory_utilization"),
    Public("12", "--collocated --num 2 --tp 4", "p5", "qwen3-235b-fp8"),
    Public("12b", "--collocated --tp 8", "p5", "qwen3-235b-fp8"),
    Public("12c", "--collocated --tp 16", "p5 p5", "qwen3-235b"),
    Public("13", "--collocated --tp 4 --ep", "p5en", "minimax-m2"),
    Public("13b", "--collocated --tp 8", "p5en", "minimax-m2"),
    Public("14", f"--pd-pack --p-tp 4 --d-tp 4 --engine-arg '{MTP}'", "p5en", "qwen3-next",
           unknown="linear-attention state"),
    Public("15", "--pd-spread --p-tp 8 --d-tp 8", "p5en p5en", "llama4-scout", shows=("max_model_len: 16384",)),
    Public("15-length", "--pd-spread --p-tp 8 --d-tp 8 --max-model-len 131072", "p5en p5en", "llama4-scout"),
    Public("16", "--collocated --tp 8 --pp 2", "p5en p5en", "kimi-k2"),
    Public("17", "--pd-spread --p-tp 8 --d-tp 8", "h100-roce h100-roce", "glm-4.6-fp8", shows=("RoCE RDMA",)),
    Public("18", "--pd-spread --p-tp 1 --p-dp 8 --p-ep --d-tp 1 --d-dp 8 --d-ep --max-model-len 16384",
           "gb200 gb200 gb200 gb200", "deepseek-nvfp4", shows=("NVLink domain rack",)),
    Public("19", "--pd-spread --p-tp 4 --d-tp 4", "mi300x mi300x", shows=("RoCE RDMA",)),
    Public("20", "--pd-pack --p-tp 1 --d-tp 1 --model gpt-oss-20b", "h100-2"),
    Public("20b", "--pd-spread --p-tp 4 --d-tp 4 --model gpt-oss-20b", "h100-4 h100-4"),
    Public("20c", "--collocated --tp 2", "p4d", refused="cannot hold"),
    Public("20d", "--collocated --tp 4", "p4d"),
    Public("20e", "--pd-pack --p-tp 2 --d-tp 2 --model gpt-oss-20b", "rtx4090", shows=("PCIe",)),
    Public("21", "--pd-pack --p-tp 4 --d-tp 4 --model gpt-oss-20b", "l40s", shows=("PCIe",)),
    Public("22", "--pd-spread --p-tp 4 --d-tp 4 --p-gpu H100 --d-gpu H200", "h200-ib nd-h100"),
    Public("22b", "--pd-spread --p-tp 4 --d-tp 4 --model gpt-oss-20b", "nd-h100 l40s", shows=("TCP",)),
    Public("23", "--pd-spread --p-tp 4 --d-tp 4", "a3-mega a3-mega", shows=("TCP",)),
    Public("24", "--pd-spread --p-pp 2 --p-tp 4 --d-tp 4", "p5 p5", refused="--p-pp 1"),
    Public("25", "--collocated --tp 2", "b200", "llama-70b-nvfp4"),
    Public("26", "--collocated --tp 8 --engine-arg decode_context_parallel_size=8", "p5en", "deepseek-v3-0324"),
    Public("27", "--pd-spread --p-tp 4 --d-tp 4 --model s3://models/gpt-oss-120b --model-id gpt-oss-120b", "p5 p5",
           shows=("s3://models/gpt-oss-120b",)),
    Public("27b", "--pd-spread --p-tp 4 --d-tp 4 --model /model-cache/gpt-oss-120b --model-id gpt-oss-120b", "p5 p5"),
    Public("28", "--collocated --tp 4 --engine-arg enable_lora=true --engine-arg lora_modules=[]", "p5",
           refused="lora"),
    Public("29", "--collocated --tp 8 --max-model-len 16384", "h200-ib", "mistral-large-3"),
    Public("30", "--collocated --tp 4 --engine-arg distributed_executor_backend=mp", "p5", refused="leave it out"),
    Public("31", "--collocated --tp 6", "p5", "qwen3-235b-fp8", refused="64 attention heads"),
    Public("32", "--pd-spread --p-tp 8 --d-tp 4", "p5 p5", "qwen3-235b-fp8", refused="KV heads"),
    Public("33", f"--pd-spread --p-tp 1 --p-dp 8 --p-ep --d-tp 8 --engine-arg '{MTP}'" + DEEP_EP, "b200 b200",
           "deepseek-v4", unknown="compress"),
    Public("34", "--collocated --tp 4 --env VLLM_MXFP4_USE_MARLIN=1", "nd-h100", shows=("VLLM_MXFP4_USE_MARLIN",)),
    Public("35", "--pd-spread --p-tp 1 --p-dp 16 --p-ep --d-tp 1 --d-dp 16 --d-ep --max-model-len 16384" + DEEP_EP,
           "h200-ib h200-ib h200-ib h200-ib", "deepseek-v3-0324"),
    Public("35b", "--collocated --tp 1 --dp 8 --ep --engine-arg data_parallel_size_local=8", "h200-ib",
           "deepseek-v3-0324", refused="--dp"),
    Public("36", "--collocated --tp 8 --pp 2 --engine-arg decode_context_parallel_size=8", "p5en p5en", "kimi-k2"),
    Public("37", "--pd-spread --p-tp 4 --d-tp 4", "h100-4 h100-4"),
    Public("38", "--pd-spread --p-tp 8 --d-tp 8", "p5en p5en", "llama-70b", shows=("EFA/SRD",)),
    Public("39", f"--pd-spread --p-tp 4 --d-tp 4 --d-engine-arg '{MTP}'", "p5 p5",
           refused="speculative_config"),
    Public("39b", "--pd-spread --p-tp 4 --d-tp 4 --p-engine-arg kv_cache_dtype=fp8", "p5 p5", refused="kv_cache_dtype"),
    Public("40", "--collocated --tp 4 --env HF_TOKEN=secret", "p5", refused="name only"),
    Public("41", "--pd-pack --p-tp 4 --d-tp 4", "mi300x", shows=("Infinity Fabric",)),
]  # fmt: skip


def cluster_file(folder: Path, names: str) -> str:
    nodes = []
    for number, name in enumerate(names.split(), 1):
        gpu_type, gpus, nic, count = NODES[name]
        node: dict[str, Any] = {"id": f"node-{number}", "gpu_type": gpu_type, "gpus": gpus, "cpus": 24 * gpus}
        node |= {"nic": {"kind": nic, "count": count, "gbit_per_s": 100}, "head": number == 1}
        node |= {"labels": {"pdlab/node": f"node-{number}"}}
        nodes.append(node | ({"nvlink_domain": "rack"} if name == "gb200" else {}))
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump({"name": "theirs", "nodes": nodes}))
    return str(file)


def words(row: Public, folder: Path) -> list[str]:
    def model(name: str) -> str:
        path = folder / name
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(MODELS[name]))
        return str(path)

    flags = [re.sub(r"MODEL/([\w.-]+)", lambda found: model(found[1]), word) for word in shlex.split(row.flags)]
    if row.model:
        flags += ["--model", model(row.model)]
    return [*flags, "--cluster", cluster_file(folder, row.nodes), "--dry-run"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_it_is_planned_with_its_memory_or_refused_with_a_next_step(
    row: Public, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code = launch.main(words(row, tmp_path))
    shown = capsys.readouterr()
    if row.refused is not None:
        assert code == 2 and row.refused.lower() in shown.err.splitlines()[-1].lower(), shown
        assert len([line for line in shown.err.splitlines() if line.startswith("error")]) == 1
        return
    assert code == 0, shown.err
    unknown = re.findall(r"not known.*", shown.out)
    if row.unknown is None:
        assert unknown == [] and "weights, GB each" in shown.out
    else:
        assert any(row.unknown in line for line in unknown), unknown
    assert all(part in shown.out for part in row.shows), shown.out


def test_the_decoding_nodes_are_those_of_the_type_that_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the order of the nodes."""
    for order, prefill in (("h200-ib nd-h100", "node-2"), ("nd-h100 h200-ib", "node-1")):
        row = Public("22", "--pd-spread --p-tp 4 --d-tp 4 --p-gpu H100 --d-gpu H200", order)
        assert launch.main(words(row, tmp_path)) == 0
        shown = capsys.readouterr()
        assert re.search(rf"prefill 0 +{prefill}", shown.out)
        assert shown.err == "", "nothing is warned of that was asked for"
