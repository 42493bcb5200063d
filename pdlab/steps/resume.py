"""Check whether a command may continue in a folder that an earlier run wrote."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pdlab.core.errors import StoreError

SCALARS = (str, int, float, type(None))  # types whose values are short enough for a message


def check_folder_is_new(folder: Path, state_file: str, ignored: Collection[str] = ()) -> None:
    """Raises StoreError if ``folder``, which has no ``state_file``, has other files than those in ``ignored``."""
    if folder.exists() and any(path.name not in ignored for path in folder.iterdir()):
        raise StoreError(f"{folder} has other results ({state_file} is missing); choose another --out")


def check_same_run(
    folder: Path, before: Mapping[str, Any], after: Mapping[str, Any], *, resume: bool, free: Collection[str] = ()
) -> None:
    """Compare the settings of the run in ``folder`` with those of this run. Only settings in ``free`` may differ.

    Raises StoreError if another setting differs, or without ``resume``.
    """
    for name in sorted({*before, *after} - {*free}):
        was, now = before.get(name), after.get(name)
        if was != now:
            values = f" ({was}, now {now})" if isinstance(was, SCALARS) and isinstance(now, SCALARS) else ""
            other = "other" if isinstance(was, list) or isinstance(now, list) else "another"
            raise StoreError(f"{folder} was made with {other} {name}{values}; repeat that one, or choose another --out")
    if not resume:
        raise StoreError(f"{folder} has an earlier run; continue it with --resume, or choose another --out")
