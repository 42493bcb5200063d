"""Texts in an array are found again."""

from __future__ import annotations

import numpy as np

from pdlab.results.columns import AT_ONCE
from pdlab.results.texts import TextIndex, Texts, text_codes, text_of


def test_each_is_found_and_of_equal_ones_the_last() -> None:
    texts = Texts()
    names = ["b", "a", "b", "ä\ud800", "a longer one", *(f"n{number}" for number in range(3 * AT_ONCE))]
    for name in names:
        texts.add(name)
    column = texts.array()
    places = TextIndex(column)
    assert [text_of(each) for each in column] == names
    assert (places.of("b"), places.of("a"), places.of("ä\ud800"), places.of("n0")) == (2, 1, 3, 5)
    assert places.of(column[4]) == 4 and places.of("a longer one than any") is None and places.of("") is None


def test_of_none_nothing_is_found() -> None:
    assert TextIndex(Texts().array()).of("a") is None and not len(text_codes(Texts().array()))


def test_equal_texts_have_the_same_number() -> None:
    assert text_codes(np.array([b"b", b"a", b"b", b"", b"c"])).tolist() == [2, 1, 2, 0, 3]
