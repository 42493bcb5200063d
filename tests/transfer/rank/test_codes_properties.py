"""Layout, codes, check and naming, against a transfer made of plain loops over bytes."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdlab.transfer.rank.codes import CodeBook, Inspection, check, fill_source, fill_untouched
from pdlab.transfer.rank.faults import FAULTS, misplace, refusal, rewrite
from pdlab.transfer.rank.layout import (
    DTYPE_BYTES,
    BlockTable,
    KvShape,
    Words,
    block_tables,
    descriptor_ids,
    descriptors,
    model_kv_shape,
    pairs,
    plain_kv_shape,
)
from pdlab.transfer.rank.layout import refusal as tp_refusal

pytestmark = pytest.mark.property


class Setup(NamedTuple):
    shape: KvShape
    prefill_tp: int
    decode_tp: int
    prefill_blocks: int
    decode_blocks: int


class Caches:
    """Both sides' memory, filled, and a transfer that copies what the descriptors say, byte range by byte range."""

    def __init__(self, setup: Setup, requests: int) -> None:
        self.setup, shape = setup, setup.shape
        blocks = max(setup.prefill_blocks, setup.decode_blocks)
        self.book = CodeBook(shape, blocks, max(setup.prefill_tp, setup.decode_tp), requests)
        self.prefill = [self._memory(setup.prefill_tp, setup.prefill_blocks) for _ in range(setup.prefill_tp)]
        self.decode = [self._memory(setup.decode_tp, setup.decode_blocks) for _ in range(setup.decode_tp)]
        for rank, memory in enumerate(self.prefill):
            fill_source(self.book, memory, setup.prefill_tp, rank)
        for rank, memory in enumerate(self.decode):
            fill_untouched(self.book, memory, setup.decode_tp, rank, np.arange(setup.decode_blocks))
        self.pairs = pairs(shape, setup.prefill_tp, setup.decode_tp)

    def _memory(self, tp: int, blocks: int) -> list[Words]:
        words = self.setup.shape.page_bytes(tp) // 8
        return [np.zeros((blocks, words), np.uint64) for _ in range(self.setup.shape.regions)]

    def transfer(self, tables: tuple[BlockTable, ...], fault: str | None = None) -> None:
        shape, setup = self.setup.shape, self.setup
        for rank, memory in enumerate(self.prefill):
            fill_source(self.book, memory, setup.prefill_tp, rank, tables)
        for pair in self.pairs:
            source, target = self.prefill[pair.prefill], self.decode[pair.decode]
            far = descriptors(
                [region.ctypes.data for region in source], setup.prefill_blocks, shape.page_bytes(setup.prefill_tp),
                pair.prefill_offset, pair.length, 0,
            )  # fmt: skip
            near = descriptors(
                [region.ctypes.data for region in target], setup.decode_blocks, shape.page_bytes(setup.decode_tp),
                pair.decode_offset, pair.length, 0,
            )  # fmt: skip
            for table in tables:
                blocks, onto = misplace(fault, table.prefill, table.decode)
                far_ids = descriptor_ids(blocks, shape.regions, setup.prefill_blocks)
                near_ids = descriptor_ids(onto, shape.regions, setup.decode_blocks)
                for i, j in zip(far_ids, near_ids, strict=True):
                    self._copy(source, far[i], target, near[j])
        for rank, memory in enumerate(self.decode):
            rewrite(fault, self.book, memory, self.of(rank), setup.prefill_tp, tables[0])

    @staticmethod
    def _copy(source: list[Words], far: Words, target: list[Words], near: Words) -> None:
        def view(memory: list[Words], descriptor: Words) -> Words:
            for region in memory:
                at = int(descriptor[0]) - region.ctypes.data
                if 0 <= at < region.nbytes:
                    return region.reshape(-1).view(np.uint8)[at : at + int(descriptor[1])]
            raise AssertionError("a descriptor points outside the cache")

        view(target, near)[:] = view(source, far)

    def of(self, rank: int) -> list[object]:
        return [pair for pair in self.pairs if pair.decode == rank]

    def findings(self, tables: tuple[BlockTable, ...]) -> list[Inspection]:
        setup = self.setup
        return [
            check(self.book, memory, setup.decode_tp, rank, self.of(rank), setup.prefill_tp, tables)
            for rank, memory in enumerate(self.decode)
        ]


@st.composite
def setups(draw: st.DrawFn, least_blocks: int = 3) -> Setup:
    kv_heads = draw(st.sampled_from([1, 2, 4, 8]))
    shape = model_kv_shape(
        "any",
        layers=draw(st.integers(1, 3)) * 2,
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([8, 64, 80])),
        dtype_bytes=draw(st.sampled_from(sorted(set(DTYPE_BYTES.values())))),
        block_tokens=draw(st.sampled_from([1, 4, 16])),
        sliding_window=None,
        full_attention_layers=None,
        k_per_token=draw(st.booleans()),
    )
    degrees = [1, 2, 4, 8]
    allowed = [(p, d) for p in degrees for d in degrees if tp_refusal(p, d, kv_heads) is None]
    prefill_tp, decode_tp = draw(st.sampled_from(allowed))
    blocks = st.integers(2 * least_blocks + 2, 24)
    return Setup(shape, prefill_tp, decode_tp, draw(blocks), draw(blocks))


def tables_for(
    setup: Setup, first: int, requests: int, blocks: int, scattered: bool, seed: int
) -> tuple[BlockTable, ...]:
    """Tables for pools that differ in size: `block_tables` of the smaller one."""
    pool = min(setup.prefill_blocks, setup.decode_blocks)
    return block_tables(first, requests, blocks, pool, scattered=scattered, seed=seed)


@settings(max_examples=60, deadline=None)
@given(setups(), st.integers(1, 2), st.integers(1, 3), st.booleans(), st.integers(0, 9))
def test_a_clean_transfer_is_clean(setup: Setup, requests: int, blocks: int, scattered: bool, seed: int) -> None:
    caches = Caches(setup, 2 * requests)
    before = None
    for first in (1, 1 + requests):
        if before is not None:
            used = np.concatenate([table.decode for table in before])
            for rank, memory in enumerate(caches.decode):
                fill_untouched(caches.book, memory, setup.decode_tp, rank, used)
        tables = before = tables_for(setup, first, requests, blocks, scattered, seed)
        caches.transfer(tables)
        for finding in caches.findings(tables):
            assert finding.wrong_words == 0, finding.text()
            page = setup.shape.page_bytes(setup.decode_tp) // 8 * setup.shape.regions
            assert finding.words == requests * blocks * page
            assert finding.words + finding.outside_words == setup.decode_blocks * page


@pytest.mark.parametrize("fault", FAULTS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_every_fault_is_caught_and_named(fault: str, data: st.DataObject) -> None:
    setup = data.draw(setups())
    if fault == "wrong-head":
        setup = setup._replace(shape=model_kv_shape(
            "heads", layers=2, kv_heads=8, head_dim=64, dtype_bytes=2, block_tokens=4, sliding_window=None,
            full_attention_layers=None, k_per_token=True,
        ), prefill_tp=min(setup.prefill_tp, setup.decode_tp))  # fmt: skip
    assert refusal(fault, 3, setup.shape.kv_heads) is None
    caches = Caches(setup, 4)
    tables = tables_for(
        setup, 1, data.draw(st.integers(1, 2)), 3, data.draw(st.booleans()), data.draw(st.integers(0, 9))
    )
    caches.transfer(tables, fault)
    for finding in caches.findings(tables):
        assert finding.wrong_words > 0
        assert finding.first is not None and finding.first.inside
        assert finding.patterns[0][0].startswith(FAULTS[fault]), finding.text()
        assert len(finding.patterns) == 1, finding.text()


@settings(max_examples=60, deadline=None)
@given(setups(), st.data())
def test_any_changed_word_is_found_where_it_is(setup: Setup, data: st.DataObject) -> None:
    """Inside the transferred blocks and outside, whatever the new value is."""
    caches = Caches(setup, 2)
    tables = tables_for(setup, 1, 1, 3, True, 4)
    caches.transfer(tables)
    rank = data.draw(st.integers(0, setup.decode_tp - 1))
    region = data.draw(st.integers(0, setup.shape.regions - 1))
    block = data.draw(st.integers(0, setup.decode_blocks - 1))
    memory = caches.decode[rank][region]
    word = data.draw(st.integers(0, memory.shape[1] - 1))
    change = data.draw(st.integers(1, 2**64 - 1))
    memory[block, word] ^= np.uint64(change)
    findings = caches.findings(tables)
    assert [finding.wrong_words for finding in findings] == [int(r == rank) for r in range(setup.decode_tp)]
    first = findings[rank].first
    assert first is not None
    assert (first.rank, first.region, first.block, first.word) == (rank, region, block, word)
    assert first.inside == (block in tables[0].decode)
    assert first.actual == int(memory[block, word])


@settings(max_examples=40, deadline=None)
@given(setups(), st.integers(0, 2**32))
def test_codes_are_all_different_and_decode_to_their_place(setup: Setup, seed: int) -> None:
    caches = Caches(setup, 3)
    everything = np.concatenate([region.ravel() for memory in caches.decode for region in memory])
    everything = np.concatenate([everything, *(region.ravel() for memory in caches.prefill for region in memory)])
    assert len(np.unique(everything)) == len(everything)
    rng = np.random.default_rng(seed)
    rank, region = rng.integers(setup.prefill_tp), rng.integers(setup.shape.regions)
    memory = caches.prefill[rank][region]
    block, word = rng.integers(memory.shape[0]), rng.integers(memory.shape[1])
    code = caches.book.decode(int(memory[block, word]))
    heads = word // setup.shape.head_words
    assert (code.kind, code.request, code.rank, code.region, code.block) == (1, 0, rank, region, block)
    assert code.head == setup.shape.first_head(setup.prefill_tp, int(rank)) + heads
    inside = word % setup.shape.head_words
    assert code.kv == (inside // setup.shape.half_words) % 2


@given(st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([1, 2, 4, 8]))
def test_pairs_bring_every_head_to_where_it_belongs(prefill_tp: int, decode_tp: int, kv_heads: int) -> None:
    shape = plain_kv_shape(1, kv_heads * 64, kv_heads, 16)
    if tp_refusal(prefill_tp, decode_tp, kv_heads):
        with pytest.raises(ValueError, match="TP"):
            pairs(shape, prefill_tp, decode_tp)
        return
    for rank in range(decode_tp):
        mine = [pair for pair in pairs(shape, prefill_tp, decode_tp) if pair.decode == rank]
        covered = sorted((pair.decode_offset, pair.decode_offset + pair.length) for pair in mine)
        assert covered[0][0] == 0 and covered[-1][1] == shape.page_bytes(decode_tp)
        assert all(a[1] == b[0] for a, b in itertools.pairwise(covered))
        for pair in mine:
            assert pair.prefill_offset + pair.length <= shape.page_bytes(prefill_tp)
            for at in range(0, pair.length, shape.head_bytes):
                there = shape.first_head(prefill_tp, pair.prefill) + (pair.prefill_offset + at) // shape.head_bytes
                here = shape.first_head(decode_tp, rank) + (pair.decode_offset + at) // shape.head_bytes
                assert there == here


@given(st.integers(1, 4), st.integers(1, 20), st.integers(0, 30), st.booleans(), st.integers(0, 99))
def test_block_tables_share_no_block(requests: int, blocks: int, spare: int, scattered: bool, seed: int) -> None:
    pool = requests * blocks + spare
    tables = block_tables(5, requests, blocks, pool, scattered=scattered, seed=seed)
    assert [table.request for table in tables] == list(range(5, 5 + requests))
    for side in ("prefill", "decode"):
        used = np.concatenate([getattr(table, side) for table in tables])
        assert len(np.unique(used)) == requests * blocks and used.min() >= 0 and used.max() < pool
    with pytest.raises(ValueError, match="do not fit"):
        block_tables(5, requests, blocks, requests * blocks - 1, scattered=scattered, seed=seed)


def test_gpt_oss_moves_half_its_layers_in_full_and_the_window_of_the_others() -> None:
    shape = model_kv_shape(
        "gpt-oss-120b", layers=36, kv_heads=8, head_dim=64, dtype_bytes=2, block_tokens=16, sliding_window=128,
        full_attention_layers=18, k_per_token=True,
    )  # fmt: skip
    assert shape.regions == 18 and shape.page_bytes(1) == 32768 and shape.page_bytes(8) == 4096
    assert shape.blocks_of(5000) == 313 + 9
    assert shape.blocks_of(64) == 4 + 4
    assert shape.request_bytes(322, 1) == shape.request_bytes(322, 8) == 322 * 18 * 32768
