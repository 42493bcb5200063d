"""How result files of others are understood: a row per curve that a folder holds, whether or not its size is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pdlab.results.description import DescribedResults, Stated
from pdlab.results.published_curves import separated
from pdlab.results.published_files import PublishedLevel
from pdlab.results.published_folders import read_folder_levels, result_files, size_of


@dataclass(frozen=True)
class UnderstoodCurve:
    """One curve of a folder. ``matches``: patterns that fit its files and no others, as a description takes them.
    ``part``: what tells it from the others. ``tools``: the clients that wrote its files. ``deployment``: its label, as
    far as names and files give it; ``gpus``: None if not known."""

    folder: Path
    part: str
    matches: tuple[str, ...]
    tools: tuple[str, ...]
    levels: tuple[PublishedLevel, ...]
    deployment: str | None
    gpus: int | None

    @property
    def model(self) -> str | None:
        models = {level.run.model for level in self.levels if level.run.model}
        return models.pop() if len(models) == 1 else None

    @property
    def loads(self) -> str:
        """``concurrency 4 to 64, rate 2``: the loads of its levels."""
        found: dict[str, list[float]] = {}
        for level in self.levels:
            found.setdefault(level.run.key.kind, []).append(level.run.key.value)
        return ", ".join(
            f"{kind} {min(values):g}" + (f" to {max(values):g}" if len(set(values)) > 1 else "")
            for kind, values in found.items()
        )

    @property
    def lengths(self) -> str:
        """Input and output tokens of the workloads, ``5000:250``."""
        return " and ".join(dict.fromkeys(level.run.workload.label for level in self.levels))

    def entry(self, match: str) -> DescribedResults:
        """The same as an entry of a description."""
        said = self.levels[0].said
        return DescribedResults(
            match=match, deployment=self.deployment, gpus=self.gpus, label=said.label, model=self.model
        )


def understood(folder: Path, stated: Stated = Stated()) -> list[UnderstoodCurve]:  # noqa: B008
    """The curves in the files of one folder of others. Raises StoreError for a file that cannot be read."""
    levels = read_folder_levels(folder, result_files(folder), stated.entries)
    curves = separated([level for level, _ in levels]).curves
    tools = {level.shown: tool for level, tool in levels}
    every = {level.file for level, _ in levels}
    found = []
    for curve in curves:
        files = sorted({level.file for level in curve.levels})
        topology = curve.levels[0].topology
        found.append(
            UnderstoodCurve(
                folder=folder,
                part=curve.part,
                matches=_patterns(folder, files, every),
                tools=tuple(dict.fromkeys(tools[level.shown] for level in curve.levels)),
                levels=curve.levels,
                deployment=topology.label if topology else None,
                gpus=stated.gpus or size_of(curve.levels[0]),
            )
        )
    return found


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
