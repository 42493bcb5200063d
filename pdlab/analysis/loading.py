"""Folders -> experiments with the requests that are needed, read in parallel.

Reading requests is mostly decompression, which threads do in parallel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from pdlab.analysis.audit.content_rules import impossible_latencies, is_figure
from pdlab.analysis.requests import Requests, load_requests, of_times
from pdlab.core.bounds import Metric
from pdlab.core.findings import found
from pdlab.core.workload import RunKey
from pdlab.results.description import Stated
from pdlab.results.published_folders import SourcedExperiment, sourced_experiments
from pdlab.results.schema import Experiment, Run, Summary
from pdlab.results.store import MANIFEST, Store

THREADS = 4


class Loaded(NamedTuple):
    """An experiment, its folder, and the needed requests of its runs. ``sourced``: an experiment of others as in its
    files, impossible figures included."""

    folder: Path
    experiment: Experiment
    requests: dict[RunKey, Requests]
    sourced: SourcedExperiment | None = None


def load(folders: Sequence[Path], gpus: Mapping[Path, Stated], *, every_request: bool = False) -> list[Loaded]:
    """Read experiments, pdlab's own or imported, all of each folder. ``gpus``: what is stated about folders.

    Requests are read if intervals need them, which is for levels measured once; with ``every_request`` for all levels,
    which goodput needs. Raises StoreError or UsageError, see `load_experiments`.
    """
    with ThreadPoolExecutor(THREADS) as pool:
        read = pool.map(
            lambda folder: [(folder, each) for each in sourced_experiments(folder, gpus.get(folder))], folders
        )
        every = [each for of_folder in read for each in of_folder]
        experiments = [(folder, possible(sourced.experiment)) for folder, sourced in every]
        runs_with_requests = [
            (i, folder, run)
            for i, (folder, experiment) in enumerate(experiments)
            if (folder / MANIFEST).is_file()
            for run in _runs_needing_requests(experiment, every_request)
        ]
        request_tables = pool.map(lambda item: load_requests(item[1], item[2]), runs_with_requests)
        requests: list[dict[RunKey, Requests]] = [{} for _ in experiments]
        for (i, _, run), columns in zip(runs_with_requests, request_tables, strict=True):
            if columns is not None:
                requests[i][run.key] = columns
        for i, (_, of_file) in enumerate(every):
            kept = {each.run.key: of_times(each.requests, each.run) for each in of_file.runs if each.requests}
            requests[i].update(kept)
    return [
        Loaded(*item, columns, sourced if sourced.runs else None)
        for item, columns, (_, sourced) in zip(experiments, requests, every, strict=True)
    ]


def of_others(loaded: Sequence[Loaded]) -> dict[Path, list[SourcedExperiment]]:
    """Folder of others -> its experiments, which the audit need not read again."""
    read: dict[Path, list[SourcedExperiment]] = {}
    for each in loaded:
        if each.sourced is not None:
            read.setdefault(each.folder, []).append(each.sourced)
    return read


def hashes(loaded: Sequence[Loaded]) -> dict[Path, str]:
    """SHA-256 of every file of records that was read."""
    return {
        Store(each.folder).records_path(key): requests.sha256
        for each in loaded
        for key, requests in each.requests.items()
        if requests.sha256 is not None
    }


def possible(experiment: Experiment) -> Experiment:
    """The experiment without impossible figures: a level with one is invalid, and impossible latencies become
    unknown."""
    return experiment.model_copy(update={"runs": tuple(_possible(run) for run in experiment.runs)})


def _possible(run: Run) -> Run:
    windows = {name: summary for name in ("whole", "steady") if (summary := getattr(run, name)) is not None}
    impossible = [found("figures_impossible", what=text) for each in windows.values() for text in _impossible(each)]
    if not impossible:
        return run
    validity = run.validity.failing(*impossible)
    cleaned = {name: summary.model_copy(update=_without(summary)) for name, summary in windows.items()}
    return run.model_copy(update={"validity": validity, **cleaned})


def _impossible(summary: Summary) -> list[str]:
    bad_rates = [] if _rates_are_figures(summary) else ["a rate is below 0 or not a number"]
    return [*bad_rates, *impossible_latencies(summary)]


def _rates_are_figures(summary: Summary) -> bool:
    return all(map(is_figure, (summary.requests_per_s, summary.input_tokens_per_s, summary.output_tokens_per_s)))


def _without(summary: Summary) -> dict[Metric, None]:
    """Latencies to remove: impossible ones, or all of them if a rate is impossible."""
    if not _rates_are_figures(summary):
        return dict.fromkeys(summary.latencies)
    return {
        name: None
        for name, latency in summary.latencies.items()
        if not all(map(is_figure, latency.statistics_s.values()))
    }


def _runs_needing_requests(experiment: Experiment, every: bool) -> list[Run]:
    valid = Counter((run.key.kind, run.key.value) for run in experiment.runs if run.validity.valid)
    return [run for run in experiment.runs if every or valid[run.key.kind, run.key.value] < 2]
