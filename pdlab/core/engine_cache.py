"""The settings of one engine's prefix cache, for `pdlab.traffic.oracle`."""

from __future__ import annotations

from pydantic import Field

from pdlab.core.catalog import ModelShape
from pdlab.core.schema import Frozen


class EngineCache(Frozen):
    """``blocks`` of ``block_tokens`` tokens each, for all groups of layers together.

    ``window``: tokens of the sliding window in a hybrid cache; None: all layers are in one group. ``retention``:
    windowed layers keep a window every this many tokens (0: only at the ends of prompts; None: every window).
    ``step_tokens``: most tokens of a prompt that one step computes (None: unknown).
    """

    blocks: int = Field(ge=0)
    block_tokens: int = Field(ge=1)
    window: int | None = None
    retention: int | None = 0
    step_tokens: int | None = None

    @classmethod
    def of(
        cls,
        shape: ModelShape,
        blocks: int,
        block_tokens: int,
        *,
        hybrid: bool,
        retention: int | None = 0,
        step_tokens: int | None = None,
    ) -> EngineCache:
        """The cache of a model. ``hybrid``: windowed layers are a separate group, and keep only their window."""
        window = (shape.sliding_window or None) if hybrid else None
        return cls(
            blocks=blocks, block_tokens=block_tokens, window=window, retention=retention, step_tokens=step_tokens
        )
