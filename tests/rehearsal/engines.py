"""Simulated engines without Ray around them: a prefill and a decode engine in one process, called as by Ray's servers.

Run with a folder as argument; prints what came out as JSON. A process of its own, in which stand-ins take vLLM's place.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pdlab.rehearsal import stand_ins

stand_ins.at_start()

import ray  # noqa: E402
from ray import serve  # noqa: E402
from ray.llm._internal.serve.core.configs.openai_api_models import (  # noqa: E402
    ChatCompletionRequest,
    CompletionRequest,
)

from pdlab.core.catalog import require_shape  # noqa: E402
from pdlab.core.deployment import Deployment, parse_label  # noqa: E402
from pdlab.core.rehearsal import Rehearsal  # noqa: E402
from pdlab.rehearsal import engine as module  # noqa: E402
from pdlab.rehearsal.fake_cluster import ensure_tokenizer  # noqa: E402
from pdlab.rehearsal.metrics import EngineMetrics  # noqa: E402
from pdlab.rehearsal.spec import SPEC, EngineSpec, write_spec  # noqa: E402
from pdlab.sim.hardware import load_hardware  # noqa: E402

SLOW_DOWN = 4.0


class FakeMetrics(EngineMetrics):
    """Adds up what would be reported to Ray."""

    def __init__(self, replica: str) -> None:
        self.sums: dict[str, float] = {}
        self.use: list[float] = []
        self._counted: dict[str, float] = {}

    def count(self, name: str, value: float = 1.0) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + value

    def observe(self, name: str, value: float) -> None:
        self.count(f"{name}_count")
        self.count(f"{name}_sum", value)

    def kv_use(self, share: float) -> None:
        self.use.append(share)


async def started(
    folder: Path, role: str, label: str, node: str, number: int = 1, *, merged: bool = False, **arguments: Any
) -> Any:
    shape = require_shape("gpt-oss-120b")
    spec = EngineSpec(
        rehearsal=Rehearsal(slow_down=SLOW_DOWN, assume_merged=merged),
        role=role,
        hardware=load_hardware("h100-vllm-0.11"),
        shape=shape,
        deployment=Deployment(topology=parse_label(label), engine_kwargs=arguments),
        tokenizer=str(ensure_tokenizer(folder) / "tokenizer.json"),
        folder=str(folder / "s"),
        max_model_len=16384,
    )
    write_spec(spec, folder / f"{role}.json")
    os.environ[SPEC] = str(folder / f"{role}.json")
    replica = SimpleNamespace(replica_id=SimpleNamespace(unique_id=f"{role}-{number}"))
    serve.get_replica_context = lambda: replica
    ray.get_runtime_context = lambda: SimpleNamespace(get_node_id=lambda: node)
    vars(module)["EngineMetrics"] = FakeMetrics
    config = SimpleNamespace(
        model_id="m",
        engine_kwargs={"kv_transfer_config": {"engine_id": f"{role}-{number}-engine"}},
        setup_engine_backend=lambda: None,
    )
    one = module.SimulatedEngine(config)
    await one.start()
    return one


async def all_of(stream: Any) -> list[Any]:
    return [item if isinstance(item, str) else item.model_dump() async for item in stream]


async def through_both(prefill: Any, decode: Any, request: Any, *, chat: bool = False) -> list[Any]:
    """As Ray's PD server does: prefill for one token, its parameters to decode."""
    first = request.model_copy(deep=True)
    first.kv_transfer_params = {"do_remote_decode": True, "do_remote_prefill": False}
    first.max_tokens, first.stream = 1, False
    method = "chat" if chat else "completions"
    (answer,) = [item async for item in getattr(prefill, method)(first, None)]
    second = request.model_copy(deep=True)
    second.kv_transfer_params = json.loads(json.dumps(answer.kv_transfer_params))
    return await all_of(getattr(decode, method)(second, None))


async def main(folder: Path) -> dict[str, Any]:
    out: dict[str, Any] = {}
    label = "pd-spread-p1xtp4-d1xtp4"
    prefill = await started(folder, "prefill", label, "node-1")
    decode = await started(folder, "decode", label, "node-2")

    def completion(prompt: Any, **more: Any) -> Any:
        return CompletionRequest(**{"model": "m", "prompt": prompt, "max_tokens": 12, **more})

    detailed = {"logprobs": 5, "return_token_ids": True, "return_tokens_as_token_ids": True}
    words = "Item 1 has code 4711. " * 40
    out["alone"] = await all_of(prefill.completions(completion(words, **detailed), None))
    out["both"] = await through_both(prefill, decode, completion(words, **detailed))
    streamed = completion(words, stream=True, stream_options={"include_usage": True}, **detailed)
    out["streamed"] = await through_both(prefill, decode, streamed)
    out["other"] = await through_both(prefill, decode, completion(words + "x", **detailed))
    out["ids"] = await through_both(prefill, decode, completion([5, 6, 7], **detailed))
    chat = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "hi"}], max_completion_tokens=5)
    out["chat"] = await through_both(prefill, decode, chat, chat=True)
    out["two"] = await all_of(prefill.completions(completion([[5, 6, 7], [8, 9]], **detailed), None))
    out["choices"] = await all_of(prefill.completions(completion([5, 6, 7], n=2, temperature=1.0, **detailed), None))
    out["long"] = await all_of(prefill.completions(completion([1] * 16000, max_tokens=500), None))
    # Parameters of another request: what is answered is the other prompt's.
    first = completion("another prompt altogether")
    first.kv_transfer_params = {"do_remote_decode": True}
    (answer,) = [item async for item in prefill.completions(first, None)]
    mixed = completion(words, **detailed)
    mixed.kv_transfer_params = answer.kv_transfer_params
    out["mixed"] = await all_of(decode.completions(mixed, None))
    # More at once than a socket keeps messages for.
    several = [through_both(prefill, decode, completion([7, number, 9], max_tokens=1)) for number in range(40)]
    out["burst"] = [len(one) for one in await asyncio.gather(*several)]
    for _ in range(200):
        if not prefill._leases:
            break
        await asyncio.sleep(0.02)
    # A client that leaves between prefill and decode.
    first = completion(words)
    first.kv_transfer_params = {"do_remote_decode": True}
    (kept,) = [item async for item in prefill.completions(first, None)]
    await decode._engine_client.notify_kv_transfer_request_rejected("gone", kept.kv_transfer_params)
    # A client that leaves.
    leaving = decode.completions(completion(words, stream=True, max_tokens=2000), None)
    await leaving.__anext__()
    await leaving.aclose()
    await asyncio.sleep(0.1)
    out["held"] = [one.core.engines[0].held_tokens for one in (prefill, decode)]
    out["leases"] = len(prefill._leases)
    out["use"] = {name: [max(one.metrics.use), one.metrics.use[-1]] for name, one in (("p", prefill), ("d", decode))}
    out["sums"] = {"prefill": prefill.metrics.sums, "decode": decode.metrics.sums}
    # The engine that has the KV is gone.
    await prefill.shutdown()
    mixed.kv_transfer_params = answer.kv_transfer_params
    out["gone"] = await all_of(decode.completions(mixed, None))
    one, two = [await started(folder, "fluid", "pd-fluid-2xtp4", "node-1", number) for number in (1, 2)]
    several = [through_both(*(pair[:: 1 - 2 * (number % 2)]), completion([7, number, 9, *range(200)], **detailed))
               for pair in ((one, two),) for number in range(8)]  # fmt: skip
    out["fluid"] = await asyncio.gather(*several)
    out["fluid alone"] = [await all_of(one.completions(completion([7, number, 9, *range(200)], **detailed), None))
                          for number in range(8)]  # fmt: skip
    out["generated"] = [each.generated_tokens() for each in (one, two)]
    merged = await started(folder, "fluid", "pd-fluid-2xtp4", "node-1", 3, merged=True)
    out["scattered"] = [one.core.scattered, merged.core.scattered]
    telling = await started(folder, "collocated", "collocated-1xtp4", "node-1", enable_prompt_tokens_details=True)
    for name in ("first", "again"):
        out[name] = await all_of(telling.completions(completion(words), None))
    chat.stream, chat.return_token_ids = True, True
    chat.stream_options = {"include_usage": True}
    out["chat streamed"] = await all_of(telling.chat(chat, None))
    out["blocks"] = decode._engine_client.vllm_config.cache_config.num_gpu_blocks
    return out


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(Path(sys.argv[1])))))
