"""Decode's schedulers and its polling in pairs of rounds (benchmarks/ttft_pairs.py), each kind with a deployment."""

from __future__ import annotations

import pytest

from tests.live.conftest import Stack

pytestmark = pytest.mark.long

PAIRS = ("benchmarks/ttft_pairs.py", "--launch", "--pairs", "3", "--requests", "8", "--texts", "12")


def test_asynchronous_decode_is_asynchronous_and_answers_the_same(stack: Stack) -> None:
    done = stack.run(*PAIRS, "scheduler")
    assert done.code == 0
    assert "asynchronous: GuardAsyncScheduler, MultiprocExecutor, steps in flight: 2" in done.text
    assert "synchronous: GuardSyncScheduler, MultiprocExecutor, steps in flight: 1" in done.text
    assert "asynchronous - synchronous: first_step p50 ms" in done.text and "0 of 12 texts differ" in done.text


@pytest.mark.parametrize("more", [(), ("--asynchronous",)])
def test_only_decode_that_polls_sees_reads_between_its_steps(stack: Stack, more: tuple[str, ...]) -> None:
    done = stack.run(*PAIRS, "kv-poll", *more)
    assert done.code == 0, "the tool refuses kinds that are not what they are called"
    assert "polling - waiting: step_lag p50 ms" in done.text and "0 of 12 texts differ" in done.text
