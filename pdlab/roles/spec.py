"""The specification of a fluid pool for board, controllers, engines and simulator. Pure.

`pdlab.core.deployment.Fluid` has the same settings for users, with bounds and flags, and takes the defaults from here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

from pdlab.roles.assign import first_split

AUTO = "auto"
TTFT_S = 2.0  # planned bound if none is given


@dataclass(frozen=True)
class FluidSpec:
    """The user's fields have their help texts in `pdlab.core.deployment.Fluid`.

    ``slo_ttft_s`` None: `TTFT_S`. ``slo_tpot_s`` None: twice the decode step of an almost empty engine. ``slow_down``:
    real seconds per simulated second. ``engines``: number at the start. ``least``, ``most``: bounds of their number
    later (None: fixed). ``app``, ``deployment``: names of Ray Serve.
    """

    roles: str = AUTO
    p_min: int = 1
    d_min: int = 1
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    prefill_locally_below: int | str | None = None
    prefix_affinity: bool = False
    slow_down: float = 1.0
    engines: int = 0
    least: int | None = None
    most: int | None = None
    down_after_s: float = 120.0
    app: str = ""
    deployment: str = ""

    @classmethod
    def of(cls, topology: Any) -> FluidSpec:
        """The specification of a `pdlab.core.deployment.Fluid`; fields with the same name are copied."""
        counts = {"least": topology.least, "most": topology.most} if topology.moves else {}
        same = {each.name for each in fields(cls)} & set(type(topology).model_fields)
        return cls(engines=topology.pool.replicas, **counts, **{name: getattr(topology, name) for name in same})

    @property
    def changed(self) -> dict[str, Any]:
        """Fields with a value other than the default, for the arguments of an application."""
        return {each.name: value for each in fields(self) if (value := getattr(self, each.name)) != each.default}

    @property
    def moves(self) -> bool:
        """Whether the number of engines follows the load."""
        return self.least is not None

    @property
    def ttft_s(self) -> float:
        """The planned TTFT bound."""
        return TTFT_S if self.slo_ttft_s is None else self.slo_ttft_s

    def first(self, engines: int) -> tuple[int, int]:
        """(prefill, decode) engines before any load is known."""
        return first_split(engines, self.p_min, self.d_min) if self.roles == AUTO else counts_of(self.roles)


def counts_of(text: str) -> tuple[int, int]:
    """(prefill, decode) engines of a text such as ``3:5``. Raises ValueError for another form."""
    match = re.fullmatch(r"([1-9][0-9]{0,4}):([1-9][0-9]{0,4})", text)
    if match is None:
        raise ValueError(f"{text!r} is not a split: give PREFILL:DECODE, each at least 1, such as 3:5, or auto")
    return int(match[1]), int(match[2])
