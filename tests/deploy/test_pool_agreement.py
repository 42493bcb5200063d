"""Engine arguments that would fail once engines run are refused before, by their name."""

from __future__ import annotations

from typing import Any

import pytest

from pdlab.core.catalog import ModelShape, load_cluster, local_cluster, resolve_model
from pdlab.core.deployment import Collocated, Deployment, Disaggregated, Pool
from pdlab.core.errors import UsageError
from pdlab.core.workload import Workload
from pdlab.deploy.pool_agreement import check_pools
from pdlab.deploy.prepared import prepare_deployment
from pdlab.deploy.serve_config import engine_kwargs

EAGLE = {"method": "eagle3", "model": "org/draft", "num_speculative_tokens": 3}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
GPT_OSS = resolve_model("gpt-oss-120b").shape
assert GPT_OSS is not None


def pd(prefill: dict[str, Any], decode: dict[str, Any], prefill_tp: int = 4, **both: Any) -> Deployment:
    pools = {"prefill": Pool(tp=prefill_tp, engine_kwargs=prefill), "decode": Pool(tp=4, engine_kwargs=decode)}
    return Deployment(topology=Disaggregated(**pools, placement="spread"), engine_kwargs=both)


def complaint(deployment: Deployment, *, shape: ModelShape | None = GPT_OSS, cpu: bool = False) -> str | None:
    try:
        check_pools(deployment, shape, cpu=cpu)
    except UsageError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("name", "value", "other"),
    [
        ("dtype", "float16", None),
        ("dtype", "float16", "bfloat16"),
        ("kv_cache_dtype", "fp8", None),
        ("kv_cache_dtype", "fp8_e4m3", "fp8_e5m2"),
        ("disable_hybrid_kv_cache_manager", True, None),
        ("disable_hybrid_kv_cache_manager", True, False),
        ("attention_backend", "FLASHINFER", "TRITON_ATTN"),
        ("revision", "abc", None),
        ("hf_overrides", {"num_hidden_layers": 2}, None),
        ("speculative_config", EAGLE, None),
        ("speculative_config", EAGLE, {**EAGLE, "model": "org/other"}),
        ("speculative_config", EAGLE, {**EAGLE, "kv_cache_dtype": "fp8"}),
        ("speculative_config", EAGLE, NGRAM),
        ("block_size", 64, None),
        ("block_size", 48, 64),
    ],
)
@pytest.mark.parametrize("swapped", [False, True])
def test_pools_that_must_not_differ(name: str, value: Any, other: Any, swapped: bool) -> None:
    pools = [{name: value}, {} if other is None else {name: other}]
    text = complaint(pd(*(pools[::-1] if swapped else pools)))
    if name == "block_size" and other is None and swapped:
        assert text is None  # blocks of 64 are whole multiples of the default's
        return
    assert text is not None and text.startswith(f"engine argument {name}: prefill has ") and "\n" not in text
    assert all(str(each).lower() in text.lower() for each in (value, other) if isinstance(each, str | int))


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ({"dtype": "half"}, {"dtype": "float16"}),
        ({"dtype": "auto"}, {}),
        ({"disable_hybrid_kv_cache_manager": False}, {}),
        ({"speculative_config": NGRAM}, {}),
        ({"speculative_config": EAGLE}, {"speculative_config": {**EAGLE, "num_speculative_tokens": 5}}),
        ({"speculative_config": EAGLE}, {"speculative_config": {**EAGLE, "kv_cache_dtype": "auto"}}),
        ({"speculative_config": {"method": "deepseek_mtp"}}, {"speculative_config": {"method": "mtp"}}),
        ({"attention_backend": "flashinfer"}, {"attention_config": {"backend": "FLASHINFER"}}),
        ({"max_num_seqs": 8, "gpu_memory_utilization": 0.8, "enforce_eager": True}, {}),
        ({"block_size": 16}, {}),
        ({"block_size": 32}, {"block_size": 64}),
    ],
)
def test_pools_that_may_differ_like_this(prefill: dict[str, Any], decode: dict[str, Any]) -> None:
    assert complaint(pd(prefill, decode)) is None


def test_an_argument_of_both_pools_is_no_difference() -> None:
    assert complaint(pd({}, {}, kv_cache_dtype="fp8", speculative_config=EAGLE)) is None
    assert "kv_cache_dtype" in (complaint(pd({}, {"kv_cache_dtype": "auto"}, kv_cache_dtype="fp8")) or "")


def test_an_argument_that_the_model_brings_at_one_tp_counts() -> None:
    assert GPT_OSS is not None
    shape = GPT_OSS.model_copy(update={"engine_kwargs_by_tp": {2: {"kv_cache_dtype": "fp8"}}})
    assert "kv_cache_dtype" in (complaint(pd({}, {}, prefill_tp=2), shape=shape) or "")


def test_block_sizes_where_prefill_has_the_larger_tp_or_the_model_is_not_known() -> None:
    larger = {"block_size": 64}
    assert complaint(pd({"block_size": 32}, larger, prefill_tp=2)) is None
    assert "block_size" in (complaint(pd({"block_size": 32}, larger, prefill_tp=8)) or "")
    assert "block_size" in (complaint(pd({}, larger), shape=None) or "")


def test_offloading_takes_the_connectors_place() -> None:
    for deployment in (
        pd({}, {}, kv_offloading_size=8),
        pd({"kv_offloading_size": 8}, {}),
        Deployment(topology=Collocated(pool=Pool()), decode_bench=True, engine_kwargs={"kv_offloading_size": 8}),
    ):
        assert "engine argument kv_offloading_size=8" in (complaint(deployment) or "")
    alone = Deployment(topology=Collocated(pool=Pool()), engine_kwargs={"kv_offloading_size": 8})
    assert complaint(alone) is None and complaint(pd({}, {}, kv_offloading_size=None)) is None


@pytest.mark.parametrize(("backend", "on_gpus", "on_cpus"), [("mp", False, True), ("ray", True, False)])
def test_ray_chooses_the_executor(backend: str, on_gpus: bool, on_cpus: bool) -> None:
    deployment = pd({}, {}, distributed_executor_backend=backend)
    assert (complaint(deployment) is None, complaint(deployment, cpu=True) is None) == (on_gpus, on_cpus)


@pytest.mark.parametrize("name", ["data_parallel_size_local", "data_parallel_rank", "data_parallel_hybrid_lb"])
def test_ranks_are_rays(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}.*--p-dp"):
        pd({}, {name: 1})


def test_it_is_refused_before_anything_is_placed() -> None:
    deployment = pd({"dtype": "float16"}, {"dtype": "bfloat16"})
    with pytest.raises(UsageError, match="engine argument dtype"):
        prepare_deployment(deployment, load_cluster("p5.48xlarge-x2"), GPT_OSS, "m", Workload())
    with pytest.raises(UsageError, match="engine argument dtype"):
        prepare_deployment(deployment, local_cluster(2), GPT_OSS, "m", Workload())


def test_a_store_that_turns_off_the_hybrid_cache_of_prefill_turns_off_that_of_decode() -> None:
    """vLLM turns it off for a connector that does not support it, and moves KV only between engines that agree."""
    off, stores = "disable_hybrid_kv_cache_manager", ({"kv_connector": "LMCacheConnectorV1"},)
    deployment = pd({}, {}).model_copy(update={"kv_connectors": stores})
    assert complaint(deployment) is None
    assert engine_kwargs(deployment, "decode", GPT_OSS, cpu=False)[off] is True
    assert off not in engine_kwargs(pd({}, {}), "decode", GPT_OSS, cpu=False)
    own = pd({}, {off: False}).model_copy(update={"kv_connectors": stores})
    text = complaint(own)
    assert text is not None and text.startswith(f"engine argument {off}: prefill has true,"), "what is given counts"
