"""Rows of a level, such as its requests, in a temporary file: memory hardly grows with their number."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar, overload

from pdlab.core.schema import Frozen
from pdlab.results.columns import GrowingArray, elements, sorted_order, temporary_file, write_errors

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Codes = NDArray[np.int64]


class Row(Frozen):
    """A row that a file of results holds as one line of JSON."""

    def line(self) -> str:
        """The line, without its end."""
        return self.model_dump_json(exclude_defaults=True)


R = TypeVar("R", bound=Row)


class StoredRows(Sequence[R]):
    """Rows in the order of their moments; rows of one moment in the order in which they were added.

    A row is read from the file when it is used. Its place and its moment are in files too.
    """

    _ends: Codes

    def __init__(self, kind: type[R]) -> None:
        self._kind, self._file = kind, temporary_file(self)
        self._ended, self._moments, self._count, self._end = GrowingArray("q"), GrowingArray("d"), 0, 0
        self._order: Codes | None = None

    def add(self, row: R, moment: float) -> None:
        """Raises WriteError if the file cannot grow."""
        line = row.line().encode()
        with write_errors():
            self._file.write(line)
        self._count += 1
        self._end += len(line)
        self._ended.append(self._end)
        self._moments.append(moment)
        self._order = None

    def lines(self) -> Iterator[bytes]:
        """The line of each row. Raises WriteError if the file cannot grow."""
        return map(self._line, elements(self._ordered()))

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[R]:
        return map(self._kind.model_validate_json, self.lines())

    @overload
    def __getitem__(self, at: int) -> R: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[R, ...]: ...
    def __getitem__(self, at: int | slice) -> R | tuple[R, ...]:
        if isinstance(at, slice):
            return tuple(self[number] for number in range(*at.indices(len(self))))
        return self._kind.model_validate_json(self._line(self._ordered()[at]))

    def _line(self, number: int) -> bytes:
        begin = self._ends[number - 1] if number else 0
        return os.pread(self._file.fileno(), self._ends[number] - begin, begin)

    def _ordered(self) -> Codes:
        if self._order is None:
            with write_errors():
                self._file.flush()
            self._ends: Codes = self._ended.array()
            self._order = sorted_order(self._moments.array())
        return self._order


def lines_of(rows: Iterable[Row]) -> Iterator[bytes]:
    """The line of each row."""
    return rows.lines() if isinstance(rows, StoredRows) else (row.line().encode() for row in rows)
