"""Timelines and metrics of requests whose KV cache decode gives up, and of answers that are not streamed."""

from __future__ import annotations

import re
import time
from collections import Counter

import pytest
from support import timed
from support.web import fetch

from tests.live.conftest import Stack

pytestmark = pytest.mark.long

DEADLINE = ("--kv-deadline-s", "0.001")  # a read on one machine takes as long
COUNTED = re.compile(r'ray_pdlab_ttft_seconds_total\{.*?part="(\w+)".*\} (\S+)')
MOST = 60


def counted(stack: Stack) -> Counter[str]:
    """Part -> seconds, of all requests until now."""
    seconds: Counter[str] = Counter()
    for url in stack.running().metrics_urls:
        for part, value in COUNTED.findall(fetch(url)[1]):
            seconds[part] += float(value)
    return seconds


def counted_since(stack: Stack, before: Counter[str], part: str) -> Counter[str]:
    """What was counted since then, as soon as that part was."""
    until = time.monotonic() + 60
    while (added := counted(stack) - before)[part] == 0:
        assert time.monotonic() < until, added
        time.sleep(1)
    return added


def test_a_lost_read_is_a_part_of_its_own_and_a_whole_answer_counts_until_its_first_token(stack: Stack) -> None:
    assert stack.launch("--pd-pack", "--model", "tiny-gptoss", *DEADLINE).code == 0
    lost = []
    for _ in range(MOST):
        timeline = timed.ask(stack.url, stream=True)
        timed.check([timeline], timeline.path)
        assert timeline.path in ("pd", "recomputed")
        lost += [timeline] if timeline.path == "recomputed" else []
        if len(lost) == 3:
            break
    assert lost
    for each in lost:
        parts = dict(each.parts())
        assert {"admission", "lost_read", "wait", "recompute"} <= parts.keys() and parts["recompute"] > 0
        assert not {"post", "transfer", "step_lag", "guard", "first_step"} & parts.keys()
    assert any(dict(each.parts())["lost_read"] > 0 for each in lost)
    time.sleep(15)  # until all of these requests are on Ray's pages
    before = counted(stack)
    whole = timed.ask(stack.url, stream=False, max_tokens=200)
    timed.check([whole], whole.path)
    added = counted_since(stack, before, "prefill")
    assert added["out"] == 0 and dict(whole.parts())["out"] > added.total()
    assert added.total() == pytest.approx(whole.t["first"] / 1e3, abs=1e-3)
