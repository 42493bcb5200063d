"""The requests of a workload file as a `Trace`, and the share of their prompts that prefix caches answer."""

from __future__ import annotations

from pathlib import Path

from pdlab.core.catalog import ModelShape
from pdlab.core.engine_cache import EngineCache
from pdlab.core.errors import UsageError
from pdlab.core.schema import parse_yaml
from pdlab.core.workload import Workload
from pdlab.plan.scenario import ASSUMED_CACHE_BLOCKS
from pdlab.sim.hardware import Hardware
from pdlab.sim.level import Trace
from pdlab.traffic.compiled import YAML, compiled
from pdlab.traffic.file import is_traffic
from pdlab.traffic.oracle import oracle_of
from pdlab.traffic.prompts import PromptsInFlight

MOST_REQUESTS = 1_000_000


def has_requests(path: Path) -> bool:
    """Whether a file has requests with times: a workload file, a trace, or compiled requests. False for the YAML of a
    `Workload`, and for a file that cannot be read."""
    if path.suffix.lower() not in YAML:
        return path.is_dir() or path.suffix.lower() in (".csv", ".jsonl", ".json")
    try:
        return is_traffic(parse_yaml(path.read_text(encoding="utf-8")))
    except Exception:  # reading it as a Workload will raise the right error
        return False


def trace_of_file(path: Path) -> Trace:
    """The requests of the file, which must not all arrive at once. Raises UsageError."""
    requests = []
    for request in compiled(path)[1]:
        requests.append(request)
        if len(requests) > MOST_REQUESTS:
            raise UsageError(f"{path}: holds more than {MOST_REQUESTS} requests, too many to simulate; give a window")
    if len(requests) < 2:
        raise UsageError(f"{path}: holds one request; from 2 to {MOST_REQUESTS} can be simulated")
    trace = Trace.of(requests)
    if trace.last_s <= 0:
        raise UsageError(
            f"{path}: all requests arrive at the same time, so the trace has no rate; give arrivals that differ"
        )
    return trace


def mean_workload(trace: Trace) -> Workload:
    """A workload with the mean input and output tokens of the trace, rounded."""
    input_tokens, output_tokens = (round(sum(each) / len(each)) for each in (trace.input_tokens, trace.output_tokens))
    return Workload(input_tokens=input_tokens, output_tokens=output_tokens)


def assumed_hit_share(trace: Trace, hardware: Hardware, shape: ModelShape) -> float:
    """Share of the prompt tokens that one engine finds in a prefix cache of `ASSUMED_CACHE_BLOCKS`, by vLLM's rules.
    0 if prompts share no text."""
    if not trace.requests:
        return 0.0
    prompts = PromptsInFlight(trace.requests, hardware.block_tokens)
    oracle = oracle_of(EngineCache.of(shape, ASSUMED_CACHE_BLOCKS, hardware.block_tokens, hybrid=hardware.hybrid_kv))
    hits = 0
    for number in range(len(trace.requests)):
        hits += oracle.compute(*prompts.of(number))
        prompts.forget(number)
    return hits / sum(trace.input_tokens)
