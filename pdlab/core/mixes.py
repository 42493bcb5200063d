"""Request lengths and rates that change with time: mixes that alternate or drift, and a flash crowd.

The length of a request depends on its due time, so an open loop is needed. Due times and lengths are drawn here from
the workload's seed. So every measured, rehearsed or simulated deployment gets the same requests at a rate.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from pydantic import Field, model_validator

from pdlab.core.errors import UsageError
from pdlab.core.length_distribution import LengthDistribution, MeanTokens, Pair
from pdlab.core.schema import Frozen, validate

FORM = "mixes:INPUT:OUTPUT[@RATE],...[,every=SECONDS][,drift][,crowd=prompts*4@AT+SECONDS]"
HALVINGS = 50
_NUMBER = r"(?:\d{1,9}\.?\d{0,9}|\.\d{1,9})"
_MIX = re.compile(rf"(\d{{1,7}}):(\d{{1,7}})(?:@({_NUMBER}))?")
_CROWD = re.compile(rf"(prompts|rate)\*({_NUMBER})@({_NUMBER})\+({_NUMBER})")


class Mix(Frozen):
    """Tokens of every request for some time. Requests arrive at ``rate`` times the load's rate."""

    input_tokens: int = Field(ge=1)
    output_tokens: int = Field(ge=1)
    rate: float = Field(default=1.0, gt=0, le=1000)

    @property
    def text(self) -> str:
        rate = "" if self.rate == 1 else f"@{self.rate:g}"
        return f"{self.input_tokens}:{self.output_tokens}{rate}"


class LoadSurge(Frozen):
    """From ``at_s``, for ``for_s`` seconds, prompts are ``factor`` times as long, or arrive at ``factor`` times the
    rate."""

    of: Literal["prompts", "rate"]
    factor: float = Field(gt=0, le=1000)
    at_s: float = Field(ge=0)
    for_s: float = Field(gt=0)

    @property
    def text(self) -> str:
        return f"{self.of}*{self.factor:g}@{self.at_s:g}+{self.for_s:g}"

    @property
    def ends_s(self) -> float:
        return self.at_s + self.for_s


class Arrival(NamedTuple):
    """The due time of a request, in seconds since the level began, and its tokens."""

    due_s: float
    input_tokens: int
    output_tokens: int


class Mixes(LengthDistribution):
    """Each of the ``mixes`` in turn for ``every_s`` seconds; the first follows the last.

    ``drift``: each mix changes linearly into the next. The nominal lengths are the mean lengths of a whole round,
    without the ``crowd``.
    """

    kind: Literal["mixes"] = "mixes"
    mixes: tuple[Mix, ...] = Field(min_length=1, max_length=1000)
    every_s: float = Field(default=60.0, gt=0, le=86400)
    drift: bool = False
    crowd: LoadSurge | None = None

    @model_validator(mode="after")
    def _moves(self) -> Mixes:
        if len(self.mixes) == 1 and self.crowd is None:
            raise ValueError(f"one mix does not change with time: give two, or a crowd ({FORM})")
        return self

    @property
    def flag_value(self) -> str:
        parts = [mix.text for mix in self.mixes]
        parts += [f"every={self.every_s:g}"] if len(self.mixes) > 1 else []
        parts += ["drift"] if self.drift else []
        parts += [f"crowd={self.crowd.text}"] if self.crowd else []
        return "mixes:" + ",".join(parts)

    @property
    def label(self) -> str:
        return self.flag_value.replace(":", " ", 1)

    @property
    def round_s(self) -> float:
        """Seconds until the first mix returns."""
        return len(self.mixes) * self.every_s

    @property
    def whole_s(self) -> float:
        """The shortest level with all of it, in seconds: a round, and after a crowd its duration once more."""
        return max(self.round_s, 0.0 if self.crowd is None else self.crowd.ends_s + self.crowd.for_s)

    def at(self, moment_s: float) -> Mix:
        """The mix at that time."""
        turn, into_s = divmod(moment_s, self.every_s)
        mix = self.mixes[int(turn) % len(self.mixes)]
        if self.drift:
            rate, *tokens = _between(mix, self.mixes[(int(turn) + 1) % len(self.mixes)], into_s / self.every_s)
            mix = Mix(rate=rate, input_tokens=round(tokens[0]), output_tokens=round(tokens[1]))
        crowd = self.crowd
        if crowd is None or not crowd.at_s <= moment_s < crowd.ends_s:
            return mix
        if crowd.of == "rate":
            return mix.model_copy(update={"rate": mix.rate * crowd.factor})
        return mix.model_copy(update={"input_tokens": max(1, round(mix.input_tokens * crowd.factor))})

    def arrivals(self, rate_rps: float, burstiness: float, seed: str) -> Iterator[Arrival]:
        """An endless sequence of requests.

        The gaps are gamma-distributed with shape ``burstiness``, at the present rate. A gap that is longer than the
        time to a change of the rate continues at the new rate.
        """
        rng, now_s = random.Random(seed), 0.0
        while True:
            mix = self.at(now_s)
            yield Arrival(now_s, mix.input_tokens, mix.output_tokens)
            gap = -math.log(1 - rng.random()) if burstiness == 1 else rng.gammavariate(burstiness, 1 / burstiness)
            while True:
                per_s = rate_rps * self.at(now_s).rate
                changes_s = self._next_change_s(now_s)
                if now_s + gap / per_s < changes_s:
                    break
                gap -= (changes_s - now_s) * per_s
                now_s = changes_s
            now_s += gap / per_s

    def _next_change_s(self, now_s: float) -> float:
        """The time of the next jump of the rate."""
        moments = [(math.floor(now_s / self.every_s + 1e-9) + 1) * self.every_s]
        if self.crowd is not None:
            moments += [moment_s for moment_s in (self.crowd.at_s, self.crowd.ends_s) if moment_s > now_s]
        return min(moments)

    @property
    def mean_rate(self) -> float:
        """The mean rate of a round, over the load's rate."""
        return sum(mix.rate for mix in self.mixes) / len(self.mixes)

    def mean_requests(self, seconds: float) -> float:
        """Mean number of requests in that time from the begin of a level, at a load of 1 request/s; with the crowd."""
        crowd = self.crowd
        total = self._without_crowd(seconds)
        if crowd is None or crowd.of != "rate":
            return total
        begin_s, end_s = (min(moment_s, seconds) for moment_s in (crowd.at_s, crowd.ends_s))
        return total + (crowd.factor - 1) * (self._without_crowd(end_s) - self._without_crowd(begin_s))

    def _without_crowd(self, seconds: float) -> float:
        rounds, rest_s = divmod(seconds, self.round_s)
        total = rounds * self.round_s * self.mean_rate
        for begin, end in zip(self.mixes, (*self.mixes[1:], self.mixes[0]), strict=True):
            turn_s = min(rest_s, self.every_s)
            grown = (end.rate - begin.rate) * turn_s / self.every_s if self.drift else 0.0
            total += turn_s * (begin.rate + grown / 2)
            rest_s -= turn_s
        return total

    def mean_duration_s(self, requests: float) -> float:
        """The time in which that many requests arrive on average, at a load of 1 request/s: the inverse of
        `mean_requests`."""
        low, high = 0.0, self.round_s
        while self.mean_requests(high) < requests:
            low, high = high, 2 * high
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.mean_requests(middle) < requests else (low, middle)
        return high

    @property
    def constant_rate(self) -> bool:
        """Whether requests arrive at one mean rate all the time."""
        crowded = self.crowd is not None and self.crowd.of == "rate" and self.crowd.factor != 1
        return not crowded and len({mix.rate for mix in self.mixes}) == 1

    @property
    def most_rate(self) -> float:
        """The highest rate, over the load's rate."""
        crowd = self.crowd.factor if self.crowd is not None and self.crowd.of == "rate" else 1.0
        return max(mix.rate for mix in self.mixes) * max(crowd, 1.0)

    def mean(self, nominal: Pair) -> MeanTokens:
        weights = []  # (requests, input tokens, output tokens), for drifts by Simpson's rule, which is exact here
        for begin, end in zip(self.mixes, (*self.mixes[1:], self.mixes[0]), strict=True):
            parts = ((0.0, 1), (0.5, 4), (1.0, 1)) if self.drift else ((0.0, 6),)
            for share, weight in parts:
                rate, inputs, outputs = _between(begin, end, share)
                weights.append((weight * rate, inputs, outputs))
        total = sum(weight for weight, _, _ in weights)
        return MeanTokens(sum(w * a for w, a, _ in weights) / total, sum(w * b for w, _, b in weights) / total)

    def _all(self) -> Iterator[Pair]:
        crowded = self.crowd.factor if self.crowd is not None and self.crowd.of == "prompts" else 1.0
        for mix in self.mixes:
            for factor in (1.0, crowded):
                yield max(1, round(mix.input_tokens * factor)), mix.output_tokens

    def shortest_input(self, nominal: Pair) -> int:
        return min(inputs for inputs, _ in self._all())

    def longest(self, nominal: Pair) -> Pair:
        return max(self._all(), key=sum)

    def longest_input(self, nominal: Pair) -> int:
        return max(inputs for inputs, _ in self._all())

    def sequence(self, nominal: Pair, rng: random.Random) -> Iterator[Pair]:
        raise UsageError(f"{self.flag_value}: requests follow from when they are due; give a request rate")


def _between(begin: Mix, end: Mix, share: float) -> Iterator[float]:
    """Rate, input tokens and output tokens at that share of the way."""
    ends = ((getattr(begin, name), getattr(end, name)) for name in ("rate", "input_tokens", "output_tokens"))
    return ((1 - share) * a + share * b for a, b in ends)


def parse_mixes(text: str) -> Mixes:
    """Parse the text after ``mixes:`` in `FORM`. Raises UsageError, without the name of the flag or key."""
    data: dict[str, Any] = {"mixes": []}
    for part in (each.strip() for each in text.split(",")):
        name, _, value = part.partition("=")
        if match := _MIX.fullmatch(part):
            data["mixes"].append({"input_tokens": match[1], "output_tokens": match[2], "rate": match[3] or 1})
        elif part == "drift":
            data["drift"] = True
        elif name == "every" and re.fullmatch(_NUMBER, value):
            data["every_s"] = value
        elif name == "crowd" and (match := _CROWD.fullmatch(value)):
            data["crowd"] = {"of": match[1], "factor": match[2], "at_s": match[3], "for_s": match[4]}
        else:
            raise UsageError(f"mixes:{text}: {part!r} is no part of it; give {FORM}")
    return validate(Mixes, data, where=f"mixes:{text}")
