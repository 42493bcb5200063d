"""What fits into an engine: against pools that were measured, against vLLM's own rule, and refused before a start."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pdlab.cli import launch
from pdlab.core.catalog import ModelShape, load_cluster, resolve_model
from pdlab.core.deployment import Deployment, parse_label
from pdlab.core.errors import UsageError
from pdlab.core.request_lengths import configured_length
from pdlab.core.settings import parse
from pdlab.core.workload import Workload
from pdlab.deploy.engine_memory import EngineMemory, engine_memory, examine, reserved_bytes
from pdlab.deploy.launch import start_timeout_s
from pdlab.deploy.options import LaunchSettings, deployment_from, workload_from
from pdlab.placement.place import place

X2 = load_cluster("p5.48xlarge-x2")


def shape_of(model: str) -> ModelShape:
    shape = resolve_model(model)[0]
    assert shape is not None
    return shape


GPT_OSS = shape_of("gpt-oss-120b")


def of(label: str, role: Any = "collocated", memory_gb: float | None = 85.5, **kwargs: Any) -> EngineMemory:
    deployment = Deployment(topology=parse_label(label), engine_kwargs=kwargs)
    memory = engine_memory(deployment, role, GPT_OSS, memory_gb, cpu=False, workload=Workload())
    assert memory is not None
    return memory


@pytest.mark.parametrize(("tp", "low", "high"), [(2, 0.95e6, 1.05e6), (4, 2.8e6, 3.05e6)])
def test_pools_of_published_deployments(tp: int, low: float, high: float) -> None:
    """They ran at a utilisation of 0.9, and kept every token in all 36 layers."""
    memory = of(f"collocated-1xtp{tp}", gpu_memory_utilization=0.9)
    every_layer = 36 * 2 * 8 * 64 * 2
    assert low < memory.kv_bytes * tp / every_layer < high


def test_thirteen_prompts_at_tp1_of_the_published_kind() -> None:
    memory = of("collocated-8xtp1", gpu_memory_utilization=0.9)
    assert 11 <= memory.kv_bytes / (5250 * 36 * 2 * 8 * 64 * 2) <= 14


def test_a_request_of_the_models_own_length_reserves_about_five_gb() -> None:
    """vLLM keeps the window of 128 and the two steps in flight of each windowed layer."""
    reserved = reserved_bytes(GPT_OSS, 131072, {}, "gpu")
    assert reserved == 2 * 8 * 64 * 2 * 18 * (131072 + 127 + 2 * 8192)


def test_kv_heads_are_copied_beyond_their_number_and_experts_divided_by_dp() -> None:
    assert of("collocated-1xtp16").longest_bytes == of("collocated-1xtp8").longest_bytes
    one, four = of("collocated-1xtp2"), of("collocated-1xtp2dp4ep")
    assert four.weights_bytes < one.weights_bytes / 2


def test_prefill_holds_prompts_and_decode_whole_requests() -> None:
    prefill, decode = (of("pd-spread-p1xtp4-d1xtp4", role) for role in ("prefill", "decode"))
    assert (prefill.request_tokens, decode.request_tokens) == (5001, 5250)
    assert prefill.requests > decode.requests > 1000


def test_told_bytes_are_taken_and_unknown_gpus_are_unknown() -> None:
    memory = of("collocated-1xtp4", memory_gb=None, kv_cache_memory_bytes=10**9)
    assert memory.kv_bytes == 10**9 and not memory.estimated
    deployment = Deployment(topology=parse_label("collocated-1xtp4"))
    assert engine_memory(deployment, "collocated", GPT_OSS, None, cpu=False, workload=Workload()) is None


def cluster_of(tmp_path: Path, *nodes: str) -> str:
    """A file of nodes of 8 GPUs, each with these keys."""
    file = tmp_path / "mine.yaml"
    names = [f"n{number}" for number in range(len(nodes))]
    file.write_text(
        "name: mine\nnodes:\n"
        + "".join(
            f"- {{id: {name}, gpus: 8, cpus: 99, labels: {{pdlab/node: {name}}}, {keys}}}\n"
            for name, keys in zip(names, nodes, strict=True)
        )
    )
    return str(file)


def dry_run(file: str, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert launch.main([*words, "--cluster", file, "--dry-run"]) == 0
    return capsys.readouterr().out


def test_one_name_for_two_sizes_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--collocated", "--tp", "2", "--max-model-len", "8192")
    text = dry_run(cluster_of(tmp_path, "gpu_type: A100"), capsys, *words)
    assert "not known" in text and "42.9 or 85.9 GB" in text and "gpu_memory_gb of n0" in text
    larger = dry_run(cluster_of(tmp_path, "gpu_type: A100, gpu_memory_gb: 85.9"), capsys, *words)
    assert "not known" not in larger and "requests of 5,000:250 that fit" in larger
    smaller = cluster_of(tmp_path, "gpu_type: A100, gpu_memory_gb: 42.9")
    assert launch.main([*words, "--cluster", smaller, "--dry-run"]) == 2
    assert "cannot hold" in capsys.readouterr().err


def test_the_case_of_a_gpu_type_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--pd-spread", "--p-tp", "2", "--d-tp", "4")
    alike = [
        dry_run(cluster_of(tmp_path, f"gpu_type: {one}", "gpu_type: H200"), capsys, *words) for one in ("h200", "H200")
    ]
    assert alike[0] == alike[1] and "not known" not in alike[0]
    mixed = cluster_of(tmp_path, "gpu_type: H100", "gpu_type: h200")
    for gpus in (("H200", "h100"), ("h200", "H100")):
        text = dry_run(mixed, capsys, *words, "--p-gpu", gpus[0], "--d-gpu", gpus[1])
        assert re.search(r"prefill 0 +n1 ", text) and re.search(r"decode 0 +n0 ", text)


def test_a_pool_is_bound_to_a_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = ("gpu_type: A100, gpu_memory_gb: 42.9", "gpu_type: A100, gpu_memory_gb: 85.9")
    for size, name in (("a100-40g", "n0"), ("A100-80G", "n1")):
        text = dry_run(cluster_of(tmp_path, *nodes), capsys, "--collocated", "--tp", "4", "--gpu", size)
        assert re.search(rf"collocated 0 +{name} ", text)


@pytest.mark.parametrize(
    ("nodes", "flags", "parts"),
    [
        (["gpu_type: GPU-OF-TOMORROW"], "", ["memory of collocated engines: not known", "gpu_memory_gb of n0"]),
        (["nic: {kind: efa}"], "", ["memory of collocated engines: not known", "gpu_memory_gb of n0"]),
        (["gpu_type: X, gpu_memory_gb: 85.5", "gpu_type: X"], "--num 2", ["not known", "gpu_memory_gb of n1 in"]),
        (["gpu_type: A100"], "--model org/name", ["has no config.json of org/name"]),
    ],
)
def test_memory_that_is_not_known_has_its_reason(
    nodes: list[str], flags: str, parts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = dry_run(cluster_of(tmp_path, *nodes), capsys, "--collocated", "--tp", "8", *flags.split())
    assert all(part in text for part in parts)
    assert ("gpu_memory_gb" in text) == ("--model" not in flags)


def test_a_decode_engine_that_cannot_hold_one_request_is_refused() -> None:
    deployment = Deployment(
        topology=parse_label("pd-pack-p1xtp4-d1xtp1"), engine_kwargs={"gpu_memory_utilization": 0.85}
    )
    with pytest.raises(UsageError, match=r"^decode engine of 1 GPU cannot hold [^\n]*--d-tp[^\n]*$"):
        examine(deployment, GPT_OSS, X2, place(deployment, X2), Workload())


def test_the_length_that_the_refusal_names_is_not_refused() -> None:
    kwargs: dict[str, Any] = {"gpu_memory_utilization": 0.85}
    deployment = Deployment(topology=parse_label("collocated-1xtp1"), engine_kwargs=kwargs)
    with pytest.raises(UsageError, match=r"--max-model-len (\d+)") as caught:
        examine(deployment, GPT_OSS, X2, place(deployment, X2), Workload())
    length = int(str(caught.value).split("--max-model-len ")[1].split(" with shorter requests,")[0])
    shorter = deployment.model_copy(update={"max_model_len": length})
    assert examine(shorter, GPT_OSS, X2, place(shorter, X2), Workload())


def small(kv_tokens: int, **more: Any) -> Deployment:
    """A TP1 engine with KV cache for so many tokens of gpt-oss, whose windowed layers keep all of them."""
    kwargs = {"kv_cache_memory_bytes": 2 * 8 * 64 * 2 * 36 * kv_tokens, "disable_hybrid_kv_cache_manager": True}
    return Deployment(topology=parse_label("collocated-1xtp1"), engine_kwargs=kwargs, **more)


@pytest.mark.parametrize(
    ("kv_tokens", "fix"),
    [
        (5539, "give --max-model-len 5250, a larger"),
        (5249, "give --max-model-len 5120 with shorter requests, a larger"),
        (6500, "give --max-model-len 6144, a larger"),
        (900, "give a larger --tp"),
    ],
)
def test_the_length_that_the_refusal_names_holds_the_requests(kv_tokens: int, fix: str) -> None:
    deployment = small(kv_tokens, max_model_len=8192)
    with pytest.raises(UsageError, match=re.escape(fix)):
        examine(deployment, GPT_OSS, X2, place(deployment, X2), Workload(input_tokens=5000, output_tokens=250))


def test_the_refusal_names_the_argument_that_set_the_length() -> None:
    deployment = small(6500)
    kwargs = {**deployment.engine_kwargs, "max_model_len": 8192}
    deployment = deployment.model_copy(update={"engine_kwargs": kwargs})
    with pytest.raises(UsageError, match="give --engine-arg max_model_len=6144, a larger"):
        examine(deployment, GPT_OSS, X2, place(deployment, X2), Workload())


def test_a_length_that_vllm_fits_to_the_memory_is_computed() -> None:
    deployment = small(6500)
    kwargs = {**deployment.engine_kwargs, "max_model_len": -1}
    deployment = deployment.model_copy(update={"engine_kwargs": kwargs})
    (memory,) = examine(deployment, GPT_OSS, X2, place(deployment, X2), Workload())
    assert (memory.longest, memory.requests) == (6144, 1)
    whole = deployment.model_copy(update={"engine_kwargs": {"max_model_len": -1, "kv_cache_memory_bytes": 10**11}})
    assert examine(whole, GPT_OSS, X2, place(whole, X2), Workload())[0].longest == 131072


def test_the_commands_that_follow_send_what_the_engines_hold(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--collocated --tp 4 --cluster p5.48xlarge-x2 --dry-run"
    for more in ("--max-model-len 4096", "--engine-arg max_model_len=4096"):
        assert launch.main([*words.split(), *more.split()]) == 0
        text = capsys.readouterr().out
        assert "requests of 3,900:195 that fit" in text and "longer than" not in text
        assert "--itl 3900 --otl 195" in next(line for line in text.splitlines() if "run_bm.sh" in line)


def test_a_dry_run_of_tp1_says_how_many_requests_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["--collocated", "--num", "8", "--tp", "1", "--cluster", "p5.48xlarge-x2", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.endswith("requests of 5,000:250 that fit"))
    assert lines[at + 2].split()[0] == "collocated" and 30 < int(lines[at + 2].split()[-1]) < 60


@pytest.mark.parametrize(
    ("line", "length"),
    [
        ("--collocated", None),
        ("--collocated --itl 5000", 8192),
        ("--collocated --isl 20000 --osl 1000", 21504),
        ("--collocated --itl 20000 --max-model-len 30000", 30000),
        ("--collocated --local --itl 9000", 9216),
        ("--collocated --lengths uniform:0.8-1.0", 8192),
        ("--collocated --lengths uniform:1.0-4.0", 21504),
        ("--collocated --itl 9000 --lengths lognormal:0.5,max=12000", 12288),
        ("--collocated --itl 9000 --engine-arg max_model_len=9300", None),
        ("--collocated --itl 9000 --engine-arg max_model_len=-1", None),
        ("--pd-pack --itl 9000 --p-engine-arg max_model_len=9001", 10240),
    ],
)
def test_max_model_len_follows_the_workload_unless_it_is_given(line: str, length: int | None) -> None:
    assert deployment_from(parse(LaunchSettings, line.split())).max_model_len == length


def test_a_workload_longer_than_the_given_length_is_refused() -> None:
    with pytest.raises(UsageError, match="5250 tokens, max_model_len is 4096"):
        deployment_from(parse(LaunchSettings, ["--collocated", "--itl", "5000", "--max-model-len", "4096"]))


def test_a_workload_gets_no_more_than_the_models_context(tmp_path: Path) -> None:
    known = resolve_model("tiny-llama").shape
    assert known is not None and known.config is not None
    short = {**known.config, "max_position_embeddings": 4100}
    (tmp_path / "config.json").write_text(json.dumps(short))

    def length(*words: str) -> int | None:
        return deployment_from(parse(LaunchSettings, ["--collocated", "--model", str(tmp_path), *words])).max_model_len

    assert length("--itl", "1000") == length("--itl", "4050", "--otl", "50") == 4100
    with pytest.raises(UsageError, match=r"takes 4100 tokens of context; a request has 4101: shorten it$"):
        length("--itl", "4051", "--otl", "50")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--collocated --engine-arg max_model_len=4096", "--itl 5000 and --otl 250 are 5250 tokens, max_model_len is "
         "4096: give a larger --engine-arg max_model_len, or leave"),
        ("--pd-spread --engine-arg max_model_len=5249", "are 5250 tokens, max_model_len is 5249"),
        ("--pd-spread --p-engine-arg max_model_len=4096", "--itl 5000 and one of the answer are 5001 tokens, "
         "max_model_len is 4096: give a larger --p-engine-arg max_model_len, or leave"),
        ("--pd-spread --d-engine-arg max_model_len='5001'", "a larger --d-engine-arg max_model_len, or leave"),
    ],
)  # fmt: skip
def test_a_workload_longer_than_an_engine_argument_is_refused(line: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        deployment_from(parse(LaunchSettings, [*line.split(), "--itl", "5000", "--otl", "250"]))


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("--collocated --engine-arg max_model_len=8192", "--engine-arg max_model_len=8192"),
        ("--pd-pack --p-engine-arg max_model_len=8192 --d-engine-arg max_model_len=9000",
         "--p-engine-arg max_model_len=8192"),
    ],
)  # fmt: skip
def test_a_length_that_no_engine_would_take_is_refused(line: str, named: str) -> None:
    words = line.split()
    with pytest.raises(UsageError, match=f"^--max-model-len 9000 and {named} set the same length: leave one"):
        deployment_from(parse(LaunchSettings, [*words, "--max-model-len", "9000"]))
    if "--p-engine-arg" in words:
        deployment_from(parse(LaunchSettings, [*words[:3], "--max-model-len", "9000"]))


def test_a_longest_request_above_the_given_length_is_refused() -> None:
    with pytest.raises(UsageError, match=r"the longest request of 5000:250 uniform 0.8-1.2 has 6300 tokens, max_"):
        words = "--collocated --lengths uniform:0.8-1.2 --max-model-len 6000"
        deployment_from(parse(LaunchSettings, words.split()))


def test_a_file_of_lengths_says_what_engines_must_hold(tmp_path: Path) -> None:
    path = tmp_path / "p.csv"
    path.write_text("input_tokens,output_tokens\n500,20\n9000,10\n8000,900\n")
    args = parse(LaunchSettings, ["--collocated", "--local", "--lengths", f"file:{path}"])
    assert deployment_from(args).max_model_len == 9216
    assert (workload_from(args).longest, workload_from(args).longest_input) == ((9010 - 10, 10), 9000)
    with pytest.raises(
        UsageError, match="--itl 7: the file of --lengths sets the lengths of requests; leave --itl out"
    ):
        workload_from(parse(LaunchSettings, ["--collocated", "--itl", "7", "--lengths", f"file:{path}"]))


def test_more_bytes_on_more_nodes_may_take_longer_to_start() -> None:
    assert start_timeout_s(GPT_OSS, X2) == start_timeout_s(None, X2) == 1800
    large = start_timeout_s(shape_of("deepseek-v3"), load_cluster("p5.48xlarge-x13"))
    assert 3000 < large < 6000


@pytest.mark.parametrize(
    ("file", "flags", "lengths"),
    [
        ("max_model_len: 16384", "--engine-arg max_model_len=8192", [8192, 8192]),
        ("engine_kwargs: {max_model_len: 16384}", "--max-model-len 8192", [8192, 8192]),
        ("max_model_len: 16384", "--p-engine-arg max_model_len=8192", [8192, 16384]),
        ("engine_kwargs: {max_model_len: 16384}", "--p-engine-arg max_model_len=8192", [8192, 16384]),
        (
            "engine_kwargs: {max_model_len: 9000}",
            "--max-model-len 8192 --d-engine-arg max_model_len=10000",
            [8192, 10000],
        ),
    ],
)
def test_a_flag_overrides_the_length_of_a_file_in_either_form(
    file: str, flags: str, lengths: list[int], tmp_path: Path
) -> None:
    path = tmp_path / "deployment.yaml"
    path.write_text(f"model: gpt-oss-120b\n{file}\n" + PACK)
    made = deployment_from(parse(LaunchSettings, ["--config", str(path), *flags.split()]))
    assert [configured_length(made, pool, None, cpu=False) for pool in made.pools.values()] == lengths


def test_a_flag_overrides_the_length_of_a_pool_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "deployment.yaml"
    path.write_text("model: gpt-oss-120b\n" + PACK.replace("tp: 2}", "tp: 2, engine_kwargs: {max_model_len: 9000}}", 1))
    made = deployment_from(parse(LaunchSettings, ["--config", str(path), "--max-model-len", "8192"]))
    assert [configured_length(made, pool, None, cpu=False) for pool in made.pools.values()] == [8192, 8192]


PACK = "topology: {kind: disaggregated, prefill: {tp: 2}, decode: {tp: 2}, placement: pack}\n"


def test_the_proposed_length_serves_both_pools() -> None:
    words = "--pd-pack --p-tp 2 --d-tp 2 --max-model-len 5000 --itl 5000 --otl 250"
    with pytest.raises(UsageError, match="--itl 5000 and --otl 250 are 5250 tokens"):
        deployment_from(parse(LaunchSettings, words.split()))
