"""Two real engines on CPUs, prefill and decode, with faults between them: vLLM alone and with the guard.

The long form is `benchmarks/fault_matrix.py`, whose faults these are. Every answer is compared with the engine alone.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from faulty_pair import FAULTS, FaultyPair, Tally, client

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(1800)]
REQUESTS = 4


def tally_of(pair: FaultyPair, name: str, count: int = REQUESTS) -> Tally:
    async def run() -> Tally:
        async with client(pair, seed=sum(map(ord, name))) as to:
            await to.warm()
            return await FAULTS[name](to, count)

    return asyncio.run(run())


@pytest.fixture(scope="class")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyPair]:
    guarded = request.cls is TestGuarded
    with FaultyPair(tmp_path_factory.mktemp("pair"), guarded=guarded, deadline_s=5.0) as made:
        yield made


class TestGuarded:
    @pytest.mark.parametrize("name", ["kill-first", "kill-during", "twice", "kill", "stop", "expired"])
    def test_every_answer_is_right(self, name: str, pair: FaultyPair) -> None:
        before = pair.actions()
        tally = tally_of(pair, name)
        acted = pair.actions() - before
        assert tally.requests == REQUESTS
        assert tally.outcomes["equal"] + tally.outcomes["rounded"] == REQUESTS, (tally, acted)
        assert all(math.isfinite(seconds) for seconds in tally.freed_s.values()), tally.freed_s
        if name != "kill-during":  # there some of the reads may have been faster
            assert acted["recomputed"] == REQUESTS, acted
        why = {"expired": "refused", "twice": "refused"}.get(name)
        assert why is None or acted[why] + acted["stale"] == REQUESTS, acted

    @pytest.mark.parametrize("name", ["nobody", "cancel"])
    def test_what_nobody_reads_is_free_again(self, name: str, pair: FaultyPair) -> None:
        tally = tally_of(pair, name)
        assert all(math.isfinite(seconds) for seconds in tally.freed_s.values()), tally.freed_s

    def test_prefill_gets_the_rejections_of_decode(self, pair: FaultyPair) -> None:
        before, expired = pair.actions(), pair.metric("prefill", "nixl_num_kv_expired_reqs")
        tally = tally_of(pair, "reject")
        assert dict(tally.outcomes) == {"refused": REQUESTS}
        assert (pair.actions() - before)["cancels_reported"] == REQUESTS
        assert pair.metric("prefill", "nixl_num_kv_expired_reqs") == expired, "no lease had to end for it"

    def test_without_a_fault_it_does_nothing(self, pair: FaultyPair) -> None:
        before = pair.actions()

        async def run() -> Tally:
            async with client(pair, seed=99) as to:
                await to.warm()
                return await to.decoded("none", await to.prefilled(16))

        tally = asyncio.run(run())
        assert tally.outcomes["equal"] + tally.outcomes["rounded"] == 16, tally
        assert dict(pair.actions() - before) == {"receives": 17}


class TestStock:
    """Without wrong answers here the tests above would prove nothing."""

    @pytest.mark.parametrize("name", ["kill", "expired"])
    def test_vllm_alone_answers_wrongly(self, name: str, pair: FaultyPair) -> None:
        tally = tally_of(pair, name)
        assert tally.outcomes["wrong"], tally
