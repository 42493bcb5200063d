"""Results on disk.

An experiment is a folder ``bm_results/<label>/``: ``manifest.json`` (what was run, where and
with what), one ``<kind><value>[-r<repeat>].json`` per finished level (a ``Run``), and beside it
``<same>.records.json.gz`` with every request. A measured level is never overwritten silently.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from pdlab.errors import StoreError, UsageError
from pdlab.results import SLO_PREFIX, Experiment, ExperimentRecord, Manifest, RequestRecord, Run, SloSearch
from pdlab.spec import validate
from pdlab.workload import RunKey

MANIFEST = "manifest.json"
RECORD = ".experiment.json"

M = TypeVar("M", Run, Manifest, SloSearch, ExperimentRecord)


class Store:
    """One experiment folder. Writes are atomic: a reader or a crash never sees half a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, key: RunKey) -> Path:
        return self.folder / f"{key.stem}.json"

    def records_path(self, key: RunKey) -> Path:
        return self.folder / f"{key.stem}.records.json.gz"

    def has(self, key: RunKey) -> bool:
        """Whether that level is finished and kept."""
        return self.path(key).exists()

    def write_manifest(self, manifest: Manifest) -> None:
        """Write or replace the manifest (it grows while an experiment runs)."""
        _write(self.folder / MANIFEST, manifest.model_dump_json(indent=2).encode())

    def read_manifest(self) -> Manifest:
        """Raises StoreError when there is none or it is not readable."""
        return _read(self.folder / MANIFEST, Manifest)

    def write(self, run: Run, records: Iterable[RequestRecord], *, force: bool = False) -> Run:
        """Keep one level: records first, then the run that points to them; returns it with its hash.

        Raises StoreError when the level is already there and ``force`` is not set.
        """
        if self.has(run.key) and not force:
            raise StoreError(
                f"{self.path(run.key)} is already measured; use --resume to skip it or --force to replace it"
            )
        raw = "\n".join(record.model_dump_json(exclude_defaults=True) for record in records).encode()
        kept = run.model_copy(update={"raw_sha256": hashlib.sha256(raw).hexdigest()})
        _write(self.records_path(run.key), gzip.compress(raw, mtime=0))
        _write(self.path(run.key), kept.model_dump_json(indent=2).encode())
        return kept

    def read_records(self, key: RunKey) -> tuple[RequestRecord, ...]:
        """Every request of one level. Raises StoreError."""
        path = self.records_path(key)
        try:
            text = gzip.decompress(path.read_bytes()).decode()
            return tuple(RequestRecord.model_validate_json(line) for line in text.splitlines())
        except (OSError, EOFError, ValueError) as error:
            raise StoreError(f"{path}: records cannot be read ({error})") from error

    def levels(self) -> Iterator[Path]:
        """The files of the finished levels, in no order."""
        for path in self.folder.glob("*.json"):
            if path.name != MANIFEST and not path.name.startswith(SLO_PREFIX):
                yield path

    def runs(self) -> Iterator[Run]:
        """All finished levels, ordered by (kind, value, repeat). Raises StoreError on a damaged file."""
        found = [_read(path, Run) for path in sorted(self.levels())]
        yield from sorted(found, key=lambda run: (run.key.kind, run.key.value, run.key.repeat))

    def write_search(self, search: SloSearch) -> None:
        """Write or replace a search; the levels that it rests on are kept as runs of their own."""
        _write(self.folder / f"{search.stem}.json", search.model_dump_json(indent=2).encode())

    def searches(self) -> tuple[SloSearch, ...]:
        """All searches, by SLO and repeat. Raises StoreError on a damaged file."""
        return tuple(_read(path, SloSearch) for path in sorted(self.folder.glob(f"{SLO_PREFIX}*.json")))

    def load(self) -> Experiment:
        """Manifest, runs and searches together. Raises StoreError."""
        return Experiment(
            name=self.folder.name,
            manifest=self.read_manifest(),
            runs=tuple(self.runs()),
            searches=self.searches(),
        )


def experiment_folders(paths: Iterable[Path]) -> list[Path]:
    """``paths``; in place of the folder of a whole experiment (it has a record) the measured ones in it, by name."""
    found: list[Path] = []
    for path in paths:
        within = [each for each in path.glob("[!.]*") if each.is_dir()] if (path / RECORD).is_file() else []
        found += sorted(folder for folder in within if next(Store(folder).levels(), None)) or [path]
    return found


def unfinished(folder: Path) -> str | None:
    """What of the experiment in ``folder`` is not measured, in words; None where all is, or where it holds none."""
    record = read_record(folder)
    left = [visit for visit in record.visits if visit.status != "done"] if record else []
    if record is None or not left:
        return None
    counts = {status: sum(visit.status == status for visit in left) for status in ("failed", "interrupted", "planned")}
    told = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    names = [name for names in record.folders.values() for name in names]
    without = [name for name in names if not next(Store(folder / name).levels(), None)]
    nothing = f"; nothing is measured of {', '.join(without)}" if without else ""
    return f"{folder} is not finished: {told} of {len(record.visits)} visits{nothing}"


def write_record(folder: Path, record: ExperimentRecord) -> None:
    """Write or replace the record of the experiment in ``folder``."""
    _write(folder / RECORD, record.model_dump_json(indent=2).encode())


def read_record(folder: Path) -> ExperimentRecord | None:
    """The record of the experiment whose folders are in ``folder``; None when there is none. Raises StoreError."""
    path = folder / RECORD
    return _read(path, ExperimentRecord) if path.exists() else None


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_bytes(data)
    part.replace(path)


def _read(path: Path, kind: type[M]) -> M:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error})") from error
    try:
        return kind.model_validate_json(text)
    except ValidationError:
        pass  # The slow way below says what is wrong in one line.
    try:
        data: Any = json.loads(text)
    except ValueError as error:
        raise StoreError(f"{path}: cannot be read ({error})") from error
    try:
        return validate(kind, data, where=str(path))
    except UsageError as error:
        raise StoreError(str(error)) from error
