"""The path of a request from the served address to the engines: how it is chosen, and why.

With *direct streaming* HAProxy on the head node hands a request to the replica that answers it, on whichever node that
is; otherwise HAProxy hands it to ingress replicas beside it, which call the engines through Ray. The servers behind
HAProxy listen at ``--host`` too, because Ray Serve has one address for all its HTTP servers. docs/serving-path.md has
the cost of each path. Imports neither Ray nor vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdlab.core.defaults import PORT
from pdlab.core.deployment import Collocated, Deployment, Disaggregated, Topology
from pdlab.core.errors import UsageError
from pdlab.core.text import counted

EVERYWHERE = "0.0.0.0"
# HAProxy calls a replica on its own node at 127.0.0.1, so that must be one of the addresses that replicas listen at.
AT_HAPROXY = (EVERYWHERE, "127.0.0.1", "localhost")
LEAST_INGRESS, MOST_INGRESS = 2, 16
HAPROXY = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    # One event loop per replica, gRPC between replicas, buffered request logs.
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_LOG_TO_STDERR": "1",  # which the line before turns off, and where a failing replica writes why
    # Where a replica did not take the connection, died before the first byte of its answer, or had no engine any more
    # (425: pdlab.deploy.serving.dead_engine), another one gets the request. A request that kills its replica must not
    # meet all of them.
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response 425",
    "RAY_SERVE_HAPROXY_RETRIES": "2",
    # It can send again what it has whole: prompts of some 12,000 tokens of text instead of 3,000.
    "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(2**16),
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0.5",  # Ray waits 30 s for balancers in front; none here
}
# Ports of HAProxy itself, metrics and statistics, and of the HTTP servers of the replicas behind it, by Ray's defaults
# (ray.serve._private.constants of 2.60).
HAPROXY_PORTS = (9101, 8404)
REPLICA_PORTS = range(30_000, 31_001)
# Ray Serve's processes start with the path in their environment, and then the launch reads which nodes are free.
_BEFORE_PLACEMENT = "the path is chosen before the nodes are known"
DIRECT = {"RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING": "1"}


def reaches_engines(host: str, *, local: bool) -> bool:
    """Whether HAProxy on the head node reaches engine replicas that listen at ``host``, on whichever node they are."""
    return host == EVERYWHERE or (local and host in AT_HAPROXY)


def defaults(topology: Topology, host: str, *, local: bool) -> dict[str, Any]:
    """Fields of `pdlab.core.deployment.Serving` as a default: the fastest path that ``host`` allows, and
    no output chunk held back."""
    return {
        "direct_streaming": reaches_engines(host, local=local),
        "tokenize_once": not isinstance(topology, Collocated),
        "stream_batching_ms": 0.0,
    }


def ingress_replicas(topology: Topology) -> int:
    """One per rank (GPU) of the pool that answers clients, from 2 to 16: a rank's tokens are a process's work."""
    pool = topology.decode if isinstance(topology, Disaggregated) else topology.pool
    return min(max(LEAST_INGRESS, pool.gpus), MOST_INGRESS)


def refuse_unreachable(serving: Mapping[str, Any], host: str, *, local: bool) -> None:
    """Raises UsageError for direct streaming at an address where HAProxy would not find the replicas."""
    if not serving.get("direct_streaming") or reaches_engines(host, local=local):
        return
    if local:
        raise UsageError(
            f"--direct-streaming with --local and --host {host}: HAProxy calls the replicas at 127.0.0.1, where they "
            "would not listen; leave --host out, give --host 0.0.0.0, or give --no-direct-streaming"
        )
    raise UsageError(
        f"--direct-streaming with --host {host}: {_BEFORE_PLACEMENT}, and replicas on other nodes than the head node "
        f"could not be reached; give --host {EVERYWHERE} (whoever reaches the nodes can then use the model), or leave "
        "it out"
    )


def refuse_port(port: int, host: str) -> None:
    """Raises UsageError for a port of the head node that HAProxy, or a replica behind it, has for itself. With a
    replica's, both would listen there, and the kernel would choose between them."""
    if host in AT_HAPROXY and (port in HAPROXY_PORTS or port in REPLICA_PORTS):
        raise UsageError(
            f"--port {port}: HAProxy has the ports {' and '.join(map(str, HAPROXY_PORTS))} for itself, and replicas "
            f"behind it have {REPLICA_PORTS[0]} to {REPLICA_PORTS[-1]}; give another, such as {PORT}"
        )


def environment(deployment: Deployment, host: str) -> dict[str, str]:
    """Environment of the driver and of Ray Serve's own processes that the serving path needs."""
    if host not in AT_HAPROXY:
        return {}
    return HAPROXY | (DIRECT if deployment.serving.direct_streaming else {})


def describe(deployment: Deployment, host: str, *, local: bool) -> str:
    """The path and why it is this one, in one line."""
    if deployment.serving.direct_streaming:
        why = "with --local they are all on this machine" if local else f"at --host {host} every node can be reached"
        return f"direct streaming: HAProxy hands requests to the engine replicas ({why})"
    count = deployment.ingress_replicas
    through = counted(count, "ingress replica")
    if reaches_engines(host, local=local):
        return f"{through} behind HAProxy (by --no-direct-streaming)"
    if host in AT_HAPROXY:
        return (
            f"{through} behind HAProxy ({_BEFORE_PLACEMENT}, and at --host {host} HAProxy reaches engine replicas on "
            f"the head node only; --host {EVERYWHERE} gives direct streaming)"
        )
    return (
        f"{through} behind Ray Serve's proxy (at --host {host} HAProxy would not reach its servers; "
        f"--host {EVERYWHERE} gives direct streaming)"
    )
