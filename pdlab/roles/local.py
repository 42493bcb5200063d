"""Which prompts are prefilled where they are decoded (conditional disaggregation). Pure."""

from __future__ import annotations


def locally_below(prefill_tokens_per_s: float, running: float, queue_s: float, transfer_s: float) -> int:
    """Tokens below which a prompt is better prefilled by the engine that decodes it.

    There it stalls each of the ``running`` requests of the batch, and itself, for as long as it takes: (running + 1) x
    tokens / rate request-seconds. On a prefill engine it takes as long for itself, and waits for others before
    (``queue_s``) and for its KV to move behind (``transfer_s``). So it stays while running x tokens / rate is less
    than queue_s + transfer_s; on an idle engine always.
    """
    saved_s = max(queue_s, 0.0) + max(transfer_s, 0.0)
    return int(min(saved_s * prefill_tokens_per_s / max(running, 1.0), 2**31))
