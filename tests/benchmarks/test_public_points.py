"""Tables of public points: what is read, how the benchmark ran, what is refused."""

from __future__ import annotations

import pytest
from stack_scores.public_points import INFERENCEX, PublicPoint, read_points, sample, with_whole_experts

from pdlab.core.errors import UsageError
from pdlab.plan.stack_prior import UNSTATED

HEADER = (
    "model,gpu,mode,framework,framework_version,precision,isl,osl,concurrency,tp,attention_dp,moe_ep,ttft_ms,tpot_ms,"
    "ttft_stat\n"
)
ROW = "made/Up-1,h100_sxm,agg,vllm,0.18.0,fp8,1024,512,8,2,1,1,50,5,median (InferenceX)\n"


def points(*rows: str) -> list[PublicPoint]:
    return read_points(HEADER + "".join(rows), "table.csv").points


def test_a_row_is_simulated_as_its_benchmark_ran_it() -> None:
    (point,) = points(ROW)
    assert point.stack.label == "Up-1 fp8, H100, vllm 0.18"
    assert point.conduct == INFERENCEX
    assert (point.row.num_requests, point.row.workload.lengths.flag_value) == (80, "uniform:0.8-1.0")
    assert (point.ttft_s, point.tpot_s) == (0.05, 0.005)
    output = 0.9 * 512
    assert point.output_tokens_per_s == pytest.approx(8 * output / (0.05 + (output - 1) * 0.005), rel=0.01)


PD_HEADER = HEADER.replace("tp,attention_dp,moe_ep,", "p_workers,p_tp,d_workers,d_tp,d_attention_dp,gpus_total,")
PD_ROW = ROW.replace("agg", "disagg").replace(",8,2,1,1,", ",8,2,4,3,1,8,32,")


def test_a_row_of_two_pools_has_the_lengths_of_its_client() -> None:
    (point,) = read_points(PD_HEADER + PD_ROW, "table.csv").points
    assert point.stack.mode == "pd"
    assert point.row.deployment.label == "pd-spread-p2xtp4-d3xdp8"
    assert (point.row.num_requests, point.row.workload.lengths.flag_value) == (80, "uniform:0.8-1.0")


@pytest.mark.parametrize(
    ("width", "block", "label"),
    [
        (2048, 128, "pd-spread-p2xtp4-d3xdp8"),
        (512, 128, "pd-spread-p2xtp4-d3xdp8ep"),
        (512, None, "pd-spread-p2xtp4-d3xdp8"),
        (None, 128, "pd-spread-p2xtp4-d3xdp8"),
    ],
)
def test_ranks_that_can_have_no_part_of_an_expert_have_whole_ones(
    width: int | None, block: int | None, label: str
) -> None:
    (point,) = read_points(PD_HEADER + PD_ROW, "table.csv").points
    assert with_whole_experts(point, width, block).row.deployment.label == label


def test_a_row_of_two_pools_whose_engines_nobody_counted_is_refused() -> None:
    table = read_points(PD_HEADER + PD_ROW.replace(",8,2,4,3,1,8,32,", ",8,,4,,8,1,,"), "table.csv")
    assert not table.points and "p_workers" in table.refused[0].reason


def test_a_benchmark_that_nobody_describes_is_simulated_as_a_known_one_and_has_no_ttft() -> None:
    (point,) = points(ROW.replace("median (InferenceX)", "unstated"))
    assert point.conduct is None
    assert (point.row.num_requests, point.row.workload.lengths.flag_value) == (80, "uniform:0.8-1.0")


def test_a_version_that_is_not_given_is_none() -> None:
    (point,) = points(ROW.replace("0.18.0", ""))
    assert point.stack.version == UNSTATED


def test_the_engine_in_an_image_of_dynamo_is_the_one_that_dynamo_requires() -> None:
    image = "nvcr.io/nvidia/ai-dynamo/tensorrtllm-runtime:0.8.1.post1"
    table = HEADER.strip() + ",image\n" + ROW.replace("0.18.0", "0.8.1.post1").strip() + f",{image}\n"
    (point,) = read_points(table, "table.csv").points
    assert point.stack.version == "1.2"


@pytest.mark.parametrize(("date", "version"), [("2025-10-29", "2025-Q4"), ("2026-04-03T00:00", "2026-Q2"), ("x", None)])
def test_engines_of_one_quarter_are_one_version_where_none_is_stated(date: str, version: str | None) -> None:
    table = HEADER.strip() + ",measured\n" + ROW.replace("0.18.0", "").strip() + f",{date}\n"
    (point,) = read_points(table, "table.csv").points
    assert point.stack.version == (version or UNSTATED)


def test_rows_that_nothing_simulates_are_refused_one_by_one() -> None:
    table = read_points(
        HEADER + ROW + ROW.replace(",8,2,1,1,", ",8,2,4,1,") + ROW.replace(",8,2,", ",,2,"), "table.csv"
    )
    assert len(table.points) == 1
    assert [each.line for each in table.refused] == [3, 4]
    assert "dp_attention" in table.refused[0].reason


@pytest.mark.parametrize("cell", ["x", "0", "-3"])
def test_a_measured_value_must_be_one(cell: str) -> None:
    with pytest.raises(UsageError, match=r"^table\.csv, line 2: tpot_ms"):
        points(ROW.replace(",50,5,", f",50,{cell},"))


def test_a_table_without_measured_values_is_no_such_table() -> None:
    with pytest.raises(UsageError, match=r"no column ttft_ms or tpot_ms"):
        read_points("tp,concurrency\n1,8\n", "table.csv")


def test_a_sample_is_the_same_again_and_keeps_the_order() -> None:
    rows = [ROW.replace(",8,2,1,", f",{load},2,1,") for load in range(1, 31)]
    (first,) = sample(points(*rows), 10).values()
    (again,) = sample(points(*rows), 10).values()
    assert first == again
    loads = [each.row.load.value for each in first]
    assert len(loads) == 10 and loads == sorted(loads)
