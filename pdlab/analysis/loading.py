"""Folders -> experiments with as many of their requests as the question needs, on all cores of a laptop.

Reading requests is decompressing for the most part, which threads do side by side.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from pdlab.analysis.requests import Requests, load_requests
from pdlab.core.workload import RunKey
from pdlab.results.published_folders import load_experiment
from pdlab.results.schema import Experiment, Run
from pdlab.results.store import MANIFEST

THREADS = 4


class Loaded(NamedTuple):
    """An experiment, its folder, and the requests of its runs as far as they were kept and wanted."""

    folder: Path
    experiment: Experiment
    requests: dict[RunKey, Requests]


def load(folders: Sequence[Path], gpus: Mapping[str, int], *, every_request: bool = False) -> list[Loaded]:
    """Read experiments, ours or imported. Raises StoreError or UsageError, see `load_experiment`.

    Requests are read where intervals need them: of levels measured once; with ``every_request`` of all
    levels, which is what goodput needs.
    """
    with ThreadPoolExecutor(THREADS) as pool:
        experiments = list(pool.map(lambda f: load_experiment(f, gpus.get(f.resolve().name)), folders))
        asked = [
            (i, folder, run)
            for i, (folder, experiment) in enumerate(zip(folders, experiments, strict=True))
            if (folder / MANIFEST).is_file()
            for run in _wanted(experiment, every_request)
        ]
        found = pool.map(lambda item: load_requests(item[1], item[2]), asked)
        requests: list[dict[RunKey, Requests]] = [{} for _ in folders]
        for (i, _, run), columns in zip(asked, found, strict=True):
            if columns is not None:
                requests[i][run.key] = columns
    return [Loaded(*item) for item in zip(folders, experiments, requests, strict=True)]


def _wanted(experiment: Experiment, every: bool) -> list[Run]:
    valid = Counter((run.key.kind, run.key.value) for run in experiment.runs if run.validity.valid)
    return [run for run in experiment.runs if every or valid[run.key.kind, run.key.value] < 2]
