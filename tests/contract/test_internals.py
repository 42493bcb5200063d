"""What we lean on inside Ray, vLLM and NIXL beyond their public interfaces, name by name.

An update that changes one of these fails here, with the name of what it changed, and not in
somebody's launch. Nothing is started but one NIXL agent.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from contract.conftest import quietly
from contract.test_builders import deployments_of, rendered

from pdlab import canary, cluster, local_nodes, running, serve_args
from pdlab.cluster import APP, AppState, Cluster, ReplicaState, deployment_names, rank_order
from pdlab.environment import node_facts
from pdlab.errors import ClusterError, DeployError
from pdlab.nodes import NODE_NAME_LABEL, ClusterNode, ClusterView
from pdlab.replica_logs import LogTail, count_prewarmed, first_error, tail_logs
from pdlab.serve_args import NODE_ID_LABEL
from pdlab.spec import Deployment, parse_label

ROOT = Path(__file__).resolve().parents[2]
SERVE = "ray.llm._internal.serve"

pytestmark = pytest.mark.usefixtures("ray_llm")


@pytest.fixture(autouse=True)
def imports_warn_about_themselves() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture
def pd_server() -> ModuleType:
    return quietly(f"{SERVE}.serving_patterns.prefill_decode.pd_server")


@pytest.fixture
def llm_server() -> ModuleType:
    return quietly(f"{SERVE}.core.server.llm_server")


@pytest.fixture
def vllm_models() -> ModuleType:
    return quietly(f"{SERVE}.engines.vllm.vllm_models")


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


class TestWarmingAndPrefillAlone:
    """pdlab.cluster.Cluster.warm_pairs and ask_prefill."""

    def test_broadcast(self) -> None:
        broadcast = quietly(f"{SERVE}.utils.broadcast").broadcast
        assert parameters(broadcast)[:2] == ["handle", "method_name"]

    def test_the_prewarm_tells_its_log_what_it_did(self, pd_server: ModuleType) -> None:
        source = inspect.getsource(pd_server.PDDecodeServer._maybe_prewarm)
        assert "Pre-warm handshake done" in source and "returned empty kv_params" in source

    @pytest.mark.parametrize(
        ("reached", "wrote", "trouble"),
        [
            (2, (6, 0), None),
            (2, (0, 0), None),  # logs that cannot be read prove nothing
            (1, (3, 0), "only 1 of 2 decode replicas could be asked"),
            (2, (5, 0), "only 5 of 6 prefill x decode pairs"),
            (2, (0, 6), "6 times a prefill replica gave no KV parameters"),
        ],
    )
    def test_warmed_pairs(
        self, reached: int, wrote: tuple[int, int], trouble: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        names = ["Prefill:m"] * 3 + ["Decode:m"] * 2 + ["OpenAiIngress"]
        replicas = tuple(ReplicaState(deployment=name, replica="r", state="RUNNING") for name in names)
        logs = iter([[(4, 1), (2, 0)], [(4 + wrote[0], 1), (2, wrote[1])]])
        monkeypatch.setattr(Cluster, "state", lambda _: AppState(status="RUNNING", replicas=replicas))
        monkeypatch.setattr(Cluster, "_ask_logs", lambda *_: next(logs))
        monkeypatch.setattr(quietly("ray.serve"), "get_deployment_handle", lambda *_: None)
        monkeypatch.setattr(quietly(f"{SERVE}.utils.broadcast"), "broadcast", lambda *_: [None] * reached)
        if trouble is None:
            assert Cluster().warm_pairs("m") == 6
            return
        with pytest.raises(DeployError, match=trouble):
            Cluster().warm_pairs("m")

    @pytest.mark.parametrize(
        ("answer", "trouble"),
        [
            ([], "answers with an error: an empty stream"),
            ([SimpleNamespace(error="no")], "answers with an error: .*no"),
            (RuntimeError("Traceback\n  ...\nValueError: why"), "cannot be asked: ValueError: why$"),
        ],
        ids=["empty", "error", "raises"],
    )
    def test_a_prefill_engine_that_does_not_answer(
        self, answer: Any, trouble: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def remote(*_: Any) -> Any:
            if isinstance(answer, Exception):
                raise answer
            return iter(answer)

        handle = SimpleNamespace(completions=SimpleNamespace(remote=remote))
        handle.options = lambda **_: handle
        monkeypatch.setattr(quietly("ray.serve"), "get_deployment_handle", lambda *_: handle)
        with pytest.raises(DeployError, match=trouble):
            Cluster().ask_prefill("m", canary.requests("m"))

    def test_prewarm_can_be_run_again(self, pd_server: ModuleType) -> None:
        prewarm = pd_server.PDDecodeServer._maybe_prewarm
        assert inspect.iscoroutinefunction(prewarm) and parameters(prewarm) == ["self"]
        source = inspect.getsource(prewarm)
        assert "_prewarm_prefill_decode" in source and '"prewarm_prefill"' in source
        assert not re.search(r"self\._\w*prewarm\w*(done|ed)\b", source), "it remembers that it ran"

    def test_both_servers_have_it(self, pd_server: ModuleType) -> None:
        for kind in (pd_server.PDDecodeServer, pd_server.DPPDDecodeServer):
            assert hasattr(kind, "_maybe_prewarm")
        for kind in (pd_server.PDPrefillServer, pd_server.DPPDPrefillServer):
            assert hasattr(kind, "prewarm_prefill")
            assert parameters(kind.completions)[:3] == ["self", "request", "raw_request_info"]

    def test_the_canarys_requests_are_known(self) -> None:
        models = quietly(f"{SERVE}.core.configs.openai_api_models")
        for request in canary.requests("m"):
            assert set(request) <= set(models.CompletionRequest.model_fields)
            models.CompletionRequest(**request)

    def test_the_canary_reads_vllms_answer(self) -> None:
        models = quietly(f"{SERVE}.core.configs.openai_api_models")
        name = quietly("vllm.entrypoints.generate.base.serving").format_token_id_placeholder
        tops = [{name(7): -0.1, name(8): -0.2}, {name(9): -0.1, name(8): -5.0}]
        choice = {"index": 0, "text": "x", "token_ids": [7, 9], "logprobs": {"top_logprobs": tops}}
        usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
        answer = models.CompletionResponse(model="m", choices=[choice], usage=usage)
        assert canary.read_answer(answer.model_dump(mode="json")) == canary.Answer(tokens=(7, 9), near=((7, 8), (9,)))


class TestReplicaCallback:
    """pdlab.replica.LocalCallback."""

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
        callback = quietly("pdlab.replica").LocalCallback(llm_config=SimpleNamespace(engine_kwargs=engine_kwargs))
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
        assert serve_args.cpu_env()["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


class TestWorker:
    """pdlab.worker, inside vLLM's CPU workers."""

    def test_vllm_imports_the_extension(self) -> None:
        path = serve_args.cpu_engine_kwargs()["worker_extension_cls"]
        assert path == "pdlab.worker.WorkerExtension"
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
import pdlab.worker
print("SHARES", spinning, share("calm"))
"""
        env = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "ERROR"}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program], env=env, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("SHARES")]
        spinning, calm = (float(word) for word in line.split()[1:])
        assert calm < 0.5
        assert calm < spinning / 3, "NIXL no longer spins by itself, or the worker module no longer calms it"


class TestDeployments:
    """pdlab.cluster: names, submission, state."""

    @pytest.mark.parametrize(
        ("label", "model_id"),
        [
            ("collocated-2xtp1", "openai/gpt-oss-2.5b"),
            ("pd-spread-p1xtp1-d1xtp1", "openai/gpt-oss-2.5b"),
            ("pd-pack-p1xtp1-d1xdp2", None),
            ("pd-spread-p1xdp2-d1xtp1", None),
            ("collocated-1xdp2", None),
        ],
    )
    @pytest.mark.usefixtures("no_cluster")
    def test_names(self, label: str, model_id: str | None) -> None:
        deployment = Deployment(topology=parse_label(label), model="tiny-gptoss", model_id=model_id)
        case = rendered(deployment, "local-2")
        builder = getattr(quietly("ray.serve.llm"), case.app.import_path.partition(":")[2])
        made = {deployment.name for deployment in deployments_of(builder(case.app.args))}
        names = deployment_names(deployment, model_id or "tiny-gptoss").values()
        assert made == {*names, "OpenAiIngress"}

    def test_submission(self) -> None:
        serve = quietly("ray.serve")
        assert {"target", "name", "route_prefix"} <= set(parameters(serve.RunTarget))
        wanted = {"targets", "wait_for_ingress_deployment_creation", "wait_for_applications_running"}
        assert wanted <= set(parameters(serve.run_many))
        assert {"proxy_location", "http_options"} <= set(parameters(serve.start))
        assert {"name", "_blocking"} <= set(parameters(serve.delete))
        assert parameters(serve.get_deployment_handle)[:2] == ["deployment_name", "app_name"]

    def test_an_application_that_serve_refuses(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: Any, **__: Any) -> None:
            raise RuntimeError("Traceback:\n  ...\nValueError: why\n")

        monkeypatch.setattr(quietly("ray.serve"), "RunTarget", lambda **_: None)
        monkeypatch.setattr(quietly("ray.serve"), "run_many", refuse)
        with pytest.raises(DeployError, match=r"^Ray Serve refuses the application: ValueError: why$"):
            Cluster().submit(serve_args.ServeApp(import_path="builtins:dict", args={}))

    def test_logs_of_an_earlier_application_on_the_same_nodes_are_not_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(quietly("ray.serve"), "RunTarget", lambda **_: None)
        monkeypatch.setattr(quietly("ray.serve"), "run_many", lambda *_, **__: None)
        nodes = local_nodes.LocalNodes(id="x", count=1, gcs_port=1, temp_dir=str(tmp_path), pids=())
        nodes.logs.mkdir(parents=True)
        text = f":actor_name:ServeReplica:{APP}:Decode:m\nValueError: {{}}\n"
        old = nodes.logs / "worker-1.err"
        old.write_text(text.format("old"))
        os.utime(old, (old.stat().st_mtime - 5, old.stat().st_mtime - 5))
        connection = Cluster(nodes)
        assert [tail.error for tail in connection.replica_logs()] == ["ValueError: old"]
        connection.submit(serve_args.ServeApp(import_path="builtins:dict", args={}))
        (nodes.logs / "worker-2.err").write_text(text.format("new"))
        os.utime(nodes.logs / "worker-2.err")
        assert [tail.error for tail in connection.replica_logs()] == ["ValueError: new"]

    def test_a_node_that_runs_no_task(self, monkeypatch: pytest.MonkeyPatch) -> None:
        node = {"NodeID": "n1", "NodeManagerAddress": "10.0.0.7", "Resources": {"CPU": 8.0}}
        monkeypatch.setattr(quietly("ray._private.state"), "available_resources_per_node", lambda: {})
        monkeypatch.setattr(Cluster, "alive", lambda _: [node])
        monkeypatch.setattr(Cluster, "_ask_nodes", lambda *_: {})
        with pytest.raises(ClusterError, match=r"^Ray's node 10\.0\.0\.7 runs no task within 60 s$"):
            Cluster().view()
        monkeypatch.setattr(
            Cluster, "_ask_nodes", lambda *_: {"n1": {"host": "h", "nic": {"kind": "efa", "count": 32}}}
        )
        (seen,) = Cluster().view().nodes
        assert (seen.host, seen.nic.kind, seen.nic.count) == ("h", "efa", 32)

    def test_the_controller_is_found_by_name(self) -> None:
        constants = quietly("ray.serve._private.constants")
        assert (constants.SERVE_CONTROLLER_NAME, constants.SERVE_NAMESPACE) == ("SERVE_CONTROLLER_ACTOR", "serve")
        assert hasattr(quietly("ray.serve._private.controller").ServeController, "get_serve_instance_details")

    def test_placement_groups_are_named_after_replicas_and_gangs(self) -> None:
        """Cluster.bundles finds a replica's bundles, and a gang's, by their placement group's name."""
        common = quietly("ray.serve._private.common")
        replica = common.ReplicaID("abc123", common.DeploymentID("Decode:m", APP))
        assert replica.to_full_id_str() == f"SERVE_REPLICA::{APP}#Decode:m#abc123"
        assert common.GANG_PG_NAME_PREFIX == "SERVE_GANG::"
        source = inspect.getsource(quietly("ray.serve._private.deployment_scheduler"))
        assert re.search(
            r'f"\{GANG_PG_NAME_PREFIX\}\{deployment_id.app_name\}"\s+f"_\{deployment_id.name\}"\s+f"_\{gang_index\}_',
            source,
        )

    @pytest.mark.parametrize(
        "nodes", [["b", "b", "a", "a"], ["b", "a", "b", "a"], ["c", "a", "b", "c"], ["a"]], ids="".join
    )
    def test_bundles_are_taken_node_by_node(self, nodes: list[str]) -> None:
        by_index = dict(enumerate(nodes))
        ray_order = quietly(f"{SERVE}.utils.pg_utils")._sort_bundle_indices_by_node(by_index, nodes[0])
        assert rank_order(by_index) == [nodes[index] for index in ray_order]

    @pytest.mark.parametrize("gangs", [True, False])
    def test_bundles(self, gangs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        prefill, decode = (("Prefill:m", "p1"), ("Prefill:m", "p0")), (("Decode:m", "d0"), ("Decode:m", "d1"))
        state = AppState(
            status="RUNNING",
            replicas=tuple(
                ReplicaState(deployment=name, replica=replica, state="RUNNING", node="n2")
                for name, replica in (*prefill, *decode)
            ),
        )
        table = {
            "1": group(f"SERVE_REPLICA::{APP}#Prefill:m#p1", "n1", "n1"),
            "2": group(f"SERVE_REPLICA::{APP}#Prefill:m#p0", "n2", "n1"),
            "3": group(f"SERVE_REPLICA::{APP}#Decode:m#d1", "n9", state="REMOVED"),
            "4": group("SERVE_REPLICA::another#Decode:m#d0", "n9"),
        }
        if gangs:
            table["5"] = group(f"SERVE_GANG::{APP}_Decode:m_0_12ab34cd", "n2", "n1", "n2", "n1")
            table["6"] = group("SERVE_GANG::another_Decode:m_0_12ab34cd", "n9")
        monkeypatch.setattr(quietly("ray.util"), "placement_group_table", lambda: table)
        monkeypatch.setattr(Cluster, "state", lambda _: state)
        view = ClusterView(
            nodes=tuple(ClusterNode(id=f"host-{i}", cpus=8, labels={NODE_ID_LABEL: f"n{i}"}) for i in (1, 2))
        )
        deployment = Deployment(topology=parse_label("pd-spread-p2xtp2-d1xtp2dp2"))
        assert Cluster().bundles(deployment, view, "m") == {
            "prefill": [["host-2", "host-1"], ["host-1", "host-1"]],
            "decode": [["host-2", "host-2", "host-1", "host-1"]] if gangs else [["host-2"], ["host-2"]],
        }

    def test_deleting_waits_for_placement_groups(self, monkeypatch: pytest.MonkeyPatch) -> None:
        gang, own = (
            group(f"SERVE_GANG::{APP}_DPServer:m_0_1", "n1"),
            group(f"SERVE_REPLICA::{APP}#OpenAiIngress#1", "n1"),
        )
        others = [group("SERVE_REPLICA::another#m#1", "n1"), group(f"SERVE_GANG::{APP}_2_DPServer:m_0_1", "n1")]
        tables = iter([[gang, own, *others], [gang, *others], others])
        monkeypatch.setattr(quietly("ray.util"), "placement_group_table", lambda: dict(enumerate(next(tables))))
        monkeypatch.setattr(quietly("ray.serve"), "delete", lambda *_, **__: None)
        monkeypatch.setattr(Cluster, "_details", lambda _: {"applications": {}})
        monkeypatch.setattr(cluster, "POLL_S", 0.0)
        Cluster().delete()
        assert next(tables, None) is None
        monkeypatch.setattr(cluster, "STOP_TIMEOUT_S", 0.0)
        monkeypatch.setattr(quietly("ray.util"), "placement_group_table", lambda: {"1": gang})
        with pytest.raises(ClusterError, match="placement groups of the application are still up"):
            Cluster().delete()

    def test_state(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Cluster.state reads what the controller says, as Serve's own schema writes it."""
        schema = quietly("ray.serve.schema")
        replica = {"replica_id": "abc", "state": "RUNNING", "node_id": "n1", "pid": 7, "start_time_s": 1.0}
        deployment = {
            "name": "Decode:m",
            "status": "UPDATING",
            "status_trigger": "CONFIG_UPDATE_STARTED",
            "message": "A replica failed to start with exception. Retrying 2 more time(s). Error:\nboom",
            "deployment_config": {"name": "Decode:m"},
            "target_num_replicas": 1,
            "required_resources": {},
            "replicas": [replica],
        }
        app = {
            "name": APP,
            "route_prefix": "/",
            "docs_path": None,
            "status": "DEPLOYING",
            "message": "",
            "last_deployed_time_s": 1.0,
            "deployed_app_config": None,
            "source": "imperative",
            "deployments": {"Decode:m": deployment},
            "external_scaler_enabled": False,
        }
        http = {"host": "127.0.0.1", "port": 8000}
        details = schema.ServeInstanceDetails(
            applications={APP: app}, http_options=http, proxies={}, proxy_location=None
        )
        plain = details._get_user_facing_json_serializable_dict(exclude_unset=True)
        assert (plain["http_options"]["host"], plain["http_options"]["port"]) == ("127.0.0.1", 8000)
        monkeypatch.setattr(Cluster, "_details", lambda _: plain)
        state = Cluster().state()
        assert (state.status, state.deployments) == ("DEPLOYING", {"Decode:m": "UPDATING"})
        (found,) = state.replicas
        assert (found.deployment, found.replica, found.state) == ("Decode:m", "abc", "RUNNING")
        assert (found.node, found.pid) == ("n1", 7)
        assert state.messages == (deployment["message"],)
        monkeypatch.setattr(Cluster, "_details", lambda _: {**plain, "applications": {}})
        assert Cluster().state().status == "NOT_STARTED"

    def test_states_by_name(self) -> None:
        common = quietly("ray.serve._private.common")
        schema = quietly("ray.serve.schema")
        assert {"RUNNING", "DEPLOY_FAILED", "UNHEALTHY"} <= {status.value for status in schema.ApplicationStatus}
        assert "RUNNING" in {state.value for state in common.ReplicaState}

    def test_the_first_failure_shows_in_the_deployments_message(self) -> None:
        state = quietly("ray.serve._private.deployment_state")
        assert "A replica failed to start with exception. Retrying" in inspect.getsource(state)

    def test_what_is_free_on_a_node(self) -> None:
        assert parameters(quietly("ray._private.state").available_resources_per_node) == []


class TestServe:
    """Cluster.start_serve: the controller's environment is that of whoever started it."""

    @pytest.fixture
    def serve(self, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
        """A Ray Serve that is there when it was started, and Ray's key-value store."""
        world = SimpleNamespace(details=None, controller="", calls=[], store={})
        serve, kv = quietly("ray.serve"), quietly("ray.experimental.internal_kv")

        def start(*, proxy_location: str, http_options: dict[str, Any]) -> None:
            world.calls.append("start")
            world.controller += "f0"
            world.details = {"http_options": http_options, "applications": {}}

        def actor(name: str, namespace: str) -> Any:
            return SimpleNamespace(_actor_id=bytes.fromhex(world.controller))

        monkeypatch.setattr(serve, "start", start)
        monkeypatch.setattr(serve, "shutdown", lambda: world.calls.append("shutdown"))
        monkeypatch.setattr(quietly("ray"), "get_actor", actor)
        monkeypatch.setattr(kv, "_internal_kv_put", lambda key, value: world.store.update({key: value.encode()}))
        monkeypatch.setattr(kv, "_internal_kv_get", lambda key: world.store.get(key))
        monkeypatch.setattr(Cluster, "_details", lambda _: world.details)
        return world

    def test_it_is_started_once(self, serve: SimpleNamespace) -> None:
        for _ in range(2):
            Cluster().start_serve("127.0.0.1", 8000)
        assert serve.calls == ["start"]

    def test_it_is_started_again_with_another_environment(self, serve: SimpleNamespace) -> None:
        direct = {"RAY_SERVE_ENABLE_HA_PROXY": "1"}
        for env in (direct, direct, {}, {}, direct):
            Cluster(env=env).start_serve("127.0.0.1", 8000)
        assert serve.calls == ["start", "shutdown", "start", "shutdown", "start"]

    def test_it_is_started_again_for_another_address(self, serve: SimpleNamespace) -> None:
        Cluster().start_serve("127.0.0.1", 8000)
        Cluster().start_serve("127.0.0.1", 8001)
        assert serve.calls == ["start", "shutdown", "start"]

    def test_a_controller_that_somebody_else_started_is_not_taken_for_ours(self, serve: SimpleNamespace) -> None:
        Cluster(env={"A": "1"}).start_serve("127.0.0.1", 8000)
        serve.controller = "0a"
        Cluster().start_serve("127.0.0.1", 8000)
        assert serve.calls == ["start"]

    def test_applications_of_others_stay(self, serve: SimpleNamespace) -> None:
        Cluster(env={"A": "1"}).start_serve("127.0.0.1", 8000)
        serve.details["applications"] = {APP: {}, "theirs": {}}
        Cluster(env={"A": "1"}).start_serve("127.0.0.1", 8000)
        with pytest.raises(ClusterError, match="runs with theirs, and was started with other serving options"):
            Cluster().start_serve("127.0.0.1", 8000)
        with pytest.raises(
            ClusterError, match=r"on 127\.0\.0\.1:8000 with theirs; use --host 127\.0\.0\.1 --port 8000"
        ):
            Cluster(env={"A": "1"}).start_serve("127.0.0.1", 8001)
        assert serve.calls == ["start"]

    def test_names(self) -> None:
        kv = quietly("ray.experimental.internal_kv")
        assert parameters(kv._internal_kv_get)[0] == "key" and parameters(kv._internal_kv_put)[:2] == ["key", "value"]
        assert hasattr(quietly("ray.actor").ActorHandle, "_actor_id") or "_actor_id" in inspect.getsource(
            quietly("ray.actor").ActorHandle
        )

    def test_a_controller_that_does_not_answer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ray = quietly("ray")

        def late(*_: Any, timeout: float) -> None:
            raise ray.exceptions.GetTimeoutError("late")

        asked = SimpleNamespace(get_serve_instance_details=SimpleNamespace(remote=lambda: None))
        monkeypatch.setattr(ray, "get_actor", lambda *_, **__: asked)
        monkeypatch.setattr(ray, "get", late)
        with pytest.raises(ClusterError, match="does not answer within 30 s"):
            Cluster().state()


class TestNodesWithoutPdlab:
    """Functions that run as Ray tasks take their modules along."""

    def test_they_run_where_pdlab_is_not_installed(self, tmp_path: Path) -> None:
        ray = quietly("ray")
        logs = tmp_path / "logs"
        logs.mkdir()
        text = f":actor_name:ServeReplica:{APP}:Decode:m\nPre-warm handshake done\nValueError: why\n"
        (logs / "worker-1.err").write_text(text)
        for function in (node_facts, tail_logs, count_prewarmed):
            ray.cloudpickle.register_pickle_by_value(sys.modules[function.__module__])
        calls = [(node_facts, ()), (tail_logs, (str(logs), APP)), (count_prewarmed, (str(logs), APP))]
        (tmp_path / "calls").write_bytes(ray.cloudpickle.dumps(calls))
        program = """
import importlib.util, pathlib
from ray import cloudpickle
assert importlib.util.find_spec("pdlab") is None
calls = cloudpickle.loads(pathlib.Path("calls").read_bytes())
answers = [function(*args) for function, args in calls]
pathlib.Path("answers").write_bytes(cloudpickle.dumps(answers))
"""
        env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        command = [sys.executable, "-W", "ignore", "-c", program]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        facts, tails, warmed = ray.cloudpickle.loads((tmp_path / "answers").read_bytes())
        assert facts == node_facts()
        assert tails == tail_logs(str(logs), APP) and tails[0].error == "ValueError: why"
        assert isinstance(tails[0], LogTail)
        assert warmed == (1, 0)


class TestMetrics:
    """pdlab.running.parse_counters."""

    def test_vllm_counts_what_we_read(self) -> None:
        module = quietly("vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats")
        names = set(re.findall(r'name="vllm:nixl_(\w+)"', inspect.getsource(module)))
        read = {re.sub(r"_(sum|count)$", "", field) for field in running._FIELDS}
        assert len(read) == len(running._FIELDS) and read <= names

    def test_rays_names_of_vllms_metrics(self) -> None:
        metric = quietly("vllm.v1.metrics.ray_wrappers").RayPrometheusMetric
        name = metric._get_sanitized_opentelemetry_name("vllm:nixl_num_failed_transfers")
        page = f'ray_{name}{{engine="0"}} 2.0\n'
        assert running.parse_counters([page]).failed_transfers == 2

    def test_ray_exports_the_connectors_metrics(self) -> None:
        wrappers = quietly("vllm.v1.metrics.ray_wrappers")
        assert wrappers.RayPrometheusStatLogger._kv_connector_cls is wrappers.RayKVConnectorProm


class TestArguments:
    def test_vllm_knows_every_cpu_argument(self) -> None:
        engine = quietly("vllm.engine.arg_utils").AsyncEngineArgs
        frontend = quietly("vllm.entrypoints.launchers.cli_args").FrontendArgs
        known = {field.name for kind in (engine, frontend) for field in dataclasses.fields(kind)}
        assert set(serve_args.cpu_engine_kwargs()) <= known

    def test_vllm_knows_every_cpu_variable(self) -> None:
        known = quietly("vllm.envs").environment_variables
        assert {name for name in serve_args.cpu_env() if name.startswith("VLLM_")} <= set(known)

    def test_ray_start_knows_every_flag(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        commands: list[list[str]] = []

        class Started:
            pid = 2**22 + 1  # of no process

            def __init__(self, command: list[str], **_: Any) -> None:
                commands.append(command)

            def poll(self) -> int:
                return 0

        monkeypatch.setenv("PDLAB_CACHE_DIR", str(tmp_path))
        monkeypatch.setattr(local_nodes.subprocess, "Popen", Started)
        monkeypatch.setattr(local_nodes, "_wait_for", lambda *_: None)
        local_nodes.stop(local_nodes.start(2))

        known = {word for option in quietly("ray.scripts.scripts").start.params for word in option.opts}
        assert len(commands) == 2
        for command in commands:
            assert command[1] == "start"
            assert {word.partition("=")[0] for word in command[2:]} <= known
        labels = [word for word in commands[1] if word.startswith("--labels=")]
        parse = quietly("ray._private.label_utils").parse_node_labels_string
        assert parse(labels[0].removeprefix("--labels=")) == {NODE_NAME_LABEL: "local-2"}

    def test_ray_and_serve_read_our_variables(self) -> None:
        """Those that Python reads; raylets read the others (RAY_enable_worker_prestart, ...)."""
        texts = [
            Path(inspect.getfile(quietly(module))).read_text(encoding="utf-8")
            for module in ("ray.serve._private.constants", f"{SERVE}.constants")
        ]
        ours = {**local_nodes.environment("id", "/tmp/x"), **serve_args.serving_env(direct_streaming())}
        names = [name for name in ours if name.startswith(("RAY_SERVE_", "RAYLLM_"))]
        assert len(names) >= 7
        assert [name for name in names if not any(name in text for text in texts)] == []


def group(name: str, *nodes: str, state: str = "CREATED") -> dict[str, Any]:
    """One entry of Ray's placement group table."""
    return {"name": name, "state": state, "bundles_to_node_id": dict(enumerate(nodes))}


def direct_streaming() -> Deployment:
    deployment = Deployment(topology=parse_label("collocated-1xtp1"))
    return deployment.model_copy(update={"serving": deployment.serving.model_copy(update={"direct_streaming": True})})


class TestErrors:
    """pdlab.replica_logs: which errors only repeat another one."""

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
