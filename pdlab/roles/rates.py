"""Rates of one engine, learnt from its work: prompt tokens/s, and the time of a decode step by batch size.

The weight of an observation halves with every half-life, so that the rates follow a change of the load.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pdlab.roles.observed import EngineLoad, RequestCount

HALF_LIFE_S = 10.0  # in an engine's own time
ANSWERS_HALF_LIFE_S = 60.0
CACHED_HALF_LIFE_S = 60.0  # of the share of prompt tokens in prefix caches
LEAST_BUSY_S = 0.2  # engine-seconds of prefill before the rate is known
STEADY = 0.3  # an observation counts if the batch changed by at most this share
MIXED = 0.5  # an observation of decode counts if the engine prefilled for at most this share of the time
LEAST_TOKENS = 200.0  # generated tokens before the step time is known
PRIOR_SPREAD = 0.1  # relative spread of batches at which the fitted line and the guess have equal weights


@dataclass(slots=True)
class DecayingSum:
    """A sum in which older values count less."""

    half_life_s: float
    total: float = 0.0

    def add(self, value: float, seconds: float) -> None:
        """Add a value of the last ``seconds``."""
        self.total = self.total * 0.5 ** (seconds / self.half_life_s) + value


@dataclass(slots=True)
class PrefillRate:
    """Prompt tokens/s of an engine that has prompts to prefill."""

    tokens: DecayingSum = field(default_factory=lambda: DecayingSum(HALF_LIFE_S))
    busy_s: DecayingSum = field(default_factory=lambda: DecayingSum(HALF_LIFE_S))

    def learn(self, engines: Iterable[EngineLoad]) -> None:
        # Only engines that do not decode, because decode slows a prefill.
        alone = [each for each in engines if each.role == "prefill" and not each.running]
        tokens, busy_s = sum(each.prefilled_tokens for each in alone), sum(each.prefill_busy_s for each in alone)
        # Decay by busy time, so that idle time forgets nothing.
        self.tokens.add(tokens, busy_s / max(len(alone), 1))
        self.busy_s.add(busy_s, busy_s / max(len(alone), 1))

    @property
    def tokens_per_s(self) -> float | None:
        """Above 0; None: not known yet, as during the first prompt."""
        known = self.busy_s.total >= LEAST_BUSY_S and self.tokens.total > 0
        return self.tokens.total / self.busy_s.total if known else None


@dataclass(slots=True)
class DecodeStep:
    """Seconds of a decode step as a line over the batch size: least squares of the observations, weighted by time.

    By Little's law a step takes N t / n seconds if an engine decodes N requests for t seconds and generates n tokens.
    """

    seconds: DecayingSum = field(default_factory=lambda: DecayingSum(HALF_LIFE_S))
    batch: DecayingSum = field(default_factory=lambda: DecayingSum(HALF_LIFE_S))
    batch_square: DecayingSum = field(default_factory=lambda: DecayingSum(HALF_LIFE_S))
    step: DecayingSum = field(default_factory=lambda: DecayingSum(HALF_LIFE_S))
    step_batch: DecayingSum = field(default_factory=lambda: DecayingSum(HALF_LIFE_S))
    tokens: float = 0.0

    def learn(self, engines: Iterable[EngineLoad], before: dict[str, int], seconds: float) -> None:
        """Learn from the last ``seconds``. ``before``: engine -> requests that it decoded at the last observation."""
        for each in engines:
            began = before.get(each.engine, 0)
            batch = (each.running + began) / 2
            decodes = each.role == "decode" and each.prefill_busy_s <= MIXED * seconds
            steady = abs(each.running - began) <= STEADY * batch
            if not decodes or not steady or batch < 1 or each.generated_tokens <= 0:
                continue
            step_s = batch * seconds / each.generated_tokens
            self.tokens += each.generated_tokens
            share_s = seconds / max(len(before), 1)
            for total, value in (
                (self.seconds, 1.0),
                (self.batch, batch),
                (self.batch_square, batch * batch),
                (self.step, step_s),
                (self.step_batch, step_s * batch),
            ):
                total.add(value * seconds, share_s)

    @property
    def line(self) -> tuple[float, float] | None:
        """(seconds of an empty step, seconds per request in the batch); None: not known yet."""
        weight = self.seconds.total
        if self.tokens < LEAST_TOKENS or weight <= 0:
            return None
        batch, step_s = self.batch.total / weight, self.step.total / weight
        covariance = self.step_batch.total / weight - step_s * batch
        # The guess: half of the step grows with the batch. Its weight grows if the observed batches hardly differ.
        guessed_s, guess = step_s / 2 / batch, self.guessed
        variance = max(self._variance, 1e-12 * batch * batch)
        slope_s = (1 - guess) * covariance / variance + guess * guessed_s
        slope_s = min(max(slope_s, 0.1 * step_s / batch), 0.9 * step_s / batch)
        return step_s - slope_s * batch, slope_s

    @property
    def guessed(self) -> float:
        """Weight of the guess in the line, from 0 to 1; it is high if the observed batches hardly differ."""
        if self.seconds.total <= 0:
            return 1.0
        prior = (PRIOR_SPREAD * self.batch.total / self.seconds.total) ** 2
        return prior / (max(self._variance, 0.0) + prior)

    @property
    def _variance(self) -> float:
        weight = self.seconds.total
        return self.batch_square.total / weight - (self.batch.total / weight) ** 2

    def batch_within(self, step_s: float) -> float | None:
        """Batch size whose step takes ``step_s``, at least 1; None: not known yet."""
        if self.line is None:
            return None
        empty_s, slope_s = self.line
        return max((step_s - empty_s) / slope_s, 1.0)


@dataclass(slots=True)
class AnswerTokens:
    """Mean tokens of the answers to prompts of each size class."""

    requests: dict[int, DecayingSum] = field(default_factory=dict)
    tokens: dict[int, DecayingSum] = field(default_factory=dict)

    def learn(self, answers: Mapping[int, RequestCount], seconds: float) -> None:
        # Only classes with an answer decay, so that a class without answers forgets nothing.
        for size, count in answers.items():
            if count.requests:
                for totals, value in ((self.requests, count.requests), (self.tokens, count.tokens)):
                    totals.setdefault(size, DecayingSum(ANSWERS_HALF_LIFE_S)).add(value, seconds)

    def mean(self, size: int) -> float | None:
        """Mean tokens of a class; None: no answer of the class has ended yet."""
        return self.tokens[size].total / self.requests[size].total if size in self.requests else None
