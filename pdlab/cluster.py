"""Ray, and nothing else: see the cluster, deploy one application, watch it start, read it back, take it down.

Imports Ray inside functions: a command line that ends before it needs a cluster stays fast.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pydantic import Field

from pdlab.errors import ClusterError, DeployError
from pdlab.local_nodes import LocalNodes, environment
from pdlab.nodes import ClusterNode, ClusterView, Nic, Placement, Role
from pdlab.replica_logs import LogTail, root_cause, tail_logs
from pdlab.serve_args import NODE_ID_LABEL, NODE_NAME_LABEL, ServeApp
from pdlab.spec import Frozen

APP = "pdlab"
POLL_S = 0.25
JOIN_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 60.0


class ReplicaState(Frozen):
    """One Ray Serve replica as the controller sees it. ``node`` is a Ray node id."""

    deployment: str
    replica: str
    state: str
    node: str | None = None
    pid: int | None = None


class AppState(Frozen):
    """The application as the controller sees it; ``messages`` are its and its deployments' complaints."""

    status: str
    replicas: tuple[ReplicaState, ...] = ()
    deployments: dict[str, str] = Field(default_factory=dict)
    messages: tuple[str, ...] = ()


class Cluster:
    """A connection to one Ray cluster; use as a context manager.

    ``local`` are pdlab's own nodes on this machine; None connects to the Ray of this machine's
    cluster (RAY_ADDRESS or the running one). ``env`` is set for every process that this driver
    starts there, the Serve controller and its proxies included. Raises ClusterError.
    """

    def __init__(self, local: LocalNodes | None = None, env: Mapping[str, str] | None = None) -> None:
        self.local = local
        self.env = dict(env or {})

    def __enter__(self) -> Cluster:
        import ray

        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if self.env:
            options["runtime_env"] = {"env_vars": self.env}
        address = self.local.address if self.local else os.environ.get("RAY_ADDRESS", "auto")
        try:
            ray.init(address=address, **options)
        except Exception as error:  # Ray raises what its layers raise: ConnectionError, ValueError, RuntimeError
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ClusterError(
                f"no Ray cluster answers at {address} ({reason}); start Ray on its nodes (docs/setup.md), "
                "or serve on this machine with --local"
            ) from error
        _hush()
        return self

    def __exit__(self, *_: object) -> None:
        import ray

        ray.shutdown()

    def _await_nodes(self, count: int) -> None:
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        while len(self.alive()) < count:
            if time.monotonic() > deadline:
                raise ClusterError(f"{len(self.alive())} of {count} local Ray nodes joined within {JOIN_TIMEOUT_S:g} s")
            time.sleep(0.05)

    def alive(self) -> list[dict[str, Any]]:
        """Ray's records of the nodes that are alive."""
        import ray

        return [node for node in ray.nodes() if node["Alive"]]

    def view(self) -> ClusterView:
        """The nodes as they are now, with what is free on them.

        Ray counts free GPUs but does not say which: the lowest indexes stand for them.
        """
        from ray._private.state import available_resources_per_node

        if self.local:
            self._await_nodes(self.local.count)
        free = available_resources_per_node()
        facts = {} if self.local else self._node_facts()
        nodes = []
        for node in self.alive():
            total, left = node["Resources"], free.get(node["NodeID"], {})
            labels = dict(node.get("Labels") or {})
            fact = facts.get(node["NodeID"], {})
            accelerators = [key.split(":", 1)[1] for key in total if key.startswith("accelerator_type:")]
            gpus = int(total.get("GPU", 0))
            nodes.append(
                ClusterNode(
                    id=labels.get(NODE_NAME_LABEL, node["NodeID"]),
                    gpu_type=accelerators[0] if accelerators else None,
                    gpus=gpus,
                    free_gpus=tuple(range(int(left.get("GPU", 0)))) if gpus else None,
                    cpus=total.get("CPU", 0.0),
                    free_cpus=min(left.get("CPU", 0.0), total.get("CPU", 0.0)),
                    nic=Nic.model_validate(fact.get("nic", {"kind": "loopback"} if self.local else {})),
                    host=fact.get("host", "localhost" if self.local else None),
                    head="node:__internal_head__" in total,
                    labels={NODE_ID_LABEL: node["NodeID"]}
                    | ({NODE_NAME_LABEL: labels[NODE_NAME_LABEL]} if NODE_NAME_LABEL in labels else {}),
                )
            )
        nodes.sort(key=lambda node: (not node.head, node.id))
        return ClusterView(name=f"local-{self.local.count}" if self.local else "ray", nodes=tuple(nodes))

    def _node_facts(self) -> dict[str, dict[str, Any]]:
        """Machine and network of every node, asked on the node itself."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        ask = ray.remote(num_cpus=0)(node_facts)
        asked = {
            node["NodeID"]: ask.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            ).remote()
            for node in self.alive()
        }
        return {node_id: ray.get(answer, timeout=JOIN_TIMEOUT_S) for node_id, answer in asked.items()}

    def metrics_urls(self) -> tuple[str, ...]:
        """The Prometheus page of every node."""
        return tuple(f"http://{n['NodeManagerAddress']}:{n['MetricsExportPort']}/metrics" for n in self.alive())

    def start_serve(self, host: str, port: int) -> None:
        """Start Ray Serve's controller and its proxy on the head node, or find them as asked.

        Raises ClusterError when Serve is up at another address and serves applications of others.
        """
        serve = importlib.import_module("ray.serve")
        details = self._details()
        if details is not None:
            http = details.get("http_options") or {}
            if (http.get("host"), http.get("port")) == (host, port) and not self.env:
                return
            others = sorted(set(details.get("applications", {})) - {APP})
            if others and (http.get("host"), http.get("port")) != (host, port):
                raise ClusterError(
                    f"Ray Serve already runs on {http.get('host')}:{http.get('port')} with {', '.join(others)}; "
                    f"use --host {http.get('host')} --port {http.get('port')}"
                )
            if not others:
                serve.shutdown()
        serve.start(proxy_location="HeadOnly", http_options={"host": host, "port": port})
        _hush()

    def submit(self, app: ServeApp) -> None:
        """Hand the application to Ray Serve; does not wait for it. Raises DeployError when Ray refuses it."""
        serve = importlib.import_module("ray.serve")
        module, _, name = app.import_path.partition(":")
        try:
            application = getattr(importlib.import_module(module), name)(app.args)
        except Exception as error:  # pydantic's, vLLM's and Ray's own complaints about the arguments
            raise DeployError(f"Ray Serve LLM refuses the arguments: {' '.join(str(error).split())}") from error
        serve.run_many(
            [serve.RunTarget(target=application, name=APP, route_prefix="/")],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )

    def state(self) -> AppState:
        """What the controller says of the application now."""
        app = ((self._details() or {}).get("applications") or {}).get(APP)
        if app is None:
            return AppState(status="NOT_STARTED")
        replicas, messages = [], [app.get("message") or ""]
        for name, deployment in app.get("deployments", {}).items():
            messages.append(deployment.get("message") or "")
            replicas += [
                ReplicaState(
                    deployment=name,
                    replica=replica["replica_id"],
                    state=_plain(replica["state"]),
                    node=replica.get("node_id"),
                    pid=replica.get("pid"),
                )
                for replica in deployment.get("replicas", [])
            ]
        return AppState(
            status=_plain(app["status"]),
            replicas=tuple(replicas),
            deployments={name: _plain(d["status"]) for name, d in app.get("deployments", {}).items()},
            messages=tuple(message for message in messages if message),
        )

    def wait(self, timeout_s: float) -> Iterator[AppState]:
        """The application's state, over and over, until it runs.

        Raises DeployError with the replica's own error when one fails to start, or when
        ``timeout_s`` seconds are over.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            state = self.state()
            yield state
            if state.status == "RUNNING":
                return
            if _failed(state):
                raise DeployError(self._why(state, "a replica failed to start"))
            if time.monotonic() > deadline:
                raise DeployError(self._why(state, f"not ready within {timeout_s:g} s (--timeout-s)"))
            time.sleep(POLL_S)

    def _why(self, state: AppState, what: str) -> str:
        tails = self.replica_logs()
        cause = root_cause(tails) or next((_last_line(message) for message in state.messages), None)
        waiting = sorted({r.deployment for r in state.replicas if r.state != "RUNNING"} or state.deployments)
        lines = [f"{what} ({', '.join(waiting)}): {cause or 'Ray gave no reason'}"]
        lines += [f"  {tail.node}: {tail.path}" for tail in tails if tail.error]
        return "\n".join(lines)

    def replica_logs(self) -> list[LogTail]:
        """The end of every log of this application's replicas, read on the nodes themselves."""
        if self.local:
            return tail_logs(str(self.local.logs), APP, "this machine")
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        logs = str(Path(ray._private.worker._global_node.get_session_dir_path()) / "logs")
        read = ray.remote(num_cpus=0)(tail_logs)
        found: list[LogTail] = []
        for node in self.alive():
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            with contextlib.suppress(Exception):  # a node that cannot be asked has nothing to say
                ref = read.options(scheduling_strategy=there).remote(logs, APP, node["NodeManagerAddress"])
                found += ray.get(ref, timeout=JOIN_TIMEOUT_S)
        return found

    def bundles(self, plan: Placement, view: ClusterView, model_id: str) -> dict[Role, list[list[str]]]:
        """Per role and running Ray Serve replica, the node (by its id in ``view``) of every bundle."""
        names = {node.labels[NODE_ID_LABEL]: node.id for node in view.nodes}
        groups = self._bundle_nodes()
        running = [replica for replica in self.state().replicas if replica.state == "RUNNING"]
        return {
            role: [
                [names.get(node, node) for node in groups.get(replica.replica) or [replica.node or "an unknown node"]]
                for replica in sorted(running, key=lambda replica: replica.replica)
                if replica.deployment == deployment
            ]
            for role, deployment in deployment_names(plan, model_id).items()
        }

    def _bundle_nodes(self) -> dict[str, list[str]]:
        """Serve replica id -> Ray node id per bundle, of the placement groups that Serve made."""
        from ray.util import placement_group_table

        found = {}
        for group in placement_group_table().values():
            if group["state"] == "CREATED" and group["name"].startswith("SERVE_REPLICA"):
                nodes = [group["bundles_to_node_id"][i] for i in sorted(group["bundles_to_node_id"])]
                found[group["name"].rsplit("#", 1)[-1]] = nodes
        return found

    def warm_pairs(self, model_id: str) -> None:
        """One transfer between every prefill and every decode replica, so that no user's request pays a handshake.

        Ray's own prewarm runs when a decode replica starts and reaches the prefill replicas that are
        up by then; running it again reaches all. Raises DeployError.
        """
        serve = importlib.import_module("ray.serve")
        broadcast = importlib.import_module("ray.llm._internal.serve.utils.broadcast").broadcast
        try:
            broadcast(serve.get_deployment_handle(f"Decode:{_serve_name(model_id)}", APP), "_maybe_prewarm")
        except Exception as error:
            why = self._why(self.state(), "a first KV transfer failed")
            raise DeployError(f"{why}; {_last_line(str(error))}") from error

    def ask_prefill(self, model_id: str, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Completions by a prefill engine alone, without KV transfer: the same model served collocated."""
        serve = importlib.import_module("ray.serve")
        models = importlib.import_module("ray.llm._internal.serve.core.configs.openai_api_models")
        handle = serve.get_deployment_handle(f"Prefill:{_serve_name(model_id)}", APP).options(stream=True)
        answers = []
        for request in requests:
            stream = handle.completions.remote(models.CompletionRequest(**request), None)
            answer = next(iter(stream))
            if not hasattr(answer, "choices"):
                raise DeployError(f"the prefill engine alone answers with an error: {answer}")
            answers.append(answer.model_dump(mode="json"))
        return answers

    def delete(self) -> None:
        """Take the application down and wait until its replicas and placement groups are gone."""
        serve = importlib.import_module("ray.serve")
        if self._details() is None:
            return
        serve.delete(APP, _blocking=False)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while self.state().status != "NOT_STARTED":
            if time.monotonic() > deadline:
                raise ClusterError(f"the application is still up {STOP_TIMEOUT_S:g} s after it was told to stop")
            time.sleep(POLL_S)

    def stop_serve(self) -> None:
        """End Ray Serve, unless it serves applications of others."""
        details = self._details()
        if details is not None and not set(details.get("applications", {})) - {APP}:
            importlib.import_module("ray.serve").shutdown()

    def _details(self) -> dict[str, Any] | None:
        """Ray Serve's own account of itself; None when it is not running."""
        import ray

        try:
            controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
            details: dict[str, Any] = ray.get(controller.get_serve_instance_details.remote())
        except (ValueError, ray.exceptions.RayActorError):
            return None
        return details


def prepare(local: LocalNodes | None, env: Mapping[str, str]) -> Future[Any]:
    """Set this process up as a driver and import Ray Serve LLM in the background (8 s of CPU).

    The environment comes first: Ray reads it when it is imported. ``ray.serve`` is imported here
    and now, because answers of its controller import it too, and two threads must not do that at
    once. Wait for the result before anything of ``ray.serve.llm`` is used.
    """
    if local:
        os.environ.update(environment(local.id, local.temp_dir))
        os.environ.pop("RAY_ADDRESS", None)
    os.environ.update(env)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    gc.set_threshold(200_000, 50, 50)  # as in pdlab/child/sitecustomize.py: a quarter of the import
    importlib.import_module("ray.serve")
    pool = ThreadPoolExecutor(max_workers=1)
    loading = pool.submit(importlib.import_module, "ray.serve.llm")
    pool.shutdown(wait=False)
    return loading


def _hush() -> None:
    """Ray Serve sets its logger up again and again; warnings are enough for a person at the launcher."""
    for name in ("ray", "ray.serve", "vllm"):
        logging.getLogger(name).setLevel(logging.WARNING)


def deployment_names(plan: Placement, model_id: str) -> dict[Role, str]:
    """Role -> name of its Ray Serve deployment."""
    prefix: dict[Role, str] = {"collocated": "LLMServer:", "prefill": "Prefill:", "decode": "Decode:"}
    return {role: prefix[role] + _serve_name(model_id) for role in dict.fromkeys(r.role for r in plan.replicas)}


def _serve_name(model_id: str) -> str:
    """Ray Serve LLM's own rule for a deployment's name."""
    return model_id.replace("/", "--").replace(".", "_")


def node_facts() -> dict[str, Any]:
    """Host name and network of the machine this runs on: EFA or other RDMA devices first, else Ethernet."""
    import socket
    from pathlib import Path

    rdma = list(Path("/sys/class/infiniband").glob("*"))
    efa = [device for device in rdma if (device / "device" / "driver").resolve().name == "efa"]
    nic: dict[str, Any] = {"kind": "ethernet"}
    if efa:
        nic = {"kind": "efa", "count": len(efa)}
    elif rdma:
        layers = {(device / "ports/1/link_layer").read_text().strip() for device in rdma[:1]}
        nic = {"kind": "infiniband" if "InfiniBand" in layers else "roce", "count": len(rdma)}
    return {"host": socket.gethostname(), "nic": nic}


def _plain(value: Any) -> str:
    return str(getattr(value, "value", value))


def _failed(state: AppState) -> bool:
    """Serve tries a failing constructor three times; the first failure is enough to know."""
    if state.status in ("DEPLOY_FAILED", "UNHEALTHY"):
        return True
    return any("failed to start" in message or "Retrying" in message for message in state.messages)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
