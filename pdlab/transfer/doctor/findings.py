"""Types of the doctor's findings and rules (`pdlab.transfer.doctor.diagnosis`). Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pdlab.core.findings import CODES, Severity
from pdlab.core.nodes import NETWORKS, WireKind

Facts = Mapping[str, Mapping[str, Any]]  # node -> facts
SPANNING: Literal["an engine over several nodes"] = "an engine over several nodes"
HERE = "here"  # the name of this machine, examined without Ray
# A feature of a deployment to which a finding matters: the wire of its KV cache, or an engine over several nodes.
Concern = WireKind | Literal["an engine over several nodes"]
FABRIC: tuple[Concern, ...] = ("efa", "rdma")
NETWORK: tuple[Concern, ...] = NETWORKS
ONE_MACHINE: tuple[Concern, ...] = ("gpu peer", "shared memory")


@dataclass(frozen=True)
class DoctorFinding:
    """One problem or observation on ``nodes``. ``code``: in `pdlab.core.findings.CODES`.

    ``concerns``: it matters to deployments with one of these (empty: to every deployment). ``name``: for the code's
    template.
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
        """The code's template with the name."""
        return CODES[self.code].template.format(name=self.name)


Rule = Callable[[Facts], Iterator[DoctorFinding]]
