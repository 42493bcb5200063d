"""A command reports its failure to its parent process as JSON in a file, so the parent need not parse its output.

The parent puts the file's path into the environment variable PDLAB_FAILURE_FILE. `pdlab.core.exit_code.exit_code`
writes the file.
"""

from __future__ import annotations

import contextlib
import json
import os
from functools import cache
from pathlib import Path
from typing import NamedTuple

FAILURE_FILE = "PDLAB_FAILURE_FILE"
_LOGS = "pdlab_kept_logs"


class CommandFailure(NamedTuple):
    """``message``: the line that the command printed after ``error: ``. ``logs``: the folder of the logs that it kept;
    None without logs."""

    message: str
    logs: Path | None = None


def attach_logs(error: BaseException, folder: Path | None) -> None:
    """Record on an error the folder of its logs."""
    if folder is not None:
        setattr(error, _LOGS, folder)


def attached_logs(error: BaseException) -> Path | None:
    """The folder that `attach_logs` recorded on the error."""
    folder = getattr(error, _LOGS, None)
    return folder if isinstance(folder, Path) else None


@cache
def failure_file() -> Path | None:
    """The file that the parent named; None if it named none.

    It removes the variable from the environment, so that child processes of this command do not write the same file.
    """
    name = os.environ.pop(FAILURE_FILE, None)
    return Path(name) if name else None


def write_failure(message: str, error: BaseException) -> None:
    """Write the file, if the parent named one. A full disk must not hide the failure itself."""
    path = failure_file()
    if path is None:
        return
    logs = attached_logs(error)
    with contextlib.suppress(OSError):
        path.write_text(json.dumps({"message": message, "logs": str(logs) if logs else None}), encoding="utf-8")


def read_failure(path: Path) -> CommandFailure | None:
    """The failure in the file; None if there is no complete one."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return CommandFailure(str(data["message"]), Path(data["logs"]) if data["logs"] else None)
    except (OSError, ValueError, KeyError, TypeError):
        return None
