"""Public points of P:D: the batches of decode engines, and what other stacks say of a stack."""

from __future__ import annotations

import math

import pytest
from stack_scores.pd_points import FACTORS, PdCorrection, PdResponse, learnt, with_batch_limits
from stack_scores.public_points import PublicPoint, read_points
from stack_scores.scoring import PointFigure

from pdlab.plan.correction_fit import TPOT, TTFT
from pdlab.plan.stack_prior import Stack

HEADER = (
    "model,gpu,mode,framework,framework_version,precision,isl,osl,concurrency,p_workers,p_tp,d_workers,d_tp,"
    "d_attention_dp,gpus_total,ttft_ms,tpot_ms,ttft_stat\n"
)


def limits(engine: str, loads: tuple[int, ...], decode: str = "4,8,1,36", isl: str = "1024") -> list[int | None]:
    """Of decode engines, by the rows of one sweep, and of one row of other lengths."""
    rows = [f"made/Up-1,h100_sxm,disagg,{engine},1.2,fp8,{isl},512,{load},1,4,{decode},50,5,x\n" for load in loads]
    other = rows[0].replace(f",{isl},", ",2048,")
    points: list[PublicPoint] = read_points(HEADER + "".join((*rows, other)), "table.csv").points
    assert len(points) == len(loads) + 1
    pools = [each.row.deployment.pools["decode"] for each in with_batch_limits(points)]
    return [pool.engine_kwargs.get("max_num_seqs") for pool in pools]


def test_a_decode_engine_has_the_batch_of_the_most_load_of_its_sweep() -> None:
    assert limits("trtllm", (12, 192, 96)) == [32, 32, 32, 2]
    assert limits("trtllm", (3, 128)) == [32, 32, 1], "never less than one sequence"


@pytest.mark.parametrize(("engine", "decode"), [("sglang", "4,8,1,36"), ("vllm", "4,8,1,36"), ("trtllm", "4,1,8,36")])
def test_other_engines_and_attention_ranks_have_no_limit(engine: str, decode: str) -> None:
    assert limits(engine, (12, 192), decode) == [None] * 3


def stack(model: str, gpu: str, engine: str) -> Stack:
    return Stack(model, gpu, engine, "1.0", "pd")


def of_truth(factor: float, prefill_factor: float, path_s: float) -> list[PdResponse]:
    """Points whose prefill takes 0.1 s in the tables, beside waits of 0 to 2 s that grow with it."""
    return [
        PdResponse(
            PointFigure(0.01 * factor, prefill_factor * (0.1 + wait_s) + path_s, 1.0),
            tuple(PointFigure(0.01, each * (0.1 + wait_s), 1.0) for each in FACTORS),
        )
        for wait_s in (0.0, 0.1, 0.5, 2.0)
    ]


def test_a_stack_is_corrected_by_those_of_its_engine_and_precision_and_not_by_itself() -> None:
    found = {
        stack("Up fp4", "B200", "trtllm"): of_truth(1.1, 1.2, 0.11),
        stack("Up fp4", "GB200", "trtllm"): of_truth(1.1, 1.2, 0.11),
        stack("Up fp4", "GB300", "trtllm"): of_truth(3.0, 2.0, 0.01),
        stack("Up fp8", "GB300", "trtllm"): of_truth(0.9, 1.9, 0.03),
        stack("Up fp4", "GB300", "sglang"): of_truth(0.8, 1.9, 0.03),
    }
    assert learnt(stack("Up fp4", "GB300", "trtllm"), found) == PdCorrection(1.1, pytest.approx(1.2), 110)


def test_few_of_its_kind_leave_the_stacks_of_its_precision() -> None:
    found = {
        stack("Up fp4", "B200", "trtllm"): of_truth(1.0, 1.4, 0.21),
        stack("Up fp4", "GB200", "sglang"): of_truth(1.0, 1.4, 0.21),
        stack("Up fp8", "GB200", "sglang"): of_truth(2.0, 1.0, 0.01),
    }
    assert learnt(stack("Up fp4", "GB200", "vllm"), found) == PdCorrection(1.0, pytest.approx(1.4), 210)
    assert learnt(stack("Up int4", "GB200", "vllm"), found).factor == 1.0, "all of them, each counted once"


def test_an_error_is_that_of_the_simulation_between_two_factors() -> None:
    (response, *_) = of_truth(1.0, 1.0, 0.0)
    assert response.error(TTFT, 1.0) == pytest.approx(0)
    assert response.error(TTFT, 1.25, 50.0) == pytest.approx(math.log(1.75))
    assert response.error(TTFT, 2.0) == pytest.approx(math.log(2))
    assert response.error(TPOT, 1.7) == pytest.approx(0)
