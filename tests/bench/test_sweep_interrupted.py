"""kill -9 and Ctrl-C in the middle of a sweep, then --resume: nothing finished is lost, nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from support.processes import alive, title, wait_for, with_children
from support.sweep import BUSY_MACHINE, Oracle, ended_well, pd_deployment, publish, start_bm

from pdlab.results.store import Store

pytestmark = pytest.mark.usefixtures("warm_client")

LEVELS = ("concurrency2", "concurrency3", "concurrency4")


def start(oracle: Oracle, cache: Path, *more: str, warm: bool = True) -> subprocess.Popen[str]:
    levels = ("-c", "2,3,4", "--itl", "32", "--otl", "16", "--prompts-per-level", "24")
    return start_bm("-u", oracle.url, *levels, "--out", str(cache / "bm"), *more, cache=cache, warm=warm)


def clients(pid: int) -> list[int]:
    """Load generators that process ``pid`` has started and that live."""
    return [child for child in with_children(pid)[1:] if "pdlab.bench.client.worker" in title(child)]


def test_killed_interrupted_and_resumed(oracle: Oracle, tokenizer: Path, tmp_path: Path) -> None:
    publish(tmp_path, oracle, tokenizer, pd_deployment())
    oracle.configure({"": {"kv_failed": 0}})
    folder = tmp_path / "bm" / pd_deployment().label
    store = Store(folder)

    def finished() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in folder.glob("concurrency*")}

    def running(level: str) -> bool:
        return len(oracle.log_of(f"{level}-")) > 4

    with start(oracle, tmp_path, warm=False) as first:
        wait_for(lambda: running(LEVELS[1]))
        (client,) = clients(first.pid)
        first.send_signal(signal.SIGKILL)
        first.communicate()
    wait_for(lambda: not alive(client), 60)
    after_kill = finished()
    assert set(after_kill) == {"concurrency2.json", "concurrency2.records.json.gz"}
    served = len(oracle.log())

    with start(oracle, tmp_path, "--resume") as second:
        wait_for(lambda: len(oracle.log()) > served and running(LEVELS[2]))
        (client,) = clients(second.pid)
        second.send_signal(signal.SIGINT)
        _, errors = second.communicate(timeout=600)
    assert second.returncode == 130
    assert "interrupted; finished levels are kept. Go on with: ./run_bm.sh " in errors and "Traceback" not in errors
    assert not alive(client)
    after_interrupt = finished()
    assert len(after_interrupt) == 4
    assert {name: after_interrupt[name] for name in after_kill} == after_kill

    with start(oracle, tmp_path, "--resume") as third:
        output, errors = third.communicate(timeout=600)
    assert ended_well(third.returncode, output), errors
    assert "2 of 3 levels were already measured and skipped" in output
    done = finished()
    assert {name: done[name] for name in after_interrupt} == after_interrupt
    experiment = store.load()
    assert [run.key.stem for run in experiment.runs] == list(LEVELS)
    assert all(set(run.validity.failed_gates) <= BUSY_MACHINE and run.completed == 24 for run in experiment.runs)
    assert [line.endswith("--resume") for line in experiment.manifest.commands] == [False, True, True]
    assert not list(folder.glob(".*")), "half-written files"

    prompts = Counter(entry["prompt"] for entry in oracle.log())
    assert len(prompts) > 3 * 24 + 3 * 8
    assert max(prompts.values()) == 1, "a prompt was served again after an interruption"


def test_term_is_an_interruption_too(oracle: Oracle, tokenizer: Path, tmp_path: Path) -> None:
    publish(tmp_path, oracle, tokenizer, pd_deployment())
    with start(oracle, tmp_path) as process:
        wait_for(lambda: clients(process.pid))
        (client,) = clients(process.pid)
        os.kill(process.pid, signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 130
    wait_for(lambda: not alive(client), 60)


def test_a_server_that_dies_ends_the_sweep(oracle: Oracle, tokenizer: Path, tmp_path: Path) -> None:
    publish(tmp_path, oracle, tokenizer, pd_deployment())
    with start(oracle, tmp_path, "--recover-s", "3") as process:
        wait_for(lambda: len(oracle.log_of("concurrency3-")) > 4)
        (client,) = clients(process.pid)
        oracle.process.kill()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "waiting until the deployment is whole again, 3 s at most" in errors
    last = errors.splitlines()[-1]
    assert f"not whole again within 3 s (--recover-s): {oracle.url} does not list its models" in last
    assert "Traceback" not in errors and not alive(client)
    assert [run.key.stem for run in Store(tmp_path / "bm" / pd_deployment().label).runs()] == ["concurrency2"]
