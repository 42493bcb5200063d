"""The requests of one level in columns, built once. Windows, figures, SLOs, searches and gates read them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from pdlab.results.columns import (
    GrowingArray,
    GrowingTable,
    allocated,
    by_parts,
    elements,
    runs_taken,
    sorted_order,
    taken,
)
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

    ``known``: whether the request belongs to a compiled workload. ``turns``: 1 for others. ``cached_tokens``,
    ``foreseen_tokens``, ``foreseen_least`` and ``foreseen_most`` (the bounds): NaN if unknown. ``replicas``,
    ``prefill_replicas``: a number for each replica; -1: unknown. ``after``: ids of the requests waited for,
    ``after_counts`` of them per request, one after the other. Texts are UTF-8.
    """

    known: Mask
    sent: Mask
    turns: Codes
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
            turns=np.ones(count, dtype=np.int64),
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

    def taken(self, order: Codes) -> ReplayedData:
        """Some of the requests, or all of them in another order."""
        own = {name: taken(getattr(self, name), order) for name in self.__dataclass_fields__ if name != "after"}
        return ReplayedData(**own, after=runs_taken(self.after, self.after_counts, order))


class _ReplayedColumns:
    def __init__(self) -> None:
        self._numbers: dict[str | None, int] = {None: -1}
        self._table = GrowingTable(
            {
                "known": "B", "sent": "B", "turns": "q", "cached_tokens": "d", "foreseen_tokens": "d",
                "foreseen_least": "d", "foreseen_most": "d", "replicas": "q", "prefill_replicas": "q",
                "after_counts": "q",
            }
        )  # fmt: skip
        self._ids, self._sessions, self._after = Texts(), Texts(), Texts()

    def add(self, each: ReplayedRequest | None) -> None:
        known = each is not None
        each = each or _NOT_REPLAYED
        tokens = map(_or_nan, (each.cached_tokens, each.foreseen_tokens, *(each.foreseen_bounds or (None, None))))
        after = each.after
        replicas = (self._number(each.replica), self._number(each.prefill_replica))
        self._table.add((known, each.sent, each.turn, *tokens, *replicas, len(after)))
        self._ids.add(each.id)
        self._sessions.add(each.session)
        for other in after:
            self._after.add(other)

    def _number(self, replica: str | None) -> int:
        return self._numbers.setdefault(replica, len(self._numbers))

    def data(self) -> ReplayedData:
        own = self._table.columns()
        own |= {name: own[name].view("?") for name in ("known", "sent")}
        return ReplayedData(**own, ids=self._ids.array(), sessions=self._sessions.array(), after=self._after.array())


_NOT_REPLAYED = ReplayedRequest(id="", session="")


@dataclass(frozen=True, eq=False)
class LevelData:
    """The requests of one level in the order of arrival, one element of each column per request.

    Times are in seconds since the level began. NaN: it did not happen, or is unknown. ``finish_s`` is NaN for a request
    without an answer. ``ended_s``: when the client stopped waiting, with or without an answer. ``requested_input`` and
    ``requested_output``: tokens of a request whose lengths are not the workload's. ``gaps_s``: the gaps between chunks,
    ``gap_counts`` of them per request, one after the other. ``errors``: the place of each request's error in
    ``error_texts``, where None is at 0. ``usage``: whether the server reported token counts.
    """

    arrival_s: Column
    first_token_s: Column
    finish_s: Column
    output_tokens: Column
    input_tokens: Column
    ended_s: Column
    lateness_s: Column
    requested_input: Column
    requested_output: Column
    gap_counts: Codes
    gaps_s: Column
    errors: Codes
    usage: Mask
    error_texts: tuple[str | None, ...]
    replayed: ReplayedData

    @classmethod
    def of(cls, records: Iterable[RequestRecord]) -> LevelData:
        """All that the records hold. Each record is read once and not kept."""
        table = GrowingTable({name: _COLUMN_TYPES.get(name, "d") for name in _COLUMNS})
        gaps_s, replayed = GrowingArray("d"), _ReplayedColumns()
        numbers: dict[str | None, int] = {None: 0}
        for row in records:
            finish_s = row.finish_s if row.ok else None
            times = (row.arrival_s, row.first_token_s, finish_s, row.output_tokens, row.input_tokens, row.finish_s)
            values = map(_or_nan, (*times, row.lateness_s, *(row.requested or (None, None))))
            counts = (len(row.itl_s), numbers.setdefault(row.error, len(numbers)), row.usage)
            table.add((*values, *counts))
            gaps_s.extend(row.itl_s)
            replayed.add(row.replayed)
        columns = table.columns()
        data = cls(
            **columns | {"usage": columns["usage"].view("?")},
            gaps_s=gaps_s.array(),
            error_texts=tuple(numbers),
            replayed=replayed.data(),
        )
        order = sorted_order(data.arrival_s)
        return data if (order[1:] > order[:-1]).all() else data.taken(order)

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
            requested_input=unknown,
            requested_output=unknown,
            gap_counts=np.zeros(len(order), dtype=np.int64),
            gaps_s=np.zeros(0),
            errors=np.zeros(len(order), dtype=np.int64),
            usage=np.ones(len(order), dtype=np.bool_),
            error_texts=(None,),
            replayed=ReplayedData.none(len(order)),
        )

    def __len__(self) -> int:
        return len(self.arrival_s)

    @cached_property
    def ok(self) -> Mask:
        """Whether a request was answered."""
        import numpy as np

        return by_parts(lambda finish_s: ~np.isnan(finish_s), self.finish_s, kind="?")

    @cached_property
    def ttft_s(self) -> Column:
        """Time to first token."""
        return by_parts(lambda first_s, arrival_s: first_s - arrival_s, self.first_token_s, self.arrival_s)

    @cached_property
    def e2el_s(self) -> Column:
        """End-to-end latency of an answer."""
        return by_parts(lambda finish_s, arrival_s: finish_s - arrival_s, self.finish_s, self.arrival_s)

    @cached_property
    def tpot_s(self) -> Column:
        """Time per output token after the first; NaN for an answer of one token."""
        import numpy as np

        def tpot_s(tokens: Column, e2el_s: Column, ttft_s: Column) -> Column:
            after = tokens - 1
            return np.where(after > 0, (e2el_s - ttft_s) / np.maximum(after, 1), math.nan)

        return by_parts(tpot_s, self.output_tokens, self.e2el_s, self.ttft_s)

    @cached_property
    def chunks(self) -> Chunks:
        import numpy as np

        count = int(self.ok.sum() + self.gap_counts[self.ok].sum())
        chunks, begin, gap = Chunks(allocated(count), allocated(count)), 0, 0
        columns = (self.ok, self.gap_counts, self.first_token_s, self.output_tokens)
        for ok, gaps, first_s, tokens in zip(*map(elements, columns), strict=True):
            if ok:
                end = begin + 1 + gaps
                own = chunks.moment_s[begin:end]
                own[0], own[1:] = first_s, self.gaps_s[gap : gap + gaps]
                np.cumsum(own, out=own)
                chunks.tokens[begin:end] = tokens / (1 + gaps)
                begin = end
            gap += gaps
        return chunks

    @property
    def answered(self) -> LevelData:
        """The requests that were answered."""
        return self if self.ok.all() else self._answered

    @cached_property
    def _answered(self) -> LevelData:
        return self.part(self.ok)

    def part(self, selected: Mask) -> LevelData:
        """Some of the requests."""
        return self if selected.all() else self.taken(selected.nonzero()[0])

    def taken(self, order: Codes) -> LevelData:
        """Some of the requests, or all of them in another order."""
        return LevelData(
            **{name: taken(getattr(self, name), order) for name in _COLUMNS},
            gaps_s=runs_taken(self.gaps_s, self.gap_counts, order),
            error_texts=self.error_texts,
            replayed=self.replayed.taken(order),
        )


_COLUMNS = (
    "arrival_s", "first_token_s", "finish_s", "output_tokens", "input_tokens", "ended_s", "lateness_s",
    "requested_input", "requested_output", "gap_counts", "errors", "usage",
)  # fmt: skip
_COLUMN_TYPES = {"gap_counts": "q", "errors": "q", "usage": "B"}


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
