"""Predicts the prefix-cache hits of each prompt of a replay, by vLLM's rules (`pdlab.traffic.oracle`)."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pdlab.bench.client.protocol import ComputedTokens
from pdlab.bench.hit_bounds import SentPrompts, least_tokens, most_tokens
from pdlab.core.catalog import BYTES_PER_VALUE, ModelShape
from pdlab.core.deployment import Collocated, Deployment
from pdlab.core.engine_cache import EngineCache
from pdlab.core.model_size import full_layers, kv_bytes_per_token_layer, kv_copies
from pdlab.core.rehearsal import Rehearsal
from pdlab.core.served_model import served_model
from pdlab.deploy.engine_metrics import KvPool
from pdlab.deploy.serve_config import cpu_engine_kwargs
from pdlab.results.columns import GrowingArray, allocated, elements, sorted_order
from pdlab.results.schema import RequestRecord
from pdlab.results.stored_rows import StoredRows
from pdlab.results.texts import TextIndex, Texts
from pdlab.results.timeline import RequestTimeline
from pdlab.traffic.bounded import LatestKeys

if TYPE_CHECKING:
    from pdlab.results.level_data import Codes, Column
    from pdlab.results.texts import TextColumn
    from pdlab.traffic.host_cache import HostCache
    from pdlab.traffic.oracle import HitOracle

# Engine arguments under which the rules are others.
OTHER_RULES = ("enable_prefix_caching", "disable_hybrid_kv_cache_manager", "kv_transfer_config")
ENDLESS = 2**40  # blocks
MOST_VALUE_BYTES = 4


class CacheRules(NamedTuple):
    """The caches of the engines that may compute prompts, by replica id. There is at least one, and all have blocks of
    one size. ``answers``: an engine also generates the answers to its prompts, and their blocks are in the same cache.
    ``host_blocks``: the blocks that surely fit the host memory behind each engine (None: there is none). ``grows``: all
    layers have full attention, so that more blocks in a cache never mean fewer hits."""

    caches: Mapping[str, EngineCache]
    answers: bool
    host_blocks: int | None = None
    grows: bool = False

    @property
    def block_tokens(self) -> int:
        return next(iter(self.caches.values())).block_tokens

    def oracle(self, replica: str) -> HitOracle:
        """Of one engine, with an empty cache."""
        from pdlab.traffic.oracle import oracle_of

        return oracle_of(self.caches[replica])

    def host(self, replica: str) -> HostCache:
        """Behind one engine, empty: has room for everything."""
        from pdlab.traffic.host_cache import HostCache

        return HostCache(ENDLESS, self.block_tokens, self.caches[replica].window)


def cache_rules(
    deployment: Deployment | None, pools: Mapping[str, KvPool], *, local: bool, rehearsal: Rehearsal | None = None
) -> CacheRules | None:
    """Of a deployment whose engines have these KV pools, by replica; ``local``: on CPUs of this machine. Simulated
    engines have the caches that the launch of their ``rehearsal`` published.

    None for several engines to a replica, for other stores of KV cache than memory of the host, and where the model or
    the size of a block is not known."""
    if deployment is None:
        return None
    role, pool = next(iter(deployment.pools.items()))  # of PD the one that prefills
    if pool.engines_per_replica != 1:
        return None
    computing = {replica: int(held.tokens) for replica, held in pools.items() if held.role == role}
    answers = isinstance(deployment.topology, Collocated)
    if rehearsal is not None:
        cache = rehearsal.caches.get(role)
        if cache is None or not computing:
            return None
        return CacheRules(dict.fromkeys(computing, cache), answers, grows=cache.window is None)
    arguments = {**(cpu_engine_kwargs() if local else {}), **deployment.engine_kwargs_of(pool)}
    block_tokens, shape = arguments.get("block_size"), served_model(deployment).shape
    if deployment.kv_connectors or any(name in arguments for name in OTHER_RULES):
        return None
    if shape is None or not isinstance(block_tokens, int):
        return None
    retention = deployment.retention_tokens(pool)
    caches = {
        replica: EngineCache.of(shape, tokens // block_tokens, block_tokens, hybrid=True, retention=retention)
        for replica, tokens in computing.items()
    }
    host_blocks = None
    if deployment.kv_offload_gb is not None:
        if shape.kv_unknown:
            return None
        host_blocks = int(deployment.kv_offload_gb * 1e9 / (block_tokens * _most_bytes(shape, pool.tp)))
    grows = not shape.sliding_window and not shape.kv_unknown and "speculative_config" not in arguments
    return CacheRules(caches, answers, host_blocks, grows) if caches else None


def _most_bytes(shape: ModelShape, tp: int) -> float:
    """Of a token in one block of KV cache at most: engines on CPUs may compute with 32 bits."""
    layers = max(full_layers(shape), 1) if shape.sliding_window else shape.layers
    return (
        MOST_VALUE_BYTES
        / BYTES_PER_VALUE[shape.kv_dtype]
        * kv_bytes_per_token_layer(shape)
        * kv_copies(shape, tp)
        * layers
    )


def placed(
    records: Iterable[RequestRecord], timelines: Iterable[RequestTimeline], prefix: str
) -> StoredRows[RequestRecord]:
    """The records of a replay with the replicas that served them, which their timelines name. The ids of the timelines
    begin with ``prefix``."""
    ids, served_by, numbers = Texts(), GrowingArray("q"), dict[_Replicas, int]()
    for timeline in timelines:
        ids.add(timeline.id.removeprefix(prefix))
        served_by.append(numbers.setdefault(_Replicas(timeline.role_d, timeline.role_p), len(numbers)))
    replicas, places = tuple(numbers), served_by.array()
    timeline_places = TextIndex(ids.array())

    def replicas_of(record: RequestRecord) -> dict[str, object]:
        at = None if record.replayed is None else timeline_places.of(record.replayed.id)
        return {} if at is None else replicas[places[at]]._asdict()

    return _with(records, replicas_of)


class _Replicas(NamedTuple):
    """As in a `ReplayedRequest`."""

    replica: str | None
    prefill_replica: str | None


def foreseen(
    records: Sequence[RequestRecord], plan: Path, rules: CacheRules, reported: Sequence[ComputedTokens]
) -> Sequence[RequestRecord]:
    """The records with the tokens of each answered prompt that the cache had. ``reported``: prompts that the plan does
    not determine.

    The caches are taken to be empty when the replay begins. Each request meets them in the order of arrival, when the
    request before it has ended.

    The records get bounds instead (`pdlab.bench.hit_bounds`) in three cases:

    - It is not known which engine computed one of the prompts.
    - An engine of a fluid pool computed a prompt after it had decoded others. The KV cache that it pulled for those is
      in its cache too, and no test compares that with vLLM.
    - The host's memory may have had no room for all blocks. The order of a set in vLLM decides which block is evicted.

    Prompts that were ``reported`` have no bounds: their text may be in the caches before the replay begins. If one
    prompt is not known, the records are unchanged.
    """
    answered = _answered(records, rules)
    hits = None if answered is None else _hits(answered, reported or _planned(plan, rules.block_tokens), rules)
    if hits is not None:
        return _with_forecast(records, "foreseen_tokens", elements(hits))
    bounds = None if reported else _bounds(records, _planned(plan, rules.block_tokens), rules)
    return records if bounds is None else _with_forecast(records, "foreseen_bounds", bounds)


def _with_forecast(records: Iterable[RequestRecord], field: str, values: Iterator[object]) -> StoredRows[RequestRecord]:
    """The records; of each that was answered, ``field`` has the next of the ``values``."""
    return _with(records, lambda record: {field: next(values)} if record.ok else {})


def _with(
    records: Iterable[RequestRecord], changes_of: Callable[[RequestRecord], Mapping[str, object]]
) -> StoredRows[RequestRecord]:
    """The records with other fields of their `ReplayedRequest`, if they have one."""
    found = StoredRows(RequestRecord)
    for record in records:
        own = record.replayed and record.replayed.model_copy(update=changes_of(record))
        found.add(record.model_copy(update={"replayed": own}), record.arrival_s)
    return found


class _Answered(NamedTuple):
    """The answered requests, in the order of the records: the id, the arrival, and the engine that computed the prompt,
    as its place in `CacheRules.caches`."""

    ids: TextColumn
    arrival_s: Column
    engines: Codes


def _answered(records: Iterable[RequestRecord], rules: CacheRules) -> _Answered | None:
    """None: one engine is not known, or had decoded other requests before it computed a prompt."""
    decodes_s = {} if rules.answers else _first_decoded(records)
    known = {name: number for number, name in enumerate(rules.caches)}
    ids, arrival_s, engines = Texts(), GrowingArray("d"), GrowingArray("q")
    for record in records:
        if record.replayed is None or not record.ok:
            continue
        name = _engine(record, rules) or ""
        if name not in known or record.arrival_s >= decodes_s.get(name, math.inf):
            return None
        ids.add(record.replayed.id)
        arrival_s.append(record.arrival_s)
        engines.append(known[name])
    return _Answered(ids.array(), arrival_s.array(), engines.array())


def _hits(answered: _Answered, prompts: Iterable[ComputedTokens], rules: CacheRules) -> Codes | None:
    """Tokens of each answered prompt that a cache had, in the order of the records; None: one is not known."""
    from pdlab.traffic.prompts import PromptBlocks

    order, by_arrival = _by_arrival(answered.ids, answered.arrival_s, prompts)
    if len(by_arrival) < len(order):
        return None
    caches = [(rules.oracle(replica), rules.host(replica)) for replica in rules.caches]
    hits = allocated(len(order), "q")
    for at, come in zip(elements(order), by_arrival, strict=True):
        oracle, host = caches[answered.engines[at]]
        prompt = PromptBlocks(come.tokens, come.keys[: come.tokens // rules.block_tokens])
        device = oracle.hit(prompt)
        loaded = host.load(prompt, device).tokens
        oracle.compute(prompt, PromptBlocks(come.computed, come.keys) if rules.answers else None, loaded)
        if rules.host_blocks is not None:
            host.computed(prompt, device, loaded)
            if host.held > rules.host_blocks:
                return None
        hits[at] = min(device + loaded, prompt.tokens - 1)
    return hits


def _by_arrival(
    ids: TextColumn, arrival_s: Column, prompts: Iterable[ComputedTokens]
) -> tuple[Codes, StoredRows[ComputedTokens]]:
    """The requests' places in the order of arrival, and the computed tokens of each in that order. There are fewer
    computed tokens than places if they are not known of each request."""
    places, order = TextIndex(ids), sorted_order(arrival_s)
    turn = allocated(len(order), "q")
    for number, at in enumerate(elements(order)):
        turn[at] = number
    computed = StoredRows(ComputedTokens)
    for prompt in prompts:
        place = places.of(prompt.id)
        if place is not None:
            computed.add(prompt, float(turn[place]))
    return order, computed


def _bounds(
    records: Iterable[RequestRecord], prompts: Iterable[ComputedTokens], rules: CacheRules
) -> Iterator[tuple[int, int]] | None:
    """Tokens that each answered request had in a cache at least and at most, in the order of the records; None: not
    known of one."""
    import numpy as np

    ids, arrival_s, first_token_s, finish_s = Texts(), array("d"), array("d"), array("d")
    engines, decodes = list[str | None](), list[str | None]()
    known = {name: name for name in rules.caches}
    for record in records:
        if record.replayed is not None and record.replayed.sent:
            ids.add(record.replayed.id)
            arrival_s.append(record.arrival_s)
            answered_s = (record.first_token_s, record.finish_s) if record.ok else (None, None)
            for times_s, moment_s in zip((first_token_s, finish_s), answered_s, strict=True):
                times_s.append(math.nan if moment_s is None else moment_s)
            engines.append(known.get(_engine(record, rules) or ""))
            decodes.append(record.replayed.replica)
    order, computed = _by_arrival(ids.array(), np.asarray(arrival_s), prompts)
    if len(computed) < len(order):
        return None
    sent = SentPrompts(
        array("d", np.asarray(arrival_s)[order]),
        array("d", np.asarray(first_token_s)[order]),
        array("d", np.asarray(finish_s)[order]),
        [engines[at] for at in order],
        [decodes[at] for at in order],
        computed,
    )
    size, smallest = rules.block_tokens, min(cache.blocks for cache in rules.caches.values())
    least, most = np.zeros_like(order), np.zeros_like(order)
    most[order] = most_tokens(sent, size, host=rules.host_blocks is not None)
    if rules.grows:
        least[order] = least_tokens(sent, size, smallest)
    answered = ~np.isnan(np.asarray(first_token_s))
    return zip(least[answered].tolist(), most[answered].tolist(), strict=True)


def _planned(plan: Path, block_tokens: int) -> Iterator[ComputedTokens]:
    """The computed tokens of each request of a plan whose prompts are token ids; of other plans nothing."""
    from pdlab.traffic.prompts import TrafficPrompts
    from pdlab.traffic.requests import read_head, read_requests

    if read_head(plan).endpoint == "chat":
        return
    numbers, followers = LatestKeys[str, int](), array("i")
    for request in read_requests(plan):
        if request.messages is not None:
            return
        if request.continues is not None:
            followers[numbers[request.continues]] += 1
        numbers[request.id] = len(followers)
        followers.append(0)
    prompts = TrafficPrompts(block_tokens)
    for request, count in zip(read_requests(plan), followers, strict=True):
        prompt, computed = prompts.of(request, count)
        yield ComputedTokens(id=request.id, tokens=prompt.tokens, computed=computed.tokens, keys=computed.keys)


def _first_decoded(records: Iterable[RequestRecord]) -> dict[str, float]:
    """Replica -> the arrival of the first request that it decoded, in seconds."""
    first_s: dict[str, float] = {}
    for record in records:
        replica = record.replayed.replica if record.replayed is not None else None
        if replica is not None:
            first_s[replica] = min(record.arrival_s, first_s.get(replica, math.inf))
    return first_s


def _engine(record: RequestRecord, rules: CacheRules) -> str | None:
    """The replica that computed the prompt of a request; None: not known."""
    if len(rules.caches) == 1:
        return next(iter(rules.caches))
    assert record.replayed is not None
    return record.replayed.replica if rules.answers else record.replayed.prefill_replica
