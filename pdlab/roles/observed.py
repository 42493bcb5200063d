"""What the controller of a fluid pool sees, and the role that it gives an engine. Times in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Role = Literal["prefill", "decode", "draining"]
"""``draining``: is to prefill, but still decodes so many requests that prompts would stall them; takes no new one."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """One engine. ``waiting_prompt_tokens``: of the prompts that it was given to prefill and has not answered;
    ``running``: requests that it decodes, those included whose KV is on its way to it.

    Since the last look: ``prefilled_tokens`` of the prompts that it answered, ``prefill_busy_s`` with at least one
    prompt to prefill, ``generated_tokens`` of the requests that it decodes.
    """

    engine: str
    role: Role
    waiting_prompt_tokens: int
    running: int
    prefilled_tokens: int = 0
    prefill_busy_s: float = 0.0
    generated_tokens: int = 0
    kv_used_share: float | None = None


class RequestCount(NamedTuple):
    """So many requests, and their tokens."""

    requests: int
    tokens: int


def size_class(prompt_tokens: int) -> int:
    """Prompts of one class are as long as each other within a factor of two: how long their answers are is learnt
    together."""
    return prompt_tokens.bit_length()


@dataclass(frozen=True, slots=True)
class ObservedWindow:
    """What happened within the last ``seconds``, by `size_class` of the prompt: ``prompts`` that came and their tokens,
    ``answers`` that ended and theirs, and ``local`` requests whose prompts are computed where they are decoded, which
    are not among ``prompts``. And latencies in seconds: TTFT of the requests that got their first token, TPOT of those
    that ended."""

    seconds: float
    prompts: Mapping[int, RequestCount]
    answers: Mapping[int, RequestCount]
    ttft_s: tuple[float, ...] = ()
    tpot_s: tuple[float, ...] = ()
    local: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ObservedPool:
    """One look at the pool, at ``now_s`` of any clock that only goes forward."""

    now_s: float
    engines: tuple[EngineLoad, ...]
    window: ObservedWindow
