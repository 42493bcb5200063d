"""Arrays in temporary files, one element of each per request or token: the kernel may take their pages from memory, so
memory hardly grows with them. Small ones are in memory."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import IO, TYPE_CHECKING, Any

from pdlab.core.errors import WriteError, reason_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import DTypeLike, NDArray

    Values = NDArray[Any]

SMALL = 1 << 16  # bytes
AT_ONCE = 8192  # elements
ROWS = 512


class GrowingArray:
    """Numbers that are added one by one, of a type code that `array.array` and numpy share."""

    def __init__(self, code: str) -> None:
        self._rest: array[Any] = array(code)
        self._file: IO[bytes] | None = None

    def append(self, value: float) -> None:
        """Raises WriteError where the file cannot grow."""
        self._rest.append(value)
        if len(self._rest) >= AT_ONCE:
            self._put()

    def extend(self, values: Iterable[float] | bytes) -> None:
        """``bytes``: as they are in memory. Raises WriteError where the file cannot grow."""
        if isinstance(values, bytes):
            self._rest.frombytes(values)
        else:
            self._rest.extend(values)
        if len(self._rest) >= AT_ONCE:
            self._put()

    def array(self) -> Values:
        """All until now. Raises WriteError where the file cannot grow."""
        import numpy as np

        if self._file is None:
            return np.array(self._rest)
        self._put()
        return _mapped(self._file, np.dtype(self._rest.typecode))

    def _put(self) -> None:
        if self._file is None:
            self._file = temporary_file(self)
        with write_errors():
            self._rest.tofile(self._file)
            self._file.flush()
        self._rest = array(self._rest.typecode)


class GrowingTable:
    """Rows that are added one by one. ``codes``: name of each column -> its type code."""

    def __init__(self, codes: Mapping[str, str]) -> None:
        self._columns = {name: GrowingArray(code) for name, code in codes.items()}
        self._rows: list[tuple[float, ...]] = []

    def add(self, row: tuple[float, ...]) -> None:
        """Raises WriteError where a file cannot grow."""
        self._rows.append(row)
        if len(self._rows) == ROWS:
            self._put()

    def columns(self) -> dict[str, Values]:
        """All rows until now. Raises WriteError where a file cannot grow."""
        self._put()
        return {name: column.array() for name, column in self._columns.items()}

    def _put(self) -> None:
        rows, self._rows = self._rows, []
        for column, values in zip(self._columns.values(), zip(*rows, strict=True), strict=bool(rows)):
            column.extend(values)


def allocated(count: int, kind: DTypeLike = "d") -> Values:
    """An array of so many elements to be written; they are 0 or empty. Raises WriteError where there is none."""
    import numpy as np

    kind = np.dtype(kind)
    size = count * kind.itemsize
    if size <= SMALL:
        return np.zeros(count, kind)
    with write_errors(), tempfile.TemporaryFile() as file:
        os.posix_fallocate(file.fileno(), 0, size)  # a full disk later would be a signal
        return _mapped(file, kind)


def by_parts(rule: Callable[..., Values], *columns: Values, kind: DTypeLike = "d") -> Values:
    """``rule`` of the columns, which makes an element of each of theirs, part by part."""
    found = allocated(len(columns[0]), kind)
    for begin in range(0, len(found), AT_ONCE):
        found[begin : begin + AT_ONCE] = rule(*(column[begin : begin + AT_ONCE] for column in columns))
    return found


def taken(values: Values, order: NDArray[np.int64]) -> Values:
    """Those elements, in that order."""
    return by_parts(values.__getitem__, order, kind=values.dtype)


def runs_taken(values: Values, counts: NDArray[np.int64], order: NDArray[np.int64]) -> Values:
    """Values in one row, of which ``counts`` belong to each request: those of some requests, in that order."""
    import numpy as np

    if not len(values) or not len(order):
        return values[:0]
    ends = counts.cumsum()
    # Neighbours that stay neighbours are one piece.
    cuts = np.flatnonzero(order[1:] != order[:-1] + 1)
    firsts, lasts = order[np.append(0, cuts + 1)], order[np.append(cuts, len(order) - 1)]
    found, at = allocated(int(counts[order].sum()), values.dtype), 0
    for begin, end in zip(elements((ends - counts)[firsts]), elements(ends[lasts]), strict=True):
        found[at : at + end - begin] = values[begin:end]
        at += end - begin
    return found


def sorted_order(values: Values) -> NDArray[np.int64]:
    """As `numpy.argsort`; equal ones stay in their order."""
    return by_parts(lambda places: places, values.argsort(kind="stable"), kind="q")


def sorted_known(values: Values) -> Values:
    """Numbers in order, without NaN."""
    import numpy as np

    ordered = by_parts(lambda part: part, values)
    ordered.sort()
    return ordered[: np.searchsorted(ordered, np.inf, side="right")]  # NaN is sorted behind all


def elements(values: Values) -> Iterator[Any]:
    """One after the other, as Python's own: a list of all would take four times the column's memory."""
    return chain.from_iterable(values[at : at + AT_ONCE].tolist() for at in range(0, len(values), AT_ONCE))


def temporary_file(owner: object) -> IO[bytes]:
    """A file that is closed with the last reference to ``owner``. Raises WriteError."""
    with write_errors():
        file = tempfile.TemporaryFile()  # noqa: SIM115 (closed with its owner)
    weakref.finalize(owner, _close, file)
    return file


@contextlib.contextmanager
def write_errors() -> Iterator[None]:
    """Raises WriteError where the block cannot write a temporary file."""
    try:
        yield
    except OSError as error:
        raise WriteError(
            f"a temporary file in {tempfile.gettempdir()} cannot be written ({reason_of(error)}); free disk "
            "space there, or set TMPDIR to a folder on another disk"
        ) from error


def _mapped(file: IO[bytes], kind: np.dtype[Any]) -> Values:
    import numpy as np

    return np.frombuffer(mmap.mmap(file.fileno(), 0), kind)


def _close(file: IO[bytes]) -> None:
    with contextlib.suppress(OSError):  # a full disk: what is not written yet is lost with the file
        file.close()
