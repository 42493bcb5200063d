"""Audit rules on the consistency of a folder: names, counts and figures against the requests and each other.

`pdlab.analysis.audit.registry` runs them.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np

from pdlab.analysis import requests
from pdlab.analysis.audit.folders import Folder, LevelFile
from pdlab.analysis.audit.registry import AuditFinding, AuditInputs, Numbers, rule
from pdlab.core.workload import Closed, Open, Workload
from pdlab.results.published_files import RATE_SLACK, ResidenceTime, is_invalid_figure, residence_time
from pdlab.results.schema import Distribution, Run, Summary
from pdlab.results.store import MANIFEST, Store

LITTLE_SLACK = 1.05
# Share of the concurrency, mean over a run of WAVES waves or more; 0.92 is the least observed.
LEAST_IN_FLIGHT = 0.7
WAVES = 5
SIGMAS = 5  # tolerated deviation of an open loop's arrivals, in standard deviations


@rule("label_of_another", "level_of_another", needs="our folder")
def labels(folder: Folder) -> Iterator[AuditFinding]:
    """The manifest, its deployment and every level must be of one configuration."""
    assert folder.experiment is not None
    label, deployment = folder.experiment.manifest.label, folder.experiment.manifest.deployment
    if deployment is not None and label not in (deployment.label, deployment.name):
        numbers: Numbers = {"label": label, "deployment": deployment.label}
        yield AuditFinding("label_of_another", (f"{folder.path.name}/{MANIFEST}",), numbers)
    for level in folder.levels:
        if level.run.label != label:
            yield AuditFinding("level_of_another", (level.name,), {"level": level.run.label, "label": label})


@rule("tokens_contradict", needs="our level")
def workload_of_level(level: LevelFile) -> Iterator[AuditFinding]:
    """Token counts of a level must match its workload. For the published form the import compares name and content."""
    run = level.run
    if not run.whole.completed:
        return
    workload, steady = run.workload, run.steady
    expected = run.requested_tokens if workload.varied else (workload.sent_input_tokens, workload.sent_output_tokens)
    if expected is None or (workload.varied and run.failed):
        return  # only the requests show which of them were answered: see `records`
    inputs, outputs = expected
    token_rates = [
        ("input", run.whole.input_tokens_per_s, run.whole, inputs, RATE_SLACK),
        ("output", run.whole.output_tokens_per_s, run.whole, outputs, RATE_SLACK),
    ]
    if steady is not None and steady.completed and isinstance(run.load, Closed) and not workload.varied:
        # Requests in flight at the window's ends have part of their output in it.
        slack = RATE_SLACK + run.load.concurrency / steady.completed
        token_rates.append(("output", steady.output_tokens_per_s, steady, outputs, slack))
    for side, rate, window, requested, slack in token_rates:
        actual = rate * window.duration_s / window.completed
        if abs(actual / requested - 1) > slack:
            numbers: Numbers = {"requested": requested, "side": side, "actual": actual}
            yield AuditFinding("tokens_contradict", (level.name,), numbers, 100 * abs(actual / requested - 1))


@rule("lengths", needs="folder")
def one_workload(folder: Folder) -> Iterator[AuditFinding]:
    """For the published form: the workload is counted per file, and prompts may differ by a token.

    Files that differ by more are another curve (`pdlab.results.published_curves`).
    """
    if folder.ours or not folder.levels:
        return
    first_workload = folder.levels[0].run.workload
    deviating: list[LevelFile] = []
    for level in folder.levels[1:]:
        workload = level.run.workload
        sizes = (
            (workload.sent_input_tokens, first_workload.sent_input_tokens),
            (workload.sent_output_tokens, first_workload.sent_output_tokens),
        )
        if any(
            abs(tokens - reference_tokens) > max(1, RATE_SLACK * reference_tokens) for tokens, reference_tokens in sizes
        ):
            deviating.append(level)
    if deviating:
        lengths = {w.label for w in [first_workload, *(level.run.workload for level in deviating)]}
        percent = 100 * max(_deviation(level.run.workload, first_workload) for level in deviating)
        names = tuple(level.name for level in deviating)
        yield AuditFinding("lengths", names, {"lengths": ", ".join(sorted(lengths))}, percent)


@rule("early_ends", needs="folder")
def early_ends(folder: Folder) -> Iterator[AuditFinding]:
    """For the published form: answers that the model ended before the length in the folder's or the file's name."""
    ended = [
        (level, level.run.requested_tokens[1], level.run.workload.sent_output_tokens)
        for level in folder.levels
        if level.run.requested_tokens is not None and not folder.ours
    ]
    if ended:
        answered = sorted({tokens for _, _, tokens in ended})
        numbers: Numbers = {
            "requested": max(tokens for _, tokens, _ in ended),
            "answered": f"{answered[0]}" if len(answered) == 1 else f"{answered[0]} to {answered[-1]}",
        }
        percent = 100 * max(requested_tokens / tokens - 1 for _, requested_tokens, tokens in ended)
        yield AuditFinding("early_ends", tuple(level.name for level, _, _ in ended), numbers, percent)


def _deviation(workload: Workload, reference: Workload) -> float:
    return max(
        abs(workload.sent_input_tokens / reference.sent_input_tokens - 1),
        abs(workload.sent_output_tokens / reference.sent_output_tokens - 1),
    )


@rule("requests_miscounted", needs="level")
def counts(level: LevelFile) -> Iterator[AuditFinding]:
    """Every request must have ended exactly once."""
    run = level.run
    ended_counts = {run.completed + run.failed, run.whole.completed + run.failed}
    if ended_counts != {run.num_requests} or run.failed < 0:
        answered: Numbers = {"answered": run.completed, "figures": run.whole.completed}
        numbers: Numbers = {"requests": run.num_requests, **answered, "failed": run.failed}
        off = max(abs(count / run.num_requests - 1) for count in ended_counts) if run.num_requests else None
        yield AuditFinding("requests_miscounted", (level.name,), numbers, None if off is None else 100 * off)


@rule("latencies_impossible", needs="level")
def values(level: LevelFile) -> Iterator[AuditFinding]:
    """Latencies must be numbers of at least 0, and percentiles must rise."""
    impossible = [
        f"{name} is {value!r:.40}"
        for name, value in level.raw.items()
        if name.endswith("_ms") and is_invalid_figure(value)
    ]
    for window, summary in _windows(level.run):
        impossible += [f"{window}: {text}" for text in impossible_latencies(summary)] if summary else []
    if impossible:
        yield AuditFinding("latencies_impossible", (level.name,), {"what": "; ".join(impossible)})


def is_figure(value: float) -> bool:
    """Whether the value can be a rate or a latency in seconds, which is shown in milliseconds too."""
    return value >= 0 and math.isfinite(1000 * value)


def impossible_latencies(summary: Summary) -> Iterator[str]:
    """Impossible latencies of one window, in words."""
    for name, distribution in summary.latencies.items():
        ordered = sorted(distribution.percentiles_s.items(), key=lambda item: float(item[0][1:]))
        seconds = [value for _, value in ordered]
        if not all(map(is_figure, distribution.statistics_s.values())):
            yield f"{name.upper()} below 0 or not a number"
        elif seconds != sorted(seconds):
            percentile_list = ", ".join(f"{key} {1000 * value:.4g}" for key, value in ordered)
            yield f"percentiles of {name.upper()} do not rise ({percentile_list} ms)"
    means_s = [each.mean_s if each is not None else None for each in (summary.ttft, summary.e2el)]
    if means_s[0] is not None and means_s[1] is not None and means_s[0] > means_s[1] * LITTLE_SLACK:
        yield "TTFT is longer than E2EL"


WindowName = Literal["whole run", "steady window"]


def _windows(run: Run) -> tuple[tuple[WindowName, Summary | None], ...]:
    return ("whole run", run.whole), ("steady window", run.steady)


@rule("too_many_in_flight", "too_few_in_flight", needs="level")
def in_flight(level: LevelFile) -> Iterator[AuditFinding]:
    """Little's law: rate x time in the system must be near the number in flight that the load sets."""
    yield from _in_flight(level.run, level.name)


def impossible_figures(run: Run) -> str:
    """Why the figures of a level cannot all be true, in words; empty: they can."""
    of_rates = [each.evidence for each in (*_in_flight(run, run.key.stem), *_served(run, run.key.stem))]
    stated = [each.text for each in run.validity.notes if each.code == "file_rate_differs"]
    return "; ".join([*impossible_latencies(run.whole), *of_rates, *stated])


def _in_flight(run: Run, name: str) -> Iterator[AuditFinding]:
    load = run.load
    for window, summary in _windows(run):
        stay = _stays_s(summary, run) if summary else None
        if summary is None or stay is None or not isinstance(load, Closed):
            continue
        # In a short window other requests finish than arrive: its limit is wider.
        edges = load.concurrency / max(summary.completed, 1) if window == "steady window" else 0.0
        rate_rps = summary.requests_per_s
        least, most = (rate_rps * stay_s for stay_s in stay)
        numbers: Numbers = {"window": window, "rate_rps": rate_rps, "concurrency": load.concurrency}
        if least > (LITTLE_SLACK + edges) * load.concurrency:
            numbers |= {"stay_s": stay.low, "in_flight": least}
            yield AuditFinding("too_many_in_flight", (name,), numbers, 100 * (least / load.concurrency - 1))
        elif most < LEAST_IN_FLIGHT * load.concurrency and _long_enough(run):
            numbers |= {"stay_s": stay.high, "in_flight": most}
            yield AuditFinding("too_few_in_flight", (name,), numbers, 100 * (1 - most / load.concurrency))


def _long_enough(run: Run) -> bool:
    return isinstance(run.load, Closed) and not run.failed and run.num_requests >= WAVES * run.load.concurrency


def _stays_s(summary: Summary, run: Run) -> ResidenceTime | None:
    """Mean time of a request in the system; None if unknown."""
    if run.origin == "imported":
        return residence_time(summary)
    if run.workload.varied:  # the mean of a product is not the product of the means
        mean_s = summary.e2el.mean_s if summary.e2el is not None else None
        return None if mean_s is None else ResidenceTime(mean_s, mean_s)
    outputs = run.workload.sent_output_tokens
    ttft_s, tpot_s = (each.mean_s if each is not None else None for each in (summary.ttft, summary.tpot))
    if ttft_s is None or (tpot_s is None and outputs > 1):
        return None
    mean_s = ttft_s + (tpot_s or 0.0) * (outputs - 1)
    return ResidenceTime(mean_s, mean_s)


@rule("more_served_than_arrived", needs="level")
def served(level: LevelFile) -> Iterator[AuditFinding]:
    """An open loop must not serve more than arrives, chance aside."""
    yield from _served(level.run, level.name)


def _served(run: Run, name: str) -> Iterator[AuditFinding]:
    load, whole = run.load, run.whole
    if not isinstance(load, Open) or whole.completed < 2:
        return
    chance = SIGMAS / math.sqrt(whole.completed * load.burstiness)
    arrived_rps = run.workload.most_rps(load)
    if whole.requests_per_s > arrived_rps * (1 + chance):
        numbers: Numbers = {"served_rps": whole.requests_per_s, "arrived_rps": arrived_rps}
        percent = 100 * (whole.requests_per_s / arrived_rps - 1)
        yield AuditFinding("more_served_than_arrived", (name,), numbers, percent)


@rule(
    "records_differ",
    "records_empty",
    "records_unreadable",
    "records_not_requests",
    "figures_differ",
    needs="our requests",
)
def records(level: LevelFile, recheck: AuditInputs) -> Iterator[AuditFinding]:
    """The requests beside a level must have the hash that the level stores, or give its figures.

    Missing requests are not a fault.
    """
    path = Store(level.path.parent).records_path(level.run.key)
    if level.run.raw_sha256 is None or not path.exists():
        return
    if not recheck.recompute and recheck.hashes.get(path) == level.run.raw_sha256:
        return
    files = (f"{path.parent.name}/{path.name}",)
    digest = hashlib.sha256()
    try:
        for text in requests.texts(path) if path.stat().st_size else ():
            digest.update(text)
    except (OSError, EOFError, zlib.error) as error:
        yield AuditFinding("records_unreadable", files, {"error": str(error)})
        return
    if not path.stat().st_size:
        yield AuditFinding("records_empty", files)
    elif digest.hexdigest() != level.run.raw_sha256:
        yield AuditFinding("records_differ", files)
    elif recheck.recompute:
        yield from _recomputed(level, path)


def _recomputed(level: LevelFile, path: Path) -> Iterator[AuditFinding]:
    """The level's figures, recomputed from its requests."""
    run = level.run
    try:
        data = requests.parsed(requests.texts(path))
    except (KeyError, TypeError, ValueError) as error:
        yield AuditFinding("records_not_requests", (level.name,), {"error": str(error)})
        return
    evidence, deviations = [], [0.0]
    if (count := len(data)) != run.num_requests:
        evidence.append(f"{count} requests were recorded, but the level has {run.num_requests}")
        deviations.append(abs(count / run.num_requests - 1) if run.num_requests else 1.0)
    elif run.completed:
        if wrong := sum(map(requests.wrong_counts, requests.texts(path))):
            evidence.append(f"{wrong} answers do not have the requested token counts")
            deviations.append(wrong / run.completed)
        for window, stored in _windows(run):
            recomputed = requests.window(data, run.load, steady=window != "whole run") if stored else None
            for name, value, expected in _figures(stored, recomputed) if stored and recomputed else ():
                if abs(value - expected) > RATE_SLACK * abs(expected):
                    evidence.append(f"{name} of the {window} is {value:.4g}, its requests give {expected:.4g}")
                    deviations.append(abs(value / expected - 1) if expected else 1.0)
    if evidence:
        what = "; ".join(evidence[:4]) + (f"; and {len(evidence) - 4} more" if len(evidence) > 4 else "")
        yield AuditFinding("figures_differ", (level.name,), {"what": what}, 100 * max(deviations))


def _figures(stored: Summary, recomputed: requests.Requests) -> Iterator[tuple[str, float, float]]:
    """(name, as stored, from the requests)"""
    if recomputed.window_s > 0:
        yield "requests/s", stored.requests_per_s, len(recomputed.finish_s) / recomputed.window_s
    latencies: tuple[requests.Latency, ...] = ("ttft", "tpot", "e2el")
    for name in latencies:
        distribution: Distribution | None = getattr(stored, name)
        values = np.sort(recomputed.latency_s(name))
        if distribution is None or not len(values):
            continue
        if distribution.mean_s is not None:
            yield f"mean {name.upper()} (s)", distribution.mean_s, float(values.mean())
        stored_percentiles = distribution.percentiles_s
        recomputed_percentiles = (
            np.percentile(values, [float(key[1:]) for key in stored_percentiles]) if stored_percentiles else ()
        )
        for (key, value), expected in zip(stored_percentiles.items(), recomputed_percentiles, strict=True):
            yield f"{key} {name.upper()} (s)", value, float(expected)
