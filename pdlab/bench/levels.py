"""The number of requests of a level, the seeds, and the levels of a sweep."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence

from pdlab.core.deployment import Collocated, Deployment, Fluid
from pdlab.core.errors import UsageError
from pdlab.core.mixes import Mixes
from pdlab.core.replayed import Replayed
from pdlab.core.workload import Closed, Level, Load, Open, Ramp, Replay, RunKey, Workload, title

PROMPTS_PER_CONCURRENCY = 10
MIN_PROMPTS = 20
ROUNDING_DIGITS = 6  # an error of floating point makes no request
HOLD_S, FINAL_HOLD_S = 60.0, 600.0
HOLD_E2EL = 10  # times E2EL, at least: two go by until the system has filled, one after the last judged arrival
SMOKE_PROMPTS_PER_CONCURRENCY = 2
SMOKE_RATE_SECONDS = 10
MIN_SMOKE_PROMPTS = 8
MIN_WARMUP = 8
WARMUP_CONCURRENCY = 8


def num_requests(
    load: Load,
    workload: Workload,
    *,
    smoke: bool = False,
    hold_s: float = HOLD_S,
    e2el_s: float = 0.0,
) -> int:
    """Requests of one level.

    Closed loop: 10 per unit of concurrency, at least 20. Open loop and ramp: the mean arrivals in the time for which
    the load is held (`held_s`), at least 20. Smoke: 2 per unit, or 10 s of arrivals, at least 8. Replay: those of its
    file.
    """
    if isinstance(load, Replay):
        if not isinstance(workload.lengths, Replayed):
            raise UsageError("a replay takes its requests from a workload file; give --workload FILE")
        return workload.lengths.requests
    least = MIN_SMOKE_PROMPTS if smoke else MIN_PROMPTS
    if isinstance(load, Closed):
        per_unit = SMOKE_PROMPTS_PER_CONCURRENCY if smoke else PROMPTS_PER_CONCURRENCY
        return max(least, per_unit * load.concurrency)
    seconds = SMOKE_RATE_SECONDS if smoke else held_s(workload, hold_s, e2el_s)
    return max(least, requests_within(load, workload, seconds))


def held_s(workload: Workload, hold_s: float, e2el_s: float = 0.0) -> float:
    """For how long an open loop or a ramp is held: ``hold_s``, or 10 times ``e2el_s`` (the known duration of a request)
    if that is longer; with lengths that change with time at least two rounds."""
    two_rounds_s = 2 * workload.lengths.whole_s if isinstance(workload.lengths, Mixes) else 0.0
    return max(hold_s, HOLD_E2EL * e2el_s, two_rounds_s)


def requests_within(load: Open | Ramp, workload: Workload, seconds: float) -> int:
    """The mean number of requests that arrive in that time from the begin of a level, rounded up."""
    return math.ceil(round(workload.mean_requests(load, seconds), ROUNDING_DIGITS))


def derive_seed(workload: Workload, *parts: str | float) -> int:
    """A 32-bit seed from the experiment's seed, the properties of its requests, and ``parts``."""
    data = {**workload.model_dump(mode="json"), "lengths": workload.lengths.identity}
    text = json.dumps([data, *parts], sort_keys=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def prompt_stream(workload: Workload, *, smoke: bool) -> str:
    """Name of the stream of prompts of a workload's sweeps: two streams share no prompt, for any attempts."""
    return f"{'smoke' if smoke else 'level'} {derive_seed(workload):08x}"


def level_seed(workload: Workload, key: RunKey, *, smoke: bool = False, attempt: int = 0) -> int:
    """Seed of one level. It differs by ``attempt``: a level that is measured again must not find its prompts in the
    prefix cache.
    """
    kind = "smoke" if smoke else "level"
    return derive_seed(workload, kind, key.kind, key.value, key.repeat, attempt, key.look)


def prefix_seed(workload: Workload) -> int:
    """Seed of the prefix that all requests of a workload share: the same in all levels."""
    return derive_seed(workload, "prefix")


def warmup_seed(workload: Workload, *, smoke: bool, attempt: int) -> int:
    """Seed of the warm-up before the first level; it differs from those of all levels."""
    return derive_seed(workload, "smoke-warm-up" if smoke else "warm-up", attempt)


def fill_seed(workload: Workload, part: int, *, attempt: int) -> int:
    """Seed of one part of the prompts that fill KV pools; it differs from those of all levels, so that no level finds
    its prompts in the prefix cache.
    """
    return derive_seed(workload, "fill", part, attempt)


def fill_tokens(workload: Workload) -> int:
    """Length of a prompt that fills KV pools: as many tokens as a whole request of the workload leaves there."""
    return workload.sent_input_tokens + workload.sent_output_tokens - 1


def warmup_requests(deployment: Deployment | None) -> int:
    """Warm-up prompts, at least 8: two for every pair of a prefill and a decode engine, or for every collocated or
    fluid engine. A launch of fluid engines has made each pair's first transfer. 8 if the deployment is unknown."""
    if deployment is None:
        return MIN_WARMUP
    topology = deployment.topology
    if isinstance(topology, (Collocated, Fluid)):
        return max(MIN_WARMUP, 2 * topology.pool.ranks)
    return max(MIN_WARMUP, 2 * topology.prefill.ranks * topology.decode.ranks)


def warmup_concurrency(deployment: Deployment | None) -> int:
    """Warm-up prompts in flight: 8, or one per engine of the larger pool. With 8 the warm-up of a hundred engines
    would take hours."""
    if deployment is None:
        return WARMUP_CONCURRENCY
    return max(WARMUP_CONCURRENCY, *(pool.ranks for pool in deployment.pools.values()))


def per_gpu_loads(values: Sequence[float], gpus: int) -> tuple[Closed, ...]:
    """Closed loops of that many requests in flight per GPU: rounded, at least one."""
    return tuple(Closed(concurrency=max(1, round(value * gpus)), per_gpu=value) for value in values)


def check_names(loads: Iterable[Load]) -> None:
    """Raises UsageError for two loads whose levels would have one name."""
    named: dict[str, Load] = {}
    for load in loads:
        stem = RunKey(kind=load.kind, value=load.value).stem
        other = named.setdefault(stem, load)
        if other is load:
            continue
        if other.value == load.value:
            raise UsageError(f"{title(load)} is listed twice: leave one of the two out")
        raise UsageError(
            f"two loads have one name, {stem} ({other.value:.15g} and {load.value:.15g}; a name has six digits): leave "
            "one of the two out"
        )


def sweep_levels(
    workload: Workload,
    loads: Sequence[Load],
    *,
    repeats: int = 1,
    prompts_per_level: int | None = None,
    smoke: bool = False,
    attempt: int = 0,
    only_repeat: int | None = None,
    hold_s: float = HOLD_S,
) -> tuple[Level, ...]:
    """Levels in the order in which they are measured: every load once, then all again per repeat, so that drift
    affects all loads alike. ``smoke``: only the first load, once, short. ``only_repeat``: only that repeat.

    Raises UsageError if there is no load, for a load that `Workload.check_load` refuses, and for a part of a replay.
    """
    if not loads:
        raise UsageError("no load level given; use --concurrency or --request-rate")
    if smoke:
        loads, repeats = loads[:1], 1
    levels = []
    for repeat in range(repeats) if only_repeat is None else [only_repeat]:
        for load in loads:
            workload.check_load(load)
            if isinstance(load, Replay) and (smoke or prompts_per_level is not None):
                raise UsageError("a replay sends what its file holds; give a shorter window: in the file")
            key = RunKey(kind=load.kind, value=load.value, repeat=repeat)
            levels.append(
                Level(
                    load=load,
                    repeat=repeat,
                    num_requests=prompts_per_level or num_requests(load, workload, smoke=smoke, hold_s=hold_s),
                    seed=level_seed(workload, key, smoke=smoke, attempt=attempt),
                )
            )
    return tuple(levels)
