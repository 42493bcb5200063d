"""Which collocated launch may be the reference of which deployment."""

from __future__ import annotations

from typing import Any

import pytest

from pdlab.core.catalog import load_cluster
from pdlab.core.deployment import Deployment, Disaggregated, Pool, parse_label
from pdlab.core.nodes import ClusterView
from pdlab.deploy.endpoint import Running
from pdlab.deploy.verify import _reference_key
from pdlab.placement.place import place
from pdlab.results.schema import Manifest

X2 = load_cluster("p5.48xlarge-x2")


def key(label: str, view: ClusterView = X2, vllm: str = "0.29.0", **more: Any) -> str | None:
    deployment = Deployment(topology=parse_label(label), **more)
    return key_of(deployment, view, vllm)


def key_of(deployment: Deployment, view: ClusterView = X2, vllm: str = "0.29.0") -> str | None:
    manifest = Manifest(
        origin="measured",
        label=deployment.label,
        deployment=deployment,
        cluster=view,
        placement=place(deployment, view),
        versions={"vllm": vllm},
    )
    return _reference_key(deployment, Running(base_url="http://h:1", model_id="m", tokenizer="t", manifest=manifest))


def test_a_collocated_launch_of_the_same_engines_is_the_reference() -> None:
    assert key("collocated-4xtp2") == key("collocated-1xtp2") == key("pd-pack-p2xtp2-d1xtp2") is not None


def test_unlike_pools_have_none() -> None:
    assert key("pd-pack-p1xtp2-d1xtp4") is None
    topology = Disaggregated(prefill=Pool(tp=2), decode=Pool(tp=2, engine_kwargs={"seed": 1}), placement="pack")
    assert key_of(Deployment(topology=topology)) is None


@pytest.mark.parametrize(
    "changed",
    [
        {"label": "collocated-1xtp4"},
        {"label": "collocated-1xtp2pp2"},
        {"label": "collocated-1xtp2dp2"},
        {"label": "collocated-1xtp2dp2ep"},
        {"engine_kwargs": {"kv_cache_dtype": "fp8"}},
        {"max_model_len": 4096},
        {"vllm": "0.30.0"},
        {"view": ClusterView(nodes=tuple(n.model_copy(update={"gpu_type": "H200"}) for n in X2.nodes))},
    ],
    ids=str,
)
def test_what_changes_numerics_changes_the_reference(changed: dict[str, Any]) -> None:
    keys = {key("collocated-1xtp2"), key("collocated-1xtp2dp2"), key(**{"label": "collocated-1xtp2", **changed})}
    assert len(keys) == (2 if changed.get("label") == "collocated-1xtp2dp2" else 3)
