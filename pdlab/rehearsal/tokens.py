"""Token ids of prompts, and the answer to a prompt, which is drawn from a hash of the prompt."""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FIRST_WORD = 300  # lower ids of the tiny model's tokenizer are single bytes and the special token
TOP = 5
CHOSEN_LOGPROB, OTHER_LOGPROB = -0.05, -8.0


class Vocabulary:
    """A tokenizer of the library tokenizers, read from its file."""

    def __init__(self, file: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer: Any = Tokenizer.from_file(str(file))
        self.size: int = self._tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids))
        return text


def digest(ids: Sequence[int]) -> str:
    """Digest of a prompt's token ids; equal in every process."""
    return hashlib.blake2b(array("q", ids).tobytes(), digest_size=16).hexdigest()


def answer(prompt_digest: str, count: int, vocabulary: int) -> list[int]:
    """The first ``count`` tokens of the answer to a prompt. ``vocabulary``: number of token ids."""
    return random.Random(prompt_digest).choices(range(min(FIRST_WORD, vocabulary - 1), vocabulary), k=count)


def likeliest(token: int, vocabulary: int) -> dict[int, float]:
    """Token id -> log-probability of an answer's token and of four others; the token first."""
    others = {(token + step) % vocabulary: OTHER_LOGPROB - step for step in range(1, TOP)}
    return {token: CHOSEN_LOGPROB} | others
