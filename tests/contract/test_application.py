"""What pdlab.deploy.application leans on inside Ray Serve and Ray Serve LLM, name by name, and what it makes of it."""

from __future__ import annotations

import inspect
import os
import re
import runpy
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from contract.conftest import SERVE, parameters, quietly
from contract.test_builders import builder_of, deployments_of, rendered

from pdlab.cluster import local_nodes
from pdlab.cluster.connection import Cluster
from pdlab.core.deployment import Deployment, parse_label
from pdlab.core.errors import ClusterError, DeployError
from pdlab.core.nodes import NODE_ID_LABEL, ClusterNode, ClusterView
from pdlab.deploy import application, canary, serve_config, serving_path
from pdlab.deploy.application import APP, Application, AppState, ReplicaState, deployment_names, rank_order

pytestmark = pytest.mark.usefixtures("ray_llm", "import_warnings_aside")


class TestWarmingAndPrefillAlone:
    """pdlab.deploy.application.Application.warm_pairs and ask_alone."""

    def test_every_replica_can_be_asked(self) -> None:
        handle = quietly("ray.serve.handle").DeploymentHandle
        assert parameters(handle.broadcast) == ["self", "method_name", "args", "kwargs"]
        assert parameters(handle.running_replicas_populated) == ["self"]
        assert "timeout_s" in parameters(quietly("ray.serve.handle").DeploymentBroadcastResponse.results)

    def test_the_prewarm_tells_its_log_what_it_did(self, pd_server: ModuleType) -> None:
        source = inspect.getsource(pd_server.PDDecodeServer._maybe_prewarm)
        assert "Pre-warm handshake done" in source and "returned empty kv_params" in source

    @pytest.mark.parametrize(
        ("reached", "wrote", "trouble"),
        [
            (2, (6, 0), None),
            (2, (0, 0), None),  # logs that cannot be read prove nothing
            (1, (3, 0), "only 1 of 2 decode replicas took the request"),
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
        monkeypatch.setattr(Application, "state", lambda _: AppState(status="RUNNING", replicas=replicas))
        monkeypatch.setattr(Application, "_read_logs", lambda *_: next(logs))
        named = iter([False, True])  # Ray Serve tells a new handle of the replicas after a while
        handle = SimpleNamespace(running_replicas_populated=lambda: next(named))
        handle.options = lambda: handle
        handle.broadcast = lambda method, *args: SimpleNamespace(results=lambda: [method] * reached)
        monkeypatch.setattr(quietly("ray.serve"), "get_deployment_handle", lambda *_: handle)
        if trouble is None:
            assert Application(Cluster()).warm_pairs("m") == 6
            return
        with pytest.raises(DeployError, match=trouble):
            Application(Cluster()).warm_pairs("m")

    @pytest.mark.parametrize(
        ("answer", "trouble"),
        [
            ([], "answers with an error when it is called directly: an empty stream"),
            ([SimpleNamespace(error="no")], "answers with an error when it is called directly: .*no"),
            (RuntimeError("Traceback\n  ...\nValueError: why"), "cannot be reached directly: ValueError: why$"),
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
            Application(Cluster()).ask_alone("prefill", "m", canary.requests("m"))

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
        assert canary.read_answer(answer.model_dump(mode="json")) == canary.CanaryAnswer(
            tokens=(7, 9), tops=({7: -0.1, 8: -0.2}, {9: -0.1, 8: -5.0})
        )


class TestDeployments:
    """pdlab.deploy.application: names, submission, state."""

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
        made = {deployment.name for deployment in deployments_of(builder_of(case.app)(case.app.args))}
        names = deployment_names(deployment, model_id or "tiny-gptoss").values()
        assert made == {*names, "OpenAiIngress"}

    def test_submission(self) -> None:
        serve = quietly("ray.serve")
        assert {"target", "name", "route_prefix", "logging_config"} <= set(parameters(serve.RunTarget))
        assert "enable_access_log" in quietly("ray.serve.schema").LoggingConfig.model_fields
        wanted = {"targets", "wait_for_ingress_deployment_creation", "wait_for_applications_running"}
        assert wanted <= set(parameters(serve.run_many))
        assert {"proxy_location", "http_options"} <= set(parameters(serve.start))
        assert {"name", "_blocking"} <= set(parameters(serve.delete))
        assert parameters(serve.get_deployment_handle)[:2] == ["deployment_name", "app_name"]

    @pytest.mark.parametrize("local", [True, False], ids=["local", "cluster"])
    def test_replicas_of_a_cluster_alone_write_an_access_log(
        self, local: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        targets: list[dict[str, Any]] = []
        monkeypatch.setattr(quietly("ray.serve"), "RunTarget", lambda **target: targets.append(target))
        monkeypatch.setattr(quietly("ray.serve"), "run_many", lambda *_, **__: None)
        nodes = local_nodes.LocalNodes(id="x", count=1, gcs_port=1, temp_dir=str(tmp_path), pids=()) if local else None
        Application(Cluster(nodes)).submit(serve_config.ServeApp(import_path="builtins:dict", args={}))
        assert targets[0]["logging_config"] == ({"enable_access_log": False} if local else None)

    def test_an_application_that_serve_refuses(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: Any, **__: Any) -> None:
            raise RuntimeError("Traceback:\n  ...\nValueError: why\n")

        monkeypatch.setattr(quietly("ray.serve"), "RunTarget", lambda **_: None)
        monkeypatch.setattr(quietly("ray.serve"), "run_many", refuse)
        with pytest.raises(DeployError, match=r"^Ray Serve refuses the application: ValueError: why$"):
            Application(Cluster()).submit(serve_config.ServeApp(import_path="builtins:dict", args={}))

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
        app = Application(Cluster(nodes))
        assert [tail.error for tail in app.replica_logs()] == ["ValueError: old"]
        app.submit(serve_config.ServeApp(import_path="builtins:dict", args={}))
        (nodes.logs / "worker-2.err").write_text(text.format("new"))
        os.utime(nodes.logs / "worker-2.err")
        assert [tail.error for tail in app.replica_logs()] == ["ValueError: new"]

    def test_the_controller_is_found_by_name(self) -> None:
        constants = quietly("ray.serve._private.constants")
        assert (constants.SERVE_CONTROLLER_NAME, constants.SERVE_NAMESPACE) == ("SERVE_CONTROLLER_ACTOR", "serve")
        assert hasattr(quietly("ray.serve._private.controller").ServeController, "get_serve_instance_details")

    def test_placement_groups_are_named_after_replicas_and_gangs(self) -> None:
        """Application.bundles finds a replica's bundles, and a gang's, by their placement group's name."""
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
        monkeypatch.setattr(Application, "state", lambda _: state)
        view = ClusterView(
            nodes=tuple(ClusterNode(id=f"host-{i}", cpus=8, labels={NODE_ID_LABEL: f"n{i}"}) for i in (1, 2))
        )
        deployment = Deployment(topology=parse_label("pd-spread-p2xtp2-d1xtp2dp2"))
        assert Application(Cluster()).bundles(deployment, view, "m") == {
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
        monkeypatch.setattr(Application, "_details", lambda _: {"applications": {}})
        monkeypatch.setattr(application, "POLL_S", 0.0)
        monkeypatch.setattr(application, "end_boards", lambda: None)  # it would look for actors, on a Ray of its own
        assert not Application(Cluster()).delete(), "what is left of it is waited for; the application was not there"
        assert next(tables, None) is None
        monkeypatch.setattr(application, "STOP_TIMEOUT_S", 0.0)
        monkeypatch.setattr(quietly("ray.util"), "placement_group_table", lambda: {"1": gang})
        with pytest.raises(ClusterError, match="placement groups of the application are still up"):
            Application(Cluster()).delete()

    def test_state(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Application.state reads what the controller says, as Serve's own schema writes it."""
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
        monkeypatch.setattr(Application, "_details", lambda _: plain)
        state = Application(Cluster()).state()
        assert (state.status, state.deployments) == ("DEPLOYING", {"Decode:m": "UPDATING"})
        (only_replica,) = state.replicas
        assert (only_replica.deployment, only_replica.replica, only_replica.state) == ("Decode:m", "abc", "RUNNING")
        assert (only_replica.node, only_replica.pid) == ("n1", 7)
        assert state.messages == (deployment["message"],)
        monkeypatch.setattr(Application, "_details", lambda _: {**plain, "applications": {}})
        assert Application(Cluster()).state().status == "NOT_STARTED"

    def test_states_by_name(self) -> None:
        common = quietly("ray.serve._private.common")
        schema = quietly("ray.serve.schema")
        assert {"RUNNING", "DEPLOY_FAILED", "UNHEALTHY"} <= {status.value for status in schema.ApplicationStatus}
        assert "RUNNING" in {state.value for state in common.ReplicaState}

    def test_the_first_failure_shows_in_the_deployments_message(self) -> None:
        state = quietly("ray.serve._private.deployment_state")
        assert "A replica failed to start with exception. Retrying" in inspect.getsource(state)


def group(name: str, *nodes: str, state: str = "CREATED") -> dict[str, Any]:
    """One entry of Ray's placement group table."""
    return {"name": name, "state": state, "bundles_to_node_id": dict(enumerate(nodes))}


class TestServe:
    """Application.start_serve: the controller's environment is that of whoever started it."""

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
        monkeypatch.setattr(Application, "_details", lambda _: world.details)
        return world

    def test_it_is_started_once(self, serve: SimpleNamespace) -> None:
        for _ in range(2):
            Application(Cluster()).start_serve("127.0.0.1", 8000)
        assert serve.calls == ["start"]

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (
                "HAProxy crashed during startup: [NOTICE] (28810) : haproxy version is 2.8.25\n"
                "[ALERT] (28810) : Binding [/tmp/x/haproxy.cfg:45] for frontend prometheus: cannot bind socket "
                "(Address already in use) for [0.0.0.0:9101]\n"
                "[ALERT] (28810) : Binding [/tmp/x/haproxy.cfg:95] for proxy stats: cannot bind socket "
                "(Address already in use) for [0.0.0.0:8404]\n"
                "[ALERT] (28810) : [haproxy.main()] Some protocols failed to start their listeners! Exiting.\n",
                "HAProxy did not start: port 9101 and 8404 of the head node is taken",
            ),
            ("Traceback\nRuntimeError: no room", "proxy did not start: RuntimeError: no room"),
        ],
    )
    def test_a_proxy_that_does_not_start(
        self, serve: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, text: str, message: str
    ) -> None:
        def start(**_: Any) -> None:
            raise quietly("ray.exceptions").RayTaskError("ready", text, RuntimeError("x"))

        monkeypatch.setattr(quietly("ray.serve"), "start", start)
        with pytest.raises(ClusterError, match=message):
            Application(Cluster()).start_serve("127.0.0.1", 8000)

    def test_haproxys_ports_have_these_names(self) -> None:
        """Where pdlab.cluster.local_nodes sets them; the templates bind all interfaces."""
        constants = quietly("ray.serve._private.constants")
        source = inspect.getsource(constants)
        for name, port in (("METRICS", constants.RAY_SERVE_HAPROXY_METRICS_PORT), ("STATS", 8404)):
            assert f'"RAY_SERVE_HAPROXY_{name}_PORT"' in source and str(port) in source

    def test_the_ports_behind_it_are_rays_defaults(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in [name for name in os.environ if name.startswith("RAY_SERVE_")]:
            monkeypatch.delenv(name)
        constants = runpy.run_path(quietly("ray.serve._private.constants").__file__)
        own = (constants["RAY_SERVE_HAPROXY_METRICS_PORT"], constants["RAY_SERVE_HAPROXY_STATS_PORT"])
        ends = [constants[f"RAY_SERVE_DIRECT_INGRESS_{end}_HTTP_PORT"] for end in ("MIN", "MAX")]
        assert own == serving_path.HAPROXY_PORTS
        assert ends == [serving_path.REPLICA_PORTS[0], serving_path.REPLICA_PORTS[-1]]

    def test_it_is_started_again_with_another_environment(self, serve: SimpleNamespace) -> None:
        direct = {"RAY_SERVE_ENABLE_HA_PROXY": "1"}
        for env in (direct, direct, {}, {}, direct):
            Application(Cluster(env=env)).start_serve("127.0.0.1", 8000)
        assert serve.calls == ["start", "shutdown", "start", "shutdown", "start"]

    def test_it_is_started_again_for_another_address(self, serve: SimpleNamespace) -> None:
        Application(Cluster()).start_serve("127.0.0.1", 8000)
        Application(Cluster()).start_serve("127.0.0.1", 8001)
        assert serve.calls == ["start", "shutdown", "start"]

    def test_a_controller_that_somebody_else_started_is_not_taken_for_ours(self, serve: SimpleNamespace) -> None:
        Application(Cluster(env={"A": "1"})).start_serve("127.0.0.1", 8000)
        serve.controller = "0a"
        Application(Cluster()).start_serve("127.0.0.1", 8000)
        assert serve.calls == ["start"]

    def test_one_application_has_the_route(self, serve: SimpleNamespace) -> None:
        """Others with a route of their own may be there."""
        Application(Cluster()).start_serve("127.0.0.1", 8000)
        serve.details["applications"] = {APP: {"route_prefix": "/"}, "theirs": {"route_prefix": "/theirs"}}
        Application(Cluster()).start_serve("127.0.0.1", 8000)
        serve.details["applications"]["theirs"]["route_prefix"] = "/"
        with pytest.raises(ClusterError, match="application theirs has the route /"):
            Application(Cluster()).start_serve("127.0.0.1", 8000)
        assert serve.calls == ["start"], "nothing of theirs is touched"

    def test_applications_of_others_stay(self, serve: SimpleNamespace) -> None:
        Application(Cluster(env={"A": "1"})).start_serve("127.0.0.1", 8000)
        serve.details["applications"] = {APP: {}, "theirs": {}}
        Application(Cluster(env={"A": "1"})).start_serve("127.0.0.1", 8000)
        with pytest.raises(ClusterError, match="runs with theirs, and was started with other serving options"):
            Application(Cluster()).start_serve("127.0.0.1", 8000)
        with pytest.raises(
            ClusterError, match=r"on 127\.0\.0\.1:8000 with theirs; use --host 127\.0\.0\.1 --port 8000"
        ):
            Application(Cluster(env={"A": "1"})).start_serve("127.0.0.1", 8001)
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

        controller = SimpleNamespace(get_serve_instance_details=SimpleNamespace(remote=lambda: None))
        monkeypatch.setattr(ray, "get_actor", lambda *_, **__: controller)
        monkeypatch.setattr(ray, "get", late)
        with pytest.raises(ClusterError, match="does not answer within 30 s"):
            Application(Cluster()).state()
