"""The names of the folders in which the levels of tried engine settings are."""

from __future__ import annotations

from collections.abc import Mapping

SHORT = {
    "max_num_batched_tokens": "batched",
    "max_num_seqs": "seqs",
    "enable_chunked_prefill": "chunked",
    "enable_prefix_caching": "cached",
}
NAMED = 24  # letters of a deployment's name in that of a candidate


def candidate_name(of: str, settings: Mapping[str, bool | int]) -> str:
    """``collocated-4xtp2+batched2048+seqs64``; ``...+as-launched`` of no settings."""
    words = [f"{SHORT[knob]}{int(value)}" for knob, value in settings.items()] or ["as-launched"]
    return "+".join([of[:NAMED], *words])
