"""What vLLM hashes and refuses between engines is what is compared before they start."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from contract.conftest import quietly

from pdlab.deploy import engine_arguments
from pdlab.deploy.pool_agreement import HANDSHAKE_FACTORS, SPECULATIVE_FACTORS, WITHOUT_KV_CACHE, handshake_value

METADATA = "vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata"


def function(name: str) -> ast.FunctionDef:
    vllm = importlib.util.find_spec("vllm")
    if vllm is None or vllm.origin is None:
        pytest.skip("vLLM is not installed here")
    path = Path(vllm.origin).parent / f"{METADATA.partition('.')[2].replace('.', '/')}.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name)


def keys(of: ast.AST) -> set[str]:
    """The names in every dictionary that the code writes."""
    dicts = [node for node in ast.walk(of) if isinstance(node, ast.Dict)]
    return {key.value for each in dicts for key in each.keys if isinstance(key, ast.Constant)}


def test_every_factor_of_the_hash_is_known() -> None:
    hashed = function("compute_nixl_compatibility_hash")
    assert keys(hashed) == set(HANDSHAKE_FACTORS)
    # Nothing is added to the factors but in the dictionary that was just looked at.
    stored = [node for node in ast.walk(hashed) if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)]
    assert stored == []
    assert keys(function("_get_speculative_compatibility_factors")) == set(SPECULATIVE_FACTORS)


def test_the_arguments_that_decide_a_factor_are_vllms() -> None:
    named = {name for names in HANDSHAKE_FACTORS.values() for name in names}
    assert named | {"block_size", "kv_offloading_size", "distributed_executor_backend"} <= set(
        engine_arguments.known_arguments()
    )


def test_methods_without_a_kv_cache_are_vllms_and_not_hashed() -> None:
    speculative = quietly("vllm.config.speculative")
    for method in WITHOUT_KV_CACHE:
        assert speculative.SpeculativeConfig.use_eagle(SimpleNamespace(method=method)) is False
    source = Path(speculative.__file__).read_text(encoding="utf-8")
    assert all(f'"{method}"' in source for method in WITHOUT_KV_CACHE)


def configured(arguments: dict[str, Any]) -> SimpleNamespace:
    """Of vLLM's configuration, what its function reads, as the engine arguments make it."""
    draft: SimpleNamespace | None = None
    cache = arguments.get("kv_cache_dtype", "auto")
    if config := arguments.get("speculative_config"):
        model = SimpleNamespace(
            model=config.get("model"), revision=config.get("revision"), code_revision=None, hf_config=SimpleNamespace()
        )
        draft = SimpleNamespace(
            method=config["method"],
            draft_model_config=model,
            kv_cache_dtype=config.get("kv_cache_dtype"),
            parallel_drafting=bool(config.get("parallel_drafting")),
            use_eagle=lambda: config["method"] in ("eagle", "eagle3", "mtp"),
        )
    layers = (arguments.get("hf_overrides") or {}).get("num_hidden_layers", 36)
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model="m",
            dtype=arguments.get("dtype", "auto"),
            get_total_num_kv_heads=lambda: 8,
            get_head_size=lambda: 64,
            get_total_num_hidden_layers=lambda: layers,
        ),
        cache_config=SimpleNamespace(cache_dtype=cache),
        scheduler_config=SimpleNamespace(
            disable_hybrid_kv_cache_manager=bool(arguments.get("disable_hybrid_kv_cache_manager"))
        ),
        speculative_config=draft,
    )


EAGLE = {"method": "eagle3", "model": "org/draft"}
ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"dtype": "float16"},
    {"kv_cache_dtype": "fp8"},
    {"disable_hybrid_kv_cache_manager": True},
    {"attention_backend": "FLASHINFER"},
    {"hf_overrides": {"num_hidden_layers": 2}},
    {"speculative_config": EAGLE},
    {"speculative_config": {**EAGLE, "kv_cache_dtype": "auto"}},
    {"speculative_config": {**EAGLE, "kv_cache_dtype": "fp8"}},
    {"speculative_config": {**EAGLE, "kv_cache_dtype": "fp8"}, "kv_cache_dtype": "fp8"},
    {"speculative_config": EAGLE, "kv_cache_dtype": "fp8"},
    {"speculative_config": {**EAGLE, "parallel_drafting": True}},
    {"speculative_config": {"method": "mtp", "model": "org/draft"}},
    {"speculative_config": {"method": "ngram"}},
    {"max_num_seqs": 3},
]


def test_what_compares_equal_is_what_hashes_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every two sets of arguments: compared by vLLM's own function and by ours."""
    metadata = quietly(METADATA)
    names = dict.fromkeys(name for each in HANDSHAKE_FACTORS.values() for name in each)
    hashes = [
        metadata.compute_nixl_compatibility_hash(configured(each), each.get("attention_backend", "FLASH_ATTN"))
        for each in ARGUMENTS
    ]
    ours = [{name: handshake_value(name, each) for name in names} for each in ARGUMENTS]
    for first in range(len(ARGUMENTS)):
        for second in range(first):
            same = hashes[first] == hashes[second]
            assert (ours[first] == ours[second]) is same, (ARGUMENTS[first], ARGUMENTS[second])
    assert 1 < len(set(hashes)) < len(hashes)


def test_offloading_replaces_the_connector() -> None:
    config = SimpleNamespace(
        cache_config=SimpleNamespace(kv_offloading_size=8, kv_offloading_backend="native"),
        kv_transfer_config=SimpleNamespace(kv_connector="NixlConnector", kv_role="x", kv_connector_extra_config={}),
    )
    quietly("vllm.config").VllmConfig._post_init_kv_transfer_config(config)
    assert config.kv_transfer_config.kv_connector != "NixlConnector"
