#!/usr/bin/env python3
"""What a request costs in CPU time outside the engines, step by step, as Ray Serve LLM does it and as pdlab does.

Both ways of a step in turn, in one process; needs Ray and vLLM, no GPU. `benchmarks/guard_cost.py` measures a whole
deployment.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pickle
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pdlab.core.deployment import RequestLimits  # noqa: E402
from pdlab.deploy.serving.builders import _sharing_ids  # noqa: E402
from pdlab.deploy.serving.guard import RequestRules, check_body  # noqa: E402
from pdlab.deploy.serving.ray_names import MODELS  # noqa: E402
from pdlab.deploy.serving.timeline import IDS_KEY, packed, unpacked  # noqa: E402

Steps = dict[str, tuple[Callable[[], Any], Callable[[], Any]]]


def steps(tokens: int) -> Steps:
    """Name -> the step as Ray does it, and as pdlab does."""
    models: Any = importlib.import_module(MODELS)
    vllm: Any = importlib.import_module("vllm.entrypoints.openai.completion.protocol")
    engine: Any = importlib.import_module("vllm.entrypoints.serve.engine.protocol")
    transfer: Any = importlib.import_module("ray.llm._internal.serve.engines.vllm.kv_transfer.base")
    backend = transfer.DefaultConnectorBackend(None)
    ids = [7919 * number % 200_000 for number in range(tokens)]
    request = models.CompletionRequest(model="m", prompt=ids, max_tokens=8)

    def copies(of: Callable[[Any], Any]) -> None:
        answer = models.CompletionResponse(model="m", choices=[], usage=engine.UsageInfo(), kv_transfer_params={})
        of(backend.prepare_prefill_request)(request=request, peer=None)
        of(backend.prepare_decode_request)(request=request, peer=None, prefill_response=answer)

    def answer(parameters: dict[str, Any], **of_ids: Any) -> Any:
        choice = vllm.CompletionResponseChoice(index=0, text="a", **of_ids)
        made = vllm.CompletionResponse(
            model="m", choices=[choice], usage=engine.UsageInfo(), kv_transfer_params=parameters
        )
        return pickle.loads(pickle.dumps(models.CompletionResponse(**made.model_dump())))

    def in_bytes() -> None:
        packed_ids = answer({IDS_KEY: (packed(ids), packed([1]))}).kv_transfer_params[IDS_KEY]
        unpacked(packed_ids[0])

    body = json.dumps({"model": "m", "prompt": ids}).encode()
    rules = RequestRules(**RequestLimits().model_dump(), tools=True)

    def checked() -> Any:
        return check_body(body, b"application/json", rules, "/v1/completions")

    return {
        "JSON of a prompt of ids, guarded": (lambda: (checked(), json.loads(body)), checked),
        "requests of prefill and decode, prompt of token ids": (
            lambda: copies(lambda prepare: prepare),
            lambda: copies(_sharing_ids),
        ),
        "prefill's answer with the ids of a text": (lambda: answer({}, prompt_token_ids=ids, token_ids=[1]), in_bytes),
        "prefill's answer to a prompt of ids": (
            lambda: answer({}, prompt_token_ids=ids, token_ids=[1]),
            lambda: answer({}),
        ),
    }


def cpu_ms(of: Callable[[], Any]) -> float:
    began = time.process_time()
    of()
    return 1e3 * (time.process_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="5000,32000", help="prompts of so many (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=30, help="both ways of a step in turn (default %(default)s)")
    args = parser.parse_args()
    print("| step | tokens | Ray, ms | pdlab, ms | ratio |")
    print("|---|---|---|---|---|")
    for tokens in map(int, args.tokens.split(",")):
        for name, (rays, ours) in steps(tokens).items():
            pairs = [(cpu_ms(rays), cpu_ms(ours)) for _ in range(args.rounds)]
            before, after = (statistics.median(times) for times in zip(*pairs, strict=True))
            print(f"| {name} | {tokens} | {before:.2f} | {after:.2f} | {after / before:.3f} |")


if __name__ == "__main__":
    main()
