"""Faults made under load: a table by kind, a picture over time, a drawing in a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from pdlab.analysis.chaos import (
    Bucket,
    MemoryChange,
    ServedByHealthy,
    by_kind,
    faulted,
    memory_change,
    outcomes,
    served_by_healthy,
    throughput,
    total,
)
from pdlab.core import text as core_text
from pdlab.core.rendering import said
from pdlab.report.style import HUES, STYLE_FILE, save
from pdlab.results.chaos import FATES, Chaos, ChaosRequest, ChaosRun, Fate

WORDS = Path(__file__).parent / "assets" / "chaos.txt"
COLORS: dict[Fate, str] = {"right": HUES[0], "error": HUES[4], "hang": HUES[3], "wrong": HUES[1], "left": HUES[5]}
DASHES: dict[Fate, str] = {"right": "-", "error": "--", "hang": "-.", "wrong": ":"}
CALLED: dict[Fate, str] = {
    "right": "right", "error": "clean errors", "hang": "hang", "wrong": "wrong", "left": "left by their client",
}  # fmt: skip
DRAWN: tuple[Fate, ...] = ("right", "error", "hang", "wrong")
PANEL = (9.0, 2.6)
WIDTH, HEIGHT, LEFT, BELOW = 640, 190, 58, 26  # of a drawing in a page
HEADROOM = 1.12  # for the legends
LEAST_BAND_S = 0.3  # what is over at once can be looked at too
GOAL = 0.99  # of what healthy replicas could serve


def well(chaos: Chaos) -> bool:
    """No wrong answer, no hang, nothing left, and it went to its end."""
    fates = total(chaos.requests)
    left = chaos.run.leftovers
    return not fates["wrong"] and not fates["hang"] and left is not None and left.nothing


def text(chaos: Chaos) -> str:
    """Title, table by kind of fault, and the lines below it."""
    return "\n".join([title(chaos), table(chaos), "", *lines(chaos)])


def title(chaos: Chaos) -> str:
    """What this was, in one line."""
    return said(WORDS, "title", chaos.run, chaos.manifest.rehearsal)


def table(chaos: Chaos) -> str:
    """A row per kind of fault. A request near two faults counts in both rows."""
    kinds = [(kind, median(kind.recoveries_s) if kind.recoveries_s else None) for kind in by_kind(outcomes(chaos))]
    skipped: dict[str, list[str]] = {}
    for fault in chaos.faults:
        if fault.outcome != "injected":
            skipped.setdefault(fault.kind, []).append(fault.outcome)
    return said(WORDS, "table", kinds, [(name, each[0], len(each)) for name, each in skipped.items()], FATES)


class ChaosFacts(NamedTuple):
    """What became of all requests and processes. ``counts``: fates, in words; ``goal``: share of `served` to reach;
    ``wrong``: the first wrong answers."""

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


def lines(chaos: Chaos) -> list[str]:
    """Fates of all requests, what healthy replicas could serve, memory, and what is left, a sentence each."""
    fates = total(chaos.requests)
    facts = ChaosFacts(
        run=chaos.run,
        requests=len(chaos.requests),
        counts=[f"{fates[fate]} {CALLED[fate]}" for fate in FATES if fates[fate]],
        faulted=faulted(chaos),
        rounded=sum(request.rounded for request in chaos.requests),
        served=served_by_healthy(chaos),
        goal=GOAL,
        wrong=[request for request in chaos.requests if request.fate == "wrong"][:5],
        counters={name: value for name, value in chaos.run.counters.items() if value},
        memory=memory_change(chaos.samples),
    )
    return said(WORDS, "lines", facts).splitlines()


def draw(chaos: Chaos, path: Path) -> None:
    """Answers per second by fate with the faults marked, recovery of each fault, memory (png, svg or pdf). Raises
    StoreError."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    buckets, results = throughput(chaos), outcomes(chaos)
    with plt.style.context(STYLE_FILE):
        figure, panels = plt.subplots(
            4, 1, figsize=(PANEL[0], 4 * PANEL[1]), sharex=True, layout="constrained",
            height_ratios=[1.3, 1.0, 1.0, 1.0],
        )  # fmt: skip
        try:
            rate, bad, recovery, memory = panels
            for fate in DRAWN:
                axes = rate if fate == "right" else bad
                xs, ys = _steps(buckets, fate)
                axes.plot(xs, ys, linestyle=DASHES[fate], color=COLORS[fate], label=CALLED[fate])
            rate.set_ylabel("right answers/s")
            bad.set_ylabel("others/s")
            bad.legend(frameon=False, fontsize=8, loc="upper right")
            for each in results:
                ends_s = max(each.fault.ended_s, each.fault.began_s + LEAST_BAND_S)
                for axes in panels:
                    axes.axvspan(each.fault.began_s, ends_s, color="#bbb", alpha=0.5, lw=0)
                rate.annotate(
                    str(each.fault.number), (each.fault.began_s, 1.0), xycoords=("data", "axes fraction"), fontsize=7,
                    ha="left", va="bottom",
                )  # fmt: skip
                known = each.recovery_s is not None
                recovery.plot(
                    [each.fault.began_s], [each.recovery_s if known else 0.0], "o" if known else "x",
                    color=HUES[2] if known else HUES[1],
                )  # fmt: skip
            recovery.set_ylabel("recovery, s (x: never)")
            for place, part in enumerate(_parts(chaos)):
                points = [(s.at_s, s.rss_mib[part]) for s in chaos.samples if part in s.rss_mib]
                look, color = "-" if place < len(HUES) else "--", HUES[place % len(HUES)]
                memory.plot([x for x, _ in points], [y for _, y in points], look, color=color, label=part)
            memory.set_ylabel("resident, MiB")
            if chaos.samples:
                memory.legend(frameon=False, fontsize=7, ncols=3, loc="upper left")
            for axes in panels:
                axes.set_ylim(0, HEADROOM * axes.get_ylim()[1])
            panels[-1].set_xlabel("seconds since the load began; grey: a fault, by its number")
            rate.set_title(title(chaos), fontsize=9, pad=14)
            save(figure, path)
        finally:
            plt.close(figure)


def _parts(chaos: Chaos) -> list[str]:
    return sorted({part for sample in chaos.samples for part in sample.rss_mib})


def _steps(buckets: Sequence[Bucket], fate: Fate) -> tuple[list[float], list[float]]:
    xs = [edge for bucket in buckets for edge in (bucket.begins_s, bucket.ends_s)]
    return xs, [bucket.per_s[fate] for bucket in buckets for _ in range(2)]


def fault_list(chaos: Chaos) -> str:
    """Every fault with its number on the picture, when, what it hit, and the recovery."""
    took = {each.fault.number: each.recovery_s for each in outcomes(chaos)}
    return said(WORDS, "faults", [(fault, took.get(fault.number)) for fault in chaos.faults])


def drawing(chaos: Chaos) -> str:
    """Answers per second by fate, with the faults, as SVG for a page, of numbers and fixed words alone; empty without
    requests."""
    buckets = throughput(chaos)
    most = max((max(bucket.per_s[fate] for fate in DRAWN) for bucket in buckets), default=0.0) * 1.08
    ends_s = buckets[-1].ends_s if buckets else 0.0
    if most <= 0 or ends_s <= 0:
        return ""
    floor = HEIGHT - BELOW

    def x_of(at_s: float) -> float:
        return LEFT + min(1.0, at_s / ends_s) * (WIDTH - LEFT - 8)

    def line(fate: Fate) -> str:
        xs, ys = _steps(buckets, fate)
        places = " ".join(f"{x_of(x):.1f},{(1 - y / most) * floor:.1f}" for x, y in zip(xs, ys, strict=True))
        dash = "" if fate == "right" else ' stroke-dasharray="5 3"' if fate == "error" else ' stroke-dasharray="2 2"'
        return f'<polyline fill="none" stroke="{COLORS[fate]}" stroke-width="1.4"{dash} points="{places}"/>'

    def band(began_s: float, ended_s: float) -> str:
        wide = max(1.0, x_of(ended_s) - x_of(began_s))
        return f'<rect x="{x_of(began_s):.1f}" y="0" width="{wide:.1f}" height="{floor}" fill="#bbb" opacity="0.5"/>'

    bands = [band(each.fault.began_s, each.fault.ended_s) for each in outcomes(chaos)]
    words = "answers/s: right (solid), errors (dashed), hang and wrong (dotted); grey: faults"
    marks = [
        f'<path d="M{LEFT},0V{floor}H{WIDTH - 8}" fill="none" stroke="#999"/>',
        f'<text x="{LEFT - 6}" y="11" text-anchor="end">{core_text.plain(most)}</text>',
        f'<text x="{LEFT - 6}" y="{floor}" text-anchor="end">0</text>',
        f'<text x="{LEFT}" y="{HEIGHT - 8}">0</text>',
        f'<text x="{WIDTH - 8}" y="{HEIGHT - 8}" text-anchor="end">{core_text.plain(ends_s)} s</text>',
        f'<text x="{LEFT + 8}" y="11">{words}</text>',
    ]
    body = "".join([*bands, *marks, *(line(fate) for fate in DRAWN)])
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img" font-size="11" '
        f'fill="currentColor" aria-label="answers over time">{body}</svg>'
    )
