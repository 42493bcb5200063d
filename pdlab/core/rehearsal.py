"""The settings of a rehearsal: fake nodes on this machine, simulated engines, slowed-down time."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Le
from pydantic import Field

from pdlab.core import defaults
from pdlab.core.commands import PLAN
from pdlab.core.engine_cache import EngineCache
from pdlab.core.schema import Frozen
from pdlab.core.settings import setting

SENT_HEADER = "x-pdlab-sent"  # of a request to simulated engines: when it was sent

REHEARSAL = "rehearsal"  # title of a group of flags


class Rehearsal(Frozen):
    """The fields have their help texts. ``slow_down``: real seconds per simulated second (None: chosen at the launch).
    ``hardware``: a name of configs/catalog/ or a file. ``caches``: role -> the prefix cache of each engine, as launched
    (empty: unknown). All figures of a rehearsal are in simulated seconds."""

    slow_down: Annotated[float, Ge(1), Le(1000)] | None = setting(
        None,
        "run simulated time K times slower than real time",
        REHEARSAL,
        value="K",
        otherwise="by requests/s, GPUs and this machine's cores",
        advanced=True,
    )
    hardware: str = setting(
        defaults.HARDWARE,
        f"with --rehearse: calibrated step times of the engines, as with {PLAN} --hardware",
        REHEARSAL,
        value="NAME",
        advanced=True,
    )
    chunk_per_token: bool = setting(
        False,
        "with --rehearse: stream one chunk per token, as real engines do, not three per answer; shows the cost of the "
        "serving path, and needs a larger --slow-down",
        REHEARSAL,
        advanced=True,
    )
    assume_merged: bool = setting(
        False,
        "with --rehearse: assume that scattered KV blocks transfer as fast as contiguous ones; default: within a node "
        "they are copied one by one, as with vLLM 0.11",
        REHEARSAL,
        advanced=True,
    )
    caches: dict[str, EngineCache] = Field(default_factory=dict)
