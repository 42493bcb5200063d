"""One sweep at a time on a deployment and in a folder, prompts that nobody sent before, and ends with their reason."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections import Counter
from pathlib import Path

import pytest
from support.processes import wait_for
from support.sweep import BUSY_MACHINE, Oracle, ended_well, pd_deployment, publish, run_bm, start_bm

from pdlab.results.store import Store

pytestmark = pytest.mark.usefixtures("warm_client")

LEVEL = ("--itl", "32", "--otl", "16", "--prompts-per-level", "24")


@pytest.fixture
def published(oracle: Oracle, tokenizer: Path, tmp_path: Path) -> Oracle:
    publish(tmp_path, oracle, tokenizer, pd_deployment())
    return oracle


def wait_for_level(oracle: Oracle, name: str) -> None:
    wait_for(lambda: len(oracle.log_of(name)) >= 4)


def test_the_second_of_two_sweeps_is_refused_and_the_first_is_valid(published: Oracle, tmp_path: Path) -> None:
    out = str(tmp_path / "bm")
    with start_bm("-u", published.url, *LEVEL, "-c", "2,3", "-e", "one", "--out", out, cache=tmp_path) as first:
        wait_for_level(published, "concurrency2-")
        second = run_bm("-u", published.url, *LEVEL, "-c", "4", "-e", "two", "--out", out, cache=tmp_path)
        output, errors = first.communicate(timeout=100)
    assert ended_well(first.returncode, output), errors
    assert second.returncode == 2
    assert f"the deployment at {published.url} is held by process {first.pid} (" in second.stderr
    assert "bench" in second.stderr and " s (since " in second.stderr
    assert not (tmp_path / "bm" / "two").exists() and not published.log_of("concurrency4-")
    assert not list(tmp_path.rglob("*.lock"))


def test_requests_that_no_lock_keeps_out_make_the_level_invalid(published: Oracle, tmp_path: Path) -> None:
    """As those of a user, or of a sweep from another machine."""
    body = json.dumps({"prompt": "not of the sweep", "max_tokens": 2, "stream": True}).encode()
    with start_bm("-u", published.url, *LEVEL, "-c", "2,3", "-e", "one", "--out", "bm", cache=tmp_path) as first:
        wait_for_level(published, "concurrency2-")
        for _ in range(5):
            urllib.request.urlopen(f"{published.url}/v1/completions", body, timeout=30).read()
        first.communicate(timeout=100)
    assert first.returncode == 3
    during, after = Store(tmp_path / "bm" / "one").runs()
    assert "other_requests" in during.validity.failed_gates
    assert set(during.validity.failed_gates) <= {"other_requests", *BUSY_MACHINE}
    expected = "the decode engines finished 29 requests during the level, but this client sent 24"
    assert any(expected in reason for reason in during.validity.reasons)
    assert set(after.validity.failed_gates) <= BUSY_MACHINE


def test_a_folder_is_written_by_one_sweep(tokenizer: Path, published: Oracle, tmp_path: Path) -> None:
    """Two deployments, one folder: the second sweep is refused before it reads what is there."""
    folder = tmp_path / "bm" / "one"
    with Store(folder).held():
        refused = run_bm("-u", published.url, *LEVEL, "-e", "one", "--out", str(tmp_path / "bm"), cache=tmp_path)
    assert refused.returncode == 2, refused.stderr
    assert f"the result folder {folder} is held by process {os.getpid()} (" in refused.stderr
    assert not published.log()


def test_another_experiment_on_the_same_start_sends_other_prompts(
    published: Oracle, tokenizer: Path, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        done = run_bm("-u", published.url, *LEVEL, "-c", "2", "-e", name, "--out", "bm", cache=tmp_path)
        assert ended_well(done.returncode, done.stdout), done.stderr
    prompts = Counter(entry["prompt"] for entry in published.log())
    assert len(prompts) == 2 * (24 + 8) and max(prompts.values()) == 1
    one, two = (next(Store(tmp_path / "bm" / name).runs()) for name in ("one", "two"))
    assert one.seed is not None and two.seed is not None and one.seed != two.seed
    # A new start has an empty prefix cache: the same prompts as after the first start, so that starts compare.
    again = tmp_path / "again"
    again.mkdir()
    publish(again, published, tokenizer, pd_deployment())
    done = run_bm("-u", published.url, *LEVEL, "-c", "2", "-e", "three", "--out", "bm", cache=again)
    assert ended_well(done.returncode, done.stdout), done.stderr
    assert next(Store(again / "bm" / "three").runs()).seed == one.seed


def test_damaged_requests_are_not_resumed_upon(published: Oracle, tmp_path: Path) -> None:
    sweep = ("-u", published.url, *LEVEL, "-c", "2,3", "-e", "one", "--out", "bm")
    done = run_bm(*sweep, cache=tmp_path)
    assert ended_well(done.returncode, done.stdout), done.stderr
    path = tmp_path / "bm" / "one" / "concurrency2.records.json.gz"
    path.write_bytes(path.read_bytes()[:-30])
    served = len(published.log())
    refused = run_bm(*sweep, "--resume", cache=tmp_path)
    assert refused.returncode == 2 and len(published.log()) == served
    assert "bm/one/concurrency2.records.json.gz: the level's requests cannot be read" in refused.stderr
    assert "remove bm/one/concurrency2.json and concurrency2.records.json.gz" in refused.stderr
    path.unlink()
    path.with_name("concurrency2.json").unlink()
    done = run_bm(*sweep, "--resume", cache=tmp_path)
    assert ended_well(done.returncode, done.stdout), done.stderr


def test_a_full_disk_names_the_file_and_how_to_go_on(published: Oracle, tmp_path: Path, small_disk: Path) -> None:
    sweep = ("-u", published.url, *LEVEL, "-c", "2,3", "-e", "one", "--out", str(small_disk))
    with start_bm(*sweep, cache=tmp_path) as process:
        wait_for_level(published, "concurrency3-")
        room = os.statvfs(small_disk)
        (small_disk / "ballast").write_bytes(bytes(room.f_bavail * room.f_frsize))
        _, errors = process.communicate(timeout=100)
    assert process.returncode == 1, errors
    last = errors.splitlines()[-1]
    assert last.startswith(f"error: {small_disk}/one/concurrency3.records.json.gz cannot be written (No space")
    assert last.endswith(f"--out {small_disk} --resume") and "Go on with: ./run_bm.sh -u" in last
    assert "Traceback" not in errors
    kept = sorted(path.name for path in (small_disk / "one").iterdir())
    assert kept == ["concurrency2.json", "concurrency2.records.json.gz", "manifest.json"]
    (small_disk / "ballast").unlink()
    done = run_bm(*sweep, "--resume", cache=tmp_path)
    assert ended_well(done.returncode, done.stdout), done.stderr
    assert "1 of 2 levels were already measured and skipped" in done.stdout


@pytest.mark.parametrize("way", ["stopped", "accepts nobody"])
def test_a_server_that_falls_silent_ends_the_level(published: Oracle, tmp_path: Path, way: str) -> None:
    """Requests have 600 s each; the level ends by what the watcher sees. Stopped, the kernel goes on accepting."""
    published.configure({"concurrency2-": {"hang_every": 1}})
    flags = ("-c", "2", "--recover-s", "0", "-e", "one", "--out", "bm")
    with start_bm("-u", published.url, *LEVEL, *flags, cache=tmp_path) as process:
        wait_for(lambda: published.log_of("concurrency2-"))
        published.process.send_signal(signal.SIGSTOP if way == "stopped" else signal.SIGKILL)
        _, errors = process.communicate(timeout=120)
    last = errors.splitlines()[-1]
    assert process.returncode == 1
    assert last.startswith(f"error: {published.url} no longer answers")
    assert "the running level is not kept" in last and last.endswith("-e one --out bm --resume")
    assert "Traceback" not in errors
    assert list(Store(tmp_path / "bm" / "one").runs()) == []
