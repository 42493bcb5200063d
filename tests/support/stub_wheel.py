"""A wheel to install where a real one would be too much."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

INSTALLER = importlib.util.find_spec("pip") or shutil.which("uv") or (Path(sys.prefix).parent / ".uv/bin/uv").exists()
needs_installer = pytest.mark.skipif(not INSTALLER, reason="neither pip nor uv is in or beside this environment")


def wheel(folder: Path, text: str = "VALUE = 1\n") -> Path:
    """A package `shipped` of one module, as wheels are made."""
    path = folder / "shipped-1.0-py3-none-any.whl"
    info = "shipped-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("shipped/__init__.py", text)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: shipped\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(
            f"{info}/RECORD", f"shipped/__init__.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n"
        )
    return path
