"""One simulated level request by request, and where its requests come from."""

from __future__ import annotations

import random
from dataclasses import dataclass

from pdlab.workload import Level, Open, Ramp, Workload


@dataclass(slots=True)
class SimulatedLevel:
    """One level, request by request (lists in order of the prompts; seconds since the level began)."""

    level: Level
    input_tokens: list[int]
    output_tokens: list[int]
    arrival_s: list[float]
    queued_s: list[float]
    prefill_start_s: list[float]
    prefill_end_s: list[float]
    kv_arrived_s: list[float]
    first_token_s: list[float]
    finish_s: list[float]
    computed_tokens: list[float]
    gaps: list[tuple[float, int]]  # every step with decoding sequences: (seconds, tokens it gave)
    transferred_bytes: float
    duration_s: float
    busy: dict[str, float]  # role -> share of the duration its engines were busy, mean over them
    link_busy: float  # share of the duration that the busiest link was in use
    kv_full: float  # share of engine time in which a prompt waited for KV memory
    preemptions: int


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests as they came: arrival in seconds, prompt and output tokens."""

    arrival_s: tuple[float, ...]
    input_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]

    @property
    def rate_rps(self) -> float:
        """Mean rate of arrivals; they begin at 0 and do not all come at once."""
        return (len(self.arrival_s) - 1) / self.arrival_s[-1]

    @property
    def longest(self) -> tuple[int, int]:
        """Input and output tokens of the request that needs most KV cache."""
        return max(zip(self.input_tokens, self.output_tokens, strict=True), key=sum)

    def part(self, of: int) -> Trace:
        """What one of so many equal copies gets: every ``of``-th request."""
        return Trace(self.arrival_s[::of], self.input_tokens[::of], self.output_tokens[::of])


def empty_level(level: Level, workload: Workload, trace: Trace | None) -> SimulatedLevel:
    """The level before its first event."""
    count = len(trace.arrival_s) if trace else level.num_requests
    zeros = [0.0] * count
    return SimulatedLevel(
        level=level,
        input_tokens=list(trace.input_tokens) if trace else [workload.sent_input_tokens] * count,
        output_tokens=list(trace.output_tokens) if trace else [workload.sent_output_tokens] * count,
        arrival_s=zeros[:],
        queued_s=zeros[:],
        prefill_start_s=zeros[:],
        prefill_end_s=zeros[:],
        kv_arrived_s=zeros[:],
        first_token_s=zeros[:],
        finish_s=zeros[:],
        computed_tokens=zeros[:],
        gaps=[],
        transferred_bytes=0.0,
        duration_s=0.0,
        busy={},
        link_busy=0.0,
        kv_full=0.0,
        preemptions=0,
    )


def open_arrivals(load: Open | Ramp, count: int, rng: random.Random) -> list[float]:
    """Moments of an open loop: gamma-distributed gaps of mean 1 / rate; burstiness is their shape."""
    now_s, moments = 0.0, []
    for number in range(count):
        moments.append(now_s)
        rate_rps = load.rate_rps if isinstance(load, Open) else _ramped(load, number / count)
        now_s += rng.gammavariate(load.burstiness, 1 / (rate_rps * load.burstiness))
    return moments


def _ramped(load: Ramp, share: float) -> float:
    """The rate when that share of the requests was sent."""
    if load.shape == "linear":
        return load.start_rps + (load.end_rps - load.start_rps) * share
    return float(load.start_rps * (load.end_rps / load.start_rps) ** share)
