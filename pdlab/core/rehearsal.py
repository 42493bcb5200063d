"""The settings of a rehearsal: fake nodes on this machine, simulated engines, slowed-down time."""

from __future__ import annotations

from pydantic import Field

from pdlab.core.engine_cache import EngineCache
from pdlab.core.schema import Frozen

DEFAULT_HARDWARE = "h100-vllm-0.11"


class Rehearsal(Frozen):
    """``hardware``: the engines' step times, as a name of configs/catalog/ or a file. ``slow_down``: real seconds per
    simulated second (None: chosen at the launch). ``chunk_per_token``: answers have one chunk per token, as vLLM's, and
    not three. ``assume_merged``: as `plan.py --assume-merged`. ``caches``: role -> the prefix cache of each engine, as
    launched (empty: unknown). All figures of a rehearsal are in simulated seconds."""

    hardware: str = DEFAULT_HARDWARE
    slow_down: float | None = Field(default=None, ge=1, le=1000)
    chunk_per_token: bool = False
    assume_merged: bool = False
    caches: dict[str, EngineCache] = Field(default_factory=dict)
