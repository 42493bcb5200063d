"""Result folders as the audit reads them: every file with its hash and its raw content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdlab.core.errors import PdlabError, UsageError
from pdlab.core.workload import RunKey
from pdlab.results.description import Stated
from pdlab.results.published_files import PublishedLevel
from pdlab.results.published_folders import SourcedExperiment, sourced_experiments
from pdlab.results.schema import SLO_PREFIX, Experiment, Run
from pdlab.results.store import MANIFEST, Store


@dataclass(frozen=True)
class LevelFile:
    """One result file: its run, the hash of its bytes, the hash of its content in any layout, and its raw content."""

    path: Path
    run: Run
    sha256: str
    content_sha256: str
    raw: dict[str, Any]

    @property
    def counted(self) -> bool:
        """Whether the file has the number of requests."""
        return not self.raw.get("counts_unknown")

    @property
    def name(self) -> str:
        return f"{self.path.parent.name}/{self.path.name}"


@dataclass(frozen=True)
class Folder:
    """One experiment of a folder; ``experiment`` is None if the folder cannot be read (``error`` has the reason)."""

    path: Path
    experiment: Experiment | None
    levels: tuple[LevelFile, ...]
    error: str | None = None

    @property
    def ours(self) -> bool:
        return (self.path / MANIFEST).is_file()


def read_folder(path: Path, stated: Stated | int | None = None, read: Sequence[SourcedExperiment] = ()) -> list[Folder]:
    """All experiments of a folder; if it cannot be read, its ``error`` has the reason.

    ``read``: experiments that were read already. ``stated``: see `pdlab.results.published_folders.load_experiments`.
    Raises UsageError if that contradicts the folder.
    """
    try:
        return [_folder(path, sourced) for sourced in read or _load(path, stated)]
    except PdlabError as error:
        if stated is not None and isinstance(error, UsageError):
            raise
        return [Folder(path, None, (), str(error))]


def _folder(path: Path, sourced: SourcedExperiment) -> Folder:
    levels = [_published_level(path, each) for each in sourced.runs]
    if (path / MANIFEST).is_file():
        by_key = {run.key: run for run in sourced.experiment.runs}
        for file in sorted(path.glob("*.json")):
            if file.name == MANIFEST or file.name.startswith(SLO_PREFIX):
                continue
            content = file.read_bytes()
            run = by_key.get(RunKey.model_validate(json.loads(content)["key"]))
            if run is not None:
                levels.append(_level(file, content, run))
    return Folder(path, sourced.experiment, tuple(sorted(levels, key=lambda level: level.path)))


def _published_level(folder: Path, sourced: PublishedLevel) -> LevelFile:
    """A level of others. In a file with several levels each has the hash of its own part."""
    plain = json.dumps(sourced.data, sort_keys=True, default=str).encode()
    inside = f"{sourced.file.relative_to(folder)}{f' ({sourced.part})' if sourced.part else ''}"
    content_sha256 = _sha256(plain)
    return LevelFile(
        folder / inside, sourced.run, content_sha256 if sourced.part else sourced.sha256, content_sha256, sourced.data
    )


def _level(file: Path, content: bytes, run: Run) -> LevelFile:
    raw = json.loads(content)
    plain = json.dumps(raw, sort_keys=True).encode()
    return LevelFile(file, run, _sha256(content), _sha256(plain), raw)


def _load(path: Path, stated: Stated | int | None) -> tuple[SourcedExperiment, ...]:
    """As viz.py loads it. A manifest whose GPUs contradict its deployment is read for examination."""
    try:
        return sourced_experiments(path, stated)
    except PdlabError:
        if not (path / MANIFEST).is_file():
            raise
        experiment = Store(path).load()
        deployment, stated = experiment.manifest.deployment, experiment.manifest.gpus
        if not experiment.runs or deployment is None or stated in (None, deployment.gpus):
            raise
        return (SourcedExperiment(experiment),)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
