"""Estimate how long the rest of the demo takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from pdlab.core.status_line import minutes


class DemoClock:
    """The remaining time of the demo: an estimate per step, corrected by the times of finished steps of its kind.

    ``estimates_s``: for each step its kind and its estimate in seconds. ``now``: a clock in seconds.
    """

    def __init__(self, estimates_s: Sequence[tuple[str, float]], now: Callable[[], float] = time.monotonic) -> None:
        self._estimates = list(estimates_s)
        self._now = now
        self._began = self._step_began = now()
        self._took: dict[int, float] = {}
        self.step = -1

    @property
    def steps(self) -> int:
        return len(self._estimates)

    @property
    def elapsed_s(self) -> float:
        return self._now() - self._began

    def begin(self, step: int) -> None:
        """Step ``step`` (from 0) begins. Earlier steps that never began no longer count."""
        self.step, self._step_began = step, self._now()

    def end(self) -> None:
        self._took[self.step] = self._now() - self._step_began

    def left_s(self) -> float:
        """Remaining seconds, with the rest of the running step."""
        left = 0.0
        for step, (kind, estimate_s) in enumerate(self._estimates):
            expected_s = estimate_s * self._correction(kind)
            if step == self.step and step not in self._took:
                spent_s = self._now() - self._step_began
                left += max(expected_s - spent_s, 0.1 * spent_s)  # a late step takes a little longer still
            elif step > self.step:
                left += expected_s
        return left

    def _correction(self, kind: str) -> float:
        same = [step for step in self._took if self._estimates[step][0] == kind] or list(self._took)
        return sum(self._took[s] for s in same) / sum(self._estimates[s][1] for s in same) if same else 1.0

    def __str__(self) -> str:
        return f"{minutes(self.elapsed_s)} elapsed, about {minutes(self.left_s())} left"
