"""Traces in CSV with a line of column names: Azure's, BurstGPT's, and any with a time and two token counts.

Azure (github.com/Azure/AzurePublicDataset, 2023 and 2024): ``TIMESTAMP,ContextTokens,GeneratedTokens``, ISO 8601.
BurstGPT (github.com/HPMLL/BurstGPT): ``Timestamp,Model,Request tokens,...`` in seconds; file 3 has sessions too.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TextIO

from pdlab.core.errors import UsageError
from pdlab.core.lengths import INPUTS, OUTPUTS, column_name, whole_tokens
from pdlab.core.text import counted
from pdlab.traffic.file import TrafficFile
from pdlab.traffic.formats.record import RecordedPrompt, RecordedRequest, check_name
from pdlab.traffic.requests import opened

MOMENTS = ("arrival_s", "timestamp", "arrived_at", "arrival_time", "time")
MOMENTS_MS = ("arrival_ms", "timestamp_ms")
SESSION = "session_id"
BURST_GPT = "response_tokens"  # its name of the answer's tokens, of which a failed request has 0


def csv_trace(path: Path, spec: TrafficFile) -> Iterator[RecordedRequest]:
    """Every line behind the names. Moments are seconds, milliseconds in a column of `MOMENTS_MS`, or ISO 8601. Raises
    UsageError."""
    with opened(path) as stream:
        rows = _rows(path, stream)
        _, head = next(rows, (1, []))
        names = [column_name(name) for name in head]
        moment, unit_s, inputs, outputs = _columns(path, head, names)
        session = names.index(SESSION) if SESSION in names else None
        may_fail = names[outputs] == BURST_GPT
        for line, row in rows:
            where = f"{path}, line {line}"
            if len(row) < len(names):
                raise UsageError(f"{where}: {counted(len(row), 'cell')} for {counted(len(names), 'column')}")
            name = f"r{line}"
            at_s = moment_s(row[moment], where, unit_s)
            if may_fail and "0" in (row[inputs].strip(), row[outputs].strip()):
                yield RecordedRequest(line, name, name, RecordedPrompt(()), 0, at_s)
                continue
            prompt = RecordedPrompt(((name, whole_tokens(row[inputs], where)),))
            session_id = row[session].strip() if session is not None else ""
            session_id = f"s{check_name(session_id, SESSION, 'session', where)}" if session_id else name
            yield RecordedRequest(line, name, session_id, prompt, whole_tokens(row[outputs], where), at_s)


def _rows(path: Path, stream: TextIO) -> Iterator[tuple[int, list[str]]]:
    """(line, cells) of every line that is not empty. Raises UsageError."""
    rows = csv.reader(stream)
    try:
        for row in rows:
            if any(cell.strip() for cell in row):
                yield rows.line_num, row
    except csv.Error as error:
        raise UsageError(f"{path}, line {rows.line_num}: is no CSV ({error}); correct or remove that line") from error


def is_csv_trace(head: Sequence[str]) -> bool:
    """Whether a line of names has the necessary columns."""
    names = {column_name(name) for name in head}
    return all(names & set(known) for known in ((*MOMENTS, *MOMENTS_MS), INPUTS, OUTPUTS))


def _columns(path: Path, head: Sequence[str], names: Sequence[str]) -> tuple[int, float, int, int]:
    """(column of the moment, its unit in seconds, column of the input, of the output tokens)"""
    found = [
        next((names.index(name) for name in known if name in names), None)
        for known in (MOMENTS_MS, MOMENTS, INPUTS, OUTPUTS)
    ]
    ms, moment, inputs, outputs = found
    if ms is not None:
        moment = ms
    if moment is None or inputs is None or outputs is None:
        raise UsageError(
            f"{path}: needs the columns arrival_s, input_tokens and output_tokens (its columns: {', '.join(head)})"
        )
    return moment, 1e-3 if ms is not None else 1.0, inputs, outputs


def moment_s(text: str, where: str, unit_s: float) -> float:
    """A moment in seconds: a number of units, or ISO 8601. Raises UsageError."""
    try:
        value = float(text) * unit_s
    except ValueError:
        # Python 3.10 parses at most six digits of a second.
        seconds_text, _, fraction_text = text.strip().replace("Z", "+00:00").partition(".")
        digits = fraction_text[: len(fraction_text) - len(fraction_text.lstrip("0123456789"))]
        iso = f"{seconds_text}.{digits[:6].ljust(6, '0')}{fraction_text[len(digits) :]}" if digits else seconds_text
        try:
            moment = datetime.fromisoformat(iso)
        except ValueError as error:
            raise UsageError(f"{where}: {text!r} is not a time; use seconds or ISO 8601") from error
        return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()
    if not math.isfinite(value):
        raise UsageError(f"{where}: {text!r} is not a time; use seconds or ISO 8601")
    return value
