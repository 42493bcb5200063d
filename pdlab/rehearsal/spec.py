"""The specification of a simulated engine: a file on this machine, with its name in the engine's environment."""

from __future__ import annotations

import json
import os
from pathlib import Path

from pdlab.core.catalog import ModelShape
from pdlab.core.commands import LAUNCH
from pdlab.core.deployment import Deployment
from pdlab.core.errors import UsageError, reason_of
from pdlab.core.nodes import Role
from pdlab.core.rehearsal import Rehearsal
from pdlab.core.schema import Frozen, validate
from pdlab.sim.hardware import Hardware

SPEC = "PDLAB_REHEARSAL"
ENGINE_CLASS = "pdlab.rehearsal.engine.SimulatedEngine"


class EngineSpec(Frozen):
    """Engines of one pool. ``folder``: of all engines of the deployment (`pdlab.rehearsal.shared_state`).
    ``tokenizer``: a file of the library tokenizers. ``lease_s``: simulated seconds for which prefilled KV is held, as
    vLLM's ``kv_lease_duration``."""

    rehearsal: Rehearsal
    role: Role
    hardware: Hardware
    shape: ModelShape
    deployment: Deployment
    tokenizer: str
    folder: str
    max_model_len: int
    lease_s: float = 30.0

    @property
    def slow_down(self) -> float:
        """Real seconds per simulated second."""
        return self.rehearsal.slow_down or 1.0


def write_spec(spec: EngineSpec, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    # With defaults, because a topology is read by its "kind".
    file.write_text(json.dumps(spec.model_dump(mode="json")), encoding="utf-8")


def read_spec() -> EngineSpec:
    """Read the specification that this process's environment names. Raises UsageError."""
    file = os.environ.get(SPEC)
    if not file:
        raise UsageError(f"{SPEC} is not set: simulated engines are started by {LAUNCH} --rehearse")
    try:
        text = Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{SPEC}={file}: cannot be read ({reason_of(error)}); launch again") from error
    return validate(EngineSpec, json.loads(text), where=file)
