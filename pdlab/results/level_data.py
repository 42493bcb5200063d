"""The requests of one level in columns, built once: windows, figures, SLOs, searches and gates all read them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, compress
from typing import TYPE_CHECKING, NamedTuple

from pdlab.results.schema import ReplayedRequest, RequestRecord

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Column = NDArray[np.float64]
    Mask = NDArray[np.bool_]


class Chunks(NamedTuple):
    """Every chunk of every answer: when it came, and its tokens (an equal share of its answer's)."""

    moment_s: Column
    tokens: Column


@dataclass(frozen=True, eq=False)
class LevelData:
    """The requests of one level in the order of arrival, one element of each column per request.

    Times are in seconds since the level began. NaN: it did not happen, or is not known. ``finish_s`` is NaN for a
    request that was not answered, ``ended_s`` is when the client stopped waiting for it, answered or not.
    ``asked_input`` and ``asked_output``: tokens asked of a request that does not have the workload's lengths.
    ``gaps_s``: the gaps between the chunks of all requests in one row, of which ``gap_counts`` belong to each request.
    ``replayed``: which of a compiled workload each is (None: of none).
    """

    arrival_s: Column
    first_token_s: Column
    finish_s: Column
    output_tokens: Column
    input_tokens: Column
    ended_s: Column
    lateness_s: Column
    asked_input: Column
    asked_output: Column
    gap_counts: NDArray[np.int64]
    gaps_s: Column
    errors: tuple[str | None, ...]
    replayed: tuple[ReplayedRequest | None, ...]

    @classmethod
    def of(cls, records: Iterable[RequestRecord]) -> LevelData:
        """All that records hold."""
        import numpy as np

        rows = sorted(records, key=lambda record: record.arrival_s)

        def column(values: Iterable[float | None]) -> Column:
            return np.array([math.nan if value is None else value for value in values], dtype=np.float64)

        return cls(
            arrival_s=column(row.arrival_s for row in rows),
            first_token_s=column(row.first_token_s for row in rows),
            finish_s=column(row.finish_s if row.ok else None for row in rows),
            output_tokens=column(row.output_tokens for row in rows),
            input_tokens=column(row.input_tokens for row in rows),
            ended_s=column(row.finish_s for row in rows),
            lateness_s=column(row.lateness_s for row in rows),
            asked_input=column(row.asked and row.asked[0] for row in rows),
            asked_output=column(row.asked and row.asked[1] for row in rows),
            gap_counts=np.array([len(row.itl_s) for row in rows], dtype=np.int64),
            gaps_s=column(gap_s for row in rows for gap_s in row.itl_s),
            errors=tuple(row.error for row in rows),
            replayed=tuple(row.replayed for row in rows),
        )

    @classmethod
    def of_times(
        cls,
        arrival_s: Sequence[float] | Column,
        first_token_s: Sequence[float] | Column,
        finish_s: Sequence[float] | Column,
        output_tokens: Sequence[float] | Column,
        input_tokens: Sequence[float] | Column | None = None,
    ) -> LevelData:
        """Requests, in any order, of which only this is known; each answer is one chunk at its first token."""
        import numpy as np

        order = np.argsort(np.asarray(arrival_s, dtype=np.float64), kind="stable")
        unknown = np.full(len(order), math.nan)
        arrival, first, finish, output, prompt = (
            unknown if values is None else np.asarray(values, dtype=np.float64)[order]
            for values in (arrival_s, first_token_s, finish_s, output_tokens, input_tokens)
        )
        return cls(
            arrival_s=arrival,
            first_token_s=first,
            finish_s=finish,
            output_tokens=output,
            input_tokens=prompt,
            ended_s=finish,
            lateness_s=unknown,
            asked_input=unknown,
            asked_output=unknown,
            gap_counts=np.zeros(len(order), dtype=np.int64),
            gaps_s=np.zeros(0),
            errors=(None,) * len(order),
            replayed=(None,) * len(order),
        )

    def __len__(self) -> int:
        return len(self.arrival_s)

    @cached_property
    def ok(self) -> Mask:
        """Whether a request was answered."""
        import numpy as np

        return ~np.isnan(self.finish_s)

    @cached_property
    def ttft_s(self) -> Column:
        """Time to first token."""
        return self.first_token_s - self.arrival_s

    @cached_property
    def e2el_s(self) -> Column:
        """End-to-end latency of an answer."""
        return self.finish_s - self.arrival_s

    @cached_property
    def tpot_s(self) -> Column:
        """Time per output token after the first; NaN for an answer of one token."""
        import numpy as np

        after = self.output_tokens - 1
        return np.where(after > 0, (self.e2el_s - self.ttft_s) / np.maximum(after, 1), math.nan)

    @cached_property
    def chunks(self) -> Chunks:
        import numpy as np

        counts = self.gap_counts[self.ok]
        first_s, gaps_s = self.first_token_s[self.ok], self.gaps_s[np.repeat(self.ok, self.gap_counts)]
        moments_s = first_s
        if len(gaps_s):
            parts = zip(first_s.tolist(), np.split(gaps_s, counts.cumsum()[:-1]), strict=True)
            moments_s = np.array([each for first, gaps in parts for each in accumulate(gaps.tolist(), initial=first)])
        return Chunks(moments_s, np.repeat(self.output_tokens[self.ok] / (1 + counts), 1 + counts))

    @property
    def answered(self) -> LevelData:
        """The requests that were answered."""
        return self.part(self.ok)

    def part(self, selected: Mask) -> LevelData:
        """Some of the requests."""
        import numpy as np

        own = {
            name: getattr(self, name)[selected]
            for name in self.__dataclass_fields__
            if name not in ("gaps_s", "errors", "replayed")
        }
        kept = selected.tolist()
        return LevelData(
            **own,
            gaps_s=self.gaps_s[np.repeat(selected, self.gap_counts)],
            errors=tuple(compress(self.errors, kept)),
            replayed=tuple(compress(self.replayed, kept)),
        )
