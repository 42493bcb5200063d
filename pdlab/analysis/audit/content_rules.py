"""Rules of the audit on what a folder says about itself: names, counts and figures against the requests and each other.

Each takes a `Folder` and yields a `Finding` for everything that cannot be so; `pdlab.analysis.audit.rules` asks them
all.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import zlib
from collections.abc import Iterator

import numpy as np

from pdlab.analysis import requests
from pdlab.analysis.audit.folders import Finding, Folder, Level
from pdlab.core.workload import Closed, Open
from pdlab.results.schema import Distribution, Run, Summary
from pdlab.results.store import MANIFEST, Store

RATE_SLACK = 0.02
LITTLE_SLACK = 1.05
# Of the concurrency, mean over a run of WAVES waves or more; 0.92 is the least that we have seen.
LEAST_IN_FLIGHT = 0.7
WAVES = 5
SIGMAS = 5  # arrivals of an open loop beyond what chance gives


def labels(folder: Folder) -> Iterator[Finding]:
    """The manifest, its deployment and every level are of one configuration."""
    assert folder.experiment is not None
    manifest = folder.experiment.manifest
    fix = "find out which of the two was measured; put the file where it belongs, or measure again"
    if not folder.ours:
        return
    deployment = manifest.deployment
    if deployment is not None and manifest.label not in (deployment.label, deployment.name):
        yield Finding(
            "contradiction",
            (f"{folder.path.name}/{MANIFEST}",),
            f"labelled {manifest.label}, its deployment is {deployment.label}",
            "the curve carries the name of another configuration",
            fix,
        )
    for level in folder.levels:
        if level.run.label != manifest.label:
            yield Finding(
                "contradiction",
                (level.name,),
                f"a level of {level.run.label} in the folder of {manifest.label}",
                "the point is another configuration's",
                fix,
            )


def workloads(folder: Folder) -> Iterator[Finding]:
    """Token counts of every level are those of its workload, and one curve has one workload."""
    for level in folder.levels:
        run = level.run
        if not run.whole.completed or not folder.ours:
            continue  # the import has compared the published form's name with its content
        outputs, steady = run.workload.sent_output_tokens, run.steady
        found_in = [
            ("input", run.whole.input_tokens_per_s, run.whole, run.workload.sent_input_tokens, RATE_SLACK),
            ("output", run.whole.output_tokens_per_s, run.whole, outputs, RATE_SLACK),
        ]
        if steady is not None and steady.completed and isinstance(run.load, Closed):
            # Those in flight at the window's ends have part of their output in it.
            slack = RATE_SLACK + run.load.concurrency / steady.completed
            found_in.append(("output", steady.output_tokens_per_s, steady, outputs, slack))
        for what, rate, window, said, slack in found_in:
            found = rate * window.duration_s / window.completed
            if abs(found / said - 1) > slack:
                yield Finding(
                    "contradiction",
                    (level.name,),
                    f"the workload has {said} {what} tokens per request, rate x duration / requests gives {found:.1f}",
                    "the point stands for a workload that was not measured, or its throughput is wrong",
                    "measure the level again with --force",
                    100 * abs(found / said - 1),
                )
    if not folder.ours and folder.levels:
        yield from _one_workload(folder)


def _one_workload(folder: Folder) -> Iterator[Finding]:
    """Of the published form: its workload is what each file counted, some prompts a token longer than others."""
    first = folder.levels[0].run.workload
    others: list[Level] = []
    for level in folder.levels[1:]:
        found = level.run.workload
        sizes = (
            (found.sent_input_tokens, first.sent_input_tokens),
            (found.sent_output_tokens, first.sent_output_tokens),
        )
        if any(abs(one - other) > max(1, RATE_SLACK * other) for one, other in sizes):
            others.append(level)
    if others:
        lengths = {f"{w.input_tokens}:{w.output_tokens}" for w in [first, *(level.run.workload for level in others)]}
        yield Finding(
            "contradiction",
            tuple(level.name for level in others),
            f"levels of one folder have different token counts: {', '.join(sorted(lengths))}",
            "one curve is drawn through points of different workloads",
            "a folder for each workload",
        )


def counts(folder: Folder) -> Iterator[Finding]:
    """Every request ended one way."""
    for level in folder.levels:
        run = level.run
        ended = {run.completed + run.failed, run.whole.completed + run.failed}
        if ended != {run.num_requests} or run.failed < 0:
            yield Finding(
                "contradiction",
                (level.name,),
                f"{run.num_requests} requests were sent, {run.completed} answered ({run.whole.completed} in the "
                f"figures), {run.failed} failed",
                "rates are counts over duration: they are off by as much",
                "measure again; look for edited or mixed files",
                100 * max(abs(each / run.num_requests - 1) for each in ended) if run.num_requests else None,
            )


def values(folder: Folder) -> Iterator[Finding]:
    """No latency is below 0 or not a number, and percentiles rise."""
    for level in folder.levels:
        wrong = [
            f"{name} is {value!r}"
            for name, value in level.raw.items()
            if name.endswith("_ms") and isinstance(value, int | float) and not (value >= 0 and math.isfinite(value))
        ]
        for window, summary in (("whole run", level.run.whole), ("steady window", level.run.steady)):
            wrong += [f"{window}: {text}" for text in impossible_latencies(summary)] if summary else []
        if wrong:
            yield Finding(
                "impossible",
                (level.name,),
                "; ".join(wrong),
                "the figure was edited, or belongs to another run",
                "measure again",
            )


def impossible_latencies(summary: Summary) -> Iterator[str]:
    """What cannot be of the latencies of one window, in words."""
    for name in ("ttft", "tpot", "e2el"):
        found: Distribution | None = getattr(summary, name)
        if found is None:
            continue
        ordered = sorted(found.percentiles_s.items(), key=lambda item: float(item[0][1:]))
        seconds = [value for _, value in ordered]
        if not all(value >= 0 and math.isfinite(value) for value in [found.mean_s, *seconds]):
            yield f"{name.upper()} below 0 or not a number"
        elif seconds != sorted(seconds):
            told = ", ".join(f"{key} {1000 * value:.4g}" for key, value in ordered)
            yield f"percentiles of {name.upper()} do not rise ({told} ms)"
    if summary.ttft and summary.e2el and summary.ttft.mean_s > summary.e2el.mean_s * LITTLE_SLACK:
        yield "TTFT is longer than E2EL"


def in_flight(folder: Folder) -> Iterator[Finding]:
    """Little's law: rate x time in the system is the number in flight, which the load bounds from both sides."""
    for level in folder.levels:
        load = level.run.load
        for window, summary in (("whole run", level.run.whole), ("steady window", level.run.steady)):
            stays_s = _stays_s(summary, level.run) if summary else None
            if summary is None or stays_s is None or not isinstance(load, Closed):
                continue
            found = summary.requests_per_s * stays_s
            rate = f"{summary.requests_per_s:.2f} requests/s that stay {stays_s:.2f} s"
            told = f"{window}: {rate} are {found:.1f} in flight (Little's law)"
            # Requests that finish in a short window are not those that arrive in it: it bounds less sharply.
            edges = load.concurrency / max(summary.completed, 1) if window == "steady window" else 0.0
            if found > (LITTLE_SLACK + edges) * load.concurrency:
                yield Finding(
                    "impossible",
                    (level.name,),
                    f"{told}, the load allows {load.concurrency}",
                    "throughput too high, latency too high, or another concurrency",
                    "measure again; look for edited or mixed files",
                    100 * (found / load.concurrency - 1),
                )
            elif found < LEAST_IN_FLIGHT * load.concurrency and _long(level.run):
                yield Finding(
                    "contradiction",
                    (level.name,),
                    f"{told}, the load says {load.concurrency}",
                    "the point stands at a load that it did not have, or throughput or latency are too low",
                    "measure again; look for edited or mixed files",
                    100 * (1 - found / load.concurrency),
                )


def _long(run: Run) -> bool:
    return isinstance(run.load, Closed) and not run.failed and run.num_requests >= WAVES * run.load.concurrency


def _stays_s(summary: Summary, run: Run) -> float | None:
    """Mean time of a request in the system; None where it is not known."""
    outputs = run.workload.sent_output_tokens
    if summary.ttft is None or (summary.tpot is None and outputs > 1):
        return None
    return summary.ttft.mean_s + (summary.tpot.mean_s * (outputs - 1) if summary.tpot else 0.0)


def served(folder: Folder) -> Iterator[Finding]:
    """An open loop serves no more than arrives, but for chance."""
    for level in folder.levels:
        load, whole = level.run.load, level.run.whole
        if not isinstance(load, Open) or whole.completed < 2:
            continue
        chance = SIGMAS / math.sqrt(whole.completed * load.burstiness)
        if whole.requests_per_s > load.rate_rps * (1 + chance):
            yield Finding(
                "impossible",
                (level.name,),
                f"{whole.requests_per_s:.2f} requests/s were served where {load.rate_rps:g} arrived",
                "the point stands at another rate than it had",
                "measure again",
                100 * (whole.requests_per_s / load.rate_rps - 1),
            )


def records(folder: Folder, *, recompute: bool) -> Iterator[Finding]:
    """The requests beside our levels: by the hash that each level keeps of them, and with ``recompute`` by the figures
    that they give.

    None kept is no fault.
    """
    for level in folder.levels:
        path = Store(folder.path).records_path(level.run.key)
        if not folder.ours or level.run.raw_sha256 is None or not path.exists():
            continue
        text = b""
        try:
            packed = path.read_bytes()
            text = gzip.decompress(packed)
            same = bool(packed) and hashlib.sha256(text).hexdigest() == level.run.raw_sha256
            seen = "not the bytes that the level keeps the hash of" if packed else "the file is empty (0 bytes)"
        except (OSError, EOFError, zlib.error) as error:
            same, seen = False, f"cannot be read ({error})"
        if not same:
            yield Finding(
                "records",
                (f"{folder.path.name}/{path.name}",),
                seen,
                "intervals and goodput of that level rest on nothing, or on other requests than its figures",
                "restore the file, or measure the level again with --force",
            )
        elif recompute:
            yield from _recomputed(level, text)


def _recomputed(level: Level, text: bytes) -> Iterator[Finding]:
    """The level's figures, from its own requests."""
    run = level.run
    try:
        table = requests.parse(text)
    except (KeyError, TypeError, ValueError) as error:
        yield Finding(
            "records", (level.name,), f"no requests ({error})", "no figure can be checked", "measure it again"
        )
        return
    seen, off = [], [0.0]
    if (count := table.shape[1]) != run.num_requests:
        seen.append(f"{count} requests were recorded, the level says {run.num_requests}")
        off.append(abs(count / run.num_requests - 1) if run.num_requests else 1.0)
    elif run.completed:
        for window, stored in (("whole run", run.whole), ("steady window", run.steady)):
            again = requests.window(table, run.load, steady=window != "whole run") if stored else None
            for name, value, expected in _figures(stored, again) if stored and again else ():
                if abs(value - expected) > RATE_SLACK * abs(expected):
                    seen.append(f"{name} of the {window} is {value:.4g}, its requests give {expected:.4g}")
                    off.append(abs(value / expected - 1) if expected else 1.0)
    if seen:
        yield Finding(
            "impossible",
            (level.name,),
            "; ".join(seen[:4]) + (f"; and {len(seen) - 4} more" if len(seen) > 4 else ""),
            "the file was edited, or has another level's requests beside it",
            "measure the level again with --force",
            100 * max(off),
        )


def _figures(stored: Summary, again: requests.Requests) -> Iterator[tuple[str, float, float]]:
    """(name, as stored, from the requests)"""
    if again.window_s > 0:
        yield "requests/s", stored.requests_per_s, len(again.finish_s) / again.window_s
    latencies: tuple[requests.Latency, ...] = ("ttft", "tpot", "e2el")
    for name in latencies:
        found: Distribution | None = getattr(stored, name)
        values = np.sort(again.latency_s(name))
        if found is None or not len(values):
            continue
        yield f"mean {name.upper()} (s)", found.mean_s, float(values.mean())
        stored_at = found.percentiles_s
        again_at = np.percentile(values, [float(key[1:]) for key in stored_at]) if stored_at else ()
        for (key, value), expected in zip(stored_at.items(), again_at, strict=True):
            yield f"{key} {name.upper()} (s)", value, float(expected)
