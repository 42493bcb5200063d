"""How a deployment is rehearsed: on nodes made up on this machine, with simulated engines, in slow time."""

from __future__ import annotations

from pydantic import Field

from pdlab.core.engine_cache import EngineCache
from pdlab.core.schema import Frozen

DEFAULT_HARDWARE = "h100-vllm-0.11"


class Rehearsal(Frozen):
    """``hardware``: whose step times the engines have, a name of configs/catalog/ or a file. ``slow_down``: seconds
    that a simulated one takes (None: chosen when it is launched). ``chunk_per_token``: answers come in as many chunks
    as tokens, as vLLM's do, and not in three. ``assume_merged``: scattered KV blocks of a wrapped pool cost nothing, as
    with `plan.py --assume-merged`. ``caches``: role -> the prefix cache of each of its engines, as launched (empty:
    not told). Figures of a rehearsal are in simulated seconds."""

    hardware: str = DEFAULT_HARDWARE
    slow_down: float | None = Field(default=None, ge=1, le=1000)
    chunk_per_token: bool = False
    assume_merged: bool = False
    caches: dict[str, EngineCache] = Field(default_factory=dict)
