"""MLPerf inference: the summary of a run (``mlperf_log_summary.txt`` is not read) and result tables, where they carry
latencies. Tables of throughput only are recognised and named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pdlab.results.readers import FileReading

TOOL = "MLPerf"
_TABLE = {"scenario", "division", "units", "result"}


def read(file: Path, content: Any) -> FileReading | None:
    """None unless it is a table of MLPerf results."""
    rows = content if isinstance(content, list) else []
    if not rows or not isinstance(rows[0], dict):
        return None
    names = {str(name).lower() for name in rows[0]}
    if not names >= _TABLE:
        return None
    return FileReading(TOOL, skipped="a table of throughput without latencies: nothing to plot against")
