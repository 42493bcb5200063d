"""Checks of result folders, ours or others', for faults that would make a plot of them wrong. Reads, never writes.

Every finding names the files, the evidence, the impact on a plot (in per cent if that can be computed), and the
fix. The rules are those that published measurements of this kind have broken:

- **identical**: files of different experiments with the same bytes: one of them is not what its name states.
- **contradiction**: a name or label that states another configuration, other token counts, loads, numbers of requests
  or peaks than the content.
- **collision**: levels that a reader keyed on concurrency would merge into one.
- **reused prompts**: levels that share a seed repeat each other's prompts, and the prefix cache answers them.
- **few prompts**, **ramp**: runs that are mostly ramp-up and drain.
- **impossible**: more requests in flight than the load allows, by Little's law; rates that do not add up; figures that
  the level's own requests do not give.
- **GPUs**: a normalisation by another number of GPUs than the deployment uses.
- **records**: requests that cannot be read, or are not those that the level's figures were computed from.
- **metadata**: missing information that a repetition of the measurement needs.
- **invalid**: levels that failed the benchmark's own checks.
- **lengths**: levels of one curve whose requests had somewhat different lengths.
- **early ends**: answers that ended before the length that a name states.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pdlab.analysis.audit import registry
from pdlab.analysis.audit.folders import Folder, LevelFile, read_folder
from pdlab.analysis.audit.registry import AuditFinding, AuditInputs, Numbers, rule
from pdlab.core.text import counted
from pdlab.core.workload import Closed, Open
from pdlab.results.description import Stated
from pdlab.results.published_files import (
    RATE_SLACK,
    ContradictingRate,
    contradicting_rates,
    max_counted,
    number,
    offered_rps,
    peak_in_flight,
)
from pdlab.results.published_folders import SourcedExperiment
from pdlab.results.store import MANIFEST

LEAST_PER_CONCURRENCY = 10  # requests per unit of concurrency: the first and the last wave are then a fifth
LEAST_OPEN = 25  # requests of an open loop: fewer give a steady window with less than metrics.OPEN_LEAST
PEAK_SLACK = 1.1  # times the number of requests that can be counted in one second
RAMP_SHARE = 0.75  # mean output rate below this share of its peak second: ramp, drain or stalls
NAMES_DIFFER, CAPPED = ("file_name_differs", "file_tokens_differ"), "file_rate_capped"
NEEDED = ("git_commit", "versions", "hardware", "started_at")


def audit(
    paths: Sequence[Path],
    gpus: Mapping[Path, Stated] | None = None,
    *,
    recompute: bool = True,
    hashes: Mapping[Path, str] | None = None,
    read: Mapping[Path, Sequence[SourcedExperiment]] | None = None,
) -> list[AuditFinding]:
    """All findings, those across folders first, then folder by folder in the order given.

    ``gpus``: of folders that do not record theirs. ``recompute``: compare the figures of pdlab's levels with those of
    their requests, which takes longest. ``hashes``: of files of records that were read already. ``read``: folders of
    others that were read already.
    """
    folders = [
        folder for path in paths for folder in read_folder(path, (gpus or {}).get(path), (read or {}).get(path, ()))
    ]
    recheck = AuditInputs(recompute, hashes or {})
    found = list(registry.across(folders))
    for folder in folders:
        if folder.error:
            found.append(AuditFinding("unreadable", (folder.path.name,), {"error": folder.error}))
        else:
            found += registry.findings(folder, recheck)
    return found


def hard(findings: Sequence[AuditFinding]) -> list[AuditFinding]:
    """Findings that make any plot wrong; the others concern the precision of figures."""
    return [finding for finding in findings if finding.severity == "error"]


def shared(findings: Sequence[AuditFinding]) -> list[AuditFinding]:
    """The findings, with equal ones of several folders merged into one that has the files of all."""
    by_statement: dict[tuple[Any, ...], list[AuditFinding]] = defaultdict(list)
    for finding in findings:
        by_statement[finding.code, tuple(finding.numbers.items()), finding.percent].append(finding)
    return [
        replace(members[0], files=tuple(dict.fromkeys(name for finding in members for name in finding.files)))
        for members in by_statement.values()
    ]


def render(findings: Sequence[AuditFinding], folders: int) -> str:
    """The findings as text; one line without findings."""
    if not findings:
        return f"audit: {counted(folders, 'folder')}, no findings"
    lines = []
    distinct = shared(findings)
    for finding in distinct:
        names = _names(finding.files)
        deviation = f" (up to {finding.percent:.0f} %)" if finding.percent is not None else ""
        lines += [f"{finding.kind}: {names}", f"  evidence: {finding.evidence}"]
        lines += [f"  impact:   {finding.consequence}{deviation}", f"  fix:      {finding.fix}", ""]
    kinds = sorted({finding.kind for finding in findings})
    counts = [counted(len(distinct), "finding"), counted(folders, "folder")]
    return "\n".join([*lines, f"audit: {' in '.join(counts)}: {', '.join(kinds)}"])


def _names(files: Sequence[str]) -> str:
    """Files of one folder by name; for several folders only the folders."""
    of_folders = list(dict.fromkeys(name.partition("/")[0] for name in files))
    if len(of_folders) > 1:
        return ", ".join(of_folders)
    return ", ".join(files[:4]) + (f" and {len(files) - 4} more" if len(files) > 4 else "")


@rule("copied_files", "copied_folder", "copied_to_another", "copied_to_other_gpus", needs="folders")
def _identical(folders: Sequence[Folder]) -> Iterator[AuditFinding]:
    """Pairs of folders that share files, by bytes or by content, or records."""
    owners: dict[str, list[tuple[Folder, LevelFile]]] = defaultdict(list)
    for folder in folders:
        for level in folder.levels:
            owners[level.run.raw_sha256 or level.content_sha256].append((folder, level))
    manifests = {folder.path: folder.experiment.manifest for folder in folders if folder.experiment is not None}
    shared_levels: dict[tuple[Path, Path], list[LevelFile]] = defaultdict(list)
    for copies in owners.values():
        (first_folder, _), *copies_elsewhere = copies
        for folder, level in copies_elsewhere:
            shared_levels[first_folder.path, folder.path].append(level)
    hashes: dict[Path, set[str]] = defaultdict(set)
    for folder in folders:
        hashes[folder.path] |= {level.sha256 for level in folder.levels}
    for (path_a, path_b), levels in shared_levels.items():
        names = tuple(level.name for level in levels)
        if path_a == path_b:
            yield AuditFinding("copied_files", names, {"files": len(levels), "folder": path_a.name})
            continue
        how = "byte for byte" if hashes[path_a] >= {level.sha256 for level in levels} else "by content"
        copied: Numbers = {"files": len(levels), "folder": path_b.name, "how": how, "original": path_a.name}
        deployments = [manifests[path].deployment for path in (path_a, path_b)]
        original_gpus, gpus = (manifests[path].gpus for path in (path_a, path_b))
        if (
            deployments[0] is not None
            and deployments[1] is not None
            and (deployments[0].topology == deployments[1].topology)
        ):
            yield AuditFinding("copied_folder", names, copied)
        elif original_gpus and gpus and original_gpus != gpus:
            numbers: Numbers = {**copied, "gpus": gpus, "original_gpus": original_gpus}
            yield AuditFinding("copied_to_other_gpus", names, numbers, 100 * abs(original_gpus / gpus - 1))
        else:
            yield AuditFinding("copied_to_another", names, copied)


@rule("name_contradicts", "rate_not_offered", "peak_contradicts", needs="level")
def _contradictions(level: LevelFile) -> Iterator[AuditFinding]:
    run, load = level.run, level.run.load
    for finding in run.validity.findings:
        if finding.code in NAMES_DIFFER:
            yield AuditFinding("name_contradicts", (level.name,), {"what": finding.text})
        elif finding.code == CAPPED:
            rate = run.whole.requests_per_s
            percent = 100 * (offered_rps(load) / rate - 1) if rate else None
            yield AuditFinding("rate_not_offered", (level.name,), {"what": finding.text}, percent)
    peak = peak_in_flight(level.raw)
    full = isinstance(load, Closed) and run.completed and run.num_requests >= load.concurrency
    most = PEAK_SLACK * max_counted(load.value, run.whole)
    if full and peak is not None and not 0.5 * load.value <= peak <= most:
        numbers: Numbers = {"concurrency": load.value, "peak": peak}
        yield AuditFinding("peak_contradicts", (level.name,), numbers, 100 * abs(peak / load.value - 1))


@rule("level_renamed", needs="our level")
def _renamed(level: LevelFile) -> Iterator[AuditFinding]:
    if level.path.stem != level.run.key.stem:
        yield AuditFinding("level_renamed", (level.name,), {"level": level.run.key.stem})


@rule("rates_share_a_limit", "loads_repeat", needs="folder")
def _collisions(folder: Folder) -> Iterator[AuditFinding]:
    by_limit: dict[float, list[LevelFile]] = defaultdict(list)
    for level in folder.levels:
        limit = number(level.raw.get("max_concurrency"))
        if isinstance(level.run.load, Open) and limit is not None:
            by_limit[limit].append(level)
    for limit, levels in by_limit.items():
        if len({level.run.load.value for level in levels}) > 1:
            names = tuple(level.name for level in levels)
            yield AuditFinding("rates_share_a_limit", names, {"levels": len(levels), "limit": limit})
    repeated = [level for level in folder.levels if level.run.key.repeat > 0]
    if repeated and not folder.ours:
        yield AuditFinding("loads_repeat", tuple(level.name for level in repeated))


@rule("reused_prompts", "reused_default_seed", needs="folder")
def _reused_prompts(folder: Folder) -> Iterator[AuditFinding]:
    """Levels of one server whose prompts come from one seed, in the order in which they ran."""
    levels = sorted(
        filter(lambda level: level.counted, folder.levels),
        key=lambda level: (str(level.raw.get("date") or level.run.started_at or ""), level.run.num_requests),
    )
    prompts_drawn: dict[tuple[int | None, str], int] = {}
    reused_shares: list[tuple[LevelFile, float]] = []
    for level in levels:
        run = level.run
        # Published lengths are means of drawn lengths: they vary from level to level of one curve.
        stream = (run.seed, run.workload.model_dump_json(exclude={"seed"}) if folder.ours else "")
        before = prompts_drawn.get(stream, 0)
        if before and run.num_requests and run.completed and run.workload.sent_input_tokens > 1:
            reused_shares.append((level, 100 * min(before, run.num_requests) / run.num_requests))
        prompts_drawn[stream] = max(before, run.num_requests)
    if reused_shares:
        shares = ", ".join(f"{level.path.stem} {share:.0f} %" for level, share in reused_shares)
        code = "reused_default_seed" if reused_shares[0][0].run.seed is None else "reused_prompts"
        names = tuple(level.name for level, _ in reused_shares)
        yield AuditFinding(code, names, {"shares": shares}, max(share for _, share in reused_shares))


@rule("few_prompts", "few_arrivals", needs="folder")
def _few_prompts(folder: Folder) -> Iterator[AuditFinding]:
    short_runs = [
        (level, level.run.num_requests / level.run.load.concurrency)
        for level in folder.levels
        if level.counted
        and isinstance(level.run.load, Closed)
        and level.run.num_requests < LEAST_PER_CONCURRENCY * level.run.load.concurrency
    ]
    if short_runs:
        least = min(waves for _, waves in short_runs)
        numbers: Numbers = {"least": least, "recommended": LEAST_PER_CONCURRENCY}
        percent = 100 * min(2 / least, 1.0) if least else None
        yield AuditFinding("few_prompts", tuple(level.name for level, _ in short_runs), numbers, percent)
    short = [
        level for level in folder.levels if isinstance(level.run.load, Open) and level.run.num_requests < LEAST_OPEN
    ]
    if short:
        fewest = min(level.run.num_requests for level in short)
        numbers = {"fewest": fewest, "recommended": LEAST_OPEN}
        percent = 100 / fewest**0.5 if fewest else None
        yield AuditFinding("few_arrivals", tuple(level.name for level in short), numbers, percent)


@rule("ramp", needs="folder")
def _ramps(folder: Folder) -> Iterator[AuditFinding]:
    """Only closed loops: the client sets the rate of an open loop."""
    ramps: list[tuple[LevelFile, float]] = []
    for level in folder.levels:
        run = level.run
        peak = run.steady.output_tokens_per_s if run.steady else number(level.raw.get("max_output_tokens_per_s"))
        mean = run.whole.output_tokens_per_s
        if not isinstance(run.load, Closed) or run.workload.sent_output_tokens < 2:
            continue
        if peak is not None and 0 < mean < RAMP_SHARE * peak:
            ramps.append((level, peak / mean))
    if ramps:
        shares = ", ".join(f"{level.path.stem} {1 / ratio:.2f}" for level, ratio in ramps)
        percent = 100 * (max(ratio for _, ratio in ramps) - 1)
        yield AuditFinding("ramp", tuple(level.name for level, _ in ramps), {"shares": shares}, percent)


@rule("rate_impossible", needs="level")
def _impossible(level: LevelFile) -> Iterator[AuditFinding]:
    whole = level.run.whole
    if whole.requests_per_s > 0 and whole.duration_s > 0:
        counted = whole.completed / whole.duration_s
        off = abs(whole.requests_per_s / counted - 1) > RATE_SLACK if counted else False
        rates = [ContradictingRate("requests/s", whole.requests_per_s, counted)] if off else []
        stated = [each._replace(name=f"stated {each.name}") for each in contradicting_rates(level.raw, whole)]
        for each in (*rates, *stated):
            percent = 100 * abs(each.stated / each.expected - 1)
            yield AuditFinding("rate_impossible", (level.name,), dict(each._asdict()), percent)


@rule("wrong_gpus", needs="folder")
def _gpus(folder: Folder) -> Iterator[AuditFinding]:
    assert folder.experiment is not None
    manifest = folder.experiment.manifest
    if manifest.deployment is None:
        return
    deployed = manifest.deployment.gpus
    placed = sum(len(slots) for slots in manifest.placement.used_slots.values()) if manifest.placement else deployed
    for verb, gpus in (("states", manifest.gpus or deployed), ("places", placed)):
        if gpus != deployed:
            numbers: Numbers = {"label": manifest.deployment.label, "deployed": deployed, "verb": verb, "gpus": gpus}
            yield AuditFinding(
                "wrong_gpus", (f"{folder.path.name}/{MANIFEST}",), numbers, 100 * abs(gpus / deployed - 1)
            )


@rule("metadata", needs="folder")
def _metadata(folder: Folder) -> Iterator[AuditFinding]:
    assert folder.experiment is not None
    manifest = folder.experiment.manifest
    if not folder.ours:
        versions, hardware = (f"other {name}" if getattr(manifest, name) else name for name in ("versions", "hardware"))
        unrecorded = [f"a manifest: {versions}, {hardware}, commands, placement"]
        if all(level.run.seed is None for level in folder.levels):
            unrecorded.append("seeds")
    else:
        unrecorded = [name for name in NEEDED if not getattr(manifest, name)]
        if any(level.run.seed is None for level in folder.levels):
            unrecorded.append("seeds")
        if manifest.canary is None and manifest.origin == "measured":
            unrecorded.append("a canary result (whether the answers were right)")
    if unrecorded:
        yield AuditFinding("metadata", (folder.path.name,), {"missing": "; ".join(unrecorded)})


@rule("invalid", needs="level")
def _invalid(level: LevelFile) -> Iterator[AuditFinding]:
    reasons = [
        finding.text
        for finding in level.run.validity.findings
        if finding.code not in (*NAMES_DIFFER, CAPPED) and finding.text  # `_contradictions` reports those
    ]
    if reasons:
        yield AuditFinding("invalid", (level.name,), {"what": "; ".join(reasons)})
