"""Limits of vLLM on the TP, PP, DP and EP degrees for a model, and its share of a GPU's memory."""

from __future__ import annotations

from typing import Any

from pdlab.core.catalog import ModelShape
from pdlab.core.deployment import FLAG_PREFIX, Deployment, Pool
from pdlab.core.errors import UsageError
from pdlab.core.nodes import Placement, Role
from pdlab.core.request_lengths import configured_length, length_flag
from pdlab.core.text import counted, version_numbers
from pdlab.core.version import STACK

# vLLM's default gpu_memory_utilization, by vllm/config/cache.py: 0.9 in 0.11.0, 0.19.0 and 0.19.1, and 0.92 in 0.20.0,
# 0.21.0, 0.24.0 and 0.29.0. tests/contract/test_engine_memory.py asks the installed version.
UTILIZATION, UTILIZATION_SINCE_0_20 = 0.9, 0.92


def default_utilization(version: str = STACK["vllm"]) -> float:
    """The share of a GPU's memory that engines of that version of vLLM take by default; that of pdlab's stack if the
    version is no number."""
    numbers = version_numbers(version) or version_numbers(STACK["vllm"])
    assert numbers is not None
    return UTILIZATION_SINCE_0_20 if numbers >= (0, 20) else UTILIZATION


def with_redundant_experts(deployment: Deployment, shape: ModelShape) -> Deployment:
    """The deployment with the fewest copies of experts that EP needs, for pools whose ranks do not divide the experts.
    Pools whose engine arguments decide about the load balancer stay as they are."""

    def changed(pool: Pool) -> Pool:
        given = deployment.engine_kwargs_of(pool)
        off = given.get("enable_eplb") is False
        lacking = -shape.experts % (pool.tp * pool.dp)
        if not (pool.expert_parallel and shape.experts > 1 and lacking) or "eplb_config" in given or off:
            return pool
        added = {"enable_eplb": True, "eplb_config": {"num_redundant_experts": lacking}}
        return pool.model_copy(update={"engine_kwargs": {**added, **pool.engine_kwargs}})

    return deployment.with_pools(changed)


def _setting(role: Role, name: str, by_flags: bool) -> str:
    """How a refusal names a setting of a role: by the flag of a launch (``--p-tp``), or in words (``prefill TP``)."""
    return f"--{FLAG_PREFIX[role]}{name}" if by_flags else f"{role} {name.upper()}"


def check_divisibility(deployment: Deployment, shape: ModelShape | None, *, by_flags: bool = True) -> list[str]:
    """Check vLLM 0.29's rules on TP, PP and EP. Returns warnings. Raises UsageError. ``by_flags``: the command has the
    flags of a launch, which refusals then advise.

    Without a shape, only the rules between prefill and decode, and those of balanced experts, are checked.

    TP must divide the attention heads. TP must divide the KV heads, or the KV heads TP (vLLM then replicates heads).
    The TP of prefill must divide that of decode, or the reverse. A prefill TP above decode's must not exceed the KV
    heads.

    Neither prefill nor decode may have pipeline stages (vLLM's nixl/base_worker.py). vLLM refuses a decode engine with
    PP > 1, and both roles for a model with several KV layouts. A decode engine reads only from prefill's first stage,
    and fails because that stage has fewer layers than decode.
    """
    for role, pool in deployment.pools.items():
        engine_kwargs = deployment.engine_kwargs_of(pool)
        _check_balanced_experts(role, pool, engine_kwargs, by_flags)
        if shape is not None:
            _check_pool(role, pool, shape, redundant_experts(engine_kwargs), by_flags)
    pools = deployment.pools
    if deployment.transport is None:
        return []
    for role, pool in pools.items():
        if pool.pp > 1:
            pp, tp = (_setting(role, name, by_flags) for name in ("pp", "tp"))
            raise UsageError(
                f"{role} PP {pool.pp}: vLLM's NixlConnector moves KV between engines of one pipeline stage only; "
                f"use {pp} 1 with a larger {tp}, or DP with EP, or collocated engines"
            )
    if "fluid" in pools:
        return []
    prefill_tp, decode_tp = pools["prefill"].tp, pools["decode"].tp
    if max(prefill_tp, decode_tp) % min(prefill_tp, decode_tp):
        raise UsageError(
            f"prefill TP {prefill_tp} and decode TP {decode_tp}: one must divide the other "
            f"(NIXL moves whole heads); use the same TP, or powers of two"
        )
    if prefill_tp > decode_tp:
        if shape is not None and prefill_tp > shape.kv_heads:
            lower, higher = (_setting(role, "tp", by_flags) for role in ("prefill", "decode"))
            raise UsageError(
                f"prefill TP {prefill_tp} > decode TP {decode_tp} needs prefill TP of at most "
                f"{shape.kv_heads}, the KV heads of {shape.name}; lower {lower} or raise {higher}"
            )
        return [
            f"prefill TP {prefill_tp} > decode TP {decode_tp} is experimental in vLLM: "
            "the canary check is compulsory for it"
        ]
    return []


def check_ports(deployment: Deployment, placement: Placement) -> None:
    """Raises UsageError if engines of the same data parallel rank, of different replicas, are on one node.

    Ray Serve LLM 2.60 derives the handshake port of a data parallel engine only from its rank. So both engines would
    use one port, and the second would wait for it without end.
    """
    if "prefill" not in deployment.pools:
        return
    for role, pool in deployment.pools.items():
        if pool.dp == 1:
            continue
        flag = f"--{FLAG_PREFIX[role]}"
        port_owners: dict[tuple[str, int], int] = {}
        for replica in (member for member in placement.replicas if member.role == role):
            for rank in range(pool.dp):
                node = next(iter(replica.groups[rank * pool.pp].slots))
                owner = port_owners.setdefault((node, rank), replica.index)
                if owner != replica.index:
                    raise UsageError(
                        f"{role} replicas {owner} and {replica.index} both have their data parallel rank {rank} on "
                        f"{node}: Ray Serve LLM gives both one port for KV handshakes, and the second never starts; "
                        f"use one replica with {flag}dp {pool.dp * pool.replicas}, or nodes for each"
                    )


def check_experts_on_cpu(deployment: Deployment, shape: ModelShape | None, placement: Placement) -> None:
    """Raises UsageError for experts on data parallel ranks of CPUs.

    vLLM 0.29's CPU communicator has no ``all_gatherv``, with which these ranks exchange tokens. The engines start, and
    end at the first request.
    """
    if shape is None or shape.experts == 1 or placement.device != "cpu":
        return
    for role, pool in deployment.pools.items():
        if pool.dp > 1:
            flag = f"--{FLAG_PREFIX[role]}"
            raise UsageError(
                f"{flag}dp {pool.dp}: {shape.name} has experts, whose data parallel ranks vLLM's CPU backend "
                f"starts but cannot run; use {flag}num {pool.dp}, or {flag}tp {pool.dp} where heads divide"
            )


def check_context(deployment: Deployment, shape: ModelShape | None) -> None:
    """Raises UsageError if the requested context is longer than the model's: vLLM's engines refuse it."""
    for role, pool in deployment.pools.items():
        value = configured_length(deployment, pool, None, cpu=False)
        if value is None:
            continue
        tokens, flag = int(value), length_flag(deployment, role)
        if tokens == 0:
            raise UsageError(f"{flag}0: must be at least 1; leave it out for the model's own")
        if shape is not None and tokens > shape.max_context:
            raise UsageError(
                f"{flag}{tokens}: {shape.name} has a context of {counted(shape.max_context, 'token')}; give at most "
                "that"
            )


def redundant_experts(engine_kwargs: dict[str, Any]) -> int:
    """The number of expert copies that vLLM's load balancer adds. EP divides experts and copies together."""
    config = engine_kwargs.get("eplb_config")
    redundant = config.get("num_redundant_experts", 0) if isinstance(config, dict) else 0
    return redundant if isinstance(redundant, int) else 0


def _check_balanced_experts(role: Role, pool: Pool, engine_kwargs: dict[str, Any], by_flags: bool) -> None:
    """Raises UsageError where vLLM refuses its load balancer of experts (vllm/config/parallel.py)."""
    flag = f"--{FLAG_PREFIX[role]}"
    ep, tp, dp = (_setting(role, name, by_flags) for name in ("ep", "tp", "dp"))
    if not engine_kwargs.get("enable_eplb"):
        if redundant := redundant_experts(engine_kwargs):
            raise UsageError(
                f"{role} eplb_config has num_redundant_experts {redundant}: vLLM makes copies of experts only with its "
                f"load balancer; add {flag}engine-arg enable_eplb=true, or leave eplb_config out"
            )
        return
    if not pool.expert_parallel:
        raise UsageError(
            f"{role} enable_eplb=true: vLLM balances experts only under expert parallel; add {ep}, or leave "
            "enable_eplb out"
        )
    if pool.tp * pool.dp == 1:
        raise UsageError(
            f"{role} enable_eplb=true: there is one rank, and nothing to balance; use a larger {tp} or {dp}, "
            "or leave enable_eplb out"
        )


def _check_pool(role: Role, pool: Pool, shape: ModelShape, redundant: int, by_flags: bool) -> None:
    if pool.expert_parallel and shape.experts == 1:
        flag = _setting(role, "ep", by_flags)
        raise UsageError(f"{flag}: {shape.name} has no experts, and vLLM refuses expert parallel; leave {flag} out")
    if shape.heads % pool.tp:
        raise UsageError(
            f"{role} TP {pool.tp} does not divide the {counted(shape.heads, 'attention head')} of {shape.name}; use "
            f"one of {', '.join(str(t) for t in range(1, 17) if shape.heads % t == 0)}"
        )
    if max(shape.kv_heads, pool.tp) % min(shape.kv_heads, pool.tp):
        raise UsageError(
            f"{role} TP {pool.tp} and the {counted(shape.kv_heads, 'KV head')} of {shape.name}: one must divide the "
            "other"
        )
    if pool.pp > shape.layers:
        raise UsageError(f"{role} PP {pool.pp} is more than the {counted(shape.layers, 'layer')} of {shape.name}")
    ranks, slots = pool.tp * pool.dp, shape.experts + redundant
    if pool.expert_parallel and slots % ranks:
        copies = f" and {redundant} redundant ones" if redundant else ""
        copies_needed = redundant + ranks - slots % ranks
        balanced = "leave enable_eplb out, and redundant copies are assumed"
        if by_flags:
            balanced = (
                "let vLLM balance experts with redundant copies: --engine-arg enable_eplb=true --engine-arg "
                f"'eplb_config={{num_redundant_experts: {copies_needed}}}'"
            )
        raise UsageError(
            f"{role} EP over TP {pool.tp} x DP {pool.dp} does not divide the {counted(shape.experts, 'expert')} of "
            f"{shape.name}{copies}; use a divisor, or {balanced}"
        )
