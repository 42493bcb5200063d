"""Install a wheel on this node and report the installed files. Sent by value: imports only the standard library."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.machinery
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from pdlab.remote.weights import last_line

INSTALL_TIMEOUT_S = 50.0
IMPORT = "import importlib, sys; print(importlib.import_module(sys.argv[1]).__file__)"


def install(name: str, content: bytes, target: str | None, module: str | None) -> dict[str, Any]:
    """Install the wheel ``name`` with bytes ``content`` into ``target`` (None: site-packages), and import ``module``.

    Returns ``digest``: a hash of the installed files, ``files``: their number, ``loaded``: the file of ``module``. If
    pip, the comparison or the import fails, returns only ``error``.
    """
    if not re.fullmatch(r"[\w.+-]+\.whl", name):
        return {"error": f"{name!r} is not the file name of a wheel"}
    with tempfile.TemporaryDirectory(prefix="pdlab-install-") as folder:
        wheel = Path(folder) / name
        wheel.write_bytes(content)
        where = Path(target) if target else Path(sysconfig.get_paths()["platlib"])
        with contextlib.suppress(OSError):
            where.mkdir(parents=True, exist_ok=True)
        try:
            with (where / ".pdlab-install.lock").open("w") as lock:  # two Ray nodes may share one Python
                fcntl.flock(lock, fcntl.LOCK_EX)
                error = _pip(wheel, target)
                if error:
                    return {"error": error}
                return _compare(wheel, where, module)
        except OSError as error:
            return {"error": f"{where}: cannot be written ({error.strerror})"}


def _pip(wheel: Path, target: str | None) -> str | None:
    """Install with pip, or with uv if there is no pip; returns the error, or None."""
    into = ["--target", target] if target else []
    common = ["install", "--no-deps", "--no-index", "--quiet", *into, str(wheel)]
    # Not importlib.util, because setuptools' own finder for pip fails if distutils has been imported.
    if importlib.machinery.PathFinder.find_spec("pip"):
        more = ["--force-reinstall", "--disable-pip-version-check", *(["--upgrade"] if target else [])]
        command = [sys.executable, "-m", "pip", *common, *more]
    else:
        beside = Path(sys.prefix).parent / ".uv" / "bin" / "uv"
        uv = shutil.which("uv") or (str(beside) if beside.exists() else None)
        if uv is None:
            return f"{sys.executable} has no pip, and uv is not installed: run {sys.executable} -m ensurepip"
        command = [uv, "pip", *common, "--reinstall", "--python", sys.executable]
    try:
        completed = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"the installation did not end within {INSTALL_TIMEOUT_S:g} s"
    if completed.returncode == 0:
        return None
    message = last_line(completed.stderr) or last_line(completed.stdout) or "no message"
    return f"{Path(command[0]).name}: {message}"


def _compare(wheel: Path, where: Path, module: str | None) -> dict[str, Any]:
    """Check that every file of the wheel is installed with the same bytes; returns as `install`."""
    digest, count = hashlib.sha256(), 0
    with zipfile.ZipFile(wheel) as archive:
        for member in sorted(archive.namelist()):
            if member.endswith("/") or ".dist-info/" in member or ".data/" in member:
                continue
            try:
                installed = (where / member).read_bytes()
            except OSError as error:
                return {"error": f"{where / member}: {error.strerror}"}
            if installed != archive.read(member):
                return {"error": f"{where / member} is not the wheel's file"}
            digest.update(member.encode() + b"\0" + hashlib.sha256(installed).digest())
            count += 1
    loaded = "not imported"
    if module:
        env = {**os.environ, "PYTHONPATH": f"{where}:{os.environ.get('PYTHONPATH', '')}"}
        imported = subprocess.run([sys.executable, "-c", IMPORT, module], capture_output=True, text=True, env=env)
        if imported.returncode:
            return {"error": f"import {module}: {last_line(imported.stderr) or 'no message'}"}
        loaded = imported.stdout.strip()
        if not Path(loaded).is_relative_to(where):
            return {"error": f"{module} is loaded from {loaded}, not from {where}"}
    return {"digest": digest.hexdigest()[:12], "files": count, "loaded": loaded}
