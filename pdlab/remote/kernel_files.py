"""Files of /proc and /sys: the facts of processes that psutil lacks, one reader per file.

Sent by value to nodes without pdlab: imports only the standard library.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


def read(path: str | Path) -> str | None:
    """The stripped text of a file; None if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def link(path: str | Path) -> str | None:
    """The target of a symbolic link; None without one."""
    try:
        return str(Path(path).readlink())
    except OSError:
        return None


def boot_id() -> str | None:
    """The kernel's id of this boot, the same in all containers of a machine."""
    return read("/proc/sys/kernel/random/boot_id")


def namespace(kind: str) -> str | None:
    """This process's namespace of that kind (``pid``, ``net``, ...), such as ``pid:[4026531836]``."""
    return link(f"/proc/self/ns/{kind}")


def started_ticks(pid: int) -> int | None:
    """Clock ticks from the boot to the start of a process; None for one that does not exist or is a zombie.

    With its number they identify a process, because the kernel reuses numbers. psutil has this time only in seconds of
    a clock that may be set.
    """
    fields = (read(f"/proc/{pid}/stat") or "").rpartition(")")[2].split()  # from the third on
    return int(fields[19]) if fields and fields[0] != "Z" else None


def state(pid: int) -> str | None:
    """The letter of the process's state (``S`` sleeps, ``T`` is stopped, ``Z`` is a zombie); None: it does not
    exist."""
    fields = (read(f"/proc/{pid}/stat") or "").rpartition(")")[2].split()
    return fields[0] if fields else None


def inherited(pid: int, variable: str) -> bool:
    """Whether ``NAME=VALUE`` is in the process's initial environment. A process may have overwritten parts of it, and
    psutil reads only up to the first such byte.

    Raises OSError if the process is gone or belongs to another user.
    """
    return variable.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def opened(pid: int, *numbers: int) -> Iterator[str]:
    """What the process's file descriptors of these numbers refer to (default: all). psutil has no pipes, and no files
    that were deleted."""
    folder = Path(f"/proc/{pid}/fd")
    with contextlib.suppress(OSError):
        for path in [folder / str(number) for number in numbers] or folder.iterdir():
            if target := link(path):
                yield target


def mapped_files(pid: int | str = "self") -> dict[str, int]:
    """Path -> inode of the files that the process has mapped. psutil has no inodes, and reads the slower smaps."""
    lines = (line.split(None, 5) for line in (read(f"/proc/{pid}/maps") or "").splitlines() if "/" in line)
    return {words[5]: int(words[4]) for words in lines}


def interfaces(pid: int) -> set[str]:
    """Names of the interfaces in the network of the process, which may be another than this one's.

    Raises OSError if it is gone.
    """
    lines = Path(f"/proc/{pid}/net/dev").read_text().splitlines()
    return {line.split(":")[0].strip() for line in lines if ":" in line}
