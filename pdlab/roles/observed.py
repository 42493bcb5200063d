"""Input of the controller of a fluid pool, and the roles of engines. Times in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Role = Literal["prefill", "decode", "draining"]
"""``draining``: will prefill, but still decodes many requests, which prompts would stall; it takes no new request."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """One engine. ``waiting_prompt_tokens``: of prompts that it has not prefilled yet. ``running``: requests that it
    decodes, with those whose KV transfer is in progress.

    Since the last observation: ``prefilled_tokens``; ``prefill_busy_s``: seconds with at least one prompt to prefill,
    both for other engines; ``generated_tokens`` of the requests that it decodes.
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
    """A number of requests, and their tokens."""

    requests: int
    tokens: int


def size_class(prompt_tokens: int) -> int:
    """Class of prompts whose lengths differ by less than a factor of two; the mean answer is learnt per class."""
    return prompt_tokens.bit_length()


@dataclass(frozen=True, slots=True)
class ObservedWindow:
    """Events of the last ``seconds``, by `size_class` of the prompt: ``prompts`` that arrived and ``answers`` that
    ended, with their tokens. ``local``: requests whose prompts the decoding engine prefills; they are not among
    ``prompts``. ``ttft_s``: of requests that got their first token. ``tpot_s``: of requests that ended."""

    seconds: float
    prompts: Mapping[int, RequestCount]
    answers: Mapping[int, RequestCount]
    ttft_s: tuple[float, ...] = ()
    tpot_s: tuple[float, ...] = ()
    local: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ObservedPool:
    """One observation of the pool, at ``now_s`` of a monotonic clock."""

    now_s: float
    engines: tuple[EngineLoad, ...]
    window: ObservedWindow
