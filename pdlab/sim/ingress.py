"""The path of a request to an engine: a latency, and the replica's front end, which takes one request at a time.

Times are in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pdlab.sim.engine import Engine
from pdlab.sim.hardware import Hardware

MOST_STREAMING = 0.9  # the highest share of its time in which a front end streams tokens


class FrontEnd(Protocol):
    """The process that accepts a replica's requests."""

    frontend_free_s: float


@dataclass(frozen=True, slots=True)
class Ingress:
    """The costs of the path: per request, per prompt token, per request at the front end, and per streamed token."""

    overhead_s: float
    token_s: float
    frontend_s: float
    stream_s: float

    @classmethod
    def of(cls, hardware: Hardware, *, moves_kv: bool) -> Ingress:
        """Raises UsageError."""
        value = hardware.value
        return cls(
            overhead_s=value("pd_overhead_ms" if moves_kv else "overhead_ms") * 1e-3,
            token_s=value("ingress_us") * 1e-6,
            frontend_s=value("frontend_ms") * 1e-3,
            stream_s=value("stream_us") * 1e-6,
        )

    def streaming(self, engine: Engine) -> float:
        """The present share of its time in which the front end of an engine streams tokens."""
        return engine.decoding / engine.step_s * self.stream_s if engine.busy else 0.0

    def pass_on(self, front: FrontEnd, input_tokens: int, streaming: float, now_s: float) -> float:
        """A request with that many tokens arrives. Returns when it enters the engine's queue.

        The processes that accept requests also stream every token, so accepting takes longer while they stream.
        """
        slower = 1 / (1 - (streaming if streaming < MOST_STREAMING else MOST_STREAMING))
        free_s = front.frontend_free_s
        front.frontend_free_s = free_s = (free_s if free_s > now_s else now_s) + self.frontend_s * slower
        return free_s + (self.overhead_s + self.token_s * input_tokens) * slower
