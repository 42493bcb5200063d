"""Messages between the engines, routers and role board of a fluid pool, one class for each direction. Pure.

Messages are sent as dicts of their fields (`Message.fields`): nodes may not have pdlab, and pickle would send the class
with each object.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pdlab.roles.observed import RequestCount
from pdlab.roles.spec import AUTO


class Message:
    """Base class. ``Kind(**message.fields)`` equals the message."""

    @property
    def fields(self) -> dict[str, Any]:
        """Name -> value of each field."""
        return dict(vars(self))


@dataclass
class EngineReport(Message):
    """From an engine to the board.

    Now: ``waiting_prompt_tokens`` of prompts to prefill for other engines; ``coming``: sequences that it will decode
    after their prefill; ``running``: sequences that it decodes.

    Since its last report: ``prefilled_tokens``, and ``computed_tokens`` of them that were not cached;
    ``prefill_busy_s``: seconds with a prefill; ``generated_tokens``. By size class of the prompt: ``prompts``
    (requests, tokens) that others prefilled for it, ``answers`` (requests, tokens), and ``local`` requests that it
    prefilled itself. Latencies in seconds, of streamed answers; ``handoff_s``: from the end of a prefill on another
    engine to the first token. ``warmed``:
    results of first transfers from other engines (`pdlab.deploy.serving.elastic.EngineAdmission.transfers_ended`).
    """

    waiting_prompt_tokens: int = 0
    coming: int = 0
    running: int = 0
    prefilled_tokens: int = 0
    computed_tokens: int = 0
    prefill_busy_s: float = 0.0
    generated_tokens: int = 0
    prompts: dict[int, tuple[int, int]] = field(default_factory=dict)
    answers: dict[int, tuple[int, int]] = field(default_factory=dict)
    local: dict[int, int] = field(default_factory=dict)
    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    handoff_s: list[float] = field(default_factory=list)
    warmed: dict[str, str] = field(default_factory=dict)


@dataclass
class ReportedSince:
    """Sums of the reports since the last decision: the work of one engine, or the requests and latencies of all."""

    prefilled_tokens: int = 0
    computed_tokens: int = 0
    prefill_busy_s: float = 0.0
    generated_tokens: int = 0
    prompts: dict[int, RequestCount] = field(default_factory=dict)
    answers: dict[int, RequestCount] = field(default_factory=dict)
    local: dict[int, int] = field(default_factory=dict)
    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)

    def add_work(self, report: EngineReport) -> None:
        """Add the work of the report's engine."""
        self.prefilled_tokens += report.prefilled_tokens
        self.computed_tokens += report.computed_tokens
        self.prefill_busy_s += report.prefill_busy_s
        self.generated_tokens += report.generated_tokens

    def add_requests(self, report: EngineReport) -> None:
        """Add the report's requests and latencies."""
        for total, more in ((self.prompts, report.prompts), (self.answers, report.answers)):
            for size, (requests, tokens) in more.items():
                before = total.get(size, RequestCount(0, 0))
                total[size] = RequestCount(before.requests + requests, before.tokens + tokens)
        for size, requests in report.local.items():
            self.local[size] = self.local.get(size, 0) + requests
        self.ttft_s.extend(report.ttft_s)
        self.tpot_s.extend(report.tpot_s)


@dataclass(frozen=True)
class EngineOrders(Message):
    """From the board to an engine. ``local_below``: tokens below which it must prefill prompts itself. ``warm``:
    engines from which it must take a first transfer."""

    local_below: int = 0
    warm: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class RoleNews(Message):
    """From the board to a router; the router returns it with its next poll.

    ``loads``: engine -> (waiting prompt tokens, requests that it decodes or will decode). ``version`` grows with each
    change of ``roles``, ``tick`` with each change of ``roles`` or ``loads``. ``by``: the fixed split, or `AUTO` if the
    controller decides.
    """

    version: int = 0
    tick: int = 0
    roles: Mapping[str, str] = field(default_factory=dict)
    loads: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    by: str = AUTO
