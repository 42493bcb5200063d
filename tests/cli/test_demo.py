"""make demo with made-up commands in place of launches and sweeps: whatever fails, it ends with the plot."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from pdlab.cli import demo
from pdlab.cluster import local_nodes, machine
from pdlab.cluster.machine import BusyProcess, Machine
from pdlab.core import errors, files
from pdlab.demo import choice
from pdlab.demo import run as demo_run
from pdlab.demo.clock import DemoClock

TESTS = Path(__file__).resolve().parents[1]
SPREAD, PACK, COLLOCATED = demo_run.DEPLOYMENTS
IDLE = Machine(cores=2, idle_cores=1.9, memory_free_bytes=20 * 10**9, memory_bytes=24 * 10**9, load_average=0.1)

# Plays python: launches and sweeps as the plan says, the true viz.py unless the plan has a picture for it. Signals that
# it gets are counted in a file.
FAKE = """#!{python}
import json, os, signal, sys, time
from pathlib import Path

sys.path[:0] = [{tests!r}, {root!r}]
state = Path({state!r})
plan = json.loads((state / "plan.json").read_text())
words = sys.argv[1:]
with (state / "commands").open("a") as file:
    file.write(json.dumps(words) + "\\n")

def until_interrupted():
    got = []
    signal.signal(signal.SIGINT, lambda *_: got.append(1))
    os.kill(os.getppid(), signal.SIGINT)
    while not got:
        time.sleep(0.02)
    os.kill(os.getppid(), signal.SIGINT)  # the impatient second one
    time.sleep(1.0)
    (state / "signals").write_text(str(len(got)))
    sys.exit(130)

def fail(message, logs=None):
    from pdlab.core.errors import DeployError
    from pdlab.core.exit_code import exit_code
    from pdlab.core.failure import attach_logs

    def work():
        error = DeployError(message)
        attach_logs(error, logs)
        raise error

    code = exit_code(work)
    print("[   1.1 s] taken down", file=sys.stderr)  # what comes behind the error is not the reason
    sys.exit(code)

if words[0] == "viz.py":
    if "picture" in plan:
        sys.exit(0 if Path(words[words.index("--plot-path") + 1]).write_text(plan["picture"]) else 1)
    os.execv({python!r}, [{python!r}, *words])
if words[0] == "launch_gptoss.py":
    if "--shutdown" in words:
        if "shutdown" in plan:
            os.kill(os.getppid(), signal.SIGINT)
            time.sleep(1.0)
        (state / "up").unlink()
        sys.exit(0)
    mode = next(word for word in words if word in ("--pd-spread", "--pd-pack", "--collocated"))
    planned = plan.get("launch " + mode, {{}})
    (state / "up").touch()
    (state / "serves").write_text(mode)
    if "error" in planned:
        fail(planned["error"], state / "cache-logs")
    if "interrupt" in planned:
        until_interrupted()
    sys.exit(0)
from support import folders
from pdlab.core.deployment import Collocated, Deployment, Disaggregated, Pool
name = words[words.index("-e") + 1]
planned = plan.get("sweep " + name, {{}})
if name.startswith("pd-"):
    topology = Disaggregated(prefill=Pool(), decode=Pool(), placement=name.split("-")[1])
else:
    topology = Collocated(pool=Pool(replicas=2))
loads = tuple(int(text) for text in words[words.index("-c") + 1].split(","))
out = Path(words[words.index("--out") + 1]) / name
bad = planned.get("bad", [])
kept = loads[: planned.get("levels", len(loads))]
if kept:
    folders.write(out, Deployment(model="tiny-gptoss", topology=topology), loads=kept, repeats=1,
                  reasons={{(load, 0): ("load generator saturated",) for load in bad}})
if "interrupt" in planned:
    until_interrupted()
if "ends anyway" in planned:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(1.0)
if "error" in planned:
    fail(planned["error"])
sys.exit(3 if bad else 0)
"""


class Fake:
    """The demo in this process, with FAKE as its python."""

    def __init__(self, folder: Path) -> None:
        self.state = folder
        self.out = folder / "out"

    def run(self, plan: dict[str, Any], *words: str) -> int:
        (self.state / "plan.json").write_text(json.dumps(plan))
        held, port = local_nodes.hold_port()
        with held:
            return demo.main(["--out", str(self.out), "--port", str(port), *words])

    def commands(self) -> list[list[str]]:
        return [json.loads(line) for line in (self.state / "commands").read_text().splitlines()]

    @property
    def plot(self) -> Path:
        return self.out / "demo.png"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    python = tmp_path / "python"
    text = FAKE.format(python=sys.executable, tests=str(TESTS), root=str(files.ROOT), state=str(tmp_path))
    python.write_text(text)
    python.chmod(0o755)
    (tmp_path / "cache-logs").mkdir()
    (tmp_path / "cache-logs" / "worker.out").write_text("RuntimeError: out of memory")
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(machine, "observe", lambda: IDLE)
    monkeypatch.setattr(local_nodes, "running", lambda: True if (tmp_path / "up").exists() else None)
    return Fake(tmp_path)


def test_everything_works(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    assert fake.run({}) == 0
    assert fake.plot.read_bytes().startswith(b"\x89PNG")
    output = capsys.readouterr().out
    assert "2 cores (1.9 idle), 20 GB of 24 GB memory free" in output
    assert "concurrency 1, 2, 4, 8, 16 (" in output and "2 engines per deployment" in output
    assert "[6 of 6; 0:" in output and "left] sweep of collocated-2xtp1" in output
    assert output.count("5 of 5 levels valid") == 3
    assert "over 2xTP1 collocated" in output and "do not predict H100s" in output
    sweeps = [words for words in fake.commands() if "--itl" in words]
    assert sweeps and all("--retry-invalid" in words for words in sweeps)
    assert [words[1] for words in fake.commands() if "launch_gptoss.py" in words] == [
        "--pd-spread", "--pd-pack", "--collocated", "--shutdown",
    ]  # fmt: skip
    assert not (fake.state / "up").exists()


def test_an_invalid_level_does_not_end_it(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    assert fake.run({f"sweep {SPREAD}": {"bad": [4, 8]}}) == 0
    output = capsys.readouterr().out
    assert fake.plot.exists()
    assert f"{SPREAD}: 3 of 5 levels valid, 2 not valid (hollow and crossed in the plot)" in output
    assert "concurrency4: load generator saturated" in output
    assert "x P1xTP1 D1xTP1 spread at concurrency 8: not valid: load generator saturated" in output


def test_a_deployment_without_a_valid_level(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    assert fake.run({f"sweep {PACK}": {"bad": [1, 2]}}, "-c", "1,2") == 3
    assert fake.plot.exists()
    assert f"{PACK}: 0 of 2 levels valid" in capsys.readouterr().out


def test_a_deployment_that_does_not_start(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    assert fake.run({"launch --pd-pack": {"error": "replica Decode died: out of memory"}}) == 3
    output = capsys.readouterr().out
    assert fake.plot.exists()
    kept = fake.out / "logs" / f"engines-{PACK}"
    assert (kept / "worker.out").read_text() == "RuntimeError: out of memory"
    log = fake.out / "logs" / f"launch-{PACK}.log"
    assert "error: replica Decode died" in log.read_text()
    note = f"Not measured: {PACK}: did not start: replica Decode died: out of memory; logs: {log}, {kept}"
    (viz,) = (words for words in fake.commands() if words[0] == "viz.py")
    assert viz[viz.index("--note") + 1] == note
    assert choice.ON_THE_PLOT in viz
    assert str(fake.out / PACK) not in viz and str(fake.out / COLLOCATED) in viz
    assert output.count(note) >= 2, "in the command and in the tables"
    assert f"{COLLOCATED}: 5 of 5 levels valid" in output
    launches = [words[1] for words in fake.commands() if words[0] == "launch_gptoss.py"]
    assert launches == ["--pd-spread", "--pd-pack", "--shutdown", "--collocated", "--shutdown"]


def test_a_sweep_that_fails_midway(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    """Its finished levels are drawn; success needs one valid level of each deployment. The failure is printed."""
    assert fake.run({f"sweep {PACK}": {"levels": 2, "error": "http://x no longer answers"}}) == 0
    output = capsys.readouterr().out
    assert f"2 of 5 levels measured: {PACK}: its sweep failed: http://x no longer answers" in output


def test_nothing_starts(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    errors = {"error": "no HAProxy"}
    assert fake.run({f"launch {mode}": errors for mode in ("--pd-spread", "--pd-pack", "--collocated")}) == 1
    output = capsys.readouterr().out
    assert not fake.plot.exists() and "nothing could be drawn" in output
    assert output.count("did not start: no HAProxy") == 6
    assert "What the plot shows" not in output


@pytest.mark.parametrize(
    ("plan", "drawn"),
    [
        ({f"sweep {PACK}": {"levels": 2, "interrupt": True}}, [SPREAD, PACK]),
        ({"launch --pd-pack": {"interrupt": True}}, [SPREAD]),
        ({"launch --pd-spread": {"interrupt": True}}, []),
    ],
    ids=["sweep", "launch", "first-launch"],
)
def test_interrupted(plan: dict[str, Any], drawn: list[str], fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    handler = signal.getsignal(signal.SIGINT)
    assert fake.run(plan | {"picture": "made up"}) == 130
    output = capsys.readouterr().out
    assert (fake.state / "signals").read_text() == "1", "the running command must be interrupted once"
    assert not (fake.state / "up").exists(), "what was started is left up"
    assert fake.plot.exists() == bool(drawn)
    drawing = [words for words in fake.commands() if words[0] == "viz.py"]
    assert [Path(word).name for words in drawing for word in words if word.startswith(str(fake.out / "p"))] == drawn
    assert f"{COLLOCATED}: the demo was interrupted" in output or not drawn
    assert signal.getsignal(signal.SIGINT) is handler
    after = [words[0] for words in fake.commands()]
    assert after[-1 - len(drawing)] == "launch_gptoss.py" and fake.commands()[-1 - len(drawing)][1] == "--shutdown"


@pytest.mark.parametrize("plan", [{"shutdown": True}, {f"sweep {COLLOCATED}": {"ends anyway": True}}])
def test_interrupted_when_all_is_measured(plan: dict[str, Any], fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    """Stopping what was started is not interrupted, and complete sweeps are not called interrupted."""
    assert fake.run(plan | {"picture": "made up"}) == 130
    output = capsys.readouterr().out
    assert not (fake.state / "up").exists() and fake.plot.exists()
    assert output.count("5 of 5 levels valid") == 3 and demo_run.STOPPED not in output


@pytest.mark.parametrize(
    ("here", "levels", "reason"),
    [
        (IDLE, (1, 2, 4, 8, 16), "idle deployment"),
        (IDLE._replace(cores=1.0, idle_cores=1.0), (1, 2, 4, 8), "1 core for all processes is few"),
        (
            IDLE._replace(idle_cores=0.3, busy=(BusyProcess(42, "sh", 0.98), BusyProcess(43, "cc1", 0.7))),
            (1, 2, 4, 8),
            "other programs leave 0.3 of 2 cores",
        ),
        (IDLE._replace(idle_cores=None), (1, 2, 4, 8, 16), "idle deployment"),
    ],
    ids=["idle", "one-core", "busy", "unknown"],
)
def test_what_it_chooses(here: Machine, levels: tuple[int, ...], reason: str) -> None:
    chosen = choice.choose(here, None)
    assert chosen.levels == levels
    assert reason in " ".join(chosen.why)
    assert ("sh (pid 42) 1.0, cc1 (pid 43) 0.7" in " ".join(chosen.why)) == bool(here.busy)
    assert choice.choose(here, (3,)).levels == (3,)


def test_scarce_memory_is_said() -> None:
    reasons = " ".join(choice.choose(IDLE._replace(memory_free_bytes=5 * 10**9), None).why)
    assert "memory is scarce: 5 GB are free" in reasons
    assert "memory" not in " ".join(choice.choose(IDLE, None).why)


REFUSED = [
    ("memory", {"memory_free_bytes": 3 * 10**9}, [], ["3 GB of memory are free", "needs"]),
    ("levels", {}, ["-c", "0"], ["--concurrency", "0"]),
    ("port", {}, ["--port", "70000"], ["--port", "70000"]),
    ("flag", {}, ["--levels", "3"], ["--levels"]),
]


@pytest.mark.parametrize(("changes", "words", "messages"), [case[1:] for case in REFUSED], ids=[c[0] for c in REFUSED])
def test_refused_in_one_line(
    changes: dict[str, Any], words: list[str], messages: list[str], fake: Fake, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(machine, "observe", lambda: IDLE._replace(**changes))
    assert fake.run({}, *words) == 2
    captured = capsys.readouterr()
    assert len(captured.err.splitlines()) == 1
    assert all(word in captured.err for word in messages)
    assert not fake.out.exists() and not (fake.state / "commands").exists()


def test_low_disk_is_refused(fake: Fake, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil._ntuple_diskusage(10**10, 10**10, 10**8)  # type: ignore[attr-defined]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert fake.run({}) == 2
    assert "100 MB of disk are free" in capsys.readouterr().err


def test_what_is_served_is_not_taken_down(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    (fake.state / "up").touch()
    assert fake.run({}) == 2
    assert "--shutdown" in capsys.readouterr().err
    assert (fake.state / "up").exists()


def test_results_are_not_mixed(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.out.mkdir()
    (fake.out / "old.json").touch()
    assert fake.run({}) == 2
    assert "is not empty" in capsys.readouterr().err


def test_a_taken_port(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import socket

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        with pytest.raises(errors.UsageError, match=f"--port {taken} cannot be used"), choice.held_port(taken):
            pass
        monkeypatch.setattr(choice, "PORT", taken)
        with choice.held_port(None) as port, socket.socket() as probe:
            assert port != taken
            with pytest.raises(OSError):
                probe.bind(("127.0.0.1", port))  # without SO_REUSEADDR, as a program that looks for a free port
    assert f"port {taken} is taken" in capsys.readouterr().out


def test_it_explains_what_is_in_the_plot_alone() -> None:
    assert demo_run.PACK_AND_SPREAD in demo_run.meaning([SPREAD, PACK]) and "collocated" not in demo_run.meaning(
        [SPREAD, PACK]
    )
    assert demo_run.PD_AND_COLLOCATED in demo_run.meaning([PACK, COLLOCATED]) and "noise" not in demo_run.meaning(
        [PACK, COLLOCATED]
    )
    busy = IDLE._replace(idle_cores=0.3, busy=(BusyProcess(42, "sh", 0.98),))
    assert "0.3 of 2 cores were idle" in choice.conditions(busy)[1]
    assert choice.conditions(IDLE) == [choice.ON_THE_PLOT]


def test_the_clock_learns_from_what_steps_took() -> None:
    now = [0.0]
    clock = DemoClock([("launch", 10.0), ("sweep", 20.0)] * 2, lambda: now[0])
    assert clock.left_s() == 60
    clock.begin(0)
    now[0] = 5.0
    assert clock.left_s() == 55
    now[0] = 30.0
    assert clock.left_s() == 3 + 50  # overdue: nobody knows, a little longer
    clock.end()
    clock.begin(1)
    assert clock.left_s() == 3 * 20 + 30 + 3 * 20  # all that is known: three times slower
    now[0] = 50.0
    clock.end()
    clock.begin(2)
    assert clock.left_s() == 30 + 20
    now[0] = 81.0
    clock.end()
    clock.begin(3)
    now[0] = 101.0
    clock.end()
    assert clock.left_s() == 0
