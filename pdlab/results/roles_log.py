"""Role changes of a fluid pool during a level: JSON Lines beside the level, or in its folder.

A line has ``prefill`` and ``decode`` (engines) and ``reason``. ``LEVEL.roles.jsonl`` belongs to one level and has
``at_s``, seconds since the level began. ``roles.jsonl`` belongs to a deployment, over all its levels, and has ``at``
(ISO 8601), as ``python -m pdlab roles --log`` prints it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pdlab.core.commands import PDLAB
from pdlab.core.errors import StoreError
from pdlab.core.files import replace
from pdlab.core.workload import RunKey

if TYPE_CHECKING:
    from pdlab.results.schema import Run

OF_ALL = "roles.jsonl"


class RoleChange(NamedTuple):
    """From ``at_s`` on, in seconds since the level began, these numbers of engines prefill and decode."""

    at_s: float
    prefill: int
    decode: int
    reason: str


def path_of(folder: Path, key: RunKey) -> Path:
    return folder / f"{key.stem}.roles.jsonl"


def write(folder: Path, key: RunKey, changes: Iterable[RoleChange]) -> None:
    """Store the changes of a level. Raises WriteError."""
    replace(path_of(folder, key), "".join(json.dumps(change._asdict()) + "\n" for change in changes).encode())


def read(folder: Path, run: Run) -> tuple[RoleChange, ...]:
    """The changes of a level; the last one before the level counts as of its begin. Empty without a log. Raises
    StoreError."""
    own, of_all = path_of(folder, run.key), folder / OF_ALL
    if own.is_file():
        return tuple(RoleChange(row["at_s"], *_rest(row)) for row in _rows(own, "at_s"))
    if not of_all.is_file() or run.started_at is None:
        return ()
    slow_down = (run.rehearsal.slow_down if run.rehearsal else None) or 1.0
    begins, ends_s = _moment(run.started_at), run.whole.duration_s
    changes = [
        RoleChange((_moment(row["at"]) - begins).total_seconds() / slow_down, *_rest(row))
        for row in _rows(of_all, "at")
    ]
    before = [change for change in changes if change.at_s <= 0][-1:]
    return (*(change._replace(at_s=0.0) for change in before), *(each for each in changes if 0 < each.at_s <= ends_s))


def _rest(row: dict[str, Any]) -> tuple[int, int, str]:
    return row["prefill"], row["decode"], row["reason"]


def _moment(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))  # Python 3.10 knows no Z


def _rows(path: Path, moment: str) -> list[dict[str, Any]]:
    """The lines in order. Raises StoreError."""
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        for row in rows:
            if moment == "at":
                _moment(row["at"])
            if not isinstance(row.get("at_s", 0.0), int | float) or not isinstance(row["reason"], str):
                raise ValueError("at_s is no number, or reason no text")
            if not isinstance(row["prefill"], int) or not isinstance(row["decode"], int):
                raise ValueError("prefill and decode are no whole numbers")
        return sorted(rows, key=lambda row: _moment(row["at"]) if moment == "at" else row["at_s"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(
            f"{path}: cannot be read as a log of roles ({type(error).__name__}: {error}); "
            f"fetch it again with {PDLAB} roles --log, or remove it"
        ) from error
