"""What every command line does alike: ends without a word when nobody reads on, and with one line at Ctrl-C."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdlab.analysis import loading
from pdlab.cli import calibrate as cli_calibrate
from pdlab.cli import plan, viz
from pdlab.core.errors import BenchError, UsageError
from pdlab.core.exit_code import INTERRUPTED, READER_GONE, exit_code
from pdlab.core.one_line_parser import OneLineParser
from pdlab.core.output_paths import check_writable
from pdlab.plan import planner

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENT = "bm_results/local-pack-vs-spread"
# The way they write is common to all: some write at once (-u), the others in the end.
COMMANDS = [
    ["viz.py", "--exps", EXPERIMENT, "--no-plot"],
    ["-u", "viz.py", "--audit", EXPERIMENT],
    ["plan.py", "--explain", "pd-pack-p1xtp2-d1xtp2", "--concurrency", "8"],
    ["-u", "launch_gptoss.py", "--pd-spread", "--cluster", "p5.48xlarge-x2", "--dry-run"],
    ["debug/doctor.py", "--here", "--quick"],
    ["-m", "pdlab"],
    ["-u", "-m", "pdlab", "--version"],
    ["-u", "-m", "pdlab", "experiment", "local-pack-vs-spread", "--dry-run"],
    ["-m", "pdlab", "calibrate", "--runs", EXPERIMENT, "--rounds", "0", "--start", "cpu-vllm-0.29"],
]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words[:3]))
def test_a_reader_that_has_gone_ends_it_quietly(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, *words], stdout=writer, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False
        )
    finally:
        os.close(writer)
    assert (done.returncode, without_notes(done.stderr)) == (READER_GONE, [])


def without_notes(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if not line.startswith("note: ")]


# The interrupt arrives in a text that `exec` runs, as it does while a dataclass is made.
IN_A_TEXT = "exec('os.kill(os.getpid(), signal.SIGINT)\\nfor _ in range(99): pass')"


@pytest.mark.parametrize(
    "program",
    [
        f"from pdlab.core.exit_code import exit_code; sys.exit(exit_code(lambda: {IN_A_TEXT}))",
        f"from pdlab.cluster.run_on_host import answering; sys.exit(answering(lambda _: {IN_A_TEXT}))",
        f"from pdlab import __main__; __main__._module = lambda _: {IN_A_TEXT}; sys.exit(__main__.main(['plan']))",
    ],
    ids=["command", "on a host", "imports"],
)
def test_the_code_of_an_interrupt_wherever_it_arrives(program: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(f"import os, signal, sys\n{program}\n")
    out = os.open(os.devnull, os.O_WRONLY)
    done = subprocess.run(
        [sys.executable, "-m", "program", str(out)], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        pass_fds=(out,), stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    os.close(out)
    assert done.returncode == INTERRUPTED


@pytest.mark.parametrize("fault", [BrokenPipeError, ConnectionResetError])
def test_a_fault_of_another_pipe_or_connection_is_no_input(fault: type[OSError]) -> None:
    def run() -> int:
        raise fault("of a process that was spoken to")

    with pytest.raises(fault):
        exit_code(run)


def test_ctrl_c_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(loading, "load", interrupted)
    monkeypatch.setattr(cli_calibrate, "fit", interrupted)
    monkeypatch.setattr(planner, "plan", interrupted)
    folder = str(ROOT / EXPERIMENT)
    assert viz.main(["--exps", folder, "--no-plot"]) == INTERRUPTED
    assert cli_calibrate.main(["--runs", folder, "--start", "cpu-vllm-0.29"]) == INTERRUPTED
    assert plan.main(["--gpus", "8"]) == INTERRUPTED
    assert without_notes(capsys.readouterr().err) == ["interrupted"] * 3


DROPPED = """
import os, signal, sys, time, weakref
from pdlab.core.exit_code import exit_code

def ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0)

class Owner:
    def __del__(self):
        if sys.argv[1] == "del":
            ctrl_c()

def run():
    owner = Owner()
    if sys.argv[1] == "finalize":
        weakref.finalize(owner, ctrl_c)
    del owner
    time.sleep(30)
    return 0

sys.exit(exit_code(run))
"""


@pytest.mark.parametrize("finalizer", ["finalize", "del"])
def test_ctrl_c_during_a_finalizer_ends_the_command(finalizer: str) -> None:
    end = subprocess.run(
        [sys.executable, "-c", DROPPED, finalizer], cwd=ROOT, text=True, capture_output=True, timeout=120
    )
    assert (end.returncode, end.stderr) == (INTERRUPTED, "interrupted\n")


def test_a_file_is_tried_without_leaving_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "x"
    check_writable(path, "--out")
    assert not path.exists()
    path.write_text("kept")
    check_writable(path, "--out")
    assert path.read_text() == "kept"
    for wrong in (tmp_path, tmp_path / "no" / "x", Path("/proc/x")):
        with pytest.raises(UsageError, match="--out"):
            check_writable(wrong, "--out")


@pytest.mark.parametrize(
    ("error", "resume", "code", "line"),
    [
        (UsageError("--x: no"), "go", 2, "error: --x: no"),
        (BenchError("gone"), "./run_bm.sh --resume", 1, "error: gone. Go on with: ./run_bm.sh --resume"),
        (BenchError("gone"), None, 1, "error: gone"),
        (KeyboardInterrupt(), "go", 130, "interrupted; finished levels are kept. Go on with: go"),
        (OSError(28, "No space left", "/x"), None, 1, "error: /x: No space left"),
        (UsageError("--x " + "y" * 400), None, 2, f"error: --x {'y' * 100}..."),
    ],
)
def test_a_failure_is_one_line(
    error: BaseException, resume: str | None, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def run() -> int:
        raise error

    assert exit_code(run, resume=resume) == code
    assert capsys.readouterr().err == f"{line}\n"


def test_a_flag_that_is_given_once_per_call_may_be_given_again_in_the_next() -> None:
    parser = OneLineParser()
    parser.add_argument("-n", "--number", "--count", type=int)
    parser.add_argument("--word", action="append")
    for _ in range(2):
        assert parser.parse_args(["-n", "3"]).number == 3
    assert parser.parse_args(["--word", "a", "--word", "b"]).word == ["a", "b"]
    with pytest.raises(UsageError, match="--number and --count are the same flag: give it once"):
        parser.parse_args(["--number", "3", "--count", "4"])
