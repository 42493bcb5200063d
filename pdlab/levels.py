"""From flags to levels: lists of loads, how many requests each takes, and which seed; and the client's wire form.

Pure. A level's seed comes from a hash of everything that tells two levels apart, so that no prompt
is served twice within an experiment, nor to the same server by a smoke test or another mode before.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from typing import Literal, TypeVar

from pydantic import Field, model_validator

from pdlab.errors import UsageError
from pdlab.results import RequestRecord
from pdlab.spec import Collocated, Deployment, Frozen, Pool
from pdlab.workload import Closed, Level, Load, Open, Ramp, RunKey, Sweep, Workload

ALL_CONCURRENCIES = (4, 8, 16, 32, 48, 64)
ALL_RATES_RPS = (1.0, 2.0, 4.0, 8.0, 12.0, 16.0)
PROMPTS_PER_CONCURRENCY = 10
MIN_PROMPTS = 20
RATE_SECONDS = 60
SMOKE_PROMPTS_PER_CONCURRENCY = 2
SMOKE_RATE_SECONDS = 10
MIN_SMOKE_PROMPTS = 8
MIN_WARMUP = 8
MAX_VALUE = 100_000

N = TypeVar("N", int, float)


class ClientLevel(Frozen):
    """One load as sent to the load-generator process (one JSON line).

    Closed loop with ``concurrency``, else open loop with ``rate_rps``. Lengths in tokens, exact.
    ``pd-bare`` posts each prompt to ``prefill_url`` and streams the answer from ``decode_url``: two
    vLLM servers without a serving layer. ``tokenizer`` is a folder or a Hugging Face id.
    """

    name: str
    backend: Literal["openai", "pd-bare"] = "openai"
    base_url: str | None = None
    prefill_url: str | None = None
    decode_url: str | None = None
    model: str
    tokenizer: str
    input_tokens: int = Field(ge=1)
    output_tokens: int = Field(ge=1)
    num_requests: int = Field(ge=1)
    seed: int = Field(ge=0, lt=2**32)
    concurrency: int | None = Field(default=None, ge=1)
    rate_rps: float | None = Field(default=None, gt=0)
    burstiness: float = Field(default=1.0, gt=0)
    request_timeout_s: float = Field(default=600.0, gt=0)

    @model_validator(mode="after")
    def _complete(self) -> ClientLevel:
        if (self.concurrency is None) == (self.rate_rps is None):
            raise ValueError("give either concurrency or rate_rps")
        if self.backend == "openai" and not self.base_url:
            raise ValueError("backend openai needs base_url")
        if self.backend == "pd-bare" and not (self.prefill_url and self.decode_url):
            raise ValueError("backend pd-bare needs prefill_url and decode_url")
        return self


class ClientAnswer(Frozen):
    """What the load generator measured for one level.

    ``records`` are ordered by arrival, times in seconds since the first arrival. ``cpu_share`` is
    the CPU time of the whole client process over wall time between the first arrival and the last
    answer (1 = one core); ``loop_lag_s`` the 95th percentile of how late its event loop woke up.
    ``started_at`` and ``finished_at`` are ISO 8601, UTC.
    """

    name: str
    records: tuple[RequestRecord, ...]
    cpu_share: float | None = None
    loop_lag_s: float | None = None
    started_at: str
    finished_at: str


def parse_concurrencies(text: str) -> tuple[int, ...]:
    """``all`` or ``4,8,16``. Raises UsageError."""
    if text.strip() == "all":
        return ALL_CONCURRENCIES
    example = "--concurrency: expected all or whole numbers such as 4,8,16"
    values = []
    for part in text.split(","):
        if not part.strip().isascii() or not part.strip().isdigit():
            raise UsageError(f"{example}, got {text!r}")
        values.append(int(part))
    return _distinct("--concurrency", values)


def parse_rates(text: str) -> tuple[float, ...]:
    """``all`` or ``1,2.5,4`` (requests/s). Raises UsageError."""
    if text.strip() == "all":
        return ALL_RATES_RPS
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError as error:
        example = "--request-rate: expected all or numbers such as 1,2.5,4 (requests/s)"
        raise UsageError(f"{example}, got {text!r}") from error
    return _distinct("--request-rate", values)


def _distinct(flag: str, values: list[N]) -> tuple[N, ...]:
    for value in values:
        if not 0 < value <= MAX_VALUE:
            raise UsageError(f"{flag}: {value:g} is outside 0 < value <= {MAX_VALUE}")
    twice = sorted({value for value in values if values.count(value) > 1})
    if twice:
        raise UsageError(f"{flag}: {twice[0]:g} is given twice; use --repeats to measure a level again")
    return tuple(values)


def num_requests(load: Load, *, smoke: bool = False) -> int:
    """Requests of one level.

    Closed loop: 10 per unit of concurrency, at least 20. Open loop and ramp: 60 s worth of arrivals,
    at least 20. Smoke: 2 per unit or 10 s worth, at least 8.
    """
    least = MIN_SMOKE_PROMPTS if smoke else MIN_PROMPTS
    if isinstance(load, Closed):
        per_unit = SMOKE_PROMPTS_PER_CONCURRENCY if smoke else PROMPTS_PER_CONCURRENCY
        return max(least, per_unit * load.concurrency)
    seconds = SMOKE_RATE_SECONDS if smoke else RATE_SECONDS
    return max(least, math.ceil(seconds * (load.mean_rps if isinstance(load, Ramp) else load.rate_rps)))


def derive_seed(workload: Workload, *parts: str | float) -> int:
    """32-bit seed from the experiment's seed, what its requests look like, and ``parts``."""
    data = workload.model_dump(mode="json")
    if not workload.shared_prefix_tokens:
        del data["shared_prefix_tokens"]  # seeds of workloads without one stay what they were
    text = json.dumps([data, *parts], sort_keys=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def level_seed(workload: Workload, key: RunKey, *, smoke: bool = False, attempt: int = 0) -> int:
    """Seed of one level. ``attempt`` counts earlier starts of the sweep: a level that was cut short
    and is measured again must not find its prompts in the prefix cache."""
    return derive_seed(workload, "smoke" if smoke else "level", key.kind, key.value, key.repeat, attempt)


def warmup_seed(workload: Workload, *, smoke: bool = False, attempt: int = 0) -> int:
    """Seed of the warm-up before the first level: like no level's."""
    return derive_seed(workload, "smoke-warm-up" if smoke else "warm-up", attempt)


def warmup_requests(deployment: Deployment | None) -> int:
    """Warm-up prompts: two for every pair of a prefill and a decode engine (or for every
    collocated engine), at least 8; 8 when the deployment is not known."""
    if deployment is None:
        return MIN_WARMUP
    topology = deployment.topology
    if isinstance(topology, Collocated):
        return max(MIN_WARMUP, 2 * _engines(topology.pool))
    return max(MIN_WARMUP, 2 * _engines(topology.prefill) * _engines(topology.decode))


def _engines(pool: Pool) -> int:
    return pool.replicas * pool.dp


def build_sweep(
    workload: Workload,
    loads: Sequence[Load],
    *,
    repeats: int = 1,
    prompts_per_level: int | None = None,
    smoke: bool = False,
    attempt: int = 0,
) -> Sweep:
    """Levels in the order in which they are measured: every load once, then all again per repeat
    (so that drift hits all loads alike). ``smoke``: the first load alone, once, short.

    Raises UsageError when nothing is asked.
    """
    if not loads:
        raise UsageError("no load level given; use --concurrency or --request-rate")
    if repeats < 1:
        raise UsageError(f"--repeats: at least 1, got {repeats}")
    if prompts_per_level is not None and prompts_per_level < 1:
        raise UsageError(f"--prompts-per-level: at least 1, got {prompts_per_level}")
    if smoke:
        loads, repeats = loads[:1], 1
    levels = []
    for repeat in range(repeats):
        for load in loads:
            key = RunKey(kind=load.kind, value=load.value, repeat=repeat)
            levels.append(
                Level(
                    load=load,
                    repeat=repeat,
                    num_requests=prompts_per_level or num_requests(load, smoke=smoke),
                    seed=level_seed(workload, key, smoke=smoke, attempt=attempt),
                )
            )
    return Sweep(workload=workload, levels=tuple(levels))


def client_level(
    level: Level, workload: Workload, *, base_url: str, model: str, tokenizer: str, request_timeout_s: float
) -> ClientLevel:
    """A level of a sweep in the client's form."""
    load = level.load
    return ClientLevel(
        name=level.key.stem,
        base_url=base_url,
        model=model,
        tokenizer=tokenizer,
        input_tokens=workload.sent_input_tokens,
        output_tokens=workload.sent_output_tokens,
        num_requests=level.num_requests,
        seed=level.seed,
        concurrency=load.concurrency if isinstance(load, Closed) else None,
        rate_rps=load.rate_rps if isinstance(load, Open) else None,
        burstiness=load.burstiness if isinstance(load, Open) else 1.0,
        request_timeout_s=request_timeout_s,
    )
