"""Audit rules and findings: `rule` registers a rule, `findings` applies all of them to a folder.

To add one: write the rows of its codes in `pdlab.core.findings.CODES`, and decorate a function that yields
``AuditFinding(code, files, numbers, percent)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from pdlab.analysis.audit.folders import Folder
from pdlab.core.findings import CODES, Severity, sentence

Numbers = dict[str, int | float | str | None]


@dataclass(frozen=True)
class AuditFinding:
    """One defect of result files, with the texts of its code's row. ``percent``: how far a figure in the plot may be
    off, if known."""

    code: str
    files: tuple[str, ...]
    numbers: Numbers = field(default_factory=dict)
    percent: float | None = None

    @property
    def kind(self) -> str:
        return CODES[self.code].kind

    @property
    def severity(self) -> Severity:
        return CODES[self.code].severity

    @property
    def evidence(self) -> str:
        return sentence(CODES[self.code].template, self.numbers)

    @property
    def consequence(self) -> str:
        return sentence(CODES[self.code].impact, self.numbers)

    @property
    def fix(self) -> str:
        return sentence(CODES[self.code].fix, self.numbers)


@dataclass(frozen=True)
class AuditInputs:
    """``recompute``: recompute the figures of pdlab's levels from their requests, which takes longest. ``hashes``: of
    files of requests that were read already; they are read again only to recompute."""

    recompute: bool
    hashes: Mapping[Path, str]


Needs = Literal["folders", "folder", "our folder", "level", "our level", "our requests"]
"""The argument of a rule: all folders, each folder, or each level of a folder; with "our" only those of pdlab's own
results. "our requests": each such level, and the `AuditInputs`."""


@dataclass(frozen=True)
class AuditRule:
    codes: tuple[str, ...]
    needs: Needs
    check: Callable[..., Iterator[AuditFinding]]


_RULES: list[AuditRule] = []
Check = TypeVar("Check", bound=Callable[..., Iterator[AuditFinding]])


def rule(*codes: str, needs: Needs) -> Callable[[Check], Check]:
    """Register a function that yields findings of these codes."""

    def register(check: Check) -> Check:
        _RULES.append(AuditRule(codes, needs, check))
        return check

    return register


def registered() -> list[AuditRule]:
    """Every rule, in the order of its codes' rows, which is the order of the report."""
    order = {code: row for row, code in enumerate(CODES)}
    return sorted(_RULES, key=lambda each: order[each.codes[0]])


def findings(folder: Folder, recheck: AuditInputs) -> Iterator[AuditFinding]:
    """The findings of the rules in one readable folder."""
    for each in registered():
        if each.needs == "folders" or (each.needs.startswith("our") and not folder.ours):
            continue
        if each.needs in ("folder", "our folder"):
            yield from each.check(folder)
        for level in folder.levels if each.needs in ("level", "our level") else ():
            yield from each.check(level)
        for level in folder.levels if each.needs == "our requests" else ():
            yield from each.check(level, recheck)


def across(folders: Sequence[Folder]) -> Iterator[AuditFinding]:
    """The findings of the rules that compare folders."""
    for each in registered():
        if each.needs == "folders":
            yield from each.check(folders)
