"""Simulated levels -> the figures and `Run`s of the benchmark."""

from __future__ import annotations

from collections.abc import Sequence

from pdlab.results import PERCENTILES, Distribution, RequestRecord, Run, Summary
from pdlab.sim import SimulatedLevel
from pdlab.workload import Closed, Workload

LEAST_STEADY = 2  # waves of requests that must end inside the steady window, as in pdlab.metrics


def figures(level: SimulatedLevel) -> tuple[float | None, float, float]:
    """(mean TPOT s or None, mean TTFT s, requests/s) of the whole level, as the published files define them."""
    count = len(level.arrival_s)
    ttft_s = (sum(level.first_token_s) - sum(level.arrival_s)) / count
    gaps = [
        (finish - first) / (tokens - 1)
        for finish, first, tokens in zip(level.finish_s, level.first_token_s, level.output_tokens, strict=True)
        if tokens > 1
    ]
    return (sum(gaps) / len(gaps) if gaps else None), ttft_s, count / level.duration_s


def gaps(level: SimulatedLevel) -> Distribution | None:
    """Time between tokens: steps weighted by the tokens that they gave; None where no request got a second one."""
    ordered = sorted(level.gaps)
    total = sum(tokens for _, tokens in ordered)
    if not total:
        return None
    found, seen, wanted = {}, 0, list(PERCENTILES)
    for gap_s, tokens in ordered:
        seen += tokens
        while wanted and seen >= wanted[0] / 100 * total:
            found[f"p{wanted.pop(0)}"] = gap_s
    mean_s = sum(gap_s * tokens for gap_s, tokens in ordered) / total
    return Distribution(mean_s=mean_s, percentiles_s=found)


def records(level: SimulatedLevel) -> tuple[RequestRecord, ...]:
    """Every request, as the benchmark records it (gaps between chunks are not simulated)."""
    return tuple(
        RequestRecord(arrival_s=a, first_token_s=f, finish_s=e, input_tokens=i, output_tokens=o)
        for a, f, e, i, o in zip(
            level.arrival_s,
            level.first_token_s,
            level.finish_s,
            level.input_tokens,
            level.output_tokens,
            strict=True,
        )
    )


def to_run(simulated: SimulatedLevel, label: str, workload: Workload) -> Run:
    """The level as a `Run`. Gaps between tokens are those of the engines' steps, over the whole level."""
    level = simulated.level
    everything = range(len(simulated.arrival_s))
    return Run(
        origin="simulated",
        label=label,
        key=level.key,
        workload=workload,
        load=level.load,
        num_requests=len(everything),
        seed=level.seed,
        completed=len(everything),
        failed=0,
        whole=_summary(simulated, everything, everything, 0.0, simulated.duration_s).model_copy(
            update={"itl": gaps(simulated)}
        ),
        steady=_steady(simulated),
    )


def _steady(level: SimulatedLevel) -> Summary | None:
    """The window of pdlab.metrics.steady, for a closed loop."""
    load = level.level.load
    if not isinstance(load, Closed):
        return None
    count = len(level.arrival_s)
    opens_s = max(level.first_token_s[: load.concurrency])
    closes_s = max(level.arrival_s)
    finished = [i for i in range(count) if opens_s < level.finish_s[i] <= closes_s]
    if len(finished) < LEAST_STEADY * load.concurrency:
        return None
    judged = [i for i in finished if level.arrival_s[i] >= opens_s]
    return _summary(level, finished, judged, opens_s, closes_s) if judged else None


def _summary(
    level: SimulatedLevel, finished: Sequence[int], judged: Sequence[int], opens_s: float, closes_s: float
) -> Summary:
    per_s = 1 / (closes_s - opens_s)
    tokens = 0.0
    for i, (first_s, last_s) in enumerate(zip(level.first_token_s, level.finish_s, strict=True)):
        inside_s = min(last_s, closes_s) - max(first_s, opens_s)
        if inside_s >= 0:
            tokens += level.output_tokens[i] * (inside_s / (last_s - first_s) if last_s > first_s else 1.0)
    ttft = [level.first_token_s[i] - level.arrival_s[i] for i in judged]
    e2el = [level.finish_s[i] - level.arrival_s[i] for i in judged]
    tpot = [
        (level.finish_s[i] - level.first_token_s[i]) / (level.output_tokens[i] - 1)
        for i in judged
        if level.output_tokens[i] > 1
    ]
    return Summary(
        duration_s=closes_s - opens_s,
        completed=len(finished),
        requests_per_s=len(finished) * per_s,
        input_tokens_per_s=sum(level.input_tokens[i] for i in finished) * per_s,
        output_tokens_per_s=tokens * per_s,
        ttft=_distribution(ttft),
        tpot=_distribution(tpot) if tpot else None,
        e2el=_distribution(e2el),
    )


def _distribution(values: list[float]) -> Distribution:
    ordered = sorted(values)
    last = len(ordered) - 1

    def at(q: float) -> float:
        place = q / 100 * last
        low = int(place)
        high = min(low + 1, last)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    return Distribution(mean_s=sum(ordered) / len(ordered), percentiles_s={f"p{q}": at(q) for q in PERCENTILES})
