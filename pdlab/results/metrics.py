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
from collections.abc import Iterable, Iterator, Sequence
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
    ordered = sorted(records, key=lambda record: record.arrival_s)
    return window_of(
        load,
        [record.arrival_s for record in ordered],
        [_or_nan(record.first_token_s) for record in ordered],
        [_or_nan(record.finish_s) if record.ok else math.nan for record in ordered],
    )


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
    return open_window([float(value) for value in arrival_s], [float(value) for value in finish_s])


def open_window(arrival_s: Sequence[float], finish_s: Sequence[float]) -> Window | None:
    """The window of an open loop, of columns in the order of arrival (NaN: not answered); None when it would be empty.

    A request that was not answered ends nothing and opens nothing: it is judged, as one that failed.
    """
    if not arrival_s:
        return None
    last_s = arrival_s[-1]
    ended = 0
    while ended < len(arrival_s) and not finish_s[ended] > last_s:
        ended += 1
    while 0 < ended < len(arrival_s) and arrival_s[ended - 1] == arrival_s[ended]:
        ended -= 1
    e2el_s = [end - begin for begin, end in zip(arrival_s, finish_s, strict=True) if end == end]
    if not e2el_s or not ended:
        return None
    filled_s = arrival_s[0] + FILL * percentile(sorted(e2el_s), 95)
    known = [number for number in range(ended) if finish_s[number] == finish_s[number]]
    if cut := filled([finish_s[number] - arrival_s[number] for number in known]):
        filled_s = max(filled_s, arrival_s[known[cut]])
    window = Window(filled_s, arrival_s[ended - 1])
    return window if window.closes_s > window.opens_s else None


def filled(e2el_s: Sequence[float]) -> int:
    """How many of the first requests met a system that was still filling, by MSER-5: the truncation after which the
    squared standard error of the mean of the rest is least, over means of 5, at most half of them (K. P. White, An
    effective truncation heuristic for bias reduction in simulation output, Simulation 69, 1997).

    0 where what it would cut is not shorter than the rest: an empty system answers sooner, and to cut a busy spell
    at the start would choose among what was measured.
    """
    count = len(e2el_s) // BATCH
    means = [math.fsum(e2el_s[BATCH * i : BATCH * (i + 1)]) / BATCH for i in range(count)]
    total = squares = 0.0
    best, least = 0, math.inf
    middle = math.fsum(means) / count if count else 0.0  # moved there, sums of squares keep their digits
    for index in range(count - 1, -1, -1):
        total += means[index] - middle
        squares += (means[index] - middle) ** 2
        rest = count - index
        error = max(0.0, squares - total * total / rest) / rest**2
        if index <= count // 2 and error <= least:
            best, least = index, error
    if not best or math.fsum(means[:best]) / best >= math.fsum(means[best:]) / (count - best):
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


def delays_s(records: Sequence[RequestRecord]) -> tuple[float, float] | None:
    """Median E2EL of the first and of the last fifth of the arrivals; None with fewer than 3 answers in either. It
    says that a rate is far above what is served where answers take too long to leave a window."""
    ordered = sorted(records, key=lambda record: record.arrival_s)
    part = len(ordered) // 5
    ends = []
    for some in (ordered[:part], ordered[len(ordered) - part :]):
        known = sorted(record.e2el_s for record in some if record.ok and record.e2el_s is not None)
        if len(known) < PER_SLICE:
            return None
        ends.append(percentile(known, 50))
    return ends[0], ends[1]


def trend(records: Sequence[RequestRecord], load: Load) -> Trend | None:
    """Lines fitted by least squares to output tokens/s and to the mean number in flight, over equal slices
    of the steady window: 10, or fewer so that 3 requests finish in each; None below 5 slices."""
    window = steady_window(records, load)
    if window is None:
        return None
    opens_s, closes_s = window
    answered = [record for record in records if record.ok]
    finished = sum(window.holds(_or_nan(record.finish_s)) for record in answered)
    slices = min(MOST_SLICES, finished // PER_SLICE)
    if slices < FEWEST_SLICES:
        return None
    width_s = (closes_s - opens_s) / slices
    tokens, busy_s = [0.0] * slices, [0.0] * slices
    for record in answered:
        for moment_s, share in _received(record):
            if window.holds(moment_s):
                tokens[min(slices - 1, int((moment_s - opens_s) / width_s))] += share
        assert record.finish_s is not None
        for index in range(slices):
            begin_s = opens_s + index * width_s
            busy_s[index] += max(0.0, min(record.finish_s, begin_s + width_s) - max(record.arrival_s, begin_s))
    mean_tokens = math.fsum(tokens) / slices
    if not mean_tokens:
        return None
    judging = [record for record in judged(answered, load, window) if record.e2el_s is not None]
    inside = sum(opens_s <= record.arrival_s <= closes_s for record in records)
    throughput_change, throughput_t = _fitted(tokens)
    in_flight = [seconds / width_s for seconds in busy_s]
    growth, growth_t = _fitted(in_flight)
    return Trend(
        slices=slices,
        throughput_change=throughput_change / mean_tokens,
        throughput_t=throughput_t,
        in_flight_growth=growth,
        in_flight_t=growth_t,
        in_flight_mean=math.fsum(in_flight) / slices,
        arrivals=inside,
        **_little(judging, inside, closes_s - opens_s) if judging and not isinstance(load, Closed) else {},
    )


def _little(judged: Sequence[RequestRecord], arrivals: int, width_s: float) -> dict[str, float]:
    """Rate x time in the system, and its standard error against the number in flight: what is left of the requests
    in flight when the window opens, and when it closes, counts on one side alone. Of Poisson arrivals at rate r the
    sum of what is left has the variance r E[W^3] / 3."""
    times_s = [record.e2el_s or 0.0 for record in judged]
    rate = arrivals / width_s
    cubes = math.fsum(time_s**3 for time_s in times_s) / len(times_s)
    return {
        "in_flight_by_rate": rate * math.fsum(times_s) / len(times_s),
        "in_flight_error": math.sqrt(2 * rate * cubes / 3) / width_s,
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


def _received(record: RequestRecord) -> Iterator[tuple[float, float]]:
    """(moment, output tokens) of every chunk of one request."""
    if record.first_token_s is None:
        return
    share = record.output_tokens / (1 + len(record.itl_s))
    for moment_s in accumulate(record.itl_s, initial=record.first_token_s):
        yield moment_s, share


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
