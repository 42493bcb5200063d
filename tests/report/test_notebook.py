"""The notebook of examples/ prints what is stored in it. PDLAB_UPDATE_GOLDEN=1 stores what it prints now."""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "examples" / "report.ipynb"


def executed(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook with what its code cells print, run in order in one namespace."""
    namespace: dict[str, Any] = {}
    cells, count = [], 0
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            cells.append(cell)
            continue
        count += 1
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile("".join(cell["source"]), f"{NOTEBOOK.name}, cell {cell['id']}", "exec"), namespace)
        text = out.getvalue().splitlines(keepends=True)
        outputs = [{"name": "stdout", "output_type": "stream", "text": text}] if text else []
        cells.append({**cell, "execution_count": count, "outputs": outputs})
    return {**notebook, "cells": cells}


@pytest.mark.golden
def test_the_notebook_prints_what_is_stored_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(NOTEBOOK.parent)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    stored = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    now = executed(stored)
    if os.environ.get("PDLAB_UPDATE_GOLDEN"):
        NOTEBOOK.write_text(json.dumps(now, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        stored = now
    assert now == stored
    outputs = [cell["outputs"] for cell in now["cells"] if cell["cell_type"] == "code"]
    assert len(outputs) > 4 and all(outputs), "every code cell prints something"
