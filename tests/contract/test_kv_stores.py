"""What is rendered of several KV connectors is what vLLM and Ray Serve LLM take, and the guard finds its own in it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from contract.conftest import quietly

from pdlab.core.deployment import KV_STORES, Deployment, parse_label
from pdlab.deploy.serve_config import HOST_COPY_SPEC, engine_kwargs

FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"


@pytest.fixture(scope="module")
def config() -> Any:
    deployment = Deployment(topology=parse_label("pd-pack-p1xtp1-d1xtp1"), kv_offload_gb=0.1)
    rendered = engine_kwargs(deployment, "prefill", None, cpu=True)["kv_transfer_config"]
    return quietly("vllm.config").KVTransferConfig(**rendered)


def test_the_guards_connector_is_found_in_the_one_of_several(config: Any) -> None:
    factory = quietly(FACTORY).KVConnectorFactory
    own = quietly("pdlab.guard.connector")
    found = factory.get_connector_class(config)
    assert found is own.MultiConnector and issubclass(found, quietly(
        "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector").MultiConnector)  # fmt: skip
    assert factory.supports_hma_config(config) and config.has_connector("NixlConnector")
    classes = found._get_connector_classes_and_configs(SimpleNamespace(kv_transfer_config=config))
    assert classes[0][0] is own.NixlConnector and classes[1][0].__name__ == "OffloadingConnector"
    assert classes[0][1].kv_transfer_config.engine_id == config.engine_id


def test_the_report_of_the_guards_workers_is_found_among_the_others(config: Any) -> None:
    own, worker = quietly("pdlab.guard.connector"), quietly("pdlab.guard.worker")
    multi = quietly("vllm.distributed.kv_transfer.kv_connector.v1.multi_connector")
    report = worker.WorkerReport(failed={"a"})
    several = own.MultiConnector.__new__(own.MultiConnector)
    for parts in ((report, None), (None, report), (object(), report)):
        assert several.report_in(multi.MultiKVConnectorWorkerMetadata(parts)) is report
    assert several.report_in(None) is None
    assert several.report_in(multi.MultiKVConnectorWorkerMetadata((None, object()))) is None
    several._connectors = [object()]
    with pytest.raises(TypeError, match=r"pdlab\.guard\.connector"):
        several.guarded  # noqa: B018


def test_what_the_guard_counts_survives_the_way_between_processes(config: Any) -> None:
    """vLLM rebuilds a part's statistics by its class's name, which its own connector has too."""
    own, metrics = quietly("pdlab.guard.connector"), quietly("pdlab.guard.metrics")
    stats = metrics.GuardStats()
    stats.record({"given_back": 2})
    rebuilt = own.MultiConnector.build_kv_connector_stats(data={"NixlConnector": {"data": stats.data}})
    assert isinstance(rebuilt["NixlConnector"], metrics.GuardStats)
    assert not rebuilt.is_empty() and rebuilt["NixlConnector"].data["pdlab_guard_given_back"] == [2]


def test_the_stores_are_vllms() -> None:
    registered = set(quietly(FACTORY).KVConnectorFactory._registry)
    assert set(KV_STORES) <= registered


def test_ray_takes_the_first_for_the_protocol_of_prefill_and_decode() -> None:
    backends = quietly("ray.llm._internal.serve.engines.vllm.kv_transfer.factory").KVConnectorBackendFactory
    assert backends.get_backend_class("MultiConnector").__name__ == "MultiConnectorBackend"


def test_the_cpu_spec_is_a_spec_of_vllms() -> None:
    own = quietly(HOST_COPY_SPEC)
    assert issubclass(own.HostCopySpec, quietly("vllm.v1.kv_offload.base").OffloadingSpec)
    assert not getattr(own.HostCopyWorker, "__abstractmethods__", None), "every method that vLLM calls is there"
