"""Texts that are stored, and compared word for word."""

from __future__ import annotations

import os
from pathlib import Path


def compare(text: str, stored: Path) -> None:
    """PDLAB_UPDATE_GOLDEN=1 rewrites the stored text; read the difference before keeping it."""
    if os.environ.get("PDLAB_UPDATE_GOLDEN"):
        stored.write_text(text, encoding="utf-8")
    assert text == stored.read_text(encoding="utf-8"), "where that is meant: `make golden`, and read git diff"
