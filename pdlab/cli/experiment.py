"""``python -m pdlab experiment FILE``: run a whole experiment. Its exit codes are in EPILOG."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Le

from pdlab.bench.experiment.file import Configuration
from pdlab.bench.experiment.run import EXPERIMENT, WHERE, RunOptions, RunResult, run
from pdlab.bench.experiment.schedule import (
    Schedule,
    earlier_record,
    launch_s,
    make_schedule,
    part_s,
    unfinished_work,
    visit_s,
)
from pdlab.bench.fill import planned
from pdlab.cli.rehearsal_pace import paced
from pdlab.cli.tuning import described, tuned
from pdlab.cli.until import DEFAULT_CAP, Stopping, StopTargets, check, parse_until, sight
from pdlab.core.arguments import MAX_REPEATS
from pdlab.core.bounds import parse_bounds
from pdlab.core.command_lines import command_line, flag_words, resumed
from pdlab.core.commands import PDLAB, require_installed, typed
from pdlab.core.errors import StoreError, UsageError
from pdlab.core.exit_code import NOT_CLEAN, exit_code, stop_by_signals
from pdlab.core.output_paths import check_folder
from pdlab.core.settings import parse, setting, to_words
from pdlab.core.status_line import minutes
from pdlab.core.text import counted
from pdlab.core.workload import title
from pdlab.results.schema import Experiment, note_texts
from pdlab.results.store import Store

FAILED = 1
EPILOG = f"""\
examples:
  {PDLAB} experiment pd-ratio --dry-run
      print the launches and measurements, their order and their estimated time
  {PDLAB} experiment local-pack-vs-spread --out out
      on two Ray nodes of this machine, no GPU; results in out/local-pack-vs-spread
  {PDLAB} experiment mine.yaml --until lead=5%
      add repeats until every difference of 5 % or more in output tokens/s is resolved or out of reach
  {PDLAB} experiment mine.yaml --resume
      go on after an interruption, and try failed deployments again

Exit codes: 0 all measured and valid, 1 nothing measured, 2 bad input, 3 some deployment failed or some level is
invalid, 130 interrupted. How it is run, and why: docs/methodology.md.
"""


class ExperimentSettings(RunOptions):
    """Which experiment to run, and with how many repeats."""

    COMMAND = "experiment"
    ABOUT = "Run an experiment file: launch and measure one configuration after another."
    EXAMPLES = EPILOG
    GROUPS = (EXPERIMENT, WHERE)

    file: str = setting(
        ..., "an experiment in YAML, or a name in configs/sweeps/", EXPERIMENT, positional=True, value="FILE|NAME"
    )
    until: str | None = setting(
        None,
        "add repeats until every difference of P % or more in output tokens/s is resolved, known to be smaller, or out "
        "of reach; ttft=P% and tpot=P% compare these",
        EXPERIMENT,
        value="lead=P%",
    )
    max_repeats: Annotated[int, Ge(1), Le(MAX_REPEATS)] | None = setting(
        None, "with --until: maximum number of repeats", EXPERIMENT, otherwise=str(DEFAULT_CAP), needs="until"
    )
    dry_run: bool = setting(False, "print the plan and an estimate of its time; start nothing", EXPERIMENT)


def main(argv: Sequence[str]) -> int:
    """Run the command line. Returns the exit code."""
    stop_by_signals()
    return exit_code(lambda: _run(parse(ExperimentSettings, list(argv)), argv), resume=resumed("experiment", argv))


def _run(settings: ExperimentSettings, argv: Sequence[str]) -> int:
    check_folder(settings.out, "--out", written=not settings.dry_run)
    plan, until = make_schedule(settings.file), None
    if settings.until is not None:
        until = parse_until(settings.until, plan.file, settings.max_repeats)
        plan = make_schedule(settings.file, repeats=until.looks.cap)
        check(until, plan)
    folder = settings.out / plan.file.name
    if settings.dry_run:
        print(describe(paced(plan), folder, resume=settings.resume, until=until))
        return 0
    if any(visit_s(plan, visit, folder) for visit in plan.visits):
        require_installed("ray")
    stopping = Stopping(until, plan, folder) if until else None
    options = settings.passed_to(RunOptions, command=typed("experiment", *argv))
    result = run(paced(_started(tuned(plan, options))), options, enough=stopping)
    print(summary(plan, result))
    if stopping is not None:
        if stopping.repeats < len({visit.repeat for visit in result.record.visits}):
            stopping(plan.file.repeats)
        print(stopping.text())
    if not any(result.runs.values()):
        return FAILED
    return 0 if result.valid else NOT_CLEAN


def _started(plan: Schedule) -> Schedule:
    """The plan, in which searches that start from the simulator have their first rate."""
    if not any(search.start_from for part in plan.parts.values() for search in part.searches):
        return plan
    from pdlab.cli.slo_start import of_experiment

    plan, words = of_experiment(plan)
    for sentence in words:
        print(sentence, file=sys.stderr)
    return plan


def describe(plan: Schedule, folder: Path, *, resume: bool = False, until: StopTargets | None = None) -> str:
    """The plan in words: deployments, workloads, order, estimated time, and why it may not run."""
    file = plan.file
    lines = [f"{file.name}: {file.description}" if file.description else file.name, ""]
    place = f"{file.where.local} local Ray nodes" if file.where.local else f"cluster {file.where.cluster}"
    many = counted(file.repeats, "repeat") if until is None else f"{until.looks.first} to {file.repeats} repeats"
    lines.append(f"{counted(len(plan.configurations), 'deployment')} on {place}, {many}, results in {folder}")
    for configuration in plan.configurations:
        count = configuration.deployment.gpus
        unit = "engine rank" if file.where.local else "GPU"
        size = f"{count} {unit}{'s' * (count != 1)}{_pace(plan, configuration)}"
        lines.append(f"  {configuration.name}: {configuration.deployment.label}, {size}")
        lines.append(f"    {typed('launch', *to_words(configuration.settings), *flag_words('launch', detach=True))}")
    lines.append("measured on them")
    for visit in plan.visits[: len(plan.configurations)]:
        for part in visit.parts:
            w = part.workload
            slow_down = plan.slow_down(visit.configuration) or 1.0
            seconds = part_s(file, part, part.loads, part.searches, slow_down)
            loads = ", ".join(title(load) for load in part.loads)
            searches = ", ".join(
                f"highest rate under {search.slo.label}{', from what the simulator finds' * bool(search.start_from)}"
                for search in part.searches
            )
            load_text = "; ".join(filter(None, [loads, searches]))
            lines.append(f"  {part.folder}: {w.mode} {w.label}; {load_text} (about {minutes(seconds)})")
    answered = [f"answered, too: who serves most at {parse_bounds(text, 'p50').label}" for text in file.at]
    try:
        earlier_record(folder, file, resume=True)
    except StoreError as error:  # what is there says nothing on the time of this plan
        return "\n".join([*lines, *answered, f"without --dry-run this is refused: {error}"])
    parts, local = [part for visit in plan.visits for part in visit.parts], file.where.local is not None
    lines += [
        f"KV pools: {words} (not in the times below)"
        for words in dict.fromkeys(planned(file.fill_cache, part.workload, local=local) for part in parts)
    ]
    tuning, total = described(plan, folder.parent)
    lines += tuning
    lines.append("order, drawn from seed " + str(file.seed))
    for number, visit in enumerate(plan.visits, start=1):
        seconds = visit_s(plan, visit, folder)
        total += seconds
        rest = sum(len(x) for part in visit.parts for x in unfinished_work(part, visit.repeat, folder))
        words = f"about {minutes(seconds)}" if seconds else "finished"
        lines.append(f"  {number}. repeat {visit.repeat}: {visit.configuration.name} ({rest} to measure, {words})")
    lines.append(
        f"about {minutes(total)} (minutes:seconds) in all: {launch_s(file):g} s a start, the rest by the file's expect"
    )
    lines += answered
    lines += sight(plan, folder, until)
    try:
        earlier_record(folder, file, resume=resume)
    except StoreError as error:
        lines.append(f"without --dry-run this is refused: {error}")
    return "\n".join(lines)


def _pace(plan: Schedule, configuration: Configuration) -> str:
    """What a simulated second takes; empty without a rehearsal."""
    if configuration.request.rehearsal is None:
        return ""
    slow_down = plan.slow_down(configuration)
    if slow_down is None:
        return ", simulated; its levels are estimated in simulated seconds"
    return f", simulated; a simulated second takes {slow_down:g} s"


def summary(plan: Schedule, result: RunResult) -> str:
    """The measured levels, the failures, and the next command."""
    lines = []
    for folder, runs in result.runs.items():
        bad = [level for level in runs if not level.validity.valid]
        lines.append(f"{folder}: {counted(len(runs), 'level')}, {len(runs) - len(bad)} valid")
        lines += [f"  INVALID {level.key.stem}: {'; '.join(level.validity.reasons)}" for level in bad]
    for visit in result.failed:
        lines.append(f"FAILED {visit.deployment}, repeat {visit.repeat}: {visit.error}")
    kept = [level for runs in result.runs.values() for level in runs]
    for note in note_texts(kept):
        lines.append(f"note: {note}")
    lines += ratios(result)
    lines.append(f"results: {result.folder}")
    if kept:
        lines.append(f"next: {command_line('viz', exps=(result.folder,), view={'normalized': True})}")
    return "\n".join(lines)


def ratios(result: RunResult) -> list[str]:
    """The P:D ratio from each pair of prefill-only and decode-only deployments, beside measured PD deployments of the
    same TP degrees."""
    from pdlab.analysis.phase_ratio import report

    experiments = [Store(result.folder / folder).load() for folder, runs in result.runs.items() if runs]
    phases = {
        mode: [e for e in experiments if e.runs[0].workload.mode == mode] for mode in ("prefill-only", "decode-only")
    }
    texts = []
    for prefill in phases["prefill-only"]:
        for decode in phases["decode-only"]:
            alike = [
                e
                for e in experiments
                if _tp(e) == (_tp(prefill)[0], _tp(decode)[-1]) and e.runs[0].workload.mode == "mixed"
            ]
            with contextlib.suppress(UsageError):  # one of them has no valid level, which is printed above
                texts.append(report(prefill, decode, alike))
    return texts


def _tp(experiment: Experiment) -> tuple[int, ...]:
    deployment = experiment.manifest.deployment
    return tuple(pool.tp for pool in deployment.pools.values()) if deployment else (0,)
