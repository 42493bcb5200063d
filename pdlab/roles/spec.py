"""What a launch asks of a fluid pool, declared once for users, board, controllers, engines and simulator. Pure.

`pdlab.core.deployment.Fluid` is where a user sets it: it adds bounds and flags, and takes the defaults from here.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from pdlab.roles.assign import first_split

AUTO = "auto"
TTFT_S = 2.0  # planned for where no bound is given


@dataclass(frozen=True)
class FluidSpec:
    """``split``: ``auto``, or engines that prefill and that decode, ``3:5``. At least ``p_min`` prefill and ``d_min``
    decode. ``slo_ttft_s`` and ``slo_tpot_s``: latencies to stay below (None: 2 s, and twice the decode step of an
    almost empty engine). ``local_below``: tokens below which a prompt is prefilled where it is decoded (None: none is;
    ``auto``: by the learnt rates). ``prefix_affinity``: prompts go where their prefix is cached. ``slow_down``:
    seconds that pass here for one of the engines'. ``engines`` begin; ``least`` to ``most`` of them are wanted later
    (None: their number is fixed), one fewer ``down_after_s`` after fewer would do. They are of the Ray Serve
    ``deployment`` in ``app``."""

    split: str = AUTO
    p_min: int = 1
    d_min: int = 1
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    local_below: int | str | None = None
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
        """``topology``: a `pdlab.core.deployment.Fluid`, whose fields of the same name are taken."""
        elsewhere = {
            "split": topology.roles,
            "local_below": topology.prefill_locally_below,
            "engines": topology.pool.replicas,
            "least": topology.least if topology.moves else None,
            "most": topology.most if topology.moves else None,
        }
        names = {each.name for each in fields(cls)} - set(elsewhere)
        same = {name: getattr(topology, name) for name in names if name in type(topology).model_fields}
        return cls(**elsewhere, **same)

    @property
    def changed(self) -> dict[str, Any]:
        """The fields that are not the default, as the arguments of an application carry them."""
        return {each.name: value for each in fields(self) if (value := getattr(self, each.name)) != each.default}

    @property
    def moves(self) -> bool:
        """Whether the number of engines follows the load."""
        return self.least is not None

    @property
    def ttft_s(self) -> float:
        """The bound of TTFT that is planned for."""
        return TTFT_S if self.slo_ttft_s is None else self.slo_ttft_s

    def first(self, engines: int) -> tuple[int, int]:
        """How many of so many engines prefill and decode before anything is known of the load."""
        return first_split(engines, self.p_min, self.d_min) if self.split == AUTO else counts_of(self.split)


def counts_of(text: str) -> tuple[int, int]:
    """Engines that prefill and that decode. Raises ValueError for what is not ``3:5``."""
    prefill, colon, decode = text.partition(":")
    if not (colon and prefill.isdecimal() and decode.isdecimal() and int(prefill) and int(decode)):
        raise ValueError(f"{text!r} is no split: give PREFILL:DECODE with at least one of each, such as 3:5, or auto")
    return int(prefill), int(decode)
