"""The part of pdlab that runs inside a Ray cluster, as one zip file.

Ray and vLLM import these modules by name: the task that builds the application, the replicas, the engine cores and
the TP workers. The zip works in two ways. On PYTHONPATH, Python imports from the zip itself. As an entry of
``py_modules`` of a runtime environment, Ray unpacks it. Imports neither Ray nor vLLM.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Mapping
from pathlib import Path

from pdlab.core.files import PACKAGE
from pdlab.core.version import __version__

# The modules, as patterns below the folder of the package. A test computes the imports and compares.
PATTERNS = (
    "__init__.py",
    "cluster/__init__.py",
    "cluster/priority.py",
    "core/__init__.py",
    "core/api_key.py",
    "core/errors.py",
    "core/version.py",
    "deploy/__init__.py",
    "deploy/cpu_engine/__init__.py",
    "deploy/cpu_engine/engine_template.py",
    "deploy/cpu_engine/host_copy.py",
    "deploy/cpu_engine/prefork.py",
    "deploy/cpu_engine/replica.py",
    "deploy/cpu_engine/worker.py",
    "deploy/serving/*.py",
    "guard/*.py",
    "marks/*.py",
    "roles/*.py",
)
# The earliest time that a zip can hold: two archives of the same files are the same bytes.
LONG_AGO = (1980, 1, 1, 0, 0, 0)
READ_WRITE = 0o644 << 16
# Ray drops the only top folder of a py_modules archive. A file beside it keeps the folder pdlab/.
NOTE = "pdlab-code.txt"


def code(package: Path = PACKAGE) -> dict[str, bytes]:
    """Path inside the zip -> content, of every module that the cluster imports."""
    files = {path for pattern in PATTERNS for path in package.glob(pattern)}
    modules = {f"pdlab/{path.relative_to(package).as_posix()}": path.read_bytes() for path in sorted(files)}
    return {NOTE: f"pdlab {__version__}: the modules that a Ray cluster imports\n".encode(), **modules}


def digest(files: Mapping[str, bytes]) -> str:
    """Ten characters that name the files: the same files have the same name, whatever compressed them."""
    summary = hashlib.sha256()
    for name in sorted(files):
        summary.update(f"{name}\0{len(files[name])}\0".encode())
        summary.update(files[name])
    return summary.hexdigest()[:10]


def file_name(files: Mapping[str, bytes]) -> str:
    """The name of the zip. Ray keeps what it has unpacked by the name, so that other code needs another name."""
    return f"pdlab-code-{digest(files)}.zip"


def archive(files: Mapping[str, bytes]) -> bytes:
    """The zip of the files."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as zipped:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name, LONG_AGO)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = READ_WRITE
            zipped.writestr(entry, content)
    return buffer.getvalue()
