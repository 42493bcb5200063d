"""Steps that run as real processes: verdicts, logs, limits, and what becomes of them by Ctrl-C."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.processes import alive, eventually, failing_program, wait_for

from pdlab.core.failure import FAILURE_FILE
from pdlab.steps import runner
from pdlab.steps.runner import ChildStep, StepRunner

# Starts a process of its own group, notes its number, and waits; says what an interrupt does.
PARENT = """
import pathlib, subprocess, sys, time
deaf = "import signal, time; signal.signal(2, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", deaf])
try:
    pathlib.Path(sys.argv[1]).write_text(str(child.pid))
    time.sleep(600)
except KeyboardInterrupt:
    print("taken down")
    raise SystemExit(130)
"""


def program(text: str, *words: str, **fields: Any) -> ChildStep:
    return ChildStep(("-c", text, *words), **fields)


def await_text(path: Path) -> str:
    wait_for(lambda: path.exists() and path.read_text())
    return path.read_text()


def interrupt_once(path: Path, number: int) -> None:
    """Send this process a signal once the file has text."""

    def send() -> None:
        await_text(path)
        os.kill(os.getpid(), number)

    threading.Thread(target=send).start()


def ended(pid: int) -> bool:
    return eventually(lambda: not alive(pid), 60)


@pytest.mark.parametrize(("code", "verdict"), [(0, "ok"), (3, "finding"), (1, "failed")])
def test_the_exit_code_is_the_verdict(code: int, verdict: str, tmp_path: Path) -> None:
    step = program(f"print('a\\n\\nb ')\nraise SystemExit({code})", log=tmp_path / "log", codes={0: "ok", 3: "finding"})
    lines: list[str] = []
    end = StepRunner().run(step, lines.append)
    assert (end.verdict, end.exit_code, end.last_line, end.failure) == (verdict, code, "b", None)
    assert lines == ["a", "", "b "] and (tmp_path / "log").read_text() == "a\n\nb \n"


def test_a_failure_is_handed_over_and_not_searched_in_the_output(tmp_path: Path) -> None:
    end = StepRunner().run(program(failing_program("no luck", Path("/kept")), log=tmp_path / "log"))
    assert end.failure is not None and end.failure.message == end.reason == "no luck"
    assert end.failure.logs == Path("/kept") and end.last_line == "bye"
    only_printed = program("print('error: a word of somebody else')\nraise SystemExit(7)", log=tmp_path / "other")
    end = StepRunner().run(only_printed)
    assert end.failure is None and end.verdict == "failed" and end.exit_code == 7


def test_a_crash_is_a_failure_too(tmp_path: Path) -> None:
    crash = "from pdlab.core import exit_code\nexit_code.exit_code(lambda: 1 // 0)"
    end = StepRunner().run(program(crash, log=tmp_path / "log"))
    assert end.verdict == "failed" and end.reason is not None and end.reason.startswith("ZeroDivisionError: ")


def test_what_a_command_starts_does_not_report_in_its_place(tmp_path: Path) -> None:
    inner = "import os, sys; sys.exit(os.environ.get('PDLAB_FAILURE_FILE') is not None)"
    outer = f"import subprocess, sys\nfrom pdlab.core import exit_code\nwords = [sys.executable, '-c', {inner!r}]\n"
    outer += "raise SystemExit(exit_code.exit_code(lambda: subprocess.run(words).returncode))"
    assert FAILURE_FILE == "PDLAB_FAILURE_FILE"
    assert StepRunner().run(program(outer, log=tmp_path / "log")).verdict == "ok"


def test_a_log_is_appended_to_and_only_the_new_lines_are_shown(tmp_path: Path) -> None:
    lines: list[str] = []
    runner = StepRunner()
    for word in ("one", "two"):
        runner.run(program(f"print({word!r}, end='')", log=tmp_path / "log"), lines.append)
    assert lines == ["one", "two"] and (tmp_path / "log").read_text() == "onetwo"


def test_standard_input_and_folder(tmp_path: Path) -> None:
    text = "import os, sys; print(os.getcwd(), sys.stdin.read())"
    end = StepRunner().run(program(text, log=tmp_path / "log", stdin="asked", cwd=tmp_path))
    assert end.last_line == f"{tmp_path} asked"


def test_what_is_left_running_does_not_hold_the_runner(tmp_path: Path) -> None:
    """It has inherited the output; a deployment that is detached goes on after its launcher."""
    text = "import subprocess, sys\nwords = [sys.executable, '-c', 'import time; time.sleep(300)']\n"
    text += "print(subprocess.Popen(words).pid)"
    end = StepRunner().run(program(text, log=tmp_path / "log"))
    pid = int(end.last_line or 0)
    try:
        assert end.verdict == "ok" and psutil.pid_exists(pid)
    finally:
        os.kill(pid, signal.SIGKILL)


def test_what_a_timed_out_step_started_goes_with_it(tmp_path: Path) -> None:
    """It is asked as by Ctrl-C first, so that a launch takes down what it started; then its whole group ends."""
    note = tmp_path / "child"

    def now() -> float:  # jumps when the step is at work, however slow this machine is
        return time.monotonic() + (10_000 if note.exists() and note.read_text() else 0)

    step = program(PARENT, str(note), log=tmp_path / "log", limit_s=5_000)
    end = StepRunner(now=now).run(step)
    assert (end.verdict, end.exit_code, end.last_line) == ("timed out", 130, "taken down")
    assert ended(int(note.read_text()))


def test_who_does_not_end_when_asked_is_killed(tmp_path: Path) -> None:
    note = tmp_path / "note"
    text = "import pathlib, signal, sys, time; signal.signal(2, signal.SIG_IGN)\n"
    text += "pathlib.Path(sys.argv[1]).write_text('x'); time.sleep(600)"
    interrupt_once(note, signal.SIGINT)
    end = StepRunner(end_wait_s=0.5).run(program(text, str(note), log=tmp_path / "log"))
    assert (end.verdict, end.exit_code) == ("interrupted", -signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_step_and_leaves_the_rest_to_the_caller(
    number: signal.Signals, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    note, called = tmp_path / "child", []
    if number == signal.SIGHUP:  # nohup has it ignored, and the runner leaves that as it is
        inherited = signal.signal(number, signal.SIG_DFL)
        request.addfinalizer(lambda: signal.signal(number, inherited))
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    runner = StepRunner(on_interrupt=lambda: called.append(1))
    interrupt_once(note, number)
    end = runner.run(program(PARENT, str(note), log=tmp_path / "log"))
    assert (end.verdict, end.exit_code, runner.interrupted, called) == ("interrupted", 130, True, [1])
    assert ended(int(note.read_text()))
    assert runner.run(program("print('never')", log=tmp_path / "no")) == ("skipped", None, 0.0, None, None)
    assert not (tmp_path / "no").exists()
    assert runner.run(program("print('down')", log=tmp_path / "down", always=True)).last_line == "down"
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def test_the_step_gets_one_interrupt_however_often_the_key_is_hit(tmp_path: Path) -> None:
    count = tmp_path / "count"
    text = (
        "import os, pathlib, signal, sys, time\ngot = []\nsignal.signal(2, lambda *_: got.append(1))\n"
        "os.kill(os.getppid(), 2)\n"
        "while not got: time.sleep(0.01)\n"
        "os.kill(os.getppid(), 2)\ntime.sleep(1.0)\n"
        "pathlib.Path(sys.argv[1]).write_text(str(len(got)))"
    )
    end = StepRunner().run(program(text, str(count), log=tmp_path / "log"))
    assert count.read_text() == "1"
    assert end.verdict == "ok", "it ended well all the same"


def test_what_always_runs_is_not_interrupted_but_has_a_limit(tmp_path: Path) -> None:
    note = tmp_path / "note"
    text = "import pathlib, sys, time\npathlib.Path(sys.argv[1]).write_text('x')\n"
    text += "time.sleep(float(sys.argv[2]))\nprint('done')"
    interrupt_once(note, signal.SIGINT)
    runner = StepRunner()
    end = runner.run(program(text, str(note), "1", log=tmp_path / "log", always=True))
    assert (end.verdict, end.last_line, runner.interrupted) == ("ok", "done", True)
    waiting = StepRunner(end_wait_s=0.5)
    waiting.interrupt()
    assert waiting.run(program(text, str(note), "600", log=tmp_path / "log", always=True)).verdict == "timed out"


def test_an_error_of_a_callback_ends_the_step(tmp_path: Path) -> None:
    note = tmp_path / "child"

    def broken(elapsed_s: float, last_line: str | None) -> None:
        if note.exists() and note.read_text():
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        StepRunner().run(program(PARENT, str(note), log=tmp_path / "log"), on_wait=broken)
    assert ended(int(note.read_text()))


def test_waiting_is_reported_with_the_last_line(tmp_path: Path) -> None:
    seen: list[tuple[float, str | None]] = []
    note = tmp_path / "seen"

    def report(elapsed_s: float, last_line: str | None) -> None:
        seen.append((elapsed_s, last_line))
        if last_line:
            note.write_text("x")

    text = "import pathlib, sys, time\nprint('working')\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.02)"
    StepRunner().run(program(text, str(note), log=tmp_path / "log"), on_wait=report)
    assert seen[-1][1] == "working" and all(0 < elapsed_s < math.inf for elapsed_s, _ in seen)
    quiet: list[float] = []
    StepRunner().run(program("pass", log=tmp_path / "log"), on_wait=lambda s, _: quiet.append(s), wait_every_s=600)
    assert quiet == []


class TestShown:
    """Without a log: the output is this process's own."""

    RUN = "import sys\nfrom pdlab.steps.runner import StepRunner\nrunner = StepRunner()\n"

    def ran(self, text: str, end: Callable[[subprocess.Popen[str]], None] | None = None) -> tuple[int, str, str]:
        with subprocess.Popen(
            [sys.executable, "-c", self.RUN + text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            if end:
                end(process)
            out, errors = process.communicate(timeout=120)
        return process.returncode, out, errors

    def test_the_command_and_its_output(self) -> None:
        text = (
            "raise SystemExit(runner.run_shown('-c', 'import sys; print(1); print(2, file=sys.stderr); sys.exit(4)'))"
        )
        code, out, errors = self.ran(text)
        assert code == 4 and errors == "2\n"
        assert out == "\n$ python -c 'import sys; print(1); print(2, file=sys.stderr); sys.exit(4)'\n1\n"

    def test_ctrl_c_ends_it_and_what_always_runs_follows(self, tmp_path: Path) -> None:
        note = tmp_path / "child"
        text = (
            f"try:\n    runner.run_shown('-c', {PARENT!r}, {str(note)!r})\n"
            "finally:\n    runner.run_shown('-c', 'print(\"down\")', always=True)\n"
        )

        def interrupt(process: subprocess.Popen[str]) -> None:
            await_text(note)
            process.send_signal(signal.SIGINT)

        code, out, errors = self.ran(text, interrupt)
        assert code in (-signal.SIGINT, 130, 1) and "KeyboardInterrupt" in errors
        assert out.index("taken down") < out.index("\ndown\n")
        assert ended(int(note.read_text()))


def test_a_command_is_shown_as_it_is_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert runner.as_typed(["launch_gptoss.py", "--model", "a b"]) == "python launch_gptoss.py --model 'a b'"
    assert runner.as_typed(["-m", "pdlab", "weights"]) == "python -m pdlab weights"
    monkeypatch.setattr(runner, "PDLAB", "pdlab")  # as where pdlab is installed
    assert runner.as_typed(["-m", "pdlab", "weights", "--model", "a b"]) == "pdlab weights --model 'a b'"
    assert runner.as_typed(["-c", "pass"]) == "python -c pass"
