"""What one engine's prefix cache had of each prompt of a replay, by vLLM's rules (`pdlab.traffic.oracle`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pdlab.core.deployment import Collocated, Deployment
from pdlab.core.served_model import served_model
from pdlab.deploy.serve_config import cpu_engine_kwargs
from pdlab.results.schema import RequestRecord

if TYPE_CHECKING:
    from pdlab.traffic.oracle import HitOracle
    from pdlab.traffic.prompts import TrafficPrompts

# Engine arguments under which the rules are others.
OTHER_RULES = ("enable_prefix_caching", "disable_hybrid_kv_cache_manager", "kv_transfer_config", "prefix_match_unit")


def oracle_for(
    deployment: Deployment | None, pool_tokens: float | None, *, local: bool
) -> tuple[HitOracle, TrafficPrompts] | None:
    """Of a deployment of one collocated engine whose pool holds ``pool_tokens``; ``local``: on CPUs of this machine.

    None where it has several, or stores of KV cache beside the engine's, or where the model, the size of the pool or
    that of a block is not known."""
    from pdlab.traffic.oracle import oracle_of
    from pdlab.traffic.prompts import TrafficPrompts

    if deployment is None or not isinstance(deployment.topology, Collocated) or pool_tokens is None:
        return None
    pool = deployment.topology.pool
    arguments = {**(cpu_engine_kwargs() if local else {}), **deployment.engine_kwargs, **pool.engine_kwargs}
    block_tokens, shape = arguments.get("block_size"), served_model(deployment).shape
    stores = deployment.kv_offload_gb is not None or bool(deployment.kv_connectors)
    if pool.replicas * pool.engines_per_replica != 1 or stores or any(name in arguments for name in OTHER_RULES):
        return None
    if shape is None or not isinstance(block_tokens, int):
        return None
    retention = arguments.get("prefix_cache_retention_interval", 0)
    oracle = oracle_of(shape, int(pool_tokens) // block_tokens, block_tokens, hybrid=True, retention=retention)
    return oracle, TrafficPrompts(block_tokens)


def foreseen(
    records: Sequence[RequestRecord], plan: Path, oracle: HitOracle, prompts: TrafficPrompts
) -> tuple[RequestRecord, ...]:
    """The records with what the cache had of each prompt that was answered. The cache is empty when the replay begins;
    requests meet it in the order in which they come, each when the one before has ended."""
    from pdlab.traffic.requests import read_requests

    of_id = {record.replayed.id: record for record in records if record.replayed is not None and record.ok}
    blocks = {request.id: prompts.of(request) for request in read_requests(plan)}
    ordered = sorted(of_id, key=lambda name: of_id[name].arrival_s)
    hits = {name: oracle.compute(*blocks[name]) for name in ordered}
    return tuple(
        record
        if record.replayed is None
        else record.model_copy(
            update={"replayed": record.replayed.model_copy(update={"foreseen_tokens": hits.get(record.replayed.id)})}
        )
        for record in records
    )
