"""Result files of other benchmark clients -> levels. One module per client, one registry, one record.

The record is a dictionary with the keys of ``vllm bench serve``, which most clients share.
`pdlab.results.published_files` turns it into a run. Other values of a client keep its own names, as metadata.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from pdlab.core.errors import StoreError
from pdlab.core.schema import parse_yaml, yaml_fault
from pdlab.core.text import printable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Column = NDArray[np.float64]

SUFFIXES = (".json", ".jsonl", ".csv", ".yaml", ".yml", ".parquet")
MOST_NAMES, MOST_OF_A_NAME = 4, 40  # of an unknown file's columns, and characters of each, in the message about it
NOTHING_ANSWERED = "a level in which no request was answered"  # why a file has no level
SUMMARY_OF_LOADGEN = "mlperf_log_summary.txt"
# In the order in which a file is offered to them: the first that recognises its content reads it.
READERS = (
    "pdlab_level",
    "levels_table",
    "vllm_bench",
    "aiperf",
    "guidellm",
    "inference_perf",
    "llmd_report",
    "genai_bench",
    "evalscope",
    "inferencex",
    "mlperf",
)


class RequestTimes(NamedTuple):
    """The answered requests of a level in the order of sending, in seconds, one element of each column per request.
    ``tpot_s`` is NaN for an answer of one token. ``start_s``: when each was sent; None if unknown."""

    ttft_s: Column
    tpot_s: Column
    e2el_s: Column
    start_s: Column | None = None


class RawLevel(NamedTuple):
    """One level as a client wrote it. ``part``: its place in the file, empty if the file holds one level. ``requests``:
    its requests, if they were kept. ``settings``: values of any type that the levels of one curve share; other numbers
    of ``data`` are figures."""

    part: str
    data: dict[str, Any]
    requests: RequestTimes | None = None
    settings: Mapping[str, Any] = MappingProxyType({})


def may_be_read(file: Path) -> bool:
    """Whether a client may have written a file of that name."""
    return file.suffix in SUFFIXES or file.name == SUMMARY_OF_LOADGEN


class FileReading(NamedTuple):
    """The contents of a file: the ``tool`` that wrote it, and its levels. ``skipped``: the kind of file, if it has no
    level. ``sha256``: of its bytes."""

    tool: str
    levels: tuple[RawLevel, ...] = ()
    skipped: str = ""
    sha256: str = ""


def read_file(file: Path) -> FileReading:
    """Read one file. Raises StoreError if it cannot be parsed, or is of no known client."""
    content, sha256 = _content(file)
    for name in READERS:
        reader = import_module(f"{__name__}.{name}")
        try:
            reading: FileReading | None = reader.read(file, content)
        except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
            raise StoreError(
                f"{file}: it begins as a file of {reader.TOOL}, but a part of it has another form ({error}); "
                "write it again with that client, or move it elsewhere"
            ) from error
        if reading is not None:
            return reading._replace(levels=tuple(map(_without_none, reading.levels)), sha256=sha256)
    raise StoreError(
        f"{file}: no known benchmark client writes such a file ({_begin(content)}); "
        "docs/results-of-others.md lists those that are read; move the file elsewhere"
    )


def _begin(content: Any) -> str:
    """What the parsed file is, in words: the first keys of its dictionary, or of its first row."""
    if not content:
        return "it is empty"
    if isinstance(content, dict):
        return f"its first keys are {_first_names(content)}"
    if isinstance(content, list) and isinstance(content[0], dict):
        return f"the columns of its first row are {_first_names(content[0])}"
    return f"it is {'a list of other values than rows' if isinstance(content, list) else 'a single value'}"


def _first_names(row: dict[Any, Any]) -> str:
    names = [printable(str(name))[:MOST_OF_A_NAME] for name in row]
    return ", ".join(names[:MOST_NAMES]) + (", ..." if len(names) > MOST_NAMES else "")


def _without_none(level: RawLevel) -> RawLevel:
    return level._replace(data={name: value for name, value in level.data.items() if value is not None})


def _content(file: Path) -> tuple[Any, str]:
    """The parsed file, and the SHA-256 of its bytes, which are read once."""
    try:
        content = file.read_bytes()
        return _of_bytes(file, content), hashlib.sha256(content).hexdigest()
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        kind = file.suffix.removeprefix(".").upper()
        why = yaml_fault(error) if isinstance(error, yaml.YAMLError) else error
        raise StoreError(f"{file}: cannot be read as {kind} ({why})") from error


def _of_bytes(file: Path, content: bytes) -> Any:
    """JSON as it is; JSON lines, also in a file of JSON, CSV and Parquet as a list of dictionaries."""
    if file.suffix == ".txt":
        return content.decode()
    if file.suffix == ".parquet":
        return _parquet(file, content)
    if file.suffix == ".csv":
        return _rows(content)
    if file.suffix in (".yaml", ".yml"):
        return parse_yaml(content.decode())
    if file.suffix == ".jsonl":
        return parsed_lines(content)
    try:
        return _parsed(content)
    except ValueError:
        if not _is_json(content.lstrip().split(b"\n", 1)[0]):
            raise
        return parsed_lines(content)  # vLLM's --append-result


def _parsed(content: bytes) -> Any:
    try:
        import orjson
    except ImportError:
        return json.loads(content)
    try:
        return orjson.loads(content)
    except ValueError:
        return json.loads(content)  # NaN and Infinity, which Python's json writes


def _is_json(text: bytes) -> bool:
    try:
        _parsed(text)
    except ValueError:
        return False
    return True


def parsed_lines(content: bytes) -> list[Any]:
    """JSON lines. Raises ValueError, which names the line."""
    parsed = []
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            try:
                parsed.append(_parsed(line))
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error
    return parsed


def _parquet(file: Path, content: bytes) -> list[Any]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise StoreError(f"{file}: Parquet needs pyarrow, which is not installed: pip install pyarrow") from error
    rows: list[Any] = pyarrow.parquet.read_table(io.BytesIO(content)).to_pylist()
    return rows


def _rows(content: bytes) -> list[dict[str, str]]:
    text = content.decode("utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
    return list(csv.DictReader(io.StringIO(text)))
