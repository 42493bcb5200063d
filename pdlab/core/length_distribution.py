"""The base classes of request lengths. `pdlab.core.lengths` and `pdlab.core.mixes` have the kinds."""

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
    """Base of all kinds of lengths. ``nominal``: the workload's lengths.

    ``label``: the text after ``input:output`` in tables. ``flag_value``: the text for `parse_lengths`. ``identity``:
    equal for distributions that draw equal lengths.
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
        """The longest possible request, by input and output tokens together."""

    def longest_input(self, nominal: Pair) -> int:
        return self.longest(nominal)[0]

    @abstractmethod
    def sequence(self, nominal: Pair, rng: random.Random) -> Iterator[Pair]:
        """An endless sequence of requests."""

    def draw(self, nominal: Pair, count: int, seed: str) -> tuple[Pair, ...]:
        """The first ``count`` requests of the sequence for ``seed``."""
        return tuple(islice(self.sequence(nominal, random.Random(seed)), count))


class LengthsOfFile(LengthDistribution):
    """Facts about the requests in a file. Results keep these facts, but not the requests.

    ``name``: the file's name. ``sha256``: hash of its requests; two with equal hashes are equal. ``path``: the file on
    this machine. ``mean_tokens``: input and output. ``input_range``: shortest and longest input.
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
