"""Records of one level -> figures. Pure.

**Whole run**: every request that was answered; duration from the first arrival to the last finish.

**Steady state**: ramp-up and drain cut off by one rule.

- Closed loop with concurrency N: the window opens when the first N requests have all had their
  first token (the burst of simultaneous prompts at the start is over) and closes when the last
  request arrives (from then on the number in flight falls). Not defined when fewer than 2 N
  requests finish inside.
- Open loop: the window is one of time. It opens when the system has filled: 2 times the 95th percentile of
  E2EL after the first arrival, and not before the truncation point of MSER-5 (`filled`). It closes so that load is
  kept up until the last judged request has ended: with the last arrival before the first request that was still
  in flight when the last one arrived. Not defined when fewer than 20 requests arrive inside.

Rates count what happens inside the window: a finish as one request and its input tokens, a received
chunk as its share of the request's output tokens (a chunk may carry several). Latencies are of
requests that arrive inside it and, for the closed loop, also finish inside: with equal lengths that
leaves out the first and the last wave and nothing else. For the open loop later finishes count too,
because leaving them out would drop the slowest; by its rule they end while load is kept up.

A ramp has no steady state. The rules after which a level does not count are in `pdlab.bench.gates`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, overload

from pdlab.core.workload import Closed, Load, Ramp
from pdlab.results.schema import PERCENTILES, Distribution, RequestRecord, Summary, Trend

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Column = NDArray[np.float64]
    Mask = NDArray[np.bool_]

FILL = 2.0  # times the 95th percentile of E2EL
OPEN_LEAST = 20
BATCH = 5  # requests whose mean is one value of MSER-5
CLOSED_LEAST = 2  # times the concurrency
MOST_SLICES, FEWEST_SLICES, PER_SLICE = 10, 5, 3
MOST_T = 1e6  # stands for a fit without any residue


class Window(NamedTuple):
    """The steady part of a level, in seconds since the level began. Moments are numbers, or columns of them (NaN:
    it never came)."""

    opens_s: float
    closes_s: float

    @overload
    def holds(self, moment_s: float) -> bool: ...
    @overload
    def holds(self, moment_s: Column) -> Mask: ...
    def holds(self, moment_s: Any) -> Any:
        """Whether what happens then counts towards a rate."""
        return (moment_s > self.opens_s) & (moment_s <= self.closes_s)

    @overload
    def judges(self, arrival_s: float, finish_s: float, load: Load) -> bool: ...
    @overload
    def judges(self, arrival_s: Column, finish_s: Column, load: Load) -> Mask: ...
    def judges(self, arrival_s: Any, finish_s: Any, load: Load) -> Any:
        """Whether the level is judged by that request, failed ones (NaN finish) included."""
        arrived = (arrival_s >= self.opens_s) & (arrival_s <= self.closes_s)
        return arrived & ((finish_s <= self.closes_s) | (finish_s != finish_s)) if isinstance(load, Closed) else arrived


@dataclass(frozen=True, slots=True)
class Columns:
    """The requests of one level in the order of arrival, a number each: seconds since the level began, NaN where it did
    not get that far or failed; and output tokens. Cheap where there are many, and nothing else is known of them."""

    arrival_s: Column
    first_token_s: Column
    finish_s: Column
    output_tokens: Column

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def e2el_s(self) -> Column:
        return self.finish_s - self.arrival_s

    def part(self, selected: Mask | slice) -> Columns:
        return Columns(*(getattr(self, name)[selected] for name in self.__slots__))


def columns(records: Iterable[RequestRecord]) -> Columns:
    """What windows and trends need of records."""
    import numpy as np

    ordered = sorted(records, key=lambda record: record.arrival_s)
    return Columns(
        arrival_s=np.array([record.arrival_s for record in ordered], dtype=np.float64),
        first_token_s=np.array([_or_nan(record.first_token_s) for record in ordered], dtype=np.float64),
        finish_s=np.array([_or_nan(r.finish_s) if r.ok else math.nan for r in ordered], dtype=np.float64),
        output_tokens=np.array([record.output_tokens for record in ordered], dtype=np.float64),
    )


def percentile(ordered: Sequence[float], q: float) -> float:
    """The ``q``-th percentile (0 to 100) of sorted values, linear between neighbours (numpy's default)."""
    position = (len(ordered) - 1) * q / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def distribution(values_s: Iterable[float | None]) -> Distribution | None:
    """Mean and percentiles of the values that are defined; None when none is."""
    ordered = sorted(value for value in values_s if value is not None)
    if not ordered:
        return None
    return Distribution(
        mean_s=math.fsum(ordered) / len(ordered),
        percentiles_s={f"p{q}": percentile(ordered, q) for q in PERCENTILES},
    )


def asked_tokens(records: Sequence[RequestRecord]) -> tuple[float, float] | None:
    """Mean input and output tokens asked of all requests; None where their lengths do not vary."""
    lengths = [record.asked for record in records if record.asked is not None]
    if not lengths:
        return None
    mean_input, mean_output = (math.fsum(tokens) / len(lengths) for tokens in zip(*lengths, strict=True))
    return mean_input, mean_output


def whole(records: Sequence[RequestRecord]) -> Summary:
    """Figures over all requests that were answered. Rates are 0 when none was."""
    answered = [record for record in records if record.ok]
    began_s = min((record.arrival_s for record in records), default=0.0)
    ended_s = max((record.finish_s for record in answered if record.finish_s is not None), default=began_s)
    return _summary(
        ended_s - began_s,
        completed=len(answered),
        input_tokens=sum(record.input_tokens for record in answered),
        output_tokens=sum(record.output_tokens for record in answered),
        latencies_of=answered,
    )


def steady(records: Sequence[RequestRecord], load: Load) -> Summary | None:
    """Figures without ramp-up and drain, by the rule above; None where that is not defined."""
    window = steady_window(records, load)
    if window is None:
        return None
    answered = [record for record in records if record.ok]
    finished = [record for record in answered if window.holds(_or_nan(record.finish_s))]
    counted = [record for record in judged(answered, load, window) if record.ok]
    if is_short(load, len(finished), len(counted)):
        return None
    return _summary(
        window.closes_s - window.opens_s,
        completed=len(finished),
        input_tokens=sum(record.input_tokens for record in finished),
        output_tokens=sum(
            tokens for record in answered for moment_s, tokens in _received(record) if window.holds(moment_s)
        ),
        latencies_of=counted,
    )


def is_short(load: Load, finished: int, judged: int) -> bool:
    """Whether so many requests are too few for a steady state."""
    return finished < CLOSED_LEAST * load.concurrency if isinstance(load, Closed) else judged < OPEN_LEAST


def steady_window(records: Sequence[RequestRecord], load: Load) -> Window | None:
    """The window by the rule above; None when it would be empty."""
    return window_over(columns(records), load)


def window_over(requests: Columns, load: Load) -> Window | None:
    """`steady_window` of columns."""
    return window_of(load, requests.arrival_s, requests.first_token_s, requests.finish_s)


def window_of(
    load: Load,
    arrival_s: Sequence[float] | Column,
    first_token_s: Sequence[float] | Column,
    finish_s: Sequence[float] | Column,
) -> Window | None:
    """`steady_window` of columns, all in the order of arrival; NaN where no token came, where none was the last."""
    count = len(arrival_s)
    if not count or isinstance(load, Ramp):
        return None
    if isinstance(load, Closed):
        burst = [float(moment_s) for moment_s in first_token_s[: load.concurrency] if not math.isnan(moment_s)]
        if not burst:
            return None
        window = Window(max(burst), float(arrival_s[-1]))
        return window if window.closes_s > window.opens_s else None
    return _open_window(arrival_s, finish_s)


def _open_window(arrival: Sequence[float] | Column, finish: Sequence[float] | Column) -> Window | None:
    """A request that was not answered ends nothing and opens nothing: it is judged, as one that failed."""
    import numpy as np

    arrival_s, finish_s = np.asarray(arrival, dtype=np.float64), np.asarray(finish, dtype=np.float64)
    late = np.flatnonzero(finish_s > arrival_s[-1])
    ended = int(late[0]) if len(late) else len(arrival_s)
    while 0 < ended < len(arrival_s) and arrival_s[ended - 1] == arrival_s[ended]:
        ended -= 1
    known = np.flatnonzero(~np.isnan(finish_s))
    if not len(known) or not ended:
        return None
    e2el_s = finish_s - arrival_s
    filled_s = float(arrival_s[0] + FILL * np.percentile(e2el_s[known], 95))
    known = known[known < ended]
    if cut := filled(e2el_s[known]):
        filled_s = max(filled_s, float(arrival_s[known[cut]]))
    window = Window(filled_s, float(arrival_s[ended - 1]))
    return window if window.closes_s > window.opens_s else None


def filled(e2el_s: Sequence[float] | Column) -> int:
    """How many of the first requests met a system that was still filling, by MSER-5: the truncation after which the
    squared standard error of the mean of the rest is least, over means of 5, at most half of them (K. P. White, An
    effective truncation heuristic for bias reduction in simulation output, Simulation 69, 1997).

    0 where what it would cut is not shorter than the rest: an empty system answers sooner, and to cut a busy spell
    at the start would choose among what was measured.
    """
    import numpy as np

    count = len(e2el_s) // BATCH
    if not count:
        return 0
    means = np.asarray(e2el_s, dtype=np.float64)[: BATCH * count].reshape(count, BATCH).mean(axis=1)
    off = means - means.mean()  # moved there, sums of squares keep their digits
    rest = np.arange(count, 0, -1)
    total, squares = off[::-1].cumsum()[::-1], (off**2)[::-1].cumsum()[::-1]
    error = np.maximum(0.0, squares - total**2 / rest) / rest**2
    best = int(error[: count // 2 + 1].argmin())
    if not best or means[:best].mean() >= means[best:].mean():
        return 0
    return BATCH * best


def judged(records: Sequence[RequestRecord], load: Load, window: Window | None = None) -> list[RequestRecord]:
    """The requests by which a level is judged: those that arrive in its steady window, failed ones included; in a
    closed loop without those that finish after it. Empty without a window, which is the records' own if not given."""
    window = window or steady_window(records, load)
    if window is None:
        return []
    return [record for record in records if window.judges(record.arrival_s, _or_nan(record.finish_s), load)]


def _or_nan(moment_s: float | None) -> float:
    return math.nan if moment_s is None else moment_s


class DelaysS(NamedTuple):
    """Median E2EL of the first and of the last fifth of the arrivals, seconds."""

    first: float
    last: float


def delays_s(requests: Columns) -> DelaysS | None:
    """None with fewer than 3 answers in either fifth.

    It says that a rate is far above what is served where answers take too long to leave a window."""
    import numpy as np

    part = len(requests) // 5
    ends = []
    for some in (requests.e2el_s[:part], requests.e2el_s[len(requests) - part :]):
        known = some[~np.isnan(some)]
        if len(known) < PER_SLICE:
            return None
        ends.append(float(np.median(known)))
    return DelaysS(*ends)


def trend(records: Sequence[RequestRecord], load: Load) -> Trend | None:
    """Lines fitted by least squares to output tokens/s and to the mean number in flight, over equal slices
    of the steady window: 10, or fewer so that 3 requests finish in each; None below 5 slices."""
    return trend_over(columns(records), load, [chunk for record in records if record.ok for chunk in _received(record)])


def trend_over(
    requests: Columns, load: Load, chunks: Sequence[tuple[float, float]] | None = None, window: Window | None = None
) -> Trend | None:
    """`trend` of columns; ``chunks``: (moment, output tokens) of what was received (None: each answer at once, when it
    begins); ``window``: the columns' own if not given."""
    import numpy as np

    window = window or window_over(requests, load)
    if window is None:
        return None
    answered = requests.part(~np.isnan(requests.finish_s))
    slices = min(MOST_SLICES, int(window.holds(answered.finish_s).sum()) // PER_SLICE)
    if slices < FEWEST_SLICES:
        return None
    width_s = (window.closes_s - window.opens_s) / slices
    if chunks is None:
        moments, shares = answered.first_token_s, answered.output_tokens
    else:
        moments, shares = np.array(chunks, dtype=np.float64).reshape(-1, 2).T
    inside = window.holds(moments)
    number = np.minimum(slices - 1, (moments[inside] - window.opens_s) / width_s).astype(np.int64)
    tokens = np.bincount(number, weights=shares[inside], minlength=slices)
    begins = window.opens_s + width_s * np.arange(slices)
    busy_s = [
        float(np.clip(np.minimum(answered.finish_s, at + width_s) - np.maximum(answered.arrival_s, at), 0, None).sum())
        for at in begins
    ]
    mean_tokens = float(tokens.mean())
    if not mean_tokens:
        return None
    times_s = answered.e2el_s[window.judges(answered.arrival_s, answered.finish_s, load)]
    arrivals = int(((requests.arrival_s >= window.opens_s) & (requests.arrival_s <= window.closes_s)).sum())
    throughput_change, throughput_t = _fitted(tokens.tolist())
    in_flight = [seconds / width_s for seconds in busy_s]
    growth, growth_t = _fitted(in_flight)
    return Trend(
        slices=slices,
        throughput_change=throughput_change / mean_tokens,
        throughput_t=throughput_t,
        in_flight_growth=growth,
        in_flight_t=growth_t,
        in_flight_mean=math.fsum(in_flight) / slices,
        arrivals=arrivals,
        **_little(times_s, arrivals, slices * width_s) if len(times_s) and not isinstance(load, Closed) else {},
    )


def _little(times_s: Column, arrivals: int, width_s: float) -> dict[str, float]:
    """Rate x time in the system, and its standard error against the number in flight: what is left of the requests
    in flight when the window opens, and when it closes, counts on one side alone. Of Poisson arrivals at rate r the
    sum of what is left has the variance r E[W^3] / 3."""
    rate = arrivals / width_s
    return {
        "in_flight_by_rate": rate * float(times_s.mean()),
        "in_flight_error": math.sqrt(2 * rate * float((times_s**3).mean()) / 3) / width_s,
    }


def _fitted(values: Sequence[float]) -> tuple[float, float]:
    """Change of the least-squares line over ``values`` (slope times their number), and slope / its
    standard error with n - 2 degrees of freedom."""
    n = len(values)
    middle, mean = (n - 1) / 2, math.fsum(values) / n
    spread = math.fsum((i - middle) ** 2 for i in range(n))
    slope = math.fsum((i - middle) * value for i, value in enumerate(values)) / spread
    residue = math.fsum((value - mean - slope * (i - middle)) ** 2 for i, value in enumerate(values))
    error = math.sqrt(residue / (n - 2) / spread)
    if error <= abs(slope) / MOST_T:
        return slope * n, math.copysign(MOST_T, slope) if slope else 0.0
    return slope * n, slope / error


def _received(record: RequestRecord) -> list[tuple[float, float]]:
    """(moment, output tokens) of every chunk of one request."""
    if record.first_token_s is None:
        return []
    share = record.output_tokens / (1 + len(record.itl_s))
    return [(moment_s, share) for moment_s in accumulate(record.itl_s, initial=record.first_token_s)]


def _summary(
    duration_s: float,
    *,
    completed: int,
    input_tokens: float,
    output_tokens: float,
    latencies_of: Sequence[RequestRecord],
) -> Summary:
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    return Summary(
        duration_s=duration_s,
        completed=completed,
        requests_per_s=completed * per_s,
        input_tokens_per_s=input_tokens * per_s,
        output_tokens_per_s=output_tokens * per_s,
        ttft=distribution(record.ttft_s for record in latencies_of),
        tpot=distribution(record.tpot_s for record in latencies_of),
        itl=distribution(gap for record in latencies_of for gap in record.itl_s),
        e2el=distribution(record.e2el_s for record in latencies_of),
    )
