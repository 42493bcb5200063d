"""How many engines of a fluid pool prefill: demand of both kinds of work in engines, from rates learnt on line.

- **Prefill**: prompt tokens/s that arrive, over what one engine serves of them while its queue stays short enough for
  TTFT, and what waits beyond a share of the TTFT bound, to be done within that bound. An engine that serves
  prompts of s seconds at a load rho lets nine of ten wait less than ln 10 x s rho / (2 (1 - rho)) (M/D/1).
- **Decode**: requests per engine a horizon from now, over the largest batch whose step is within the TPOT bound. By
  Little's law arrivals x stay of them decode in the end, a stay being the tokens of an answer times TPOT; those of
  now give way to them with a stay as time constant. An engine that changes its role keeps those that it decodes.

Each split has a worst load, the larger one of both kinds. The one whose worst load is least is taken (rate
matching) where it is better by more than the hysteresis, and where the present one is loaded at all.
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

LATENCIES_S = 5.0  # how far back latencies are looked at
PATIENCE_S = 10.0  # of arrivals, for the first answer to end
LONG_S = 60.0  # how long requests stay whose answers are not known yet
MOST_LOAD = 0.95
# What the controller keeps to, tuned in simulation (docs/fluid.md).
EVERY_S = 1.0  # between two decisions at least
GAIN = 0.1  # by which share of it a split's worst load must be lower to be taken;
GAIN_TO_DECODE = 0.3  # so many times that where engines are to decode that prefill now: it stalls nobody;
BACK = 2.0  # and so many times where the last change went the other way
SETTLE_S = 10.0  # less than so long ago
NOISE = 0.3  # nor is a gain of fewer standard errors of the rate of arrivals taken for one
GUESSED = 0.5  # of it is left where what larger decode batches take is a guess
IDLE_BELOW = 0.5  # a split whose worst load is lower stays
WINDOW_S = 2.0  # half-life of the rates of arrivals
HORIZON_S = 5.0  # how far decode is looked ahead
TPOT_SHARE = 0.9  # of the TPOT bound is planned for
WAITING_SHARE = 0.25  # of the TTFT bound prompts may wait without being a backlog
URGENT_SHARE = 0.5  # and from here on engines stop draining,
DRAINED_SHARE = 0.15  # which they do otherwise down to so much of a full batch
MARGIN_STEP = 0.02  # by which `Margin` moves
MOST_MARGIN = 1.3


@dataclass(frozen=True, slots=True)
class RoleDecision:
    """So many engines prefill (those that drain first included) and decode, why, and the role of each."""

    prefill: int
    decode: int
    changed: bool
    reason: str
    roles: dict[str, Role]


@dataclass(frozen=True, slots=True)
class Demand:
    """Work in engines: of prefill; of the decoding requests that will still be there a horizon from now, on the
    ``decoding`` engines of now; and of those that will have come by then."""

    prefill: float
    staying: float
    coming: float
    decoding: int

    def decode(self, decode: int) -> float:
        """Work on so many engines that decode: those that no longer do keep what they have."""
        return self.staying * min(decode / max(self.decoding, 1), 1.0) + self.coming

    def worst(self, prefill: int, decode: int) -> float:
        """The load of the kind of engines that is loaded most."""
        return max(self.prefill / prefill, self.decode(decode) / decode)


def best_split(demand: Demand, engines: int, p_min: int, d_min: int) -> int:
    """How many of the engines prefill where the worst load is least."""
    return min(range(p_min, engines - d_min + 1), key=lambda prefill: demand.worst(prefill, engines - prefill))


def full_load(prompt_s: float, ttft_s: float) -> float:
    """The load of a prefill engine at which nine of ten prompts of ``prompt_s`` wait no longer than TTFT allows."""
    waits = 2 * max(ttft_s - prompt_s, 0.1 * ttft_s) / (math.log(10) * max(prompt_s, 1e-6))
    return min(waits / (1 + waits), MOST_LOAD)


@dataclass(slots=True)
class Margin:
    """What rates do not tell, learnt from the latencies themselves: decode counts so many times what it is by its rate.

    While the 90th percentile of one latency is beyond its bound and that of the other within, one decision after the
    other, work of the first kind counts a step more; while both are within, it goes back.
    """

    decode: float = 1.0

    def learn(self, ttft_share: float | None, tpot_share: float | None) -> None:
        """Latencies over their bounds; None: no request told."""
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
    """The 90th percentile; None of nothing."""
    ordered = sorted(values)
    return ordered[math.ceil(0.9 * len(ordered)) - 1] if ordered else None


@dataclass(slots=True)
class Policy:
    """The controller. `decide` at every look; what it learns lives here, so that a new one begins anew."""

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
        """The split from now on. Raises ValueError where there are fewer engines than the rules want."""
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
        """None: no rates are known yet."""
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
        """The decode step that is planned for. Only where rates are known."""
        if self.spec.slo_tpot_s is not None:
            return TPOT_SHARE * self.spec.slo_tpot_s
        assert self.decode_step.line is not None
        return 2 * self.decode_step.line[0]

    def _stays_longer(self, decoding: list[int]) -> float:
        """How many times as many requests decode where each step takes as long as planned: in smaller batches they end
        sooner (Little's law)."""
        assert self.decode_step.line is not None
        empty_s, slope_s = self.decode_step.line
        return max(self.tpot_s / (empty_s + slope_s * sum(decoding) / max(len(decoding), 1)), 1.0)

    @property
    def full_batch(self) -> float | None:
        """Requests that an engine decodes within the TPOT bound; None: not known yet."""
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
        """The 90th percentiles of the latest TTFT and TPOT, over their bounds."""
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
        if now_s - self._changed_s >= SETTLE_S:  # until then latencies are those of the change
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
        """The hysteresis: by which share of it the worst load must fall for a change in this direction."""
        back = direction != self._direction and now_s - self._changed_s < SETTLE_S
        gain = GAIN * (BACK if back else 1.0)
        if direction < 0:
            # The relative standard error of a rate of which n arrivals tell is 1 / sqrt(n) (Poisson).
            arrived = sum(each.total for each in self._requests.values())
            return max(gain * GAIN_TO_DECODE, NOISE / math.sqrt(max(arrived, 1.0)))
        # How much larger batches take is a guess until they are tried, and overloaded engines lose nothing by a try.
        guess = self.decode_step.guessed
        return 0.0 if worst > 1 and guess > GUESSED else gain * (1 - GUESSED * guess)

    def roles(self, engines: tuple[EngineLoad, ...], prefill: int) -> dict[str, Role]:
        """Who prefills where so many do: prompts wait for engines that drain up to a share of the TTFT bound."""
        spec, rate = self.spec, self.prefill_rate.tokens_per_s
        opened = 1
        if rate is not None:
            waiting_tokens = sum(each.waiting_prompt_tokens for each in engines)
            opened = max(1, math.ceil(waiting_tokens / (rate * URGENT_SHARE * spec.ttft_s)))
        batch = self.full_batch or 0.0
        return assign(engines, prefill, most_running=DRAINED_SHARE * batch, opened=min(opened, prefill))


def _percent(share: float | None) -> str:
    """Of its bound."""
    return "unknown" if share is None else f"{share:.0%} of its bound"
