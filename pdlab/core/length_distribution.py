"""What all kinds of request lengths have in common; the kinds are in `pdlab.core.lengths` and `pdlab.core.mixes`."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from pydantic import Field

from pdlab.core.schema import Frozen

Pair = tuple[int, int]
"""Input and output tokens of one request."""


class MeanTokens(NamedTuple):
    """Expected tokens of a request."""

    input: float
    output: float


class LengthDistribution(Frozen):
    """What all kinds of lengths have. ``nominal`` is the workload's pair: `Pairs` alone does without it.

    ``label`` follows ``input:output`` in tables; ``flag_value`` is the text that `parse_lengths` takes; ``identity``
    is equal for what draws equal lengths.
    """

    @property
    @abstractmethod
    def label(self) -> str: ...

    @property
    @abstractmethod
    def flag_value(self) -> str: ...

    @property
    def identity(self) -> str:
        return self.flag_value

    @abstractmethod
    def mean(self, nominal: Pair) -> MeanTokens: ...

    @abstractmethod
    def shortest_input(self, nominal: Pair) -> int: ...

    @abstractmethod
    def longest(self, nominal: Pair) -> Pair:
        """The possible request of most tokens, input and output together."""

    @abstractmethod
    def longest_input(self, nominal: Pair) -> int: ...

    @abstractmethod
    def sequence(self, nominal: Pair, rng: random.Random) -> Iterator[Pair]:
        """Requests without an end."""

    def draw(self, nominal: Pair, count: int, seed: str) -> tuple[Pair, ...]:
        """The first ``count`` requests of the sequence of ``seed``."""
        return tuple(islice(self.sequence(nominal, random.Random(seed)), count))


class LengthsOfFile(LengthDistribution):
    """What is known of requests that a file lists, which are not kept with results.

    ``name``: the file; ``sha256``: of its requests, which alone makes two of them equal; ``path``: where the file is
    on this machine. ``mean_tokens``: input and output; ``input_range``: shortest and longest input.
    """

    kind: str
    name: str
    sha256: str
    requests: int = Field(ge=1)
    mean_tokens: tuple[float, float]
    longest_request: Pair
    input_range: Pair
    path: str | None = Field(default=None, exclude=True, repr=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self.sha256 == other.sha256

    def __hash__(self) -> int:
        return hash(self.sha256)

    def mean(self, nominal: Pair) -> MeanTokens:
        return MeanTokens(*self.mean_tokens)

    def shortest_input(self, nominal: Pair) -> int:
        return self.input_range[0]

    def longest(self, nominal: Pair) -> Pair:
        return self.longest_request

    def longest_input(self, nominal: Pair) -> int:
        return self.input_range[1]
