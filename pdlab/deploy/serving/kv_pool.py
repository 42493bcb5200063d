"""Exports the size of an engine's KV pool as a counter, which stays readable.

vLLM sets it once, when the engine has started, as a gauge. Ray's pages show a gauge only for two exports after it was
set; counters stay. Runs in Ray Serve's replicas, sent there by value: imports only the standard library.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

COUNTER = "pdlab_kv_pool_tokens"


class CountsPoolTokens:
    """Mixed into Ray's engine servers: a started one counts the tokens of its KV pool up in Ray's metrics, once.

    ``kv_pool_tokens``: those tokens (None: unknown). ``caches_prefixes``: whether the engine looks for a prompt's
    beginning in the pool. ``keeps_ends_alone``: for layers with a sliding window it keeps only the ends of prompts."""

    kv_pool_tokens: int | None = None
    caches_prefixes = True
    keeps_ends_alone = False

    async def start(self) -> None:
        await super().start()  # type: ignore[misc]
        try:
            config = self.engine._engine_client.vllm_config  # type: ignore[attr-defined]
            cache = config.cache_config
            self.kv_pool_tokens = cache.num_gpu_blocks * cache.block_size
            self.caches_prefixes = bool(getattr(cache, "enable_prefix_caching", True))
            self._pool_tokens = _count_up(self.kv_pool_tokens)
            self.keeps_ends_alone = keeps_ends_alone(config)
        except Exception as error:  # another vLLM or Ray: the size stays unknown, and the engine serves all the same
            logging.getLogger("ray.serve").warning("the size of the KV pool is not exported: %r", error)


def keeps_ends_alone(config: Any) -> bool:
    """Whether vLLM keeps the windows of a prompt's layers sparsely: they have a group of their own, and vLLM is not
    set to keep every one (``prefix_cache_retention_interval`` None)."""
    kinds = getattr(config.model_config.hf_text_config, "layer_types", None) or ()
    if not any("sliding" in kind for kind in kinds) or config.scheduler_config.disable_hybrid_kv_cache_manager:
        return False
    return getattr(config.cache_config, "prefix_cache_retention_interval", None) is not None


def _count_up(tokens: int) -> Any:
    """The counter, which must live as long as what it has counted is to be shown."""
    serve: Any = importlib.import_module("ray.serve")
    metrics: Any = importlib.import_module("ray.util.metrics")
    counter = metrics.Counter(
        COUNTER, description="Tokens that the KV pool holds.", tag_keys=("ReplicaId", "deployment")
    )
    context = serve.get_replica_context()
    counter.inc(tokens, tags={"ReplicaId": context.replica_id.unique_id, "deployment": context.deployment})
    return counter
