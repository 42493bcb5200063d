"""What we lean on inside vLLM's engine, its workers and NIXL, name by name. Nothing is started but one NIXL agent."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import os
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from contract.conftest import ROOT, SERVE, parameters, printed, quietly

from pdlab.deploy import serve_config

pytestmark = pytest.mark.usefixtures("ray_llm", "import_warnings_aside")


def test_data_parallel_ranks_of_experts_cannot_run_on_cpus() -> None:
    """pdlab.core.vllm_limits.check_experts_on_cpu refuses them; one day vLLM may run them."""
    base = quietly("vllm.distributed.device_communicators.base_device_communicator").DeviceCommunicatorBase
    cpu = quietly("vllm.distributed.device_communicators.cpu_communicator").CpuCommunicator
    assert cpu.all_gatherv is base.all_gatherv and "raise NotImplementedError" in inspect.getsource(base.all_gatherv)
    manager = quietly("vllm.distributed.device_communicators.all2all").AgRsAll2AllManager
    assert "all_gatherv" in inspect.getsource(manager.dispatch_router_logits)


class TestReplicaCallback:
    """pdlab.deploy.cpu_engine.replica.LocalCallback."""

    def test_hooks(self) -> None:
        base = quietly("ray.llm._internal.common.callbacks.base")
        assert inspect.iscoroutinefunction(base.CallbackBase.on_before_node_init)
        fields = {field.name: field for field in dataclasses.fields(base.CallbackCtx)}
        assert fields["run_init_node"].default is True

    def test_it_runs_before_what_it_changes(self) -> None:
        start = inspect.getsource(quietly(f"{SERVE}.engines.vllm.vllm_engine").VLLMEngine.start)
        steps = ['"on_before_node_init"', "run_init_node", "_prepare_engine_config", "_start_async_llm_engine"]
        positions = [start.index(step) for step in steps]
        assert positions == sorted(positions)

    def test_names_that_are_looked_up_late(
        self, llm_server: ModuleType, pd_server: ModuleType, vllm_models: ModuleType
    ) -> None:
        """Replacing a module's name has an effect only where functions read it from that module when they run."""
        assert "push_telemetry_report_for_all_models" in llm_server.LLMServer._start_engine.__code__.co_names
        assert parameters(llm_server.push_telemetry_report_for_all_models)[0] == "all_models"
        assert "push_telemetry_report_for_all_models(all_models=" in inspect.getsource(
            llm_server.LLMServer._start_engine
        ), "the stand-in takes keywords only"
        assert "_PREWARM_RETRY_INTERVAL_S" in pd_server.PDDecodeServer._maybe_prewarm.__code__.co_names
        assert pd_server._PREWARM_RETRY_INTERVAL_S > 0
        kwargs = vllm_models.VLLMEngineConfig.get_initialization_kwargs
        assert "EXECUTOR_BACKEND_MP" in kwargs.__code__.co_names
        assert vllm_models.EXECUTOR_BACKEND_MP == "mp"

    @pytest.mark.parametrize(
        ("engine_kwargs", "executor"),
        [({}, "uni"), ({"tensor_parallel_size": 1}, "uni"), ({"tensor_parallel_size": 2}, "mp"),
         ({"data_parallel_size": 2}, "mp"), ({"pipeline_parallel_size": 2}, "mp")],
    )  # fmt: skip
    def test_what_it_does(
        self,
        engine_kwargs: dict[str, int],
        executor: str,
        llm_server: ModuleType,
        pd_server: ModuleType,
        vllm_models: ModuleType,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        for module, name in (
            (llm_server, "push_telemetry_report_for_all_models"),
            (pd_server, "_PREWARM_RETRY_INTERVAL_S"),
            (vllm_models, "EXECUTOR_BACKEND_MP"),
        ):
            monkeypatch.setattr(module, name, getattr(module, name))  # put back after the test
        callback = quietly("pdlab.deploy.cpu_engine.replica").LocalCallback(
            llm_config=SimpleNamespace(engine_kwargs=engine_kwargs)
        )
        asyncio.run(callback.run_callback("on_before_node_init"))
        assert callback.ctx.run_init_node is False
        assert llm_server.push_telemetry_report_for_all_models(all_models=[]) is None
        assert pd_server._PREWARM_RETRY_INTERVAL_S < 1
        on_cpu = quietly("ray.serve.llm").LLMConfig(
            model_loading_config={"model_id": "m", "model_source": "/nowhere"},
            accelerator_config={"kind": "cpu"},
            engine_kwargs=engine_kwargs,
        )
        made = vllm_models.VLLMEngineConfig.from_llm_config(on_cpu).get_initialization_kwargs()
        assert made["distributed_executor_backend"] == executor

    def test_vllm_leaves_the_executor_alone(self) -> None:
        """The CPU platform turns "uni" into "mp" unless this variable, which the engines get, says otherwise."""
        source = inspect.getsource(quietly("vllm.platforms.cpu").CpuPlatform.check_and_update_config)
        assert re.search(r'VLLM_ENABLE_V1_MULTIPROCESSING", "1"\) == "1"\s+and .*== "uni"', source)
        assert serve_config.cpu_env()["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


class TestWorker:
    """pdlab.deploy.cpu_engine.worker, inside vLLM's CPU workers."""

    def test_vllm_imports_the_extension(self) -> None:
        path = serve_config.cpu_engine_kwargs()["worker_extension_cls"]
        assert path == "pdlab.deploy.cpu_engine.worker.WorkerExtension"
        source = inspect.getsource(quietly("vllm.v1.worker.worker_base"))
        assert "worker_extension_cls" in source and "resolve_obj_by_qualname" in source

    def test_amx(self) -> None:
        cpu = quietly("torch.cpu")
        assert isinstance(cpu._is_amx_tile_supported(), bool) and callable(cpu._init_amx)

    def test_pinning(self) -> None:
        """The connector asks the platform for cores, and pins nothing where there are none."""
        platform = quietly("vllm.platforms.cpu").CpuPlatform
        assert callable(platform.discover_numa_topology)
        source = Path(inspect.getfile(quietly("vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker")))
        text = source.read_text(encoding="utf-8")
        assert "current_platform.discover_numa_topology()" in text
        assert re.search(r"if rsv_cores_for_kv:\s+if not hasattr\(os, .sched_setaffinity", text)

    def test_nixls_progress_thread(self) -> None:
        config = quietly("nixl._api").nixlBind.nixlAgentConfig()
        assert config.pthrDelay == 0
        source = inspect.getsource(quietly("nixl._api").nixl_agent.__init__)
        assert "nixlBind.nixlAgentConfig()" in source, "looked up when an agent is made"
        assert ".pthrDelay =" in source

    def test_an_agent_is_calm_with_the_worker_module(self) -> None:
        """CPU time of an idle agent, before and after the import, in one process: a ratio stands a busy machine."""
        program = """
import gc, time
import nixl._api as api

def share(name):
    agent = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
    time.sleep(0.2)
    cpu, wall = time.process_time(), time.monotonic()
    time.sleep(0.8)
    used = (time.process_time() - cpu) / (time.monotonic() - wall)
    del agent
    gc.collect()
    return used

spinning = share("spinning")
import pdlab.deploy.cpu_engine.worker
print("SHARES", spinning, share("calm"))
"""
        env = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "ERROR"}
        (line,) = [line for line in printed(program, env=env) if line.startswith("SHARES")]
        spinning, calm = (float(word) for word in line.split()[1:])
        assert calm < spinning / 3, "NIXL no longer spins by itself, or the worker module no longer calms it"


COST = """
from types import SimpleNamespace
import vllm.v1.metrics.ray_wrappers as wrappers
from pdlab.deploy.serving.vllm_costs import record_at_less_cost
record_at_less_cost(wrappers)
recorded = []
for kind, method, own in (("Gauge", "set", {}), ("Counter", "inc", {}), ("Histogram", "observe", {"buckets": [1.0]})):
    metric = getattr(wrappers, f"Ray{kind}Wrapper")(f"vllm:{kind}", "", ["model_name"], **own).labels("m")
    metric.metric._metric = SimpleNamespace(record=lambda value, tags: recorded.append((value, tuple(tags.items()))))
    checks = []
    metric.metric._validate_tags = checks.append
    for value in (2, 3):
        getattr(metric, method)(value)
    assert len(checks) == 1, kind
assert recorded == [(value, (("model_name", "m"), ("ReplicaId", ""))) for _ in range(3) for value in (2, 3)], recorded
print("SAME")
"""


def test_what_is_recorded_at_less_cost_is_what_ray_records() -> None:
    assert printed(COST)[-1:] == ["SAME"]
