"""What we lean on to see nodes, to run functions on them, and to start them with the arguments they know."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import subprocess
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from contract.conftest import SERVE, by_value, parameters, printed, printed_without_pdlab, quietly

from pdlab.bench import measure
from pdlab.cluster import local_nodes
from pdlab.cluster.connection import Cluster
from pdlab.core.deployment import Deployment, parse_label
from pdlab.core.errors import ClusterError
from pdlab.core.nodes import NODE_NAME_LABEL
from pdlab.deploy import launch, serve_config, serving_path
from pdlab.deploy.application import APP
from pdlab.placement.place import place
from pdlab.remote.logs import LogTail, count_prewarmed, tail_logs
from pdlab.remote.node import machine_facts, node_facts, quick
from pdlab.remote.weights import local_weights

pytestmark = pytest.mark.usefixtures("ray_llm", "import_warnings_aside")


class TestView:
    """pdlab.cluster.connection.Cluster.view."""

    def test_a_node_that_runs_no_task(self, monkeypatch: pytest.MonkeyPatch) -> None:
        node = {"NodeID": "n1", "NodeManagerAddress": "10.0.0.7", "Resources": {"CPU": 8.0}}
        monkeypatch.setattr(quietly("ray._private.state"), "available_resources_per_node", lambda: {})
        monkeypatch.setattr(Cluster, "alive", lambda _: [node])
        monkeypatch.setattr(Cluster, "call_nodes", lambda *_: {})
        with pytest.raises(ClusterError, match=r"^Ray's node 10\.0\.0\.7 ended, or runs no task within 180 s$"):
            Cluster().view()
        monkeypatch.setattr(
            Cluster, "call_nodes", lambda *_: {"n1": {"host": "h", "nic": {"kind": "efa", "count": 32}}}
        )
        (only_node,) = Cluster().view().nodes
        assert (only_node.host, only_node.nic.kind, only_node.nic.count) == ("h", "efa", 32)

    def test_a_cluster_of_an_operator(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A head without GPUs and name, as every KubeRay cluster has; labels as Ray reports them."""
        alive = [
            {"NodeID": "0a" * 14, "NodeManagerAddress": "10.0.0.1", "Resources": {"node:__internal_head__": 1.0}},
            *(
                {
                    "NodeID": f"0{number}" * 14,
                    "NodeManagerAddress": f"10.0.0.{number}",
                    "Resources": {"CPU": 192.0, "GPU": 8.0, "accelerator_type:H100": 1.0},
                    "Labels": {"ray.io/node-id": f"0{number}" * 14} | labels,
                }
                for number, labels in ((2, {NODE_NAME_LABEL: "node-1"}), (3, {}))
            ),
        ]
        fact = {
            "host": "h",
            "nic": {"kind": "efa", "count": 32},
            "gpus": {"memory_bytes": 42_949_672_960, "link": "pcie"},
        }
        free = {node["NodeID"]: node["Resources"] for node in alive}
        monkeypatch.setattr(quietly("ray._private.state"), "available_resources_per_node", lambda: free)
        monkeypatch.setattr(Cluster, "alive", lambda _: alive)
        monkeypatch.setattr(Cluster, "call_nodes", lambda *_: {node["NodeID"]: fact for node in alive})
        view = Cluster().view()
        deployment = Deployment(topology=parse_label("pd-spread-p1xtp4-d1xtp4"))
        args = serve_config.render(deployment, place(deployment, view), view, None, "m").args
        pins = {
            role: args[f"{role}_config"]["deployment_config"]["placement_group_bundle_label_selector"]
            for role in ("prefill", "decode")
        }
        gpus = {(node.gpu_memory_gb, node.gpu_link) for node in view.engine_nodes}
        assert gpus == {(42.9, "pcie")} and view.nodes[0].gpu_memory_gb is None
        # The pool on the named node by its name, the other one by the id that Ray compares.
        by_name, by_id = {NODE_NAME_LABEL: "node-1"}, {"ray.io/node-id": "03" * 14}
        assert sorted(pins.values(), key=str) == sorted(([by_name] * 4, [by_id] * 4), key=str)

        alive[2]["Labels"][NODE_NAME_LABEL] = "node-1"
        with pytest.raises(
            ClusterError, match=r"^2 of Ray's nodes have the label .*node-1 \(10\.0\.0\.2, 10\.0\.0\.3\)"
        ):
            Cluster().view()
        with pytest.raises(ClusterError):
            Cluster().call_every_node(node_facts)

    def test_what_is_free_on_a_node(self) -> None:
        assert parameters(quietly("ray._private.state").available_resources_per_node) == []


class TestNodesThatDoNotJoin:
    """pdlab.cluster.connection.Cluster.view waits for all local nodes."""

    @pytest.fixture
    def nodes(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> local_nodes.LocalNodes:
        (tmp_path / "node-2.log").write_text("starting\n\nException: The current node timed out\n  during startup.\n")
        monkeypatch.setattr(Cluster, "alive", lambda _: [])
        monkeypatch.setattr(quietly("ray"), "nodes", list)
        return local_nodes.LocalNodes(
            id="0123456789ab", count=2, gcs_port=1, temp_dir=str(tmp_path), pids=(os.getpid(), 2**22 + 1)
        )

    def test_one_that_ended_is_named_at_once_with_its_last_words(
        self, nodes: local_nodes.LocalNodes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(local_nodes, "_belongs", lambda pid, _: pid == os.getpid())
        message = r"^local Ray node 2 of 2 ended at its start: starting / Exception: .* timed out / during startup\.$"
        with pytest.raises(ClusterError, match=message):
            Cluster(nodes).view()

    def test_one_that_hangs_is_named_with_its_last_words(
        self, nodes: local_nodes.LocalNodes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(local_nodes, "_belongs", lambda *_: True)
        monkeypatch.setattr(quietly("pdlab.cluster.connection"), "JOIN_TIMEOUT_S", 0.1)
        with pytest.raises(ClusterError, match=r"^0 of 2 local .* \(node 1: it logged nothing; node 2: starting / Exc"):
            Cluster(nodes).view()

    @pytest.fixture
    def restarted(self, nodes: local_nodes.LocalNodes, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Numbers of the nodes that were started once more; none of them comes back."""
        numbers: list[int] = []
        monkeypatch.setattr(local_nodes, "_belongs", lambda *_: True)

        def restart(up: local_nodes.LocalNodes, number: int) -> local_nodes.LocalNodes:
            numbers.append(number)
            return up

        monkeypatch.setattr(quietly("pdlab.cluster.connection"), "restart", restart)
        return numbers

    @pytest.mark.parametrize("number", [1, 2])
    def test_one_that_ray_counts_as_dead(
        self, number: int, nodes: local_nodes.LocalNodes, restarted: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The head is not started again, and another one once only."""
        dead = {"Alive": False, "Labels": {NODE_NAME_LABEL: f"local-{number}"}, "DeathReasonMessage": "an agent ended"}
        other = {"Alive": True, "Labels": {NODE_NAME_LABEL: f"local-{3 - number}"}}
        monkeypatch.setattr(quietly("ray"), "nodes", lambda: [dead, other, {"Alive": False, "Labels": None}])
        warnings: list[str] = []
        with pytest.raises(ClusterError, match=rf"^local Ray node {number} of 2 was lost: an agent ended$"):
            Cluster(nodes, warn=warnings.append).view()
        assert restarted == ([] if number == 1 else [2])
        assert len(warnings) == len(restarted)

    def test_one_that_came_back_is_not_missed(
        self, nodes: local_nodes.LocalNodes, restarted: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(quietly("pdlab.cluster.connection"), "JOIN_TIMEOUT_S", 0.2)
        labels = {NODE_NAME_LABEL: "local-2"}
        records = [{"Alive": False, "Labels": labels}, {"Alive": True, "Labels": labels}]
        monkeypatch.setattr(quietly("ray"), "nodes", lambda: records)
        with pytest.raises(ClusterError, match=r"^0 of 2 local Ray nodes joined"):
            Cluster(nodes).view()
        assert restarted == []

    def test_one_that_stays_silent_is_started_once_more(
        self, nodes: local_nodes.LocalNodes, restarted: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        module = quietly("pdlab.cluster.connection")
        monkeypatch.setattr(module, "SILENT_S", 0.1)
        warnings: list[str] = []
        with pytest.raises(ClusterError, match=r"node 2 of 2 was lost: it did not join within 0.1 s"):
            Cluster(nodes, warn=warnings.append).view()
        assert restarted == [2] and len(warnings) == 1


class TestNodesWithoutPdlab:
    """Functions that run as Ray tasks take their modules along."""

    def test_they_run_where_pdlab_is_not_installed(self, tmp_path: Path) -> None:
        logs = tmp_path / "logs"
        logs.mkdir()
        text = f":actor_name:ServeReplica:{APP}:Decode:m\nPre-warm handshake done\nValueError: why\n"
        (logs / "worker-1.err").write_text(text)
        calls = [(node_facts, ()), (machine_facts, ()), (tail_logs, (str(logs), APP))]
        calls += [(count_prewarmed, (str(logs), APP)), (quick, ((), None, str(tmp_path)))]
        program = """
import pathlib
from ray import cloudpickle
answers = [function(*args) for function, args in cloudpickle.loads(sys.stdin.buffer.read())]
pathlib.Path("answers").write_bytes(cloudpickle.dumps(answers))
"""
        modules = {function.__module__ for function, _ in calls}  # as Cluster.call_nodes does
        printed_without_pdlab(program, cwd=tmp_path, sent=by_value(calls, "pdlab.remote", *modules))
        answers = quietly("ray.cloudpickle").loads((tmp_path / "answers").read_bytes())
        facts, of_machine, tails, warmed, quick_facts = answers
        assert facts == node_facts() and of_machine == machine_facts()
        assert tails == tail_logs(str(logs), APP) and tails[0].error == "ValueError: why"
        assert isinstance(tails[0], LogTail)
        assert warmed == (1, 0)
        assert quick_facts["weights"] == local_weights(str(tmp_path)) and quick_facts["shm"]["bytes"] > 0


class TestLoopback:
    """pdlab.cluster.loopback: what it changes is still there."""

    def test_every_process_of_the_nodes_is_changed(self, tmp_path: Path) -> None:
        program = """
import importlib, inspect
services = importlib.import_module("ray._private.services")
assert services.resolve_ip_for_localhost("127.0.0.1") == "127.0.0.1"
node = importlib.import_module("ray._private.node")
assert node.Node.start_ray_client_server(None) is None
text = importlib.import_module("ray.serve._private.haproxy_templates").HAPROXY_CONFIG_TEMPLATE
binds = [line.split()[1] for line in text.splitlines() if line.strip().startswith("bind ")]
assert len(binds) == 4, binds
# What is not at loopback is at the host that is served.
assert [bind for bind in binds if not bind.startswith(("127.0.0.1:", "{{"))] == [], binds
replica = importlib.import_module("ray.serve._private.replica")
assert replica.add_port_to_grpc_server.__module__ == "pdlab.cluster.loopback"
assert '"[::]:0"' in inspect.getsource(replica), "the address that is replaced"
agent = importlib.import_module("ray.dashboard.http_server_agent")
assert agent.HttpServerAgent.start.__module__ == "pdlab.cluster.loopback"
dashboard = inspect.getsource(importlib.import_module("ray.dashboard.agent"))
assert "self.http_server.http_port" in dashboard and "self.http_server.cleanup()" in dashboard
rendezvous = importlib.import_module("torch.distributed.rendezvous")
assert rendezvous.TCPStore.__module__ == "pdlab.cluster.loopback"
from datetime import timedelta
store = rendezvous._create_c10d_store("127.0.0.1", 0, 0, 1, timedelta(seconds=10))
store.set("a", "b")
assert store.get("a") == b"b"
try:
    rendezvous.TCPStore(host_name="127.0.0.1", port=store.port, is_master=True)
except importlib.import_module("torch.distributed").DistNetworkError as error:
    assert "EADDRINUSE" in str(error)
else:
    raise AssertionError("two stores on one port")
parallel = importlib.import_module("vllm.config.parallel")
assert 'if "EADDRINUSE" in str(e)' in inspect.getsource(parallel.ParallelConfig.stateless_init_dp_group)
nixl = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.nixl.utils")
assert nixl.make_zmq_socket.__module__ == "pdlab.cluster.loopback"
import os, socket, pathlib
for table in ("tcp", "tcp6"):
    lines = [line.split() for line in pathlib.Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]]
    own = {os.path.realpath(path).rpartition("/")[2] for path in pathlib.Path("/proc/self/fd").iterdir()}
    mine = [line[1] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in own]
    assert all(address.startswith("0100007F") for address in mine), mine
    assert bool(mine) == (table == "tcp")
print("CHANGED")
"""
        env = local_nodes.environment("none", str(tmp_path))
        Path(env["RAY_AUTH_TOKEN_PATH"]).write_text("a" * 64)
        assert printed(program, env=env)[-1] == "CHANGED"


@contextlib.contextmanager
def head_that_answers(status: str | None, calls: list[Any]) -> Iterator[str]:
    """The address of a gRPC server that answers everything with that status, like Ray's head a stranger."""
    grpc = quietly("grpc")

    class Handler(grpc.GenericRpcHandler):  # type: ignore[misc,name-defined]
        def service(self, details: Any) -> Any:
            calls.append(details)

            def behave(_: bytes, context: Any) -> bytes:
                if status:
                    context.abort(getattr(grpc.StatusCode, status), "no")
                return b""

            return grpc.unary_unary_rpc_method_handler(behave)

    server = grpc.server(futures.ThreadPoolExecutor(1), handlers=(Handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


class TestToken:
    """Cluster.requires_token, against servers that answer like Ray's."""

    @pytest.mark.parametrize(
        ("status", "message"),
        [
            ("UNAUTHENTICATED", "requires a token .*RAY_AUTH_MODE=token"),
            ("UNAVAILABLE", "no Ray cluster answers .* RAY_ADDRESS, or X$"),
        ],
    )
    def test_a_head_that_will_not_answer_is_named(
        self, status: str, message: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Somebody else's Ray on this machine: ray.init asks it for many minutes."""
        ray, services = quietly("ray"), quietly("ray._private.services")
        monkeypatch.delenv("RAY_USE_TLS", raising=False)
        monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
        monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("asks for many minutes"))
        calls: list[Any] = []
        with head_that_answers(status, calls) as address:
            monkeypatch.setattr(services, "canonicalize_bootstrap_address", lambda _: address)
            with pytest.raises(ClusterError, match=message) as refused:
                Cluster(otherwise=", or X").__enter__()
        assert len(calls) == 1 and "\n" not in str(refused.value)

    def test_how_ray_finds_the_head_and_its_token(self) -> None:
        assert "get_ray_address_from_environment" in inspect.getsource(
            quietly("ray._private.services").canonicalize_bootstrap_address
        )
        token = quietly("ray._private.authentication.grpc_authentication_client_interceptor")
        assert isinstance(token._get_authentication_metadata_tuple(), tuple)

    @pytest.mark.parametrize(("status", "expected"), [("UNAUTHENTICATED", True), (None, False), ("NOT_FOUND", False)])
    def test_asked_without_a_token(self, status: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        ray = quietly("ray")
        calls: list[Any] = []
        monkeypatch.delenv("RAY_USE_TLS", raising=False)
        with head_that_answers(status, calls) as address:
            monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address=address))
            assert Cluster().requires_token() is expected
        assert [call.method for call in calls] == ["/ray.rpc.InternalKVGcsService/InternalKVGet"]
        assert "authorization" not in dict(calls[0].invocation_metadata)
        with pytest.raises(ClusterError, match="unknown whether Ray requires a token"):
            Cluster().requires_token()
        monkeypatch.setenv("RAY_USE_TLS", "1")
        assert Cluster().requires_token()

    def test_an_open_cluster_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Cluster, "requires_token", lambda _: False)
        with pytest.raises(ClusterError, match=r"requires no token: .* --accept-open-cluster") as refused:
            launch._refuse_open(Cluster())
        assert "\n" not in str(refused.value)
        monkeypatch.setattr(Cluster, "requires_token", lambda _: True)
        launch._refuse_open(Cluster())


class TestArguments:
    def test_vllm_knows_every_cpu_argument(self) -> None:
        engine = quietly("vllm.engine.arg_utils").AsyncEngineArgs
        frontend = quietly("vllm.entrypoints.launchers.cli_args").FrontendArgs
        known = {field.name for kind in (engine, frontend) for field in dataclasses.fields(kind)}
        assert set(serve_config.cpu_engine_kwargs()) <= known

    def test_vllm_knows_every_cpu_variable(self) -> None:
        known = quietly("vllm.envs").environment_variables
        assert {name for name in serve_config.cpu_env() if name.startswith("VLLM_")} <= set(known)

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

    def test_ray_start_says_that_its_node_has_joined_after_the_gcs_knows_it(self) -> None:
        source = inspect.getsource(quietly("ray.scripts.scripts").start.callback)
        other = source[source.index("head=False,") :]
        assert f'"{local_nodes.JOINED}"' in other
        started = inspect.getsource(quietly("ray._private.node").Node.__init__)
        assert started.index("self.start_ray_processes()") < started.index("services.get_node(")

    def test_ray_leaves_a_port_of_the_agent_for_us_to_tell_the_raylet(self) -> None:
        """pdlab.cluster.loopback tells it; twice would be an error, and an unknown flag would end the raylet."""
        services = quietly("ray._private.services")
        assert quietly("ray._private.ray_constants").PROCESS_TYPE_RAYLET == "raylet"
        started = inspect.getsource(services.start_raylet)
        assert (
            "start_ray_process(" in started and "dashboard_agent_listen_port=" not in started.split("command = [")[-1]
        )
        assert parameters(services.start_ray_process)[:2] == ["command", "process_type"]
        help_text = subprocess.run([services.RAYLET_EXECUTABLE, "--help"], capture_output=True, text=True).stdout
        for flag in (
            "dashboard_agent_listen_port",
            "metrics_agent_port",
            "metrics_export_port",
            "runtime_env_agent_port",
        ):
            assert f"-{flag} " in help_text

    def test_ray_and_serve_read_our_variables(self) -> None:
        """Those that Python reads; raylets read the others (RAY_enable_worker_prestart, ...)."""
        texts = [
            Path(inspect.getfile(quietly(module))).read_text(encoding="utf-8")
            for module in ("ray.serve._private.constants", f"{SERVE}.constants")
        ]
        ours = {**local_nodes.environment("id", "/tmp/x"), **serving_path.HAPROXY, **serving_path.DIRECT}
        names = [name for name in ours if name.startswith(("RAY_SERVE_", "RAYLLM_"))]
        assert len(names) >= 7
        assert [name for name in names if not any(name in text for text in texts)] == []


def test_raylets_know_what_they_look_at_less_often() -> None:
    raylet = Path(quietly("ray._private.services").RAYLET_EXECUTABLE).read_bytes()
    names = [*local_nodes.SLOW_POLLING, "RAY_event_stats", "RAY_metrics_report_interval_ms"]
    # The whole name: "event_stats" begins others.
    assert [name for name in names if f"\0{name.removeprefix('RAY_')}\0".encode() not in raylet] == []


def test_engines_export_twice_while_a_sweep_waits_for_what_they_count() -> None:
    name = "RAY_metrics_report_interval_ms"
    assert name in local_nodes.environment("id", "/tmp/x"), "of all other processes"
    assert int(serve_config.cpu_env()[name]) <= 1000 * measure.LOCAL_EXPORT_S / 2


def test_agents_report_the_cpu_of_processes_within_a_short_level() -> None:
    """The gate on what stands before the engines takes it from there."""
    name = "REPORTER_UPDATE_INTERVAL_MS"
    every_ms = vars(quietly("ray.dashboard.modules.reporter.reporter_consts"))[name]
    assert int(local_nodes.environment("id", "/tmp/x").get(name, every_ms)) <= 5000


def test_segments_of_cpu_ranks_have_the_names_that_a_stop_looks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    communicator = quietly("vllm.distributed.device_communicators.cpu_communicator")
    network = quietly("vllm.utils.network_utils")
    ranks = SimpleNamespace(unique_name="tp:0", ranks=[0, 1])
    file, port = network.get_file_store_init_method(), network.get_distributed_init_method("127.0.0.1", 29500)
    for ident in (file.rpartition("/")[2], port.rpartition(":")[2]):  # vllm/v1/worker/cpu_worker.py
        monkeypatch.setenv("VLLM_DIST_IDENT", ident)
        name = communicator._CPUSHMDistributed.make_group_name(ranks)
        assert local_nodes._SHARED.fullmatch(f"/dev/shm/{name}_1"), name  # csrc/cpu/shm.cpp adds the rank


def test_sockets_of_a_node_get_their_names_where_loopback_makes_them_its_own() -> None:
    source = inspect.getsource(quietly("ray._private.node").Node._prepare_socket_file)
    assert "self._make_inc_temp(" in source and "directory_name=self._sockets_dir" in source
    whole = inspect.getsource(quietly("ray._private.node").Node)
    assert 'self._sockets_dir = os.path.join(self._session_dir, "sockets")' in whole
