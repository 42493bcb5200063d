"""The text of a block: words drawn only from the seed and the block's key, independent of other requests and their
order.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def drawn_words(seed: int, key: str, tokens: int, vocabulary: int) -> NDArray[np.int64]:
    """The index of a word for each token of the block, from 0 to below ``vocabulary``, with equal chances.

    They follow only from BLAKE2b over ``seed`` and ``key``. With one key a shorter block is the beginning of a longer
    one. PCG64's raw output does not change with the version of NumPy.
    """
    import numpy as np

    digest = hashlib.blake2b(f"{seed}:{key}".encode(), digest_size=16).digest()
    raw = np.random.PCG64(int.from_bytes(digest, "big")).random_raw(tokens)
    return ((raw >> np.uint64(32)) * np.uint64(vocabulary) >> np.uint64(32)).astype(np.int64)
