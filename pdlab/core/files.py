"""The folders of the project and the cache; atomic writes and lock files."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from pdlab.core.errors import NoHomeError, StoreError, UsageError, WriteError, reason_of

COMMAND_CHARS = 200


def replace(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Write ``path`` as `replacing` does. ``data``: the content, or its pieces. Raises WriteError."""
    with replacing(path) as file:
        file.writelines((data,) if isinstance(data, bytes) else data)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file for the block to write, which replaces ``path`` at the end of the block.

    No reader sees half a file. A failure in the block leaves ``path`` as it was, and no temporary file. Raises
    WriteError, also for a full disk.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            yield file
        temporary.replace(path)
    except OSError as error:
        raise WriteError(
            f"{path} cannot be written ({reason_of(error)}): its previous content is unchanged; free disk space, or "
            "give this user permission to write there"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def built_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """The folder. ``build`` gets a folder to fill, if there is none yet; other processes wait for its end.

    The folder appears complete or not at all.
    """
    if folder.exists():
        return folder
    import shutil  # here, because few commands build a folder

    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            part = folder.with_name(f".{folder.name}.part")
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            build(part)
            part.rename(folder)
    return folder


def real(path: Path) -> Path:
    """The path without links; ``/dev/stdout`` that is a pipe or a removed file stays, because its link has no path."""
    without = path.resolve()
    return path if path.exists() and not without.exists() else without


def write_output(path: Path, text: str | Iterable[str], flag: str) -> None:
    """Write the file of a ``flag`` as `replace` does. It follows a link, and writes directly to a device or a pipe.

    ``text``: the content, or its pieces. Raises WriteError with the flag.
    """
    target = real(path)
    pieces = (piece.encode() for piece in ((text,) if isinstance(text, str) else text))
    if target.is_file() or not target.exists():
        try:
            replace(target, pieces)
        except WriteError as error:
            raise WriteError(f"{flag} {error}; or choose another file") from error
        return
    try:
        with target.open("wb") as file:
            file.writelines(pieces)
    except OSError as error:
        raise WriteError(f"{flag} {path}: cannot be written ({reason_of(error)}); choose another") from error


@contextlib.contextmanager
def locked(path: Path, resource: str) -> Iterator[None]:
    """Hold the lock file ``path`` during the block; afterwards the file is removed.

    The end of the process, however it ends, frees the lock. Raises UsageError if another process holds it; the message
    has ``resource`` and that process. Raises WriteError if the lock file cannot be created.
    """
    new_folders = [folder for folder in (path.parent, *path.parent.parents) if not folder.exists()]
    file = _acquired(path, resource)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(file)
        for folder in new_folders:  # remove folders that were created only for the lock
            with contextlib.suppress(OSError):
                folder.rmdir()


def holder(path: Path) -> str | None:
    """A description of the process that holds the lock file ``path``; None if it is free."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _described(file)
    finally:
        os.close(file)
    return None


def _acquired(path: Path, resource: str) -> int:
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise WriteError(f"{path} cannot be created to lock {resource} ({reason_of(error)})") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = _described(file)
            os.close(file)
            raise UsageError(f"{resource} is held by {holder}; wait for it or end it (lock {path})") from error
        except OSError as error:
            os.close(file)
            raise StoreError(f"{path}: this file system has no locks ({reason_of(error)})") from error
        if _same_file(path, file):
            with contextlib.suppress(OSError):  # the lock also holds on a full disk
                os.ftruncate(file, 0)
                os.pwrite(file, json.dumps(_this_process()).encode(), 0)
            return file
        os.close(file)  # its last holder has just removed the file


def _same_file(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file))
    except OSError:
        return False


def _this_process() -> dict[str, Any]:
    command_line = shlex.join(sys.orig_argv[1:] or sys.argv)
    command = command_line if len(command_line) <= COMMAND_CHARS else f"{command_line[:COMMAND_CHARS]}..."
    return {"pid": os.getpid(), "host": os.uname().nodename, "command": command, "since": time.time()}


def _described(file: int) -> str:
    try:
        holder_fields = json.loads(os.pread(file, 4096, 0))
        where = "" if holder_fields["host"] == os.uname().nodename else f" on {holder_fields['host']}"
        clock = time.strftime("%H:%M:%S", time.localtime(holder_fields["since"]))
        for_s = max(0.0, time.time() - holder_fields["since"])
        return f"process {holder_fields['pid']}{where} ({holder_fields['command']}), for {for_s:.0f} s (since {clock})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process, which has not recorded its id yet"


PACKAGE = Path(__file__).resolve().parents[1]


def checkout_of(package: Path) -> Path | None:
    """The checkout with the folder ``package``; None if pdlab is installed from a wheel."""
    folder = package.parent
    return folder if (folder / "configs").is_dir() and (folder / "pyproject.toml").is_file() else None


CHECKOUT = checkout_of(PACKAGE)
# In a wheel, the checkout's folder configs/ is inside the package.
CONFIGS = (CHECKOUT or PACKAGE) / "configs"
# The folder in which commands run other commands: the checkout, or the current folder if pdlab is installed.
ROOT = CHECKOUT or Path()


def python_path(*folders: str) -> str:
    """PYTHONPATH for a child process: ``folders``, the checkout, then this process's PYTHONPATH.

    An installed pdlab adds no folder: the child finds it as this process did. Its site-packages on PYTHONPATH would
    come before the standard library.
    """
    checkout = str(CHECKOUT) if CHECKOUT else ""
    return os.pathsep.join(filter(None, [*folders, checkout, os.environ.get("PYTHONPATH")]))


def cache_dir() -> Path:
    """The user's cache folder of pdlab: $PDLAB_CACHE_DIR, or pdlab under $XDG_CACHE_HOME or ~/.cache. Raises
    NoHomeError."""
    configured = os.environ.get("PDLAB_CACHE_DIR")
    if configured:
        return Path(configured)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdlab"
    except RuntimeError as error:
        raise NoHomeError("the home folder of this user is not known: set HOME, or PDLAB_CACHE_DIR") from error


def known_cache_dir() -> Path | None:
    """`cache_dir`; None if it is not known."""
    try:
        return cache_dir()
    except NoHomeError:
        return None


def launch_lock(*, local: bool) -> Path:
    """The lock file that a launch holds."""
    return cache_dir() / f"launch-{'local' if local else 'cluster'}.lock"
