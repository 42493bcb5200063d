"""Records of one level -> figures and validity. Pure.

**Whole run**: every request that was answered; duration from the first arrival to the last finish.

**Steady state**: ramp-up and drain cut off by one rule.

- Closed loop with concurrency N: the window opens when the first N requests have all had their
  first token (the burst of simultaneous prompts at the start is over) and closes when the last
  request arrives (from then on the number in flight falls). Not defined when fewer than 2 N
  requests finish inside.
- Open loop: the window goes from the arrival after the first 10 % of requests to the arrival
  before the last 10 %. Not defined when fewer than 20 requests arrive inside.

Rates count what happens inside the window: a finish as one request and its input tokens, a received
chunk as its share of the request's output tokens (a chunk may carry several). Latencies are of
requests that arrive inside it and, for the closed loop, also finish inside: with equal lengths that
leaves out the first and the last wave and nothing else. For the open loop later finishes count too,
because leaving them out would drop the slowest.

**Gates**: rules after which a level does not count; each yields its reasons. New ones join `GATES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

from pydantic import Field

from pdlab.results import PERCENTILES, Distribution, NixlCounters, RequestRecord, Summary, Validity
from pdlab.spec import Frozen
from pdlab.workload import Closed, Load, Workload

OPEN_CUT = 0.1
OPEN_LEAST = 20
MAX_CPU_SHARE = 0.9
MAX_LOOP_LAG_S = 0.1


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
    opens_s, closes_s = window
    answered = [record for record in records if record.ok]

    def inside(moment_s: float | None) -> bool:
        return moment_s is not None and opens_s < moment_s <= closes_s

    finished = [record for record in answered if inside(record.finish_s)]
    if isinstance(load, Closed):
        if len(finished) < 2 * load.concurrency:
            return None
        judged = [record for record in finished if record.arrival_s >= opens_s]
    else:
        judged = [record for record in answered if opens_s <= record.arrival_s <= closes_s]
        if len(judged) < OPEN_LEAST:
            return None
    return _summary(
        closes_s - opens_s,
        completed=len(finished),
        input_tokens=sum(record.input_tokens for record in finished),
        output_tokens=sum(tokens for record in answered for moment_s, tokens in _received(record) if inside(moment_s)),
        latencies_of=judged,
    )


def steady_window(records: Sequence[RequestRecord], load: Load) -> tuple[float, float] | None:
    """(opens, closes) in seconds since the level began; None when it would be empty."""
    ordered = sorted(records, key=lambda record: record.arrival_s)
    if not ordered:
        return None
    if isinstance(load, Closed):
        burst = [record.first_token_s for record in ordered[: load.concurrency] if record.first_token_s is not None]
        if not burst:
            return None
        opens_s, closes_s = max(burst), ordered[-1].arrival_s
    else:
        cut = math.ceil(OPEN_CUT * len(ordered))
        if 2 * cut >= len(ordered):
            return None
        opens_s, closes_s = ordered[cut].arrival_s, ordered[-1 - cut].arrival_s
    return (opens_s, closes_s) if closes_s > opens_s else None


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


class Outcome(Frozen):
    """All that a gate may look at. ``kv_expected``: the deployment moves KV cache and its counters
    were asked for; ``counters_error`` says why they could not be read."""

    records: tuple[RequestRecord, ...]
    workload: Workload
    num_requests: int = Field(ge=1)
    kv_expected: bool = False
    nixl_before: NixlCounters | None = None
    nixl_after: NixlCounters | None = None
    counters_error: str | None = None
    client_cpu_share: float | None = None
    client_loop_lag_s: float | None = None


def validate_level(outcome: Outcome) -> Validity:
    """Ask every gate."""
    return Validity(reasons=tuple(reason for gate in GATES for reason in gate(outcome)))


def failed_requests(outcome: Outcome) -> Iterator[str]:
    """A request that was not sent, or not answered to its end."""
    total = outcome.num_requests
    if len(outcome.records) != total:
        yield f"{len(outcome.records)} of {total} requests were recorded"
    failed = [record for record in outcome.records if not record.ok]
    if failed:
        yield f"{len(failed)} of {total} requests failed (first: {failed[0].error or 'no answer'})"


def token_counts(outcome: Outcome) -> Iterator[str]:
    """An answered request whose token counts, as the server reports them, are not those asked for."""
    asked = {"input": outcome.workload.sent_input_tokens, "output": outcome.workload.sent_output_tokens}
    answered = [record for record in outcome.records if record.ok]
    for side, expected in asked.items():
        counts = [record.input_tokens if side == "input" else record.output_tokens for record in answered]
        wrong = [count for count in counts if count != expected]
        if wrong:
            yield f"{len(wrong)} of {len(counts)} answers have a wrong {side} token count ({wrong[0]}, not {expected})"


def kv_transfers(outcome: Outcome) -> Iterator[str]:
    """A KV transfer that failed or expired, or transfers that cannot be seen where they must happen."""
    if outcome.counters_error:
        yield f"KV-transfer counters could not be read ({outcome.counters_error})"
        return
    before, after = outcome.nixl_before, outcome.nixl_after
    if after is None:
        return
    delta = {
        name: value - ((getattr(before, name) if before else None) or 0.0)
        for name in NixlCounters.model_fields
        if (value := getattr(after, name)) is not None
    }
    names = {
        "failed_transfers": "KV transfers failed",
        "failed_notifications": "KV-transfer notifications failed",
        "kv_expired_requests": "requests' KV blocks expired before decode took them",
    }
    for name, words in names.items():
        if delta.get(name, 0.0) > 0:
            yield f"{delta[name]:g} {words}"
    if any(value < 0 for value in delta.values()):
        yield "KV-transfer counters went back: an engine was restarted during the level"
    elif outcome.kv_expected and any(r.ok for r in outcome.records) and not delta.get("bytes_transferred"):
        yield "no KV bytes were transferred, by vLLM's counters"


def saturated_client(outcome: Outcome) -> Iterator[str]:
    """The load generator was the bottleneck: above 0.9 of one core, or its event loop late by more
    than 100 ms (95th percentile): its timestamps then measure itself."""
    if outcome.client_cpu_share is not None and outcome.client_cpu_share > MAX_CPU_SHARE:
        yield f"load generator saturated: {outcome.client_cpu_share:.2f} of one core (limit {MAX_CPU_SHARE})"
    if outcome.client_loop_lag_s is not None and outcome.client_loop_lag_s > MAX_LOOP_LAG_S:
        lag_ms = 1000 * outcome.client_loop_lag_s
        yield f"load generator saturated: event loop late by {lag_ms:.0f} ms (p95, limit {1000 * MAX_LOOP_LAG_S:.0f})"


Gate = Callable[[Outcome], Iterator[str]]
GATES: tuple[Gate, ...] = (failed_requests, token_counts, kv_transfers, saturated_client)
