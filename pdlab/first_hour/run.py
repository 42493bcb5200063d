"""Run the steps, each as a process of its own with a limit; keep their output and their verdicts."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from pdlab.core.errors import UsageError
from pdlab.core.files import ROOT, cache_dir, replace
from pdlab.core.schema import Frozen, validate
from pdlab.core.text import duration
from pdlab.first_hour.steps import RAN, Step, StepVerdict, left, missing

STATE = "first-hour.json"
LOGS, FAILURES = "logs", "failed-replicas"
END_WAIT_S = 90.0  # a launch that is ended takes what it started down again
REPORT_EVERY_S = 30.0
POLL_S = 0.2
LINE_CHARS = 300


class StepOutcome(Frozen):
    """What became of one step; times are seconds, ``started_at`` ISO 8601."""

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


class State(Frozen):
    """``first-hour.json``: every step's last outcome. ``asked`` is what the steps were made for."""

    schema_version: int = 1
    asked: dict[str, Any]
    outcomes: dict[str, StepOutcome] = Field(default_factory=dict)


def open_state(out: Path, settings: dict[str, Any], *, resume: bool) -> State:
    """The state of an earlier run, or a new one. Raises UsageError where the folder and --resume do not agree."""
    path = out / STATE
    if not path.exists():
        if resume:
            raise UsageError(f"--resume: {out} has no {STATE}; leave it out, or give the --out of the first run")
        if out.exists() and any(out.iterdir()):
            raise UsageError(f"--out {out} is not empty and holds no {STATE}; choose another folder")
        return State(asked=settings)
    if not resume:
        raise UsageError(f"--out {out} holds an earlier run: go on with --resume, or choose another folder")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read ({error}); choose another --out") from error
    state = validate(State, data, where=str(path))
    if state.asked != settings:
        raise UsageError(
            f"--resume: {out} was made with {_words(state.asked)}, now it is {_words(settings)}; repeat the first"
        )
    return state


def _words(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def run(
    steps: tuple[Step, ...], out: Path, state: State, print_line: Callable[[str], None], python: Sequence[str] = ()
) -> State:
    """Run what is left; a step that fails stops those alone that need it.

    ``python``: the words in front of a step's command (default: this Python's ``-m pdlab``). Raises KeyboardInterrupt
    when it is interrupted, after the running step was ended and what is always done was done.
    """
    front = tuple(python) or (sys.executable, "-m", "pdlab")
    (out / LOGS).mkdir(parents=True, exist_ok=True)
    verdicts = {name: outcome.verdict for name, outcome in state.outcomes.items()}
    todo = left(steps, verdicts)
    for step in todo:
        verdicts.pop(step.name, None)
    interrupted = False
    for step in todo:
        number = steps.index(step) + 1
        shown = shlex.join(["python", "-m", "pdlab", *step.command])
        why = "the first hour was interrupted" if interrupted and not step.always else missing(step, verdicts)
        facts = {"command": shown, "estimate_s": step.estimate_s, "limit_s": step.limit_s}
        if why:
            outcome = StepOutcome(name=step.name, verdict="skipped", detail=why, next_action="--resume", **facts)
            print_line(f"{number}/{len(steps)} {step.name}: skipped, {why}")
        else:
            print_line(f"{number}/{len(steps)} {step.name}: {step.title} (about {duration(step.estimate_s)}): {shown}")
            outcome, stopped = _run_step(step, number, [*front, *_adapted(step, out)], out, facts, print_line)
            interrupted = interrupted or stopped
            took = duration(outcome.took_s or 0.0)
            print_line(f"{number}/{len(steps)} {step.name}: {outcome.verdict.upper()} after {took}: {outcome.detail}")
            if outcome.next_action:
                print_line(f"    next: {outcome.next_action}")
        verdicts[step.name] = outcome.verdict
        state = state.model_copy(update={"outcomes": {**state.outcomes, step.name: outcome}})
        replace(out / STATE, state.model_dump_json(indent=1).encode())
    if interrupted:
        raise KeyboardInterrupt
    return state


def _run_step(
    step: Step, number: int, command: Sequence[str], out: Path, facts: dict[str, Any], print_line: Callable[[str], None]
) -> tuple[StepOutcome, bool]:
    """The outcome, and whether it was interrupted."""
    log = out / LOGS / f"{number:02d}-{step.name.replace(' ', '-')}.log"
    failures = cache_dir() / LOGS / "last-failure"
    before = _stamp(failures)
    began, started_at = time.monotonic(), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    verdict: StepVerdict | None = None
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True
        )
        try:
            last_report = began
            while process.poll() is None:
                time.sleep(POLL_S)
                now = time.monotonic()
                if now - began > step.limit_s:
                    verdict = "timed out"
                    _end(process)
                elif now - last_report > REPORT_EVERY_S:
                    last_report = now
                    print_line(
                        f"    {duration(now - began)} of at most {duration(step.limit_s)}: "
                        f"{last_line(log) or 'no output yet'}"
                    )
        except KeyboardInterrupt:
            verdict = "interrupted"
            _end(process)
    code = process.returncode
    verdict = verdict or step.codes.get(code, "failed")
    detail = _detail(step, out, log, verdict, code)
    if verdict not in RAN and step.serves and _stamp(failures) != before:
        kept = out / FAILURES / step.name.replace(" ", "-")
        shutil.rmtree(kept, ignore_errors=True)
        with contextlib.suppress(OSError):
            shutil.copytree(failures, kept, ignore_dangling_symlinks=True)
    outcome = StepOutcome(
        name=step.name,
        verdict=verdict,
        detail=detail,
        next_action=None if verdict == "ok" else step.advice,
        took_s=round(time.monotonic() - began, 1),
        exit_code=code,
        log=str(log.relative_to(out)),
        started_at=started_at,
        **facts,
    )
    return outcome, verdict == "interrupted"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask it to end, as Ctrl-C does, and then its whole session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_WAIT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _adapted(step: Step, out: Path) -> tuple[str, ...]:
    """The command, by what earlier steps found: a launch names the backend that the transfer check proved, if that is
    one; folders of results that were never made are left out."""
    if step.any_of:
        results = str(out / "results")
        return tuple(word for word in step.command if not word.startswith(results) or Path(word).is_dir())
    proven = backends(out / f"transfer-{step.name.removeprefix('launch ')}.json") if step.serves else {}
    right = [name for name, code in proven.items() if code == 0]
    return (*step.command, "--kv-backend", right[0]) if len(right) == 1 < len(proven) else step.command


def backends(path: Path) -> dict[str, int]:
    """Backend -> exit code, of a transfer check's JSON; empty where there is none."""
    try:
        runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
        return {str(run["backend"]): int(run["exit_code"]) for run in runs}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _detail(step: Step, out: Path, log: Path, verdict: StepVerdict, code: int) -> str:
    if verdict == "timed out":
        return f"not done within {duration(step.limit_s)}; last: {last_line(log) or 'no output'}"
    summary = _summary(out / step.summary) if step.summary else None
    return summary or last_line(log) or f"exit code {code}, no output"


def _summary(path: Path) -> str | None:
    """A doctor's findings counted, or a transfer check's verdicts side by side."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if "findings" in data:
            errors = [finding["topic"] for finding in data["findings"] if finding["severity"] == "error"]
            return f"{len(data['findings'])} findings, errors: {', '.join(errors) or 'none'}"
        verdicts = [(run["backend"], (run.get("verdict") or run.get("error"))["text"]) for run in data["runs"]]
        return " | ".join(f"{backend}: {text}" for backend, text in verdicts)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def last_line(log: Path) -> str | None:
    """The last line that says something: an error where there is one behind everything else."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 20_000))
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    except OSError:
        return None
    error = next((line for line in reversed(lines[-40:]) if "error: " in line), None)
    return (error or lines[-1])[:LINE_CHARS] if lines else None


def _stamp(folder: Path) -> int | None:
    try:
        return folder.stat().st_ctime_ns
    except OSError:
        return None
