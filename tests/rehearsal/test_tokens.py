"""An answer is its prompt's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pdlab.rehearsal.fake_cluster import ensure_tokenizer
from pdlab.rehearsal.tokens import FIRST_WORD, Vocabulary, answer, block_keys, digest, likeliest


def test_an_answer_is_the_same_in_every_process() -> None:
    code = (
        "from pdlab.rehearsal.tokens import answer, digest, block_keys;"
        "print(answer(digest([5, 6, 7]), 8, 1024), block_keys(list(range(40)), 16))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2],
        env={"PYTHONHASHSEED": "77"},
    )  # fmt: skip
    assert done.stdout.strip() == f"{answer(digest([5, 6, 7]), 8, 1024)} {block_keys(list(range(40)), 16)}"


def test_other_prompts_have_other_answers_and_longer_ones_begin_alike() -> None:
    one, other = answer(digest([5, 6, 7]), 16, 1024), answer(digest([5, 6, 8]), 16, 1024)
    assert one != other
    assert answer(digest([5, 6, 7]), 40, 1024)[:16] == one
    assert all(FIRST_WORD <= token < 1024 for token in one)


def test_the_token_is_the_likeliest_of_several() -> None:
    top = likeliest(1023, 1024)
    assert len(top) == 5
    assert max(top, key=lambda token: top[token]) == 1023
    assert all(0 <= token < 1024 for token in top)


def test_blocks_are_known_by_all_that_is_before_them() -> None:
    ids = list(range(70))
    keys = block_keys(ids, 16)
    assert len(keys) == 4
    changed = block_keys([*ids[:20], 999, *ids[21:]], 16)
    assert changed[0] == keys[0]
    assert not set(changed[1:]) & set(keys)


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    folder = ensure_tokenizer(tmp_path_factory.mktemp("cache"))
    assert ensure_tokenizer(folder.parents[1]) == folder
    return Vocabulary(folder / "tokenizer.json")


def test_text_comes_back_as_it_went_in(vocabulary: Vocabulary) -> None:
    text = "Item 3 has code 4711. naïve"
    ids = vocabulary.encode(text)
    assert vocabulary.decode(ids) == text
    assert vocabulary.size == 1024
    assert vocabulary.decode(answer(digest(ids), 20, vocabulary.size))
