"""Verdicts of levels, made up."""

from __future__ import annotations

from pdlab.core.findings import Finding
from pdlab.results.schema import Validity


def failing(*reasons: str, gate: str | None = None) -> Validity:
    """For those reasons, all of one gate; valid without any."""
    return Validity(findings=tuple(Finding(code="made_up", gate=gate, what=reason) for reason in reasons))
