"""A PD deployment with two prefill replicas outlives the loss of one: every request is right, a sweep goes on, and
pinned KV blocks hold a replica that stops and nothing else. The tests build on one another."""

from __future__ import annotations

import json
import random
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.processes import replicas, send

from pdlab.deploy.engine_metrics import read_snapshot
from tests.live.conftest import BUSY_MACHINE, TIMEOUT_S, Stack

pytestmark = pytest.mark.long
PREFILL_TIMEOUT_S = 5
PROMPTS = [[random.Random(number).randrange(10, 1000) for _ in range(90)] for number in range(24)]
ALONE: list[list[int]] = []


def ask_all(stack: Stack) -> list[list[int]]:
    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(stack.complete, PROMPTS))


def right(answers: list[list[int]]) -> bool:
    """One of them may take the other of two tokens that are alike up to rounding, as its batch decides."""
    return sum(answer != alone for answer, alone in zip(answers, ALONE, strict=True)) <= 1


def counter(stack: Stack, name: str) -> float:
    running = stack.running()
    snapshot = read_snapshot(running.metrics_urls, (), running.pools)
    return float(getattr(snapshot.engines["decode"], name) or 0.0)


def await_replicas(stack: Stack, role: str, count: int, gone: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while len(there := replicas(stack.nodes(), role)) != count or gone in there:
        assert time.monotonic() < deadline, f"{there} of {role}"
        time.sleep(1)


def test_two_prefill_replicas_are_served(stack: Stack) -> None:
    done = stack.launch("--pd-spread", "--p-num", "2", "--prefill-timeout-s", str(PREFILL_TIMEOUT_S))
    assert done.code == 0
    assert stack.running().manifest.deployment.serving.prefill_timeout_s == PREFILL_TIMEOUT_S
    ALONE.extend(ask_all(stack))
    assert len({tuple(tokens) for tokens in ALONE}) == len(PROMPTS)


def test_every_request_is_right_while_a_prefill_replica_hangs(stack: Stack) -> None:
    assert ALONE
    stopped, _ = replicas(stack.nodes(), "Prefill")
    send(stopped, signal.SIGSTOP)
    try:
        assert right(ask_all(stack))
    finally:
        send(stopped, signal.SIGCONT)
    time.sleep(3)  # an export of the counters
    assert counter(stack, "prefill_timeouts") >= 1, "else none went to the one that hangs"
    assert counter(stack, "prefill_retries") >= 1 and counter(stack, "prefill_failures") == 0


def test_every_request_is_right_while_a_prefill_replica_is_dead(stack: Stack) -> None:
    await_replicas(stack, "Prefill", 2, gone=0)
    assert right(ask_all(stack))
    _, killed = replicas(stack.nodes(), "Prefill")
    send(killed, signal.SIGKILL)
    for _ in range(3):
        assert right(ask_all(stack))
    await_replicas(stack, "Prefill", 2, gone=killed)
    time.sleep(15)  # the engine starts
    assert right(ask_all(stack))


def test_a_sweep_measures_the_level_again_in_which_a_replica_died(stack: Stack) -> None:
    launched = stack.launch("--pd-spread", "--p-num", "2", "--prefill-timeout-s", str(PREFILL_TIMEOUT_S))
    assert launched.code == 0
    out = stack.folder / "results"
    lengths = ("--itl", "128", "--otl", "16", "--prompts-per-level", "400", "--fill-cache", "no")
    sweep = ("-m", "pdlab", "bench", "-u", stack.url, "-c", "2,3", *lengths, "--out", str(out), "-e", "outlives")
    started = stack.start(*sweep, until="concurrency 2:")
    time.sleep(2)
    send(replicas(stack.nodes(), "Prefill")[0], signal.SIGKILL)
    code, text = started.end()
    assert code in (0, 3)
    assert "SPOILED" in text and re.search(r"whole again after \d+ s; canary: \d of \d prompts", text)
    first, second = (json.loads((out / "outlives" / f"concurrency{c}.json").read_text()) for c in (2, 3))
    for run in (first, second):
        assert run["failed"] == 0 and set(run["validity"]["failed_gates"]) <= BUSY_MACHINE, run["validity"]
    assert (out / "outlives" / first["replaces"]["file"]).exists() and second["replaces"] is None
    assert "died" in str(first["replaces"]["reasons"]) or "replaced" in str(first["replaces"]["reasons"])
    assert len(stack.running().replicas) == len(set(stack.running().replicas)) and len(stack.running().pools) == 3


def pinned(stack: Stack, what: str) -> list[float]:
    """Seconds that stops take, see tests/live/pinned.py."""
    done = stack.run("-m", "tests.live.pinned", what)
    assert done.code == 0
    return [float(seconds) for seconds in json.loads(done.text.splitlines()[-1])]


def test_a_prefill_replica_that_stops_keeps_what_is_still_to_be_read(stack: Stack) -> None:
    free_s, held_s = pinned(stack, "replicas")
    assert free_s + 5 < held_s < 44, "until the lease of 30 s has ended, not until Serve's window has"


def test_an_application_that_goes_waits_for_nobody(stack: Stack) -> None:
    done = stack.launch("--pd-spread", "--p-num", "2")
    assert done.code == 0
    assert pinned(stack, "application")[0] < 25
    assert replicas(stack.nodes(), "Prefill") == []
