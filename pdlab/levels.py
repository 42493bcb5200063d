"""From flags to levels: lists of loads, how many requests each takes, and which seed; and the client's wire form.

Pure. A level's seed comes from a hash of everything that tells two levels apart, so that no prompt
is served twice within an experiment, nor to the same server by a smoke test or another mode before.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Sequence
from typing import Literal, TypeVar

from pydantic import Field, model_validator

from pdlab.errors import UsageError
from pdlab.results import ClientLoad, RequestRecord
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

    Closed loop with ``concurrency``, else open loop with ``rate_rps`` or a ``ramp``. Lengths in tokens,
    exact; the first ``prefix_tokens`` are the same in every request and drawn from ``prefix_seed``.
    ``pd-bare`` posts each prompt to ``prefill_url`` and streams the answer from ``decode_url``: two
    vLLM servers without a serving layer. ``tokenizer`` is a folder or a Hugging Face id. Of several
    processes this one is number ``part`` of ``parts``: ``concurrency``, rates and ``num_requests``
    are of the whole level, and each process takes its share.
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
    ramp: Ramp | None = None
    burstiness: float = Field(default=1.0, gt=0)
    prefix_tokens: int = Field(default=0, ge=0)
    prefix_seed: int = Field(default=0, ge=0, lt=2**32)
    request_timeout_s: float = Field(default=600.0, gt=0)
    part: int = Field(default=0, ge=0)
    parts: int = Field(default=1, ge=1)

    @property
    def own_concurrency(self) -> int | None:
        """This process's share of the concurrency; the first ones take what is left over."""
        if self.concurrency is None:
            return None
        return self.concurrency // self.parts + (self.part < self.concurrency % self.parts)

    @property
    def own_requests(self) -> range:
        """Numbers, within the level, of the requests of this process: in an open loop every ``parts``-th,
        in a closed loop as many as its share of the concurrency."""
        if self.concurrency is None:
            return range(self.part, self.num_requests, self.parts)
        before = sum(self.concurrency // self.parts + (k < self.concurrency % self.parts) for k in range(self.part))
        own = self.own_concurrency or 0
        total = self.num_requests
        return range(total * before // self.concurrency, total * (before + own) // self.concurrency)

    @model_validator(mode="after")
    def _complete(self) -> ClientLevel:
        if [self.concurrency, self.rate_rps, self.ramp].count(None) != 2:
            raise ValueError("give one of concurrency, rate_rps and ramp")
        if self.part >= self.parts or self.parts > (self.concurrency or self.num_requests):
            raise ValueError(f"part {self.part} of {self.parts}: more processes than there is load for")
        if self.backend == "openai" and not self.base_url:
            raise ValueError("backend openai needs base_url")
        if self.backend == "pd-bare" and not (self.prefill_url and self.decode_url):
            raise ValueError("backend pd-bare needs prefill_url and decode_url")
        return self


class ClientAnswer(Frozen):
    """What the load generator measured for one level.

    ``records`` are ordered by arrival, times in seconds since the first arrival. ``cpu_share`` is
    the CPU time of the whole client process over wall time between the first arrival and the last
    answer (1 = one core); ``loop_lag_s`` the 95th percentile of how late its event loop woke up;
    ``clock_step_s`` how far the wall clock moved against the monotonic one meanwhile. Of several
    ``processes`` these are the worst. ``origin_s`` is the first arrival on the monotonic clock.
    ``started_at`` and ``finished_at`` are ISO 8601, UTC.
    """

    name: str
    records: tuple[RequestRecord, ...]
    cpu_share: float | None = None
    loop_lag_s: float | None = None
    clock_step_s: float | None = None
    origin_s: float = 0.0
    processes: int = 1
    started_at: str
    finished_at: str

    @property
    def load(self) -> ClientLoad:
        return ClientLoad(
            processes=self.processes,
            cpu_share=self.cpu_share,
            loop_lag_s=self.loop_lag_s,
            clock_step_s=self.clock_step_s,
        )


def merged(answers: Sequence[ClientAnswer]) -> ClientAnswer:
    """The answers of several processes of one machine as one: they share its monotonic clock."""
    origin_s = min(answer.origin_s for answer in answers)
    records = [
        record.shifted(answer.origin_s - origin_s) if answer.origin_s > origin_s else record
        for answer in answers
        for record in answer.records
    ]

    def worst(field: str) -> float | None:
        found = [value for answer in answers if (value := getattr(answer, field)) is not None]
        return max(found, key=abs) if found else None

    return ClientAnswer(
        name=answers[0].name,
        records=tuple(sorted(records, key=lambda record: record.arrival_s)),
        cpu_share=worst("cpu_share"),
        loop_lag_s=worst("loop_lag_s"),
        clock_step_s=worst("clock_step_s"),
        origin_s=origin_s,
        processes=len(answers),
        started_at=min(answer.started_at for answer in answers),
        finished_at=max(answer.finished_at for answer in answers),
    )


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


def parse_per_gpu(text: str) -> tuple[float, ...]:
    """``1,2.5,4`` requests in flight per GPU. Raises UsageError."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError as error:
        example = "--concurrency-per-gpu: expected numbers such as 1,2,4"
        raise UsageError(f"{example}, got {text!r}") from error
    return _distinct("--concurrency-per-gpu", values)


def parse_ramps(text: str, shape: Literal["linear", "exponential"], burstiness: float) -> tuple[Ramp, ...]:
    """``1:16,2:8``: from and to how many requests/s. Raises UsageError."""
    ramps = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?):(\d+(?:\.\d+)?)\s*", part)
        if not match or not all(0 < float(value) <= MAX_VALUE for value in match.groups()):
            raise UsageError(f"--ramp: expected START:END in requests/s above 0, such as 1:16, got {text!r}")
        ramps.append(Ramp(start_rps=float(match[1]), end_rps=float(match[2]), shape=shape, burstiness=burstiness))
    _distinct("--ramp", [ramp.end_rps for ramp in ramps])
    return tuple(ramps)


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


def prefix_seed(workload: Workload) -> int:
    """Seed of the prefix that all requests of a workload share: the same in all levels."""
    return derive_seed(workload, "prefix")


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
    only_repeat: int | None = None,
) -> Sweep:
    """Levels in the order in which they are measured: every load once, then all again per repeat
    (so that drift hits all loads alike). ``smoke``: the first load alone, once, short;
    ``only_repeat``: that repeat alone.

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
    for repeat in range(repeats) if only_repeat is None else [only_repeat]:
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
        ramp=load if isinstance(load, Ramp) else None,
        burstiness=1.0 if isinstance(load, Closed) else load.burstiness,
        prefix_tokens=workload.shared_prefix_tokens,
        prefix_seed=prefix_seed(workload),
        request_timeout_s=request_timeout_s,
    )
