"""What pdlab.cluster.fast_start relies on in Ray: `ray start` needs none of the other commands, a worker's process gets
from it the arguments and the environment that Ray would give it; the router then imports neither torch nor vLLM nor
pandas, and an agent's metrics page shows what Ray's own recorder would show; in how HAProxy is started and chooses the
routers that it asks; and in the interval of Ray Serve's control loop."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from contract.conftest import printed, quietly

from pdlab.cluster import connection, fast_start, ray_names
from pdlab.cluster.local_nodes import hold_port
from pdlab.cluster.loopback import LISTEN

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
from pdlab.cluster import fast_start
fast_start.install()
import ray.serve, ray.serve._private.controller, ray.serve._private.haproxy
import ray.llm._internal.serve.core.ingress.router
print("LOADED", [name for name in ("pandas", "torch", "vllm") if sys.modules.get(name)])
from ray.llm._internal.common.utils import download_utils
print("THEN", download_utils.torch.hub.__name__, "torch" in sys.modules)
"""


def test_controller_proxy_and_router_import_none_of_it() -> None:
    assert printed(PROGRAM)[-2:] == ["LOADED []", "THEN torch.hub True"]


COMMAND = """
import sys
sys.orig_argv = [sys.executable, "/x/bin/ray", "start", "--head"]
from pdlab.cluster import fast_start
fast_start.install()
from ray.scripts import scripts
print("LOADED", [name for name in ("ray.serve", "ray.util.state", "fastapi") if sys.modules.get(name)])
print("COMMANDS", *(name for name in ("start", "job", "serve", "list") if name in scripts.cli.commands))
"""


def test_ray_start_imports_no_other_command() -> None:
    assert printed(COMMAND)[-2:] == ["LOADED []", "COMMANDS start"]


WORKER = """
import json, os, sys
print(json.dumps([sys.argv[1:], {name: os.environ.get(name) for name in ("FIRST", "SECOND", "THIRD", "HOME")},
                  sys.executable, "ray" in sys.modules]))
"""
ENVIRONMENT = {"FIRST": "a b '\"$", "SECOND": "${FIRST}/${NOT_THERE}/x", "THIRD": ""}


@pytest.mark.parametrize(
    ("context", "short"),
    [
        ({"command_prefix": [], "env_vars": ENVIRONMENT, "py_executable": sys.executable, "java_jars": []}, True),
        ({"env_vars": {}, "override_worker_entrypoint": None}, True),
        ({"env_vars": {"FIRST": "1"}, "command_prefix": ["FIRST=2", "&&", "export", "FIRST", "&&"]}, False),
        ({"env_vars": {"FIRST": "1"}, "py_executable": f"nice -n 0 {sys.executable}"}, False),
    ],
    ids=["environment", "nothing", "a command before it", "another command"],
)
def test_a_worker_begins_as_ray_would_have_it_begin(context: dict[str, object], short: bool, tmp_path: Path) -> None:
    worker = tmp_path / "default_worker.py"
    worker.write_text(WORKER, encoding="utf-8")
    setup = quietly(ray_names.SETUP_WORKER)
    command = [
        sys.executable, "-Wignore", inspect.getfile(setup), str(worker), "--node-ip-address=1", "--name=it's $HOME",
        f"--serialized-runtime-env-context={json.dumps(context)}", "--language=PYTHON", "--startup-token=3",
    ]  # fmt: skip
    answers, imports = [], []
    for site in ("", str(Path(connection.__file__).parent / "site")):
        paths = os.pathsep.join(filter(None, [site, str(ROOT)]))
        env = {"PATH": os.environ["PATH"], "HOME": "/h", "PYTHONPATH": paths, "PYTHONPROFILEIMPORTTIME": "1"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        answers.append(json.loads(done.stdout))
        imports.append("| ray._raylet" in " ".join(done.stderr.split()))
    assert answers[0] == answers[1] and answers[0][0][-1] == "--startup-token=3"
    assert imports == [True, not short]


def test_nothing_else_can_be_asked_of_a_workers_environment() -> None:
    """Another field of it would be one that `fast_start` knows nothing of."""
    context = quietly("ray._private.runtime_env.context").RuntimeEnvContext
    fields = {"command_prefix", "env_vars", "py_executable", "override_worker_entrypoint", "java_jars"}
    assert set(vars(context())) == fields


SIDE_BY_SIDE = """
import importlib, json, os, sys
from pdlab.cluster import connection, fast_start
os.environ.pop(connection.WRITTEN[0], None)  # a test that ran before in this process may have set it
environment = dict(os.environ)
fast_start.leave_out([fast_start.UNUSED_MODULE])
before = set(sys.modules)
connection._import_all(connection.SHARED)
shared = set(sys.modules)
for name in connection.AHEAD if sys.argv[1] == "ahead" else ("ray", "ray.serve"):
    importlib.import_module(name)
new = {name for name in set(sys.modules) - shared if "site-packages" in str(getattr(sys.modules[name], "__file__", ""))}
changed = [name for name, value in os.environ.items() if environment.get(name) != value]
print(json.dumps([sorted(new), sorted({"ray", "vllm"} & (shared | set(sys.modules))), changed]))
"""


def test_what_is_imported_ahead_shares_no_package_with_what_is_imported_beside_it() -> None:
    """Two threads that import one package at once may see it half made."""
    (ahead, theirs, changed), (serve, *_) = (json.loads(printed(SIDE_BY_SIDE, each)[-1]) for each in ("ahead", "serve"))
    assert theirs == [], "Ray and vLLM read the environment of a driver, which is not there yet"
    assert changed == [connection.WRITTEN[0]], "nodes that start meanwhile would inherit another one, or not"
    assert len(ahead) > 1000 and len(serve) > 100
    assert set(ahead) & set(serve) == set()


# Two engines of one node, and one with other buckets, which Ray leaves out.
RECORD = """
import sys
if "short" in sys.argv:
    from pdlab.cluster import fast_start
    fast_start.install()
import opentelemetry.sdk.metrics
from prometheus_client import REGISTRY, generate_latest
from opentelemetry.sdk.metrics._internal.instrument import Histogram
from ray._private.telemetry.open_telemetry_metric_recorder import OpenTelemetryMetricRecorder
calls = []
record = Histogram.record
Histogram.record = lambda self, *args, **kwargs: (calls.append(args), record(self, *args, **kwargs))[1]
recorder = OpenTelemetryMetricRecorder()
recorder.register_histogram_metric("itl", "between tokens", [0.001, 0.01, 0.1])
for _ in range(2):
    recorder.record_histogram_aggregated_batch("itl", [
        {"tags": {"ReplicaId": "a", "WorkerId": "w"}, "bucket_counts": [3, 0, 1000, 1]},
        {"tags": {"ReplicaId": "b", "WorkerId": "w"}, "bucket_counts": [0, 0, 0, 2]},
        {"tags": {"ReplicaId": "c", "WorkerId": "w"}, "bucket_counts": [5, 5]},
    ])
recorder.record_histogram_aggregated_batch("nobody registered it", [{"tags": {}, "bucket_counts": [1]}])
print("CALLS", len(calls))
print(*(line for line in generate_latest(REGISTRY).decode().splitlines() if "itl" in line), sep="\\n")
"""


def test_an_agent_records_a_bucket_at_once_and_shows_the_same() -> None:
    pages = []
    for argument, calls in (("stock", 2012), ("short", 8)):
        first, *page = printed(RECORD, argument)
        assert first == f"CALLS {calls}", "the way to the histogram is another one than Ray's was"
        pages.append(page)
    stock, short = pages
    assert len(stock) > 10 and [_rounded(line) for line in short] == [_rounded(line) for line in stock]


ROUTERS = """
from types import SimpleNamespace
from pdlab.cluster import fast_start
fast_start.install()
from ray.serve._private import controller, haproxy
nodes = SimpleNamespace(
    deployment_state_manager=SimpleNamespace(get_active_node_ids=lambda: {"head", "other"}),
    cluster_node_info_cache=SimpleNamespace(get_draining_nodes=lambda: []),
    _controller_node_id="head",
)
controller.ServeController._update_proxy_nodes(nodes)
print("NODES", *sorted(nodes._proxy_nodes))
servers = [SimpleNamespace(host=host, port=1, name=host, replica_id=host) for host in ("10.0.0.1", "10.0.0.2")]
backend = SimpleNamespace(name="b", servers=servers, ingress_request_router_servers=servers)
chosen, _ = haproxy._routers_and_targets_by_backend([backend], "10.0.0.2")
print("CHOSEN", *(server.host for server in chosen["b"]))
"""


@pytest.mark.parametrize(
    ("address", "nodes"), [("127.0.0.1", "head other"), ("10.77.0.1", "head")], ids=["side by side", "two hosts"]
)
def test_a_router_that_haproxy_does_not_ask_does_notprinted(address: str, nodes: str) -> None:
    assert printed(ROUTERS, env={**os.environ, LISTEN: address})[-2:] == [f"NODES {nodes}", "CHOSEN 10.0.0.2"]


CHOICE = """
import sys
from pdlab.cluster import fast_start
if sys.argv[1] == "changed":
    fast_start.install()
from ray.serve._private import haproxy
print(haproxy._load_lua_template().template)
"""


def test_haproxy_calls_no_router_where_one_replica_answers() -> None:
    stock, changed = ("\n".join(printed(CHOICE, each)) for each in ("stock", "changed"))
    assert stock.count(fast_start.CHOOSES) == 1
    assert changed.replace(fast_start.ONLY_REPLICA, "") == stock and len(changed) > len(stock)
    begin, end = stock.split(fast_start.CHOOSES)
    assert "local FORWARD_BODY = " in begin and "replica_map[replica_id]" in end
    assert "txn:set_var" not in fast_start.ONLY_REPLICA  # with a variable set, Ray's second backend gets the request


# Ray's own HAProxy, its configuration and its reloads, before replicas, a router and a Serve proxy of this program.
# Prints for each state: who answered requests sent at once (or the status), and how often the router was called.
BALANCED = """
import asyncio, json, os, sys
from collections import Counter
folder, *ports = sys.argv[1:]
port, metrics, stats = map(int, ports)
from pdlab.cluster import local_nodes
from pdlab.deploy import serving_path
of_nodes = local_nodes.environment("x", folder)
os.environ.update({name: value for name, value in of_nodes.items() if name.startswith("RAY_SERVE_HAPROXY")})
os.environ.update(serving_path.HAPROXY)
os.environ.update({
    "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics), "RAY_SERVE_HAPROXY_STATS_PORT": str(stats),
    # Only a failed connection tells HAProxy that a replica is gone; a check comes too late.
    "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER": "60s",
})
from pdlab.cluster import fast_start
fast_start.install()
import aiohttp
from ray.serve._private import haproxy
from ray.serve.config import HTTPOptions, gRPCOptions

class Server:
    def __init__(self, name):
        self.name, self.posts, self.answer, self.port = name, 0, {"who": name}, 0

    async def start(self):
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", self.port)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    async def serve(self, reader, writer):
        head = (await reader.readuntil(b"\\r\\n\\r\\n")).decode().lower()
        self.posts += head.startswith("post")
        body = json.dumps(self.answer).encode()
        writer.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: %d\\r\\nConnection: close\\r\\n\\r\\n" % len(body) + body)
        await writer.drain()
        writer.close()

async def main():
    first, second, router, proxy = [await Server(name).start() for name in ("first", "second", "router", "proxy")]
    config = haproxy.HAProxyConfig(
        http_options=HTTPOptions(host="127.0.0.1", port=port), grpc_options=gRPCOptions(), is_head=True,
        socket_path=f"{folder}/admin.sock", server_state_base=folder, server_state_file=f"{folder}/state")
    api = haproxy.HAProxyApi(cfg=config, config_file_path=f"{folder}/haproxy.cfg")

    def replicas(*servers):
        of = {each: haproxy.ServerConfig(name=each.name, host="127.0.0.1", port=each.port, replica_id=each.name)
              for each in (*servers, router, proxy)}
        api.set_backend_configs({"http-pdlab": haproxy.BackendConfig(
            name="http-pdlab", path_prefix="/", app_name="pdlab", servers=[of[each] for each in servers],
            ingress_request_router_servers=[of[router]], fallback_server=of[proxy])})

    async def ask():
        async with aiohttp.request("POST", f"http://127.0.0.1:{port}/v1/completions") as answer:
            return (await answer.json(content_type=None))["who"] if answer.status == 200 else answer.status

    async def show(state, requests=8):
        called = router.posts
        answered = Counter(await asyncio.gather(*(ask() for _ in range(requests))))
        answers = (f"{who}={times}" for who, times in sorted(answered.items(), key=str))
        print(state, *answers, f"router={router.posts - called}")

    replicas(first)
    await api.start()
    try:
        await show("ONE")
        replicas(first, second)
        router.answer = {"replica_id": "second"}
        await api.reload()
        await show("TWO")
        replicas(second)
        await api.reload()
        first.server.close()
        await show("LEFT")
        router.server.close()
        await show("UNROUTED")
        second.server.close()
        await show("DEAD", requests=1)
        await show("KNOWN")
        await second.start()
        while await ask() != "second":
            await asyncio.sleep(0.1)
        await show("BACK")
    finally:
        await api.stop()

asyncio.run(asyncio.wait_for(main(), 120))
"""


@pytest.fixture(scope="module")
def balanced(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """State -> who answered, and the calls of the router."""
    held = [hold_port() for _ in range(3)]
    for each, _ in held:
        each.close()
    with tempfile.TemporaryDirectory() as folder:  # short: HAProxy's socket is in it
        lines = [line.split() for line in printed(BALANCED, folder, *(port for _, port in held))]
    return {line[0]: line[1:] for line in lines if line[0].isupper()}


def test_haproxy_notices_that_a_replica_came_or_left(balanced: dict[str, list[str]]) -> None:
    assert balanced["ONE"] == ["first=8", "router=0"]
    assert balanced["TWO"] == ["second=8", "router=8"]
    assert balanced["LEFT"] == ["second=8", "router=0"]


def test_one_replica_answers_without_a_router(balanced: dict[str, list[str]]) -> None:
    assert balanced["UNROUTED"] == ["second=8", "router=0"]


def test_requests_after_the_loss_of_the_only_replica_get_no_error(balanced: dict[str, list[str]]) -> None:
    """Ray Serve's proxy gets them, and keeps them until a replica is there."""
    assert balanced["DEAD"] == ["proxy=1", "router=0"], "the request that meets the loss"
    assert balanced["KNOWN"] == ["proxy=8", "router=0"]
    assert balanced["BACK"] == ["second=8", "router=0"]


def test_replicas_count_http_requests_where_haproxy_writes_no_metrics() -> None:
    replica = quietly("ray.serve._private.replica")
    counts = replica.ReplicaMetricsManager
    http = replica.RequestProtocol.HTTP
    ingress = SimpleNamespace(_is_direct_ingress=True)
    for by_haproxy in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(replica, "RAY_SERVE_ENABLE_HA_PROXY", True)
            patch.setattr(replica, "RAY_SERVE_HAPROXY_METRICS_ENABLED", by_haproxy)
            assert counts._should_emit_request_ingress_metrics(ingress, http) is not by_haproxy


# The real step of the control loop, with nothing to do, at made-up times.
INTERVALS = """
import asyncio, inspect, sys
from types import SimpleNamespace
from unittest.mock import MagicMock
from pdlab.cluster import fast_start
fast_start.install()
from ray.serve._private import controller, deployment_state
from ray.serve._private.application_state import ApplicationStatusInfo
from ray.serve.schema import ApplicationStatus
loop = inspect.getsource(controller.ServeController.run_control_loop)
assert "asyncio.sleep(CONTROL_LOOP_INTERVAL_S)" in loop and "self.run_control_loop_step(" in loop
fast_start.time = SimpleNamespace(monotonic=lambda: now)
serve = MagicMock()
serve._shutting_down = False
for now, status in ((0, None), (30, None), (35, "DEPLOYING"), (36, "RUNNING"), (44, "RUNNING"), (46, "RUNNING"),
                    (47, "UNHEALTHY"), (48, "RUNNING"), (58, "RUNNING"), (59, "ending")):
    serve._shutting_down = status == "ending"
    apps = {} if status in (None, "ending") else {"pdlab": ApplicationStatusInfo(ApplicationStatus(status))}
    serve.application_state_manager.list_app_statuses.return_value = apps
    step = controller.ServeController.run_control_loop_step(serve, 0.0, 10.0, 1)
    asyncio.run(step)
    assert controller.CONTROL_LOOP_INTERVAL_S == deployment_state.CONTROL_LOOP_INTERVAL_S
    print("EVERY", now, controller.CONTROL_LOOP_INTERVAL_S)
print("STEPS", serve.deployment_state_manager.update.call_count, serve.shutdown.call_count)
"""


def test_the_control_loop_looks_seldom_only_where_everything_has_been_running_for_a_while() -> None:
    done = printed(INTERVALS, env={**os.environ, "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25"})
    every = [tuple(map(float, line.split()[1:])) for line in done if line.startswith("EVERY")]
    assert [when for when, interval_s in every if interval_s == 1.0] == [46, 58]
    assert {interval_s for _, interval_s in every} == {0.25, 1.0}
    assert done[-1] == "STEPS 10 1"


def test_who_asks_for_a_slower_control_loop_gets_it() -> None:
    done = printed(INTERVALS, env={**os.environ, "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "2"})
    assert {line.split()[2] for line in done if line.startswith("EVERY")} == {"2.0"}


START = """
import asyncio, os, sys, tempfile
from types import SimpleNamespace
from pdlab.cluster import fast_start
fast_start.install()
from ray.serve._private import haproxy
async def ready(process, timeout_s):
    pass
async def main(folder):
    program = f"{folder}/haproxy"
    with open(program, "w") as file:
        file.write("#!/bin/sh\\nexec sleep 60\\n")
    os.chmod(program, 0o700)
    haproxy.get_haproxy_binary = lambda: program
    config = SimpleNamespace(socket_path=f"{folder}/admin.sock", enable_so_reuseport=True)
    api = SimpleNamespace(cfg=config, config_file_path="x", _spawn_seq=0, _log_id="1", _wait_for_hap_availability=ready)
    process = await haproxy.HAProxyApi._start_and_wait_for_haproxy(api, "-sf", "1")
    print("POLICY", os.sched_getscheduler(process.pid) == os.SCHED_BATCH, os.sched_getscheduler(0) != os.SCHED_BATCH)
    process.kill()
    print("ENDED", await process.wait())
with tempfile.TemporaryDirectory() as folder:
    asyncio.run(main(folder))
"""


def test_haproxy_takes_no_core_from_an_engine_when_it_wakes() -> None:
    assert printed(START)[-2:] == ["POLICY True True", "ENDED -9"]


def _rounded(line: str) -> str:
    """A sum of many is not the product to the last digit."""
    words = line.rsplit(" ", 1)
    return f"{words[0]} {float(words[1]):.9g}" if "_sum" in words[0] else line
