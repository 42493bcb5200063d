"""Bounded storage for data of requests, so that memory does not grow with their number."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import TypeVar

# What a request waits for is among so many before it: nobody has to remember all of them.
REMEMBERED = 20_000
K = TypeVar("K")
V = TypeVar("V")


class LatestKeys(OrderedDict[K, V]):
    """The latest keys that were set, at most ``most``; ``gone`` is called with the value of a removed key."""

    def __init__(self, most: int = REMEMBERED, gone: Callable[[V], object] | None = None) -> None:
        super().__init__()
        self._most, self._gone = most, gone

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._most:
            _, forgotten = self.popitem(last=False)
            if self._gone is not None:
                self._gone(forgotten)


def percentile_of(counts: Counter[int], part: int) -> int:
    """The smallest value such that ``part`` per cent of the counted values are at or below it."""
    left = -(-counts.total() * part // 100)
    for value in sorted(counts):
        left -= counts[value]
        if left <= 0:
            return value
    raise ValueError("nothing was counted")
