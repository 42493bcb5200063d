"""Rows of a level, such as its requests, in a temporary file: memory hardly grows with their number."""

from __future__ import annotations

import contextlib
import os
import tempfile
import weakref
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, TYPE_CHECKING, TypeVar, overload

from pdlab.core.errors import WriteError
from pdlab.core.schema import Frozen

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Row(Frozen):
    """A row that a file of results holds as one line of JSON."""

    def line(self) -> str:
        """The line, without its end."""
        return self.model_dump_json(exclude_defaults=True)


R = TypeVar("R", bound=Row)


class Kept(Sequence[R]):
    """Rows in the order of their moments; rows of one moment in the order in which they were added.

    Each row takes 24 bytes of memory and is read from the file when it is used.
    """

    def __init__(self, kind: type[R]) -> None:
        self._kind = kind
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the last reference)
        weakref.finalize(self, _close, self._file)
        self._ends, self._moments = array("q", [0]), array("d")
        self._order: NDArray[np.int64] | None = None

    def add(self, row: R, moment: float) -> None:
        """Raises WriteError if the file cannot grow."""
        line = row.line().encode()
        try:
            self._file.write(line)
        except OSError as error:
            raise _full(error) from error
        self._ends.append(self._ends[-1] + len(line))
        self._moments.append(moment)
        self._order = None

    def lines(self) -> Iterator[bytes]:
        """The line of each row. Raises WriteError if the file cannot grow."""
        return map(self._line, self._ordered())

    def __len__(self) -> int:
        return len(self._moments)

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
        begin = self._ends[number]
        return os.pread(self._file.fileno(), self._ends[number + 1] - begin, begin)

    def _ordered(self) -> NDArray[np.int64]:
        if self._order is None:
            import numpy as np

            try:
                self._file.flush()
            except OSError as error:
                raise _full(error) from error
            self._order = np.argsort(np.array(self._moments), kind="stable")
        return self._order


def lines_of(rows: Iterable[Row]) -> Iterator[bytes]:
    """The line of each row."""
    return rows.lines() if isinstance(rows, Kept) else (row.line().encode() for row in rows)


def _close(file: IO[bytes]) -> None:
    with contextlib.suppress(OSError):  # full disk: unwritten data is lost with the file
        file.close()


def _full(error: OSError) -> WriteError:
    return WriteError(
        f"a temporary file in {tempfile.gettempdir()} cannot be written ({error.strerror or error}); free disk space "
        "there, or set TMPDIR to a folder on another disk"
    )
