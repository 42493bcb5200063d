"""Faults injected under load: a table by kind and a picture over time."""

from __future__ import annotations

from collections import Counter
from statistics import median
from typing import NamedTuple

from pdlab.analysis.chaos import (
    MemoryChange,
    ServedByHealthy,
    by_kind,
    dead_at_end,
    disturbances,
    fault_outcomes,
    faulted,
    memory_change,
    recovery_s,
    served_by_healthy,
    throughput,
    total,
)
from pdlab.core.rendering import macro
from pdlab.core.text import counted
from pdlab.report.figure import DASH_DOT, DASHED, DOTTED, Dashes, Figure, Line, Span, line_panel, stacked, steps
from pdlab.report.section import ASSETS
from pdlab.report.style import HUES
from pdlab.results.chaos import REQUEST_OUTCOMES, Chaos, ChaosRequest, ChaosRun, RequestOutcome

WORDS = ASSETS / "chaos.txt"
COLORS: dict[RequestOutcome, str] = {
    "right": HUES[0],
    "error": HUES[4],
    "hang": HUES[3],
    "wrong": HUES[1],
    "left": HUES[5],
}
DASHES: dict[RequestOutcome, Dashes] = {"right": (), "error": DASHED, "hang": DASH_DOT, "wrong": DOTTED}
CALLED: dict[RequestOutcome, str] = {
    "right": "right", "error": "clean errors", "hang": "hang", "wrong": "wrong", "left": "left by their client",
}  # fmt: skip
DRAWN: tuple[RequestOutcome, ...] = ("right", "error", "hang", "wrong")
PANEL_IN = 2.6
HEADROOM = 1.12  # room for the legends
LEAST_BAND_S = 0.3  # so that a very short fault is visible
GOAL = 0.99  # of what healthy replicas could serve


def findings(chaos: Chaos) -> list[str]:
    """Why the run does not show a deployment that survives its faults, in words; empty if it does.

    A run in which nothing was injected shows nothing, and a deployment that stays dead is a finding.
    """
    outcomes, left = total(chaos.requests), chaos.run.leftovers
    found = []
    if outcomes["wrong"]:
        found.append(counted(outcomes["wrong"], "wrong answer"))
    if outcomes["hang"]:
        found.append(counted(outcomes["hang"], "request") + " without an end")
    if not any(fault.outcome == "injected" for fault in chaos.faults):
        found.append("no fault was injected")
    last = disturbances(chaos.faults)[-1:]
    dead = [fault for fault in last if recovery_s(fault, chaos.requests, chaos.run.answers) is None]
    found += [f"no recovery from the last fault ({fault.kind}) before the load ended" for fault in dead]
    if not dead and dead_at_end(chaos):
        found.append(f"no right answer among the last {chaos.run.answers} requests")
    if left is None:
        found.append("the run was interrupted")
    elif not left.nothing:
        found.append("something was left")
    if left is not None and left.missing:
        found.append("engines are missing")
    return found


def well(chaos: Chaos) -> bool:
    """Whether a fault was injected, and the deployment survived all: no `findings`."""
    return not findings(chaos)


def text(chaos: Chaos) -> str:
    """Title, table by kind of fault, and the lines below it."""
    return "\n".join([title(chaos), table(chaos), "", *lines(chaos)])


def title(chaos: Chaos) -> str:
    """One line on the run."""
    return macro(WORDS, "title", chaos.run, chaos.manifest)


def table(chaos: Chaos) -> str:
    """A row per kind of fault. A request near two faults counts in both rows."""
    kinds = [
        (kind, median(kind.recoveries_s) if kind.recoveries_s else None) for kind in by_kind(fault_outcomes(chaos))
    ]
    others = Counter((fault.kind, fault.outcome) for fault in chaos.faults if fault.outcome != "injected")
    return macro(WORDS, "table", kinds, [(*key, times) for key, times in others.items()], REQUEST_OUTCOMES)


class ChaosFacts(NamedTuple):
    """The outcomes of all requests and processes. ``counts``: outcomes, in words. ``goal``: share of ``served`` to
    reach. ``wrong``: the first wrong answers. ``findings``: why the run is not clean."""

    run: ChaosRun
    requests: int
    counts: list[str]
    faulted: int
    rounded: int
    served: ServedByHealthy | None
    goal: float
    wrong: list[ChaosRequest]
    counters: dict[str, float]
    memory: MemoryChange | None
    findings: list[str]


def lines(chaos: Chaos) -> list[str]:
    """Outcomes of all requests, what healthy replicas could serve, memory, leftovers, verdict; a sentence each."""
    outcomes = total(chaos.requests)
    facts = ChaosFacts(
        run=chaos.run,
        requests=len(chaos.requests),
        counts=[f"{outcomes[outcome]} {CALLED[outcome]}" for outcome in REQUEST_OUTCOMES if outcomes[outcome]],
        faulted=faulted(chaos),
        rounded=sum(request.rounded for request in chaos.requests),
        served=served_by_healthy(chaos),
        goal=GOAL,
        wrong=[request for request in chaos.requests if request.outcome == "wrong"][:5],
        counters={name: value for name, value in chaos.run.counters.items() if value},
        memory=memory_change(chaos.samples),
        findings=findings(chaos),
    )
    return macro(WORDS, "lines", facts).splitlines()


def figure(chaos: Chaos) -> Figure:
    """Answers per second by outcome with the faults marked, recovery of each fault, memory."""
    buckets, results = throughput(chaos), fault_outcomes(chaos)
    edges = [bucket.begins_s for bucket in buckets] + [bucket.ends_s for bucket in buckets[-1:]]
    rates = {
        outcome: Line(
            steps(edges, [bucket.per_s[outcome] for bucket in buckets]), COLORS[outcome], CALLED[outcome], dashes
        )
        for outcome, dashes in DASHES.items()
    }
    known = [(each.fault.began_s, each.recovery_s) for each in results if each.recovery_s is not None]
    none = [(each.fault.began_s, 0.0) for each in results if each.recovery_s is None]
    recoveries = [Line(known, HUES[2], width=0, marker="o"), Line(none, HUES[1], width=0, marker="x")]
    memory = [
        Line(
            [(s.at_s, s.rss_mib[part]) for s in chaos.samples if part in s.rss_mib], HUES[place % len(HUES)], part,
            () if place < len(HUES) else DASHED,
        )
        for place, part in enumerate(_parts(chaos))
    ]  # fmt: skip

    others = [rates[outcome] for outcome in DRAWN[1:]]
    panels = [
        line_panel("right answers/s", [rates["right"]], headroom=HEADROOM, height_in=1.3 * PANEL_IN),
        line_panel("others/s", others, headroom=HEADROOM, height_in=PANEL_IN, legend="upper right"),
        line_panel("recovery, s (x: none)", recoveries, headroom=HEADROOM, height_in=PANEL_IN),
        line_panel("resident, MiB", memory, headroom=HEADROOM, height_in=PANEL_IN, legend="upper left"),
    ]
    spans = [
        Span(each.fault.began_s, max(each.fault.ended_s, each.fault.began_s + LEAST_BAND_S), str(each.fault.number))
        for each in results
    ]
    name = "seconds since the load began; grey: a fault, by its number"
    return stacked(panels, name, title=title(chaos), spans=spans)


def _parts(chaos: Chaos) -> list[str]:
    return sorted({part for sample in chaos.samples for part in sample.rss_mib})


def fault_list(chaos: Chaos) -> str:
    """Every fault: its number in the picture, its time, its targets, and the recovery."""
    results = {each.fault.number: each for each in fault_outcomes(chaos)}
    return macro(WORDS, "faults", [(fault, results.get(fault.number)) for fault in chaos.faults])
