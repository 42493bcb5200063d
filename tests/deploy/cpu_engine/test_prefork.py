"""A process that waits, forked early: it runs what multiprocessing would start a new interpreter for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import alive, wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ends with its parent by prctl")

# What a replica does: fork early, then become something with threads, then have vLLM start its engine core.
PROGRAM = """
import multiprocessing, os, sys, threading, time
from types import SimpleNamespace
from pdlab.deploy.cpu_engine import prefork

def main():
    import prefork_target as target
    prefork.fork_after(["decimal"])
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    os.environ["SET_LATER"] = "yes"
    os.environ.pop("GONE", None)
    module = SimpleNamespace(get_mp_context=lambda: multiprocessing.get_context("spawn"))
    prefork.use_in(module)
    made = module.get_mp_context()
    os.dup2(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT, 0o600), 1)
    first = made.Process(target=target.tell, name="EngineCore", kwargs={"word": "first", "code": 7})
    second = made.Process(target=target.tell, name="EngineCore", kwargs={"word": "second", "code": 0})
    first.start(); first.join()
    second.start(); second.join()
    print("codes", first.exitcode, second.exitcode, first.pid != second.pid, flush=True)

if __name__ == "__main__":
    main()
"""
TARGET = """
import os, sys, threading
def tell(word, code):
    print(word, "decimal" in sys.modules, os.environ.get("SET_LATER"), os.environ.get("GONE"), threading.active_count(),
          os.getppid(), flush=True)
    sys.exit(code)
"""
WAITS = """
import os, sys, time
from pdlab.deploy.cpu_engine import prefork
prefork.fork_after([])
print(os.getpid(), flush=True)
time.sleep(60)
"""


def environment(folder: Path) -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[3])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, str(folder)]), "GONE": "soon"}


def test_it_runs_in_the_waiting_child_once_and_then_in_a_new_interpreter(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "prefork_target.py").write_text(TARGET)
    command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "out")]
    running = subprocess.Popen(command, env=environment(tmp_path), stderr=subprocess.PIPE, text=True)
    _, complaints = running.communicate(timeout=120)
    assert running.returncode == 0, complaints
    first, second, codes = (tmp_path / "out").read_text().splitlines()
    # What the parent imported before it forked is there, what it changed since holds, and its threads stayed behind.
    assert first.split() == ["first", "True", "yes", "None", "1", str(running.pid)]
    assert second.split() == ["second", "False", "yes", "None", "1", str(running.pid)]
    assert codes == "codes 7 0 True"


def test_a_child_that_is_gone_is_done_without(tmp_path: Path) -> None:
    killing = PROGRAM.replace(
        "    first.start()",
        "    os.kill(int(open('/proc/self/task/%d/children' % os.getpid()).read()), 9); first.start()",
    )
    assert killing != PROGRAM
    (tmp_path / "program.py").write_text(killing)
    (tmp_path / "prefork_target.py").write_text(TARGET)
    command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "out")]
    done = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    first, _, codes = (tmp_path / "out").read_text().splitlines()
    assert first.split()[:3] == ["first", "False", "yes"] and codes == "codes 7 0 True"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_who_waits_ends_with_its_parent(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WAITS]
    with subprocess.Popen(command, env=environment(tmp_path), stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        running.stdout.readline()
        (child,) = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
        running.send_signal(number)
    wait_for(lambda: not alive(int(child)))


@pytest.mark.parametrize(
    ("argv", "forks"),
    [
        (["python", "-u", "/x/ray/_private/workers/default_worker.py", "--node-ip-address=1"], True),
        (["python", "/x/ray/_private/workers/setup_worker.py", "/x/default_worker.py"], False),
        (["python", "-c", "from multiprocessing.resource_tracker import main; main(5)"], False),
    ],
)
def test_only_rays_workers_fork(argv: list[str], forks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from pdlab.deploy.cpu_engine import prefork

    calls: list[object] = []
    monkeypatch.setattr(sys, "orig_argv", argv)
    monkeypatch.setattr(prefork, "fork_after", calls.append)
    prefork.at_start()
    assert calls == ([prefork.ENGINE] if forks else [])
