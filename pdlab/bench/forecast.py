"""What the prefix caches had of each prompt of a replay, by vLLM's rules (`pdlab.traffic.oracle`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pdlab.core.catalog import ModelShape
from pdlab.core.deployment import Collocated, Deployment, Disaggregated, Pool
from pdlab.core.served_model import served_model
from pdlab.deploy.engine_metrics import KvPool
from pdlab.deploy.serve_config import cpu_engine_kwargs
from pdlab.results.schema import RequestRecord
from pdlab.results.timeline import RequestTimeline

if TYPE_CHECKING:
    from pdlab.bench.client.protocol import ComputedTokens
    from pdlab.traffic.oracle import HitOracle
    from pdlab.traffic.prompts import PromptBlocks

# Engine arguments under which the rules are others.
OTHER_RULES = ("enable_prefix_caching", "disable_hybrid_kv_cache_manager", "kv_transfer_config")


class CacheRules(NamedTuple):
    """Of the engines that compute prompts: the blocks of each by its replica's id. ``answers``: they generate the
    answers too, whose blocks are then in the same cache."""

    shape: ModelShape
    block_tokens: int
    retention: int | None
    blocks: Mapping[str, int]
    answers: bool

    def oracle(self, replica: str) -> HitOracle:
        """Of one engine, with an empty cache."""
        from pdlab.traffic.oracle import oracle_of

        blocks, retention = self.blocks[replica], self.retention
        return oracle_of(self.shape, blocks, self.block_tokens, hybrid=True, retention=retention)


def cache_rules(deployment: Deployment | None, pools: Mapping[str, KvPool], *, local: bool) -> CacheRules | None:
    """Of a deployment whose engines have these KV pools, by replica; ``local``: on CPUs of this machine.

    None for engines whose roles move, several to a replica, or with stores of KV cache beside their own; and where the
    model or the size of a block is not known."""
    topology = deployment.topology if deployment is not None else None
    if deployment is None or not isinstance(topology, Collocated | Disaggregated):
        return None
    pool: Pool = topology.pool if isinstance(topology, Collocated) else topology.prefill
    role = "collocated" if isinstance(topology, Collocated) else "prefill"
    arguments = {**(cpu_engine_kwargs() if local else {}), **deployment.engine_kwargs, **pool.engine_kwargs}
    block_tokens, shape = arguments.get("block_size"), served_model(deployment).shape
    stores = deployment.kv_offload_gb is not None or bool(deployment.kv_connectors)
    if pool.engines_per_replica != 1 or stores or any(name in arguments for name in OTHER_RULES):
        return None
    if shape is None or not isinstance(block_tokens, int):
        return None
    blocks = {replica: int(held.tokens) // block_tokens for replica, held in pools.items() if held.role == role}
    retention = deployment.retention_tokens(pool)
    return CacheRules(shape, block_tokens, retention, blocks, isinstance(topology, Collocated)) if blocks else None


def placed(
    records: Sequence[RequestRecord], timelines: Iterable[RequestTimeline], prefix: str
) -> tuple[RequestRecord, ...]:
    """The records of a replay with the replicas that served them, as their timelines tell; ids there begin with
    ``prefix``."""
    told = {each.id.removeprefix(prefix): each for each in timelines}
    found = []
    for record in records:
        own, timeline = record.replayed, told.get(record.replayed.id) if record.replayed else None
        if own is not None and timeline is not None:
            own = own.model_copy(update={"replica": timeline.role_d, "prefill_replica": timeline.role_p})
        found.append(record.model_copy(update={"replayed": own}))
    return tuple(found)


def foreseen(
    records: Sequence[RequestRecord], plan: Path, rules: CacheRules, told: Mapping[str, ComputedTokens]
) -> tuple[RequestRecord, ...]:
    """The records with what the cache had of each prompt that was answered. ``told``: prompts that the plan does not
    foresee.

    As they are where it is not known which engine computed one of them, or what its prompt was. Caches are empty when
    the replay begins; requests meet them in the order in which they come, each when the one before has ended.
    """
    of_id = {record.replayed.id: record for record in records if record.replayed is not None and record.ok}
    engines = {name: _engine(record, rules) for name, record in of_id.items()}
    if not set(engines.values()) <= rules.blocks.keys():
        return tuple(records)
    blocks = _prompts_by_request(told, rules) if told else _planned(plan, rules)
    if not of_id.keys() <= blocks.keys():
        return tuple(records)
    oracles = {replica: rules.oracle(replica) for replica in rules.blocks}
    hits: dict[str, int] = {}
    for name in sorted(of_id, key=lambda name: of_id[name].arrival_s):
        prompt, answered = blocks[name]
        hits[name] = oracles[engines[name] or ""].compute(prompt, answered if rules.answers else None)
    return tuple(
        record.model_copy(
            update={"replayed": record.replayed.model_copy(update={"foreseen_tokens": hits.get(record.replayed.id)})}
        )
        if record.replayed is not None
        else record
        for record in records
    )


def _prompts_by_request(
    told: Mapping[str, ComputedTokens], rules: CacheRules
) -> dict[str, tuple[PromptBlocks, PromptBlocks]]:
    """Prompts, and prompts with their answers, by the ids of the requests."""
    from pdlab.traffic.prompts import PromptBlocks

    return {
        name: (
            PromptBlocks(each.tokens, each.keys[: each.tokens // rules.block_tokens]),
            PromptBlocks(each.computed, each.keys),
        )
        for name, each in told.items()
    }


def _planned(plan: Path, rules: CacheRules) -> dict[str, tuple[PromptBlocks, PromptBlocks]]:
    """As `_prompts_by_request`, of a plan whose prompts are token ids; of another one none."""
    from pdlab.traffic.prompts import TrafficPrompts
    from pdlab.traffic.requests import read_head, read_requests

    prompts = TrafficPrompts(rules.block_tokens)
    blocks: dict[str, tuple[PromptBlocks, PromptBlocks]] = {}
    if read_head(plan).endpoint == "chat":
        return blocks
    for request in read_requests(plan):
        if request.messages is not None:
            return {}
        blocks[request.id] = prompts.of(request)
    return blocks


def _engine(record: RequestRecord, rules: CacheRules) -> str | None:
    """The replica that computed the prompt of a request; None: not known."""
    if len(rules.blocks) == 1:
        return next(iter(rules.blocks))
    assert record.replayed is not None
    return record.replayed.replica if rules.answers else record.replayed.prefill_replica
