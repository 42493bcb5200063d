"""What decode's steps cost a request whose KV cache has arrived, as a deployment's flags have it."""

from __future__ import annotations

from typing import NamedTuple

from pdlab.core.deployment import Transport


class HandOver(NamedTuple):
    """Waits on a busy decode engine, in so many times the steps that it has in flight. Every step has ended by then.

    ``known``: from when its workers see the KV cache until its scheduler knows. ``first``: from then until the first
    token, which a step computes (1), or which prefill's is (0); another wait of 1 then ends with the second.
    """

    known: int
    first: int


VLLMS = HandOver(known=1, first=1)  # without flags


def hand_over_of(transport: Transport | None) -> HandOver:
    """The waits of vLLM's engine core with pdlab's KV guard: tests/contract/test_decode_steps.py finds them there in
    virtual time, with and without ``kv_poll_s`` and ``reuse_first_token``. Reads are looked for when a step is
    launched, and what is seen is told with that step's output, unless workers tell it in between."""
    tells = transport is not None and transport.kv_guard and transport.kv_poll_s > 0
    reuses = transport is not None and transport.kv_guard and transport.reuse_first_token
    return HandOver(known=0 if tells else VLLMS.known, first=0 if reuses else VLLMS.first)
