"""Which step times an engine has: fitted constants, or tables with a correction."""

from __future__ import annotations

from pdlab.core.catalog import ModelShape
from pdlab.core.deployment import Pool
from pdlab.sim import aic
from pdlab.sim.hardware import Hardware
from pdlab.sim.step_source import Corrected, StepSource
from pdlab.sim.step_time import step_costs


def steps_of(hardware: Hardware, shape: ModelShape, pool: Pool) -> StepSource:
    """The step times of one engine (one DP rank) of ``pool``: those of the hardware's tables where it names some, else
    of its constants. Raises UsageError."""
    if hardware.steps is None:
        return step_costs(hardware, shape, pool)
    tables = hardware.steps
    found = aic.tabulate(shape, tables.system, tables.engine, tables.version, pool, tables.quant, tables.mode)
    return Corrected(found, tables.correction)
