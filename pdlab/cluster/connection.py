"""The connection to Ray: connect, list the nodes, run functions on the nodes.

Functions import Ray, so that a command that needs no cluster starts fast.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from pdlab.cluster import fast_start, loopback
from pdlab.cluster.local_nodes import AT_START, LocalNodes, become_driver, ended, last_words, restart, set_own
from pdlab.cluster.namespaces import INSIDE
from pdlab.cluster.ray_names import SERVICES, STATE, TOKEN
from pdlab.core.catalog import gpu_name, gpu_type_of
from pdlab.core.commands import PDLAB
from pdlab.core.defaults import base_url
from pdlab.core.errors import ClusterError, first_line
from pdlab.core.nodes import NODE_ID_LABEL, NODE_NAME_LABEL, ClusterNode, ClusterView, Nic
from pdlab.remote.node import machine_facts

_log = logging.getLogger(__name__)

# Limit for a node that neither joins nor ends.
JOIN_TIMEOUT_S = 300.0
# A node is started once more if it has not joined this long after the previous node joined.
SILENT_S = 100.0
# The first task starts a worker process, which imports Ray: 3 s of CPU time, and much longer on a busy machine.
TASK_TIMEOUT_S = 180.0
TOKEN_TIMEOUT_S = 10.0
START_RAY = "start Ray on its nodes (docs/setup.md), or name another with RAY_ADDRESS"
# Packages that Ray Serve LLM's classes import; they take most of its import time. None of them imports Ray or vLLM,
# because Ray and vLLM read this process's environment at import. ``ray.serve`` imports SHARED too. A contract test
# checks both lists.
SHARED = (
    *("aiohttp", "cloudpickle", "fastapi", "filelock", "google.protobuf.message", "grpc", "jsonschema", "numpy.ma"),
    *("numpy.random", "numpy.typing", "opentelemetry.sdk.metrics", "packaging.version", "prometheus_client", "psutil"),
    *("requests", "tqdm.auto", "uvloop", "yaml"),
)
AHEAD = (
    "torch._inductor.standalone_compile",
    "transformers.models.auto.image_processing_auto",
    "openai.types.chat",
)


# Torch sets this variable at its import. It is set earlier here, because another thread may read the environment then.
WRITTEN = ("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}")


class Cluster:
    """A connection to one Ray cluster; use as a context manager.

    ``local``: pdlab's own nodes on this machine; None connects to the cluster of this machine's Ray (RAY_ADDRESS or
    the running one). ``env``: environment of every process that this driver starts, also of the Serve controller and
    its proxies. ``warn`` gets a line if a local node is started once more. ``otherwise``: what the command can do
    without a cluster, for the end of the message that none answers. Raises ClusterError.
    """

    def __init__(
        self,
        local: LocalNodes | None = None,
        env: Mapping[str, str] | None = None,
        warn: Callable[[str], None] = _log.warning,
        otherwise: str = "",
    ) -> None:
        self.local = local
        self.env = dict(env or {})
        self.warn = warn
        self.otherwise = otherwise

    def __enter__(self) -> Cluster:
        import ray

        if self.local:
            loopback.install_in_driver()
        if self.local and self.local.two_hosts and INSIDE not in os.environ:
            raise ClusterError(
                f"the local Ray nodes are on two hosts; run the command there: {PDLAB} two-hosts shell -- COMMAND"
            )
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if self.env:
            options["runtime_env"] = {"env_vars": self.env}
        address = self.local.address if self.local else os.environ.get("RAY_ADDRESS", "auto")
        if not self.local:
            _refuse_unanswered(address, self.otherwise)
        try:
            ray.init(address=address, **options)
        except Exception as error:  # Ray raises what its layers raise: ConnectionError, ValueError, RuntimeError
            raise ClusterError(
                f"no Ray cluster answers at {address} ({first_line(error)}); {START_RAY}{self.otherwise}"
            ) from error
        quiet_logs()
        return self

    def __exit__(self, *_: object) -> None:
        import ray

        ray.shutdown()

    def _await_nodes(self, count: int) -> None:
        """Return when ``count`` local nodes are alive. Raises ClusterError.

        A node is started once more if its raylet ended or if the node stays silent. `ray start` does not report a
        raylet that ends with status 0, as a raylet does on SIGTERM.
        """
        assert self.local is not None
        began = changed = time.monotonic()
        up, again = -1, set[int]()
        while (now := len(self.alive())) < count:
            if now != up:
                up, changed = now, time.monotonic()
            gone = ended(self.local)
            if gone is not None:
                raise ClusterError(
                    f"local Ray node {gone} of {count} ended at its start: {last_words(self.local, gone)}"
                )
            if time.monotonic() - began > JOIN_TIMEOUT_S:
                logs = "; ".join(f"node {n}: {last_words(self.local, n)}" for n in range(1, count + 1))
                raise ClusterError(f"{now} of {count} local Ray nodes joined within {JOIN_TIMEOUT_S:g} s ({logs})")
            missing = self._missing(silent=time.monotonic() - changed > SILENT_S)
            for number, why in missing.items():
                if number == 1 or number in again or INSIDE in os.environ:
                    raise ClusterError(f"local Ray node {number} of {count} was lost: {why}")
                again.add(number)
                self.warn(f"warning: local Ray node {number} of {count} was lost ({why}): starting it once more")
                self.local = restart(self.local, number)
                changed = time.monotonic()
            time.sleep(0.05)

    def _missing(self, silent: bool) -> dict[int, str]:
        """Local node number -> reason, for dead nodes; with ``silent`` also for nodes that never joined."""
        import ray

        assert self.local is not None
        alive, found = set[int](), dict[int, str]()
        for node in ray.nodes():
            number = self.local.number_of((node.get("Labels") or {}).get(NODE_NAME_LABEL, ""))
            if number and node["Alive"]:
                alive.add(number)
            elif number:
                found[number] = node.get("DeathReasonMessage") or "Ray gives no reason"
        if silent:
            found = {n: f"it did not join within {SILENT_S:g} s" for n in range(2, self.local.count + 1)} | found
        return {number: why for number, why in sorted(found.items()) if number not in alive}

    def alive(self) -> list[dict[str, Any]]:
        """Ray's records of the nodes that are alive."""
        import ray

        return [node for node in ray.nodes() if node["Alive"]]

    def view(self) -> ClusterView:
        """The nodes and their free resources now. Raises ClusterError.

        Ray reports the number of free GPUs but not their indexes; the view takes the lowest indexes.
        """
        if self.local:
            self._await_nodes(self.local.count)
        alive = self.alive()  # read before the facts: a node that joins meanwhile is not a node without an answer
        _refuse_one_name_for_two(alive)
        facts = self._local_facts() if self.local else self.call_nodes(machine_facts)
        free = importlib.import_module(STATE).available_resources_per_node()
        nodes = []
        for node in alive:
            fact = facts.get(node["NodeID"])
            if fact is None:
                raise ClusterError(
                    f"Ray's node {node['NodeManagerAddress']} ended, or runs no task within {TASK_TIMEOUT_S:g} s"
                )
            total, left = node["Resources"], free.get(node["NodeID"], {})
            labels = dict(node.get("Labels") or {})
            accelerators = [key.split(":", 1)[1] for key in total if key.startswith("accelerator_type:")]
            gpus = int(total.get("GPU", 0))
            seen = (fact.get("gpus") or {}) if gpus else {}
            memory_bytes = seen.get("memory_bytes")
            nodes.append(
                ClusterNode(
                    id=labels.get(NODE_NAME_LABEL, node["NodeID"]),
                    gpu_type=gpu_name(accelerators[0]) if accelerators else gpu_type_of(seen.get("name") or ""),
                    gpus=gpus,
                    gpu_memory_gb=None if memory_bytes is None else round(memory_bytes / 1e9, 1),
                    gpu_link=seen.get("link"),
                    free_gpus=tuple(range(int(left.get("GPU", 0)))) if gpus else None,
                    cpus=total.get("CPU", 0.0),
                    free_cpus=min(left.get("CPU", 0.0), total.get("CPU", 0.0)),
                    nic=Nic.model_validate(fact["nic"]),
                    host=fact["host"],
                    head="node:__internal_head__" in total,
                    labels={NODE_ID_LABEL: node["NodeID"]}
                    | ({NODE_NAME_LABEL: labels[NODE_NAME_LABEL]} if NODE_NAME_LABEL in labels else {}),
                )
            )
        nodes.sort(key=lambda node: (not node.head, node.id))
        return ClusterView(name=self._name(), nodes=tuple(nodes))

    def _name(self) -> str:
        if self.local is None:
            return "ray"
        if self.local.made_up is not None:
            return self.local.made_up.name
        return "two-hosts" if self.local.two_hosts else f"local-{self.local.count}"

    def _local_facts(self) -> dict[str, Any]:
        """Node id -> facts of local nodes in the form of `machine_facts`, without a call to the nodes."""
        if self.local and self.local.made_up:
            made_up = {node.id: node for node in self.local.made_up.nodes}
            return {node: _facts_of_made_up(made_up[name]) for node, name in self.names().items()}
        pair = self.local.two_hosts if self.local else None
        if pair is None:
            return {node["NodeID"]: {"host": "localhost", "nic": {"kind": "loopback"}} for node in self.alive()}
        names = {host.address: host.name for host in pair.hosts}
        nic = {"kind": "ethernet", "gbit_per_s": pair.shape.gbit_per_s}
        return {node["NodeID"]: {"host": names[node["NodeManagerAddress"]], "nic": nic} for node in self.alive()}

    def names(self) -> dict[str, str]:
        """Node id -> the name from `ray start`, else the first 8 characters of the id.

        Raises ClusterError if two nodes have the same name.
        """
        alive = self.alive()
        _refuse_one_name_for_two(alive)
        return {node["NodeID"]: (node.get("Labels") or {}).get(NODE_NAME_LABEL, node["NodeID"][:8]) for node in alive}

    def call_nodes(self, function: Callable[..., Any], *args: Any, timeout_s: float = TASK_TIMEOUT_S) -> dict[str, Any]:
        """Node id -> result of ``function`` on that node; nodes without an answer are left out.

        `pdlab.remote` and the function's module are sent by value, because nodes may not have pdlab.
        """
        import ray

        for module in ("pdlab.remote", function.__module__):
            ray.cloudpickle.register_pickle_by_value(importlib.import_module(module))
        task = ray.remote(num_cpus=0)(function)
        nodes = [node["NodeID"] for node in self.alive()]
        tasks = {node: task.options(scheduling_strategy=pinned_to(node)).remote(*args) for node in nodes}
        ray.wait(list(tasks.values()), num_returns=len(tasks), timeout=timeout_s)
        answers = {}
        for node_id, answer in tasks.items():
            with contextlib.suppress(Exception):  # the node did not answer in time, or died meanwhile
                answers[node_id] = ray.get(answer, timeout=0)
        return answers

    def call_every_node(
        self, function: Callable[..., Any], *args: Any, timeout_s: float = TASK_TIMEOUT_S, otherwise: str = ""
    ) -> dict[str, Any]:
        """Node name (`names`) -> result of ``function`` on that node, as `call_nodes`.

        Raises ClusterError with the names of the nodes that do not answer; ``otherwise``: more advice for its end.
        """
        names = self.names()
        answers = self.call_nodes(function, *args, timeout_s=timeout_s)
        silent = [name for node, name in names.items() if node not in answers]
        if silent:
            raise ClusterError(
                f"no answer from {', '.join(silent)}: Ray runs no task there; look at `ray status`{otherwise}"
            )
        return {names[node]: answer for node, answer in answers.items() if node in names}

    def requires_token(self) -> bool:
        """Whether Ray's head refuses a call without a token; makes such a call. Raises ClusterError."""
        import ray

        if _uses_tls():
            return True  # Ray's TLS is mutual: the head refuses a caller without a certificate
        address = ray.get_runtime_context().gcs_address
        status = _status_of_call(address)
        if status in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
            raise ClusterError(f"unknown whether Ray requires a token: {address} answers {status}")
        return status == "UNAUTHENTICATED"

    def metrics_urls(self) -> tuple[str, ...]:
        """URLs of the Prometheus page of every node."""
        return tuple(f"{base_url(n['MetricsExportPort'], n['NodeManagerAddress'])}/metrics" for n in self.alive())


def pinned_to(node_id: str) -> Any:
    """Ray's scheduling strategy of a task or an actor that must run on this node (Ray's node id)."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node_id, soft=False)


class BackgroundImports:
    """Imports of a driver in one background thread, in sequence: some packages fail if two threads import them."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1)
        self._shared: Future[None] | None = None

    def ahead(self) -> None:
        """Import packages that do not depend on this process's environment, while the nodes start.

        The caller imports nothing large until `shared` returns.
        """
        fast_start.collect_seldom()
        fast_start.leave_out([fast_start.UNUSED_MODULE])
        set_own(*WRITTEN)
        self._shared = self._pool.submit(_import_all, SHARED)
        self._pool.submit(_import_all, AHEAD)

    def shared(self) -> None:
        """Return when the caller may import packages in its own thread again."""
        if self._shared is not None:
            self._shared.result()

    def last(self, name: str) -> Future[Any]:
        """Import this module last; returns its future."""
        loading = self._pool.submit(importlib.import_module, name)
        self._pool.shutdown(wait=False)
        return loading


def _import_all(names: Sequence[str]) -> None:
    for name in names:
        with contextlib.suppress(ImportError):  # the code that needs the package reports its absence
            importlib.import_module(name)


def prepare(local: LocalNodes | None, env: Mapping[str, str], imports: BackgroundImports | None = None) -> Future[Any]:
    """Set this process up as a driver and import Ray Serve LLM in the background (8 s of CPU time).

    The environment is set first, because Ray reads it at its import. ``ray.serve`` is imported before this returns:
    answers of its controller import it too, and two threads must not import it at once. Wait for the result before
    you use ``ray.serve.llm``. ``imports``: background imports that have begun.
    """
    imports = imports or BackgroundImports()
    if local:
        become_driver(local)
        if at_start := local.env.get(AT_START):  # the nodes' own processes call it too
            importlib.import_module(at_start).at_start()
    os.environ["RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP"] = "1"  # a driver has no event loop to share
    os.environ.update(env)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    fast_start.collect_seldom()
    imports.shared()
    importlib.import_module("ray.serve")
    return imports.last("ray.serve.llm")


def quiet_logs() -> None:
    """Show only warnings of Ray and vLLM. Call it again after Ray Serve has set its logger up anew."""
    for name in ("ray", "ray.serve", "vllm"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _refuse_unanswered(address: str, otherwise: str) -> None:
    """Raises ClusterError if Ray's head does not answer, or requires a token that this process lacks.

    Local nodes of another cache folder require such a token. ``ray.init`` would retry for many minutes.
    """
    if _uses_tls():
        return
    services = importlib.import_module(SERVICES)
    try:
        head = services.canonicalize_bootstrap_address(address)
    except Exception:  # not an address: ray.init reports it
        return
    if head is None:
        return
    token = importlib.import_module(TOKEN)
    status = _status_of_call(head, token._get_authentication_metadata_tuple())
    if status in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
        raise ClusterError(f"no Ray cluster answers at {head} ({status}); {START_RAY}{otherwise}")
    if status == "UNAUTHENTICATED":
        raise ClusterError(
            f"Ray at {head} requires a token that this process does not have: export RAY_AUTH_MODE=token with the "
            "cluster's token in ~/.ray/auth_token (docs/setup.md), or name another cluster with RAY_ADDRESS"
        )


def _facts_of_made_up(node: ClusterNode) -> dict[str, Any]:
    """Facts of a fake node in the form of `machine_facts`."""
    memory_bytes = None if node.gpu_memory_gb is None else 1e9 * node.gpu_memory_gb
    gpus = {"memory_bytes": memory_bytes, "link": node.gpu_link}
    return {"host": node.host, "nic": node.nic.model_dump(), "gpus": gpus}


def _refuse_one_name_for_two(alive: list[dict[str, Any]]) -> None:
    """Raises ClusterError if two of Ray's nodes have the same name: a label selector would match both."""
    addresses: dict[str, list[str]] = {}
    for node in alive:
        if name := (node.get("Labels") or {}).get(NODE_NAME_LABEL):
            addresses.setdefault(name, []).append(node["NodeManagerAddress"])
    for name, several in addresses.items():
        if len(several) > 1:
            raise ClusterError(
                f"{len(several)} of Ray's nodes have the label {NODE_NAME_LABEL}={name} ({', '.join(several)}): "
                f"restart Ray there with a name for each (`ray start --labels {NODE_NAME_LABEL}=NAME`; on Kubernetes a "
                "worker group of one replica for each), or without the label"
            )


def _status_of_call(address: str, metadata: tuple[tuple[str, str], ...] = ()) -> str:
    """Name of the gRPC status with which Ray's head answers a call."""
    grpc = importlib.import_module("grpc")
    with grpc.insecure_channel(address) as channel:
        # An empty request for a key that does not exist: an empty protobuf message has no bytes.
        get = channel.unary_unary("/ray.rpc.InternalKVGcsService/InternalKVGet")
        try:
            get(b"", timeout=TOKEN_TIMEOUT_S, metadata=metadata)
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


def _uses_tls() -> bool:
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")
