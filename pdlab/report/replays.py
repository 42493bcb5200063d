"""Replays of sessions as a section: turns, cached prompts, whole sessions. Facts: `pdlab.analysis.replays`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pdlab.analysis.curves import short_labels
from pdlab.analysis.intervals import MIN_BEYOND, beyond, is_tail
from pdlab.analysis.replays import LAST_TURN, ReplayFacts, replay_facts
from pdlab.core.rendering import said
from pdlab.core.workload import Replay, Slo
from pdlab.report.section import Section
from pdlab.results.schema import Distribution, Experiment
from pdlab.results.slo import bounds_of_one
from pdlab.results.store import Store

TTFT_SHOWN = ("p50", "p90", "p99")
WORDS = Path(__file__).parent / "assets" / "replays.txt"


class ReplayedLevel(NamedTuple):
    """A level that replays a compiled workload; ``workload``: its label."""

    label: str
    workload: str
    valid: bool
    facts: ReplayFacts


def replays(experiments: Sequence[tuple[Path, Experiment]], slos: Sequence[Slo] = ()) -> list[ReplayedLevel]:
    """Every replay in these folders. Raises StoreError."""
    found = []
    labels = short_labels([experiment for _, experiment in experiments])
    for label, (folder, experiment) in zip(labels, experiments, strict=True):
        for run in experiment.runs:
            if not isinstance(run.load, Replay):
                continue
            facts = replay_facts(Store(folder).read_records(run.key), slos)
            if facts is not None:
                text = f"{label}, {run.key.stem}" if run.key.repeat or run.load.speed != 1 else label
                found.append(ReplayedLevel(text, run.workload.lengths.label, run.validity.valid, facts))
    return found


def section(each: ReplayedLevel) -> Section:
    """Sentences on sessions and hits, and TTFT by turn as a table."""
    facts = each.facts
    within = [(bounds_of_one(found.slo), found) for found in facts.within]
    names = {turn.turn: f"turn {turn.turn}{' and later' if turn.turn == LAST_TURN else ''}" for turn in facts.by_turn}
    rows = [(names[turn.turn], turn.requests, *_known(turn.ttft, turn.requests)) for turn in facts.by_turn]
    if (split := facts.by_hit) is not None:
        rows += [("some of the prompt cached", split.hits, *_known(split.hit, split.hits))] if split.hit else []
        rows += [("nothing cached", split.misses, *_known(split.miss, split.misses))] if split.miss else []
    return Section(said(WORDS, "title", each), said(WORDS, "body", facts, within, rows))


def _known(latency: Distribution | None, requests: int) -> tuple[float | None, ...]:
    """Percentiles in ms, without the tails that so few requests do not carry."""
    values = latency.percentiles_s if latency is not None else {}
    carried = {name: not is_tail(name) or beyond(name, requests) >= MIN_BEYOND for name in TTFT_SHOWN}
    return tuple(1000 * values[name] if carried[name] and name in values else None for name in TTFT_SHOWN)
