"""A worker whose process is forked of a template that has imported what it needs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.processes import alive, wait_for

from pdlab.deploy.cpu_engine import engine_template

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes by pidfd")

ROOT = Path(__file__).resolve().parents[3]
TEMPLATE = """
import sys
from pdlab.deploy.cpu_engine import engine_template, prefork
prefork.ENGINE = ("imported_once",)
engine_template.main()
"""
SITE = """
from pdlab.deploy.cpu_engine import prefork
prefork.ENGINE = ("imported_once",)
prefork.at_start()
"""
# What Ray's worker would do, and then nothing until a file is there.
WORKER = """
import json, os, random, sys, threading, time
import imported_once
facts = {"argv": sys.argv, "name": __name__, "mine": os.environ.get("RAY_MINE"),
         "gone": os.environ.get("RAY_TEMPLATES"),
        "folder": os.getcwd(), "pid": os.getpid(), "imported_by": imported_once.PID, "path": sys.path[0],
        "drawn": random.random()}
print(json.dumps(facts), flush=True)
while not os.path.exists(sys.argv[2]):
    time.sleep(0.01)
print("done", flush=True)
"""


class Place:
    """A folder with a worker's script and, once started, the template."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.socket = folder, folder / "socket"
        for name, text in (
            ("default_worker.py", WORKER),
            ("sitecustomize.py", SITE),
            ("imported_once.py", "import os\nPID = os.getpid()\n"),
        ):
            (folder / name).write_text(text)
        self._paths = os.pathsep.join([str(folder), str(ROOT)])

    def environment(self, **more: str) -> dict[str, str]:
        own = {"PYTHONPATH": self._paths, engine_template.SOCKET: str(self.socket)}
        return {**{name: value for name, value in os.environ.items() if not name.startswith("RAY_")}, **own, **more}

    @contextmanager
    def template(self) -> Iterator[subprocess.Popen[str]]:
        env = self.environment(RAY_TEMPLATES="yes")
        with subprocess.Popen([sys.executable, "-u", "-c", TEMPLATE], env=env, text=True, stdout=subprocess.PIPE) as up:
            try:
                while not self.socket.exists():
                    assert up.poll() is None
                    time.sleep(0.01)
                yield up
            finally:
                up.kill()

    @contextmanager
    def worker(self, **more: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
        """The worker's process and what it prints at first."""
        folder = self.folder / "elsewhere"
        folder.mkdir(exist_ok=True)
        command = [sys.executable, "-u", str(self.folder / "default_worker.py"), "--word", str(self.folder / "end")]
        env = self.environment(RAY_MINE="mine", **more)
        options: dict[str, Any] = {"env": env, "cwd": folder, "text": True, "stdout": subprocess.PIPE}
        with subprocess.Popen(command, **options) as up:
            process_facts = {}
            try:
                assert up.stdout is not None
                process_facts = json.loads(up.stdout.readline())
                yield up, process_facts
            finally:
                up.kill()
                await_end(process_facts.get("pid", up.pid))

    def end(self) -> None:
        (self.folder / "end").touch()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def await_end(pid: int) -> None:
    wait_for(lambda: not alive(pid))


def test_the_fork_takes_over_command_environment_folder_and_output(place: Place) -> None:
    with place.template() as template, place.worker() as (shell, process_facts), place.worker() as (other, second):
        assert process_facts["imported_by"] == second["imported_by"] == template.pid
        assert len({process_facts["pid"], second["pid"], shell.pid, other.pid, template.pid}) == 5
        script = str(place.folder / "default_worker.py")
        assert (
            process_facts["argv"] == [script, "--word", str(place.folder / "end")]
            and process_facts["name"] == "__main__"
        )
        assert (process_facts["mine"], process_facts["gone"]) == ("mine", None)
        assert process_facts["folder"] == str(place.folder / "elsewhere") and process_facts["path"] == str(place.folder)
        assert process_facts["drawn"] != second["drawn"]
        place.end()
        for one in (shell, other):
            assert one.stdout is not None and one.stdout.read() == "done\n" and one.wait(60) == 0


@pytest.mark.parametrize("differs", [{"OMP_NUM_THREADS": "7"}, {"VLLM_LOGGING_LEVEL": "DEBUG"}])
def test_a_worker_with_another_environment_imports_by_itself(differs: dict[str, str], place: Place) -> None:
    with place.template() as template, place.worker(**differs) as (worker, process_facts):
        assert process_facts["pid"] == process_facts["imported_by"] == worker.pid
        assert template.stdout is not None and template.stdout.readline().split()[-1] == next(iter(differs))


def test_without_a_template_a_worker_imports_by_itself(place: Place) -> None:
    with place.worker() as (worker, process_facts):
        assert process_facts["pid"] == process_facts["imported_by"] == worker.pid
    with place.template():
        pass  # its socket stays behind
    assert place.socket.exists()
    with place.worker() as (worker, process_facts):
        assert process_facts["pid"] == process_facts["imported_by"] == worker.pid


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_worker_and_fork_end_with_each_other(number: signal.Signals, place: Place) -> None:
    with place.template():
        with place.worker() as (worker, process_facts):
            worker.send_signal(number)
            await_end(process_facts["pid"])
        with place.worker() as (worker, process_facts):
            os.kill(process_facts["pid"], number)
            assert worker.wait(60) == 0
        with place.worker() as (worker, process_facts):  # as a raylet does with what is left of a worker
            os.killpg(os.getpgid(process_facts["pid"]), number)
            assert worker.wait(60) == 0
        with place.worker() as (_, process_facts):  # and the template goes on
            assert process_facts["pid"] != process_facts["imported_by"]


def test_only_variables_that_are_read_later_may_differ() -> None:
    one = {"PATH": "a", "RAY_x": "1", "UCX_TLS": "tcp", "VLLM_x": "1"}
    assert engine_template.differing(one, {"PATH": "a", "PDLAB_NODE": "2"}) == ["VLLM_x"]
    assert engine_template.differing(one, {"PATH": "b", "VLLM_x": "1", "HOME": ""}) == ["HOME", "PATH"]
