"""The bounds on hits of engines that prefill and decode by turns, against vLLM's own schedulers, which do both."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from contract.test_hit_oracle import BLOCK, FULL, HYBRID, SHAPE, PromptIds, conversations, interleaved

from pdlab.bench.client.protocol import ComputedTokens
from pdlab.bench.hit_bounds import SentPrompts, least_tokens, most_tokens
from pdlab.core.deployment import Pool
from pdlab.sim.vllm_engine import FETCHES, IS_FETCHED, VllmEngine
from pdlab.sim.vllm_scheduler import scheduler_parts
from pdlab.traffic.prompts import TrafficPrompts
from pdlab.traffic.requests import TrafficRequest

pytestmark = pytest.mark.usefixtures("vllm_scheduling", "import_warnings_aside")

ENGINES = 3
ROOMY, SMALL = 100_000, 700  # blocks of a pool
AT_ONCE = 4


def in_waves(requests: Sequence[TrafficRequest]) -> list[list[TrafficRequest]]:
    """Some at once, none of which goes on from another one."""
    waves: list[list[TrafficRequest]] = [[]]
    for request in requests:
        if len(waves[-1]) == AT_ONCE or request.continues in {each.id for each in waves[-1]}:
            waves.append([])
        waves[-1].append(request)
    return waves


def drained(engine: VllmEngine) -> dict[str, int]:
    """Steps until every request has ended; of each prompt that was taken up, the tokens that were cached. Prefill keeps
    blocks of what has ended."""
    found: dict[str, int] = {}
    steps = 0
    while engine.scheduler.has_unfinished_requests():
        steps += 1
        assert steps < 10_000
        step = engine.schedule()
        found.update({new.req_id: new.num_computed_tokens for new in step.output.scheduled_new_reqs})
        reads = step.output.kv_connector_metadata
        engine.take(step)
        engine.received.update(reads.tokens if reads else ())
    return found


class Moved(NamedTuple):
    """By request: the tokens that the prefilling engine had, and which engines prefilled and decoded it."""

    hits: dict[str, int]
    prefilled: dict[str, str | None]
    decoded: dict[str, str | None]


def moved(waves: Sequence[Sequence[TrafficRequest]], hybrid: bool, pool_blocks: int) -> Moved:
    """Every prompt is prefilled by one engine and decoded by another one, drawn anew for each."""
    assert SHAPE is not None
    hardware, draw = HYBRID if hybrid else FULL, random.Random(3)
    parts = scheduler_parts(
        hardware, SHAPE, Pool(tp=2), role="kv_both", asynchronous=False, pool_blocks=pool_blocks, retention_tokens=0
    )
    engines = [VllmEngine(parts, None, 0.0, hardware.step_tokens) for _ in range(ENGINES)]
    prompts, ids = PromptIds(), dict[str, list[int]]()
    found = Moved({}, {}, {})
    number = 0
    for wave in waves:
        pairs: dict[str, tuple[TrafficRequest, int, int]] = {}
        for request in wave:
            ids[request.id] = prompts.of(request)
            number += 1
            prefills, decodes = draw.sample(range(ENGINES), 2)
            pairs[str(number)] = (request, prefills, decodes)
            found.prefilled[request.id], found.decoded[request.id] = str(prefills), str(decodes)
            engines[prefills].add(number, ids[request.id], 1, IS_FETCHED)
        for at, engine in enumerate(engines):
            for name, tokens in drained(engine).items():
                assert pairs[name][1] == at
                found.hits[pairs[name][0].id] = tokens
        for name, (request, _, decodes) in pairs.items():
            engines[decodes].add(int(name), ids[request.id], request.out, FETCHES)
        for engine in engines:
            drained(engine)
        for name, (_, prefills, _) in pairs.items():
            engines[prefills].sent.add(name)
        for engine in engines:
            engine.take(engine.schedule())
            assert not engine.scheduler.requests, "prefill keeps nothing that was read"
    return found


@pytest.mark.parametrize(("hybrid", "pool_blocks"), [(False, ROOMY), (False, SMALL), (True, ROOMY)])
def test_hits_lie_within_their_bounds(hybrid: bool, pool_blocks: int) -> None:
    waves = in_waves(interleaved(conversations()))
    found = moved(waves, hybrid, pool_blocks)
    requests, prompts = [request for wave in waves for request in wave], TrafficPrompts(BLOCK)
    held = []
    for request in requests:
        prompt, computed = prompts.of(request)
        tokens = ComputedTokens(id=request.id, tokens=prompt.tokens, computed=computed.tokens, keys=computed.keys)
        held.append(tokens)
    came = [float(at) for at, wave in enumerate(waves) for _ in wave]
    first_s, finish_s = ([each + later for each in came] for later in (0.5, 0.7))
    engines, decodes = ([of[request.id] for request in requests] for of in (found.prefilled, found.decoded))
    sent = SentPrompts(came, first_s, finish_s, engines, decodes, held)
    most, least = most_tokens(sent, BLOCK, host=False).tolist(), least_tokens(sent, BLOCK, pool_blocks).tolist()
    hits = [found.hits[request.id] for request in requests]
    assert len(hits) > 250 and all(hit <= high for hit, high in zip(hits, most, strict=True))
    below = [low for hit, low in zip(hits, least, strict=True) if hit < low]
    assert bool(below) is hybrid, "with windowed layers the second prompt of a fork finds nothing"
    figures = {"hybrid": hybrid, "pool": pool_blocks, "prompt_tokens": sum(each.tokens for each in held)}
    print(figures | {"least": sum(least), "hits": sum(hits), "most": sum(most)})
    assert sum(hits) > 10_000 and sum(least) > 0.2 * sum(hits)
