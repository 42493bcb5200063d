"""An experiment from a file, for real: decode alone; one that fails to start; interrupted, resumed.

The first one has TP 2 behind an ingress with an API key, and what it listens at is watched from before its launch.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdlab.bench.watch import LOOK_EVERY_S, PAGES_EVERY_S
from pdlab.results.schema import Experiment, ExperimentRecord, Run
from pdlab.results.store import Store, read_record
from tests.live.conftest import BUSY_MACHINE, ROOT, TIMEOUT_S, Stack, own_stack
from tests.live.test_listening import TP_PARTS, Watch, check_others_are_refused, key_file, nobody_else_hears

FILE: dict[str, Any] = {
    "name": "live",
    "where": {"local": 1},
    "deployments": [
        {"name": "decode", "label": "collocated-1xtp1", "decode_bench": True, "workloads": ["decode"]},
        {
            "name": "broken", "label": "collocated-1xtp1", "workloads": ["mixed"],
            "engine_arg": {"worker_extension_cls": "no_such_module.Extension"},
        },
    ],
    "workloads": [
        {"name": "decode", "input_tokens": 512, "output_tokens": 48, "mode": "decode-only"},
        {"name": "mixed", "input_tokens": 64, "output_tokens": 16},
    ],
    "loads": [{"concurrency": [2, 4]}],
    "repeats": 1,
    "launch_timeout_s": 600,
    "request_timeout_s": 60,
}  # fmt: skip


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Stack]:
    """The runner starts and stops the nodes itself."""
    with own_stack(tmp_path) as made:
        yield made


def record(own: Stack) -> ExperimentRecord:
    record = read_record(own.folder / "bm" / "live")
    assert record
    return record


def check_gates(run: Run) -> None:
    """Ray's pages are read every PAGES_EVERY_S: a shorter level, on a fast machine, has no reading of the front."""
    short = run.whole.duration_s < PAGES_EVERY_S + LOOK_EVERY_S
    assert set(run.validity.failed_gates) <= BUSY_MACHINE, run.validity
    assert run.validity.unchecked.keys() <= ({"front_saturation"} if short else set()), run.validity


def check_filled(experiment: Experiment) -> None:
    """The whole context was there and none of it computed: vLLM's own counters say so."""
    assert experiment.manifest.deployment and experiment.manifest.deployment.decode_bench
    for run in experiment.runs:
        check_gates(run)
        filled = run.engines_after["collocated"].external_cache_hits or 0.0
        before = run.engines_before["collocated"].external_cache_hits or 0.0
        assert filled - before == run.completed * 511
        assert any(note.code == "decode_only_first_group" for note in run.validity.notes)
        assert run.whole.tpot is not None


def test_decode_alone_is_launched_measured_and_taken_down(own: Stack) -> None:
    """And nobody but this machine's own processes with the key gets in meanwhile."""
    path = own.folder / "live.yaml"
    flags = {"direct_streaming": False, "api_key_file": str(key_file(own))}
    decode = {"deployments": [FILE["deployments"][0] | {"label": "collocated-1xtp2", **flags}]}
    decode |= {"workloads": FILE["workloads"][:1], "loads": [{"concurrency": [2]}]}
    path.write_text(yaml.safe_dump(FILE | decode))
    words = ("-m", "pdlab", "experiment", str(path), "--out", str(own.folder / "bm"), "--port", str(own.port))
    with Watch(own) as watch, ThreadPoolExecutor(1) as pool:
        watch.launcher = {os.getpid()}
        running = pool.submit(own.run, *words)
        while own.running() is None and not running.done():
            time.sleep(0.1)
        if not running.done():
            check_others_are_refused(own)
        done = running.result()
    assert done.code in (0, 3), f"3 where a busy machine makes the load generator late: {done.text[-500:]}"
    assert own.nodes() is None and [visit.status for visit in record(own).visits] == ["done"]
    nobody_else_hears(watch, TP_PARTS)
    experiment = Store(own.folder / "bm" / "live" / "decode").load()
    assert [run.key.stem for run in experiment.runs] == ["concurrency2"]
    check_filled(experiment)


@pytest.mark.long
def test_one_fails_one_is_interrupted_and_resumed(own: Stack) -> None:
    path = own.folder / "live.yaml"
    path.write_text(yaml.safe_dump(FILE))
    flags = ("-m", "pdlab", "experiment", str(path), "--out", str(own.folder / "bm"), "--port", str(own.port))
    folder = own.folder / "bm" / "live" / "decode-decode"
    process = subprocess.Popen(own.command(*flags), cwd=ROOT, env=own.env, start_new_session=True)
    deadline = time.monotonic() + TIMEOUT_S
    while not list(folder.glob("concurrency*.json")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(TIMEOUT_S) == 130
    assert own.nodes() is None, "an interruption takes everything down"
    assert not (folder / "concurrency2.json").exists() or not (folder / "concurrency4.json").exists()
    kept = {file: file.read_bytes() for file in folder.glob("concurrency*")}

    done = own.run(*flags, "--resume")
    assert done.code == 3, "a deployment that does not start is no success"
    assert {file: file.read_bytes() for file in kept} == kept
    assert own.nodes() is None
    states = {visit.deployment: visit for visit in record(own).visits}
    assert states["decode"].status == "done"
    assert states["broken"].status == "failed"
    assert "No module named 'no_such_module'" in (states["broken"].error or "")
    assert "FAILED broken, repeat 0" in done.text and "Traceback" not in done.text

    experiment = Store(folder).load()
    assert [run.key.stem for run in experiment.runs] == ["concurrency2", "concurrency4"]
    check_filled(experiment)


@pytest.mark.long
def test_pack_against_spread_as_shipped_but_shorter(own: Stack) -> None:
    """One level, one repeat: both ways move KV cache, and the report claims no more than one repeat can."""
    data = yaml.safe_load((ROOT / "configs/sweeps/local-pack-vs-spread.yaml").read_text())
    kept = [entry for entry in data["deployments"] if entry["name"] in ("pack", "spread")]
    data |= {"name": "live", "deployments": kept, "loads": [{"concurrency": [2]}], "repeats": 1}
    del data["tune_baseline"]
    path = own.folder / "short.yaml"
    path.write_text(yaml.safe_dump(data))
    out, report = own.folder / "bm", own.folder / "report.html"
    done = own.run("-m", "pdlab", "experiment", str(path), "--out", str(out), "--port", str(own.port))
    assert done.code in (0, 3), f"3 where a busy machine makes the load generator late: {done.text[-500:]}"
    folders = [out / "live" / name for name in ("pack", "spread")]
    for folder in folders:
        (level,) = Store(folder).load().runs
        before, after = level.engines_before["decode"], level.engines_after["decode"]
        check_gates(level)
        assert (after.kv_transfers or 0.0) - (before.kv_transfers or 0.0) >= level.completed
        assert after.buckets["ttft"]["+Inf"] - before.buckets["ttft"]["+Inf"] == level.completed
    shown = own.run(
        "viz.py", "--exps", str(out / "live"), "--use-normalized", "--gpus-per-node", "2", "--no-plot",
        "--report", str(report),
    )  # fmt: skip
    assert shown.code == 0
    page = report.read_text()
    assert all(text in page for text in ("One repeat", "P1xTP1 D1xTP1 pack", "P1xTP1 D1xTP1 spread"))
