"""The requests of one level (`LevelData`) -> figures. Pure.

**Whole run**: every answered request; duration from the first arrival to the last finish.

**Steady state**: without ramp-up and drain, by one rule:

- Closed loop with concurrency N: the window opens when the first N requests have all had their first token, which ends
  the burst of prompts at the start. It closes when the last request arrives; after that the number in flight falls. It
  is undefined if fewer than 2 N requests finish inside.
- Open loop: the window opens when the system has filled. That is 2 times the 95th percentile of E2EL after the first
  arrival, and not before the truncation point of MSER-5 (`mser_cut`). It closes so that the load lasts until the last
  judged request has ended. That is the last arrival before the first request that was in flight when the last request
  arrived. It is undefined if fewer than 20 requests arrive inside.

Rates count events inside the window: a finish as one request and its input tokens, a received chunk as its share of the
request's output tokens. A chunk may carry several tokens. Latencies are of requests that arrive inside. In a closed
loop they must also finish inside; with equal lengths that leaves out only the first and the last wave. In an open loop
later finishes count too, because the slowest requests would be lost otherwise. By the rule they end while the load
lasts.

A ramp has no steady state, and a replay need not have one. `pdlab.bench.gates` has the rules that make a level invalid.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from pdlab.core.workload import Closed, Load, Ramp, Replay
from pdlab.results.columns import AT_ONCE, by_parts, elements, sorted_known
from pdlab.results.schema import PERCENTILES, Distribution, Summary, Trend

if TYPE_CHECKING:
    from pdlab.results.level_data import Column, LevelData, Mask

FILL = 2.0  # times the 95th percentile of E2EL
OPEN_LEAST = 20
BATCH = 5  # requests whose mean is one value of MSER-5
CLOSED_LEAST = 2  # times the concurrency
MOST_SLICES, FEWEST_SLICES, PER_SLICE = 10, 5, 3
MOST_T = 1e6  # t of a fit without residue


class LoadWindow(NamedTuple):
    """The steady part of a level, in seconds since the level began. NaN in a column: that moment never came."""

    opens_s: float
    closes_s: float

    @property
    def length_s(self) -> float:
        return self.closes_s - self.opens_s

    def holds(self, moment_s: Column) -> Mask:
        """Whether an event at each moment counts towards a rate."""
        return (moment_s > self.opens_s) & (moment_s <= self.closes_s)

    def judges(self, requests: LevelData, load: Load) -> Mask:
        """The requests that judge the level: those that arrive in the window, failed ones included. In a closed loop
        those that finish after it are left out."""
        arrived = (requests.arrival_s >= self.opens_s) & (requests.arrival_s <= self.closes_s)
        if not isinstance(load, Closed):
            return arrived
        return arrived & ((requests.finish_s <= self.closes_s) | ~requests.ok)


def student_t(probability: float, dof: float) -> float:
    """Quantile of Student's t: the x with P(T <= x) = ``probability``, which is in (0, 1).

    ``dof`` is above 0; infinity gives the normal distribution.
    """
    from scipy.special import stdtrit

    return float(stdtrit(dof, probability))


def percentile(ordered: Sequence[float] | Column, q: float) -> float:
    """The ``q``-th percentile (0 to 100) of sorted values, linear between neighbours (numpy's default)."""
    position = (len(ordered) - 1) * q / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return float(ordered[low] + (ordered[high] - ordered[low]) * (position - low))


def distribution(values_s: Iterable[float]) -> Distribution | None:
    """Mean and percentiles of the values that are not NaN; None if there is none."""
    import numpy as np

    values = np.asarray(values_s if isinstance(values_s, np.ndarray) else list(values_s), dtype=np.float64)
    ordered = sorted_known(values)
    if not len(ordered):
        return None
    return Distribution(
        mean_s=math.fsum(elements(ordered)) / len(ordered),
        percentiles_s={f"p{q}": percentile(ordered, q) for q in PERCENTILES},
    )


def mean_requested_tokens(requests: LevelData) -> tuple[float, float] | None:
    """Mean input and output tokens that all requests are to have; None if lengths do not vary."""
    import numpy as np

    varied = ~np.isnan(requests.requested_input)
    if not varied.any():
        return None
    return float(requests.requested_input[varied].mean()), float(requests.requested_output[varied].mean())


def whole(requests: LevelData) -> Summary:
    """Figures over all answered requests. Rates are 0 without answers."""
    answered = requests.answered
    began_s = float(requests.arrival_s[0]) if len(requests) else 0.0
    ended_s = float(answered.finish_s.max()) if len(answered) else began_s
    return _summary(ended_s - began_s, answered.input_tokens, float(answered.output_tokens.sum()), answered)


def steady(requests: LevelData, load: Load, window: LoadWindow | None = None) -> Summary | None:
    """Figures without ramp-up and drain, by the rule above; None if undefined. ``window``: default the level's own."""
    window = window or steady_window(requests, load)
    if window is None:
        return None
    finished = requests.input_tokens[window.holds(requests.finish_s)]
    counted = requests.part(window.judges(requests, load) & requests.ok)
    if is_short(load, len(finished), len(counted)):
        return None
    received = chain.from_iterable(tokens.tolist() for _, tokens in _received(requests, window))
    return _summary(window.length_s, finished, sum(received), counted)


def _received(requests: LevelData, window: LoadWindow) -> Iterator[tuple[Column, Column]]:
    """Moments and tokens of the chunks in the window, part by part."""
    moment_s, tokens = requests.chunks
    for at in range(0, len(moment_s), AT_ONCE):
        own_s = moment_s[at : at + AT_ONCE]
        inside = window.holds(own_s)
        yield own_s[inside], tokens[at : at + AT_ONCE][inside]


def is_short(load: Load, finished: int, judged: int) -> bool:
    """Whether these numbers of requests are too small for a steady state."""
    return finished < CLOSED_LEAST * load.concurrency if isinstance(load, Closed) else judged < OPEN_LEAST


def steady_window(requests: LevelData, load: Load) -> LoadWindow | None:
    """The window by the rule above; None if it would be empty."""
    import numpy as np

    if not len(requests) or isinstance(load, Ramp | Replay):
        return None
    if isinstance(load, Closed):
        burst_s = requests.first_token_s[: load.concurrency]
        if np.isnan(burst_s).all():
            return None
        window = LoadWindow(float(np.nanmax(burst_s)), float(requests.arrival_s[-1]))
        return window if window.length_s > 0 else None
    return open_window(requests)


def open_window(requests: LevelData, *, until_level: bool = True) -> LoadWindow | None:
    """The window of an open loop; None if it would be empty. ``until_level``: it opens where E2EL stops growing.

    A request without an answer ends nothing and opens nothing; it is judged as failed.
    """
    import numpy as np

    ended = count_before_backlog(requests)
    known = np.flatnonzero(requests.ok)
    if not len(known) or not ended:
        return None
    filled_s = float(requests.arrival_s[0] + FILL * np.percentile(requests.e2el_s[known], 95))
    known = known[known < ended]
    if until_level and (cut := mser_cut(requests.e2el_s[known])):
        filled_s = max(filled_s, float(requests.arrival_s[known[cut]]))
    window = LoadWindow(filled_s, float(requests.arrival_s[ended - 1]))
    return window if window.length_s > 0 else None


def count_before_backlog(requests: LevelData) -> int:
    """How many of the first requests of an open loop had ended before the last request arrived.

    Counts the requests before the first that was then still in flight, and before all that arrived together with it.
    """
    import numpy as np

    late = np.flatnonzero(requests.finish_s > requests.arrival_s[-1])
    if not len(late):
        return len(requests)
    return int(np.searchsorted(requests.arrival_s, requests.arrival_s[late[0]]))


def mser_cut(e2el_s: Column) -> int:
    """How many of the first requests met a system that was still filling, by MSER-5.

    MSER-5 truncates where the squared standard error of the mean of the rest is least, over means of 5, at most half of
    them (K. P. White, An effective truncation heuristic for bias reduction in simulation output, Simulation 69, 1997).

    0 if the requests to be cut were not faster than the rest. An empty system answers sooner; to cut a busy spell at
    the start would select among the measurements.
    """
    import numpy as np

    count = len(e2el_s) // BATCH
    if not count:
        return 0
    means = e2el_s[: BATCH * count].reshape(count, BATCH).mean(axis=1)
    off = means - means.mean()  # centred, so that sums of squares keep their precision
    rest = np.arange(count, 0, -1)
    total, squares = off[::-1].cumsum()[::-1], (off**2)[::-1].cumsum()[::-1]
    error = np.maximum(0.0, squares - total**2 / rest) / rest**2
    best = int(error[: count // 2 + 1].argmin())
    if not best or means[:best].mean() >= means[best:].mean():
        return 0
    return BATCH * best


class DelaysS(NamedTuple):
    """Median E2EL of the first and of the last fifth of the arrivals, seconds."""

    first: float
    last: float


def first_and_last_e2el(requests: LevelData) -> DelaysS | None:
    """None with fewer than 3 answers in either fifth.

    Shows that a rate is far above capacity if answers take too long for a steady window.
    """
    import numpy as np

    part = len(requests) // 5
    ends = []
    for some in (requests.e2el_s[:part], requests.e2el_s[len(requests) - part :]):
        known = some[~np.isnan(some)]
        if len(known) < PER_SLICE:
            return None
        ends.append(float(np.median(known)))
    return DelaysS(*ends)


def trend(requests: LevelData, load: Load, window: LoadWindow | None = None) -> Trend | None:
    """Least-squares lines through output tokens/s and the mean number in flight, over equal slices of the steady
    window.

    There are 10 slices, or fewer so that 3 requests finish in each; None below 5 slices. ``window``: default the
    level's own.
    """
    import numpy as np

    window = window or steady_window(requests, load)
    if window is None:
        return None
    answered = requests.answered
    slices = min(MOST_SLICES, int(window.holds(answered.finish_s).sum()) // PER_SLICE)
    if slices < FEWEST_SLICES:
        return None
    width_s = window.length_s / slices
    tokens = np.zeros(slices)
    for moment_s, shares in _received(requests, window):
        number = np.minimum(slices - 1, (moment_s - window.opens_s) / width_s).astype(np.int64)
        np.add.at(tokens, number, shares)
    begins = window.opens_s + width_s * np.arange(slices)

    def busy_s(at: float) -> float:
        def within_s(finish_s: Column, arrival_s: Column) -> Column:
            own_s: Column = np.minimum(finish_s, at + width_s) - np.maximum(arrival_s, at)
            return own_s.clip(0)

        return float(by_parts(within_s, answered.finish_s, answered.arrival_s).sum())

    mean_tokens = float(tokens.mean())
    if not mean_tokens:
        return None
    times_s = answered.e2el_s[window.judges(answered, load)]
    arrivals = int(((requests.arrival_s >= window.opens_s) & (requests.arrival_s <= window.closes_s)).sum())
    throughput_change, throughput_t = _fitted(tokens.tolist())
    in_flight = [busy_s(at) / width_s for at in begins]
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
    """Rate x time in the system, and its standard error against the number in flight.

    The rest of a request that is in flight when the window opens or closes counts on one side only. For Poisson
    arrivals at rate r the sum of these rests has the variance r E[W^3] / 3.
    """
    rate = arrivals / width_s
    return {
        "in_flight_by_rate": rate * float(times_s.mean()),
        "in_flight_error": math.sqrt(2 * rate * float((times_s**3).mean()) / 3) / width_s,
    }


def _fitted(values: Sequence[float]) -> tuple[float, float]:
    """Change of the least-squares line over ``values``, and slope / standard error with n - 2 degrees of freedom."""
    n, (slope, rest) = len(values), fitted_line(values)
    spread = math.fsum((i - (n - 1) / 2) ** 2 for i in range(n))
    error = math.sqrt(math.fsum(value**2 for value in rest) / (n - 2) / spread)
    if error <= abs(slope) / MOST_T:
        return slope * n, math.copysign(MOST_T, slope) if slope else 0.0
    return slope * n, slope / error


class FittedLine(NamedTuple):
    """A least-squares line over equally spaced values: its slope per step, and what is left of each value."""

    slope: float
    rest: list[float]


def fitted_line(values: Sequence[float]) -> FittedLine:
    """The least-squares line over two or more values."""
    middle, mean = (len(values) - 1) / 2, math.fsum(values) / len(values)
    slope = math.fsum((i - middle) * value for i, value in enumerate(values))
    slope /= math.fsum((i - middle) ** 2 for i in range(len(values)))
    return FittedLine(slope, [value - mean - slope * (i - middle) for i, value in enumerate(values)])


def _summary(duration_s: float, finished: Column, output_tokens: float, judged: LevelData) -> Summary:
    """Rates are of the requests that ``finished``, given by their input tokens; latencies are of ``judged``."""
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    return Summary(
        duration_s=duration_s,
        completed=len(finished),
        judged=len(judged),
        requests_per_s=len(finished) * per_s,
        input_tokens_per_s=float(finished.sum()) * per_s,
        output_tokens_per_s=output_tokens * per_s,
        ttft=distribution(judged.ttft_s),
        tpot=distribution(judged.tpot_s),
        itl=distribution(judged.gaps_s),
        e2el=distribution(judged.e2el_s),
    )
