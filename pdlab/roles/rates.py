"""What one engine serves, learnt from what it served: prompt tokens/s, and the time of a decode step by its batch.

Old observations fade: their weight falls by half with every half-life, so that a mix of longer contexts, or a
slower GPU, is learnt anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pdlab.roles.observed import EngineLoad, RequestCount

HALF_LIFE_S = 10.0  # of an engine's own time
ANSWERS_HALF_LIFE_S = 60.0
CACHED_HALF_LIFE_S = 60.0  # of the share of prompts that prefix caches answer
LEAST_BUSY_S = 0.2  # engine-seconds of prefill from which the rate is known
STEADY = 0.3  # change of a batch, as a share of it, up to which its step is one
MIXED = 0.5  # share of the time with prompts to prefill from which an engine does not decode alone
LEAST_TOKENS = 200.0  # tokens from which the step time is known
PRIOR_SPREAD = 0.1  # relative spread of batches from which a line through them is believed more than a guess


@dataclass(slots=True)
class DecayingSum:
    """A sum whose older parts count less."""

    half_life_s: float
    total: float = 0.0

    def add(self, value: float, seconds: float) -> None:
        """``value`` came in the last ``seconds``."""
        self.total = self.total * 0.5 ** (seconds / self.half_life_s) + value


@dataclass(slots=True)
class PrefillRate:
    """Prompt tokens/s of an engine that has prompts to prefill."""

    tokens: DecayingSum = field(default_factory=lambda: DecayingSum(HALF_LIFE_S))
    busy_s: DecayingSum = field(default_factory=lambda: DecayingSum(HALF_LIFE_S))

    def learn(self, engines: Iterable[EngineLoad]) -> None:
        # Where requests are decoded too, a prompt takes longer than the engine needs for prompts alone.
        alone = [each for each in engines if each.role == "prefill" and not each.running]
        tokens, busy_s = sum(each.prefilled_tokens for each in alone), sum(each.prefill_busy_s for each in alone)
        # Time that passes without prompts teaches nothing, and makes nothing forgotten.
        self.tokens.add(tokens, busy_s / max(len(alone), 1))
        self.busy_s.add(busy_s, busy_s / max(len(alone), 1))

    @property
    def tokens_per_s(self) -> float | None:
        """Above 0. None: not known yet, so also while the first prompt takes longer than any look."""
        known = self.busy_s.total >= LEAST_BUSY_S and self.tokens.total > 0
        return self.tokens.total / self.busy_s.total if known else None


@dataclass(slots=True)
class DecodeStep:
    """Seconds of a decode step as a line over the batch: the least squares of what was seen, weighted by time.

    By Little's law an engine that decodes N requests for t seconds and gives n tokens took N t / n per step.
    """

    seconds: DecayingSum = field(default_factory=lambda: DecayingSum(HALF_LIFE_S))
    batch: DecayingSum = field(default_factory=lambda: DecayingSum(HALF_LIFE_S))
    batch_square: DecayingSum = field(default_factory=lambda: DecayingSum(HALF_LIFE_S))
    step: DecayingSum = field(default_factory=lambda: DecayingSum(HALF_LIFE_S))
    step_batch: DecayingSum = field(default_factory=lambda: DecayingSum(HALF_LIFE_S))
    tokens: float = 0.0

    def learn(self, engines: Iterable[EngineLoad], before: dict[str, int], seconds: float) -> None:
        """``before``: requests that each engine decoded at the last look."""
        for each in engines:
            began = before.get(each.engine, 0)
            batch = (each.running + began) / 2
            decodes = each.role == "decode" and each.prefill_busy_s <= MIXED * seconds
            # Whose batch changed by much has no one batch.
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
        # Of one batch alone half of the step is taken to grow with it, the more so the less batches differed.
        guessed_s, guess = step_s / 2 / batch, self.guessed
        variance = max(self._variance, 1e-12 * batch * batch)
        slope_s = (1 - guess) * covariance / variance + guess * guessed_s
        slope_s = min(max(slope_s, 0.1 * step_s / batch), 0.9 * step_s / batch)
        return step_s - slope_s * batch, slope_s

    @property
    def guessed(self) -> float:
        """How much of the line is a guess, from 0 to 1: it is one where the batches that were seen hardly differ."""
        if self.seconds.total <= 0:
            return 1.0
        prior = (PRIOR_SPREAD * self.batch.total / self.seconds.total) ** 2
        return prior / (max(self._variance, 0.0) + prior)

    @property
    def _variance(self) -> float:
        weight = self.seconds.total
        return self.batch_square.total / weight - (self.batch.total / weight) ** 2

    def batch_within(self, step_s: float) -> float | None:
        """Requests of an engine whose step takes so long; at least one."""
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
        # Time without answers of a class makes nothing of it forgotten.
        for size, count in answers.items():
            if count.requests:
                for totals, value in ((self.requests, count.requests), (self.tokens, count.tokens)):
                    totals.setdefault(size, DecayingSum(ANSWERS_HALF_LIFE_S)).add(value, seconds)

    def mean(self, size: int) -> float | None:
        """None: no answer of the class has ended yet."""
        return self.tokens[size].total / self.requests[size].total if size in self.requests else None
