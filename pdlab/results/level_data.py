"""The requests of one level in columns, built once. Windows, figures, SLOs, searches and gates read them."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from pdlab.results.schema import ReplayedRequest, RequestRecord
from pdlab.results.texts import Texts

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pdlab.results.texts import TextColumn

    Column = NDArray[np.float64]
    Codes = NDArray[np.int64]
    Mask = NDArray[np.bool_]


class Chunks(NamedTuple):
    """Every chunk of every answer: its moment, and its tokens (an equal share of the answer's)."""

    moment_s: Column
    tokens: Column


@dataclass(frozen=True, eq=False)
class ReplayedData:
    """Columns of `pdlab.results.schema.ReplayedRequest`, one element per request.

    ``known``: whether the request belongs to a compiled workload. ``cached_tokens``, ``foreseen_tokens``,
    ``foreseen_least`` and ``foreseen_most`` (the bounds): NaN if unknown. ``replicas``, ``prefill_replicas``: a number
    for each replica; -1: unknown. ``after``: ids of the requests waited for, ``after_counts`` of them per request, one
    after the other. Texts are UTF-8.
    """

    known: Mask
    sent: Mask
    cached_tokens: Column
    foreseen_tokens: Column
    foreseen_least: Column
    foreseen_most: Column
    ids: TextColumn
    sessions: TextColumn
    replicas: Codes
    prefill_replicas: Codes
    after_counts: Codes
    after: TextColumn

    @classmethod
    def none(cls, count: int) -> ReplayedData:
        """For ``count`` requests that belong to no compiled workload."""
        import numpy as np

        unknown, nameless, nowhere = np.full(count, math.nan), np.zeros(count, "S1"), np.full(count, -1)
        return cls(
            known=np.zeros(count, dtype=np.bool_),
            sent=np.ones(count, dtype=np.bool_),
            cached_tokens=unknown,
            foreseen_tokens=unknown,
            foreseen_least=unknown,
            foreseen_most=unknown,
            ids=nameless,
            sessions=nameless,
            replicas=nowhere,
            prefill_replicas=nowhere,
            after_counts=np.zeros(count, dtype=np.int64),
            after=np.zeros(0, "S1"),
        )

    def part(self, selected: Mask | Codes) -> ReplayedData:
        """Some of the requests, or all of them in another order."""
        own = {name: getattr(self, name)[selected] for name in self.__dataclass_fields__ if name != "after"}
        return ReplayedData(**own, after=_part(self.after, self.after_counts, selected))


class _ReplayedColumns:
    def __init__(self) -> None:
        self._known, self._sent = bytearray(), bytearray()
        self._cached, self._foreseen = array("d"), array("d")
        self._least, self._most = array("d"), array("d")
        self._ids, self._sessions, self._after = Texts(), Texts(), Texts()
        self._replicas, self._prefill_replicas, self._after_counts = array("q"), array("q"), array("q")
        self._numbers: dict[str | None, int] = {None: -1}

    def add(self, each: ReplayedRequest | None) -> None:
        self._known.append(each is not None)
        each = each or _NOT_REPLAYED
        self._sent.append(each.sent)
        self._cached.append(_or_nan(each.cached_tokens))
        self._foreseen.append(_or_nan(each.foreseen_tokens))
        least, most = each.foreseen_bounds or (None, None)
        self._least.append(_or_nan(least))
        self._most.append(_or_nan(most))
        self._ids.add(each.id)
        self._sessions.add(each.session)
        self._replicas.append(self._number(each.replica))
        self._prefill_replicas.append(self._number(each.prefill_replica))
        after = each.after
        self._after_counts.append(len(after))
        for other in after:
            self._after.add(other)

    def _number(self, replica: str | None) -> int:
        return self._numbers.setdefault(replica, len(self._numbers))

    def data(self) -> ReplayedData:
        import numpy as np

        return ReplayedData(
            known=np.array(self._known, dtype=np.bool_),
            sent=np.array(self._sent, dtype=np.bool_),
            cached_tokens=np.array(self._cached),
            foreseen_tokens=np.array(self._foreseen),
            foreseen_least=np.array(self._least),
            foreseen_most=np.array(self._most),
            ids=self._ids.array(),
            sessions=self._sessions.array(),
            replicas=np.array(self._replicas),
            prefill_replicas=np.array(self._prefill_replicas),
            after_counts=np.array(self._after_counts),
            after=self._after.array(),
        )


_NOT_REPLAYED = ReplayedRequest(id="", session="")


@dataclass(frozen=True, eq=False)
class LevelData:
    """The requests of one level in the order of arrival, one element of each column per request.

    Times are in seconds since the level began. NaN: it did not happen, or is unknown. ``finish_s`` is NaN for a request
    without an answer. ``ended_s``: when the client stopped waiting, with or without an answer. ``asked_input`` and
    ``asked_output``: tokens asked of a request whose lengths are not the workload's. ``gaps_s``: the gaps between
    chunks, ``gap_counts`` of them per request, one after the other.
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
    replayed: ReplayedData

    @classmethod
    def of(cls, records: Iterable[RequestRecord]) -> LevelData:
        """All that the records hold. Each record is read once and not kept."""
        import numpy as np

        columns = [array("d") for _ in _COLUMNS]
        gap_counts, gaps_s, replayed = array("q"), array("d"), _ReplayedColumns()
        errors: list[str | None] = []
        same: dict[str, str] = {}
        for row in records:
            asked_input, asked_output = row.asked or (None, None)
            finish_s = row.finish_s if row.ok else None
            values = (row.arrival_s, row.first_token_s, finish_s, row.output_tokens, row.input_tokens, row.finish_s)
            for column, value in zip(columns, (*values, row.lateness_s, asked_input, asked_output), strict=True):
                column.append(_or_nan(value))
            gap_counts.append(len(row.itl_s))
            gaps_s.extend(row.itl_s)
            errors.append(None if row.error is None else same.setdefault(row.error, row.error))
            replayed.add(row.replayed)
        data = cls(
            **dict(zip(_COLUMNS, map(np.asarray, columns), strict=True)),
            gap_counts=np.asarray(gap_counts),
            gaps_s=np.asarray(gaps_s),
            errors=tuple(errors),
            replayed=replayed.data(),
        )
        order = np.argsort(data.arrival_s, kind="stable")
        return data if (order[1:] > order[:-1]).all() else data._taken(order)

    @classmethod
    def of_times(
        cls,
        arrival_s: Sequence[float] | Column,
        first_token_s: Sequence[float] | Column,
        finish_s: Sequence[float] | Column,
        output_tokens: Sequence[float] | Column,
        input_tokens: Sequence[float] | Column | None = None,
    ) -> LevelData:
        """Requests in any order of which only these columns are known. Each answer is one chunk at its first token."""
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
            replayed=ReplayedData.none(len(order)),
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
        moments_s = np.repeat(first_s, 1 + counts)
        begin = 0
        for end in (1 + counts).cumsum().tolist():
            own = moments_s[begin:end]
            own[1:] = gaps_s[: end - begin - 1]
            np.cumsum(own, out=own)
            gaps_s, begin = gaps_s[end - begin - 1 :], end
        return Chunks(moments_s, np.repeat(self.output_tokens[self.ok] / (1 + counts), 1 + counts))

    @property
    def answered(self) -> LevelData:
        """The requests that were answered."""
        return self.part(self.ok)

    def part(self, selected: Mask) -> LevelData:
        """Some of the requests."""
        return self if selected.all() else self._taken(selected)

    def _taken(self, selected: Mask | Codes) -> LevelData:
        import numpy as np

        return LevelData(
            **{name: getattr(self, name)[selected] for name in _COLUMNS},
            gap_counts=self.gap_counts[selected],
            gaps_s=_part(self.gaps_s, self.gap_counts, selected),
            errors=tuple(self.errors[at] for at in np.arange(len(self))[selected]),
            replayed=self.replayed.part(selected),
        )


_COLUMNS = tuple(name for name, kind in LevelData.__annotations__.items() if kind == "Column" and name != "gaps_s")


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _part(values: NDArray[Any], counts: Codes, selected: Mask | Codes) -> NDArray[Any]:
    """The values of the selected requests; ``values`` has ``counts`` elements for each request, one after the other."""
    import numpy as np

    if selected.dtype == np.bool_:
        return values[np.repeat(selected, counts)]
    own = np.split(values, counts.cumsum()[:-1])
    return np.concatenate([own[at] for at in selected])
