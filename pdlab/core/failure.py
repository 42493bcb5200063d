"""How a command hands its failure to the process that started it: as JSON in a file. Nobody searches its output.

The parent names the file in the environment variable PDLAB_FAILURE_FILE. `pdlab.core.exit_code.exit_code` writes it.
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
    """``message``: what the command printed behind ``error: ``, in one line. ``logs``: folder of the logs that the
    command kept because it failed; None where it kept none."""

    message: str
    logs: Path | None = None


def attach_logs(error: BaseException, folder: Path | None) -> None:
    """Note on an error which folder holds the logs that explain it."""
    if folder is not None:
        setattr(error, _LOGS, folder)


def attached_logs(error: BaseException) -> Path | None:
    """The folder that `attach_logs` noted on this error."""
    folder = getattr(error, _LOGS, None)
    return folder if isinstance(folder, Path) else None


@cache
def failure_file() -> Path | None:
    """The file that the parent named; None where it named none.

    The variable leaves the environment: what this command starts must not write the same file.
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
    """The failure in that file; None where the command wrote none, or did not finish it."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return CommandFailure(str(data["message"]), Path(data["logs"]) if data["logs"] else None)
    except (OSError, ValueError, KeyError, TypeError):
        return None
