"""Checks of the paths on a command line, before the work begins."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from pdlab.core.errors import UsageError, reason_of
from pdlab.core.files import real

PICTURES = (".png", ".svg", ".pdf")


def check_writable(path: Path, flag: str) -> None:
    """Raises UsageError if no file can be written at ``path``."""
    with _usable(path, flag):
        file = real(path)  # the probe must not remove a link
        if not file.parent.is_dir():
            raise UsageError(f"{flag} {path}: no folder {file.parent}; make it, or choose another")
        if file.is_dir():
            raise UsageError(f"{flag} {path}: is a folder; give a file in it")
        existed = file.exists()
        if existed and not file.is_file():  # a pipe: its reader would take the probe for the end
            if not os.access(file, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return
        file.open("ab").close()  # permissions do not show a read-only file system, and root ignores them
        if not existed:
            file.unlink()


def check_folder(path: Path, flag: str, *, written: bool = True) -> None:
    """Raises UsageError if files cannot be written in the folder ``path``, which need not exist.

    ``written``: False if nothing will be written now; it need not be writable then.
    """
    with _usable(path, flag):
        folder = path.resolve()
        broken = [part for part in (path, *path.parents) if part.is_symlink() and not part.exists()]
        if broken:
            raise UsageError(f"{flag} {path}: {broken[0]} is a link to nothing; give a folder")
        while not folder.exists():
            folder = folder.parent
        if not folder.is_dir():
            raise UsageError(f"{flag} {path}: {folder} is a file; give a folder")
        if not written:
            return
        probe = folder / f".pdlab-{os.getpid()}"
        probe.open("xb").close()
        probe.unlink()


def check_picture(path: Path, flag: str, *, make_folder: bool = False) -> None:
    """Raises UsageError if ``path`` has no suffix of a picture, or cannot be written.

    ``make_folder``: its folder need not exist.
    """
    if path.suffix.lower() not in PICTURES:
        problem = f"{path.suffix} is no format for pictures" if path.suffix else "the suffix selects the format"
        raise UsageError(f"{flag} {path}: {problem}; use {', '.join(PICTURES[:-1])} or {PICTURES[-1]}")
    check_output(path, flag) if make_folder else check_writable(path, flag)


def check_output(path: Path, flag: str) -> None:
    """As `check_writable`, for a file whose folder need not exist."""
    with _usable(path, flag):
        missing = not path.resolve().parent.is_dir()
    check_folder(path.parent, flag) if missing else check_writable(path, flag)


@contextlib.contextmanager
def _usable(path: Path, flag: str, use: str = "written") -> Iterator[None]:
    """Raises UsageError with the flag, if the block cannot use the path."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        # Path.resolve raises RuntimeError before Python 3.13.
        reason = "a loop of links" if isinstance(error, RuntimeError) else reason_of(error)
        raise UsageError(f"{flag} {path}: cannot be {use} ({reason}); choose another") from error


def distinct(paths: list[Path], flag: str) -> list[Path]:
    """The paths. Raises UsageError if one is named twice."""
    resolved_paths: set[Path] = set()
    for path in paths:
        with _usable(path, flag, "read"):
            real = path.resolve()
        if real in resolved_paths:
            raise UsageError(f"{flag} names {path} twice; name each folder once")
        resolved_paths.add(real)
    return paths
