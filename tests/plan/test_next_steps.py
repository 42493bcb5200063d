"""The commands of a plan launch the engines that were planned, or say what they lack."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.plans import HARDWARE, MODEL, nodes, scenario

from pdlab.cli import launch, plan
from pdlab.core.catalog import load_deployment, resolve_model
from pdlab.core.deployment import Deployment, Disaggregated, parse_label
from pdlab.core.settings import parse
from pdlab.deploy.options import deployment_from
from pdlab.deploy.serve_config import engine_kwargs
from pdlab.plan import facts, planner
from pdlab.plan.next_steps import commands
from pdlab.sim.engine_host import host_of
from pdlab.sim.hardware import Hardware, Speculation, StepTables
from pdlab.sim.kv_transfer import transfer_costs

PLANNED = planner.plan(scenario(tpot_s=0.012, ttft_s=2.0), MODEL, nodes(1), 4, concurrencies=[8])


def printed(hardware: Hardware, **changes: Any) -> str:
    """The commands of the plan, as if it were of that hardware."""
    case = replace(scenario(tpot_s=0.012, ttft_s=2.0), hardware=hardware, **changes)
    return commands(PLANNED.candidates[:1], case, None, baseline=PLANNED.best_candidate(collocated=True))


def with_formats(**formats: str) -> Hardware:
    steps = StepTables.model_validate({"system": "h100_sxm", "quant": formats})
    return HARDWARE.model_copy(update={"steps": steps})


def comments(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if line.startswith("  # "))


def of_engine(engine: str) -> Hardware:
    fit = HARDWARE.fit
    assert fit is not None
    return HARDWARE.model_copy(update={"fit": fit.model_copy(update={"engine": engine})})


def test_every_launch_has_the_planned_format_of_kv_cache() -> None:
    text = printed(with_formats(kvcache="fp8", gemm="fp8_block"))
    launches = [shlex.split(line)[2:] for line in text.splitlines() if "launch_gptoss.py" in line and "#" not in line]
    assert launches
    for words in launches:
        assert parse(launch.LaunchSettings, words).deployment["engine_kwargs"] == {"kv_cache_dtype": "fp8"}
    assert "gemm=fp8_block" in comments(text) and "kvcache" not in comments(text)
    assert "kvcache=int8" in comments(printed(with_formats(kvcache="int8"))), "vLLM has no such format"
    assert "kv_cache_dtype" not in printed(HARDWARE) and "the plan assumes" not in printed(HARDWARE)


def test_what_only_a_person_can_add_is_named() -> None:
    guesses = HARDWARE.with_speculation(Speculation(acceptance_length=2.5, draft_tokens=3))
    assert '"num_speculative_tokens": 3' in comments(printed(guesses))
    bare = HARDWARE.model_copy(update={"direct": host_of("vllm").direct})
    assert "--without-ray" in comments(printed(bare))
    assert "50% of each prompt is cached" in comments(printed(HARDWARE, prefix_hit_rate=0.5))


def launched(line: str) -> dict[str, int | None]:
    """The max_model_len of each pool of a printed launch, as Ray Serve LLM gets it."""
    words = shlex.split(line)[2:]
    deployment = deployment_from(parse(launch.LaunchSettings, words))
    shape = resolve_model(deployment.model).shape
    return {role: engine_kwargs(deployment, role, shape, cpu=False)["max_model_len"] for role in deployment.pools}


@pytest.mark.parametrize("to_file", [False, True])
@pytest.mark.parametrize(
    ("lengths", "least"), [("--itl 30000 --otl 500", 30500), ("--itl 9000 --otl 100 --lengths uniform:0.5-2.0", 18200)]
)
def test_the_launches_of_a_plan_hold_its_requests(
    lengths: str, least: int, to_file: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path)] if to_file else []
    assert plan.main([*["--gpus", "8", "--concurrency", "4", "--top", "1"], *lengths.split(), *out]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "launch_gptoss.py" in line]
    assert lines and all(lengths in line for line in lines)
    assert all(least <= length < 2 * least for line in lines for length in launched(line).values() if length)
    for file in tmp_path.iterdir():
        assert (load_deployment(str(file)).max_model_len or 0) >= least


def test_lengths_that_a_launch_holds_anyway_are_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["--gpus", "8", "--concurrency", "4", "--top", "1", "--itl", "16000", "--otl", "384"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "launch_gptoss.py" in line]
    assert lines and not any("--itl" in line or "--max-model-len" in line for line in lines)


def test_the_sweep_is_as_bursty_as_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    given = "--gpus 2 --rate 1 --burstiness 0.5 --slo-ttft-ms 2000 --slo-tpot-ms 12"
    assert plan.main(given.split()) == 0
    sweeps = [line for line in capsys.readouterr().out.splitlines() if "run_bm.sh" in line]
    assert sweeps and all("--burstiness 0.5" in line for line in sweeps)


@pytest.mark.parametrize("engine", ["sglang", "trtllm"])
def test_another_engine_is_not_launched_as_vllm(engine: str) -> None:
    text = printed(of_engine(engine))
    assert "pdlab launches vLLM only" in text and "describe" in text and "results-of-others.md" in text
    assert "launch_gptoss.py" not in text and "run_bm.sh" not in text


def test_nothing_experimental_in_vllm_is_told_of_another_engine() -> None:
    ours = scenario(tpot_s=0.012, ttft_s=2.0)
    theirs = replace(ours, hardware=of_engine("sglang"))
    experimental = next(each for each in PLANNED.candidates if facts.experimental(each, ours))
    assert not facts.experimental(experimental, theirs)


def test_blocks_are_not_copied_one_by_one_by_another_engine() -> None:
    settings = parse(plan.PlanSettings, ["--gpus", "2"])
    made = plan._scenario(settings, of_engine("sglang"), scenario().shape)
    for label in ("pd-pack-p1xtp1-d1xtp1", "pd-pack-p2xtp1-d1xtp2"):
        deployment = Deployment(topology=parse_label(label))
        assert isinstance(deployment.topology, Disaggregated)
        costs = transfer_costs(made.hardware, made.shape, deployment.topology, "nvlink")
        assert costs.stall_s_per_token == costs.post_s_per_token and not made.depends(deployment)
