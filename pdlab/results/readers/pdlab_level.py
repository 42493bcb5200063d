"""pdlab's own levels without their manifest: recognised, and rejected with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pdlab.core.errors import StoreError
from pdlab.results.readers import FileReading

TOOL = "pdlab"


def read(file: Path, content: Any) -> FileReading | None:
    """Raises StoreError for a level of pdlab: it cannot be read without its manifest."""
    from pdlab.results.store import MANIFEST

    if isinstance(content, dict) and "schema_version" in content and {"key", "slo", "deployment"} & content.keys():
        raise StoreError(
            f"{file} was written by pdlab, but {file.parent}: {MANIFEST} is missing; restore it, or copy all of it"
        )
    return None
