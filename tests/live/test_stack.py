"""Deploy, check, sweep, plot and take down, for real. The tests build on one another, in this order."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

from tests.live.conftest import ROOT, TIMEOUT_S, Stack

SWEEP = ("-m", "pdlab.bench", "-t", "concurrency", "-c", "1,2,4", "--itl", "128", "--otl", "32")


def test_spread_moves_kv_and_answers_like_its_model_alone(stack: Stack) -> None:
    done = stack.launch("--pd-spread")
    assert done.code == 0
    assert "canary: 3 of 3 prompts give the same tokens (reference: a prefill engine alone)" in done.text
    assert re.search(r"KV transfers: \d+ done, about [\d.]+ MB, 0 failed", done.text)
    manifest = stack.running().manifest
    assert manifest.canary.equal is True
    assert manifest.placement.nodes_of("prefill") == ("local-1",)
    assert manifest.placement.nodes_of("decode") == ("local-2",)
    for package in ("ray", "vllm", "nixl", "ucx", "torch", "python"):
        assert manifest.versions[package], package


def test_killed_sweep_resumes_without_touching_what_it_had(stack: Stack) -> None:
    out = stack.folder / "results"
    sweep = stack.command(*SWEEP, "-u", stack.url, "--out", str(out))
    first = out / "pd-spread-p1xtp1-d1xtp1" / "concurrency1.json"
    process = subprocess.Popen(sweep, cwd=ROOT, env=stack.env, start_new_session=True)
    deadline = time.monotonic() + TIMEOUT_S
    while not first.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = first.read_bytes()
    done = stack.run(*SWEEP, "-u", stack.url, "--out", str(out), "--resume")
    assert done.code == 0
    assert first.read_bytes() == kept
    for concurrency in (1, 2, 4):
        run = json.loads((first.parent / f"concurrency{concurrency}.json").read_text())
        assert run["failed"] == 0 and not run["validity"]["reasons"]
        # Every request's KV cache moved while the level ran.
        moved = run["nixl_after"]["transfers"] - run["nixl_before"]["transfers"]
        assert moved >= run["completed"]
    done = stack.run(*SWEEP, "-u", stack.url, "--out", str(out))
    assert done.code == 2 and "--resume" in done.text


def test_pack_replaces_spread_on_the_same_nodes(stack: Stack) -> None:
    before = stack.nodes()
    done = stack.launch("--pd-pack")
    assert done.code == 0
    assert stack.nodes().pids == before.pids
    placement = stack.running().manifest.placement
    assert placement.nodes_of("prefill") == placement.nodes_of("decode")


def test_collocated_stores_the_reference(stack: Stack) -> None:
    done = stack.launch("--collocated", "--num", "2")
    assert done.code == 0
    assert "answers kept as the collocated reference" in done.text


def test_the_model_listens_to_every_part_of_its_prompt(stack: Stack) -> None:
    """Else no canary could fail: one changed token, early, across KV blocks of 32 and far beyond the
    sliding window of 128, changes the continuation."""
    rng = random.Random(7)
    prompt = [rng.randrange(10, 1000) for _ in range(600)]
    base = stack.complete(prompt)
    assert len(set(base)) > 4, "a model that repeats itself proves nothing"
    for position in (0, 3, 31, 32, 100, 300, 470, 599):
        changed = list(prompt)
        changed[position] = 10 + (prompt[position] + 137) % 990
        assert stack.complete(changed) != base, f"token {position} does not matter"


def test_two_prefill_replicas_answer_like_collocated(stack: Stack) -> None:
    done = stack.launch("--pd-spread", "--p-num", "2")
    assert done.code == 0
    assert "warmed 2" in done.text
    assert "canary: 3 of 3 prompts give the same tokens (reference: a collocated launch)" in done.text
    out = stack.folder / "results"
    assert stack.run(*SWEEP, "-u", stack.url, "--out", str(out), "--smoke").code == 0


def test_spoiled_transfer_fails_the_canary(stack: Stack) -> None:
    done = stack.launch("--pd-spread", "--d-engine-arg", "worker_extension_cls=tests.live.spoil.Spoil")
    assert done.code == 1
    assert "answers, but wrongly" in done.text
    assert "Traceback" not in done.text
    assert stack.running() is None
    assert not _answers(stack)
    assert stack.nodes() is not None, "nodes of an earlier launch stay"


def test_an_engine_that_cannot_start_says_why(stack: Stack) -> None:
    done = stack.launch("--pd-spread", "--d-engine-arg", "kv_cache_memory_bytes=1000")
    assert done.code == 1
    assert "No available memory for the cache blocks" in done.text
    assert "Traceback" not in done.text
    assert not _answers(stack)


def test_ctrl_c_during_the_start_takes_the_application_down(stack: Stack) -> None:
    words = ("launch_gptoss.py", "--pd-spread", "--local", "--port", str(stack.port))
    process = subprocess.Popen(
        stack.command(*words), cwd=ROOT, env=stack.env, text=True, stderr=subprocess.PIPE, start_new_session=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "starting" in line and "Decode" in line:
            break
    os.kill(process.pid, signal.SIGINT)
    rest = process.stderr.read()
    process.stderr.close()
    assert process.wait(TIMEOUT_S) == 130, rest
    engines = [pid for pid in _pids(stack) if "VLLM" in _title(pid) or "ServeReplica" in _title(pid)]
    assert engines == []


def test_viz_draws_what_was_measured(stack: Stack) -> None:
    plot = stack.folder / "plot.png"
    experiment = stack.folder / "results" / "pd-spread-p1xtp1-d1xtp1"
    done = stack.run("viz.py", "--exps", str(experiment), "--use-normalized", "--plot-path", str(plot))
    assert done.code == 0
    assert plot.stat().st_size > 10_000


def test_shutdown_leaves_nothing(stack: Stack) -> None:
    nodes, pids = stack.nodes(), _pids(stack)
    assert pids
    assert stack.run("launch_gptoss.py", "--shutdown", "--port", str(stack.port)).code == 0
    assert [pid for pid in pids if _alive(pid)] == []
    assert not Path(nodes.temp_dir).exists()
    assert stack.nodes() is None
    for port in (stack.port, nodes.gcs_port, 20000, 22000):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))


def _pids(stack: Stack) -> list[int]:
    from pdlab import local_nodes

    nodes = stack.nodes()
    return local_nodes.processes(nodes) if nodes else []


def _title(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


def _alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


def _answers(stack: Stack) -> bool:
    try:
        return bool(stack.complete("ba", tokens=1))
    except OSError:
        return False
