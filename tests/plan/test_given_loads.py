"""Plans for a given rate or number of requests in flight, and on nodes that cannot hold every deployment: prefill and
decode apart are compared with collocated engines of the size that the load needs."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.plans import HARDWARE, MODEL, SHAPE, nodes, scenario

from pdlab.analysis.curves import Curve
from pdlab.analysis.view import View
from pdlab.cli import plan as cli_plan
from pdlab.core.catalog import require_shape
from pdlab.core.deployment import Deployment, Disaggregated, Pool, Role, parse_label
from pdlab.core.errors import PlacementError, UsageError
from pdlab.core.nodes import ClusterNode, ClusterView, Nic
from pdlab.core.schema import to_yaml
from pdlab.core.workload import Closed, Level, Open, Workload
from pdlab.deploy.serve_config import engine_kwargs
from pdlab.placement.solver import cpus_per_group
from pdlab.plan.accuracy import MeasuredSweep
from pdlab.plan.engine_arguments import measured_as_launched
from pdlab.plan.pictures import candidate_curve
from pdlab.plan.planned_nodes import nodes_of, planned_nodes
from pdlab.plan.planner import Candidate, Plan, evaluate, plan, sized_deployment
from pdlab.report import curve_figure
from pdlab.sim.argument_effects import with_added
from pdlab.sim.computed_hardware import beside, computed
from pdlab.sim.engine_host import host_of
from pdlab.sim.hardware import Hardware, load_hardware
from pdlab.sim.kv_transfer import on_nodes
from pdlab.sim.simulator import simulate
from pdlab.sim.step_time import kv_capacity_tokens, step_costs

WITHOUT_RAY = HARDWARE.model_copy(update={"direct": host_of("vllm").direct})
SLO = {"ttft_s": 2.0, "tpot_s": 0.012}


def gpus_of(candidate: Candidate | None) -> int:
    assert candidate is not None
    return candidate.copies * candidate.deployment.gpus


def view_of(cpus: int) -> ClusterView:
    return ClusterView(nodes=(ClusterNode(id="a", gpu_type="H100", gpus=8, cpus=cpus, head=True),))


def planned(gpus: int, view: ClusterView | None = None, **loads: object) -> Plan:
    return plan(scenario(**SLO), MODEL, view or nodes(-(-gpus // 8)), gpus, **loads)  # type: ignore[arg-type]


def test_more_gpus_do_not_make_a_rate_need_more() -> None:
    """Two GPUs that serve one request a second serve it where 16 are planned."""
    few, many = planned(3, rate_rps=1.0), planned(16, rate_rps=1.0)
    assert gpus_of(many.best_candidate(collocated=True)) == gpus_of(few.best_candidate(collocated=True)) == 2
    assert gpus_of(many.best_candidate(collocated=False)) == gpus_of(few.best_candidate(collocated=False)) == 3
    assert many.candidates[0].collocated


def test_a_rate_that_takes_several_whole_pools_takes_copies() -> None:
    best = planned(32, rate_rps=24.0).best_candidate(collocated=True)
    assert best is not None and best.copies > 1 and best.best is not None
    assert best.copies * best.outcomes[0].load.value == pytest.approx(24.0)


def test_a_deployment_that_is_explained_is_that_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_plan.main(["--explain", "collocated-4xtp2", "--rate", "1"]) == 0
    assert "collocated-4xtp2" in capsys.readouterr().out


@pytest.mark.usefixtures("tabulated")
def test_a_deployment_of_two_gpu_types_is_explained_under_the_load_that_is_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--p-hardware", "H100", "--d-hardware", "H200", "--explain", "pd-spread-p1xtp8-d1xtp4"]
    assert cli_plan.main([*words, "--concurrency", "12"]) == 0
    assert "concurrency 12 " in capsys.readouterr().out


def test_copies_of_a_rate_take_whole_nodes() -> None:
    """One copy on a node of eight GPUs is paid for as eight, whatever copies would fit beside it."""
    on_nodes_of_eight = replace(scenario(**SLO), count="nodes")
    found = plan(on_nodes_of_eight, MODEL, nodes(2), 16, rate_rps=1.0)
    assert {each.total_gpus for each in found.candidates} <= {8, 16} and found.candidates[0].total_gpus == 8
    used = {each.copies * each.deployment.gpus for each in found.candidates}
    assert min(used) < 8


def test_requests_in_flight_are_shared_by_gpu() -> None:
    """Three of eight GPUs get three of eight requests: with more they would be busier, and look better."""
    found = planned(8, concurrencies=(8, 32)).candidates
    sizes = {each.deployment.gpus: each for each in found}
    assert {4, 8} < set(sizes) and any(8 % size for size in sizes), "some leave GPUs over"
    for size, each in sizes.items():
        assert [outcome.load.value for outcome in each.outcomes] == [size, 4 * size]


@pytest.mark.parametrize("cpus", [4, 8, 12])
def test_nodes_of_few_cpus_have_fewer_engines_of_either_kind(cpus: int) -> None:
    view = view_of(cpus)
    found = planned(8, view, rate_rps=5.0)
    assert {each.collocated for each in found.candidates} == {True, False}
    for each in found.candidates:
        pools = each.deployment.pools.values()
        assert each.copies * sum(pool.replicas * cpus_per_group(view.nodes[0], pool.tp) for pool in pools) <= cpus
    assert found.unplaced > 0 and f"only {cpus} CPUs" in found.why_unplaced


def test_nodes_that_hold_no_engine_are_refused_as_a_launch_refuses_them() -> None:
    with pytest.raises(PlacementError, match="only 1 CPU "):
        planned(8, view_of(1))


def test_the_exchange_of_experts_is_at_most_the_line_rate_and_not_for_ever() -> None:
    """A file on slow nodes, planned for faster ones, has theirs."""
    shape, pool = require_shape("deepseek-v3"), Pool(dp=16, expert_parallel=True)

    def exchange_s(gbit_per_s: float | None, start: Hardware = HARDWARE) -> tuple[float, Hardware]:
        nic = Nic(kind="infiniband", count=8, gbit_per_s=gbit_per_s)
        made = on_nodes(start, [ClusterNode(id="a", gpu_type="H100", gpus=8, nic=nic)])
        return step_costs(made, shape, pool).exchange_s, made

    (slow_s, slow), (fast_s, _) = exchange_s(10), exchange_s(10_000)
    own_s = step_costs(HARDWARE, shape, pool).exchange_s
    assert fast_s == own_s and slow_s == pytest.approx(own_s * HARDWARE.value("alltoall_gb_per_s") / 1.25)
    assert exchange_s(10_000, slow)[0] == own_s


def test_memory_that_a_file_states_is_that_of_the_plan() -> None:
    """The smallest node counts; a node of another GPU type does not."""
    sizes = [("H100", 60.0), ("H100", 40.0), ("H200", 20.0), ("H100", None)]
    given = [ClusterNode(id=str(n), gpu_type=gpu, gpus=8, gpu_memory_gb=gb) for n, (gpu, gb) in enumerate(sizes)]
    assert on_nodes(HARDWARE, given).value("memory_gb") == 40.0
    assert on_nodes(HARDWARE, given[3:]).value("memory_gb") == HARDWARE.value("memory_gb")


@pytest.mark.parametrize(
    ("hardware", "keys"),
    [
        ("H200", "gpu_type: h200"),
        ("A100-80G", "gpu_type: A100, gpu_memory_gb: 84.6"),
        ("A100-40G", "gpu_type: a100-40g"),
    ],
)
def test_nodes_of_a_file_are_of_the_hardware(hardware: str, keys: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"nodes: [{{id: a, gpus: 8, cpus: 96, {keys}}}]\n")
    described = computed(hardware)
    assert {each.gpu_type for each in planned_nodes(described, 16, str(file), spread=True).nodes} == {hardware}
    stated = 84.6 if "memory" in keys else described.value("memory_gb")
    assert on_nodes(described, nodes_of(str(file))).value("memory_gb") == stated


def test_nodes_of_another_size_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("nodes: [{id: a, gpus: 8, cpus: 96, gpu_type: A100, gpu_memory_gb: 42.9}]\n")
    with pytest.raises(UsageError, match=r"has 8 x A100, .*; give --hardware A100-40G, or"):
        planned_nodes(computed("A100-80G"), 8, str(file), spread=False)


@pytest.mark.parametrize("cpus", [(96, 6), (6, 96)], ids=str)
def test_nodes_of_a_file_have_their_own_cpus(
    cpus: tuple[int, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A launch places engines on the nodes as the file has them. More nodes than it has are like the poorest."""
    file = tmp_path / "mine.yaml"
    nodes = "".join(
        f"- {{id: n{number}, gpu_type: H100, gpus: 8, cpus: {count}, nic: {{kind: efa}}}}\n"
        for number, count in enumerate(cpus)
    )
    file.write_text(f"nodes:\n{nodes}")
    views = [planned_nodes(HARDWARE, gpus, str(file), spread=False) for gpus in (8, 16, 24)]
    planned_cpus = [[node.cpus for node in view.nodes] for view in views]
    assert planned_cpus == [[96], [96, 6], [96, 6, 6]]
    for gpus, note in (("8", "takes those with the most"), ("16", ""), ("24", "takes 6 for each node beyond these")):
        assert cli_plan.main(["--gpus", gpus, "--concurrency", "16", "--node", str(file)]) == 0
        written = capsys.readouterr()
        assert ("nodes of H100 have 6 to 96 CPUs, and the plan" in written.err) is bool(note) and note in written.err
        if gpus == "16":
            row = re.search(r" collocated-4xtp2 +(\d+) ", written.out)
            assert row and row[1] == "1", "its engines take 12 CPUs"


NODE = "- {{id: {}, gpu_type: {}, gpus: {}, cpus: 96, nic: {{kind: efa, count: 32, gbit_per_s: 100}}}}\n"


@pytest.mark.usefixtures("tabulated")
@pytest.mark.parametrize(
    ("nodes", "words", "refusal"),
    [
        ([("H100", 8), ("H200", 4)], "--p-hardware H100 --d-hardware H200", ""),
        ([("H100", 4), ("H200", 4)], "--p-hardware H100 --d-hardware H200", ""),
        (
            [("H100", 8), ("H100", 4), ("H200", 8)],
            "--p-hardware H100 --d-hardware H200",
            "has nodes of 4 and of 8 H100: plan for one size",
        ),
        ([("H100", 4), ("H100", 8)], "", "has nodes of 4 and of 8 H100: plan for one size"),
        ([("H100", 8), ("H200", 4)], "--hardware H200", "give both GPU types"),
    ],
)
def test_a_type_has_the_size_of_its_own_nodes(
    nodes: list[tuple[str, int]], words: str, refusal: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("nodes:\n" + "".join(NODE.format(f"n{number}", *each) for number, each in enumerate(nodes)))
    spread = ["--explain", "pd-spread-p1xtp4-d1xtp4", "--concurrency", "8", "--node", str(file), *words.split()]
    assert cli_plan.main(spread) == (2 if refusal else 0)
    error = capsys.readouterr().err
    assert refusal in error and error.count("\n") == bool(refusal)


def two_sizes(**sizes: int) -> Hardware:
    """Prefill on the first GPU type, decode on the second, with nodes of these GPUs."""
    first, second = (computed(gpu, gpus_per_node=gpus) for gpu, gpus in sizes.items())
    return beside(first, second)


@pytest.mark.parametrize(
    ("sizes", "gpus", "free", "name"),
    [
        (
            {"H100": 8, "H200": 8},
            12,
            [("H100", 8), ("H200", 8), ("H100", 4), ("H200", 4)],
            "4 x node of 8 H100 and of H200",
        ),
        (
            {"H100": 8, "GB200": 4},
            12,
            [("H100", 8), ("GB200", 4), ("H100", 4), ("GB200", 4), ("GB200", 4)],
            "2 x node of 8 H100 and 3 x node of 4 GB200",
        ),
        (
            {"H100": 2, "H200": 8},
            6,
            [("H100", 2), ("H200", 6), ("H100", 2), ("H100", 2)],
            "3 x node of 2 H100 and 1 x node of 8 H200",
        ),
    ],
)
def test_each_type_has_as_many_nodes_as_its_gpus_need(
    sizes: dict[str, int], gpus: int, free: list[tuple[str, int]], name: str
) -> None:
    view = planned_nodes(two_sizes(**sizes), gpus, None, spread=False)
    assert [(node.gpu_type, len(node.slots)) for node in view.nodes] == free
    assert {node.gpu_type: node.gpus for node in view.nodes} == sizes
    assert [node.cpus / node.gpus for node in view.nodes] == [24.0] * len(free)
    assert view.name == name


@pytest.mark.usefixtures("tabulated")
@pytest.mark.parametrize(("size", "per"), [(8, "node"), (4, "GPU")], ids=str)
def test_throughput_is_per_node_only_if_all_nodes_are_alike(
    size: int, per: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, rows = tmp_path / "mine.yaml", tmp_path / "rows.csv"
    file.write_text("nodes:\n" + NODE.format("a", "H100", 8) + NODE.format("b", "H200", size))
    types = ["--p-hardware", "H100", "--d-hardware", "H200", "--node", str(file)]
    assert cli_plan.main([*types, "--gpus", "4", "--concurrency", "8", "--otl", "250"]) == 0
    out = capsys.readouterr().out
    header, _, row = out[out.index("    deployment") :].splitlines()[:3]
    columns = dict(zip(re.split(" {2,}", header.strip()), re.split(" {2,}", row.strip())[1:], strict=False))
    tokens_per_s = float(columns["req/s"]) * float(columns["copies"]) * 250 / float(columns["GPUs"])
    assert float(columns[f"tok/s per {per}"]) == pytest.approx(tokens_per_s * (8 if per == "node" else 1), rel=0.01)
    assert ("nodes of H200 have 4 GPUs, so throughput per node is not defined" in out) is (size == 4)
    assert ("per node are divided" in out) is (size == 8)
    rows.write_text("configuration,input_tokens,output_tokens,concurrency\npd-spread-p1xtp4-d1xtp4,5000,250,8\n")
    assert cli_plan.main([*types, "--predict", str(rows)]) == 0
    (predicted,) = csv.DictReader(capsys.readouterr().out.splitlines())
    rate, per_node = (predicted[f"predicted_output_tokens_per_s{end}"] for end in ("", "_per_node"))
    assert (per_node == rate) if size == 8 else (not per_node and float(rate) > 0)
    assert ("throughput per node is not defined" in predicted["prediction_note"]) is (size == 4)


@pytest.mark.usefixtures("tabulated")
@pytest.mark.parametrize("load", [["--concurrency", "8"], ["--rate", "3"]], ids=str)
def test_a_plan_of_two_types_names_no_flag_that_it_refuses(load: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    types = ["--p-hardware", "H100", "--d-hardware", "H200", "--gpus", "8", *load]
    assert cli_plan.main(types) == 0
    out = capsys.readouterr().out
    assert "nodes are rented whole." in out and "--count-gpus" not in out
    assert cli_plan.main([*types, "--count-gpus", "nodes"]) == 2


@pytest.mark.usefixtures("tabulated")
@pytest.mark.parametrize(
    ("words", "gpus"),
    [
        (["--hardware", "H200"], 8),
        (["--hardware", "GB200"], 4),
        (["--p-hardware", "H100", "--d-hardware", "H200"], 8),
        (["--p-hardware", "H100", "--d-hardware", "GB200"], 1),
    ],
)
def test_a_picture_is_per_node_of_the_hardware(
    words: list[str], gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []
    figure = curve_figure.curve_figure

    def kept(curves: Sequence[Curve], view: View, **given: Any) -> curve_figure.CurveFigure:
        drawn.append(view.gpus_per_node)
        return figure(curves, view, **given)

    monkeypatch.setattr(curve_figure, "curve_figure", kept)
    picture = tmp_path / "plan.svg"
    assert cli_plan.main([*words, "--gpus", "4", "--concurrency", "8", "--plot", str(picture)]) == 0
    assert drawn == [gpus] and picture.exists()


def test_what_a_plan_does_not_take_from_a_file_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("nodes: [{id: a, gpu_type: H100, gpus: 8, cpus: 96, head: true, free_gpus: [0, 1]}]\n")
    view = planned_nodes(HARDWARE, 16, str(file), spread=False)
    assert [len(node.slots) for node in view.nodes] == [8, 8]
    assert cli_plan.main(["--gpus", "16", "--concurrency", "1", "--node", str(file)]) == 0
    notes = capsys.readouterr().err.splitlines()
    assert [line.partition(": it")[0] for line in notes if "such nodes" in line] == [f"note: --node {file}"]
    assert len([line for line in notes if "in use" in line]) == 1


@pytest.mark.parametrize("words", [["--gpus", "8"], ["--explain", "pd-spread-p1xtp4-d1xtp4"]], ids=str)
def test_nodes_without_a_network_are_named(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("nodes: [{id: a, gpu_type: H100, gpus: 8, cpus: 96, head: true}]\n")
    assert cli_plan.main([*words, "--concurrency", "8", "--node", str(file)]) == 0
    assert len([line for line in capsys.readouterr().err.splitlines() if "no nic of a " in line]) == 1


class TestArgumentsOfALaunch:
    """gpt-oss-120b on one GPU is launched with smaller batches, and with more of the memory."""

    def test_a_plan_has_the_engines_of_its_launch(self) -> None:
        planned_labels = {each.deployment.label: each.deployment for each in planned(4, concurrencies=(16,)).candidates}
        alone, larger = planned_labels["collocated-4xtp1"], planned_labels["collocated-2xtp2"]
        role: Role = "collocated"
        for deployment in (alone, larger):
            (pool,) = deployment.pools.values()
            launched = engine_kwargs(
                Deployment(model=MODEL, topology=parse_label(deployment.label)), role, SHAPE, cpu=False
            )
            for name in ("max_num_batched_tokens", "max_num_seqs", "gpu_memory_utilization"):
                assert pool.engine_kwargs.get(name) == launched.get(name)
        assert alone.pools[role].engine_kwargs and not larger.pools[role].engine_kwargs

    def test_its_commands_leave_them_to_the_launch(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli_plan.main(["--gpus", "1", "--concurrency", "8"]) == 0
        out = capsys.readouterr().out
        assert "--collocated" in out and "--engine-arg" not in out.replace("--engine-arg KEY=VALUE", "")

    def test_what_is_given_for_the_deployment_counts_more(self) -> None:
        given = Deployment(topology=parse_label("pd-pack-p1xtp1-d1xtp2"), engine_kwargs={"max_num_seqs": 8})
        made = with_added(given, HARDWARE, SHAPE)
        assert isinstance(made.topology, Disaggregated)
        assert "max_num_seqs" not in made.topology.prefill.engine_kwargs
        assert made.topology.prefill.engine_kwargs["max_num_batched_tokens"] == 4096
        assert not made.topology.decode.engine_kwargs

    @pytest.mark.parametrize("hardware", [load_hardware("cpu-vllm-0.29"), WITHOUT_RAY], ids=["cpu", "without Ray"])
    def test_engines_that_no_launch_starts_have_vllms_own(self, hardware: Hardware) -> None:
        given = Deployment(topology=parse_label("collocated-2xtp1"))
        assert with_added(given, hardware, SHAPE) == given

    def test_runs_of_a_launch_have_them_and_those_of_others_not(self) -> None:
        sweep = MeasuredSweep(
            name="a", deployment=Deployment(topology=parse_label("collocated-2xtp1")), workload=Workload(), levels=(),
            values=(), prompts="fresh", launched=True,
        )  # fmt: skip
        (pool,) = measured_as_launched(sweep, HARDWARE, SHAPE).deployment.pools.values()
        assert pool.engine_kwargs["gpu_memory_utilization"] == 0.94
        others = sweep.model_copy(update={"launched": False})
        assert measured_as_launched(others, HARDWARE, SHAPE) == others


@pytest.mark.usefixtures("tabulated")
class TestLongRequests:
    """vLLM 0.18 keeps windows alone only without a KV connector: P:D engines of TP 1 hold shorter requests."""

    WORDS = ("--hardware", "H100", "--engine-version", "0.18", "--gpus", "2")

    def trace(self, folder: Path) -> str:
        lengths = [1000] * 39 + [115_000]
        rows = [f"{number},{tokens},20" for number, tokens in enumerate(lengths)]
        file = folder / "trace.csv"
        file.write_text("arrival_s,input_tokens,output_tokens\n" + "\n".join(rows) + "\n")
        return str(file)

    def test_one_of_a_trace_leaves_out_what_does_not_hold_it(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli_plan.main([*self.WORDS, "--workload", self.trace(tmp_path)]) == 0
        out = capsys.readouterr().out
        assert "collocated-1xtp1" in out or "collocated-1xtp2" in out
        assert "pd-pack-p1xtp1-d1xtp1" not in out

    def test_fluid_engines_have_a_connector(self, capsys: pytest.CaptureFixture[str]) -> None:
        bounds = ["--slo-ttft-ms", "60000", "--slo-tpot-ms", "100"]
        words = ["--hardware", "H100", "--engine-version", "0.18", "--gpus", "4", "--fluid"]
        assert cli_plan.main([*words, "--itl", "115000", "--otl", "20", *bounds]) == 0
        assert "xtp2" in capsys.readouterr().out

    def test_host_memory_has_a_connector_too(self) -> None:
        alone = computed("H100", "vllm", "0.18")
        beside = alone.beside_connectors(("OffloadingConnector",))
        held = [kv_capacity_tokens(each, SHAPE, Pool(tp=2)) for each in (alone, beside)]
        assert held[0] == pytest.approx(2 * held[1], rel=0.01)


def test_a_rate_that_nobody_serves_is_explained_as_it_is_sorted(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_plan.main(["--gpus", "2", "--rate", "40"]) == 0
    assert "sorted by requests/s per GPU" in capsys.readouterr().out
    assert cli_plan.main(["--gpus", "2", "--rate", "40", "--slo-ttft-ms", "60000", "--slo-tpot-ms", "60"]) == 0
    assert "sorted by requests/s per GPU" not in capsys.readouterr().out


@pytest.mark.usefixtures("tabulated")
def test_tables_in_a_file_have_the_windows_of_their_engine(tmp_path: Path) -> None:
    """A file that does not say it, as older ones, is of the engine and version that it names."""
    for version, hybrid in (("0.24", True), ("0.11", False)):
        made = computed("H200", "vllm", version)
        silent = tmp_path / f"{version}.yaml"
        silent.write_text(to_yaml(made.model_copy(update={"hybrid_kv": False})))
        assert "hybrid_kv" not in silent.read_text()
        assert load_hardware(str(silent)).hybrid_kv is hybrid is made.hybrid_kv
    assert load_hardware("h100-vllm-0.11").hybrid_kv is False
    current = computed("H200").steps
    assert current is not None
    unknown = computed("H200").model_copy(
        update={"steps": current.model_copy(update={"version": "current", "engine_version": None})}
    )
    assert unknown.of_pd().hybrid_kv is True


def test_a_picture_has_the_figures_of_the_ranking() -> None:
    """Of levels of few waves, a count of completions in a window would be another figure."""
    own = scenario(**SLO)
    for candidate in planned(8, concurrencies=(16, 64)).candidates[:3]:
        runs = candidate_curve(candidate, own).experiment.runs
        assert len(runs) == 2
        for run, outcome in zip(runs, candidate.outcomes, strict=True):
            assert run.steady is not None and run.steady.ttft is not None and run.steady.tpot is not None
            assert run.steady.requests_per_s == outcome.requests_per_s
            assert run.steady.output_tokens_per_s == outcome.output_tokens_per_s
            assert run.steady.ttft.mean_s == pytest.approx(outcome.ttft_s)
            assert run.steady.tpot.mean_s == pytest.approx(outcome.tpot_s)
            assert run.steady.judged == len(outcome.columns[0]) < run.num_requests


@pytest.mark.parametrize("concurrency", [8, 32])
def test_ttft_of_a_given_closed_loop_is_that_of_a_long_run(concurrency: int) -> None:
    """Of other requests. All requests start at once, and so on two replicas they are unevenly spread for long."""
    under, deployment = scenario(), Deployment(topology=parse_label("collocated-2xtp4"))
    found = evaluate(under, sized_deployment(under, deployment), None, concurrencies=(concurrency,))
    level = Level(load=Closed(concurrency=concurrency), num_requests=300 * concurrency, seed=5)
    (long,) = simulate(deployment, [level], under.workload, HARDWARE, SHAPE, seed=5, scattered=True)
    waits_s = np.subtract(long.first_token_s, long.arrival_s)[20 * concurrency : -concurrency]
    assert found.outcomes[0].ttft_s == pytest.approx(waits_s.mean(), rel=0.1)


def test_a_loop_that_fills_for_long_serves_what_its_engines_can() -> None:
    """2,000 clients begin 2.2 ms apart, for 4.4 s. The answers of eight tokens come sooner."""
    under = scenario(Workload(input_tokens=200, output_tokens=8))
    deployment = Deployment(topology=parse_label("collocated-8xtp1"))
    level = Level(load=Closed(concurrency=2000), num_requests=24_000, seed=0)
    (done,) = simulate(deployment, [level], under.workload, under.hardware, under.shape, prompts="fresh")
    ends_s = sorted(done.finish_s)
    steady_rps = 9600 / (ends_s[16_800] - ends_s[7200])
    assert under.outcome(deployment, Closed(concurrency=2000)).requests_per_s == pytest.approx(steady_rps, rel=0.06)


def test_a_rate_is_served_though_answers_take_longer_than_its_first_requests_come() -> None:
    """25 requests/s of some 50 s each: 1,200 requests, the least of a level, come within 48 s."""
    under = scenario(Workload(input_tokens=1000, output_tokens=4000))
    outcome = under.outcome(Deployment(topology=parse_label("collocated-16xtp4")), Open(rate_rps=25.0))
    assert outcome.columns[2].mean() > 40
    assert outcome.keeps_up and outcome.requests_per_s == pytest.approx(25.0, rel=0.05)


@pytest.mark.usefixtures("tabulated")
def test_only_nodes_that_an_engine_spans_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """TP 8 fits a node of 8 H100; a node of GB200 has 4."""
    words = ["--explain", "pd-spread-p1xtp8-d1xtp8", "--concurrency", "4", "--p-hardware", "H100"]
    assert cli_plan.main([*words, "--d-hardware", "GB200"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "with the link that the tables have between nodes of GB200" in out
    assert "between nodes of H100" not in out
