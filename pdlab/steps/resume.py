"""Whether a command may go on in a folder that an earlier run of it wrote to."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pdlab.core.errors import StoreError

SCALARS = (str, int, float, type(None))  # values that are short enough for a message


def check_folder_is_new(folder: Path, state_file: str, ignored: Collection[str] = ()) -> None:
    """``folder`` has no ``state_file``. Raises StoreError if it holds other files than those in ``ignored``."""
    if folder.exists() and any(path.name not in ignored for path in folder.iterdir()):
        raise StoreError(f"{folder} holds results of something else ({state_file} is missing); choose another --out")


def check_same_run(
    folder: Path, before: Mapping[str, Any], after: Mapping[str, Any], *, resume: bool, free: Collection[str] = ()
) -> None:
    """``folder`` holds a run with the settings ``before``; ``after`` are those of now, ``free`` the names of settings
    that may change between the two. Raises StoreError if another one changed, or without ``resume``."""
    for name in sorted({*before, *after} - {*free}):
        was, now = before.get(name), after.get(name)
        if was != now:
            values = f" ({was}, now {now})" if isinstance(was, SCALARS) and isinstance(now, SCALARS) else ""
            raise StoreError(f"{folder} was made with another {name}{values}; repeat that one, or choose another --out")
    if not resume:
        raise StoreError(f"{folder} holds an earlier run; go on with --resume, or choose another --out")
