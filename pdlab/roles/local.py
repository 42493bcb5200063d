"""Conditional disaggregation: which prompts the decoding engine prefills itself. Pure."""

from __future__ import annotations


def locally_below(prefill_tokens_per_s: float, running: float, queue_s: float, transfer_s: float) -> int:
    """Number of tokens below which the decoding engine should prefill a prompt itself.

    On the decoding engine a prefill stalls the ``running`` requests of the batch and its own request: it costs
    (running + 1) x tokens / rate request-seconds. A prefill engine needs the same time, after its queue (``queue_s``)
    and before the KV transfer (``transfer_s``). So the prompt stays if running x tokens / rate < queue_s + transfer_s.
    On an idle engine it always stays.
    """
    saved_s = max(queue_s, 0.0) + max(transfer_s, 0.0)
    return int(min(saved_s * prefill_tokens_per_s / max(running, 1.0), 2**31))
