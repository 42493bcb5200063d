"""The number of engines of a fluid pool: one more at a high load, one fewer if fewer engines are enough. Pure.

The load of a number of engines is the worst load at their best split (`pdlab.roles.policy.Demand`): work in engines,
with prompts that wait longer than a share of the TTFT bound, over engines. At 100 % the engines serve as much as the
bounds of TTFT and TPOT allow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdlab.roles.policy import Demand, best_split
from pdlab.roles.spec import FluidSpec

Load = Callable[[int], float | None]
"""Number of engines -> load; None: not known yet."""


# One engine is added after the load was above `UP_ABOVE` for `UP_AFTER_S`. One is removed after the load of one engine
# fewer was below `DOWN_BELOW` for the specification's ``down_after_s``.
UP_ABOVE, UP_AFTER_S, DOWN_BELOW = 0.9, 10.0, 0.6
# No engine of the first ones is removed for this time, because the launch is being checked.
SETTLE_S = 600.0


@dataclass(frozen=True, slots=True)
class CountDecision:
    """The number of engines from now on, and the reason."""

    engines: int
    changed: bool
    reason: str


@dataclass(slots=True)
class CountPolicy:
    """Call `decide` regularly. It changes the number by one, and again only after this change is done."""

    spec: FluidSpec
    settle_s: float = SETTLE_S
    _began_s: float | None = None
    _above_since_s: float | None = None
    _below_since_s: float | None = None

    def decide(self, now_s: float, playing: int, wanted: int, load: Load) -> CountDecision:
        """The number of engines from now on. ``now_s``: seconds of a monotonic clock. ``playing``: engines that take
        work. ``wanted``: the last decision."""
        spec = self.spec
        least, most = spec.least or spec.engines, spec.most or spec.engines
        self._began_s = now_s if self._began_s is None else self._began_s
        if not least <= wanted <= most:
            bound = least if wanted < least else most
            return self._step(wanted, 1 if wanted < bound else -1, f"{least} to {most} are allowed")
        now, fewer = load(playing), load(wanted - 1)
        # Not before the last change is done: the load does not show its effect before.
        above = now is not None and now > UP_ABOVE and playing >= wanted
        below = fewer is not None and fewer < DOWN_BELOW
        self._above_since_s = (now_s if self._above_since_s is None else self._above_since_s) if above else None
        self._below_since_s = (now_s if self._below_since_s is None else self._below_since_s) if below else None
        if now is None:
            return CountDecision(wanted, False, f"{wanted} engines stay: rates are not known yet")
        text = f"{playing} are loaded {now:.0%}"
        if self._above_since_s is not None and wanted < most:
            above_s = now_s - self._above_since_s
            if above_s >= UP_AFTER_S:
                return self._step(wanted, 1, f"{text}, more than {UP_ABOVE:.0%} for {above_s:.0f} s")
        early = wanted <= spec.engines and now_s - self._began_s < self.settle_s
        if self._below_since_s is not None and wanted > least and playing <= wanted and not early:
            below_s = now_s - self._below_since_s
            if below_s >= spec.down_after_s:
                why = f"{wanted - 1} would be loaded {fewer:.0%}, less than {DOWN_BELOW:.0%} for {below_s:.0f} s"
                return self._step(wanted, -1, why)
        would = "" if fewer is None or wanted <= least else f", {wanted - 1} would be {fewer:.0%}"
        return CountDecision(wanted, False, f"{wanted} engines stay: {text}{would}")

    def _step(self, wanted: int, step: int, why: str) -> CountDecision:
        self._above_since_s = self._below_since_s = None
        return CountDecision(wanted + step, True, f"{wanted} -> {wanted + step} engines: {why}")


def load_of(demand: Demand | None, engines: int, p_min: int, d_min: int, *, idle: bool) -> float | None:
    """The load of a number of engines at their best split; None if rates are not known, infinite below ``p_min`` +
    ``d_min`` engines. ``idle``: no request waits, runs or arrived, so the load is 0 also without known rates."""
    if engines < p_min + d_min:
        return float("inf")
    if demand is None:
        return 0.0 if idle else None
    prefill = best_split(demand, engines, p_min, d_min)
    return demand.worst(prefill, engines - prefill)
