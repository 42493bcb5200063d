"""Engines that share the cores of one machine slow each other down while both work, and not before or after."""

from __future__ import annotations

import pytest

from pdlab.core.catalog import ModelShape, load_model
from pdlab.core.deployment import Collocated, Deployment, Pool, Serving
from pdlab.core.workload import Level, Open, Workload
from pdlab.sim.hardware import Hardware, load_hardware
from pdlab.sim.level import SimulatedLevel, Trace
from pdlab.sim.simulator import simulate

NO_OVERHEAD = ("frontend_ms", "overhead_ms", "ingress_us", "admit_us", "client_gap_ms")


def hardware(contention: float) -> Hardware:
    """CPUs on which a request costs nothing beside the engine's steps."""
    known = load_hardware("cpu-vllm-0.29")
    return known.with_values({**dict.fromkeys(NO_OVERHEAD, 0.0), "contention": contention})


def shape() -> ModelShape:
    found = load_model("tiny-gptoss")
    assert found is not None
    return found


def served(arrival_s: list[float], lengths: list[tuple[int, int]], contention: float, engines: int) -> SimulatedLevel:
    """Prompts and answers of these lengths, one engine after the other in turn."""
    topology, serving = Collocated(pool=Pool(replicas=engines)), Serving(direct_streaming=True)
    deployment = Deployment(model="tiny-gptoss", topology=topology, serving=serving)
    trace = Trace(tuple(arrival_s), *zip(*lengths, strict=True))
    level = Level(load=Open(rate_rps=1), num_requests=len(lengths), seed=0)
    (one,) = simulate(deployment, [level], Workload(), hardware(contention), shape(), trace=trace)
    return one


@pytest.mark.parametrize("contention", [0.0, 0.5, 2.0])
def test_two_prompts_that_overlap(contention: float) -> None:
    """Each goes on at 1 / (1 + contention) of its pace while the other one is computed too."""
    alone_s = served([0.0], [(1000, 1)], contention, 2).first_token_s[0]
    both = served([0.0, alone_s / 4], [(1000, 1), (1000, 1)], contention, 2)
    slow = 1 + contention
    first_s = alone_s / 4 + 3 / 4 * alone_s * slow
    second_s = first_s + alone_s - (first_s - alone_s / 4) / slow
    assert list(both.first_token_s) == pytest.approx([first_s, second_s])


def test_engines_that_halve_each_other_do_all_the_work_in_the_time_of_one() -> None:
    """At a contention of 1 two busy engines do together what one does alone: all work takes the sum of their times."""
    lengths = [(200 + 137 * n % 900, 1 + 29 * n % 60) for n in range(16)]
    together = served([0.0] * 16, lengths, 1.0, 2)
    one, other = (served([0.0] * 8, lengths[first::2], 1.0, 1) for first in (0, 1))
    # A run that is cut keeps the context of its middle: hence not to the last digit.
    assert max(together.finish_s) == pytest.approx(max(one.finish_s) + max(other.finish_s), rel=1e-3)
    tokens = sum(together.gap_tokens)
    assert tokens == sum(answer - 1 for _, answer in lengths)


def test_a_run_of_decode_steps_is_slower_while_the_other_engine_works() -> None:
    """A long answer whose steps are all equal: the other engine's prompt comes in the middle of them."""
    answer = served([0.0], [(100, 200)], 0.8, 2)
    alone_s = served([0.0], [(1000, 1)], 0.8, 2).finish_s[0]
    both = served([0.0, answer.finish_s[0] / 2], [(100, 200), (1000, 1)], 0.8, 2)
    prompt_s = both.finish_s[1] - answer.finish_s[0] / 2
    assert prompt_s == pytest.approx(alone_s * 1.8)
    # What it lost: the share of the prompt's time that the other engine took. A run that is cut keeps its mean context.
    assert both.finish_s[0] - answer.finish_s[0] == pytest.approx(prompt_s * (1 - 1 / 1.8), rel=0.02)
