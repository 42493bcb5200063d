"""Prefill's first token, taken by decode's scheduler together with the KV cache that it was sampled from.

To the engine the token becomes the prompt's last, as vLLM itself goes on in a session (``_update_request_as_session``
of its scheduler): its runners take no answered tokens with a new request. To the client it is the answer's first, so
that the engine's first step computes the second.
"""

from __future__ import annotations

from typing import Any

# The key in vLLM's KV-transfer parameters of the token that prefill has sampled, where decode would take no other.
FIRST_TOKEN = "pdlab_first_token"


def carries(request: Any) -> bool:
    """Whether a request came with the token, and has not taken it."""
    return FIRST_TOKEN in (request.kv_transfer_params or ())


def take(scheduler: Any, request: Any) -> int | None:
    """The token of a request all of whose prompt's KV cache has arrived, and which goes on behind it from now on; None:
    it goes on without, for there is no room for the token's KV cache, or guessed tokens and grammars begin with
    decode's own."""
    token: int | None = request.kv_transfer_params.pop(FIRST_TOKEN, None)
    if token is None or request.num_output_tokens or request.max_tokens < 2 or request.prompt_token_ids is None:
        return None
    if not request.num_computed_tokens == request.num_tokens == request.num_prompt_tokens:
        return None
    if request.use_structured_output or scheduler.num_spec_tokens:
        return None
    reserved = scheduler._inflight_prefill_reserved_blocks()
    manager = scheduler.kv_cache_manager
    if manager.allocate_slots(request, 1, delay_cache_blocks=True, reserved_blocks=reserved) is None:
        return None
    request.prompt_token_ids = [*request.prompt_token_ids, token]
    request._all_token_ids.append(token)
    request.num_prompt_tokens += 1
    request.max_tokens -= 1
    request.update_block_hashes()
    return token
