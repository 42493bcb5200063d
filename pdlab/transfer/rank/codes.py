"""A code in every 8-byte word of a KV cache, the exact check of the received words, and the name of each fault.

A code has the request, rank, layer (region), block, KV head, K or V, and the offset in that head's K or V. So a
misplaced word shows its origin. Words that no transfer may change have codes of another kind. Sent to the nodes by
value; imports only numpy and the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pdlab.transfer.rank.layout import WORD, BlockTable, KvShape, RankPair, Words

FIELDS = ("offset", "kv", "head", "block", "region", "rank", "request")  # lowest bits first
KIND_SHIFT = 62
SOURCE, UNTOUCHED = 1, 2  # the two top bits; a zero word is not a code
CHUNK_WORDS = 1 << 16  # 512 KiB, so that a chunk stays in the core's cache over all passes
MOST_WRONG = 1 << 20  # wrong words examined to find the pattern


@dataclass(frozen=True)
class WordCode:
    """A decoded word. ``kind``: `SOURCE` (from prefill), `UNTOUCHED` (memory of decode), or another value: no code."""

    kind: int
    request: int
    rank: int
    region: int
    block: int
    head: int
    kv: int
    offset: int

    def text(self) -> str:
        """The code in words."""
        if self.kind not in (SOURCE, UNTOUCHED):
            return "no code of this test"
        where = f"layer {self.region}, block {self.block}, {'KV'[self.kv]} of head {self.head}, word {self.offset}"
        if self.kind == UNTOUCHED:
            return f"untouched memory of decode rank {self.rank} ({where})"
        return f"request {self.request} of prefill rank {self.rank} ({where})"


class CodeBook:
    """Packs the fields into 62 bits, each as wide as this cache needs. Raises ValueError if they do not fit."""

    def __init__(self, shape: KvShape, num_blocks: int, ranks: int, requests: int) -> None:
        self.shape = shape
        sizes = {
            "offset": shape.head_words // 2,
            "kv": 2,
            "head": shape.kv_heads,
            "block": num_blocks,
            "region": shape.regions,
            "rank": ranks,
            "request": requests + 1,
        }
        self.shift: dict[str, int] = {}
        self.mask: dict[str, int] = {}
        at = 0
        for name in FIELDS:
            width = max(1, (sizes[name] - 1).bit_length())
            self.shift[name], self.mask[name] = at, (1 << width) - 1
            at += width
        if at > KIND_SHIFT:
            raise ValueError(f"codes need {at} bits and a word has {KIND_SHIFT} for them: {sizes}; use a smaller cache")

    def words(self, first_head: int, first_word: int, count: int) -> Words:
        """The part of the codes that depends on the place in a page: shape (count,), from ``first_word`` on."""
        word = np.arange(first_word, first_word + count, dtype=np.uint64)
        head_words, half = np.uint64(self.shape.head_words), np.uint64(self.shape.half_words)
        head = word // head_words + np.uint64(first_head)
        inside = word % head_words
        kv = inside // half % np.uint64(2)
        offset = inside // (half * np.uint64(2)) * half + inside % half
        codes: Words = head << self._at("head") | kv << self._at("kv") | offset << self._at("offset")
        return codes

    def pages(self, kind: int, request: int, rank: int, region: int, blocks: npt.ArrayLike) -> Words:
        """The part of the codes that all words of a page share: one per block, shape (blocks,)."""
        same = kind << KIND_SHIFT | request << self.shift["request"] | rank << self.shift["rank"]
        same |= region << self.shift["region"]
        return np.uint64(same) | np.asarray(blocks, dtype=np.uint64) << self._at("block")

    def source_pages(self, request: int, rank: int, region: int, blocks: npt.ArrayLike) -> Words:
        """`pages` of prefill."""
        return self.pages(SOURCE, request, rank, region, blocks)

    def field(self, codes: Words, name: str) -> npt.NDArray[np.int64]:
        """One field of the codes, with their shape."""
        return (codes >> self._at(name) & np.uint64(self.mask[name])).astype(np.int64)

    def decode(self, word: int) -> WordCode:
        """The fields of one word."""
        values = {name: word >> self.shift[name] & self.mask[name] for name in FIELDS}
        return WordCode(kind=word >> KIND_SHIFT, **values)

    def _at(self, name: str) -> np.uint64:
        return np.uint64(self.shift[name])


def fill(region: Words, blocks: npt.ArrayLike, pages: Words, words: Words) -> None:
    """Write the codes of ``blocks`` into one region of shape (num_blocks, words of a page)."""
    rows = np.asarray(blocks, dtype=np.int64)
    step = max(1, CHUNK_WORDS // len(words))
    for at in range(0, len(rows), step):
        region[rows[at : at + step]] = pages[at : at + step, None] | words[None, :]


def fill_source(
    book: CodeBook, regions: Sequence[Words], tp: int, rank: int, tables: Sequence[BlockTable] = ()
) -> None:
    """Fill prefill's cache: all blocks with codes of request 0, or the blocks of ``tables`` with those of the requests.

    ``regions``: shape (num_blocks, words of a page) each.
    """
    for number, region in enumerate(regions):
        words = book.words(book.shape.first_head(tp, rank), 0, region.shape[1])
        if tables:
            for table in tables:
                fill(region, table.prefill, book.source_pages(table.request, rank, number, table.prefill), words)
        else:
            blocks = np.arange(len(region))
            fill(region, blocks, book.source_pages(0, rank, number, blocks), words)


def fill_untouched(book: CodeBook, regions: Sequence[Words], tp: int, rank: int, blocks: npt.ArrayLike) -> None:
    """Fill ``blocks`` of decode's cache, in every region, with codes of untouched memory."""
    for number, region in enumerate(regions):
        words = book.words(book.shape.first_head(tp, rank), 0, region.shape[1])
        fill(region, blocks, book.pages(UNTOUCHED, 0, rank, number, blocks), words)


@dataclass(frozen=True)
class WrongWord:
    """One wrong word: its place, the expected code, the actual word, and the word as a code (``origin``)."""

    rank: int
    region: int
    block: int
    word: int
    inside: bool
    expected: WordCode
    actual: int
    origin: WordCode


@dataclass(frozen=True)
class Inspection:
    """Result of the check of one decode rank. ``words``: compared words of the transferred blocks. ``outside_words``:
    compared words of other blocks. ``patterns``: (name of the fault, number of words), the most frequent first."""

    words: int
    outside_words: int
    wrong_words: int = 0
    first: WrongWord | None = None
    patterns: tuple[tuple[str, int], ...] = ()

    def text(self) -> str:
        """One line: the pattern, the first wrong word, and the origin of its content."""
        if self.first is None:
            return f"{self.words} words exact, {self.outside_words} words outside untouched"
        wrong = self.first
        names = "; ".join(f"{name} ({count} words)" for name, count in self.patterns)
        place = "inside" if wrong.inside else "OUTSIDE"
        return (
            f"{self.wrong_words} of {self.words + self.outside_words} words are wrong: {names}. First: decode rank "
            f"{wrong.rank}, layer {wrong.region}, block {wrong.block}, byte {wrong.word * WORD} of its page "
            f"({place} the transferred blocks) should be {wrong.expected.text()}, is "
            f"{wrong.origin.text()} [{wrong.actual:#018x}]"
        )


def check(
    book: CodeBook, regions: Sequence[Words], tp: int, rank: int, slices: Sequence[RankPair], prefill_tp: int,
    tables: Sequence[BlockTable],
) -> Inspection:  # fmt: skip
    """Compare every word of a decode rank's cache with the expected word after the transfers of ``tables``.

    ``slices``: the rank's own pairs. ``regions``: shape (num_blocks, words of a page) each. No timing includes this.
    """
    wrong = _WrongWords()
    num_blocks = len(regions[0])
    outside = np.ones(num_blocks, dtype=bool)
    for table in tables:
        outside[table.decode] = False
    outside_blocks = np.flatnonzero(outside)
    words = 0
    for number, region in enumerate(regions):
        for pair in slices:
            first, count = pair.decode_offset // WORD, pair.length // WORD
            head = book.shape.first_head(prefill_tp, pair.prefill)
            inside = book.words(head, pair.prefill_offset // WORD, count)
            for table in tables:
                pages = book.source_pages(table.request, pair.prefill, number, table.prefill)
                _compare(wrong, region, number, table.decode, first, pages, inside, True)
                words += count * len(table.decode)
        untouched = book.words(book.shape.first_head(tp, rank), 0, region.shape[1])
        pages = book.pages(UNTOUCHED, 0, rank, number, outside_blocks)
        _compare(wrong, region, number, outside_blocks, 0, pages, untouched, False)
    outside_words = len(outside_blocks) * sum(region.shape[1] for region in regions)
    if not wrong.total:
        return Inspection(words, outside_words)
    return wrong.finding(book, rank, tables, words, outside_words)


class _WrongWords:
    """Collected wrong words: columns region, block, word, inside, expected, actual."""

    def __init__(self) -> None:
        self.total = 0
        self.collected = 0
        self.columns: list[tuple[npt.NDArray[np.uint64], ...]] = []

    def add(self, region: int, blocks: Words, words: Words, inside: bool, expected: Words, actual: Words) -> None:
        self.total += len(actual)
        room = MOST_WRONG - self.collected
        if room > 0:
            same = (np.full(len(actual), region, np.uint64), blocks, words, np.full(len(actual), inside, np.uint64))
            self.columns.append(tuple(column[:room] for column in (*same, expected, actual)))
            self.collected += min(room, len(actual))

    def finding(self, book: CodeBook, rank: int, tables: Sequence[BlockTable], words: int, outside: int) -> Inspection:
        columns = zip(*self.columns, strict=True)
        region, block, word, inside, expected, actual = (np.concatenate(column) for column in columns)
        order = np.lexsort((word, block, region))
        first_index = int(order[0])
        wrong = WrongWord(
            rank, int(region[first_index]), int(block[first_index]), int(word[first_index]), bool(inside[first_index]),
            book.decode(int(expected[first_index])), int(actual[first_index]), book.decode(int(actual[first_index])),
        )  # fmt: skip
        names = patterns(book, {table.request: table for table in tables}, expected, actual, inside.astype(bool))
        return Inspection(words, outside, self.total, wrong, names)


def _compare(
    wrong: _WrongWords, region: Words, number: int, blocks: npt.NDArray[np.int64], first_word: int, pages: Words,
    words: Words, inside: bool,
) -> None:  # fmt: skip
    """Compare blocks of a region with codes: gather, remove the page's part, compare with the rest.

    These three passes run over a chunk that stays in the core's cache.
    """
    count = len(words)
    step = max(1, CHUNK_WORDS // count)
    whole = region if first_word == 0 and count == region.shape[1] else region[:, first_word : first_word + count]
    for at in range(0, len(blocks), step):
        rows = blocks[at : at + step]
        rows_words = whole[rows]
        residue = np.bitwise_xor(rows_words, pages[at : at + step, None], out=rows_words)
        if np.array_equal(residue, np.broadcast_to(words, residue.shape)):
            continue
        row, column = np.nonzero(residue != words)
        expected = pages[at : at + step][row] | words[column]
        wrong.add(
            number, rows[row].astype(np.uint64), (column + first_word).astype(np.uint64), inside, expected,
            residue[row, column] ^ pages[at : at + step][row],
        )  # fmt: skip


def patterns(
    book: CodeBook, tables: Mapping[int, BlockTable], expected: Words, actual: Words, inside: npt.NDArray[np.bool_]
) -> tuple[tuple[str, int], ...]:
    """(name of a fault, number of words), the most frequent first. ``expected``, ``actual``, ``inside``: of the wrong
    words, shape (words,)."""
    kind = (actual >> np.uint64(KIND_SHIFT)).astype(np.int64)
    differs = {name: book.field(expected, name) != book.field(actual, name) for name in FIELDS}
    code = kind == SOURCE
    past = ~np.isin(book.field(actual, "request"), list(tables))
    one_bit = _popcount(expected ^ actual) == 1
    unexplained = np.ones(len(actual), dtype=bool)
    names: list[tuple[str, int]] = []

    def take(name: str, matching: npt.NDArray[np.bool_]) -> None:
        count = int((matching & unexplained).sum())
        if count:
            names.append((name, count))
            unexplained[matching] = False

    take("written outside the transferred blocks", ~inside)
    take("zeros: never filled, or cleared", actual == 0)
    # The code of a neighbour may differ by one bit too, but then most words of the page are wrong.
    take("flipped bit", one_bit & (actual != 0) & ~_in_a_crowd(expected, book))
    take(_missing_blocks(book, tables, expected[unexplained & (kind == UNTOUCHED)]), kind == UNTOUCHED)
    place = ("block", "region", "rank", "head", "kv", "offset")
    in_place = ~np.logical_or.reduce([differs[name] for name in place])
    take("stale: content of an earlier request", code & past & (in_place | (book.field(actual, "request") > 0)))

    def only(*fields: str) -> npt.NDArray[np.bool_]:
        same: npt.NDArray[np.bool_] = code.copy()
        for name in place:
            same &= differs[name] if name in fields else ~differs[name]
        return same

    take("swapped K and V", only("kv"))
    take("wrong head slice", only("head"))
    take("wrong head slice, of another rank", only("head", "rank"))
    moved = only("block")
    take(_moved_blocks(book, tables, expected[moved & unexplained], actual[moved & unexplained]), moved)
    take("wrong layer", only("region"))
    take("wrong rank", only("rank"))
    take("shifted inside the page", only("offset") | only("offset", "kv") | only("offset", "head"))
    take("content of another place of the cache", code)
    take("content that is no code of this test", unexplained.copy())
    return tuple(sorted(names, key=lambda item: -item[1]))


def _missing_blocks(book: CodeBook, tables: Mapping[int, BlockTable], expected: Words) -> str:
    """Name of the fault of blocks without content: the last blocks of their requests, or others."""
    if not len(expected):
        return "blocks that never came"
    requests, blocks = book.field(expected, "request"), book.field(expected, "block")
    only_last = all(
        set(np.unique(blocks[requests == request]).tolist()) == {int(tables[int(request)].prefill[-1])}
        for request in np.unique(requests)
    )
    return "missing last block" if only_last else "blocks that never came"


def _moved_blocks(book: CodeBook, tables: Mapping[int, BlockTable], expected: Words, actual: Words) -> str:
    """Name of the fault of misplaced blocks: swapped in pairs, shifted by one distance, or neither."""
    if not len(expected):
        return "blocks in the wrong place"
    expected_blocks, actual_blocks = book.field(expected, "block"), book.field(actual, "block")
    moves = set(zip(expected_blocks.tolist(), actual_blocks.tolist(), strict=True))
    if all((b, a) in moves for a, b in moves):
        return "swapped blocks"
    if len(set((actual_blocks - expected_blocks).tolist())) == 1:
        return f"shifted block: content of block {int(actual_blocks[0] - expected_blocks[0]):+d}"
    steps = set()
    for table in tables.values():
        index = {int(block): i for i, block in enumerate(table.prefill)}
        offsets = {(index[a], index.get(b)) for a, b in moves if a in index}
        steps |= {None if b is None else (b - a) % len(index) for a, b in offsets}
    if len(steps) == 1 and None not in steps:
        return f"shifted block: every block holds the one {steps.pop()} further in its request"
    return "blocks in the wrong place"


def _in_a_crowd(expected: Words, book: CodeBook) -> npt.NDArray[np.bool_]:
    """For each wrong word whether many words of its page are wrong, which a single flipped bit does not explain."""
    page = expected >> np.uint64(book.shift["head"])
    _, index, counts = np.unique(page, return_inverse=True, return_counts=True)
    page_counts = counts[index.ravel()]
    crowd: npt.NDArray[np.bool_] = (page_counts > 1) & (page_counts * 4 >= book.shape.head_words)
    return crowd


def _popcount(words: Words) -> npt.NDArray[np.int64]:
    """Set bits of each word (numpy 1 has no bitwise_count)."""
    as_bytes = np.ascontiguousarray(words).view(np.uint8).reshape(-1, WORD)
    bits: npt.NDArray[np.int64] = np.unpackbits(as_bytes, axis=1).sum(axis=1, dtype=np.int64)
    return bits
