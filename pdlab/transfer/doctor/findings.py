"""Types of the doctor's findings and rules (`pdlab.transfer.doctor.diagnosis`). Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pdlab.core.nodes import WireKind

Severity = Literal["error", "warning", "note"]
Facts = Mapping[str, Mapping[str, Any]]  # node -> facts
SPANNING: Literal["an engine over several nodes"] = "an engine over several nodes"
# What a deployment has, so that a finding may matter to it: a wire of its KV cache, or such an engine.
Concern = WireKind | Literal["an engine over several nodes"]
FABRIC: tuple[Concern, ...] = ("efa", "rdma")
NETWORK: tuple[Concern, ...] = ("efa", "rdma", "tcp")
ONE_MACHINE: tuple[Concern, ...] = ("gpu peer", "shared memory")


@dataclass(frozen=True)
class DoctorFinding:
    """One problem or observation on ``nodes``. ``concerns``: it matters to deployments with one of these (none: to
    every deployment)."""

    severity: Severity
    topic: str
    nodes: tuple[str, ...]
    evidence: str
    consequence: str
    fix: str
    concerns: tuple[Concern, ...] = ()


Rule = Callable[[Facts], Iterator[DoctorFinding]]
