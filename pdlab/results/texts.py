"""Short texts, such as ids of requests, as one array: Python objects take about ten times as much memory."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from pdlab.results.columns import ROWS, GrowingArray, allocated, elements, sorted_order, taken

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Codes = NDArray[np.int64]
    TextColumn = NDArray[np.bytes_]


class Texts:
    """Texts that are added one by one, for an array whose elements have the length of the longest text."""

    def __init__(self) -> None:
        self._bytes, self._counts, self._longest = GrowingArray("B"), GrowingArray("q"), 1
        self._rest: list[bytes] = []

    def add(self, text: str) -> None:
        """Raises WriteError where a file cannot grow."""
        self._rest.append(_bytes_of(text))
        if len(self._rest) == ROWS:
            self._put()

    def array(self) -> TextColumn:
        """All of them, in UTF-8."""
        self._put()
        every, counts = self._bytes.array(), self._counts.array()
        found, begin = allocated(len(counts), f"S{self._longest}"), 0
        for at, count in enumerate(elements(counts)):
            found[at] = every[begin : begin + count].tobytes()
            begin += count
        return found

    def _put(self) -> None:
        counts = [len(text) for text in self._rest]
        self._longest = max((self._longest, *counts))
        self._counts.extend(counts)
        self._bytes.extend(b"".join(self._rest))
        self._rest = []


class TextIndex:
    """Index of each text in an array; of equal texts the last."""

    def __init__(self, texts: TextColumn) -> None:
        self._places = sorted_order(texts)
        self._sorted = taken(texts, self._places)

    def of(self, text: str | bytes) -> int | None:
        """None: it is not among them."""
        key = text if isinstance(text, bytes) else _bytes_of(text)
        at = bisect_right(self._sorted, key) - 1
        return int(self._places[at]) if at >= 0 and self._sorted[at] == key else None


def text_codes(texts: TextColumn) -> Codes:
    """A number of each text, counted from 0: equal ones have the same."""
    places = sorted_order(texts)
    ordered, numbers = taken(texts, places), allocated(len(texts), "q")
    numbers[places[1:]] = (ordered[1:] != ordered[:-1]).cumsum()
    return numbers


def text_of(element: bytes) -> str:
    """The text of an element of a `TextColumn`."""
    return element.decode("utf-8", "surrogatepass")


def _bytes_of(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
