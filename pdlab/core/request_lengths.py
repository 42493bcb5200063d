"""The longest request of an engine in tokens, prompt and answer (vLLM's max_model_len): what is configured, and what
a workload needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pdlab.core.catalog import ModelShape
from pdlab.core.deployment import FLAG_PREFIX, Deployment, Pool
from pdlab.core.errors import UsageError
from pdlab.core.nodes import Role
from pdlab.core.text import counted
from pdlab.core.workload import Workload

ARGUMENT = "max_model_len"
# vLLM's own default is the model's context, and it reserves KV cache for one request of that length before it starts:
# 4.8 GiB more for gpt-oss-120b, and 10,485,760 tokens for Llama 4 Scout.
DEFAULT_MODEL_LEN = 16384
LENGTH_STEP = 1024  # of every max_model_len that pdlab chooses or proposes
# The canary's longest prompt and the request that proves the wire have some thousand tokens.
LEAST_MODEL_LEN = 8192


def length_for(workload: Workload, shape: ModelShape | None) -> int:
    """The max_model_len that pdlab chooses for a workload. Raises UsageError if the model's context is shorter."""
    needed = sum(workload.longest)
    length = max(LEAST_MODEL_LEN, -(-needed // LENGTH_STEP) * LENGTH_STEP)
    if shape is None:
        return length
    check_request_fits(shape, needed)
    return min(length, shape.max_context)


def check_request_fits(shape: ModelShape, request_tokens: int) -> None:
    """Raises UsageError if a request is longer than the model's context."""
    if request_tokens > shape.max_context:
        raise UsageError(
            f"{shape.name} takes {counted(shape.max_context, 'token')} of context; a request has {request_tokens}: "
            "shorten it"
        )


def request_tokens(role: Role, workload: Workload) -> int:
    """Tokens of the longest request of a workload in a pool: prefill generates one token."""
    return workload.longest_input + 1 if role == "prefill" else sum(workload.longest)


def configured_length(deployment: Deployment, pool: Pool, shape: ModelShape | None, *, cpu: bool) -> Any:
    """The value that a pool's engines are started with: the last of a default, the model's file, the deployment, and
    an engine argument. None: there is none, because the shape is unknown. -1: vLLM takes the longest that fits."""
    value: Any = None
    if shape is not None:
        value = min(shape.max_context, DEFAULT_MODEL_LEN)
        value = shape.engine_kwargs.get(ARGUMENT, value)
        value = value if cpu else shape.engine_kwargs_by_tp.get(pool.tp, {}).get(ARGUMENT, value)
    value = value if deployment.max_model_len is None else deployment.max_model_len
    return deployment.engine_kwargs_of(pool).get(ARGUMENT, value)


def served_length(deployment: Deployment, role: Role, shape: ModelShape | None, *, cpu: bool) -> int | None:
    """Tokens of the longest request that a pool's engines accept; None: unknown before they start."""
    value = configured_length(deployment, deployment.pools[role], shape, cpu=cpu)
    return None if value is None or int(value) < 1 else int(value)


def short_pools(
    deployment: Deployment, shape: ModelShape | None, workload: Workload, *, cpu: bool
) -> Iterator[tuple[Role, int, int]]:
    """The pools whose engines do not accept the longest request of a workload, as far as their length is known: role,
    tokens that they accept, and tokens of that request."""
    for role in deployment.pools:
        length = served_length(deployment, role, shape, cpu=cpu) or (shape.max_context if shape else None)
        needed = request_tokens(role, workload)
        if length is not None and needed > length:
            yield role, length, needed


def held_workload(deployment: Deployment, shape: ModelShape | None, workload: Workload, *, cpu: bool) -> Workload:
    """The workload, or one with the same share of output tokens that every pool accepts."""
    lengths = [length for _, length, _ in short_pools(deployment, shape, workload, cpu=cpu)]
    if not lengths:
        return workload
    inputs, outputs = workload.longest
    share = min(lengths) / (inputs + outputs)
    return Workload(input_tokens=max(int(share * inputs), 1), output_tokens=max(int(share * outputs), 1))


def shortest_length(deployment: Deployment, shape: ModelShape | None, *, cpu: bool) -> int | None:
    """Tokens of the longest request that every pool accepts; None: unknown before the engines start."""
    lengths = [served_length(deployment, role, shape, cpu=cpu) for role in deployment.pools]
    return min((length for length in lengths if length is not None), default=None)


def length_flag(deployment: Deployment, role: Role) -> str:
    """The beginning of the flag that sets the length of a pool, to which the number is added."""
    if ARGUMENT in deployment.pools[role].engine_kwargs:
        return f"--{FLAG_PREFIX[role]}engine-arg {ARGUMENT}="
    return f"--engine-arg {ARGUMENT}=" if ARGUMENT in deployment.engine_kwargs else "--max-model-len "
