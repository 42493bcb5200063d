"""Faults and the requests around them -> outcomes, recovery, throughput, memory. Pure.

A request belongs to a fault if it was in flight when the fault began, or was sent from then until the deployment had
recovered (or the next fault began). Recovery: a given number of requests, sent one after the other after the fault's
last act, were all answered right. Its moment is the end of the first of them. Requests are taken in the order of
sending, so that a hanging request does not end a recovery.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from pdlab.results.chaos import REQUEST_OUTCOMES, Chaos, ChaosRequest, ChaosSample, InjectedFault, RequestOutcome

BUCKET_S = 1.0
MOST_BUCKETS = 400
FLAT = 0.05  # growth of resident memory from the first third to the last that counts as flat
LEAST_SAMPLES = 6
MIB_NOISE = 32.0  # of all processes together: allocators of new processes fill up


def recovery_s(fault: InjectedFault, requests: Sequence[ChaosRequest], answers: int) -> float | None:
    """Seconds from the begin of the fault to the end of the first of ``answers`` right answers in a row; None: never.

    All of them are sent after the fault's last act, because a killed process may answer for another second. Requests
    whose client left on purpose are skipped.
    """
    over_s = max(fault.began_s, fault.ended_s)
    after = sorted((r for r in requests if r.sent_s >= over_s and r.outcome != "left"), key=lambda r: r.sent_s)
    row: list[ChaosRequest] = []
    for request in after:
        row = [*row, request] if request.outcome == "right" else []
        if len(row) == answers:
            return max(0.0, row[0].end_s - fault.began_s)
    return None


class FaultOutcome(NamedTuple):
    """One fault and the outcomes of the requests that belong to it.

    ``next_s``: when the next fault began; infinite for the last fault. ``right_after_s``: the time until requests were
    right again, also beyond the next fault; None: never. ``slowest_error_s``: from the beginning of the fault, or from
    the sending of the request if that was later, to the end of the error; None without errors.
    """

    fault: InjectedFault
    next_s: float
    right_after_s: float | None
    outcomes: dict[RequestOutcome, int]
    slowest_error_s: float | None

    @property
    def recovery_s(self) -> float | None:
        """The recovery from this fault: None if there was none before the next fault, or before the end."""
        late = self.right_after_s is None or self.fault.began_s + self.right_after_s > self.next_s
        return None if late else self.right_after_s

    @property
    def overtaken(self) -> bool:
        """Whether the next fault began before a recovery: what came after it is not of this fault alone."""
        return self.recovery_s is None and self.next_s < math.inf

    @property
    def never(self) -> bool:
        """Whether there was no recovery, and no later fault that explains it."""
        return self.recovery_s is None and not self.overtaken

    @property
    def over_s(self) -> float:
        """When the fault had ended and the deployment had recovered; infinite if it never recovered."""
        return _over_s(self.fault, self.right_after_s)

    @property
    def requests(self) -> int:
        """Their number, without those whose client left."""
        return sum(count for outcome, count in self.outcomes.items() if outcome != "left")


def fault_outcomes(chaos: Chaos) -> list[FaultOutcome]:
    """One for each injected fault, in order of time."""
    disturbing = disturbances(chaos.faults)
    results = []
    for place, fault in enumerate(disturbing):
        if fault.outcome != "injected":
            continue
        next_s = disturbing[place + 1].began_s if place + 1 < len(disturbing) else math.inf
        took_s = recovery_s(fault, chaos.requests, chaos.run.answers)
        until_s = min(next_s, _over_s(fault, took_s))
        hit = [r for r in chaos.requests if r.end_s >= fault.began_s and r.sent_s < until_s]
        late = [r.end_s - max(r.sent_s, fault.began_s) for r in hit if r.outcome == "error"]
        results.append(FaultOutcome(fault, next_s, took_s, total(hit), max(late, default=None)))
    return results


def disturbances(faults: Sequence[InjectedFault]) -> list[InjectedFault]:
    """Faults that did something to the deployment, in order of time: all acts, or the first of them."""
    return sorted((fault for fault in faults if fault.outcome == "injected" or fault.acts), key=lambda f: f.began_s)


def dead_at_end(chaos: Chaos) -> bool:
    """Whether none of the last requests was right, as many as a recovery needs. Requests that were left do not
    count."""
    answered = sorted((r for r in chaos.requests if r.outcome != "left"), key=lambda r: r.sent_s)
    return not any(r.outcome == "right" for r in answered[-chaos.run.answers :])


def _over_s(fault: InjectedFault, recovery_s: float | None) -> float:
    return math.inf if recovery_s is None else max(fault.ended_s, fault.began_s + recovery_s)


class KindOutcome(NamedTuple):
    """All faults of one kind. ``recoveries_s``: of those that recovered; ``overtaken``: how many did not before the
    next fault; ``never``: how many did not before the end."""

    kind: str
    faults: int
    outcomes: dict[RequestOutcome, int]
    recoveries_s: tuple[float, ...]
    overtaken: int
    never: int
    slowest_error_s: float | None


def by_kind(results: Sequence[FaultOutcome]) -> list[KindOutcome]:
    """In the order in which the kinds first came."""
    kinds = []
    for kind in dict.fromkeys(each.fault.kind for each in results):
        same = [each for each in results if each.fault.kind == kind]
        slowest = [each.slowest_error_s for each in same if each.slowest_error_s is not None]
        kinds.append(
            KindOutcome(
                kind=kind,
                faults=len(same),
                outcomes={outcome: sum(each.outcomes[outcome] for each in same) for outcome in REQUEST_OUTCOMES},
                recoveries_s=tuple(each.recovery_s for each in same if each.recovery_s is not None),
                overtaken=sum(each.overtaken for each in same),
                never=sum(each.never for each in same),
                slowest_error_s=max(slowest, default=None),
            )
        )
    return kinds


def total(requests: Sequence[ChaosRequest]) -> dict[RequestOutcome, int]:
    """How many requests had each outcome."""
    return {outcome: sum(r.outcome == outcome for r in requests) for outcome in REQUEST_OUTCOMES}


def faulted(chaos: Chaos) -> int:
    """Number of requests that belong to at least one fault, without those whose client left."""
    spans = [(each.fault.began_s, min(each.next_s, each.over_s)) for each in fault_outcomes(chaos)]
    return sum(
        any(r.end_s >= began and r.sent_s < until for began, until in spans)
        for r in chaos.requests
        if r.outcome != "left"
    )


class ServedByHealthy(NamedTuple):
    """``right`` of ``requests`` that healthy replicas could serve."""

    right: int
    requests: int

    @property
    def share(self) -> float:
        return self.right / self.requests


def served_by_healthy(chaos: Chaos) -> ServedByHealthy | None:
    """Requests that healthy replicas could serve, and how many were answered right; None if there were none.

    Such a request was sent at or after the begin of a fault that spared a replica of every pool. It was sent before the
    deployment had recovered and all its replicas ran again (or the next fault began). No other fault that spared no
    replica was in effect when it was sent.

    Requests in flight when the fault began are left out: the client cannot see whether a hit replica worked on them.
    So are those whose client left. A fault of a single act (a kill) counts from its end, because it takes effect
    between its begin and its end, tens of milliseconds apart on a busy machine.
    """
    within: dict[int, ChaosRequest] = {}
    without: set[int] = set()
    for each in fault_outcomes(chaos):
        fault = each.fault
        own_end_s = max(each.over_s, whole_s(chaos.samples, fault.ended_s) or 0.0)
        end_s = min(each.next_s, own_end_s) if fault.spared else own_end_s
        since_s = fault.ended_s if len(fault.acts) == 1 else fault.began_s
        hit = [r for r in chaos.requests if since_s <= r.sent_s < end_s and r.outcome != "left"]
        if fault.spared:
            within |= {r.number: r for r in hit}
        else:
            without |= {r.number for r in hit}
    counted = [r for number, r in within.items() if number not in without]
    return ServedByHealthy(sum(r.outcome == "right" for r in counted), len(counted)) if counted else None


def whole_s(samples: Sequence[ChaosSample], since_s: float) -> float | None:
    """When all replicas ran again after one was missing after ``since_s``, by the samples. None: none was missing, or
    they never all ran again."""
    all_running = next((each.running for each in samples if each.running), None)
    missed = False
    for each in samples:
        if each.at_s >= since_s and each.running:
            if missed and each.running == all_running:
                return each.at_s
            missed = missed or each.running != all_running
    return None


class ThroughputBin(NamedTuple):
    """Requests per second that ended in a time bin, by outcome."""

    begins_s: float
    ends_s: float
    per_s: dict[RequestOutcome, float]


def throughput(chaos: Chaos) -> list[ThroughputBin]:
    """Bins over the time of the load, of a second or more each."""
    length_s = max([chaos.run.loaded_s, *(r.end_s for r in chaos.requests)], default=0.0)
    width_s = max(BUCKET_S, math.ceil(length_s / MOST_BUCKETS))
    count = max(1, math.ceil(length_s / width_s))
    counts: list[dict[RequestOutcome, int]] = [dict.fromkeys(REQUEST_OUTCOMES, 0) for _ in range(count)]
    for request in chaos.requests:
        counts[min(count - 1, int(request.end_s / width_s))][request.outcome] += 1
    return [
        ThroughputBin(i * width_s, (i + 1) * width_s, {outcome: number / width_s for outcome, number in each.items()})
        for i, each in enumerate(counts)
    ]


class MemoryChange(NamedTuple):
    """Resident MiB of all parts together: medians of the first and the last third of the samples."""

    first_mib: float
    last_mib: float

    @property
    def ratio(self) -> float:
        return self.last_mib / self.first_mib

    @property
    def flat(self) -> bool:
        grown_mib = self.last_mib - self.first_mib
        return grown_mib <= max(FLAT * self.first_mib, MIB_NOISE)


def memory_change(samples: Sequence[ChaosSample]) -> MemoryChange | None:
    """Of all parts together; None with too few samples. Medians, because a sample lacks an engine that is down."""
    ordered = sorted(samples, key=lambda sample: sample.at_s)
    values = [sum(sample.rss_mib.values()) for sample in ordered if sample.rss_mib]
    third = len(values) // 3
    if len(values) < LEAST_SAMPLES or not third or median(values[:third]) <= 0:
        return None
    return MemoryChange(median(values[:third]), median(values[-third:]))
