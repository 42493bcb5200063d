"""Result folders written by others, and our own -> ``Experiment``.

The published format is one folder per experiment. It has the summary JSON of ``vllm bench serve`` per level
(`pdlab.results.published_files`) and the configuration in the folder's name (`pdlab.results.published_names`). A folder
with several configurations gives several experiments (`pdlab.results.published_curves`). What is in neither files nor
names is None.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pdlab.core.command_lines import command_line
from pdlab.core.commands import BENCH, VIZ
from pdlab.core.deployment import Collocated, Deployment, Disaggregated, unguarded
from pdlab.core.errors import StoreError, UsageError
from pdlab.core.text import choices, counted, listed, printable
from pdlab.results.description import DESCRIPTION, DescribedResults, Stated, description_for, of_folder
from pdlab.results.published_curves import BARE, Difference, PublishedCurve, separated
from pdlab.results.published_files import FileLevels, PublishedLevel, read_levels
from pdlab.results.published_names import NamedConfiguration, parse_name
from pdlab.results.readers import may_be_read
from pdlab.results.schema import Experiment, Manifest
from pdlab.results.stated_platform import GPU, stated_gpu, stated_version
from pdlab.results.store import MANIFEST, Store, searched

BELOW = "below a folder that has levels itself; give its own folder to read it"


class SourcedExperiment(NamedTuple):
    """An experiment, and the level that each of its runs was read from; empty for pdlab's own folders."""

    experiment: Experiment
    runs: tuple[PublishedLevel, ...] = ()


def load_experiments(path: Path, stated: Stated | int | None = None) -> tuple[Experiment, ...]:
    """Read the experiments in one folder: pdlab's own (with a manifest), or one of the published format.

    The published format holds several experiments if its files differ in more than their load. ``stated``: what the
    folder does not record; a number is the GPUs of each experiment. Raises StoreError or UsageError, with the folder
    and the fix.
    """
    return tuple(each.experiment for each in sourced_experiments(path, stated))


def load_experiment(path: Path, stated: Stated | int | None = None) -> Experiment:
    """`load_experiments` of a folder that holds one. Raises StoreError if it holds several, and names them."""
    experiments = load_experiments(path, stated)
    if len(experiments) > 1:
        parts = listed([each.part for each in experiments])
        raise StoreError(f"{path} holds {counted(len(experiments), 'curve')}: {parts}; give each a folder of its own")
    return experiments[0]


def sourced_experiments(path: Path, stated: Stated | int | None = None) -> tuple[SourcedExperiment, ...]:
    """`load_experiments`, each run of the published format with its file."""
    require_folder(path)
    gpus, entries = stated if isinstance(stated, Stated) else Stated(stated)
    with searched(path):
        ours = (path / MANIFEST).is_file()
        empty = not ours and not any(True for _ in result_files(path))
    if ours:
        label = description_for(path, Path(MANIFEST), entries).label
        return (SourcedExperiment(_pdlab_experiment(path, gpus).model_copy(update={"label": label})),)
    if empty:
        raise StoreError(f"{path} holds no result files{_hint_at_subfolders(path)}")
    return _published(path, gpus, (*entries, *of_folder(path)))


class FolderContents(NamedTuple):
    """The files of a folder that a benchmark client may have written, and the folders that are not pdlab's."""

    files: list[Path]
    folders: list[Path]


def contents(folder: Path) -> FolderContents:
    """The files and folders in a folder, by name, without hidden ones and descriptions."""
    seen = [each for each in sorted(folder.iterdir()) if not each.name.startswith(".")]
    files = [each for each in seen if may_be_read(each) and each.is_file() and each.name != DESCRIPTION]
    return FolderContents(files, [each for each in seen if each.is_dir() and not (each / MANIFEST).is_file()])


def result_files(folder: Path) -> Iterator[Path]:
    """The files of others in a folder, then those below it."""
    files, folders = contents(folder)
    yield from files
    for each in folders:
        yield from result_files(each)


def require_folder(path: Path) -> None:
    """Raises StoreError if ``path`` is not a folder, with the nearest name beside it."""
    with searched(path):
        if path.is_dir():
            return
        exists = path.exists()
        beside = [each.name for each in path.parent.iterdir() if each.is_dir()] if path.parent.is_dir() else []
    suggested = choices(path.name, (name for name in beside if not name.startswith(".")))
    if exists:
        raise StoreError(f"{path} is a file; give the folder of an experiment, for example bm_results/collocated-4xtp2")
    hint = suggested if suggested.near else "give the folder of an experiment, for example bm_results/collocated-4xtp2"
    raise StoreError(f"{path} does not exist; {hint}")


def _pdlab_experiment(path: Path, gpus: int | None) -> Experiment:
    experiment = Store(path).load()
    manifest = experiment.manifest
    stated = manifest.deployment.gpus if manifest.deployment else manifest.gpus
    if manifest.deployment and manifest.gpus not in (None, stated):
        raise StoreError(
            f"{path}: {MANIFEST} contradicts itself: gpus is {manifest.gpus}, but its deployment uses {stated}"
        )
    if gpus is not None and stated not in (None, gpus):
        raise UsageError(
            f"{path}: its {MANIFEST} has {counted(stated, 'GPU')}, --gpus has {gpus}; leave --gpus out for it"
        )
    if stated is None and gpus is None:
        raise StoreError(f"{path}: {MANIFEST} does not record how many GPUs were used; add {_gpus_flag(path)}")
    if not experiment.runs:
        raise StoreError(f"{path} has a {MANIFEST}, but no finished level yet; run the sweep again with --resume")
    return experiment.model_copy(update={"manifest": manifest.model_copy(update={"gpus": stated or gpus})})


def _published(path: Path, gpus: int | None, entries: tuple[DescribedResults, ...]) -> tuple[SourcedExperiment, ...]:
    named = parse_name(_folder_name(path))
    levels, skipped = read_folder_levels(path, entries)
    if not levels:
        first = next(iter(skipped)).relative_to(path)
        raise StoreError(f"{path} holds no result files: {first} has no level; give another folder")
    configured = named.configured
    if gpus is None and configured.found is None and all(size_of(level) is None for level in levels):
        of_files = (level.name.configured.contradiction for level in levels)
        raise _unknown_size(path, configured.contradiction or next(filter(None, of_files), ""))
    curves, differences = separated(levels)
    _require_one_size(path, levels, differences, gpus)
    return tuple(_experiment(path, curve, configured.found, differences, gpus) for curve in curves)


class FolderLevels(NamedTuple):
    """The levels in the files of a folder. ``skipped``: file without levels -> the kind of file."""

    levels: list[PublishedLevel]
    skipped: dict[Path, str]


def read_folder_levels(path: Path, entries: tuple[DescribedResults, ...]) -> FolderLevels:
    """Read the files of a folder, or of its subfolders if it has no level itself. Raises StoreError.

    People have one folder per level, per ratio or per date.
    """
    found = FolderLevels([], {})
    _read_within(path, path, entries, found)
    return found


def _read_within(path: Path, folder: Path, entries: tuple[DescribedResults, ...], found: FolderLevels) -> None:
    """Add the levels in ``folder``, which is ``path`` or below it, to ``found``."""
    name = _folder_name(path)
    named, before = parse_name(name), len(found.levels)
    with searched(folder):
        files, folders = contents(folder)
    for file in files:
        described = description_for(path, file.relative_to(path), entries)
        reading = FileLevels((), "left out by its description")
        if not described.skip:
            reading = read_levels(path, file, name, named, described)
        found.levels.extend(reading.levels)
        if not reading.levels:
            found.skipped[file] = reading.skipped
    if len(found.levels) > before:
        with searched(folder):
            found.skipped.update({file: BELOW for each in folders for file in result_files(each)})
        return
    for each in folders:
        _read_within(path, each, entries, found)


def size_of(level: PublishedLevel) -> int | None:
    """The GPUs of one level's deployment, from what is stated, the file or its name; None if unknown."""
    topology = level.topology
    return level.gpus or (_gpus(topology) if topology else None)


def _require_one_size(
    path: Path, levels: list[PublishedLevel], differences: tuple[Difference, ...], gpus: int | None
) -> None:
    """Raises StoreError if the files are of several deployments and the number of GPUs of each is unknown."""
    several = [difference for difference in differences if difference.of_deployment]
    if not several or gpus is not None or all(size_of(level) is not None for level in levels):
        return
    raise StoreError(
        f"{path} holds results of several deployments ({several[0].text}), and the number of GPUs of each is unknown; "
        "give each a folder whose name ends in its configuration (4xtp2, or 1xtp2-1xtp2 for prefill-decode), or add "
        f"{VIZ}'s {_gpus_flag(path)} if each used N GPUs; or run pdlab describe with --write, which makes a file "
        "where you state it for each"
    )


class PublishedPools(NamedTuple):
    """The pools of one curve, and its GPUs; None if unknown."""

    topology: Collocated | Disaggregated | None
    gpus: int | None


def deployed(
    curve: PublishedCurve,
    found: NamedConfiguration | None,
    differences: tuple[Difference, ...],
    gpus: int | None,
) -> PublishedPools:
    """The deployment of a curve from what is stated, its files, their names, and the folder's name (``found``).

    Raises StoreError if two names contradict each other.
    """
    first = curve.levels[0]
    in_file, named = first.topology, first.as_measured(found) if found else None
    if in_file is not None and named is not None and in_file != named and gpus is None:
        raise StoreError(
            f"{first.file}: the file's name has {in_file.label}, the folder's name has {named.label}; rename one"
        )
    topology = named or in_file
    if in_file is None and any(difference.of_deployment for difference in differences):
        topology = None
    for stated in (gpus, first.gpus):
        if stated is not None and topology is not None and _gpus(topology) != stated:
            topology = None
    return PublishedPools(topology, gpus or first.gpus or (_gpus(topology) if topology else None))


def _experiment(
    path: Path,
    curve: PublishedCurve,
    found: NamedConfiguration | None,
    differences: tuple[Difference, ...],
    gpus: int | None,
) -> SourcedExperiment:
    folder, first = printable(_folder_name(path)), curve.levels[0]
    topology, total = deployed(curve, found, differences, gpus)
    if total is None:
        raise _unknown_size(path)
    runs: list[PublishedLevel] = []
    repeats: dict[tuple[str, float], int] = {}
    for level in curve.levels:
        key = level.run.key
        repeat = repeats.get((key.kind, key.value), 0)
        repeats[key.kind, key.value] = repeat + 1
        run = level.run.model_copy(update={"key": key.model_copy(update={"repeat": repeat})})
        runs.append(level._replace(run=run))
    runs.sort(key=lambda each: (each.run.key.kind, each.run.key.value, each.run.key.repeat))
    model = next((each.run.model for each in runs if each.run.model), None)
    deployment = None
    if topology is not None:
        deployment = Deployment(name=folder, model=model or "unknown", topology=unguarded(topology))
    # What distinguishes two files of a folder makes two curves, so all levels of one state the same.
    gpu, engine = stated_gpu(first.stated_words), first.run.engine
    version = stated_version(first.stated_words, engine)
    manifest = Manifest(
        origin="imported",
        label=folder,
        deployment=deployment,
        gpus=total,
        workload=runs[0].run.workload,
        versions={engine: version} if engine and version else {},
        hardware={GPU: gpu} if gpu else {},
    )
    settings = {key: value for key, value in curve.settings.items() if key not in BARE}
    experiment = Experiment(
        name=f"{folder} ({curve.part})" if curve.part else folder,
        label=first.stated.label,
        part=curve.part,
        settings=settings,
        manifest=manifest,
        runs=tuple(each.run for each in runs),
    )
    return SourcedExperiment(experiment, tuple(runs))


def _unknown_size(path: Path, contradiction: str = "") -> StoreError:
    describes = command_line("describe", folder=path, write=True)
    why = contradiction or (
        "the folder's name does not give the configuration (expected it to end in 4xtp2, or in 1xtp2-1xtp2 for "
        "prefill-decode)"
    )
    return StoreError(
        f"{path}: {why}, so nothing can be normalised; rename it, state its deployment in the file of "
        f"{describes}, or add {VIZ}'s {_gpus_flag(path)}"
    )


def _gpus(topology: Collocated | Disaggregated) -> int:
    if isinstance(topology, Collocated):
        return topology.pool.gpus
    return topology.prefill.gpus + topology.decode.gpus


def _hint_at_subfolders(path: Path) -> str:
    folders = sorted(p.name for p in path.iterdir() if p.is_dir() and any(p.glob("*.json")))
    if not folders:
        return f"; run a sweep into it first ({BENCH}), or give another folder"
    shown = ", ".join(folders[:3]) + (", ..." if len(folders) > 3 else "")
    return f" itself, but its subfolders do: give those ({shown})"


def _gpus_flag(path: Path) -> str:
    return f"--gpus {shlex.quote(f'{_folder_name(path)}=N')}"


def _folder_name(path: Path) -> str:
    return path.resolve().name
