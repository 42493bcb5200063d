"""What decides what the prefix cache of one engine holds, by vLLM's rules (`pdlab.traffic.oracle`)."""

from __future__ import annotations

from pydantic import Field

from pdlab.core.catalog import ModelShape
from pdlab.core.schema import Frozen


class EngineCache(Frozen):
    """``blocks`` of ``block_tokens`` tokens, for all groups of layers together. ``window``: tokens of the sliding
    window of a hybrid cache; None: all layers have full attention, or one group. ``retention``: windowed layers keep a
    window every so many tokens (0: at the ends of prompts alone, None: every one). ``step_tokens``: most of a prompt
    that one step computes (None: not known)."""

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
        """For a model. ``hybrid``: windowed layers have a group of their own, and keep their window alone."""
        window = (shape.sliding_window or None) if hybrid else None
        return cls(
            blocks=blocks, block_tokens=block_tokens, window=window, retention=retention, step_tokens=step_tokens
        )
