"""Whether roles that follow the load pay: what is searched, what is said, and the flags that ask for it."""

from __future__ import annotations

import math
import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.plans import HARDWARE, SHAPE, scenario

from pdlab.cli import plan as cli
from pdlab.core.deployment import Deployment, Fluid, Pool
from pdlab.core.errors import UsageError
from pdlab.core.mixes import parse_mixes
from pdlab.core.workload import Level, Open, Slo, Workload
from pdlab.plan.facts import FluidFacts, fluid_text
from pdlab.plan.fluid_pools import (
    FluidPlan,
    ServedRate,
    fluid_plan,
    gain_over,
    hill_climb,
    matched,
    most_rps,
    share_within,
)
from pdlab.plan.scenario import Scenario
from pdlab.plan.traffic import assumed_hit_share, trace_of_file
from pdlab.sim.level import empty_level

SLO = Slo(ttft_s=2.0, tpot_s=0.012)
MATCHED = partial(matched, HARDWARE, SHAPE, slo=SLO)


def planned(*gains: float, moves: bool = False) -> FluidPlan:
    deployment = Deployment(topology=Fluid(pool=Pool(replicas=8, tp=2)))
    fixed, auto = (ServedRate("3:5", 10.0), ServedRate("4:4", 8.0)), ServedRate("auto", 10.0 * gains[0])
    return FluidPlan(deployment, fixed, auto, moves, gains)


def test_long_prompts_want_more_engines_that_prefill() -> None:
    pool = Pool(replicas=16, tp=2)
    long, short = (MATCHED(Workload(input_tokens=a, output_tokens=b), pool) for a, b in ((5000, 250), (1000, 1000)))
    assert long.prefill >= 4 * short.prefill and long.rps > short.rps > 0


def test_of_a_mix_that_moves_the_worst_served_mix_sets_the_start() -> None:
    pool = Pool(replicas=16, tp=2)
    moving = Workload(lengths=parse_mixes("5000:250,1000:1000@3,every=60"))
    short = MATCHED(Workload(input_tokens=1000, output_tokens=1000), pool)
    assert MATCHED(moving, pool) == (short.prefill, short.rps / 3)


@pytest.mark.property
@given(st.floats(0.1, 100), st.floats(0.3, 1.4))
def test_the_highest_rate_is_found_to_two_percent(near: float, factor: float) -> None:
    true = near * factor
    found = most_rps(lambda rate: 1.0 if rate <= true else 0.5, 0.95, near)
    assert true / 1.03 <= found <= true


def test_where_no_rate_keeps_the_slo_there_is_none() -> None:
    assert most_rps(lambda rate: 0.5, 0.95, 10.0) == 0.0


@given(st.integers(1, 63), st.integers(1, 63))
def test_the_top_is_found_from_everywhere(top: int, begin: int) -> None:
    assert hill_climb(lambda prefill: -abs(prefill - top), begin, 64) == top


def test_the_share_counts_requests_from_a_moment_on() -> None:
    level = empty_level(Level(load=Open(rate_rps=1), num_requests=4, seed=0), Workload(output_tokens=11), None)
    level.arrival_s = [0.0, 10.0, 11.0, 12.0]
    level.first_token_s = [9.0, 11.0, 14.0, 13.0]
    level.finish_s = [9.1, 11.1, 14.1, 14.0]
    assert share_within(level, SLO, 0.0) == 1 / 4, "one waits too long, one decodes too slowly, one both"
    assert share_within(level, SLO, 10.0) == 1 / 3
    level.output_tokens[3] = 1
    assert share_within(level, SLO, 10.0) == 2 / 3, "one token has no TPOT"


@pytest.mark.parametrize(
    ("gain", "code"),
    [(1.3, "worth_it"), (1.05, "gains_little"), (1.0, "as_good"), (0.8, "fixed_is_better"), (0.0, "fixed_is_better")],
)
@pytest.mark.parametrize("moves", [False, True])
def test_the_verdict_follows_from_the_gain(gain: float, code: str, moves: bool) -> None:
    bounded, plan = scenario(ttft_s=2.0, tpot_s=0.012), planned(gain, moves=moves)
    assert FluidFacts(plan, bounded).verdict == code
    hint = "they pay if the mix changes with time" in fluid_text(plan, bounded)
    assert hint is (code != "worth_it" and not moves), "a mix that moves needs no hint at one"


@pytest.mark.parametrize(
    ("gains", "code", "said"),
    [
        ((0.94, 0.80, 0.99), "unclear", "serve 0.80 to 0.99 times the rate"),
        ((1.05, 1.15, 1.2), "unclear", "serve 1.05 to 1.20 times the rate"),
        ((0.94, 0.80, 0.9), "fixed_is_better", "serve 0.80 to 0.94 times the rate"),
        ((1.3, 1.15, 1.2), "worth_it", "1.15 to 1.30 times the rate"),
        ((1.3, math.inf, 1.2), "unclear", "2 seeds (with others no fixed split keeps it)"),
        ((math.inf, math.nan, math.inf), "no_split_keeps_slo", "No fixed split keeps the SLO at any rate."),
    ],
)
def test_seeds_that_do_not_agree_give_no_verdict(gains: tuple[float, ...], code: str, said: str) -> None:
    bounded, plan = scenario(ttft_s=2.0, tpot_s=0.012), planned(*gains)
    assert FluidFacts(plan, bounded).verdict == code
    text = fluid_text(plan, bounded)
    assert said in text and ("Unclear here" in text) is (code == "unclear")


def test_a_gain_is_over_the_best_split() -> None:
    splits = [ServedRate("1:3", 4.0), ServedRate("2:2", 5.0)]
    assert gain_over(splits, ServedRate("auto", 4.0)) == 0.8
    none = [ServedRate("1:3", 0.0)]
    assert gain_over(none, ServedRate("auto", 4.0)) == math.inf and math.isnan(gain_over(none, none[0]))


def test_three_seeds_are_compared_each_with_the_splits_that_may_be_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits of seed 0 by the requests/s that they serve; auto serves as much as the seed adds."""
    rates_rps = {"1:3": 4.0, "2:2": 3.8, "3:1": 1.0}
    asked: set[tuple[int, str]] = set()

    def simulate(deployment: Deployment, levels: list[Level], *_: object, seed: int, **__: object) -> list[object]:
        roles = deployment.topology.roles  # type: ignore[union-attr]
        asked.add((seed, roles))
        at = rates_rps.get(roles, 4.0 * (1 + seed / 10))
        return [levels[0].load.rate_rps <= at]  # type: ignore[union-attr]

    monkeypatch.setattr("pdlab.plan.fluid_pools.simulate", simulate)
    monkeypatch.setattr("pdlab.plan.fluid_pools.share_within", lambda done, *_: float(done))
    made = fluid_plan(replace(scenario(ttft_s=2.0, tpot_s=0.012), seed=5), "gpt-oss-120b", 4)
    assert made.gains == pytest.approx([1.5, 1.6, 1.7], rel=0.05)
    for seed in (6, 7):
        assert {roles for number, roles in asked if number == seed} == {"auto", "1:3", "2:2"}
    assert {roles for number, roles in asked if number == 5} == {"auto", *rates_rps}


def test_the_launch_holds_the_requests() -> None:
    usual = scenario(ttft_s=2.0, tpot_s=0.012)
    longer = replace(usual, workload=Workload(input_tokens=20000, output_tokens=100))
    assert "--pd-fluid --num 8 --tp 2 --itl 20000 --otl 100 --detach" in fluid_text(planned(1.3), longer)
    assert "--pd-fluid --num 8 --tp 2 --detach" in fluid_text(planned(1.3), usual)


def test_a_small_pool_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--gpus 4 --fluid --assume-merged --slo-ttft-ms 3000 --slo-tpot-ms 20 --itl 4000 --otl 20"
    assert cli.main(shlex.split(flags)) == 0
    printed = capsys.readouterr().out
    rows = {line.split()[0] for line in printed.splitlines() if line}
    assert "auto" in rows and any(":" in row and row[0].isdigit() for row in rows)
    assert "launch_gptoss.py --pd-fluid --num" in printed and "--slo-ttft-ms 3000 --slo-tpot-ms 20 --detach" in printed
    assert "./run_bm.sh -e pd-fluid-" in printed and "simulated" in printed


def test_a_crowd_is_simulated_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    moving = Workload(lengths=parse_mixes("4000:20,crowd=rate*10@60+30"))
    lasted_s: list[float] = []

    class Seen(Exception):
        pass

    def simulate(deployment: Deployment, planned: list[Level], *_: object, **__: object) -> None:
        (level,) = planned
        arrivals = moving.arrivals(level)
        assert arrivals is not None
        lasted_s.append(arrivals[-1].due_s)
        raise Seen

    monkeypatch.setattr("pdlab.plan.fluid_pools.simulate", simulate)
    with pytest.raises(Seen):
        fluid_plan(replace(scenario(ttft_s=2.0, tpot_s=0.012), workload=moving), "gpt-oss-120b", 16)
    assert lasted_s == [pytest.approx(145, rel=0.05)], "25 s to fill, the crowd, and its duration once more"


def test_an_slo_of_both_latencies_is_needed() -> None:
    with pytest.raises(UsageError, match="give --slo-ttft-ms"):
        fluid_plan(scenario(ttft_s=2.0), "gpt-oss-120b", 8)


CONVERSATIONS = """\
conversations: {rate_rps: 1, sessions: 60, turns: 3, user_tokens: 2500, answer_tokens: 60, think_s: 2}
"""


def of_sessions(folder: Path) -> tuple[Path, Scenario]:
    """Sixty conversations, each turn after the answer to the one before."""
    path = folder / "chat.yaml"
    path.write_text(CONVERSATIONS, encoding="utf-8")
    trace = trace_of_file(path)
    workload = Workload(input_tokens=5000, output_tokens=60)
    slo = Slo(ttft_s=2.0, tpot_s=0.02, quantile=0.9)
    hits = assumed_hit_share(trace, HARDWARE, SHAPE)
    return path, Scenario(HARDWARE, SHAPE, workload, slo, hits, trace=trace, scattered=False)


def test_sessions_begin_as_often_as_the_slo_allows(tmp_path: Path) -> None:
    _, scenario = of_sessions(tmp_path)
    assert scenario.trace is not None
    made = fluid_plan(scenario, "gpt-oss-120b", 2)
    best = made.auto
    assert best.speed is not None and best.rps > 0 and 0.2 < best.hit_share < 0.7
    rate_rps = best.speed * scenario.trace.rate_rps
    held, beyond = (scenario.replayed(made.deployment, factor * rate_rps) for factor in (1.0, 1.1))
    assert held.meets and not beyond.meets
    came_s = held.level.arrival_s
    assert best.rps == pytest.approx((len(came_s) - 1) / (came_s[-1] - came_s[0]))
    assert [each.roles for each in made.fixed] == ["1:1"] and made.fixed[0].speed


def test_the_plan_of_a_workload_file_has_its_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = of_sessions(tmp_path)
    flags = f"--gpus 2 --fluid --assume-merged --slo-ttft-ms 2000 --slo-tpot-ms 20 --workload {path}"
    assert cli.main(shlex.split(flags)) == 0
    printed = capsys.readouterr().out
    assert "are in prefix caches" in printed and "times the file's speed" in printed
    (auto,) = (line.split() for line in printed.splitlines() if line.startswith("auto"))
    assert len(auto) == 5 and auto[-1].endswith("%")
    assert f"--workload {path}" in printed.splitlines()[-1] and "--itl" not in printed


def test_a_pool_that_no_file_loads_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    chat = Path(__file__).resolve().parents[1] / "data" / "traffic" / "chat.yaml"
    flags = f"--gpus 8 --fluid --slo-ttft-ms 9000 --slo-tpot-ms 90 --workload {chat}"
    assert cli.main(shlex.split(flags)) == 2
    error = capsys.readouterr().err
    assert "all sessions of this workload begin at once" in error and error.count("\n") == 1
