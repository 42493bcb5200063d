"""When a request's KV cache arrives: first come, first served at both ends, and through a wire that all share."""

from __future__ import annotations

from typing import Protocol

from pdlab.perf import TransferCosts


class End(Protocol):
    """One engine's side of the link: when it is free again, and how long it was in use."""

    link_free_s: float
    link_busy_s: float


class Links:
    """The links of one deployment; times in seconds."""

    def __init__(self, costs: TransferCosts) -> None:
        self.costs = costs
        self.free_s = 0.0  # the shared wire

    def carry(self, sender: End, receiver: End, size: float, now_s: float) -> float:
        """``size`` bytes leave as soon as both ends (and the wire) are free. Returns when they have arrived."""
        costs = self.costs
        sends_s, receives_s = size / costs.prefill_bytes_per_s, size / costs.decode_bytes_per_s
        takes_s = max(sends_s, receives_s)
        begins_s = max(now_s, sender.link_free_s, receiver.link_free_s)
        if costs.shared:
            begins_s = max(begins_s, self.free_s)
            self.free_s = begins_s + takes_s
        sender.link_free_s, receiver.link_free_s = begins_s + sends_s, begins_s + receives_s
        sender.link_busy_s += sends_s
        receiver.link_busy_s += receives_s
        return begins_s + costs.setup_s + takes_s

    def busy_s(self, ends: list[float]) -> float:
        """Time in use of the busiest link; ``ends``: that of every engine's side."""
        return sum(ends) / 2 if self.costs.shared else max(ends)
