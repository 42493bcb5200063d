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

import pytest
from support import timed
from support.processes import alive, replicas, send, title
from support.web import fetch

from pdlab.bench.target import answers
from pdlab.core.workload import RunKey
from pdlab.results.store import Store
from tests.live.conftest import BUSY_MACHINE, ROOT, TIMEOUT_S, Stack

pytestmark = pytest.mark.long  # tests/live/test_first_hour.py launches the same deployments
CONVERSATIONS = """
seed: 3
conversations: {rate_rps: 2.0, sessions: 10, turns: 4, user_tokens: 40 lognormal:0.5, answer_tokens: 8, think_s: 0.3}
tenants: {a: {share: 1.0, system_tokens: 160}}
"""
SWEEP = ("-m", "pdlab", "bench", "-t", "concurrency", "-c", "1,2,4", "--itl", "128", "--otl", "32")


def test_spread_moves_kv_and_answers_like_its_model_alone(stack: Stack) -> None:
    done = stack.launch("--pd-spread")
    assert done.code == 0
    # A prompt that ends in a near tie tells nothing; which do depends on the processor's arithmetic.
    # Where an earlier test served collocated, that is the reference.
    reference = r"\(reference: a (prefill engine by itself|collocated launch)\)"
    assert re.search(rf"canary: [1-3] of 3 prompts give the same tokens[^(]*{reference}", done.text)
    assert re.search(r"KV transfers: \d+ done, about [\d.]+ MB, 0 failed", done.text)
    manifest = stack.running().manifest
    assert manifest.canary.equal is True
    assert manifest.placement.nodes_of("prefill") == ("local-1",)
    assert manifest.placement.nodes_of("decode") == ("local-2",)
    sockets = bound_sockets(stack.pids())
    assert any(path.startswith(f"{stack.nodes().temp_dir}/t/") for path in sockets), "vLLM's"
    assert [path for path in sockets if not path.startswith(f"{stack.nodes().temp_dir}/")] == []
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
    assert done.code in (0, 3), "3 where a busy machine makes the load generator late"
    assert first.read_bytes() == kept
    for concurrency in (1, 2, 4):
        run = json.loads((first.parent / f"concurrency{concurrency}.json").read_text())
        assert run["failed"] == 0 and set(run["validity"]["failed_gates"]) <= BUSY_MACHINE
        # Every request's KV cache moved while the level ran.
        moved = run["nixl_after"]["transfers"] - run["nixl_before"]["transfers"]
        assert moved >= run["completed"]
        assert run["pool_age"] is not None and 0 < run["pool_age"] < 1, "both engines tell what their KV pools hold"
        # And every request says where its time went.
        store = Store(first.parent)
        timelines = store.read_timelines(RunKey(kind="concurrency", value=concurrency))
        timed.check(timelines, "pd")
        assert len(timelines) == run["completed"]
        assert sum(read.reads for each in timelines for read in each.wire) == moved
    done = stack.run(*SWEEP, "-u", stack.url, "--out", str(out))
    assert done.code == 2 and "--resume" in done.text


def test_any_client_may_ask_where_its_time_went(stack: Stack) -> None:
    timed.check([timed.ask(stack.url, stream=stream) for stream in (True, False)], "pd")
    assert timed.ask(stack.url, stream=True, asks=False) is None
    timeline = timed.ask(stack.url, stream=True, n=2, temperature=1.0)
    assert not timeline.whole and timeline.err == "several sequences"


def test_nobody_elses_load_passes_as_valid(stack: Stack) -> None:
    """A second sweep is refused; requests that no lock can keep out make the level invalid."""
    lengths = ("--itl", "128", "--otl", "32")
    sweep = ("-m", "pdlab", "bench", "-u", stack.url, *lengths, "--out", str(stack.folder / "results"))
    words = (*sweep, "-c", "2", "--prompts-per-level", "300", "-e", "shared")
    first = stack.start(*words, until="concurrency 2:")
    for _ in range(3):
        stack.complete("ba", tokens=2)
    second = stack.run(*sweep, "-c", "4", "-e", "second")
    assert first.end().code == 3
    assert second.code == 2
    assert f"the deployment at {stack.url} is held by process {first.pid} (" in second.text
    assert "bench" in second.text
    run = json.loads((stack.folder / "results" / "shared" / "concurrency2.json").read_text())
    failed = set(run["validity"]["failed_gates"])
    assert run["completed"] == 300 and "other_requests" in failed and failed <= {"other_requests", *BUSY_MACHINE}
    # One that ended before the counters were read for the first time is not among them.
    for pool in ("prefill", "decode"):
        finished = f"the {pool} engines finished 30[123] requests during the level, but this client sent 300"
        assert re.search(finished, str(run["validity"]))


def test_a_decode_replica_that_is_killed_ends_the_level_and_is_called_replaced(stack: Stack) -> None:
    """Requests have 600 s each, and no counter tells: what Ray Serve says of the replica does."""
    lengths = ("--itl", "128", "--otl", "32")
    sweep = ("-m", "pdlab", "bench", "-u", stack.url, *lengths, "--out", str(stack.folder / "results"))
    words = (*sweep, "-c", "2", "--prompts-per-level", "2000", "--recover-s", "0", "-e", "killed")
    first = stack.start(*words, until="concurrency 2:")
    stack.note_shared_memory()
    (decode,) = replicas(stack.nodes(), "Decode")
    send(decode, signal.SIGKILL)
    ended = first.end()
    assert ended.code == 1
    last = ended.text.splitlines()[-1]
    # Whichever is seen first: with direct streaming the address is silent too until the replica is back.
    dead = r"replica \w+ of Decode:tiny-gptoss (died and is not replaced yet|was replaced)|\S+ no longer answers"
    assert re.search(f"error: ({dead})", last)
    assert "-e killed --resume" in last
    assert not (stack.folder / "results" / "killed" / "concurrency2.json").exists()
    deadline = time.monotonic() + TIMEOUT_S
    while not answers(stack.url):
        assert time.monotonic() < deadline, "Ray Serve did not replace the replica"
        time.sleep(1)
    again = stack.run(*sweep, "-c", "2", "-e", "killed", "--resume")
    assert again.code == 1 and "of Decode:tiny-gptoss" in again.text and "no KV bytes" not in again.text
    assert "launch again" in again.text


def test_pack_replaces_spread_on_the_same_nodes_and_a_second_launch_meanwhile_is_refused(stack: Stack) -> None:
    before = stack.nodes()
    words = ("launch_gptoss.py", "--pd-pack", "--local", "--detach", "--port", str(stack.port), "--timeout-s", "600")
    first = stack.start(*words, until="placed")
    second = stack.launch("--collocated", "--num", "2")
    assert first.end().code == 0
    assert second.code == 2
    assert f"is held by process {first.pid} (" in second.text and "--pd-pack" in second.text
    assert stack.running().manifest.label.startswith("pd-pack")
    assert stack.complete("ba", tokens=2)
    assert stack.nodes().pids == before.pids
    placement = stack.running().manifest.placement
    assert placement.nodes_of("prefill") == placement.nodes_of("decode")


def test_collocated_stores_the_reference(stack: Stack) -> None:
    done = stack.launch("--collocated", "--num", "2", "--routing", "session")
    assert done.code == 0
    assert "answers kept as the collocated reference" in done.text
    timed.check([timed.ask(stack.url, stream=stream) for stream in (True, False) * 10], "collocated")


def test_a_replay_keeps_its_sessions_where_their_cache_is(stack: Stack) -> None:
    check_replay(stack, "replica")


def check_replay(stack: Stack, where: str) -> None:
    """Ten conversations of four requests. ``where``: the field of a record with the engine that computes prompts."""
    path = stack.folder / "conversations.yaml"
    path.write_text(CONVERSATIONS)
    words = ("-u", stack.url, "--out", str(stack.folder / "replays"), "--workload", str(path))
    done = stack.run("-m", "pdlab", "bench", *words)
    assert done.code in (0, 3), "3 where a busy machine makes the load generator late"
    folder = stack.folder / "replays" / stack.running().manifest.label
    run = json.loads((folder / "replay1.json").read_text())
    assert run["completed"] == 40 and set(run["validity"]["failed_gates"]) <= BUSY_MACHINE
    assert not {"token_counts", "dependencies", "cache_hits", "affinity"} & run["validity"]["unchecked"].keys()
    replayed = [(each, each.replayed) for each in Store(folder).read_records(RunKey(kind="replay", value=1.0))]
    records = {own.id: (each, own) for each, own in replayed if own is not None}
    homes: dict[str, set[str]] = {}
    for each, own in records.values():
        homes.setdefault(own.session, set()).add(getattr(own, where))
        assert each.requested == (each.input_tokens, each.output_tokens)
        if own.parent is not None:
            parent = records[own.parent][0]
            assert parent.finish_s is not None and each.arrival_s >= parent.finish_s
            assert each.input_tokens > parent.input_tokens + parent.output_tokens
            assert own.foreseen_tokens is not None and own.foreseen_tokens >= parent.input_tokens // 32 * 32 - 32
    assert all(len(home) == 1 for home in homes.values()) and len(set().union(*homes.values())) == 2
    prompts = sum(each.input_tokens for each, _ in records.values())
    pool = "prefill" if where == "prefill_replica" else "collocated"
    # What an engine had, and what host memory gave back to it.
    counted = [
        sum(run[when][pool][name] or 0 for name in ("prefix_cache_hits", "external_cache_hits"))
        for when in ("engines_before", "engines_after")
    ]
    hits = counted[1] - counted[0]
    assert abs(hits - sum(own.foreseen_tokens or 0 for _, own in records.values())) <= 0.01 * prompts


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
    done = stack.launch("--pd-spread", "--p-num", "2", "--p-routing", "session", "--early-token")
    assert done.code == 0
    assert "warmed 2" in done.text
    # A prompt that ends in a near tie is not counted; one that differs fails the launch.
    assert re.search(
        r"canary: [1-3] of 3 prompts give the same tokens[^(]*\(reference: a collocated launch\)", done.text
    )
    out = stack.folder / "results"
    assert stack.run(*SWEEP, "-u", stack.url, "--out", str(out), "--smoke").code == 0
    check_replay(stack, "prefill_replica")


def test_a_first_token_from_prefill_changes_no_answer(stack: Stack) -> None:
    """But where decode alone would have taken another first token, nearly as likely."""
    timeline = timed.ask(stack.url, stream=True)
    timed.check([timeline], "pd")
    assert timeline.early and timeline.parts_of_second()
    other = 0
    for number in range(20):
        body = {"model": "tiny-gptoss", "prompt": f"ba {number} ufo wan", "max_tokens": 8, "temperature": 0}
        body |= {"stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}
        # Not known to leave the first token as it is: decode's own.
        late = {**body, "return_token_ids": False}
        answers = [timed.streamed(fetch(f"{stack.url}/v1/completions", each)[1]) for each in (body, late)]
        assert [usage for _, usage in answers] == [answers[0][1]] * 2 and answers[0][1]["completion_tokens"] == 8
        other += answers[0][0] != answers[1][0]
    assert other <= 2, other


def test_an_engine_that_cannot_start_says_why(stack: Stack) -> None:
    done = stack.launch("--pd-spread", "--d-engine-arg", "worker_extension_cls=no_such_module.Extension")
    assert done.code == 1
    assert "No module named 'no_such_module'" in done.text
    assert "Traceback" not in done.text
    assert not stack.answers()
    assert stack.nodes() is not None, "nodes of an earlier launch stay"


def test_ctrl_c_during_the_start_takes_the_application_down(stack: Stack) -> None:
    words = ("launch_gptoss.py", "--pd-spread", "--local", "--port", str(stack.port))
    launcher = stack.start(*words, until="starting.*Decode|Decode.*starting")
    os.kill(launcher.pid, signal.SIGINT)
    assert launcher.end().code == 130
    engines = [pid for pid in stack.pids() if "VLLM" in title(pid) or "ServeReplica" in title(pid)]
    assert engines == []


def test_viz_draws_what_was_measured(stack: Stack) -> None:
    plot = stack.folder / "plot.png"
    experiment = stack.folder / "results" / "pd-spread-p1xtp1-d1xtp1"
    done = stack.run("viz.py", "--exps", str(experiment), "--use-normalized", "--plot-path", str(plot))
    assert done.code == 0
    assert plot.stat().st_size > 10_000


def test_shutdown_leaves_nothing(stack: Stack) -> None:
    nodes, pids = stack.nodes(), stack.pids()
    assert pids
    assert stack.shared, "engines have semaphores in /dev/shm; else this checks nothing"
    assert stack.shutdown().code == 0
    assert [pid for pid in pids if alive(pid)] == []
    assert not Path(nodes.temp_dir).exists()
    assert [path for path in sorted(stack.shared) if Path(path).exists()] == []
    assert stack.nodes() is None
    for port in (stack.port, nodes.gcs_port, 20000, 22000):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))


def bound_sockets(pids: list[int]) -> set[str]:
    """Paths of the Unix sockets that those processes listen on."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for file in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes.add(str(file.readlink()).removeprefix("socket:[").removesuffix("]"))
    fields = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {line[7] for line in fields if len(line) > 7 and line[6] in inodes and line[7].startswith("/")}
