"""The controller of a fluid pool: how many engines prefill. It compares both kinds of work, from rates learnt online.

- **Prefill**, in engines: arriving prompt tokens/s over the rate of one engine whose queue is short enough for TTFT.
  Added is the work of prompts that wait longer than a share of the TTFT bound, to be done within that bound. At a load
  rho with prompts of s seconds, nine of ten prompts wait less than ln 10 x s rho / (2 (1 - rho)) (M/D/1).
- **Decode**, in engines: requests a horizon from now over the largest batch whose step is within the TPOT bound. By
  Little's law arrivals x stay requests decode in the end; a stay is the tokens of an answer times TPOT. The present
  requests approach this number with the stay as time constant. An engine that changes its role keeps its requests.

The worst load of a split is the higher load of both kinds. The controller takes the split with the lowest worst load
(rate matching), if it is better by more than the hysteresis and the present split is not idle.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from pdlab.roles.assign import assign
from pdlab.roles.observed import EngineLoad, ObservedPool, ObservedWindow, Role
from pdlab.roles.rates import AnswerTokens, DecayingSum, DecodeStep, PrefillRate
from pdlab.roles.spec import FluidSpec

LATENCIES_S = 5.0  # length of the window of latencies
PATIENCE_S = 10.0  # wait after the first arrivals for the end of the first answer
LONG_S = 60.0  # assumed stay of requests whose answers are not known yet
MOST_LOAD = 0.95
# Tuned in simulation (docs/fluid.md).
EVERY_S = 1.0  # shortest time between two decisions
GAIN = 0.1  # hysteresis: the worst load must fall by this share of it
GAIN_TO_DECODE = 0.3  # factor of the hysteresis for a change from prefill to decode, which stalls no request
BACK = 2.0  # factor of the hysteresis for a change in the other direction within `SETTLE_S`
SETTLE_S = 10.0
NOISE = 0.3  # a change to decode needs a gain of at least this many standard errors of the arrival rate
GUESSED = 0.5  # factor of the hysteresis while the step time of larger decode batches is a guess
IDLE_BELOW = 0.5  # a split with a lower worst load stays
WINDOW_S = 2.0  # half-life of the arrival rates
HORIZON_S = 5.0  # of the prediction of decode's work
TPOT_SHARE = 0.9  # planned share of the TPOT bound
WAITING_SHARE = 0.25  # prompts that wait for a shorter share of the TTFT bound are no backlog
URGENT_SHARE = 0.5  # engines stop draining if prompts would wait for a longer share of the TTFT bound
DRAINED_SHARE = 0.15  # an engine drains down to this share of a full batch
MARGIN_STEP = 0.02  # step of `Margin`
MOST_MARGIN = 1.3


@dataclass(frozen=True, slots=True)
class RoleDecision:
    """Numbers of engines that prefill (with draining ones) and decode, the reason, and the role of each engine."""

    prefill: int
    decode: int
    changed: bool
    reason: str
    roles: dict[str, Role]


@dataclass(frozen=True, slots=True)
class Demand:
    """Work in engines. ``prefill``: of prefill. ``staying``: of present requests that still decode a horizon from now,
    on the ``decoding`` engines of now. ``coming``: of requests that arrive until then."""

    prefill: float
    staying: float
    coming: float
    decoding: int

    def decode(self, decode: int) -> float:
        """Work on ``decode`` decoding engines. Engines that leave decode keep their requests."""
        return self.staying * min(decode / max(self.decoding, 1), 1.0) + self.coming

    def worst(self, prefill: int, decode: int) -> float:
        """The higher load of the prefill engines and the decode engines."""
        return max(self.prefill / prefill, self.decode(decode) / decode)


def best_split(demand: Demand, engines: int, p_min: int, d_min: int) -> int:
    """Number of prefill engines with the lowest worst load."""
    return min(range(p_min, engines - d_min + 1), key=lambda prefill: demand.worst(prefill, engines - prefill))


def full_load(prompt_s: float, ttft_s: float) -> float:
    """Load of a prefill engine at which nine of ten prompts of ``prompt_s`` keep the TTFT bound ``ttft_s`` (M/D/1)."""
    waits = 2 * max(ttft_s - prompt_s, 0.1 * ttft_s) / (math.log(10) * max(prompt_s, 1e-6))
    return min(waits / (1 + waits), MOST_LOAD)


@dataclass(slots=True)
class Margin:
    """Correction of decode's work, learnt from latencies: the factor ``decode``.

    With each decision it grows a step if only the 90th percentile of TPOT is above its bound, and falls a step if only
    that of TTFT is. If both are within their bounds, it returns to 1.
    """

    decode: float = 1.0

    def learn(self, ttft_share: float | None, tpot_share: float | None) -> None:
        """``ttft_share``, ``tpot_share``: latency over its bound; None without a request."""
        if ttft_share is None or tpot_share is None:
            return
        step = 1 + MARGIN_STEP
        if tpot_share > 1 >= ttft_share:
            self.decode *= step
        elif ttft_share > 1 >= tpot_share:
            self.decode /= step
        elif max(ttft_share, tpot_share) <= 1:
            self.decode = max(self.decode / step, 1.0) if self.decode > 1 else min(self.decode * step, 1.0)
        self.decode = min(max(self.decode, 1 / MOST_MARGIN), MOST_MARGIN)


def ninth_decile(values: Iterable[float]) -> float | None:
    """The 90th percentile; None without values."""
    ordered = sorted(values)
    return ordered[math.ceil(0.9 * len(ordered)) - 1] if ordered else None


@dataclass(slots=True)
class Policy:
    """The controller; call `decide` with each observation. A new object has learnt nothing."""

    spec: FluidSpec
    prefill_rate: PrefillRate = field(default_factory=PrefillRate)
    decode_step: DecodeStep = field(default_factory=DecodeStep)
    answer_tokens: AnswerTokens = field(default_factory=AnswerTokens)
    margin: Margin = field(default_factory=Margin)
    _requests: dict[int, DecayingSum] = field(default_factory=dict)
    _prompts: DecayingSum = field(init=False)
    _latest: deque[ObservedWindow] = field(default_factory=deque)
    _prompt_tokens: DecayingSum = field(init=False)
    _seconds: DecayingSum = field(init=False)
    _running: dict[str, int] = field(default_factory=dict)
    _seen_s: float = 0.0
    _decided_s: float = -math.inf
    _changed_s: float = -math.inf
    _direction: int = 0

    def __post_init__(self) -> None:
        self._prompts = DecayingSum(WINDOW_S)
        self._prompt_tokens = DecayingSum(WINDOW_S)
        self._seconds = DecayingSum(WINDOW_S)

    def decide(self, observed: ObservedPool) -> RoleDecision:
        """The split from now on. Raises ValueError for fewer engines than ``p_min`` + ``d_min``."""
        engines = observed.engines
        spec = self.spec
        if len(engines) < spec.p_min + spec.d_min:
            raise ValueError(
                f"{len(engines)} engines are fewer than {spec.p_min} to prefill and {spec.d_min} to decode"
            )
        self._learn(observed)
        now = sum(each.role != "decode" for each in engines)
        prefill = min(max(now, spec.p_min), len(engines) - spec.d_min)
        reason = f"{now}:{len(engines) - now} is out of bounds" if prefill != now else ""
        demand = self.demand(engines)
        if demand is None:
            reason = reason or "rates are not known yet"
        elif not reason and observed.now_s - self._decided_s < EVERY_S * (1 - 1e-6):
            reason = f"decided {observed.now_s - self._decided_s:.2f} s ago"
        elif not reason:
            prefill, reason = self._choose(demand, prefill, len(engines), observed.now_s)
        if prefill != now:
            self._direction = 1 if prefill > now else -1
            self._changed_s = observed.now_s
        return RoleDecision(
            prefill=prefill,
            decode=len(engines) - prefill,
            changed=prefill != now,
            reason=reason,
            roles=self.roles(engines, prefill),
        )

    def demand(self, engines: tuple[EngineLoad, ...]) -> Demand | None:
        """The present demand; None: rates are not known yet."""
        spec, rate, batch = self.spec, self.prefill_rate.tokens_per_s, self.full_batch
        seconds = self._seconds.total
        if rate is None or batch is None or not seconds:
            return None
        if not self.answer_tokens.requests and self._seen_s < PATIENCE_S:
            return None
        waiting_tokens = sum(each.waiting_prompt_tokens for each in engines)
        open_engines = max(sum(each.role == "prefill" for each in engines), 1)
        usual_tokens = open_engines * rate * WAITING_SHARE * spec.ttft_s
        backlog_tokens_per_s = max(waiting_tokens - usual_tokens, 0.0) / spec.ttft_s
        requests = sum(each.total for each in self._requests.values())
        arriving_tokens_per_s = self._prompt_tokens.total / seconds
        full = full_load(self._prompt_tokens.total / max(self._prompts.total, 1e-9) / rate, spec.ttft_s)
        decoding = [each.running for each in engines if each.role == "decode"]
        coming = stays_s = 0.0
        for size, arrived in self._requests.items():
            tokens = self.answer_tokens.mean(size)
            stay_s = LONG_S if tokens is None else max(tokens * self.tpot_s, 1e-3)
            coming += arrived.total / seconds * stay_s * -math.expm1(-HORIZON_S / stay_s)
            stays_s += arrived.total * stay_s
        left = math.exp(-HORIZON_S * requests / stays_s) if stays_s else 0.0
        return Demand(
            prefill=(arriving_tokens_per_s / full + backlog_tokens_per_s) / rate,
            staying=sum(decoding) * self._stays_longer(decoding) * left / batch * self.margin.decode,
            coming=coming / batch * self.margin.decode,
            decoding=len(decoding),
        )

    @property
    def tpot_s(self) -> float:
        """The planned decode step in seconds. Needs known rates."""
        if self.spec.slo_tpot_s is not None:
            return TPOT_SHARE * self.spec.slo_tpot_s
        assert self.decode_step.line is not None
        return 2 * self.decode_step.line[0]

    def _stays_longer(self, decoding: list[int]) -> float:
        """Factor of the number of requests if each step takes the planned time (Little's law).

        In smaller batches steps are faster, so requests end sooner.
        """
        assert self.decode_step.line is not None
        empty_s, slope_s = self.decode_step.line
        return max(self.tpot_s / (empty_s + slope_s * sum(decoding) / max(len(decoding), 1)), 1.0)

    @property
    def full_batch(self) -> float | None:
        """Largest batch of an engine within the TPOT bound; None: not known yet."""
        return None if self.decode_step.line is None else self.decode_step.batch_within(self.tpot_s)

    def _learn(self, observed: ObservedPool) -> None:
        window, engines = observed.window, observed.engines
        self.prefill_rate.learn(engines)
        self.decode_step.learn(engines, self._running, window.seconds)
        self.answer_tokens.learn(window.answers, window.seconds)
        self._running = {each.engine: each.running for each in engines}
        self._latest.append(window)
        while sum(each.seconds for each in self._latest) > LATENCIES_S:
            self._latest.popleft()
        self._seen_s += window.seconds if window.prompts or window.local else 0.0
        self._seconds.add(window.seconds, window.seconds)
        self._prompt_tokens.add(sum(each.tokens for each in window.prompts.values()), window.seconds)
        self._prompts.add(sum(each.requests for each in window.prompts.values()), window.seconds)
        for size in {*window.prompts, *window.local, *self._requests}:
            came = window.prompts[size].requests if size in window.prompts else 0
            arrived = self._requests.setdefault(size, DecayingSum(WINDOW_S))
            arrived.add(came + window.local.get(size, 0), window.seconds)

    def _shares(self) -> tuple[float | None, float | None]:
        """90th percentiles of the latest (TTFT, TPOT) over their bounds."""
        ttft_s = ninth_decile(value for window in self._latest for value in window.ttft_s)
        tpot_s = ninth_decile(value for window in self._latest for value in window.tpot_s)
        bound_s = self.spec.slo_tpot_s
        return (
            None if ttft_s is None else ttft_s / self.spec.ttft_s,
            None if tpot_s is None or bound_s is None else tpot_s / bound_s,
        )

    def _choose(self, demand: Demand, now: int, engines: int, now_s: float) -> tuple[int, str]:
        spec = self.spec
        self._decided_s = now_s
        ttft_share, tpot_share = self._shares()
        if now_s - self._changed_s >= SETTLE_S:  # before, latencies still show the last change
            self.margin.learn(ttft_share, tpot_share)
        best = best_split(demand, engines, spec.p_min, spec.d_min)
        worst, least = demand.worst(now, engines - now), demand.worst(best, engines - best)
        work = f"prefill {demand.prefill:.1f}, decode {demand.decode(engines - now):.1f} engines of work"
        if self.margin.decode != 1.0:
            work += f" (decode x {self.margin.decode:.2f}: TTFT {_percent(ttft_share)}, TPOT {_percent(tpot_share)})"
        kept = f"{now}:{engines - now} stays: {work}"
        if best == now:
            return now, f"{kept}, no split is loaded less than {worst:.0%}"
        if worst < IDLE_BELOW:
            return now, f"{kept}, loaded {worst:.0%} at most"
        direction = 1 if best > now else -1
        gain = self._gain(direction, worst, now_s)
        if least > worst * (1 - gain):
            return now, f"{kept}, {best}:{engines - best} would be loaded {least:.0%} instead of {worst:.0%}"
        return best, f"{now}:{engines - now} -> {best}:{engines - best}: {work}, loaded {worst:.0%} -> {least:.0%}"

    def _gain(self, direction: int, worst: float, now_s: float) -> float:
        """Hysteresis of a change in this direction, as a share of the worst load. ``direction`` -1: to decode."""
        back = direction != self._direction and now_s - self._changed_s < SETTLE_S
        gain = GAIN * (BACK if back else 1.0)
        if direction < 0:
            # The relative standard error of a rate from n arrivals is 1 / sqrt(n) (Poisson).
            arrived = sum(each.total for each in self._requests.values())
            return max(gain * GAIN_TO_DECODE, NOISE / math.sqrt(max(arrived, 1.0)))
        # The step time of larger batches is a guess until they are tried; overloaded engines lose nothing by trying.
        guess = self.decode_step.guessed
        return 0.0 if worst > 1 and guess > GUESSED else gain * (1 - GUESSED * guess)

    def roles(self, engines: tuple[EngineLoad, ...], prefill: int) -> dict[str, Role]:
        """Engine -> role. Prompts wait for draining engines only up to URGENT_SHARE of the TTFT bound."""
        spec, rate = self.spec, self.prefill_rate.tokens_per_s
        opened = 1
        if rate is not None:
            waiting_tokens = sum(each.waiting_prompt_tokens for each in engines)
            opened = max(1, math.ceil(waiting_tokens / (rate * URGENT_SHARE * spec.ttft_s)))
        batch = self.full_batch or 0.0
        return assign(engines, prefill, most_running=DRAINED_SHARE * batch, opened=min(opened, prefill))


def _percent(share: float | None) -> str:
    """A latency over its bound as text."""
    return "unknown" if share is None else f"{share:.0%} of its bound"
