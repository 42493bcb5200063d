"""What pdlab.cluster.lean stands on in Ray: the router then imports neither torch nor vLLM nor pandas, and an agent's
metrics page shows what Ray's own recorder would show; and in how HAProxy chooses the routers that it asks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pdlab.cluster.loopback import LISTEN

PROGRAM = """
import sys
from pdlab.cluster import lean
lean.install()
import ray.serve, ray.serve._private.controller, ray.serve._private.haproxy
import ray.llm._internal.serve.core.ingress.router
print("LOADED", [name for name in ("pandas", "torch", "vllm") if sys.modules.get(name)])
from ray.llm._internal.common.utils import download_utils
print("THEN", download_utils.torch.hub.__name__, "torch" in sys.modules)
"""


def test_controller_proxy_and_router_import_none_of_it() -> None:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-2:] == ["LOADED []", "THEN torch.hub True"]


# Two engines of one node, and one with other buckets, which Ray leaves out.
RECORD = """
import sys
if "lean" in sys.argv:
    from pdlab.cluster import lean
    lean.install()
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
    for argument, calls in (("stock", 2012), ("lean", 8)):
        command = [sys.executable, "-W", "ignore", "-c", RECORD, argument]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        first, *page = done.stdout.splitlines()
        assert first == f"CALLS {calls}", "the way to the histogram is another one than Ray's was"
        pages.append(page)
    stock, lean = pages
    assert len(stock) > 10 and [_rounded(line) for line in lean] == [_rounded(line) for line in stock]


ROUTERS = """
from types import SimpleNamespace
from pdlab.cluster import lean
lean.install()
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
asked, _ = haproxy._routers_and_targets_by_backend([backend], "10.0.0.2")
print("ASKED", *(server.host for server in asked["b"]))
"""


@pytest.mark.parametrize(
    ("address", "nodes"), [("127.0.0.1", "head other"), ("10.77.0.1", "head")], ids=["side by side", "two hosts"]
)
def test_a_router_that_haproxy_does_not_ask_does_not_run(address: str, nodes: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", ROUTERS]
    env = {**os.environ, LISTEN: address}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-2:] == [f"NODES {nodes}", "ASKED 10.0.0.2"]


def _rounded(line: str) -> str:
    """A sum of many is not the product to the last digit."""
    words = line.rsplit(" ", 1)
    return f"{words[0]} {float(words[1]):.9g}" if "_sum" in words[0] else line
