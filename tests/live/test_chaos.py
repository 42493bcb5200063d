"""Faults on the real stack: the short matrix on pd-spread, and that nothing of them is left."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from pdlab.core.deployment import Serving, Transport
from pdlab.results import chaos
from pdlab.results.chaos import Chaos
from tests.live.conftest import Done, Stack

# So small a KV pool that what is given back is soon used again.
SMALL = ("--engine-arg", f"kv_cache_memory_bytes={48 * 2**20}")
CHAOS = ("-m", "pdlab", "chaos")


@pytest.fixture(scope="module")
def pair(stack: Stack) -> Stack:
    done = stack.launch("--pd-spread", *SMALL)
    assert done.code == 0
    return stack


@pytest.fixture(scope="module")
def made(pair: Stack) -> tuple[Done, Chaos]:
    out = pair.folder / "chaos"
    done = pair.run(*CHAOS, "short", "--base-url", pair.url, "--out", str(out), "--seed", "3")
    assert done.code in (0, 3)
    return done, chaos.load(next(out.iterdir()))


def test_a_dry_run_says_what_would_be_done(pair: Stack) -> None:
    done = pair.run(*CHAOS, "--all", "--dry-run", "--base-url", pair.url)
    assert done.code == 0
    assert re.search(r"kill_prefill_before_read: SIGSTOP decode engine core, .* kill -9 prefill engine core", done.text)
    assert re.search(r"link_down: there is no link between two hosts here", done.text)
    assert re.search(r" s  kill_node: kill -9 whole node, wait 8 s, start that node again", done.text)
    assert not list((pair.folder).glob("chaos*"))


def test_every_fault_was_made(made: tuple[Done, Chaos]) -> None:
    done, kept = made
    assert [(fault.kind, fault.outcome) for fault in kept.faults] == [
        (kind, "injected")
        for kind in (
            "leave_while_streaming", "leave_between", "kill_prefill_before_read", "stop_prefill_engine",
            "kill_decode_engine",
        )
    ], done.text  # fmt: skip
    for fault in kept.faults:
        if fault.kind in ("leave_between", "kill_prefill_before_read"):
            assert re.search(r"await_prefill \([1-9]", " ".join(fault.acts)), fault


def test_every_request_has_a_fate_and_the_deployment_recovers(made: tuple[Done, Chaos]) -> None:
    done, kept = made
    outcomes = Counter(request.outcome for request in kept.requests)
    assert outcomes["right"] > 50 and outcomes["left"] >= 4
    assert "never" not in done.text
    if kept.run.guarded:
        assert outcomes["wrong"] == outcomes["hang"] == 0, done.text
    assert (done.code == 3) == bool(
        outcomes["wrong"] or outcomes["hang"] or kept.run.leftovers is None or not kept.run.leftovers.nothing
    )


def test_no_answer_waits_for_a_replacement(made: tuple[Done, Chaos]) -> None:
    """Of the only prefill engine, which takes 20 s at least: its replacement is what a request could wait for."""
    _, kept = made
    (fault,) = [fault for fault in kept.faults if fault.kind == "kill_prefill_before_read"]
    met = [
        request
        for request in kept.requests
        if request.outcome == "right" and request.end_s > fault.began_s and request.sent_s < fault.ended_s + 10
    ]
    assert met
    # A call that nobody takes, a read that does not end, and the prompt on decode, on a machine with other work.
    allowed_s = Serving().prefill_absent_s + Transport().kv_deadline_s + 15
    assert max(request.end_s - request.sent_s for request in met) < allowed_s


def test_nothing_is_left(made: tuple[Done, Chaos]) -> None:
    left = made[1].run.leftovers
    assert left is not None and left.nothing, left
    assert set(left.kv_use.values()) == {0.0}


def test_viz_draws_it(made: tuple[Done, Chaos], pair: Stack, tmp_path: Path) -> None:
    folder = pair.folder / "chaos" / made[1].name
    done = pair.run("viz.py", "--exps", str(folder), "--plot-path", str(tmp_path / "f.png"))
    assert done.code == 0 and (tmp_path / "f.png").stat().st_size > 10_000
