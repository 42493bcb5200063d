"""Engine arguments that vLLM or Ray refuses only once engines run: between pools, beside KV transfer, on Ray's GPUs.

vLLM 0.29 hashes what two engines must have in common and refuses a KV transfer between engines whose hashes differ
(nixl/metadata.py, compute_nixl_compatibility_hash), at their first handshake, without the name of what differs.
tests/contract/test_pool_agreement.py compares the tables with that function of the installed vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdlab.core.catalog import ModelShape
from pdlab.core.deployment import Deployment
from pdlab.core.errors import UsageError
from pdlab.core.hybrid_kv import TURNED_OFF, is_hybrid
from pdlab.core.nodes import Role
from pdlab.deploy.serve_config import engine_kwargs

Arguments = Mapping[str, Any]

# Factor of vLLM's hash -> the engine arguments that decide it; none: both pools always have the same.
HANDSHAKE_FACTORS: dict[str, tuple[str, ...]] = {
    "vllm_version": (),
    "nixl_connector_version": (),
    "model": (),
    "dtype": ("dtype",),
    "num_kv_heads": ("hf_overrides", "hf_config_path", "revision"),
    "head_size": ("hf_overrides", "hf_config_path", "revision"),
    "num_hidden_layers": ("hf_overrides", "hf_config_path", "revision"),
    "attn_backend_name": ("attention_backend",),
    "cache_dtype": ("kv_cache_dtype",),
    "is_hma_enabled": (TURNED_OFF,),
    "speculative_config": ("speculative_config",),
    "transfer_mode": (),
}
# Of a draft model, the factors that vLLM hashes; the last is of the draft model's own files.
SPECULATIVE_FACTORS = (
    *("method", "model", "revision", "code_revision", "parallel_drafting", "kv_cache_dtype"),
    "auxiliary_layer_ids",
)
# Speculative methods that have no KV cache of their own: vLLM does not hash them, and no layer is added.
WITHOUT_KV_CACHE = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
SAME_DTYPE = {"half": "float16", "float": "float32"}


def check_pools(deployment: Deployment, shape: ModelShape | None, *, cpu: bool) -> None:
    """Raises UsageError for engine arguments of ``deployment`` that fail once its engines run.

    ``cpu``: its engines run on CPUs. The arguments are those that the engines get, the model's own included.
    """
    arguments = {role: engine_kwargs(deployment, role, shape, cpu=cpu) for role in deployment.pools}
    for role, of_pool in arguments.items():
        _check_one(deployment, role, of_pool, cpu=cpu)
    if "prefill" in arguments:
        _check_pair(arguments["prefill"], arguments["decode"])
        _check_block_sizes(deployment, arguments["prefill"], arguments["decode"], shape)


def _check_one(deployment: Deployment, role: Role, arguments: Arguments, *, cpu: bool) -> None:
    """What one pool cannot have, whatever the other one has."""
    size = arguments.get("kv_offloading_size")
    if size is not None and arguments.get("kv_transfer_config"):
        raise UsageError(
            f"engine argument kv_offloading_size={size} ({role}): vLLM then replaces the KV connector of this "
            "deployment; leave it out"
            + ("" if deployment.decode_bench else f", and give --kv-offload-gb {float(size) * 2**30 / 1e9:.4g}")
        )
    allocator = (deployment.env_of(role).get("PYTORCH_CUDA_ALLOC_CONF") or "").replace(" ", "")
    if (
        arguments.get("kv_transfer_config")
        and "expandable_segments:True" in allocator
        and not arguments.get("enable_cumem_allocator")
        and not arguments.get("enable_sleep_mode")
    ):
        raise UsageError(
            f"PYTORCH_CUDA_ALLOC_CONF={allocator} ({role}): memory that a KV connector has registered would be mapped "
            "again, and vLLM refuses to start; leave expandable_segments:True out, or add --engine-arg "
            "enable_cumem_allocator=true"
        )
    backend, rays = arguments.get("distributed_executor_backend"), "mp" if cpu else "ray"
    if backend not in (None, rays):
        raise UsageError(
            f"engine argument distributed_executor_backend={backend} ({role}): Ray Serve LLM runs engines on "
            f"{'CPUs' if cpu else 'GPUs'} with {rays} only; leave it out"
        )


def _check_pair(prefill: Arguments, decode: Arguments) -> None:
    """What vLLM's handshake compares, by the arguments that decide it."""
    for name in dict.fromkeys(name for names in HANDSHAKE_FACTORS.values() for name in names):
        ours, theirs = handshake_value(name, prefill), handshake_value(name, decode)
        if ours != theirs:
            raise UsageError(
                f"engine argument {name}: prefill has {_shown(ours)}, decode has {_shown(theirs)}; vLLM refuses KV "
                f"transfer between engines that differ in it: give both pools the same, --engine-arg {name}=VALUE"
            )


def handshake_value(name: str, arguments: Arguments) -> Any:
    """The argument's part of vLLM's hash, if it is known without vLLM; None: vLLM chooses it."""
    value = arguments.get(name)
    if name == TURNED_OFF:  # a connector that does not support the manager turns it off too
        return not is_hybrid(arguments)
    if name == "attention_backend":
        config = arguments.get("attention_config")
        value = value or (config.get("backend") if isinstance(config, dict) else None)
        return None if value is None else str(value).upper()
    if name == "speculative_config":
        return _draft_for_kv(arguments)
    if name in ("dtype", "kv_cache_dtype"):
        return SAME_DTYPE.get(str(value), str(value)) if value not in (None, "auto") else "auto"
    return value or None


def speculation(arguments: Arguments) -> dict[str, Any]:
    """The arguments for speculative decoding, short spellings included; empty: there is none."""
    given = arguments.get("speculative_config")
    short = {"method": arguments.get("spec_method"), "model": arguments.get("spec_model")}
    short = {name: value for name, value in short.items() if value is not None}
    return {**short, **(given if isinstance(given, dict) else {})}


def _draft_for_kv(arguments: Arguments) -> dict[str, Any] | None:
    """The draft model as far as it matters for a KV transfer; None: there is none with a KV cache."""
    config = speculation(arguments)
    method = config.get("method")
    if not config or method in WITHOUT_KV_CACHE:
        return None
    known = {name: config[name] for name in SPECULATIVE_FACTORS if config.get(name)}
    if isinstance(method, str) and method.endswith("_mtp"):
        known["method"] = "mtp"  # vLLM's own name for all of them
    known["kv_cache_dtype"] = config.get("kv_cache_dtype") or handshake_value("kv_cache_dtype", arguments)
    return known


def _check_block_sizes(deployment: Deployment, prefill: Arguments, decode: Arguments, shape: ModelShape | None) -> None:
    """vLLM's handshake asserts that decode's KV blocks are whole multiples of prefill's (kv_connector/utils.py,
    block_size_ratio), and the same where prefill has the larger TP (nixl/base_worker.py)."""
    given = [pool.get("block_size") for pool in (prefill, decode)]
    ours, theirs = (size or (shape.kv_block_tokens if shape else None) for size in given)
    if given[0] == given[1] or ours == theirs:
        return
    pools = deployment.pools
    if ours is None or theirs is None:
        rule = "vLLM's own choice is not known for this model"
    elif int(theirs) % int(ours):
        rule = "vLLM transfers into blocks of decode that are whole multiples of prefill's"
    elif pools["prefill"].tp > pools["decode"].tp:
        rule = "with a prefill TP above decode's vLLM transfers between blocks of one size only"
    else:
        return
    raise UsageError(
        f"engine argument block_size: prefill has {_shown(given[0])}, decode has {_shown(given[1])}; {rule}: give both "
        "pools the same, --engine-arg block_size=N"
    )


def _shown(value: Any) -> str:
    if value in (None, "auto"):
        return "vLLM's default"
    return str(value).lower() if isinstance(value, bool) else f"{value}"
