"""The KV connector of simulated engines under vLLM's scheduler: the requests that wait for KV, and those that hold it.

vLLM loads this module by name (``kv_connector_module_path``) and uses only its scheduler side: there are no workers. It
passes the necessary reads to the executor with every step, as NIXL's connector does. The module imports vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pdlab.sim.vllm_names import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA

# In kv_transfer_params, as NIXL's connector names them.
FETCHES, IS_FETCHED = "do_remote_prefill", "do_remote_decode"


@dataclass
class KvReadMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Tokens of KV to read for each request that was given blocks for them in this step."""

    tokens: dict[str, int] = field(default_factory=dict)


class SimulatedConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """The scheduler's side. Decode reads all missing tokens of a prompt. Prefill keeps blocks until they were read."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._reads = KvReadMetadata()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens that come from another engine, and whether the request waits for them (WAITING_FOR_REMOTE_KVS)."""
        params = request.kv_transfer_params or {}
        missing = request.num_prompt_tokens - num_computed_tokens if params.get(FETCHES) else 0
        return (missing, True) if missing > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        params = request.kv_transfer_params or {}
        if params.get(FETCHES):
            self._reads.tokens[request.request_id] = num_external_tokens
            params[FETCHES] = False  # a request that is preempted later computes its prompt

    def build_connector_meta(self, scheduler_output: Any) -> KvReadMetadata:
        reads, self._reads = self._reads, KvReadMetadata()
        return reads

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Whether the blocks are kept until the executor reports that they were read."""
        return bool((request.kv_transfer_params or {}).get(IS_FETCHED)), None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    # The worker's side, of which there is none.

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def wait_for_layer_load(self, layer_name: str) -> None:
        raise NotImplementedError

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def wait_for_save(self) -> None:
        raise NotImplementedError
