"""Plan and measurement divide by the same GPUs, by whole nodes and by those used."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

import pytest
from support.curves import made_up
from support.plans import scenario

from pdlab.analysis.curves import Curve, Gpus, Point
from pdlab.analysis.ranking import order_changes
from pdlab.analysis.view import View
from pdlab.cli import plan
from pdlab.core.deployment import Deployment, parse_label
from pdlab.core.gpu_count import Count
from pdlab.plan.facts import other_first
from pdlab.plan.planner import Candidate, Plan
from pdlab.report import tables
from pdlab.report.whole_nodes import counted, counted_gpus

GPUS = {
    "collocated-4xtp2": (8, 8),
    "collocated-3xtp2": (8, 6),
    "pd-pack-p1xtp2-d1xtp4": (8, 6),
    "pd-pack-p1xtp2-d1xtp2": (4, 4),
    "pd-spread-p1xtp4-d1xtp4": (8, 8),
    "pd-spread-p7xtp1-d2xtp4": (16, 15),
}


@pytest.mark.parametrize("label", GPUS)
@pytest.mark.parametrize("count", ["nodes", "used"])
def test_a_plan_and_a_plot_agree(label: str, count: Literal["nodes", "used"]) -> None:
    planned = replace(scenario(tpot_s=0.012), count=count)
    deployment = Deployment(topology=parse_label(label))
    curve = counted(made_up(deployment))
    expected = GPUS[label][count == "used"]
    assert curve.counted(View(count=count)) == expected
    copies = 16 // GPUS[label][0]
    assert planned.counted_gpus(deployment, copies, 16) / copies == expected
    per_gpu = View(count=count, gpus_per_node=1)
    assert curve.scale(per_gpu) == pytest.approx(1 / expected)


def test_no_plan_counts_more_than_its_nodes() -> None:
    """Five GPUs of every node, eight of them on one alone: 6 copies on 8 nodes are 64 GPUs, not 6 x 16."""
    planned = replace(scenario(), count="nodes")
    deployment = Deployment(topology=parse_label("pd-spread-p1xtp8-d1xtp2"))
    assert planned.counted_gpus(deployment, 6, 64) == 64


def test_where_only_a_number_is_known_it_fills_nodes_too() -> None:
    assert [counted_gpus(Gpus(total=n), None).whole for n in (3, 4, 6, 8, 10)] == [4, 4, 8, 8, 16]
    ranks = Gpus(total=2, device="cpu")
    assert counted_gpus(ranks, None).counted("nodes") == 2, "nobody rents CPU ranks by the node"


def test_the_default_is_one_declaration() -> None:
    assert {plan.PlanSettings().count_gpus, View().count, scenario().count} == {"used"}


def of_throughput(label: str, output_tokens_per_s: float) -> Curve:
    point = Point(
        kind="concurrency",
        value=8,
        window="whole",
        samples=(),
        requests_per_s=1,
        input_tokens_per_s=1,
        output_tokens_per_s=output_tokens_per_s,
    )
    return counted(made_up(Deployment(topology=parse_label(label))).model_copy(update={"points": (point,)}))


@pytest.mark.parametrize(("rate", "differs"), [(70.0, True), (90.0, False), (60.0, False)])
def test_one_line_where_the_order_depends_on_the_counting(rate: float, differs: bool) -> None:
    """Six GPUs of a node of eight: 70 are more than 85 of eight per GPU used, and fewer per node; 90 and 60 are not."""
    curves = [of_throughput("collocated-3xtp2", rate), of_throughput("collocated-4xtp2", 85)]
    for count in get_args(Count):
        found = [line for line in tables.notes(curves, View(count=count)) if "the order by highest" in line]
        assert len(found) == differs
        above = order_changes(curves, View(count=count))
        expected = ["collocated-3xtp2", "collocated-4xtp2"][:: 1 if count == "used" else -1]
        assert [[each.label for each in pair] for pair in above] == ([expected] if differs else [])


@pytest.mark.parametrize(("goodput_rps", "differs"), [(7.0, True), (9.0, False)])
def test_a_plan_names_the_candidate_that_the_other_counting_has_first(goodput_rps: float, differs: bool) -> None:
    bounded = scenario(tpot_s=0.012)
    made = [
        Candidate(Deployment(topology=parse_label(label)), 1, (), None, gpus, goodput_rps=rps)
        for label, gpus, rps in (("collocated-3xtp2", 6, goodput_rps), ("collocated-4xtp2", 8, 8.5))
    ]
    planned = Plan(tuple(made), 2, bounded.slo, None, gpus=8)
    assert planned.first(bounded, "used") is made[0]
    assert planned.first(bounded, "nodes") is made[differs]
    assert other_first(planned, bounded) is (made[1] if differs else None)
