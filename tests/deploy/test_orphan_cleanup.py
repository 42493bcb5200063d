"""A launcher is killed at any moment; what it made is gone a moment later, and nothing else. Without Ray: a stand-in
makes a folder, a record and processes as `pdlab.cluster.local_nodes` does."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.processes import wait_for

from pdlab.cluster import local_nodes
from pdlab.cluster.local_nodes import MARKER, LocalNodes
from pdlab.core.files import holder, launch_lock
from pdlab.core.schema import to_yaml
from pdlab.deploy import killed_launch, orphan_cleanup
from pdlab.deploy.endpoint import load_running, measured_lock, save_running

URL = "http://127.0.0.1:8321"
ROOT = Path(__file__).resolve().parents[2]
# Its steps, with a breath between them, so that a kill may fall into every one; it tells each on standard output.
LAUNCHER = textwrap.dedent(
    f"""
    import os, subprocess, sys, time
    from pathlib import Path
    sys.path.insert(0, {str(ROOT)!r})
    from pdlab.cluster import local_nodes
    from pdlab.deploy.endpoint import launching
    from pdlab.deploy.orphan_cleanup import cleanup_process

    def step(name):
        print(name, flush=True)
        time.sleep(float(sys.argv[2]))

    with cleanup_process({URL!r}) as cleanup, launching({URL!r}, local=True):
        step("kept")
        folder = Path(sys.argv[1])
        cleanup.nodes("0123456789ab", str(folder))
        step("announced")
        folder.mkdir()
        step("folder")
        env = os.environ | {{"{MARKER}": "0123456789ab"}}
        command = [sys.executable, "-c", "import time; time.sleep(600)"]
        log = (folder / "node-1.log").open("w")
        first = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        step("process")
        nodes = local_nodes.LocalNodes(
            id="0123456789ab", count=1, gcs_port=1, temp_dir=str(folder), pids=(first.pid,)
        )
        local_nodes._write(nodes)
        step("record")
        second = subprocess.Popen(command, env=env, start_new_session=True)
        step("up")
        if sys.argv[3] == "serves":
            time.sleep(600)
        if sys.argv[3] == "stops":
            local_nodes.stop(nodes)
    print("ended", flush=True)
    """
)


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    monkeypatch.setenv("PDLAB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv(MARKER, raising=False)
    started: list[subprocess.Popen[str]] = []

    def start(way: str, breath_s: float = 0.0) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", LAUNCHER, str(tmp_path / "pdlab-nodes"), str(breath_s), way]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout
        process.stdout.close()
    nodes = LocalNodes(id="0123456789ab", count=1, gcs_port=0, temp_dir=str(tmp_path / "pdlab-nodes"), pids=())
    local_nodes.stop(nodes)


def made(folder: Path) -> list[object]:
    """What there is of the nodes and their launch."""
    nodes = LocalNodes(id="0123456789ab", count=1, gcs_port=0, temp_dir=str(folder), pids=())
    locks = measured_lock(URL).parent.glob("*.lock")
    files = [path for path in (folder, local_nodes._state_file(), *locks) if path.exists()]
    return [
        *local_nodes.processes(nodes),
        *files,
        *cleanup_processes(),
        *filter(None, [holder(launch_lock(local=True))]),
    ]


def cleanup_processes() -> list[int]:
    """Cleanup processes and what they become, of this test's cache folder."""
    mine = f"PDLAB_CACHE_DIR={os.environ['PDLAB_CACHE_DIR']}".encode()
    found = []
    for proc in Path("/proc").iterdir():
        try:
            words = (proc / "cmdline").read_bytes().split(b"\0") if proc.name.isdigit() else []
            ours = any(word.endswith(b"/orphan_cleanup.py") or word == b"pdlab.deploy.killed_launch" for word in words)
            if ours and mine in (proc / "environ").read_bytes().split(b"\0"):
                found.append(int(proc.name))
        except OSError:
            pass
    return found


def await_nothing(folder: Path) -> None:
    wait_for(lambda: not made(folder), why=lambda: made(folder))


def await_step(process: subprocess.Popen[str], name: str) -> None:
    assert process.stdout
    while (line := process.stdout.readline()) != f"{name}\n":
        assert line, "the launcher ended"


def ignores(pid: int, number: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    mask = next(line.split()[1] for line in status.splitlines() if line.startswith("SigIgn:"))
    return bool(int(mask, 16) >> (number - 1) & 1)


@pytest.mark.parametrize("step", ["kept", "announced", "folder", "process", "record", "up"])
def test_a_launcher_that_is_killed_leaves_nothing(
    launcher: Callable[..., subprocess.Popen[str]], tmp_path: Path, step: str
) -> None:
    process = launcher("serves", 0.5)
    await_step(process, step)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    await_nothing(tmp_path / "pdlab-nodes")


def test_killed_at_seeded_moments(launcher: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    rng = random.Random(15)
    for _ in range(5):
        process = launcher("serves", 0.02)
        await_step(process, "kept")
        time.sleep(rng.uniform(0, 0.2))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        await_nothing(tmp_path / "pdlab-nodes")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_terminal_does_not_end_the_cleanup_process(
    launcher: Callable[..., subprocess.Popen[str]], tmp_path: Path, number: int
) -> None:
    process = launcher("serves")
    await_step(process, "up")
    (pid,) = cleanup_processes()
    # Before, only a session of its own keeps a terminal's signals from it.
    wait_for(lambda: ignores(pid, number))
    os.kill(pid, number)
    time.sleep(0.2)
    assert cleanup_processes() == [pid]
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    await_nothing(tmp_path / "pdlab-nodes")


def test_a_launch_that_ends_by_itself_ends_its_cleanup_process(
    launcher: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = launcher("stops")
    await_step(process, "ended")
    assert process.wait() == 0
    assert made(tmp_path / "pdlab-nodes") == []


def test_what_is_meant_to_stay_stays(launcher: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    process = launcher("detaches")
    await_step(process, "ended")
    assert process.wait() == 0 and cleanup_processes() == []
    nodes = local_nodes.recorded()
    assert nodes is not None and len(local_nodes.processes(nodes)) == 2
    assert local_nodes.running() == nodes


def test_other_nodes_and_what_they_serve_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: object
) -> None:
    """Killed late, after others have taken its place: only what has its id goes."""
    from support.launched import running

    mine = tmp_path / "pdlab-mine"
    mine.mkdir()
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    other = subprocess.Popen(command, env=os.environ | {MARKER: "ffffffffffff"})
    stray = subprocess.Popen(command, env=os.environ | {MARKER: "aaaaaaaaaaaa"})
    try:
        kept = LocalNodes(id="ffffffffffff", count=1, gcs_port=1, temp_dir=str(tmp_path / "other"), pids=(other.pid,))
        state = tmp_path / "cache" / "local.yaml"
        state.parent.mkdir(parents=True, exist_ok=True)
        state.write_text(to_yaml(kept))
        save_running(running(URL, local=True))
        monkeypatch.setattr(killed_launch, "LOCK_TIMEOUT_S", 0.2)
        with killed_launch.locked(launch_lock(local=True), "the right to launch"):
            killed_launch.stop_nodes(URL, "aaaaaaaaaaaa", str(mine))
        assert stray.wait(60) < 0 and not mine.exists()
        assert other.poll() is None and local_nodes.recorded() == kept
        assert load_running(URL) is not None, "the other launch's"
    finally:
        for process in (other, stray):
            process.kill()
            process.wait()
        state.unlink()


def test_nodes_that_another_launch_has_found_are_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: Callable[..., subprocess.Popen[str]]
) -> None:
    process = launcher("detaches")
    await_step(process, "ended")
    process.wait()
    nodes = local_nodes.recorded()
    assert nodes is not None
    monkeypatch.setattr(killed_launch, "LOCK_TIMEOUT_S", 0.2)
    with killed_launch.locked(launch_lock(local=True), "the right to launch"):
        killed_launch.stop_nodes(URL, nodes.id, nodes.temp_dir)
    assert len(local_nodes.processes(nodes)) == 2 and local_nodes.recorded() == nodes
    killed_launch.stop_nodes(URL, nodes.id, nodes.temp_dir)
    assert made(Path(nodes.temp_dir)) == []


def test_the_cleanup_process_is_small() -> None:
    """It lives as long as the launcher, beside engines that want the memory."""
    source = Path(orphan_cleanup.__file__).read_text(encoding="utf-8")
    modules = {line.split()[1].split(".")[0] for line in source.splitlines() if line.startswith(("import ", "from "))}
    assert modules <= set(sys.stdlib_module_names) | {"__future__"}
