"""How result files are interpreted: a row per curve in a folder, of known or unknown size."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pdlab.core.text import counted, table
from pdlab.results.description import DescribedResults, Stated, of_folder
from pdlab.results.published_curves import separated
from pdlab.results.published_folders import deployed, read_folder_levels, require_folder
from pdlab.results.published_names import parse_name
from pdlab.results.schema import Experiment, Run
from pdlab.results.store import MANIFEST, Store

# A curve with more patterns is better described in a file than by flags.
MOST_FLAGS = 2


@dataclass(frozen=True)
class InterpretedCurve:
    """One curve of a folder. ``matches``: patterns that fit only its files, as a description takes them. ``part``
    distinguishes it from the others. ``tools``: the clients that wrote its files. ``deployment``: its label, as far as
    names and files give it. ``gpus``: None if unknown. ``label``: the name that people give it."""

    folder: Path
    part: str
    matches: tuple[str, ...]
    files: int
    tools: tuple[str, ...]
    runs: tuple[Run, ...]
    model: str | None
    deployment: str | None
    gpus: int | None
    label: str | None = None

    @property
    def loads(self) -> str:
        """``concurrency 4 to 64, rate 2``: the loads of its levels."""
        found: dict[str, list[float]] = {}
        for run in self.runs:
            found.setdefault(run.key.kind, []).append(run.key.value)
        return ", ".join(
            f"{kind} {min(values):g}" + (f" to {max(values):g}" if len(set(values)) > 1 else "")
            for kind, values in found.items()
        )

    @property
    def lengths(self) -> str:
        """Input and output tokens of the workloads, ``5000:250``; empty if unknown."""
        return " and ".join(dict.fromkeys(run.workload.label for run in self.runs if run.has_lengths))

    @property
    def flags(self) -> str | None:
        """The flag that gives its size, if that is unknown."""
        if self.gpus is not None:
            return None
        name = self.folder.resolve().name
        if len(self.matches) > MOST_FLAGS:
            return f"--gpus {shlex.quote(f'{name}=N')} if all its curves used N GPUs, or pdlab describe --write"
        patterns = [name if match == "*" else match for match in self.matches]
        return " ".join(f"--gpus {shlex.quote(f'{pattern}=N')}" for pattern in patterns)

    def entry(self, match: str) -> DescribedResults:
        """The same as an entry of a description."""
        return DescribedResults(
            match=match, deployment=self.deployment, gpus=self.gpus, label=self.label, model=self.model
        )


@dataclass(frozen=True)
class InterpretedFolder:
    """The curves of one folder. ``skipped``: kind of file -> files that are no level."""

    folder: Path
    curves: tuple[InterpretedCurve, ...]
    skipped: dict[str, tuple[Path, ...]]


def interpret(folder: Path, stated: Stated = Stated()) -> InterpretedFolder:  # noqa: B008
    """How one folder, pdlab's or of others, is interpreted. Raises StoreError for a file that cannot be read."""
    require_folder(folder)
    if (folder / MANIFEST).is_file():
        return InterpretedFolder(folder, (_pdlab_curve(folder, Store(folder).load(), stated.gpus),), {})
    reading = read_folder_levels(folder, (*stated.entries, *of_folder(folder)))
    named = parse_name(folder.resolve().name).configured.found
    separate = separated(reading.levels)
    every = {level.file for level in reading.levels}
    curves = []
    for curve in separate.curves:
        files = sorted({level.file for level in curve.levels})
        topology, gpus = deployed(curve, named, separate.differences, stated.gpus)
        models = {level.run.model for level in curve.levels if level.run.model}
        curves.append(
            InterpretedCurve(
                folder=folder,
                part=curve.part,
                matches=_patterns(folder, files, every),
                files=len(files),
                tools=tuple(dict.fromkeys(level.tool for level in curve.levels)),
                runs=tuple(level.run for level in curve.levels),
                model=models.pop() if len(models) == 1 else None,
                deployment=topology.label if topology else None,
                gpus=gpus,
                label=curve.levels[0].stated.label,
            )
        )
    skipped: dict[str, tuple[Path, ...]] = {}
    for file, why in reading.skipped.items():
        skipped[why] = (*skipped.get(why, ()), file.relative_to(folder))
    return InterpretedFolder(folder, tuple(curves), skipped)


def interpretation_text(folders: Sequence[InterpretedFolder]) -> str:
    """A table with a row per curve; below it the other files of the folders, and the flags that are needed."""
    head = ("folder", "curve", "files", "client", "levels", "load", "input:output", "model", "GPUs", "deployment")
    rows = [
        (
            str(curve.folder),
            curve.label or curve.part or "-",
            str(curve.files),
            ", ".join(curve.tools),
            str(len(curve.runs)),
            curve.loads or "-",
            curve.lengths or "-",
            curve.model or "-",
            "?" if curve.gpus is None else str(curve.gpus),
            curve.deployment or "-",
        )
        for folder in folders
        for curve in folder.curves
    ]
    lines = [table(head, rows, left=(0, 1, 3, 5, 7, 9))] if rows else []
    for folder in folders:
        if not folder.curves:
            lines.append(f"{folder.folder}: no levels")
        for why, files in folder.skipped.items():
            more = f" and {len(files) - 2} more" if len(files) > 2 else ""
            lines.append(f"{folder.folder}: without a level: {', '.join(map(str, files[:2]))}{more} ({why})")
    unknown = [curve for folder in folders for curve in folder.curves if curve.flags]
    if unknown:
        lines.append(f"{counted(len(unknown), 'curve')} of unknown size; give the number N of GPUs:")
        lines += [f"  {curve.folder} ({curve.part or 'all files'}): {curve.flags}" for curve in unknown]
    return "\n".join(lines)


def _pdlab_curve(folder: Path, experiment: Experiment, gpus: int | None) -> InterpretedCurve:
    manifest = experiment.manifest
    deployment = manifest.deployment
    return InterpretedCurve(
        folder=folder,
        part="",
        matches=("*",),
        files=len(experiment.runs),
        tools=("pdlab",),
        runs=experiment.runs,
        model=experiment.model,
        deployment=deployment.label if deployment else None,
        gpus=deployment.gpus if deployment else manifest.gpus or gpus,
        label=manifest.label,
    )


def _patterns(folder: Path, files: Sequence[Path], every: set[Path]) -> tuple[str, ...]:
    """``*`` for all files of the folder, ``1p3d/*`` for all of a subfolder, else the files themselves."""
    if set(files) == every:
        return ("*",)
    tops = {file.relative_to(folder).parts[0] for file in files}
    if all(len(file.relative_to(folder).parts) > 1 for file in files):
        whole = {file for file in every if file.relative_to(folder).parts[0] in tops}
        if whole == set(files):
            return tuple(f"{top}/*" for top in sorted(tops))
    return tuple(file.relative_to(folder).as_posix() for file in files)
