"""KV connectors beside NIXL: of the engines that prefill, behind NIXL, with the guard still in front of it."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from pdlab.core.catalog import load_cluster, local_cluster, resolve_model
from pdlab.core.deployment import Deployment, Fluid, Pool, launch_words, parse_label, unguarded
from pdlab.core.errors import UsageError
from pdlab.core.nodes import ClusterView
from pdlab.core.settings import parse
from pdlab.deploy.options import LaunchSettings, deployment_from
from pdlab.deploy.pool_agreement import check_pools
from pdlab.deploy.serve_config import KV_GUARD_CONNECTOR, KV_GUARD_SCHEDULER, engine_kwargs, render
from pdlab.placement.place import place

LMCACHE = {"kv_connector": "LMCacheConnectorV1", "kv_connector_extra_config": {"chunk_size": 256}}


def transfer(deployment: Deployment, role: Any, *, cpu: bool = False) -> dict[str, Any] | None:
    shape = resolve_model(deployment.model).shape
    config: dict[str, Any] | None = engine_kwargs(deployment, role, shape, cpu=cpu).get("kv_transfer_config")
    return config


def pd(**fields: Any) -> Deployment:
    return Deployment(topology=parse_label("pd-spread-p1xtp4-d1xtp4"), **fields)


def test_nixl_is_first_and_decode_has_nothing_else() -> None:
    deployment = pd(kv_offload_gb=100, kv_connectors=(LMCACHE,))
    several, plain = transfer(deployment, "prefill"), transfer(deployment, "decode")
    assert several and plain and plain == transfer(pd(), "decode")
    assert (several["kv_connector"], several["kv_role"]) == ("MultiConnector", "kv_both")
    assert several["kv_connector_module_path"] == KV_GUARD_CONNECTOR
    nixl, offload, lmcache = several["kv_connector_extra_config"]["connectors"]
    assert nixl == transfer(pd(), "prefill")
    assert offload["kv_connector_extra_config"] == {"cpu_bytes_to_use": 100_000_000_000}
    assert lmcache == {"kv_role": "kv_both", **LMCACHE}
    assert not any("engine_id" in each for each in (nixl, offload, lmcache))
    check_pools(deployment, None, cpu=False)
    assert deployment.fingerprint != pd().fingerprint


def test_without_the_guard_vllms_own_are_taken() -> None:
    topology = unguarded(parse_label("pd-spread-p1xtp4-d1xtp4"))
    several = transfer(Deployment(topology=topology, kv_offload_gb=1), "prefill")
    assert several and "kv_connector_module_path" not in several
    assert all("pdlab" not in str(each) for each in several["kv_connector_extra_config"]["connectors"])


@pytest.mark.parametrize("fields", [{"kv_offload_gb": 2}, {"kv_connectors": (LMCACHE,)},
                                    {"kv_offload_gb": 2, "kv_connectors": (LMCACHE,)}])  # fmt: skip
def test_collocated_engines_have_them_without_nixl(fields: dict[str, Any]) -> None:
    deployment = Deployment(topology=parse_label("collocated-1xtp4"), **fields)
    config = transfer(deployment, "collocated")
    expected = "MultiConnector" if len(fields) == 2 else "OffloadingConnector" if "kv_offload_gb" in fields else None
    assert config and config["kv_connector"] == (expected or "LMCacheConnectorV1") and config["kv_role"] == "kv_both"
    assert "Nixl" not in str(config)
    assert "scheduler_cls" not in engine_kwargs(deployment, "collocated", None, cpu=False)


@pytest.mark.parametrize(("view", "own"), [(local_cluster(2), True), (load_cluster("p5.48xlarge-x2"), False)])
def test_cpu_engines_copy_by_themselves(view: ClusterView, own: bool) -> None:
    deployment = Deployment(topology=parse_label("pd-pack-p1xtp1-d1xtp1"), model="tiny-gptoss", kv_offload_gb=0.1)
    app = render(deployment, place(deployment, view), view, resolve_model("tiny-gptoss").shape, "/tiny")
    kwargs = app.args["prefill_config"]["engine_kwargs"]
    extra = kwargs["kv_transfer_config"]["kv_connector_extra_config"]["connectors"][1]["kv_connector_extra_config"]
    assert ("spec_module_path" in extra) is own and kwargs["scheduler_cls"] == KV_GUARD_SCHEDULER


def test_flags_and_file_say_the_same() -> None:
    words = shlex.split(
        "--pd-spread --cluster p5.48xlarge-x2 --kv-offload-gb 64 --kv-connector HF3FSKVConnector --kv-connector "
        "'{kv_connector: LMCacheConnectorV1, kv_connector_extra_config: {chunk_size: 256}}'"
    )
    deployment = deployment_from(parse(LaunchSettings, words))
    assert deployment.kv_offload_gb == 64
    assert deployment.kv_connectors == ({"kv_connector": "HF3FSKVConnector"}, LMCACHE)
    again = deployment_from(parse(LaunchSettings, launch_words(deployment)))
    assert again == deployment


@pytest.mark.parametrize("extra", [None, [], "64", 5])
def test_settings_of_a_connector_are_a_mapping(extra: Any) -> None:
    """vLLM takes no null either."""
    with pytest.raises(ValueError, match=r"OffloadingConnector: kv_connector_extra_config is .* no mapping"):
        pd(kv_connectors=({"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra},))


def test_memory_that_no_connector_registers_may_be_mapped_anew() -> None:
    env: dict[str, str | None] = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    check_pools(Deployment(topology=parse_label("collocated-1xtp4"), env=env), None, cpu=False)
    fluid = Deployment(topology=Fluid(pool=Pool(replicas=2)), env=env)
    with pytest.raises(UsageError):
        check_pools(fluid, None, cpu=False)
    allowed = fluid.model_copy(update={"engine_kwargs": {"enable_cumem_allocator": True}})
    check_pools(allowed, None, cpu=False)
