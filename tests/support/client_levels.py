"""Levels as the load generator gets them, whose values no test means unless it gives them."""

from __future__ import annotations

from typing import Any

from pdlab.bench.client.protocol import ClientLevel

FIELDS: dict[str, Any] = {
    "name": "x", "base_url": "http://h", "model": "m", "tokenizer": "t", "input_tokens": 8, "output_tokens": 4,
    "num_requests": 9, "seed": 1,
}  # fmt: skip


def client_level(**given: Any) -> ClientLevel:
    return ClientLevel(**FIELDS | given)
