"""Reads the requests of any workload: a workload file, a trace, or a compiled file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pdlab.core.errors import UsageError
from pdlab.traffic.file import TrafficFile, load_file, of_trace
from pdlab.traffic.generate import generated
from pdlab.traffic.replay import replayed
from pdlab.traffic.requests import TrafficHead, TrafficRequest, is_compiled, read_head, read_requests

YAML = (".yaml", ".yml")


def compiled(
    path: Path, changes: Mapping[str, Any] = MappingProxyType({})
) -> tuple[TrafficHead, Iterator[TrafficRequest]]:
    """The head and an iterator of all requests; a request comes after those that it waits for. ``changes``: keys of a
    workload file, in place of the file's. Raises UsageError; for a file without requests only at its end.
    """
    if is_compiled(path):
        if changes:
            raise UsageError(
                f"{path}: has requests that were written before, which {' and '.join(changes)} cannot change; "
                "give the workload file or the trace that they came from"
            )
        head, requests = read_head(path), read_requests(path)
    else:
        spec = load_file(path, changes) if path.suffix.lower() in YAML else of_trace(path, changes)
        head, requests = of_spec(spec, path.name)
    return head, _some(requests, path, head)


def _some(requests: Iterator[TrafficRequest], path: Path, head: TrafficHead) -> Iterator[TrafficRequest]:
    first = next(requests, None)
    if first is None:
        window = f" in its window of {head.window_s[0]:g}-{head.window_s[1]:g} s" if head.window_s else ""
        raise UsageError(f"{path}: holds no request{window}; give another window or file")
    yield first
    yield from requests


def of_spec(spec: TrafficFile, name: str) -> tuple[TrafficHead, Iterator[TrafficRequest]]:
    """The head and the requests of a workload file with that ``name``. Raises UsageError."""
    return generated(spec, name) if spec.replay is None else replayed(spec, Path(spec.replay))
