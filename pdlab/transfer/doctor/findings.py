"""Types of the doctor's findings and rules (`pdlab.transfer.doctor.diagnosis`). Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Severity = Literal["error", "warning", "note"]
Facts = Mapping[str, Mapping[str, Any]]  # node -> facts


@dataclass(frozen=True)
class Finding:
    """One problem or observation on ``nodes``."""

    severity: Severity
    topic: str
    nodes: tuple[str, ...]
    evidence: str
    consequence: str
    fix: str


Rule = Callable[[Facts], Iterator[Finding]]
