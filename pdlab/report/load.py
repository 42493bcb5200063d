"""Result folders -> their measurements: levels, faults injected under load, and notes on the folders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, get_args

from pdlab.analysis import loading
from pdlab.analysis.curves import gpus_of, short_labels
from pdlab.analysis.intervals import carried
from pdlab.analysis.loading import Loaded
from pdlab.analysis.requests import judged
from pdlab.core.bounds import METRICS, Statistic
from pdlab.core.errors import UsageError
from pdlab.core.findings import CODES, Finding, found
from pdlab.core.output_paths import distinct
from pdlab.core.text import choices, listed
from pdlab.core.workload import Open, Ramp
from pdlab.results import chaos as chaos_results
from pdlab.results.chaos import Chaos
from pdlab.results.description import Stated, of_flags
from pdlab.results.published_folders import result_files
from pdlab.results.schema import Experiment, Run
from pdlab.results.store import experiment_folders, record_notes, searched

Row = dict[str, str | float | bool | None]


class ResultFolders(NamedTuple):
    """Folders by contents.

    ``given``: folders of load levels as they were given. ``experiments``: the same, with the folder of a whole
    experiment replaced by those in it. ``faults``: folders of faults injected under load.
    """

    given: tuple[Path, ...]
    experiments: tuple[Path, ...]
    faults: tuple[Path, ...]
    notes: tuple[Finding, ...]


@dataclass(frozen=True, eq=False)
class Results:
    """Everything that was read. ``stated``: what flags state about folders. ``every_request``: the requests of all
    levels are there, not only those of levels that were measured once."""

    folders: ResultFolders
    stated: Mapping[Path, Stated]
    loaded: tuple[Loaded, ...]
    chaos: tuple[Chaos, ...] = ()
    every_request: bool = False

    @property
    def experiments(self) -> list[Experiment]:
        return [each.experiment for each in self.loaded]

    @property
    def labelled(self) -> list[tuple[str, Loaded]]:
        """What was read, with the labels of the tables."""
        return list(zip(short_labels(self.experiments), self.loaded, strict=True))

    @property
    def notes(self) -> tuple[Finding, ...]:
        """On the folders, and on their contents."""
        return (*self.folders.notes, *_several_curves(self.loaded))

    def with_every_request(self) -> Results:
        """The same with the requests of all levels, which goodput needs. Raises as `read`."""
        if self.every_request:
            return self
        loaded = loading.load(self.folders.experiments, self.stated, every_request=True)
        return replace(self, loaded=tuple(loaded), every_request=True)

    def levels(self) -> list[Row]:
        """A row per level and repeat, valid or not, with the same keys in each.

        Rates are those of the whole deployment, per second. A latency is ``METRIC_STATISTIC_ms``; None: unknown, or too
        few requests for that percentile. ``window``: steady, or whole if the steady window is unknown.
        """
        return [_row(label, each, run) for label, each in self.labelled for run in each.experiment.runs]


def load(
    *folders: str | Path, gpus: Mapping[str, int] | None = None, labels: Mapping[str, str] | None = None
) -> Results:
    """The contents of these folders: experiments, whole experiments, faults injected under load, or published results.

    ``gpus``: name of a folder, or pattern on its files -> number of GPUs, if nothing records it. ``labels``: such a
    pattern -> label. Raises StoreError for what cannot be read and UsageError for wrong names.
    """
    found = find([Path(folder) for folder in folders], "load()")
    return read(found, stated_by_folder(gpus or {}, labels or {}, found.experiments, "load()"))


def find(folders: Sequence[Path], flag: str) -> ResultFolders:
    """The folders by contents; ``flag``: what named them. Raises StoreError or UsageError."""
    faults: list[Path] = []
    given: list[Path] = []
    for folder in folders:
        with searched(folder):
            (faults if chaos_results.is_chaos(folder) else given).append(folder)
    distinct(faults, flag)
    experiments = distinct(experiment_folders(given), flag)
    notes = [note for folder in given for note in record_notes(folder)]
    notes.sort(key=lambda note: [*CODES].index(note.code))
    return ResultFolders(tuple(given), tuple(experiments), tuple(faults), tuple(notes))


def read(found: ResultFolders, stated: Mapping[Path, Stated], *, every_request: bool = False) -> Results:
    """Read the folders that `find` gave; see `load` and `pdlab.analysis.loading.load`."""
    loaded = loading.load(found.experiments, stated, every_request=every_request)
    made = [chaos_results.load(path) for path in found.faults]
    return Results(found, stated, tuple(loaded), tuple(made), every_request)


def stated_by_folder(
    gpus: Mapping[str, int], labels: Mapping[str, str], folders: Sequence[Path], flag: str
) -> dict[Path, Stated]:
    """Folder -> what ``--gpus`` and ``--label`` state about it and its files.

    A folder's name with more parts takes precedence over a shorter one. A name of no folder is a pattern on files.
    Raises UsageError for a name or pattern that fits nothing; ``flag``: what named the folders.
    """
    sizes: dict[Path, tuple[int, int]] = {}
    patterns: dict[str, int] = {}
    for name, count in gpus.items():
        meant = [path for path in folders if _is_called(path, name)]
        if not meant:
            patterns[name] = count
        for path in meant:
            sizes[path] = max(sizes.get(path, (0, 0)), (len(Path(name).parts), count), key=lambda each: each[0])
    entries = of_flags(patterns, labels)
    for entry in entries:
        if not any(entry.fits(path, file.relative_to(path)) for path in folders for file in _files(path)):
            known = [path.resolve().name for path in folders]
            of_flag, value = ("gpus", entry.gpus) if entry.label is None else ("label", entry.label)
            raise UsageError(
                f"--{of_flag} {entry.match}={value}: no folder of {flag} is called {entry.match!r}, and no file in "
                f"them fits it; {choices(entry.match, known)}"
            )
    return {
        path: Stated(sizes[path][1] if path in sizes else None, entries) for path in folders if path in sizes or entries
    }


def _files(folder: Path) -> list[Path]:
    return list(result_files(folder)) if folder.is_dir() else []


def _is_called(path: Path, name: str) -> bool:
    """Whether the folder's path ends in ``name``, or ``name`` is a path to it."""
    parts = Path(name).parts
    ends = path.resolve().parts[-len(parts) :] == parts if parts else False
    return ends or Path(name).resolve() == path.resolve()


def _several_curves(loaded: Sequence[Loaded]) -> Iterator[Finding]:
    """Folders that hold several curves, and which."""
    for folder in dict.fromkeys(each.folder for each in loaded):
        parts = [each.experiment.part for each in loaded if each.folder == folder]
        if len(parts) > 1:
            yield found("several_curves", folder=str(folder), curves=len(parts), parts=listed(parts))


def _row(label: str, source: Loaded, run: Run) -> Row:
    steady = run.steady is not None and run.steady.ttft is not None
    summary = run.steady if run.steady is not None and steady else run.whole
    judging = judged(run, summary, source.requests.get(run.key))
    row: Row = {
        "experiment": label,
        "folder": str(source.folder),
        "model": source.experiment.model,
        "gpus": gpus_of(source.experiment).total,
        "load_kind": run.key.kind,
        "load": run.key.value,
        "repeat": run.key.repeat,
        "burstiness": run.load.burstiness if isinstance(run.load, Open | Ramp) else None,
        "ramp_start_rps": run.load.start_rps if isinstance(run.load, Ramp) else None,
        "ramp_shape": run.load.shape if isinstance(run.load, Ramp) else None,
        "requests": run.num_requests,
        "failed": run.failed,
        "valid": run.validity.valid,
        "reasons": "; ".join(run.validity.reasons),
        "window": "steady" if steady else "whole",
        "completed": summary.completed,
        "judged": judging,
        "requests_per_s": summary.requests_per_s,
        "input_tokens_per_s": summary.input_tokens_per_s,
        "output_tokens_per_s": summary.output_tokens_per_s,
    }
    for metric in METRICS:
        latency = summary.latencies.get(metric)
        seconds = latency.statistics_s if latency else {}
        for statistic in get_args(Statistic):
            value_s = seconds.get(statistic) if carried(statistic, judging) else None
            row[f"{metric}_{statistic}_ms"] = None if value_s is None else 1000 * value_s
    return row
