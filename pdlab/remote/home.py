"""The home folder of this process's user."""

from __future__ import annotations

from pathlib import Path


def home_folder() -> Path | None:
    """None if it is not known: no HOME, and no entry of the user in the system's list, as in some containers."""
    try:
        return Path.home()
    except RuntimeError:
        return None
