"""A trace file of real requests -> `Trace`: when each came, how long its prompt and its answer were. Pure.

CSV with a line of column names; published traces use the names in `ALIASES`. Moments are seconds, or milliseconds
where the column says so, or ISO 8601; only their differences count, and requests may stand in any order.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from pdlab.core.errors import UsageError
from pdlab.core.lengths import INPUTS, OUTPUTS, whole_tokens
from pdlab.sim.level import Trace
from pdlab.traffic.formats.csv_traces import moment_s

ALIASES = {
    "arrival_s": ("arrival_s", "timestamp", "arrived_at", "arrival_time", "time"),
    "arrival_ms": ("arrival_ms", "timestamp_ms"),
    "input_tokens": INPUTS,
    "output_tokens": OUTPUTS,
}
MOST = 1_000_000


def read(path: Path) -> Trace:
    """Raises UsageError naming the file, the line and the rule."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--trace {path}: cannot be read as a text file; give a CSV") from error
    rows = list(csv.reader(lines))
    columns = _columns(path, rows[0] if rows else [])
    requests = []
    for number, row in enumerate(rows[1:], start=2):
        if not any(cell.strip() for cell in row):
            continue
        where = f"--trace {path}, line {number}"
        if len(row) < len(rows[0]):
            raise UsageError(f"{where}: {len(row)} cells for {len(rows[0])} columns")
        at_s = moment_s(row[columns[0]], where, 1e-3 if columns[1] else 1.0)
        requests.append((at_s, whole_tokens(row[columns[2]], where), whole_tokens(row[columns[3]], where)))
    if not 2 <= len(requests) <= MOST:
        raise UsageError(f"--trace {path}: holds {len(requests)} requests; from 2 to {MOST} can be simulated")
    requests.sort()
    begin_s = requests[0][0]
    if requests[-1][0] <= begin_s:
        raise UsageError(
            f"--trace {path}: all requests arrive at the same time, so the trace has no rate; give arrivals that differ"
        )
    return Trace(
        arrival_s=tuple(at_s - begin_s for at_s, _, _ in requests),
        input_tokens=tuple(tokens for _, tokens, _ in requests),
        output_tokens=tuple(tokens for _, _, tokens in requests),
    )


def _columns(path: Path, head: Sequence[str]) -> tuple[int, bool, int, int]:
    """(column of the moment, whether it is in milliseconds, of the input, of the output tokens)"""
    header = [name.strip().lower() for name in head]
    indexes = {
        ours: next((header.index(name) for name in names if name in header), None) for ours, names in ALIASES.items()
    }
    ms = indexes["arrival_ms"] is not None
    moment, inputs, outputs = (
        indexes["arrival_ms"] if ms else indexes["arrival_s"],
        indexes["input_tokens"],
        indexes["output_tokens"],
    )
    if moment is None or inputs is None or outputs is None:
        raise UsageError(
            f"--trace {path}: needs the columns arrival_s, input_tokens and output_tokens (its columns: "
            f"{', '.join(head)})"
        )
    return moment, ms, inputs, outputs
