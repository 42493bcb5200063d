"""Rules of the audit on the consistency of a folder: names, counts and figures against the requests and each other.

Each takes a `Folder` and yields an `AuditFinding` for every contradiction; `pdlab.analysis.audit.rules` runs all.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import numpy as np

from pdlab.analysis import requests
from pdlab.analysis.audit.folders import AuditFinding, Folder, LevelFile
from pdlab.core.workload import Closed, Open, Workload
from pdlab.results.published_files import Stay, is_no_figure, stays_s
from pdlab.results.schema import Distribution, Run, Summary
from pdlab.results.store import MANIFEST, Store

RATE_SLACK = 0.02
LITTLE_SLACK = 1.05
# Of the concurrency, mean over a run of WAVES waves or more; 0.92 is the least that we have seen.
LEAST_IN_FLIGHT = 0.7
WAVES = 5
SIGMAS = 5  # arrivals of an open loop beyond what chance gives


def labels(folder: Folder) -> Iterator[AuditFinding]:
    """The manifest, its deployment and every level must be of one configuration."""
    assert folder.experiment is not None
    manifest = folder.experiment.manifest
    fix = "find out which of the two was measured; put the file where it belongs, or measure again"
    if not folder.ours:
        return
    deployment = manifest.deployment
    if deployment is not None and manifest.label not in (deployment.label, deployment.name):
        yield AuditFinding(
            "contradiction",
            (f"{folder.path.name}/{MANIFEST}",),
            f"labelled {manifest.label}, its deployment is {deployment.label}",
            "the curve carries the name of another configuration",
            fix,
        )
    for level in folder.levels:
        if level.run.label != manifest.label:
            yield AuditFinding(
                "contradiction",
                (level.name,),
                f"a level of {level.run.label} in the folder of {manifest.label}",
                "the point is another configuration's",
                fix,
            )


def workloads(folder: Folder) -> Iterator[AuditFinding]:
    """Token counts of every level must match its workload, and one curve must have one workload."""
    for level in folder.levels:
        run = level.run
        if not run.whole.completed or not folder.ours:
            continue  # the import has compared the published form's name with its content
        workload, steady = run.workload, run.steady
        expected = run.asked_tokens if workload.varied else (workload.sent_input_tokens, workload.sent_output_tokens)
        if expected is None or (workload.varied and run.failed):
            continue  # only the requests themselves tell which of them were answered: see `records`
        inputs, outputs = expected
        token_rates = [
            ("input", run.whole.input_tokens_per_s, run.whole, inputs, RATE_SLACK),
            ("output", run.whole.output_tokens_per_s, run.whole, outputs, RATE_SLACK),
        ]
        if steady is not None and steady.completed and isinstance(run.load, Closed) and not workload.varied:
            # Those in flight at the window's ends have part of their output in it.
            slack = RATE_SLACK + run.load.concurrency / steady.completed
            token_rates.append(("output", steady.output_tokens_per_s, steady, outputs, slack))
        for direction, rate, window, stated_tokens, slack in token_rates:
            tokens_per_request = rate * window.duration_s / window.completed
            if abs(tokens_per_request / stated_tokens - 1) > slack:
                yield AuditFinding(
                    "contradiction",
                    (level.name,),
                    f"the workload has {stated_tokens:.10g} {direction} tokens per request, "
                    f"rate x duration / requests gives {tokens_per_request:.1f}",
                    "the point is drawn for a workload that was not measured, or its throughput is wrong",
                    "measure the level again with --force",
                    100 * abs(tokens_per_request / stated_tokens - 1),
                )
    if not folder.ours and folder.levels:
        yield from _one_workload(folder)
        yield from _early_ends(folder)


def _early_ends(folder: Folder) -> Iterator[AuditFinding]:
    """For the published form: answers that the model ended before the length in the folder's or the file's name."""
    ended = [
        (level, level.run.asked_tokens[1], level.run.workload.sent_output_tokens)
        for level in folder.levels
        if level.run.asked_tokens is not None
    ]
    if ended:
        asked = f"{max(tokens for _, tokens, _ in ended):g}"
        answered = sorted({tokens for _, _, tokens in ended})
        yield AuditFinding(
            "early_ends",
            tuple(level.name for level, _, _ in ended),
            f"answers ended before --otl: names ask for {asked} output tokens, answers have "
            + (f"{answered[0]}" if len(answered) == 1 else f"{answered[0]} to {answered[-1]}"),
            "the curve is one of shorter answers, which are compared by what was generated",
            "measure with --ignore-eos if the answers were to have the whole length",
            100 * max(asked_tokens / tokens - 1 for _, asked_tokens, tokens in ended),
        )


def _one_workload(folder: Folder) -> Iterator[AuditFinding]:
    """For the published form: the workload is counted per file, and prompts may differ by a token.

    What differs by more is another curve (`pdlab.results.published_curves`).
    """
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
        yield AuditFinding(
            "lengths",
            tuple(level.name for level in deviating),
            f"levels of one curve have different token counts: {', '.join(sorted(lengths))}",
            "one curve is drawn through points of somewhat different workloads",
            "the same prompts, and --ignore-eos, at every load",
            100 * max(_deviation(level.run.workload, first_workload) for level in deviating),
        )


def _deviation(workload: Workload, reference: Workload) -> float:
    return max(
        abs(workload.sent_input_tokens / reference.sent_input_tokens - 1),
        abs(workload.sent_output_tokens / reference.sent_output_tokens - 1),
    )


def counts(folder: Folder) -> Iterator[AuditFinding]:
    """Every request must have ended exactly once."""
    for level in folder.levels:
        run = level.run
        ended_counts = {run.completed + run.failed, run.whole.completed + run.failed}
        if ended_counts != {run.num_requests} or run.failed < 0:
            yield AuditFinding(
                "contradiction",
                (level.name,),
                f"{run.num_requests} requests were sent, {run.completed} answered ({run.whole.completed} in the "
                f"figures), {run.failed} failed",
                "rates are counts over duration: they have the same error",
                "measure again; look for edited or mixed files",
                100 * max(abs(count / run.num_requests - 1) for count in ended_counts) if run.num_requests else None,
            )


def values(folder: Folder) -> Iterator[AuditFinding]:
    """Latencies must be numbers of at least 0, and percentiles must rise."""
    for level in folder.levels:
        impossible_figures = [
            f"{name} is {value!r:.40}"
            for name, value in level.raw.items()
            if name.endswith("_ms") and is_no_figure(value)
        ]
        for window, summary in _windows(level.run):
            impossible_figures += [f"{window}: {text}" for text in impossible_latencies(summary)] if summary else []
        if impossible_figures:
            yield AuditFinding(
                "impossible",
                (level.name,),
                "; ".join(impossible_figures),
                "the figure was edited, or belongs to another run",
                "measure again",
            )


def is_figure(value: float) -> bool:
    """Whether it can be a rate or a latency in seconds, which is shown in milliseconds too."""
    return value >= 0 and math.isfinite(1000 * value)


def impossible_latencies(summary: Summary) -> Iterator[str]:
    """Impossible latencies of one window, in words."""
    for name in ("ttft", "tpot", "itl", "e2el"):
        distribution: Distribution | None = getattr(summary, name)
        if distribution is None:
            continue
        ordered = sorted(distribution.percentiles_s.items(), key=lambda item: float(item[0][1:]))
        seconds = [value for _, value in ordered]
        if not all(map(is_figure, distribution.figures_s)):
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


def in_flight(folder: Folder) -> Iterator[AuditFinding]:
    """Little's law: rate x time in the system must be near the number in flight that the load sets."""
    for level in folder.levels:
        load = level.run.load
        for window, summary in _windows(level.run):
            stay = _stays_s(summary, level.run) if summary else None
            if summary is None or stay is None or not isinstance(load, Closed):
                continue
            # Requests that finish in a short window are not those that arrive in it: it bounds less sharply.
            edges = load.concurrency / max(summary.completed, 1) if window == "steady window" else 0.0
            least, most = (summary.requests_per_s * stay_s for stay_s in stay)

            def littles_law(stay_s: float, summary: Summary = summary, window: str = window) -> str:
                rate = f"{summary.requests_per_s:.2f} requests/s that stay {stay_s:.2f} s"
                return f"{window}: {rate} are {summary.requests_per_s * stay_s:.1f} in flight (Little's law)"

            if least > (LITTLE_SLACK + edges) * load.concurrency:
                yield AuditFinding(
                    "impossible",
                    (level.name,),
                    f"{littles_law(stay.low)}, the load allows {load.concurrency}",
                    "throughput too high, latency too high, or another concurrency",
                    "measure again; look for edited or mixed files",
                    100 * (least / load.concurrency - 1),
                )
            elif most < LEAST_IN_FLIGHT * load.concurrency and _long_enough(level.run):
                yield AuditFinding(
                    "contradiction",
                    (level.name,),
                    f"{littles_law(stay.high)}, the load says {load.concurrency}",
                    "the point is drawn at another load than it had, or throughput or latency are too low",
                    "measure again; look for edited or mixed files",
                    100 * (1 - most / load.concurrency),
                )


def _long_enough(run: Run) -> bool:
    return isinstance(run.load, Closed) and not run.failed and run.num_requests >= WAVES * run.load.concurrency


def _stays_s(summary: Summary, run: Run) -> Stay | None:
    """Mean time of a request in the system; None if unknown."""
    if run.origin == "imported":
        return stays_s(summary)
    if run.workload.varied:  # the mean of a product is not the product of the means
        mean_s = summary.e2el.mean_s if summary.e2el is not None else None
        return None if mean_s is None else Stay(mean_s, mean_s)
    outputs = run.workload.sent_output_tokens
    ttft_s, tpot_s = (each.mean_s if each is not None else None for each in (summary.ttft, summary.tpot))
    if ttft_s is None or (tpot_s is None and outputs > 1):
        return None
    mean_s = ttft_s + (tpot_s or 0.0) * (outputs - 1)
    return Stay(mean_s, mean_s)


def served(folder: Folder) -> Iterator[AuditFinding]:
    """An open loop must not serve more than arrives, chance aside."""
    for level in folder.levels:
        load, whole = level.run.load, level.run.whole
        if not isinstance(load, Open) or whole.completed < 2:
            continue
        chance = SIGMAS / math.sqrt(whole.completed * load.burstiness)
        arrived_rps = level.run.workload.most_rps(load)
        if whole.requests_per_s > arrived_rps * (1 + chance):
            yield AuditFinding(
                "impossible",
                (level.name,),
                f"{whole.requests_per_s:.2f} requests/s were served where {arrived_rps:g} arrived",
                "the point is drawn at another rate than it had",
                "measure again",
                100 * (whole.requests_per_s / arrived_rps - 1),
            )


def records(folder: Folder, *, recompute: bool, hashes: Mapping[Path, str]) -> Iterator[AuditFinding]:
    """The requests beside our levels: by the hash that each level keeps of them, and with ``recompute`` by the figures
    that they give. ``hashes``: of files that were read already, which is not done again but to recompute.

    Missing requests are not a fault.
    """
    for level in folder.levels:
        path = Store(folder.path).records_path(level.run.key)
        if not folder.ours or level.run.raw_sha256 is None or not path.exists():
            continue
        if not recompute and hashes.get(path) == level.run.raw_sha256:
            continue
        text = b""
        try:
            packed = path.read_bytes()
            text = requests.unpack(packed) if packed else b""
            matches = bool(packed) and hashlib.sha256(text).hexdigest() == level.run.raw_sha256
            evidence = (
                "the hash of the file is not the one that the level records"
                if packed
                else "the file is empty (0 bytes)"
            )
        except (OSError, EOFError, zlib.error) as error:
            matches, evidence = False, f"cannot be read ({error})"
        if not matches:
            yield AuditFinding(
                "records",
                (f"{folder.path.name}/{path.name}",),
                evidence,
                "intervals and goodput of that level have no basis, or are of other requests than its figures",
                "restore the file, or measure the level again with --force",
            )
        elif recompute:
            yield from _recomputed(level, text)


def _recomputed(level: LevelFile, text: bytes) -> Iterator[AuditFinding]:
    """The level's figures, from its own requests."""
    run = level.run
    try:
        data = requests.parse(text)
    except (KeyError, TypeError, ValueError) as error:
        yield AuditFinding(
            "records", (level.name,), f"no requests ({error})", "no figure can be checked", "measure it again"
        )
        return
    evidence, deviations = [], [0.0]
    if (count := len(data)) != run.num_requests:
        evidence.append(f"{count} requests were recorded, the level says {run.num_requests}")
        deviations.append(abs(count / run.num_requests - 1) if run.num_requests else 1.0)
    elif run.completed:
        if wrong := requests.wrong_counts(text):
            evidence.append(f"{wrong} answers have other token counts than their requests asked for")
            deviations.append(wrong / run.completed)
        for window, stored in _windows(run):
            recomputed = requests.window(data, run.load, steady=window != "whole run") if stored else None
            for name, value, expected in _figures(stored, recomputed) if stored and recomputed else ():
                if abs(value - expected) > RATE_SLACK * abs(expected):
                    evidence.append(f"{name} of the {window} is {value:.4g}, its requests give {expected:.4g}")
                    deviations.append(abs(value / expected - 1) if expected else 1.0)
    if evidence:
        yield AuditFinding(
            "impossible",
            (level.name,),
            "; ".join(evidence[:4]) + (f"; and {len(evidence) - 4} more" if len(evidence) > 4 else ""),
            "the file was edited, or has another level's requests beside it",
            "measure the level again with --force",
            100 * max(deviations),
        )


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
