"""Metrics and logs of Ray and vLLM that we read: their names, and which errors only repeat another one."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from contract.conftest import quietly

from pdlab.bench import watch
from pdlab.deploy import engine_metrics
from pdlab.deploy.application import APP
from pdlab.guard.receives import ACTIONS
from pdlab.remote.logs import first_error

pytestmark = pytest.mark.usefixtures("ray_llm", "import_warnings_aside")


class TestMetrics:
    """pdlab.deploy.engine_metrics.parse_snapshot."""

    def test_vllm_counts_what_we_read(self) -> None:
        module = quietly("vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats")
        names = set(re.findall(r'name="vllm:(nixl_\w+)"', inspect.getsource(module)))
        of_guard = {f"guard_{action}" for action in ACTIONS}
        fields = engine_metrics._NIXL_FIELDS.keys() - of_guard
        read = {re.sub(r"_(sum|count)$", "", field) for field in fields}
        assert len(read) == len(fields) > 0 and read <= names
        assert of_guard & engine_metrics._NIXL_FIELDS.keys() == {
            *("guard_receives", "guard_recomputed", "guard_deadlines", "guard_errors", "guard_failed_reads"),
            "guard_handshakes_renewed",
        }

    def test_rays_names_of_vllms_metrics(self) -> None:
        metric = quietly("vllm.v1.metrics.ray_wrappers").RayPrometheusMetric
        name = metric._get_sanitized_opentelemetry_name("vllm:nixl_num_failed_transfers")
        page = f'ray_{name}{{engine="0"}} 2.0\n'
        assert engine_metrics.parse_snapshot([page], (), {}).nixl.failed_transfers == 2

    def test_ray_exports_the_connectors_metrics(self) -> None:
        wrappers = quietly("vllm.v1.metrics.ray_wrappers")
        assert wrappers.RayPrometheusStatLogger._kv_connector_cls is wrappers.RayKVConnectorProm


class TestFrontCpu:
    """pdlab.bench.watch.front_cpu."""

    def test_rays_reporter_names_processes_by_their_title(self) -> None:
        path = Path(inspect.getfile(quietly("ray.dashboard"))).parent / "modules" / "reporter" / "reporter_agent.py"
        source = path.read_text(encoding="utf-8")
        assert '"component_cpu_percentage": Gauge(' in source and '"Component": component_name' in source
        assert "proc_name = cmdline[0]" in source, "the title that a worker gives itself"

    def test_titles(self) -> None:
        router = quietly("ray.llm._internal.serve.core.ingress.router").LLMRouter
        for name, deployment in (("ingress", "OpenAiIngress"), ("router", router.__name__)):
            made = quietly("ray.serve._private.common").DeploymentID(deployment, APP)
            assert watch.FRONT[name].match(f"ray::{made.to_replica_actor_class_name()}")
        assert "(ProxyActor)" in repr(quietly("ray.serve._private.proxy").ProxyActor)
        assert watch.FRONT["proxy"].match("ray::ProxyActor")


class TestErrors:
    """pdlab.remote.logs: which errors only repeat another one."""

    def test_vllms_echoes(self) -> None:
        dead = quietly("vllm.v1.engine.exceptions").EngineDeadError()
        assert first_error(f"vllm.v1.engine.exceptions.EngineDeadError: {dead}\n") is None
        sources = {
            "vllm.v1.engine.utils": "Engine core initialization failed. ",
            "vllm.v1.engine.core": "Executor failed.",
            "vllm.v1.executor.multiproc_executor": "background process. See stack trace for root cause.",
        }
        for module, text in sources.items():
            assert text in Path(inspect.getfile(quietly(module))).read_text(encoding="utf-8")
            assert first_error(f"RuntimeError: {text}\n") is None

    def test_deaths(self) -> None:
        texts = {"vllm.v1.executor.multiproc_executor": "died unexpectedly (exit code: %s)",
                 "vllm.v1.engine.utils": "Failed core proc(s): "}  # fmt: skip
        for module, text in texts.items():
            assert text in Path(inspect.getfile(quietly(module))).read_text(encoding="utf-8")

    def test_rays_names(self) -> None:
        exceptions = quietly("ray.exceptions")
        assert {"RayTaskError", "ActorDiedError", "RayActorError"} <= set(vars(exceptions))
        assert "DeploymentUnavailableError" in vars(quietly("ray.serve.exceptions"))

    def test_a_replicas_log_says_whose_it_is(self) -> None:
        """Ray's worker writes the actor's name at the top of its log, and Serve names its actors ServeReplica:..."""
        log = Path(inspect.getfile(quietly("ray._private.ray_constants"))).read_text(encoding="utf-8")
        assert 'LOG_PREFIX_ACTOR_NAME = ":actor_name:"' in log
        replica = quietly("ray.serve._private.common").DeploymentID("Decode:m", APP)
        assert replica.to_replica_actor_class_name() == f"ServeReplica:{APP}:Decode:m"
