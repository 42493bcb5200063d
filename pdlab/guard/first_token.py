"""Decode's scheduler takes the first token that prefill sampled, together with the KV cache.

For the engine the token becomes the last token of the prompt, because vLLM's model runners accept no output tokens
with a new request. vLLM's scheduler continues a session the same way (``_update_request_as_session``). The client gets
it as the first token of the answer. The engine's first step computes the second one.
"""

from __future__ import annotations

from typing import Any

from pdlab.marks.engine_marks import FIRST_TOKEN

__all__ = ["FIRST_TOKEN", "has_first_token", "take"]


def has_first_token(request: Any) -> bool:
    """Whether a request has the token in its parameters and has not taken it yet."""
    return FIRST_TOKEN in (request.kv_transfer_params or ())


def take(scheduler: Any, request: Any) -> int | None:
    """Append the token to the prompt of a request and return it. The KV cache of the whole prompt must have arrived.

    None: the request continues without the token. There is no free KV block for it, or the request uses speculative
    decoding or a grammar, which start with decode's own first token.
    """
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
