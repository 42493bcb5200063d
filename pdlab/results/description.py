"""What a person states about result files: GPUs, deployment, label, model.

The source is a flag (``--gpus PATTERN=N``, ``--label PATTERN=TEXT``) or a file beside the results, which ``pdlab
describe`` writes. A flag takes precedence over the file, the first entry that fits over later ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from pydantic import Field, field_validator

from pdlab.core.deployment import Collocated, Disaggregated, parse_label
from pdlab.core.errors import UsageError
from pdlab.core.schema import Frozen, OneLine, load_yaml

DESCRIPTION = "pdlab-describe.yaml"


class DescribedResults(Frozen):
    """One entry of a description. ``match``: a pattern on the path of a result file in its folder, on one part of that
    path, or on the folder's name (``*`` is any text). ``skip``: these files are not results."""

    match: str = Field(min_length=1)
    deployment: str | None = None
    gpus: int | None = Field(default=None, ge=1)
    label: OneLine | None = Field(default=None, min_length=1)
    model: str | None = Field(default=None, min_length=1)
    skip: bool = False

    @field_validator("deployment")
    @classmethod
    def _can_be_parsed(cls, text: str | None) -> str | None:
        try:
            if text is not None:
                topology_of(text)
        except UsageError as error:
            raise ValueError(str(error)) from error
        return text

    def fits(self, folder: Path, inside: Path) -> bool:
        """Whether the entry is about the file ``inside`` the folder."""
        name = folder.resolve().name
        texts = {name, inside.as_posix(), f"{name}/{inside.as_posix()}", *inside.parts, inside.stem}
        ends = str(folder.resolve()).endswith("/" + self.match.strip("/"))
        return ends or any(fnmatchcase(text, self.match) for text in texts)


class ResultsDescription(Frozen):
    """The file beside results."""

    results: tuple[DescribedResults, ...] = ()


class Stated(NamedTuple):
    """What flags state about a folder: the GPUs of each experiment in it, and entries for its files."""

    gpus: int | None = None
    entries: tuple[DescribedResults, ...] = ()


class FileDescription(NamedTuple):
    """What is stated about a file; each value is that of the first entry that has it."""

    deployment: str | None = None
    gpus: int | None = None
    label: str | None = None
    model: str | None = None
    skip: bool = False


def topology_of(label: str) -> Collocated | Disaggregated:
    """The pools of a deployment's label. Raises UsageError for an invalid label, and for roles that move."""
    topology = parse_label(label)
    if not isinstance(topology, Collocated | Disaggregated):
        raise UsageError(f"deployment {label}: its roles move; give one such as pd-spread-p1xtp4-d2xtp2")
    return topology


def of_folder(folder: Path) -> tuple[DescribedResults, ...]:
    """The entries of the description in a folder; empty without one. Raises UsageError for a faulty one."""
    file = folder / DESCRIPTION
    return load_yaml(file, ResultsDescription).results if file.is_file() else ()


def of_flags(gpus: Mapping[str, int], labels: Mapping[str, str]) -> tuple[DescribedResults, ...]:
    """``--gpus`` and ``--label`` as entries. The pattern with more parts comes first."""
    entries = [DescribedResults(match=pattern, gpus=count) for pattern, count in gpus.items()]
    entries += [DescribedResults(match=pattern, label=label) for pattern, label in labels.items()]
    return tuple(sorted(entries, key=lambda entry: -len(Path(entry.match).parts)))


def description_for(folder: Path, inside: Path, entries: Sequence[DescribedResults]) -> FileDescription:
    """What the entries state about one file; for each value the first entry that fits counts."""
    description = FileDescription()
    for entry in reversed([entry for entry in entries if entry.fits(folder, inside)]):
        stated = entry.model_dump(exclude={"match"}, exclude_none=True)
        description = description._replace(**{**stated, "skip": description.skip or entry.skip})
    return description
