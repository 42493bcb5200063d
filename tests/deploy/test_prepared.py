"""What the dry run shows and the launch submits is one value."""

from __future__ import annotations

import pytest

from pdlab.core.catalog import load_cluster, load_deployment, resolve_model
from pdlab.core.deployment import Deployment
from pdlab.core.errors import UsageError
from pdlab.core.workload import Workload
from pdlab.deploy.prepared import prepare_deployment


def over(deployment: Deployment, *backends: str) -> Deployment:
    assert deployment.transport is not None
    return deployment.with_topology(transport=deployment.transport.model_copy(update={"backends": backends}))


def test_another_transport_keeps_the_placement_and_is_what_is_rendered() -> None:
    """The nodes choose the NIXL backend after placement: the application is then the one of that backend."""
    view = load_cluster("p5.48xlarge-x2")
    deployment = load_deployment("pd-spread-p1xtp4-d1xtp4")
    shape, source = resolve_model(deployment.model)
    assert source is not None
    before = prepare_deployment(deployment, view, shape, source, Workload())
    libfabric = over(deployment, "LIBFABRIC")
    after = before.with_transport_of(libfabric)
    assert after.placement is before.placement and after.view is view
    assert after == prepare_deployment(libfabric, view, shape, source, Workload())
    extra = after.app.args["decode_config"]["engine_kwargs"]["kv_transfer_config"]["kv_connector_extra_config"]
    assert extra["backends"] == ["LIBFABRIC"] and after.deployment == libfabric
    assert before.with_transport_of(deployment) == before


def test_an_engine_that_cannot_hold_a_request_is_refused() -> None:
    deployment = load_deployment("collocated-8xtp1").model_copy(
        update={"engine_kwargs": {"kv_cache_memory_bytes": 1000}}
    )
    shape, source = resolve_model(deployment.model)
    with pytest.raises(UsageError, match="cannot hold one request of gpt-oss-120b"):
        prepare_deployment(deployment, load_cluster("p5.48xlarge-x2"), shape, source or "", Workload())
