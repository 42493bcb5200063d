"""When windowed layers keep only their window, by the versions of vLLM whose source was read."""

from __future__ import annotations

import pytest

from pdlab.core.deployment import Deployment, parse_label
from pdlab.core.hybrid_kv import connectors_of, is_hybrid


@pytest.mark.parametrize(
    ("version", "alone", "beside_nixl"),
    [
        *(("0.11", False, False), ("0.12", True, False), ("0.18", True, False), ("0.22.0", True, False)),
        *(("0.23", True, True), ("0.29.0", True, True), ("1.0", True, True)),
    ],
)
def test_the_manager_by_version(version: str, alone: bool, beside_nixl: bool) -> None:
    assert is_hybrid({}, version=version) is alone
    assert is_hybrid({}, ("NixlConnector",), version) is beside_nixl
    assert not is_hybrid({"disable_hybrid_kv_cache_manager": True}, version=version)


def test_every_connector_must_support_it() -> None:
    nixl, store, other = ({"kv_connector": f"{name}"} for name in ("NixlConnector", "OffloadingConnector", "LMCache"))

    def several(*connectors: dict[str, str]) -> dict[str, object]:
        extra = {"connectors": list(connectors)}
        return {"kv_transfer_config": {"kv_connector": "MultiConnector", "kv_connector_extra_config": extra}}

    assert is_hybrid(several(nixl, store))
    assert not is_hybrid(several(nixl, other))
    assert not is_hybrid({"kv_transfer_config": other})
    assert is_hybrid({"kv_transfer_config": None})


@pytest.mark.parametrize(
    ("label", "stores", "names"),
    [
        ("collocated-1xtp1", {}, ()),
        ("pd-spread-p1xtp1-d1xtp1", {}, ("NixlConnector",)),
        ("pd-pack-p1xtp1-d1xtp1", {"kv_offload_gb": 1.0}, ("NixlConnector", "OffloadingConnector")),
        ("collocated-1xtp1", {"kv_connectors": ({"kv_connector": "ExampleConnector"},)}, ("ExampleConnector",)),
    ],
)
def test_the_connectors_of_a_deployment(label: str, stores: dict[str, object], names: tuple[str, ...]) -> None:
    deployment = Deployment.model_validate({"topology": parse_label(label), **stores})
    assert connectors_of(deployment) == names
