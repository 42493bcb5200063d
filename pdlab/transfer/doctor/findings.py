"""Types of the doctor's findings and rules (`pdlab.transfer.doctor.diagnosis`). Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pdlab.core.findings import CODES, Severity
from pdlab.core.nodes import WireKind

Facts = Mapping[str, Mapping[str, Any]]  # node -> facts
SPANNING: Literal["an engine over several nodes"] = "an engine over several nodes"
# What a deployment has, so that a finding may matter to it: a wire of its KV cache, or such an engine.
Concern = WireKind | Literal["an engine over several nodes"]
FABRIC: tuple[Concern, ...] = ("efa", "rdma")
NETWORK: tuple[Concern, ...] = ("efa", "rdma", "tcp")
ONE_MACHINE: tuple[Concern, ...] = ("gpu peer", "shared memory")


@dataclass(frozen=True)
class DoctorFinding:
    """One problem or observation on ``nodes``, of a ``code`` of `pdlab.core.findings.CODES`.

    ``concerns``: it matters to deployments with one of these (none: to every deployment). ``name``: what its topic
    names, where it names something.
    """

    severity: Severity
    code: str
    nodes: tuple[str, ...]
    evidence: str
    consequence: str
    fix: str
    concerns: tuple[Concern, ...] = ()
    name: str = ""

    @property
    def topic(self) -> str:
        """The code in words, with the name in them."""
        return CODES[self.code].template.format(name=self.name)


Rule = Callable[[Facts], Iterator[DoctorFinding]]
