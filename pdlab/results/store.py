"""Results on disk.

An experiment is a folder ``bm_results/<label>/`` with these files:

- ``manifest.json``: what was run, where and with what.
- ``<kind><value>[-r<repeat>].json``: a ``Run`` for each finished level.
- ``<same>.records.json.gz``: every request of the level.
- ``<same>.timelines.jsonl.gz``: where the time of each request went, if the servers recorded it.

A measured level is never overwritten silently. If a level is measured again, its first result moves to ``replaced/``.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator
from io import BufferedIOBase
from itertools import chain
from pathlib import Path
from typing import NamedTuple, TypeVar

from pdlab.core.errors import StoreError, reason_of
from pdlab.core.files import locked, replace
from pdlab.core.findings import Finding, found
from pdlab.core.schema import CONVERT, read_model
from pdlab.core.workload import RunKey
from pdlab.results.level_data import LevelData
from pdlab.results.schema import (
    SLO_PREFIX,
    Experiment,
    ExperimentRecord,
    Manifest,
    ReplacedLevel,
    RequestRecord,
    Run,
    SloSearch,
)
from pdlab.results.stored_rows import Row, lines_of
from pdlab.results.timeline import RENAMED_MARKS, RequestTimeline

MANIFEST = "manifest.json"
CHAOS = "chaos.json"  # written by `pdlab.results.chaos`; not a level
RECORD = ".experiment.json"
REPLACED = "replaced"
LOCK = ".lock"
GZIP = 31  # zlib's window with gzip's header but without a time: equal requests give equal files
SMALLEST = 9
READ_BYTES = 1 << 20

R = TypeVar("R", bound=Row)


class FileVersion(NamedTuple):
    """Changes whenever a file is written or replaced."""

    inode: int
    changed_ns: int
    size: int


class _ReadRun(NamedTuple):
    version: FileVersion
    run: Run


class Store:
    """One experiment folder. Writes are atomic: a reader or a crash never sees half a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read: dict[Path, _ReadRun] = {}

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the folder for the block as its only writer. Raises UsageError, which names the holder."""
        with locked(self.folder / LOCK, f"the result folder {self.folder}"):
            yield

    def path(self, key: RunKey) -> Path:
        return self.folder / f"{key.stem}.json"

    def records_path(self, key: RunKey) -> Path:
        return self.folder / f"{key.stem}.records.json.gz"

    def timelines_path(self, key: RunKey) -> Path:
        return self.folder / f"{key.stem}.timelines.jsonl.gz"

    def has(self, key: RunKey) -> bool:
        """Whether that level is finished and stored."""
        return self.path(key).exists()

    def write_manifest(self, manifest: Manifest) -> None:
        """Write or replace the manifest (it grows while an experiment runs)."""
        replace(self.folder / MANIFEST, manifest.model_dump_json(indent=2).encode())

    def read_manifest(self) -> Manifest:
        """Raises StoreError if there is none or it is not readable."""
        return read_model(self.folder / MANIFEST, Manifest)

    def write(
        self,
        run: Run,
        records: Iterable[RequestRecord],
        timelines: Iterable[RequestTimeline] = (),
        *,
        force: bool = False,
    ) -> Run:
        """Store one level: first records and timelines, then the run that refers to them. Returns the run with its
        hash.

        Raises StoreError if the level is already there and ``force`` is not set.
        """
        if self.has(run.key) and not force:
            raise StoreError(
                f"{self.path(run.key)} is already measured; use --resume to skip it or --force to replace it"
            )
        digest = hashlib.sha256()
        replace(self.records_path(run.key), _packed(lines_of(records), digest.update))
        kept = run.model_copy(update={"raw_sha256": digest.hexdigest()})
        packed = _packed_if_any(timelines)
        if packed:
            replace(self.timelines_path(run.key), packed)
        else:
            self.timelines_path(run.key).unlink(missing_ok=True)  # of an earlier measurement
        self.write_judged(kept)
        return kept

    def write_judged(self, run: Run) -> None:
        """Replace the judgement of a level whose requests are stored."""
        replace(self.path(run.key), run.model_dump_json(indent=2).encode())

    def replace(self, run: Run, records: Iterable[RequestRecord], timelines: Iterable[RequestTimeline] = ()) -> Run:
        """Store a second measurement of a level and move the first one to ``replaced/``. Returns the stored run.

        Its ``replaces`` names the file and the reasons of the first one. Raises StoreError if there is no first one.
        """
        earlier = read_model(self.path(run.key), Run)
        paths = self.records_path(run.key), self.timelines_path(run.key)
        requests, own_timelines = (_pieces(path.open("rb")) if path.exists() else None for path in paths)
        replaced = self._set_aside(earlier, self.path(run.key).read_bytes, requests, own_timelines)
        return self.write(run.model_copy(update={"replaces": replaced}), records, timelines, force=True)

    def set_aside(
        self, run: Run, records: Iterable[RequestRecord], timelines: Iterable[RequestTimeline] = ()
    ) -> ReplacedLevel:
        """Store an unused measurement of a level in ``replaced/``; the level stays unfinished.

        Returns the value for ``replaces`` of the measurement that follows.
        """
        digest = hashlib.sha256()

        def text() -> bytes:
            return run.model_copy(update={"raw_sha256": digest.hexdigest()}).model_dump_json(indent=2).encode()

        return self._set_aside(run, text, _packed(lines_of(records), digest.update), _packed_if_any(timelines))

    def _set_aside(
        self, run: Run, text: Callable[[], bytes], records: Iterable[bytes] | None, timelines: Iterable[bytes] | None
    ) -> ReplacedLevel:
        """``text``: makes the run's file after the records are written. The files come in pieces; None: no file."""
        folder, stem, number = self.folder / REPLACED, run.key.stem, 1
        while (folder / f"{stem}.json").exists():
            number += 1
            stem = f"{run.key.stem}-{number}"
        if records is not None:
            replace(folder / f"{stem}.records.json.gz", records)
        if timelines is not None:
            replace(folder / f"{stem}.timelines.jsonl.gz", timelines)
        replace(folder / f"{stem}.json", text())
        return ReplacedLevel(file=f"{REPLACED}/{stem}.json", reasons=run.validity.reasons)

    def read_records(self, key: RunKey) -> tuple[RequestRecord, ...]:
        """All of `records`. Raises StoreError."""
        return tuple(self.records(key))

    def records(self, key: RunKey) -> Iterator[RequestRecord]:
        """Every request of one level, one at a time. Raises StoreError."""
        return _rows(self.records_path(key), RequestRecord, "records cannot be read")

    def read_timelines(self, key: RunKey) -> tuple[RequestTimeline, ...]:
        """All of `timelines`. Raises StoreError."""
        return tuple(self.timelines(key))

    def timelines(self, key: RunKey) -> Iterator[RequestTimeline]:
        """The timelines of one level by arrival; empty if its servers recorded none. Raises StoreError, also for a
        mark whose name is another one today. Unknown marks are kept, and no part ends at them.
        """
        path = self.timelines_path(key)
        rows = _rows(path, RequestTimeline, "timelines cannot be read", "; remove it") if path.exists() else iter(())
        for each in rows:
            if earlier := each.t.keys() & RENAMED_MARKS.keys():
                mark = min(earlier)
                raise StoreError(f"{path}: the mark {mark} is {RENAMED_MARKS[mark]} today: {CONVERT} {self.folder}")
            yield each

    def requests(self, key: RunKey) -> LevelData:
        """`read_records` in columns."""
        return LevelData.of(self.records(key))

    def check_records(self, run: Run) -> None:
        """Raises StoreError unless the level's requests are there and unchanged."""
        path = self.records_path(run.key)
        fix = f"remove {self.path(run.key)} and {path.name} beside it, and --resume measures that level again"
        sha256 = hashlib.sha256()
        try:
            with gzip.open(path) as file:
                for piece in _pieces(file):
                    sha256.update(piece)
        except (OSError, EOFError, ValueError, zlib.error) as error:
            raise StoreError(f"{path}: the level's requests cannot be read ({error}); {fix}") from error
        digest = sha256.hexdigest()
        if run.raw_sha256 not in (None, digest):
            raise StoreError(
                f"{path}: the level's requests are not those that were measured (SHA-256 {digest[:12]}..., "
                f"{self.path(run.key).name} has {str(run.raw_sha256)[:12]}...); {fix}"
            )

    def levels(self) -> Iterator[Path]:
        """The files of the finished levels, in no order."""
        for path in self.folder.glob("*.json"):
            if path.name not in (MANIFEST, CHAOS) and not path.name.startswith(SLO_PREFIX):
                yield path

    @property
    def has_measurements(self) -> bool:
        """Whether a level is finished, or was measured and set aside."""
        return next(chain(self.levels(), (self.folder / REPLACED).glob("*.json")), None) is not None

    def runs(self) -> Iterator[Run]:
        """All finished levels, ordered by (kind, value, repeat, look). Raises StoreError on a damaged file.

        A file is read again only if it was replaced or changed since this store read it.
        """
        self._read = {path: self._run(path) for path in sorted(self.levels())}
        runs = [each.run for each in self._read.values()]
        yield from sorted(runs, key=lambda run: (run.key.kind, run.key.value, run.key.repeat, run.key.look))

    def _run(self, path: Path) -> _ReadRun:
        with contextlib.suppress(OSError):  # `read_model` reports the fault
            stat = path.stat()
            version = FileVersion(stat.st_ino, stat.st_mtime_ns, stat.st_size)
            known = self._read.get(path)
            return known if known and known.version == version else _ReadRun(version, read_model(path, Run))
        return _ReadRun(FileVersion(0, 0, 0), read_model(path, Run))

    def write_search(self, search: SloSearch) -> None:
        """Write or replace a search; its levels are stored as runs."""
        replace(self.folder / f"{search.stem}.json", search.model_dump_json(indent=2).encode())

    def searches(self) -> tuple[SloSearch, ...]:
        """All searches, by SLO and repeat. Raises StoreError on a damaged file."""
        return tuple(read_model(path, SloSearch) for path in sorted(self.folder.glob(f"{SLO_PREFIX}*.json")))

    def load(self) -> Experiment:
        """Manifest, runs and searches together. Raises StoreError."""
        return Experiment(
            name=self.folder.name,
            manifest=self.read_manifest(),
            runs=tuple(self.runs()),
            searches=self.searches(),
        )


def experiment_folders(paths: Iterable[Path]) -> list[Path]:
    """``paths``, with each folder of a whole experiment (it has a record) replaced by the measured folders in it, by
    name."""
    folders: list[Path] = []
    for path in paths:
        with searched(path):
            within = [each for each in path.glob("[!.]*") if each.is_dir()] if (path / RECORD).is_file() else []
            folders += sorted(folder for folder in within if next(Store(folder).levels(), None)) or [path]
    return folders


@contextlib.contextmanager
def searched(folder: Path) -> Iterator[None]:
    """Raises StoreError if the block cannot search ``folder``: no permission, or no valid path."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise StoreError(
            f"{folder}: cannot be searched ({reason_of(error)}); give a folder of results that this user may read"
        ) from error


def record_notes(folder: Path) -> list[Finding]:
    """Notes on the figures, from the record in ``folder``. Empty without a record. Raises StoreError."""
    record = read_record(folder)
    if record is None:
        return []
    notes = []
    left = [visit.status for visit in record.visits if visit.status != "done"]
    if left:
        counted = ", ".join(
            f"{left.count(each)} {each}" for each in ("failed", "interrupted", "planned") if each in left
        )
        names = [name for names in record.folders.values() for name in names]
        without = [name for name in names if not next(Store(folder / name).levels(), None)]
        nothing = f"; nothing is measured of {', '.join(without)}" if without else ""
        visits = len(record.visits)
        notes.append(found("visits_left", folder=str(folder), counted=counted, visits=visits, without=nothing))
    if record.stopped is not None:
        notes.append(found("repeats_by_result", folder=str(folder), stopped=record.stopped))
    if record.tunes is not None:
        notes.append(found("settings_searched", folder=str(folder), tunes=record.tunes))
    return notes


class BoundsInFile(NamedTuple):
    """One entry of ``at:`` in an experiment's file; ``folder`` is the experiment's."""

    folder: Path
    text: str


def bounds_in_files(paths: Iterable[Path]) -> list[BoundsInFile]:
    """The bounds (``at:``) in the files of the experiments that ``paths`` are, or belong to."""
    entries: list[BoundsInFile] = []
    for folder in dict.fromkeys(each for path in paths for each in (path.resolve(), path.resolve().parent)):
        record = read_record(folder)
        bounds = record.experiment.get("at") if record else None
        if isinstance(bounds, list):
            entries += [BoundsInFile(folder, text) for text in bounds if isinstance(text, str)]
    return entries


def write_record(folder: Path, record: ExperimentRecord) -> None:
    """Write or replace the record of the experiment in ``folder``."""
    replace(folder / RECORD, record.model_dump_json(indent=2).encode())


def read_record(folder: Path) -> ExperimentRecord | None:
    """The record of the experiment whose folders are in ``folder``; None if there is none. Raises StoreError."""
    path = folder / RECORD
    return read_model(path, ExperimentRecord) if path.exists() else None


def _packed(lines: Iterable[bytes], passing: Callable[[bytes], object] = lambda text: None) -> Iterator[bytes]:
    """The pieces of a gzip file of these lines. ``passing`` is called with the text of each line."""
    packer = zlib.compressobj(SMALLEST, wbits=GZIP)
    for number, line in enumerate(lines):
        text = b"\n" + line if number else line
        passing(text)
        yield packer.compress(text)
    yield packer.flush()


def _packed_if_any(rows: Iterable[Row]) -> Iterator[bytes] | None:
    lines = lines_of(rows)
    first = next(lines, None)
    return None if first is None else _packed(chain((first,), lines))


def _rows(path: Path, kind: type[R], fault: str, fix: str = "") -> Iterator[R]:
    """Raises StoreError."""
    try:
        with gzip.open(path) as file:
            yield from map(kind.model_validate_json, file)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise StoreError(f"{path}: {fault} ({error}){fix}") from error


def _pieces(file: BufferedIOBase) -> Iterator[bytes]:
    """Read an open file in pieces, then close it."""
    with file:
        while piece := file.read(READ_BYTES):
            yield piece
