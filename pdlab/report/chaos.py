"""Faults made under load: a table by kind, a picture over time, a drawing in a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from pdlab.analysis.chaos import (
    Bucket,
    KindOutcome,
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
from pdlab.core.text import counted
from pdlab.report.style import HUES, STYLE_FILE, save
from pdlab.results.chaos import FATES, Chaos, Fate

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
    run = chaos.run
    guard = {True: "with the KV guard", False: "without the KV guard", None: "no KV guard"}[run.guarded]
    rehearsal = chaos.manifest.rehearsal
    if rehearsal is not None:
        guard = f"rehearsed (engines simulated, {rehearsal.slow_down:g} times slower)"
    return (
        f"Faults ({run.plan}, seed {run.seed}) on {run.label}, {guard}, {run.concurrency} requests at a time, "
        f"{run.loaded_s / 60:.1f} minutes"
    )


def table(chaos: Chaos) -> str:
    """A row per kind of fault. A request near two faults counts in both rows."""
    rows = [_row(kind) for kind in by_kind(outcomes(chaos))]
    skipped = [fault for fault in chaos.faults if fault.outcome != "injected"]
    for name in dict.fromkeys(fault.kind for fault in skipped):
        same = [fault for fault in skipped if fault.kind == name]
        rows.append([f"{name} ({same[0].outcome})", str(len(same)), *["-"] * (len(FATES) + 2)])
    head = ["fault", "times", *FATES, "recovery, s", "slowest error, s"]
    return core_text.table(head, rows or [["none", "0", *["-"] * (len(FATES) + 2)]], left=(0,))


def _row(kind: KindOutcome) -> list[str]:
    recovery = core_text.number(median(kind.recoveries_s)) if kind.recoveries_s else "-"
    if len(kind.recoveries_s) > 1:
        recovery = f"{recovery} (most {core_text.number(max(kind.recoveries_s))})"
    if kind.never:
        recovery = f"{recovery}, {kind.never} x never" if kind.recoveries_s else "never"
    fates = [str(kind.fates[fate]) for fate in FATES]
    return [kind.kind, str(kind.faults), *fates, recovery, core_text.number(kind.slowest_error_s)]


def lines(chaos: Chaos) -> list[str]:
    """Fates of all requests, what healthy replicas could serve, memory, and what is left, a sentence each."""
    fates = total(chaos.requests)
    counts = ", ".join(f"{fates[fate]} {CALLED[fate]}" for fate in FATES if fates[fate])
    rounded = sum(r.rounded for r in chaos.requests)
    sentences = [
        f"{counted(len(chaos.requests), 'request')}: {counts or 'none'}; {faulted(chaos)} of them met a fault"
        + (f"; {rounded} of the right ones take another token within rounding" if rounded else "")
        + "."
    ]
    served = served_by_healthy(chaos)
    if served is not None:
        sentences.append(_served_text(served))
    wrong = [r for r in chaos.requests if r.fate == "wrong"]
    sentences += [f"Wrong: request {r.number} (sent at {r.sent_s:.1f} s): {r.detail}." for r in wrong[:5]]
    counters = {name: value for name, value in chaos.run.counters.items() if value}
    if counters:
        words = ", ".join(f"{name} +{value:g}" for name, value in counters.items())
        sentences.append(f"Counters of the engines: {words}.")
    sentences.append(memory_text(chaos))
    sentences.append(left_text(chaos))
    if chaos.run.impossible:
        sentences.append(f"Not here: {', '.join(sorted(chaos.run.impossible))}.")
    return sentences


def _served_text(served: ServedByHealthy) -> str:
    verdict = "at least" if served.share >= GOAL else "below"
    return (
        f"Requests that healthy replicas could serve: {served.right} of {served.requests} right "
        f"({core_text.percent(served.share, 1.0)} %, {verdict} {100 * GOAL:g} %)."
    )


def memory_text(chaos: Chaos) -> str:
    """Whether memory grew."""
    change = memory_change(chaos.samples)
    if change is None:
        return "Memory: too few samples to tell."
    verdict = "flat" if change.flat else "not flat"
    return (
        f"Memory of all processes: {change.first_mib:,.0f} MiB in the first third, {change.last_mib:,.0f} MiB in the "
        f"last ({100 * (change.ratio - 1):+.1f} %): {verdict}."
    )


def left_text(chaos: Chaos) -> str:
    """What was there at the end and not before."""
    left = chaos.run.leftovers
    if left is None:
        return "Left: unknown, for it was interrupted."
    if left.kv_free_after_s is None:
        held = [
            f"{name} {'unknown' if share is None else f'{100 * share:.1f} %'}"
            for name, share in sorted(left.kv_use.items())
            if share is None or share > 0
        ]
        kv = f"KV blocks not all free within {left.kv_limit_s:g} s ({', '.join(held) or 'no engine said'})"
    else:
        kv = f"KV blocks all free {left.kv_free_after_s:.1f} s after the load"
    groups = (("process", "processes", left.processes), ("port", "ports", left.ports), ("actor", "actors", left.actors))
    more = [
        f"{sum(group.values())} {one if sum(group.values()) == 1 else several} "
        f"({', '.join(f'{count} {name}' for name, count in group.items())})"
        for one, several, group in groups
        if group
    ]
    beside = f"more than before: {', '.join(more)}" if more else "no process, port or actor more than before"
    return f"Left: {kv}; {beside}."


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
    rows = []
    for fault in chaos.faults:
        hit = "; ".join(fault.targets) or "clients"
        what = hit if fault.outcome == "injected" else f"{fault.outcome}: {fault.detail}"
        recovery = core_text.number(took.get(fault.number))
        rows.append([str(fault.number), f"{fault.began_s:.1f}", fault.kind, what, recovery])
    return core_text.table(["", "at, s", "fault", "hit", "recovery, s"], rows, left=(2, 3)) if rows else "no fault"


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
