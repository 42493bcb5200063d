"""Result folders as the audit reads them: every file with its hash, and what it says beyond its run."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdlab.core.errors import PdlabError
from pdlab.core.workload import RunKey
from pdlab.results.published_folders import load_experiment, published_load
from pdlab.results.schema import SLO_PREFIX, Experiment, Run
from pdlab.results.store import MANIFEST, Store


@dataclass(frozen=True)
class AuditFinding:
    """One defect of result files. ``percent``: how far a figure in the plot may be off, where that can be said."""

    kind: str
    files: tuple[str, ...]
    evidence: str
    consequence: str
    fix: str
    percent: float | None = None


@dataclass(frozen=True)
class LevelFile:
    """One result file: its run, the hashes of its bytes and of its content whatever the layout, and what it says
    beyond the run."""

    path: Path
    run: Run
    sha256: str
    content_sha256: str
    raw: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.path.parent.name}/{self.path.name}"


@dataclass(frozen=True)
class Folder:
    """One experiment folder; ``experiment`` is None when it cannot be read (``error`` says why)."""

    path: Path
    experiment: Experiment | None
    levels: tuple[LevelFile, ...]
    error: str | None = None

    @property
    def ours(self) -> bool:
        return (self.path / MANIFEST).is_file()


def read_folder(path: Path) -> Folder:
    """All of a folder; never raises: what cannot be read is the folder's ``error``."""
    try:
        experiment = _load(path)
    except PdlabError as error:
        return Folder(path, None, (), str(error))
    files = sorted(
        file for file in path.glob("*.json") if file.name != MANIFEST and not file.name.startswith(SLO_PREFIX)
    )
    by_key = {run.key: run for run in experiment.runs}
    levels, repeats = [], defaultdict[tuple[str, float], int](int)
    for file in files:
        content = file.read_bytes()
        raw = json.loads(content)
        run = _run_of(file, raw, by_key, repeats)
        if run is not None:
            plain = json.dumps(raw, sort_keys=True).encode()
            levels.append(LevelFile(file, run, _sha256(content), _sha256(plain), raw))
    return Folder(path, experiment, tuple(levels))


def _load(path: Path) -> Experiment:
    """As viz.py loads it; a manifest whose GPUs contradict its deployment is read all the same, to be examined."""
    try:
        return load_experiment(path)
    except PdlabError:
        if not (path / MANIFEST).is_file():
            raise
        experiment = Store(path).load()
        deployment, gpus = experiment.manifest.deployment, experiment.manifest.gpus
        if not experiment.runs or deployment is None or gpus in (None, deployment.gpus):
            raise
        return experiment


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _run_of(
    file: Path,
    raw: dict[str, Any],
    by_key: dict[RunKey, Run],
    repeats: dict[tuple[str, float], int],
) -> Run | None:
    """The run that came from that file: ours carry their key, others their load, the n-th file the n-th repeat."""
    if "schema_version" in raw:
        return by_key.get(RunKey.model_validate(raw["key"]))
    load = published_load(file, raw)
    number = repeats[load.kind, load.value]
    repeats[load.kind, load.value] += 1
    return by_key.get(RunKey(kind=load.kind, value=load.value, repeat=number))
