"""Candidates once more in another way: the same requests, beside what the plan found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.plans import scenario

from pdlab.cli import plan as cli_plan
from pdlab.core.deployment import Deployment, parse_label
from pdlab.core.errors import UsageError
from pdlab.core.workload import Closed, Open, Workload
from pdlab.plan.planner import Candidate
from pdlab.plan.second_fidelity import comparison_with_vllm
from pdlab.sim.level import Trace
from pdlab.sim.simulator import simulate

SCENARIO = scenario(ttft_s=2.0, tpot_s=0.02)
COLLOCATED = Deployment(topology=parse_label("collocated-2xtp2"))


def candidate(load: Closed | Open) -> Candidate:
    result = SCENARIO.outcome(COLLOCATED, load, 4.0)
    return Candidate(COLLOCATED, 1, (result,), result, 4.0)


@pytest.mark.parametrize("load", [Closed(concurrency=8), Open(rate_rps=2)], ids=str)
def test_the_same_requests_again(load: Closed | Open) -> None:
    one = candidate(load)
    assert SCENARIO.again(simulate, COLLOCATED, one.outcomes[0]) == one.outcomes[0]
    (row,) = comparison_with_vllm(SCENARIO, [one], simulate).splitlines()[-1:]
    left, right = zip(*(cell.split(" / ") for cell in row.split("  ") if " / " in cell), strict=True)
    assert [cell.strip() for cell in left] == [cell.strip() for cell in right]


def test_a_trace_again() -> None:
    trace = Trace(tuple(0.5 * n for n in range(80)), (2000,) * 80, (50,) * 80)
    traced = replace(SCENARIO, workload=Workload(input_tokens=2000, output_tokens=50), trace=trace)
    one = traced.outcome(COLLOCATED, Open(rate_rps=trace.rate_rps))
    assert traced.again(simulate, COLLOCATED, one) == one


def test_what_cannot_be_simulated_so_is_named() -> None:
    def refuses(*_: Any, **__: Any) -> Any:
        raise UsageError("not with pipeline stages")

    assert comparison_with_vllm(SCENARIO, [candidate(Closed(concurrency=4))], refuses).endswith(
        "collocated-2xtp2: not with pipeline stages"
    )


def test_the_flag(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_plan.main(["--fidelity", "vllm", "--explain", "collocated-1xtp2"]) == 2
    assert "--fidelity does nothing with" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli_plan.main(["--fidelity", "vllm"]) == 2
    assert "not installed" in capsys.readouterr().err
