"""Which engines a plan considers."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.model_folders import LLAMA_70B, model_folder

from pdlab.core.catalog import require_shape
from pdlab.core.deployment import Collocated, Deployment, Disaggregated, Pool
from pdlab.core.errors import UsageError
from pdlab.core.nodes import ClusterNode, ClusterView
from pdlab.core.vllm_limits import check_divisibility
from pdlab.core.workload import Closed, Level, Workload
from pdlab.placement.copies import copies_of
from pdlab.plan.candidates import engine_shapes, most_copies, shortlist, units
from pdlab.plan.planned_nodes import planned_nodes
from pdlab.plan.rate_matching import RateMatcher, ReplicaUnit
from pdlab.sim import aic
from pdlab.sim.computed_hardware import computed
from pdlab.sim.hardware import Hardware, load_hardware
from pdlab.sim.simulator import simulate
from pdlab.sim.step_source import BilinearTable, Limits, LinearTable, Tabulated


def test_no_engine_that_the_launcher_would_refuse() -> None:
    """256 experts do not divide among 24, 40, 48 or 56 GPUs."""
    shape = require_shape("deepseek-v3")
    pools = engine_shapes(load_hardware("h100-vllm-0.11"), shape, 64, Workload(input_tokens=2000, output_tokens=200))
    for pool in pools:
        check_divisibility(Deployment(topology=Collocated(pool=pool)), shape)
    assert {pool.dp for pool in pools if pool.expert_parallel} == {16, 32, 64}


GPT_OSS = require_shape("gpt-oss-120b")
NOTHING = BilinearTable(xs=(0, 1), ys=(0, 1), z=((0, 0), (0, 0)))
NO_STEPS = Tabulated(
    shared=LinearTable(xs=(1, 2), ys=(0, 0)),
    **dict.fromkeys(("decode", "generation_attention", "context_attention"), NOTHING),
    limits=Limits(tokens=1, batch=1, context=1, prefill_tokens=1, prefix=1),
    provenance="made by hand",
)


@pytest.mark.parametrize(("version", "apart"), [("0.18", False), ("0.24", True)])
def test_engines_beside_a_connector_may_hold_shorter_requests(version: str, apart: bool) -> None:
    """TP 1 on H100 holds 62,505 tokens of all 36 layers, and twice as many of 18."""
    matcher = RateMatcher(computed("H100", "vllm", version), GPT_OSS, Workload(input_tokens=80_000, output_tokens=500))
    one, two = Pool(tp=1), Pool(tp=2)
    assert matcher.holds(one) and matcher.hold_apart(ReplicaUnit(two, 1, two, 1))
    assert matcher.hold_apart(ReplicaUnit(two, 1, one, 1)) is matcher.hold_apart(ReplicaUnit(one, 1, two, 1)) is apart


FIRST, SECOND = Pool(tp=2, gpu_type="H100"), Pool(tp=4, gpu_type="H200")


def two_types() -> Hardware:
    """The home file, and beside it one of half its memory, which no TP 1 engine fits."""
    home = load_hardware("h100-vllm-0.11")
    other = home.with_values({"memory_gb": 60.0}).model_copy(update={"gpu_type": "H200"})
    return home.model_copy(update={"beside": (other,)})


def test_engines_of_two_types_are_bound_to_theirs() -> None:
    pools = engine_shapes(two_types(), GPT_OSS, 8, Workload(input_tokens=5000, output_tokens=250))
    assert [(pool.tp, pool.gpu_type) for pool in pools] == [
        *((tp, "H100") for tp in (1, 2, 4, 8)),
        *((tp, "H200") for tp in (2, 4, 8)),
    ]


def test_tp_of_two_nodes_is_looked_at_where_tables_know_its_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aic, "tabulate", lambda *_: NO_STEPS)
    given = (require_shape("deepseek-v3"), 32, Workload(input_tokens=2000, output_tokens=200))
    tables, fitted = (engine_shapes(each, *given) for each in (computed("H100"), load_hardware("h100-vllm-0.11")))
    assert Pool(tp=16) in tables and Pool(tp=16) not in fitted
    assert {pool.dp for pool in tables if pool.expert_parallel} == {16, 32}


def test_latent_attention_has_data_parallel_ranks_within_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """H200 holds DeepSeek-V3 by TP 8, whose ranks keep the same KV cache eight times."""
    monkeypatch.setattr(aic, "tabulate", lambda *_: NO_STEPS)
    given = (16, Workload(input_tokens=2000, output_tokens=200))
    latent, plain = (
        engine_shapes(computed("H200"), require_shape(each), *given) for each in ("deepseek-v3", "gpt-oss-120b")
    )
    assert latent == [Pool(tp=8), Pool(dp=8, expert_parallel=True)]
    assert not any(pool.expert_parallel for pool in plain)


def test_prefill_is_on_the_first_type_and_the_rest_on_the_second() -> None:
    made = list(units([FIRST, SECOND], 8, two_types(), GPT_OSS))
    assert {unit.prefill for unit in made if unit.decode is None} == {SECOND}
    split = [unit for unit in made if unit.decode is not None]
    assert {(unit.prefill, unit.decode) for unit in split} == {(FIRST, SECOND)}
    # Up to 8 GPUs of each: 4 prefill engines beside 2 decode engines would be more than 8 of one type.
    assert {(unit.prefills, unit.decodes) for unit in split} == {(1, 1), (1, 2), (2, 1), (3, 1), (3, 2), (4, 1)}


@pytest.mark.parametrize(("gpus", "replicas"), [(8, 1), (12, 1)])
def test_a_collocated_pool_fills_a_node_of_its_own_type(gpus: int, replicas: int) -> None:
    """Nodes of four GPUs hold one engine of TP 4 each, whatever the nodes for prefill hold."""
    home = two_types()
    small = home.model_copy(update={"beside": (home.beside[0].model_copy(update={"gpus_per_node": 4}),)})
    (pool,) = (unit for unit in units([FIRST, SECOND], gpus, small, GPT_OSS) if unit.decode is None)
    assert pool.prefills == replicas


def test_pools_of_another_number_of_replicas_fill_a_node_of_their_own_type() -> None:
    home = two_types()
    small = home.model_copy(update={"beside": (home.beside[0].model_copy(update={"gpus_per_node": 4}),)})
    workload = Workload(input_tokens=5000, output_tokens=250)
    shapes = engine_shapes(small, GPT_OSS, 8, workload)
    view = planned_nodes(small, 8, None, spread=False)
    sized = shortlist(RateMatcher(small, GPT_OSS, workload), "gpt-oss-120b", view, 8, shapes, 0.012, 2.0).deployments
    fill = {
        pool.tp: each.node_replicas
        for each in sized
        for role, pool in each.deployment.pools.items()
        if role == "collocated"
    }
    assert fill == {2: 2, 4: 1}


@pytest.mark.parametrize(
    ("of_decode", "gpus", "degrees"),
    [(4, 2, [("H100", 1), ("H100", 2), ("H100", 4), ("H100", 8), ("H200", 2), ("H200", 4)]), (4, 8, None)],
)
def test_whole_nodes_are_those_of_each_type(of_decode: int, gpus: int, degrees: list[tuple[str, int]] | None) -> None:
    home = two_types()
    made = home.model_copy(update={"beside": (home.beside[0].model_copy(update={"gpus_per_node": of_decode}),)})
    given = (made, GPT_OSS, gpus, Workload(input_tokens=5000, output_tokens=250))
    of_nodes = engine_shapes(*given, whole_nodes=True)
    if degrees is None:
        assert of_nodes == engine_shapes(*given)
    else:
        assert [(pool.gpu_type, pool.tp) for pool in of_nodes] == degrees


@pytest.mark.parametrize(("prefills", "decodes", "copies"), [(1, 1, 2), (4, 1, 1), (1, 2, 1), (5, 1, 0)])
def test_copies_take_the_gpus_of_each_type(prefills: int, decodes: int, copies: int) -> None:
    assert most_copies(ReplicaUnit(FIRST, prefills, SECOND, decodes), 8) == copies


def test_copies_on_two_types_find_their_nodes() -> None:
    """Six nodes of one type before those of the other."""
    nodes = [
        ClusterNode(id=f"{gpu}-{number}", gpu_type=gpu, gpus=8, cpus=192, head=gpu == "H100" and not number)
        for gpu in ("H100", "H200")
        for number in range(6)
    ]
    alternate = tuple(node for pair in zip(nodes[:6], nodes[6:], strict=True) for node in pair)
    topology = Disaggregated(
        prefill=FIRST.model_copy(update={"tp": 8, "replicas": 5}),
        decode=SECOND.model_copy(update={"tp": 8}),
        placement="spread",
    )
    assert copies_of(Deployment(topology=topology), ClusterView(nodes=alternate), 96) == 1


@pytest.mark.parametrize(
    ("of_decode", "nodes", "tp", "decodes", "copies"),
    [
        (8, (13, 40), 8, 3, 13),  # after some copies many nodes for prefill are left before the next one for decode
        (4, (16, 16), 4, 8, 2),  # a copy takes one node of eight GPUs and eight nodes of four
        (4, (4, 16), 4, 4, 4),
    ],
)
def test_copies_take_nodes_of_each_type_in_any_number(
    of_decode: int, nodes: tuple[int, int], tp: int, decodes: int, copies: int
) -> None:
    there = [
        ClusterNode(id=f"{gpu}-{number}", gpu_type=gpu, gpus=gpus, cpus=192, head=gpu == "H100" and not number)
        for gpu, gpus, count in (("H100", 8, nodes[0]), ("H200", of_decode, nodes[1]))
        for number in range(count)
    ]
    topology = Disaggregated(
        prefill=FIRST.model_copy(update={"tp": 8}),
        decode=SECOND.model_copy(update={"tp": tp, "replicas": decodes}),
        placement="spread",
    )
    every = sum(node.gpus for node in there)
    assert copies_of(Deployment(topology=topology), ClusterView(nodes=tuple(there)), every) == copies


@pytest.mark.parametrize(
    ("name", "gpus", "tokens", "parts"),
    [
        # 70.6e9 parameters of two bytes: 141 GB, and an H100 has 80 GB.
        ("llama", 1, 2000, ["(tried: tp1): at tp1 weights take 141 GB of each GPU, ", "; give more GPUs"]),
        ("llama-FP8", 1, 2000, ["at tp1 weights take 141 GB", "; the name llama-FP8 has FP8, and its config.json"]),
        ("llama", 4, 120_000, ["(tried: tp1, tp2, tp4): at tp4 its KV cache has ", "or shorter requests"]),
    ],
)
def test_a_refusal_says_what_does_not_fit(tmp_path: Path, name: str, gpus: int, tokens: int, parts: list[str]) -> None:
    """Of a plan and of one deployment: the weights, or the request beside them."""
    shape, hardware = require_shape(model_folder(tmp_path / name, LLAMA_70B)), load_hardware("h100-vllm-0.11")
    small = hardware.with_values({"memory_gb": 48.0}) if gpus == 4 else hardware
    workload = Workload(input_tokens=tokens, output_tokens=200)
    with pytest.raises(UsageError) as refused:
        engine_shapes(small, shape, gpus, workload)
    assert all(part in str(refused.value) for part in parts), refused.value
    assert ("shorter" in str(refused.value)) is (gpus == 4)
    deployment = Deployment(topology=Collocated(pool=Pool(tp=gpus)))
    level = Level(load=Closed(concurrency=1), num_requests=1, seed=0)
    with pytest.raises(UsageError) as refused:
        simulate(deployment, [level], workload, small, shape)
    told = parts[0].partition(f"at tp{gpus} ")[2].rstrip(", ")
    assert f"an engine of tp{gpus} does not hold {name} with one request" in str(refused.value)
    assert told in str(refused.value) and ("shorter" in str(refused.value)) is (gpus == 4)
    assert ("FP8, and its config.json" in str(refused.value)) is (name == "llama-FP8")
