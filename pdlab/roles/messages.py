"""What the engines, the routers and the board of a fluid pool tell each other, one class for each direction. Pure.

They travel as their fields (`Message.fields`), for a class that is not installed on a node would travel with each of
its objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pdlab.roles.observed import RequestCount
from pdlab.roles.spec import AUTO


class Message:
    """``Kind(**message.fields)`` is the message again."""

    @property
    def fields(self) -> dict[str, Any]:
        """Name -> value of each field."""
        return dict(vars(self))


@dataclass
class EngineReport(Message):
    """An engine to the board. Now: the tokens of prompts that it is to prefill for others, sequences that it decodes
    once they are prefilled (``coming``), and that it decodes. Since it told last: what it prefilled and how many tokens
    of it were not cached, seconds in which it prefilled, tokens that it generated; by size class of the prompt
    (requests, tokens) of prompts that were prefilled for it and of answers, and requests whose prompts it computed
    itself (``local``); latencies in seconds, and ``handoff_s``, from a prefilled prompt to its first token.
    ``warmed``: how first transfers from other engines went (`pdlab.deploy.serving.elastic.EngineAdmission.told`)."""

    waiting_prompt_tokens: int = 0
    coming: int = 0
    running: int = 0
    kv_used_share: float | None = None
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
    """What reports told since the last look: the sums of one engine, and the requests and latencies of all."""

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
        """What the engine itself did."""
        self.prefilled_tokens += report.prefilled_tokens
        self.computed_tokens += report.computed_tokens
        self.prefill_busy_s += report.prefill_busy_s
        self.generated_tokens += report.generated_tokens

    def add_requests(self, report: EngineReport) -> None:
        """The requests that came and went, and their latencies."""
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
    """The board to an engine. ``local_below``: tokens below which it is to prefill prompts itself. ``warm``: the
    engines of which it is to take a first transfer."""

    local_below: int = 0
    warm: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class RoleNews(Message):
    """The board to a router, and back as what the router heard last. ``version`` grows with each change of ``roles``,
    ``tick`` also with each of ``loads``: engine -> (prompt tokens that wait, requests that it decodes or will).
    ``by``: the split that stands, `AUTO` where the controller decides."""

    version: int = 0
    tick: int = 0
    roles: Mapping[str, str] = field(default_factory=dict)
    loads: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    by: str = AUTO
