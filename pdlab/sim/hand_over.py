"""The waits of a request for decode's steps after its KV cache has arrived, by the deployment's flags."""

from __future__ import annotations

from typing import NamedTuple

from pdlab.core.deployment import Transport


class HandOver(NamedTuple):
    """Waits on a busy decode engine, as multiples of its steps in flight.

    ``known``: from the time when its workers see the KV cache until its scheduler can use it. ``first``: from then
    until the first token: 1 if a step computes it, 0 if it is prefill's token; the second token then comes after
    another wait of 1.
    """

    known: int
    first: int


VLLMS = HandOver(known=1, first=1)  # without flags


def hand_over_of(transport: Transport | None) -> HandOver:
    """The waits of vLLM's engine core with pdlab's KV guard. Source: tests/contract/test_decode_steps.py measures them
    in virtual time, with and without ``kv_poll_s`` and ``reuse_first_token``. Workers look for ended reads when a step
    is launched, and report them with that step's output. With ``kv_poll_s`` they also report them between steps."""
    tells = transport is not None and transport.kv_guard and transport.kv_poll_s > 0
    reuses = transport is not None and transport.kv_guard and transport.reuse_first_token
    return HandOver(known=0 if tells else VLLMS.known, first=0 if reuses else VLLMS.first)
