"""Short texts, such as ids of requests, as one array: Python objects take about ten times as much memory."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    TextColumn = NDArray[np.bytes_]

AT_ONCE = 1000


class Texts:
    """Texts that are added one by one, for an array whose elements have the length of the longest text."""

    def __init__(self) -> None:
        self._packed: list[TextColumn] = []
        self._rest: list[bytes] = []

    def add(self, text: str) -> None:
        self._rest.append(_bytes_of(text))
        if len(self._rest) == AT_ONCE:
            self._pack()

    def array(self) -> TextColumn:
        """All of them, in UTF-8."""
        import numpy as np

        self._pack()
        return np.concatenate(self._packed)

    def _pack(self) -> None:
        import numpy as np

        self._packed.append(np.array(self._rest, dtype=np.bytes_))
        self._rest = []


class Places:
    """Index of each text in an array; of equal texts the last."""

    def __init__(self, texts: TextColumn) -> None:
        import numpy as np

        self._places = np.argsort(texts, kind="stable")
        self._sorted = texts[self._places]

    def of(self, text: str | bytes) -> int | None:
        """None: it is not among them."""
        key = text if isinstance(text, bytes) else _bytes_of(text)
        at = bisect_right(self._sorted, key) - 1
        return int(self._places[at]) if at >= 0 and self._sorted[at] == key else None


def text_of(element: bytes) -> str:
    """The text of an element of a `TextColumn`."""
    return element.decode("utf-8", "surrogatepass")


def _bytes_of(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
