"""Plan and measurement divide by the same GPUs, by whole nodes and by those used."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
from support.curves import made_up

from pdlab.analysis.curves import Gpus, View
from pdlab.cli import viz
from pdlab.cli.whole_nodes import counted, counted_gpus
from pdlab.core.catalog import load_model
from pdlab.core.deployment import Deployment, parse_label
from pdlab.core.workload import Slo, Workload
from pdlab.plan.scene import Scene
from pdlab.sim.hardware import load_hardware

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
    shape = load_model("gpt-oss-120b")
    assert shape is not None
    scene = replace(Scene(load_hardware("h100-vllm-0.11"), shape, Workload(), Slo(tpot_s=0.012)), count=count)
    deployment = Deployment(topology=parse_label(label))
    curve = counted(made_up(deployment))
    expected = GPUS[label][count == "used"]
    assert curve.counted(View(count=count)) == expected
    copies = 16 // GPUS[label][0]
    assert scene.counted_gpus(deployment, copies, 16) / copies == expected
    per_gpu = View(count=count, gpus_per_node=1)
    assert curve.scale(per_gpu) == pytest.approx(1 / expected)


def test_no_plan_counts_more_than_its_nodes() -> None:
    """Five GPUs of every node, eight of them on one alone: 6 copies on 8 nodes are 64 GPUs, not 6 x 16."""
    shape = load_model("gpt-oss-120b")
    assert shape is not None
    scene = Scene(load_hardware("h100-vllm-0.11"), shape, Workload(), Slo())
    deployment = Deployment(topology=parse_label("pd-spread-p1xtp8-d1xtp2"))
    assert scene.counted_gpus(deployment, 6, 64) == 64


def test_where_only_a_number_is_known_it_fills_nodes_too() -> None:
    assert [counted_gpus(Gpus(total=n), None).whole for n in (3, 4, 6, 8, 10)] == [4, 4, 8, 8, 16]
    ranks = Gpus(total=2, device="cpu")
    assert counted_gpus(ranks, None).counted("nodes") == 2, "nobody rents CPU ranks by the node"


def test_used_gpus_do_not_go_with_raw_throughput(capsys: pytest.CaptureFixture[str]) -> None:
    assert viz.main(["--exps", "x", "--count-gpus", "used", "--no-use-normalized"]) == 2
    assert "--count-gpus is for throughput per node" in capsys.readouterr().err
