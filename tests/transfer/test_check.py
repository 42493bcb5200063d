"""The order of a check's transfers, with ranks that answer at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pdlab.remote.network import RankHost
from pdlab.transfer.check import run_backend
from pdlab.transfer.plan import RequestSize, TransferPlan, cache_blocks
from pdlab.transfer.rank.codes import Inspection
from pdlab.transfer.rank.layout import BlockTable, plain_kv_shape
from pdlab.transfer.rank.messages import TransferTimes

SHAPE = plain_kv_shape(2, 4096, 1, 16)
SIZES = (RequestSize(4, 64), RequestSize(8, 128))


class Ranks:
    """One of each side. Scattered blocks take three times as long as one run of them, the first of all a second."""

    def __init__(self) -> None:
        self.tables: list[BlockTable] = []

    def call(self, ranks: Sequence[int], method: str, args: Sequence[tuple[Any, ...]], timeout_s: float) -> list[Any]:
        return [("ok", getattr(self, method, lambda *_: 0.0)(*words)) for words in args]

    def ips(self) -> list[str]:
        return ["192.0.2.1"] * 2

    def facts(self, ip: str) -> RankHost:
        return RankHost("h", ip, 1, "boot", "memory", ())

    def libraries(self) -> tuple[str, ...]:
        return ()

    def close(self) -> str:
        return ""

    def transfer(self, tables: tuple[BlockTable, ...], start_s: float) -> TransferTimes:
        (table,) = tables
        self.tables.append(table)
        took_s = 1.0 if len(self.tables) == 1 else 3e-3 if scattered(table) else 1e-3
        return TransferTimes(5.0, 5.0 + took_s, (took_s,), 0.0, 4096, 8, 8)

    def inspect(self, tables: tuple[BlockTable, ...]) -> tuple[Inspection, float]:
        return Inspection(10, 10), 0.0


def scattered(table: BlockTable) -> bool:
    return bool((np.diff(table.decode) != 1).any())


def plan(**more: Any) -> TransferPlan:
    return TransferPlan(
        strategy="pack", shape=SHAPE, sizes=SIZES, num_blocks=cache_blocks(SIZES, 1), seed=1, repeats=5, **more
    )


def test_both_kinds_of_blocks_in_turns() -> None:
    made, ranks = plan(compare=True), Ranks()
    result = run_backend(made, made.ranks("other", vram=False), ranks)
    assert [scattered(table) for table in ranks.tables] == [True, False] * 6 * len(SIZES)
    assert [table.request for table in ranks.tables] == list(range(1, made.requests + 1)), "as many codes as are used"
    assert result.cold_s == 1.0
    for size in result.sizes:
        assert size.seconds == pytest.approx((3e-3,) * 5) and size.contiguous_s == pytest.approx((1e-3,) * 5)
        assert size.scattered_over_contiguous == pytest.approx(3)


@pytest.mark.parametrize(("prefill_tp", "decode_tp", "direction", "ranks"), [
    (4, 2, "read", 2), (4, 2, "write", 4), (2, 4, "read", 4),
])  # fmt: skip
def test_the_ranks_that_move_pages_at_once(prefill_tp: int, decode_tp: int, direction: str, ranks: int) -> None:
    class Several(Ranks):
        def ips(self) -> list[str]:
            return ["192.0.2.1"] * (prefill_tp + decode_tp)

    shape = plain_kv_shape(2, 4096, 4, 16)
    made = replace(plan(), shape=shape, prefill_tp=prefill_tp, decode_tp=decode_tp, direction=direction)
    assert run_backend(made, made.ranks("other", vram=False), Several()).copies == ranks


def test_one_kind_alone_unless_requested() -> None:
    for kind in (True, False):
        made, ranks = plan(scattered=kind), Ranks()
        result = run_backend(made, made.ranks("other", vram=False), ranks)
        assert [scattered(table) for table in ranks.tables] == [kind] * 6 * len(SIZES) and made.requests == 12
        assert all(size.scattered_over_contiguous is None for size in result.sizes)
