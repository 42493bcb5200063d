"""Public points of P:D: the batches of decode engines, and what other stacks say of a stack."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest
from stack_scores.chance import sum_of
from stack_scores.pd_points import (
    BATCH_RULES,
    FACTORS,
    WAYS,
    BatchRule,
    PdCorrection,
    PdResponse,
    PdStack,
    Way,
    as_run,
    band_by,
    learnt,
    pd_group_scores,
    with_batch_limits,
)
from stack_scores.public_points import PublicPoint, read_points
from stack_scores.scoring import PointFigure

from pdlab.plan.correction_fit import TPOT, TTFT, LevelSetting
from pdlab.plan.stack_prior import Stack

Responses = dict[Way, list[PdResponse]]
WAITS_S = (0.0, 0.1, 0.5, 2.0)
HEADER = (
    "model,gpu,mode,framework,framework_version,precision,isl,osl,concurrency,p_workers,p_tp,d_workers,d_tp,"
    "d_attention_dp,gpus_total,ttft_ms,tpot_ms,ttft_stat\n"
)


def limits(
    engine: str, rule: BatchRule, loads: tuple[int, ...], decode: str = "4,8,1,36", isl: str = "1024"
) -> list[int | None]:
    """Of decode engines, by the rows of one sweep, and of one row of other lengths."""
    rows = [f"made/Up-1,h100_sxm,disagg,{engine},1.2,fp8,{isl},512,{load},1,4,{decode},50,5,x\n" for load in loads]
    other = rows[0].replace(f",{isl},", ",2048,")
    points: list[PublicPoint] = read_points(HEADER + "".join((*rows, other)), "table.csv").points
    assert len(points) == len(loads) + 1
    pools = [each.row.deployment.pools["decode"] for each in with_batch_limits(points, rule)]
    return [pool.engine_kwargs.get("max_num_seqs") for pool in pools]


def test_a_decode_engine_has_the_batch_of_its_sweep_or_of_its_load() -> None:
    """Four engines, with shares of 3, 48 and 24 requests."""
    assert limits("trtllm", "sweep", (12, 192, 96)) == [32, 32, 32, 2]
    assert limits("trtllm", "load", (12, 192, 96)) == [2, 32, 16, 2]


def test_a_decode_engine_has_at_least_a_sequence() -> None:
    assert limits("trtllm", "sweep", (3, 128)) == [32, 32, 1]
    assert limits("trtllm", "load", (3, 128)) == [1, 32, 1]


@pytest.mark.parametrize(("engine", "decode"), [("sglang", "4,8,1,36"), ("vllm", "4,8,1,36"), ("trtllm", "4,1,8,36")])
@pytest.mark.parametrize("rule", BATCH_RULES)
def test_other_engines_and_attention_ranks_have_no_limit(engine: str, decode: str, rule: BatchRule) -> None:
    assert limits(engine, rule, (12, 192), decode) == [None] * 3


def stack(model: str, gpu: str, engine: str) -> Stack:
    return Stack(model, gpu, engine, "1.0", "pd")


def of_truth(factor: float, prefill_factor: float, path_s: float, waits_s: Sequence[float] = WAITS_S) -> Responses:
    """Points whose prefill takes 0.1 s in the tables, beside waits that grow with it."""
    values = [
        PdResponse(
            LevelSetting("P1D1", "1024:512", str(number)),
            PointFigure(0.01 * factor, prefill_factor * (0.1 + wait_s) + path_s, 1.0),
            tuple(PointFigure(0.01, each * (0.1 + wait_s), 1.0, saturated=wait_s > 1 and each > 1) for each in FACTORS),
        )
        for number, wait_s in enumerate(waits_s)
    ]
    return dict.fromkeys(WAYS, values)


def known(responses: Mapping[Stack, Responses]) -> list[PdStack]:
    return [PdStack.of(stack, values) for stack, values in responses.items()]


def test_a_stack_is_corrected_by_those_of_its_engine_and_precision_and_not_by_itself() -> None:
    stacks = known(
        {
            stack("Up fp4", "B200", "trtllm"): of_truth(1.1, 1.2, 0.11),
            stack("Up fp4", "GB200", "trtllm"): of_truth(1.1, 1.2, 0.11),
            stack("Up fp4", "GB300", "trtllm"): of_truth(3.0, 2.0, 0.01),
            stack("Up fp8", "GB300", "trtllm"): of_truth(0.9, 1.9, 0.03),
            stack("Up fp4", "GB300", "sglang"): of_truth(0.8, 1.9, 0.03),
        }
    )
    assert learnt(stack("Up fp4", "GB300", "trtllm"), stacks) == PdCorrection(1.1, pytest.approx(1.2), 110)


def test_few_of_its_kind_leave_the_stacks_of_its_precision() -> None:
    stacks = known(
        {
            stack("Up fp4", "B200", "trtllm"): of_truth(1.0, 1.4, 0.21),
            stack("Up fp4", "GB200", "sglang"): of_truth(1.0, 1.4, 0.21),
            stack("Up fp8", "GB200", "sglang"): of_truth(2.0, 1.0, 0.01),
        }
    )
    assert learnt(stack("Up fp4", "GB200", "vllm"), stacks) == PdCorrection(1.0, pytest.approx(1.4), 210)
    assert learnt(stack("Up int4", "GB200", "vllm"), stacks).factor == 1.0, "all of them, each counted once"


@pytest.mark.parametrize("true_way", WAYS)
def test_the_way_of_the_benchmark_is_that_of_the_other_stacks(true_way: Way) -> None:
    """In the other ways the others' TTFTs would be nine times as long. The stack's own would be right in each."""

    def long(values: list[PdResponse]) -> list[PdResponse]:
        return [
            each._replace(simulated=tuple(one._replace(ttft_s=9 * one.ttft_s) for one in each.simulated))
            for each in values
        ]

    right = of_truth(1.0, 1.0, 0.11)
    others = {way: values if way == true_way else long(values) for way, values in right.items()}
    stacks = known({stack("Up fp8", gpu, "trtllm"): others for gpu in ("B200", "GB200")})
    stacks += known({stack("Up fp8", "H100", "trtllm"): right})
    assert learnt(stack("Up fp8", "H100", "trtllm"), stacks).way == true_way


def test_a_way_sets_the_prompts_of_every_point() -> None:
    rows = [f"made/Up-1,h100_sxm,disagg,sglang,0.5,fp8,1024,512,{load},1,4,1,8,1,12,50,5,x\n" for load in (4, 64)]
    points = read_points(HEADER + "".join(rows), "table.csv").points
    for way in WAYS:
        assert [each.row.num_requests for each in as_run(points, way)] == [4 * way.prompts, 64 * way.prompts]


def test_an_error_is_that_of_the_simulation_between_two_factors() -> None:
    (response, *_) = of_truth(1.0, 1.0, 0.0)[WAYS[0]]
    assert response.error(TTFT, 1.0) == pytest.approx(0)
    assert response.error(TTFT, 1.25, 50.0) == pytest.approx(math.log(1.75))
    assert response.error(TTFT, 2.0) == pytest.approx(math.log(2))
    assert response.error(TPOT, 1.7) == pytest.approx(0)


def test_a_band_is_made_of_the_errors_of_other_stacks_and_holds_those_like_them() -> None:
    """Paths of twelve stacks differ: the band of the last one is as wide as the others differ, whatever its own."""
    paths_s = (0.10, 0.12, 0.14, 0.16, 0.18, 0.11, 0.13, 0.15, 0.17, 0.12, 0.16)
    stacks = known(
        {
            stack("Up fp8", gpu, "trtllm")._replace(version=f"1.{number}"): of_truth(1.0, 1.0, path_s)
            for number, (gpu, path_s) in enumerate(zip(["B200", "H100", "GB200"] * 4, paths_s, strict=False))
        }
    )
    new = stack("Up fp8", "B200", "trtllm")
    near, far = (band_by(new, [*stacks, PdStack.of(new, of_truth(1.0, 1.0, path_s))]) for path_s in (0.14, 5.0))
    assert near == far and near.banded and near.unseen == ("engine",)
    half = near.components[TTFT].half_width(near.unseen, 0.25)
    assert math.log(1.1) < half < math.log(4)
    assert near.components[TPOT].half_width(near.unseen) < half, "their TPOTs are right"
    assert not band_by(new._replace(engine="vllm"), stacks).banded, "none of them is of that engine"


def test_points_near_saturation_have_no_part_in_a_band() -> None:
    """Of three points of a stack the last is near saturation, and as far off as nothing else."""
    paths_s = [0.09 + 0.01 * (number * 7 % 5) for number in range(16)]
    stacks = known(
        {
            stack("Up fp8", gpu, "trtllm")._replace(version=f"1.{number}"): of_truth(1.0, 1.2, path_s, (0.0, 0.1, 2.0))
            for number, (gpu, path_s) in enumerate(zip(["B200", "H100", "GB200", "H200"] * 4, paths_s, strict=True))
        }
    )
    scores = pd_group_scores(stacks)
    assert {each.kind for each in scores} == {"gpu", "engine"}, "one model: none is left if it is left out"
    for score in scores:
        held = score.held[TTFT]
        assert held.of == 2 * score.stacks and score.error[TTFT] < 10
    for kind in ("gpu", "engine"):
        assert 0.75 < sum_of([score.held[TTFT] for score in scores if score.kind == kind]).share <= 1
