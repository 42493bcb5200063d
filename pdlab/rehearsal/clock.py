"""Simulated time: one simulated second takes ``slow_down`` real seconds.

It counts from the machine's start, as Linux's monotonic clock, so that all processes of a rehearsal share one time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    """Result of `Clock.call_at`."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """The clock of an engine; moments are in simulated seconds."""

    def now_s(self) -> float: ...
    def call_at(self, moment_s: float, callback: Callable[[], None]) -> Timer: ...


class SlowClock:
    """The clock of this process's event loop. ``slow_down``: above 0."""

    def __init__(self, slow_down: float) -> None:
        self.slow_down = slow_down

    def now_s(self) -> float:
        return time.monotonic() / self.slow_down

    def call_at(self, moment_s: float, callback: Callable[[], None]) -> Timer:
        """Call back at that moment, or at once if it has passed. Needs a running event loop."""
        # Not loop.call_at: uvloop counts whole milliseconds from its own origin.
        wait_s = moment_s * self.slow_down - time.monotonic()
        return asyncio.get_running_loop().call_later(max(0.0, wait_s), callback)

    def from_wall(self, monotonic_s: float) -> float:
        """The simulated moment of a reading of the machine's monotonic clock."""
        return monotonic_s / self.slow_down
