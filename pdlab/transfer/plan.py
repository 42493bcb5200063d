"""What a KV-transfer check does: its sizes, its ranks and how often each size moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from pdlab.transfer.rank.messages import CheckOptions, RankOptions

SPARE = 1.25  # cache size over the largest request: no transfer may change the rest
SPARE_BLOCKS = 8


@dataclass(frozen=True)
class RequestSize:
    """Blocks of each request. ``tokens``: of the prompt with that size; None if the size was given in blocks."""

    blocks: int
    tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class TransferPlan(CheckOptions):
    """The check to run. ``scattered``: use scattered blocks. ``compare``: move every size with scattered and with
    contiguous blocks, in turn."""

    strategy: str
    sizes: tuple[RequestSize, ...]
    backends: tuple[str, ...] = ("UCX",)
    concurrent: int = 1
    repeats: int = 5
    scattered: bool = True
    compare: bool = False
    seed: int = 0

    @property
    def requests(self) -> int:
        """Number of requests of the whole run."""
        return (1 + self.compare) * (self.repeats + 1) * self.concurrent * len(self.sizes)

    def ranks(self, backend: str, vram: bool) -> list[RankOptions]:
        """All ranks of one run, prefill's first."""
        common: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(CheckOptions)}
        return [
            RankOptions(**common, side=side, rank=rank, requests=self.requests, backend=backend, vram=vram)
            for side, tp in (("prefill", self.prefill_tp), ("decode", self.decode_tp))
            for rank in range(tp)
        ]


def cache_blocks(sizes: Sequence[RequestSize], concurrent: int) -> int:
    """Blocks of a cache for the largest size, with spare blocks that no transfer may change."""
    return int(max(size.blocks for size in sizes) * concurrent * SPARE) + SPARE_BLOCKS
