"""The requests of one run as columns of numbers, read without an object per request.

A level has thousands of requests and an experiment thousands of levels, and intervals and goodput need only three times
of each request. The window's rule is that of `metrics.steady`; a test compares the two.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic_core import from_json

from pdlab.analysis.intervals import Array, Estimate, blocks, of_blocks, of_requests
from pdlab.core.errors import StoreError, reason_of
from pdlab.core.text import counted
from pdlab.core.workload import Closed, Load
from pdlab.results.level_data import LevelData
from pdlab.results.metrics import LoadWindow, steady_window
from pdlab.results.readers import RequestTimes
from pdlab.results.schema import PERCENTILES, Run, Summary
from pdlab.results.store import Store

Latency = Literal["ttft", "tpot", "e2el"]

# Most of a record's text, which no latency here needs: it is cut out before the numbers are read.
_GAPS = b',"itl_s":['
_NUMBER = re.compile(rb"-?\d[\d.]*")
_OF_NUMBERS = b"0123456789.-"
_COMMAS = bytes.maketrans(b"\n", b",")
_TIME_AND_TOKEN_KEYS = b'{"arrival_s":', b',"first_token_s":', b',"finish_s":', b',"output_tokens":'

# A larger stated size is not allocated in advance.
MAX_GUESS = 1 << 28
AT_ONCE_BYTES, PIECE_BYTES = 1 << 20, 1 << 22  # of a packed file that is read at once, and of a piece of a larger one


@dataclass(frozen=True, eq=False)
class Requests:
    """The judged requests of one window, ordered by arrival; ``tpot_s`` is NaN for one output token.

    ``finish_s``: the finishes inside the window of ``window_s`` seconds, since its opening. ``failed``: number of
    requests that arrived inside the window and were not answered. ``sha256``: of the records that were read.
    """

    ttft_s: Array
    tpot_s: Array
    e2el_s: Array
    finish_s: Array
    window_s: float
    failed: int
    sha256: str | None = None

    def __len__(self) -> int:
        return len(self.e2el_s)

    @cached_property
    def in_flight(self) -> float:
        """Mean number in flight, by Little's law."""
        return float(self.e2el_s.sum()) / self.window_s if self.window_s > 0 else 0.0

    def latency_s(self, latency: Latency) -> Array:
        """The values that are defined."""
        values = {"ttft": self.ttft_s, "tpot": self.tpot_s, "e2el": self.e2el_s}[latency]
        defined: Array = values[~np.isnan(values)]
        return defined

    @cached_property
    def _estimates(self) -> dict[str, dict[str, Estimate]]:
        return {}

    def estimates(self, latency: Latency) -> dict[str, Estimate]:
        """Mean and percentiles in seconds with the scatter within this run; empty if undefined."""
        if latency not in self._estimates:
            values = self.latency_s(latency)
            estimates = of_requests(values, PERCENTILES, self.together) if len(values) else {}
            self._estimates[latency] = estimates
        return self._estimates[latency]

    @property
    def together(self) -> int:
        """Number of correlated neighbours: those in flight at once."""
        return max(1, round(self.in_flight))

    @cached_property
    def rate(self) -> Estimate:
        """Finished requests/s; its scatter is that of the gaps between finishes, in blocks of neighbours."""
        value = len(self.finish_s) / self.window_s if self.window_s > 0 else 0.0
        cut = blocks(len(self.finish_s), self.together)
        if cut is None or not value:
            return Estimate(value=value)
        gap = of_blocks(np.diff(self.finish_s, prepend=0.0), cut, 1 / value)
        return gap._replace(value=value, standard_error=(gap.relative_error or 0.0) * value)


def judged(run: Run, summary: Summary, requests: Requests | None = None) -> int:
    """Number of requests behind the latencies of that window of the run.

    In a steady window it is not the number of finishes. A level that does not have it has that of its ``requests``.
    Without them a closed loop has the least that it can be: up to N of the finishes were in flight when the window
    opened.
    """
    if summary.judged is not None:
        return summary.judged
    if run.origin == "imported" or summary is not run.steady:
        return summary.completed
    if requests is not None:
        return len(requests)
    return max(0, summary.completed - run.load.concurrency) if isinstance(run.load, Closed) else summary.completed


def load_requests(folder: Path, run: Run) -> Requests | None:
    """The requests behind the figures of ``run``: of its steady window if it has one, else all.

    None if no records were kept. Raises StoreError if they cannot be read, or are fewer than were completed.
    """
    path = Store(folder).records_path(run.key)
    remedy = "restore it, or delete it and do without goodput and intervals of that level"
    digest = hashlib.sha256()
    try:
        if not path.stat().st_size:
            raise StoreError(f"{path}: is empty (0 bytes); {remedy}")
        data = parsed(_passing(texts(path), digest.update))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"{path}: records cannot be read ({reason_of(error)})") from error
    except (EOFError, KeyError, TypeError, ValueError, zlib.error) as error:
        raise StoreError(f"{path}: records cannot be read ({error})") from error
    kept = len(data)
    if kept < run.completed:
        raise StoreError(
            f"{path}: holds {counted(kept, 'request')}, its level completed {run.completed}; the file is incomplete: "
            "restore it, or delete it and do without goodput and intervals of that level"
        )
    if kept == 0:
        return None
    requests = window(data, run.load, steady=run.steady is not None)
    return replace(requests, sha256=digest.hexdigest())


def of_times(times: RequestTimes, run: Run) -> Requests:
    """The requests of a whole run that another client kept. Without sending times the rate has no scatter."""
    finish_s = np.zeros(0)
    if times.start_s is not None and len(times.start_s):
        finish_s = np.sort(times.start_s + times.e2el_s) - times.start_s.min()
    return Requests(
        ttft_s=times.ttft_s,
        tpot_s=times.tpot_s,
        e2el_s=times.e2el_s,
        finish_s=finish_s,
        window_s=run.whole.duration_s,
        failed=run.failed,
    )


def texts(path: Path) -> Iterator[bytes]:
    """The text of stored records in pieces of whole lines; all of a small file is one. Raises EOFError, OSError or
    zlib.error."""
    if path.stat().st_size <= AT_ONCE_BYTES:
        yield _unpack(path.read_bytes())
        return
    rest = b""
    with gzip.open(path) as file:
        while piece := file.read(PIECE_BYTES):
            lines, end, rest = (rest + piece).rpartition(b"\n")
            if end:
                yield lines + end
    if rest:
        yield rest


def _passing(pieces: Iterable[bytes], to: Callable[[bytes], object]) -> Iterator[bytes]:
    for piece in pieces:
        to(piece)
        yield piece


def _unpack(packed: bytes) -> bytes:
    # The last four bytes of a gzip member are the size of its content: one call, one buffer, no copies.
    size = int.from_bytes(packed[-4:], "little")
    text = zlib.decompress(packed, wbits=31, bufsize=max(1, size)) if size < MAX_GUESS else b""
    # One call reads only the first member; the gzip module reads several.
    return text if len(text) == size else gzip.decompress(packed)


def parse(text: bytes) -> LevelData:
    """Stored records -> the times and output tokens of each request. Raises KeyError, TypeError or ValueError."""
    return parsed([text])


def parsed(pieces: Iterable[bytes]) -> LevelData:
    """As `parse`, of pieces of whole lines. Raises what ``pieces`` do, too."""
    tables = [_table(piece.removesuffix(b"\n")) for piece in pieces]
    return LevelData.of_times(*np.concatenate(tables, axis=1))


def _table(text: bytes) -> Array:
    """(4, requests): arrival, first token, finish, output tokens; NaN in what a failed request lacks."""
    bare = _without_gaps(text)
    if (numbers := _numbers(bare)) is not None:
        return numbers
    records = from_json(b"[" + bare.replace(b"\n", b",") + b"]")
    nan = math.nan
    rows = [
        (record["arrival_s"], record.get("first_token_s", nan), record.get("finish_s", nan), record["output_tokens"])
        for record in records
    ]
    table = np.array(rows, dtype=np.float64).T.reshape(4, -1)
    if b'"error":' in bare:
        table[2, [record.get("error") is not None for record in records]] = nan
    # A request that failed after its first token has no answer, though that token counts for the burst at the start.
    table[2, np.isnan(table[1])] = nan
    return table


def _numbers(bare: bytes) -> Array | None:
    """`_table` of records with equal fields, without parsing their names, which is most of the work. None for other
    records."""
    lines = b"\n" + bare + b"\n"
    count = lines.count(b"\n") - 1
    parts = _NUMBER.split(bare.partition(b"\n")[0])
    start, between, end = parts[0], parts[1:-1], parts[-1]
    if b'"error":' in bare or not set(_TIME_AND_TOKEN_KEYS) < set(parts) or end not in (b"}", b"]}"):
        return None
    if lines.translate(None, _OF_NUMBERS) != b"\n" + b"".join([*parts, b"\n"]) * count:  # not so with exponents
        return None
    names = [b"\n" + start, *(part for part in between if part != b","), end + b"\n"]
    if any(lines.count(name) != count for name in names) or not all(part.startswith(b",") for part in between):
        return None
    letters = bytes({*b"".join(names)} - {*b",\n"})
    rows = np.array(from_json(b"[" + bare.translate(_COMMAS, letters) + b"]"), dtype=np.float64).reshape(count, -1)
    return rows[:, [parts.index(name) for name in _TIME_AND_TOKEN_KEYS]].T


def _without_gaps(text: bytes) -> bytes:
    first, *others = text.split(_GAPS)
    return first + b"".join([part.partition(b"]")[2] for part in others])


def wrong_counts(text: bytes) -> int:
    """Number of answers whose token counts are not the requested ones; 0 if lengths do not vary."""
    if b'"requested":' not in text:
        return 0
    records = from_json(b"[" + _without_gaps(text.removesuffix(b"\n")).replace(b"\n", b",") + b"]")
    return sum(
        [record["input_tokens"], record["output_tokens"]] != record["requested"]
        for record in records
        if "requested" in record and record.get("error") is None and "finish_s" in record
    )


def window(data: LevelData, load: Load, steady: bool) -> Requests:
    """Cut to the window that `pdlab.results.metrics` uses for this load."""
    of_steady = steady_window(data, load) if steady else None
    if of_steady is None:
        opens_s = float(data.arrival_s[0]) if len(data) else 0.0
        span = LoadWindow(opens_s, float(np.max(data.finish_s[data.ok], initial=opens_s)))
        inside, considered = data.ok, np.ones(len(data), dtype=bool)
    else:
        span = of_steady
        inside, considered = span.holds(data.finish_s), span.judges(data, load)
    judged = data.part(considered & data.ok)
    return Requests(
        ttft_s=judged.ttft_s,
        tpot_s=judged.tpot_s,
        e2el_s=judged.e2el_s,
        finish_s=np.sort(data.finish_s[inside]) - span.opens_s,
        window_s=span.length_s,
        failed=int((considered & ~data.ok).sum()),
    )
