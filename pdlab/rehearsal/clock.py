"""Simulated time that passes slowly: one second of it takes ``slow_down`` seconds.

It counts from the machine's start, as Linux's monotonic clock does, so that all processes of a rehearsal have one time
and can tell each other moments.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    """What `Clock.call_at` gives."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """Where an engine's time comes from; moments in simulated seconds."""

    def now_s(self) -> float: ...
    def call_at(self, moment_s: float, callback: Callable[[], None]) -> Timer: ...


class SlowClock:
    """Of this process's event loop. ``slow_down`` is above 0."""

    def __init__(self, slow_down: float) -> None:
        self.slow_down = slow_down

    def now_s(self) -> float:
        return time.monotonic() / self.slow_down

    def call_at(self, moment_s: float, callback: Callable[[], None]) -> Timer:
        """Call back at that moment, or soon where it has passed. Needs a running event loop."""
        # Not loop.call_at: uvloop counts whole milliseconds from a moment of its own.
        wait_s = moment_s * self.slow_down - time.monotonic()
        return asyncio.get_running_loop().call_later(max(0.0, wait_s), callback)

    def from_wall(self, monotonic_s: float) -> float:
        """The simulated moment of one on the machine's monotonic clock."""
        return monotonic_s / self.slow_down
