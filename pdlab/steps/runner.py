"""Run one command at a time as a child process, with a log, a time limit, a verdict, and a clean end at Ctrl-C."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from pdlab.core.commands import PDLAB
from pdlab.core.failure import FAILURE_FILE, CommandFailure, read_failure
from pdlab.core.files import ROOT

# The result of a step. finding: it ran and found something wrong; later steps still run.
StepVerdict = Literal["ok", "finding", "failed", "timed out", "skipped", "interrupted"]
RAN: tuple[StepVerdict, ...] = ("ok", "finding")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
END_WAIT_S = 120.0  # an interrupted launch needs this time to shut its deployment down
POLL_S = 0.2


@dataclass(frozen=True)
class ChildStep:
    """One command to run.

    ``argv``: the words after ``python``. ``log``: the file to which its output is appended; None: standard output and
    error of this process. ``limit_s``: seconds after which it is ended. ``codes``: exit codes that are no failure, with
    their verdicts. ``always``: it runs to its end even if the runner was interrupted. ``stdin``: text on its standard
    input. ``cwd``: the folder in which it runs.
    """

    argv: tuple[str, ...]
    log: Path | None = None
    limit_s: float = math.inf
    codes: Mapping[int, StepVerdict] = field(default_factory=lambda: {0: "ok"})
    always: bool = False
    stdin: str = ""
    cwd: Path = ROOT


class StepEnd(NamedTuple):
    """How a step ended. ``exit_code``: None if it was skipped. ``last_line``: the last line of its log that is not
    blank. ``failure``: the command's own report (`pdlab.core.failure`)."""

    verdict: StepVerdict
    exit_code: int | None = None
    took_s: float = 0.0
    last_line: str | None = None
    failure: CommandFailure | None = None

    @property
    def reason(self) -> str | None:
        """Why it failed: the command's own report, else its last line; None if it printed nothing."""
        return self.failure.message if self.failure else self.last_line


class StepRunner:
    """Runs steps one after the other, each in its own session.

    SIGINT, SIGTERM and SIGHUP to this process end the running step: its process group gets SIGINT once, and SIGKILL
    after ``end_wait_s`` seconds. From then on `interrupted` is true, and only steps with ``always`` run. A step beyond
    its time limit is ended in the same way. ``on_interrupt`` is called once, while a step runs.
    """

    def __init__(
        self,
        on_interrupt: Callable[[], None] | None = None,
        end_wait_s: float = END_WAIT_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.interrupted = False
        self._on_interrupt = on_interrupt
        self._end_wait_s = end_wait_s
        self._now = now
        self._listening = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """During the block, SIGINT, SIGTERM and SIGHUP interrupt this runner only, not other code of this process.

        An ignored SIGHUP (nohup) stays ignored. In a thread that is not the main thread, nothing changes.
        """
        if self._listening or threading.current_thread() is not threading.main_thread():
            yield
            return
        ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        before = {
            number: signal.signal(number, lambda *_: self.interrupt())
            for number in SIGNALS
            if not (number is signal.SIGHUP and ignored)
        }
        self._listening = True
        try:
            yield
        finally:
            self._listening = False
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def interrupt(self) -> None:
        """End the running step. From now on, run only steps with ``always``."""
        self.interrupted = True  # nothing is printed here: a handler may interrupt a print

    def run(
        self,
        step: ChildStep,
        on_line: Callable[[str], None] | None = None,
        on_wait: Callable[[float, str | None], None] | None = None,
        wait_every_s: float = 0.0,
    ) -> StepEnd:
        """Run a step to its end.

        ``on_line`` gets each line of its log. ``on_wait`` gets the step's run time in seconds and the last line of its
        log that is not blank, every ``wait_every_s`` seconds, at most every POLL_S. An exception of ``on_line`` or
        ``on_wait`` ends the step and is raised again.
        """
        if self.interrupted and not step.always:
            return StepEnd("skipped")
        with self.listening(), tempfile.TemporaryDirectory(prefix="pdlab-step-") as name:
            failure = Path(name) / "failure.json"
            child = _Child(step, Path(name) / "stdin", {FAILURE_FILE: str(failure)}, on_line)
            began = last_wait = self._now()

            def each_poll() -> None:
                nonlocal last_wait
                if on_wait is not None and self._now() - last_wait > wait_every_s:
                    last_wait = self._now()
                    on_wait(last_wait - began, child.last_line)

            try:
                ended = self._wait(child, step, began, each_poll)
            except BaseException:
                child.interrupt()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.process.wait(self._end_wait_s)
                child.kill()
                raise
            code = child.process.returncode
            verdict = ended if ended == "timed out" else step.codes.get(code, ended or "failed")
            return StepEnd(verdict, code, self._now() - began, child.last_line, read_failure(failure))

    def run_shown(self, *argv: str, always: bool = False) -> int:
        """Print the command as a person would type it, and run it without a log. Returns its exit code.

        Raises KeyboardInterrupt if the runner was interrupted, unless ``always``.
        """
        print(f"\n$ {as_typed(argv)}", flush=True)
        code = self.run(ChildStep(argv, always=always)).exit_code
        if code is None or (self.interrupted and not always):
            raise KeyboardInterrupt
        return code

    def _wait(self, child: _Child, step: ChildStep, began: float, each_poll: Callable[[], None]) -> StepVerdict | None:
        """Wait for the end of the process. Returns why it was ended; None if it ended by itself.

        The end of its output does not count: a process that it left running may hold the output open.
        """
        ended: StepVerdict | None = None
        limit_s, kill_at = step.limit_s, math.inf
        while not child.over():
            elapsed_s = self._now() - began
            if self.interrupted and self._on_interrupt is not None:
                self._on_interrupt()
                self._on_interrupt = None
            if self.interrupted and step.always:
                limit_s = min(limit_s, elapsed_s + self._end_wait_s)  # a person who pressed Ctrl-C wants an end
            if ended is not None:
                if elapsed_s > kill_at:
                    child.kill()
            elif elapsed_s > limit_s or (self.interrupted and not step.always):
                ended = "timed out" if elapsed_s > limit_s else "interrupted"
                kill_at = elapsed_s + self._end_wait_s
                child.interrupt()
            else:
                each_poll()
        if ended is not None:
            child.kill()  # the processes that it left behind
        return ended


class _Child:
    """The process of a step, and a reader of its log."""

    def __init__(
        self, step: ChildStep, stdin: Path, environment: Mapping[str, str], on_line: Callable[[str], None] | None
    ) -> None:
        self.last_line: str | None = None
        self._log = step.log
        self._on_line = on_line
        self._rest = b""
        with contextlib.ExitStack() as files:
            stdin.write_text(step.stdin, encoding="utf-8")
            output = files.enter_context(step.log.open("ab")) if step.log else None
            self._offset = step.log.stat().st_size if step.log else 0
            self.process = subprocess.Popen(
                [sys.executable, *step.argv],
                cwd=step.cwd,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
                stdin=files.enter_context(stdin.open("rb")),
                stdout=output,
                stderr=subprocess.STDOUT if output else None,
                start_new_session=True,
            )

    def over(self) -> bool:
        """Wait up to POLL_S for the end of the process, and pass on new lines. True once it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(POLL_S)
        over = self.process.poll() is not None
        self._hand_on(at_end=over)
        return over

    def interrupt(self) -> None:
        self._signal(signal.SIGINT)

    def kill(self) -> None:
        """Kill all processes of its group."""
        self._signal(signal.SIGKILL)
        self.process.wait()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def _hand_on(self, *, at_end: bool) -> None:
        if self._log is None:
            return
        with self._log.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        self._offset += len(data)
        *whole, self._rest = (self._rest + data).split(b"\n")
        if at_end and self._rest:
            whole.append(self._rest)
        for line in whole:
            text = line.decode(errors="replace")
            self.last_line = text.strip() or self.last_line
            if self._on_line is not None:
                self._on_line(text)


def as_typed(argv: Sequence[str]) -> str:
    """The command as a person types it: in the checkout, or with the installed ``pdlab``."""
    words = ["python", *("python" if word == sys.executable else word for word in argv)]
    return shlex.join([*PDLAB.split(), *words[3:]] if words[:3] == ["python", "-m", "pdlab"] else words)
