"""Which KV connectors leave vLLM's hybrid KV cache manager on is what the installed vLLM says."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from contract.conftest import quietly

from pdlab.core.deployment import KV_STORES, Deployment, parse_label
from pdlab.core.hybrid_kv import SEVERAL, SUPPORTING, TURNED_OFF, is_hybrid
from pdlab.deploy.serve_config import engine_kwargs

FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"


def by_vllm(config: dict[str, Any]) -> bool:
    """Raises ImportError where the connector needs a package that is not installed."""
    factory, kinds = quietly(FACTORY).KVConnectorFactory, quietly("vllm.config")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the modules that it imports
        return bool(factory.supports_hma_config(kinds.KVTransferConfig(**config)))


def test_the_connectors_that_support_it_are_vllms() -> None:
    known = set(quietly(FACTORY).KVConnectorFactory._registry)
    assert known >= SUPPORTING and {SEVERAL, *KV_STORES} <= known
    asked = 0
    for name in known - {SEVERAL}:
        try:
            supports = by_vllm({"kv_connector": name, "kv_role": "kv_both"})
        except ImportError:
            continue
        asked += 1
        assert supports is (name in SUPPORTING), name
    assert asked >= len(SUPPORTING)


@pytest.mark.parametrize(
    ("label", "more"),
    [
        ("pd-spread-p1xtp1-d1xtp1", {}),
        ("pd-pack-p1xtp1-d1xtp1", {"kv_offload_gb": 1.0}),
        ("pd-pack-p1xtp1-d1xtp1", {"kv_connectors": ({"kv_connector": "ExampleConnector"},)}),
        ("collocated-1xtp1", {"kv_offload_gb": 1.0}),
        ("collocated-1xtp1", {"kv_connectors": ({"kv_connector": "ExampleConnector"},)}),
        ("collocated-1xtp1", {"decode_bench": True}),
    ],
)
def test_engines_of_a_deployment(label: str, more: dict[str, Any]) -> None:
    deployment = Deployment.model_validate({"topology": parse_label(label), **more})
    found = []
    for role in deployment.pools:
        arguments = engine_kwargs(deployment, role, None, cpu=False)
        kept = not arguments.get(TURNED_OFF) and by_vllm(arguments["kv_transfer_config"])
        assert is_hybrid(arguments) is kept, role
        found.append(kept)
    assert len(set(found)) == 1, "vLLM moves KV only between engines that agree"
