"""The text of a block: words drawn from the seed and the block's key, whatever else is sent, and in which order."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def drawn_words(seed: int, key: str, tokens: int, vocabulary: int) -> NDArray[np.int64]:
    """Of each token of the block the index of its word, from 0 to below ``vocabulary``, each as likely.

    They follow from BLAKE2b over ``seed`` and ``key`` alone. Of one key a shorter block is the beginning of a longer
    one. PCG64's raw output does not change with the version of NumPy.
    """
    import numpy as np

    digest = hashlib.blake2b(f"{seed}:{key}".encode(), digest_size=16).digest()
    raw = np.random.PCG64(int.from_bytes(digest, "big")).random_raw(tokens)
    return ((raw >> np.uint64(32)) * np.uint64(vocabulary) >> np.uint64(32)).astype(np.int64)
