"""Prefill keeps KV cache in host memory, behind NIXL in MultiConnector: what it has only there reaches decode right."""

from __future__ import annotations

import random
import re
import time

from pdlab.deploy.metrics_page import read_pages, samples
from tests.live.conftest import Stack

PROMPT_TOKENS = 1500
# Room for one request of 8,192 tokens in either pool: what OTHERS prompts of 1,500 tokens push out of it.
SMALL_POOL = "kv_cache_memory_bytes=20000000"
OTHERS = 20


def loaded(stack: Stack) -> dict[str, float]:
    """Tokens by replica that came from a connector: NIXL's on decode, host memory's on prefill."""
    running = stack.running()
    counts = dict.fromkeys(("prefill", "decode"), 0.0)
    for page in read_pages(running.metrics_urls):
        for sample in samples(page, lambda name: name == "external_prefix_cache_hits"):
            if (pool := running.pools.get(sample.replica)) is not None:
                counts[pool] += sample.value
    return counts


def test_a_prompt_that_prefill_has_only_in_host_memory_is_answered_as_before(stack: Stack) -> None:
    done = stack.launch(
        "--pd-pack", "--kv-offload-gb", "0.2", "--max-model-len", "8192", "--engine-arg", SMALL_POOL
    )  # fmt: skip
    assert done.code == 0
    assert stack.running().manifest.canary.equal is True
    assert re.search(r"KV transfers: \d+ done, about [\d.]+ MB, 0 failed", done.text)
    rng = random.Random(1)

    def prompt(tokens: int) -> list[int]:
        return [rng.randrange(300, 1000) for _ in range(tokens)]

    wanted = prompt(PROMPT_TOKENS)
    first = stack.complete(wanted)
    for _ in range(OTHERS):
        stack.complete(prompt(PROMPT_TOKENS), tokens=1)
    time.sleep(3)
    before = loaded(stack)
    again = stack.complete(wanted)
    deadline = time.monotonic() + 60
    # Each engine's counters are told in their own time.
    while min((grown := {pool: tokens - before[pool] for pool, tokens in loaded(stack).items()}).values()) == 0:
        if time.monotonic() > deadline:
            break
        time.sleep(1)
    assert grown["prefill"] >= PROMPT_TOKENS - 64, "all but the last block"
    assert grown["decode"] >= PROMPT_TOKENS - 64, "decode had evicted it too"
    assert again == first
