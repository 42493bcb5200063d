"""Run the steps, each in its own process with a time limit. Keep their output and their verdicts."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from pdlab.core.command_lines import flag_words
from pdlab.core.errors import UsageError
from pdlab.core.files import replace
from pdlab.core.schema import Frozen, read_model
from pdlab.core.text import counted, duration
from pdlab.first_hour.steps import Step, missing, remaining_steps
from pdlab.steps.resume import check_folder_is_new, check_same_run
from pdlab.steps.runner import RAN, ChildStep, StepEnd, StepRunner, StepVerdict, as_typed

STATE = "first-hour.json"
LOGS, FAILURES = "logs", "failed-replicas"
REPORT_EVERY_S = 30.0
LINE_CHARS = 300


class StepOutcome(Frozen):
    """The result of one step. Times are seconds; ``started_at`` is ISO 8601, UTC."""

    name: str
    verdict: StepVerdict
    detail: str
    next_action: str | None = None
    command: str
    estimate_s: float
    limit_s: float
    took_s: float | None = None
    exit_code: int | None = None
    log: str | None = None
    started_at: str | None = None


class FirstHourState(Frozen):
    """``first-hour.json``: the last outcome of each step. ``settings``: those of the run."""

    schema_version: int = 1
    settings: dict[str, Any]
    outcomes: dict[str, StepOutcome] = Field(default_factory=dict)


def open_state(out: Path, settings: dict[str, Any], *, resume: bool) -> FirstHourState:
    """The state of an earlier run, or a new one. Raises UsageError or StoreError if ``out`` does not fit --resume."""
    path = out / STATE
    if not path.exists():
        if resume:
            raise UsageError(f"--resume: {out} has no {STATE}; leave it out, or give the --out of the first run")
        check_folder_is_new(out, STATE)
        return FirstHourState(settings=settings)
    state = read_model(path, FirstHourState)
    check_same_run(out, state.settings, settings, resume=resume)
    return state


def run(
    steps: tuple[Step, ...],
    out: Path,
    state: FirstHourState,
    print_line: Callable[[str], None],
    front: Sequence[str] = ("-m", "pdlab"),
) -> FirstHourState:
    """Run the remaining steps. A step that fails stops only the steps that need it.

    ``front``: the interpreter's arguments before the words of a step's command. Raises KeyboardInterrupt after an
    interruption, once the running step has ended and the steps with ``always`` are done.
    """
    (out / LOGS).mkdir(parents=True, exist_ok=True)
    verdicts = {name: outcome.verdict for name, outcome in state.outcomes.items()}
    todo = remaining_steps(steps, verdicts)
    for step in todo:
        verdicts.pop(step.name, None)
    runner = StepRunner()
    with runner.listening():
        for step in todo:
            number = steps.index(step) + 1
            place = f"{number}/{len(steps)} {step.name}"
            shown = as_typed(["-m", "pdlab", *step.command])
            stopped = runner.interrupted and not step.always
            why = "the first hour was interrupted" if stopped else missing(step, verdicts)
            facts = {"command": shown, "estimate_s": step.estimate_s, "limit_s": step.limit_s}
            if why:
                outcome = StepOutcome(name=step.name, verdict="skipped", detail=why, next_action="--resume", **facts)
                print_line(f"{place}: skipped, {why}")
            else:
                print_line(f"{place}: {step.title} (about {duration(step.estimate_s)}): {shown}")
                outcome = _run_step(runner, step, number, [*front, *_adapted(step, out)], out, facts, print_line)
                took = duration(outcome.took_s or 0.0)
                print_line(f"{place}: {outcome.verdict.upper()} after {took}: {outcome.detail}")
                if outcome.next_action:
                    print_line(f"    next: {outcome.next_action}")
            verdicts[step.name] = outcome.verdict
            state = state.model_copy(update={"outcomes": {**state.outcomes, step.name: outcome}})
            replace(out / STATE, state.model_dump_json(indent=1).encode())
    if runner.interrupted:
        raise KeyboardInterrupt
    return state


def _run_step(
    runner: StepRunner,
    step: Step,
    number: int,
    argv: Sequence[str],
    out: Path,
    facts: dict[str, Any],
    print_line: Callable[[str], None],
) -> StepOutcome:
    log = out / LOGS / f"{number:02d}-{step.name.replace(' ', '-')}.log"
    log.unlink(missing_ok=True)  # an earlier run may have left one
    started_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())

    def waiting(elapsed_s: float, last_line: str | None) -> None:
        last = _cut(last_line) or "no output yet"
        print_line(f"    {duration(elapsed_s)} of at most {duration(step.limit_s)}: {last}")

    end = runner.run(
        ChildStep(tuple(argv), log=log, limit_s=step.limit_s, codes=step.codes, always=step.always),
        on_wait=waiting,
        wait_every_s=REPORT_EVERY_S,
    )
    if end.failure and end.failure.logs and end.verdict not in RAN:
        kept = out / FAILURES / step.name.replace(" ", "-")
        shutil.rmtree(kept, ignore_errors=True)
        with contextlib.suppress(OSError):
            shutil.copytree(end.failure.logs, kept, ignore_dangling_symlinks=True)
    return StepOutcome(
        name=step.name,
        verdict=end.verdict,
        detail=_detail(step, out, end),
        next_action=None if end.verdict == "ok" else step.advice,
        took_s=round(end.took_s, 1),
        exit_code=end.exit_code,
        log=str(log.relative_to(out)),
        started_at=started_at,
        **facts,
    )


def _adapted(step: Step, out: Path) -> tuple[str, ...]:
    """The step's command, changed by what earlier steps found.

    A launch gets the KV backend of the transfer check, if only one backend passed it. Result folders that do not exist
    are left out.
    """
    if step.any_of:
        results = str(out / "results")
        return tuple(word for word in step.command if not word.startswith(results) or Path(word).is_dir())
    proven = backends(out / f"transfer-{step.name.removeprefix('launch ')}.json") if step.serves else {}
    right = [name for name, code in proven.items() if code == 0]
    return (
        (*step.command, *flag_words("launch", transport={"backends": (right[0],)}))
        if len(right) == 1 < len(proven)
        else step.command
    )


def backends(path: Path) -> dict[str, int]:
    """Backend -> exit code, from a transfer check's JSON; empty if the file cannot be read."""
    try:
        runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
        return {str(run["backend"]): int(run["exit_code"]) for run in runs}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _detail(step: Step, out: Path, end: StepEnd) -> str:
    if end.verdict == "timed out":
        return f"not done within {duration(step.limit_s)}; last: {_cut(end.last_line) or 'no output'}"
    summary = _summary(out / step.summary) if step.summary else None
    failure = f"error: {end.failure.message}" if end.failure and end.verdict != "interrupted" else end.last_line
    return summary or _cut(failure) or f"exit code {end.exit_code}, no output"


def _cut(line: str | None) -> str | None:
    return None if line is None else line[:LINE_CHARS]


def _summary(path: Path) -> str | None:
    """The number of a doctor's findings with the topics of its errors, or the verdicts of a transfer check."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if "findings" in data:
            errors = [finding["topic"] for finding in data["findings"] if finding["severity"] == "error"]
            return f"{counted(len(data['findings']), 'finding')}, errors: {', '.join(errors) or 'none'}"
        verdicts = [(run["backend"], (run.get("verdict") or run.get("error"))["text"]) for run in data["runs"]]
        return " | ".join(f"{backend}: {text}" for backend, text in verdicts)
    except (OSError, ValueError, KeyError, TypeError):
        return None
