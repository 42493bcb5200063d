"""Faults on the real stack: on pd-spread those that break a KV transfer, in the long form the whole short matrix, and
that nothing of them is left. Last a KV transfer that is spoiled from the beginning.

Where it can, the short form spreads over two hosts of namespaces, and what crosses their link is counted first.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import yaml
from support.long import LONG

from pdlab.cluster.namespaces import network_of
from pdlab.core.deployment import Serving, Transport
from pdlab.faults.plan import FOLDER
from pdlab.results import chaos
from pdlab.results.chaos import Chaos
from tests.live.conftest import Done, Stack
from tests.live.test_two_hosts import LINK, WHY_NOT, check_crossing, check_shutdown

HOSTS = () if LONG or WHY_NOT else ("--two-hosts", *LINK)
# So small a KV pool that what is given back is soon used again.
SMALL = ("--engine-arg", f"kv_cache_memory_bytes={48 * 2**20}")
CHAOS = ("-m", "pdlab", "chaos")
SHORT = yaml.safe_load((FOLDER / "short.yaml").read_text())
# Those of the short matrix that break a transfer, with a client that leaves, a dead engine and one that hangs.
FAULTS = SHORT["faults"] if LONG else ["leave_between", "kill_prefill_before_read", "stop_prefill_engine"]
RIGHT = 50 if LONG else 20  # answers at least


@pytest.fixture(scope="module")
def launched(stack: Stack) -> Done:
    return stack.launch("--pd-spread", *SMALL, *HOSTS)


@pytest.fixture(scope="module")
def pair(stack: Stack, launched: Done) -> Stack:
    done = launched
    assert done.code == 0
    assert re.search(r"KV transfers: \d+ done, about [\d.]+ MB, 0 failed", done.text)
    manifest = stack.running().manifest
    assert manifest.canary.equal is True
    assert [manifest.placement.nodes_of(role) for role in ("prefill", "decode")] == [("local-1",), ("local-2",)]
    return stack


@pytest.fixture(scope="module")
def made(pair: Stack) -> tuple[Done, Chaos]:
    out, plan = pair.folder / "chaos", pair.folder / "plan.yaml"
    plan.write_text(yaml.safe_dump(SHORT | {"faults": FAULTS} | ({} if LONG else {"warm_s": 1, "every_s": 4})))
    done = pair.run(*CHAOS, str(plan), "--base-url", pair.url, "--out", str(out), "--seed", "3")
    assert done.code in (0, 3)
    return done, chaos.load(next(out.iterdir()))


@pytest.mark.skipif(not HOSTS, reason=f"two hosts: {WHY_NOT or 'tests/live/test_two_hosts.py launches them'}")
def test_its_kv_cache_crosses_the_link(pair: Stack, launched: Done) -> None:
    check_crossing(pair, launched, "spread")


@pytest.mark.long
def test_a_dry_run_says_what_would_be_done(pair: Stack) -> None:
    done = pair.run(*CHAOS, "--all", "--dry-run", "--base-url", pair.url)
    assert done.code == 0
    assert re.search(r"kill_prefill_before_read: SIGSTOP decode engine core, .* kill -9 prefill engine core", done.text)
    assert bool(HOSTS) != ("link_down: there is no link between two hosts here" in done.text)
    assert re.search(r" s  kill_node: kill -9 whole node, wait 8 s, start that node again", done.text)
    assert not list((pair.folder).glob("chaos*"))


def test_every_fault_was_made(made: tuple[Done, Chaos]) -> None:
    done, kept = made
    assert [(fault.kind, fault.outcome) for fault in kept.faults] == [(kind, "injected") for kind in FAULTS], done.text
    for fault in kept.faults:
        if fault.kind in ("leave_between", "kill_prefill_before_read"):
            assert re.search(r"await_prefill \([1-9]", " ".join(fault.acts)), fault


def test_every_request_has_a_fate_and_the_deployment_recovers(made: tuple[Done, Chaos]) -> None:
    done, kept = made
    outcomes = Counter(request.outcome for request in kept.requests)
    assert outcomes["right"] > RIGHT and outcomes["left"] >= 4
    assert "never" not in done.text
    if kept.run.guarded:
        assert outcomes["wrong"] == outcomes["hang"] == 0, done.text
    left = kept.run.leftovers
    bad = outcomes["wrong"] or outcomes["hang"] or left is None or not left.nothing or left.missing
    assert (done.code == 3) == bool(bad), done.text
    assert ("Verdict: clean" in done.text) == (done.code == 0)


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


def test_spoiled_transfer_fails_the_canary(pair: Stack) -> None:
    """It moves blocks to wrong places and tells nobody: found before anything is served."""
    nodes = pair.nodes()
    done = pair.launch("--pd-spread", *HOSTS, "--d-engine-arg", "worker_extension_cls=tests.live.spoil.Spoil")
    assert done.code == 1
    assert "answers, but wrongly" in done.text
    assert "Traceback" not in done.text
    assert pair.running() is None
    with network_of(nodes.host(1).pid if nodes.two_hosts else None):
        assert not pair.answers()
    assert pair.nodes() == nodes, "nodes of an earlier launch stay"


@pytest.mark.skipif(not HOSTS, reason="no two hosts")
def test_the_hosts_go_with_the_shutdown(pair: Stack) -> None:
    check_shutdown(pair)
