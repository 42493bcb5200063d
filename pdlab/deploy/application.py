"""The one application that pdlab serves: submit it, watch it start, read it back, warm it, take it down.

All through Ray Serve on a connected `pdlab.cluster.connection.Cluster`. Imports Ray inside functions.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field

from pdlab.cluster.connection import Cluster, quiet_logs
from pdlab.core.deployment import Deployment
from pdlab.core.errors import ClusterError, DeployError
from pdlab.core.nodes import ClusterView, Role
from pdlab.core.schema import Frozen
from pdlab.core.text import counted, last_line
from pdlab.deploy.serve_config import ServeApp
from pdlab.deploy.serving.elastic import CONTROLLER, value_of
from pdlab.deploy.serving.ray_names import MODELS, NAMESPACE, WORKER
from pdlab.deploy.serving.role_board import BOARD_PREFIX
from pdlab.deploy.serving_path import HAPROXY_PORTS
from pdlab.remote.logs import LogTail, count_prewarmed, root_cause, tail_logs

APP = "pdlab"
_OUR_GROUP = re.compile(rf"SERVE_REPLICA::{APP}#|SERVE_GANG::{APP}_(?:Prefill|Decode|DPServer):")
ENV_KEY = "pdlab:serve_env"
POLL_S = 0.25
_PREFIX = {"prefill": "Prefill", "decode": "Decode", "fluid": "Fluid"}  # of names of Serve deployments, by role
STOP_TIMEOUT_S = 90.0  # Serve ends a replica that does not stop by itself after 45 s
ANSWER_TIMEOUT_S = 30.0
T = TypeVar("T")


class ReplicaState(Frozen):
    """One Ray Serve replica as the controller sees it. ``node`` is a Ray node id."""

    deployment: str
    replica: str
    state: str
    node: str | None = None
    pid: int | None = None


class AppState(Frozen):
    """The application as the controller sees it; ``messages`` are the error messages of it and its deployments."""

    status: str
    replicas: tuple[ReplicaState, ...] = ()
    deployments: dict[str, str] = Field(default_factory=dict)
    messages: tuple[str, ...] = ()


class Application:
    """pdlab's application on a connected cluster: there is at most one, under one name.

    Methods raise ClusterError for a fault of Ray Serve, and DeployError for a fault of the application.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._submitted = 0.0

    def start_serve(self, host: str, port: int) -> None:
        """Start Ray Serve's controller and its proxy on the head node, or find them running with the same options.

        Raises ClusterError when Serve runs with other options and serves other applications, when one of these has the
        route that this application needs, or when the proxy cannot start.
        """
        serve, errors = importlib.import_module("ray.serve"), importlib.import_module("ray.exceptions")
        details = self._details()
        if details is not None:
            http = details.get("http_options") or {}
            up = (http.get("host"), http.get("port"))
            same_env = self._controller_env() == self.cluster.env
            applications = details.get("applications", {})
            for name, app in applications.items():
                if name != APP and app.get("route_prefix") == "/":
                    raise ClusterError(
                        f"Ray Serve's application {name} has the route /, which this one needs: deploy {name} with "
                        f"another route_prefix, such as /{name}, or stop it (serve shutdown stops all)"
                    )
            if up == (host, port) and same_env:
                return
            others = ", ".join(sorted(set(applications) - {APP}))
            if others and up != (host, port):
                raise ClusterError(
                    f"Ray Serve already runs on {up[0]}:{up[1]} with {others}; use --host {up[0]} --port {up[1]}"
                )
            if others:
                raise ClusterError(
                    f"Ray Serve already runs with {others}, and was started with other serving options "
                    "(--direct-streaming, --host); stop those applications, or give the same options"
                )
            serve.shutdown()
        try:
            serve.start(proxy_location="HeadOnly", http_options={"host": host, "port": port})
        except errors.RayError as error:
            raise ClusterError(_why_no_proxy(str(error))) from error
        self._record_env()
        quiet_logs()

    def _controller_env(self) -> dict[str, str]:
        """Environment that Serve's controller was started with; none when it was not pdlab that started it."""
        from ray.experimental.internal_kv import _internal_kv_get

        record = json.loads(_internal_kv_get(ENV_KEY) or "{}")
        return record["env"] if record.get("controller") == _controller_id() else {}

    def _record_env(self) -> None:
        """Beside the controller's id, so that a controller that another program starts later is not taken for ours."""
        from ray.experimental.internal_kv import _internal_kv_put

        _internal_kv_put(ENV_KEY, json.dumps({"controller": _controller_id(), "env": self.cluster.env}))

    def submit(self, app: ServeApp) -> None:
        """Hand the application to Ray Serve; does not wait for it. Raises DeployError when Ray refuses it."""
        serve = importlib.import_module("ray.serve")
        module, _, name = app.import_path.partition(":")
        try:
            application = getattr(importlib.import_module(module), name)(app.args)
        except Exception as error:  # pydantic's, vLLM's and Ray's own complaints about the arguments
            raise DeployError(f"Ray Serve LLM refuses the arguments: {' '.join(str(error).split())}") from error
        self._submitted = time.time()
        # A line per request in every replica it passes: on a machine with few cores the engines need that CPU.
        logging_config = {"enable_access_log": False} if self.cluster.local else None
        target = serve.RunTarget(
            target=application,
            name=APP,
            route_prefix="/",
            logging_config=logging_config,
            external_scaler_enabled=app.scaled,
        )
        try:
            serve.run_many(
                [target],
                wait_for_ingress_deployment_creation=False,
                wait_for_applications_running=False,
            )
        except Exception as error:  # Serve's own checks, a task's error, a controller that is gone
            raise DeployError(f"Ray Serve refuses the application: {last_line(str(error))}") from error

    def state(self) -> AppState:
        """The state of the application, from the controller."""
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
                    state=value_of(replica["state"]),
                    node=replica.get("node_id"),
                    pid=replica.get("pid"),
                )
                for replica in deployment.get("replicas", [])
            ]
        return AppState(
            status=value_of(app["status"]),
            replicas=tuple(replicas),
            deployments={name: value_of(d["status"]) for name, d in app.get("deployments", {}).items()},
            messages=tuple(message for message in messages if message),
        )

    def wait(self, timeout_s: float) -> Iterator[AppState]:
        """Yield the application's state again and again, until the application runs.

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

    def _why(self, state: AppState, subject: str) -> str:
        tails = self.replica_logs()
        cause = root_cause(tails) or next((last_line(message) for message in state.messages), None)
        waiting = sorted({r.deployment for r in state.replicas if r.state != "RUNNING"} or state.deployments)
        lines = [f"{subject} ({', '.join(waiting)}): {cause or 'Ray gave no reason'}"]
        lines += [f"  {tail.node}: {tail.path}" for tail in tails if tail.error]
        return "\n".join(lines)

    def replica_logs(self) -> list[LogTail]:
        """The end of every log of the submitted application's replicas, read on the nodes themselves."""
        return self.logs_by(tail_logs)

    def logs_by(self, read: Callable[[str, str, float], list[T]]) -> list[T]:
        """The results of ``read`` over the logs of the submitted application's replicas, on all nodes."""
        return [value for each in self._read_logs(read) for value in each]

    def _read_logs(self, read: Callable[..., Any]) -> list[Any]:
        """What ``read(folder, app, since)`` finds in every node's logs."""
        if self.cluster.local:
            return [read(str(self.cluster.local.logs), APP, self._submitted)]
        worker: Any = importlib.import_module(WORKER)
        folder = str(Path(worker._global_node.get_session_dir_path()) / "logs")
        return list(self.cluster.call_nodes(read, folder, APP, self._submitted).values())

    def bundles(self, deployment: Deployment, view: ClusterView, model_id: str) -> dict[Role, list[list[str]]]:
        """Per role the node (by its id in ``view``) of every bundle, in rank order.

        One list per gang of data parallel ranks where Ray Serve made gangs, else one per replica.
        """
        names = view.by_ray_id
        groups = {
            group["name"]: rank_order(group["bundles_to_node_id"])
            for group in _placement_groups()
            if group["state"] == "CREATED"
        }
        running = sorted(
            (replica for replica in self.state().replicas if replica.state == "RUNNING"),
            key=lambda replica: replica.replica,
        )
        nodes_by_role: dict[Role, list[list[str]]] = {}
        for role, name in deployment_names(deployment, model_id).items():
            gangs = [groups[group] for group in sorted(groups) if group.startswith(f"SERVE_GANG::{APP}_{name}_")]
            single = [
                groups.get(f"SERVE_REPLICA::{APP}#{name}#{replica.replica}") or [replica.node or "an unknown node"]
                for replica in running
                if replica.deployment == name
            ]
            nodes_by_role[role] = [[names.get(node, node) for node in bundles] for bundles in gangs or single]
        return nodes_by_role

    def warm_pairs(self, model_id: str) -> int:
        """Send one request over every pair of a prefill and a decode replica, so that no user's request waits for a
        handshake.

        Ray's own prewarm runs when a decode replica starts and reaches the prefill replicas that are up by then;
        running it again reaches all. Returns the number of pairs. Raises DeployError when a decode replica was not
        reached, when its log names a prefill replica without KV parameters, or when its log has too few pairs. This
        does not prove that the bytes arrived, because the prewarm ignores the engine's answer: the NIXL counters and
        the canary prove it. If logs cannot be read, only the decode replicas that answered are counted.
        """
        decode = f"Decode:{_serve_name(model_id)}"
        running = Counter(replica.deployment for replica in self.state().replicas if replica.state == "RUNNING")
        pairs = running[f"Prefill:{_serve_name(model_id)}"] * running[decode]
        before = self._prewarmed()
        reached = self._first_transfers(decode, "_maybe_prewarm")
        if len(reached) != running[decode]:
            raise DeployError(
                f"only {len(reached)} of {counted(running[decode], 'decode replica')} took the request to warm up"
            )
        done, empty = (after - earlier for after, earlier in zip(self._prewarmed(), before, strict=True))
        if empty or 0 < done < pairs:
            raise DeployError(
                f"only {done} of {pairs} prefill x decode pairs made a first KV transfer ({counted(empty, 'time')} a "
                "prefill replica gave no KV parameters); see the replicas' logs"
            )
        return pairs

    def _first_transfers(self, deployment: str, method: str, *args: Any) -> list[Any]:
        """The answers of all replicas of ``deployment`` to a call that moves KV cache. Raises DeployError."""
        serve = importlib.import_module("ray.serve")
        try:
            return _ask_all(serve.get_deployment_handle(deployment, APP), method, *args)
        except Exception as error:
            why = self._why(self.state(), "a first KV transfer failed")
            raise DeployError(f"{why}; {last_line(str(error))}") from error

    def _prewarmed(self) -> tuple[int, int]:
        """How many pairs the decode replicas' logs call warmed so far, and how many they had to skip."""
        counts = self._read_logs(count_prewarmed)
        return sum(done for done, _ in counts), sum(empty for _, empty in counts)

    def pair_answers(
        self, model_id: str, request: dict[str, Any], wanted: Mapping[str, Sequence[str]] | None = None
    ) -> dict[tuple[str, str], dict[str, Any]]:
        """(prefill, decode) -> the completion, over pairs of fluid replicas (by their ids), each by a transfer.

        ``wanted``: decode -> those that prefill; None: every ordered pair. Raises DeployError where one of them fails.
        """
        models = importlib.import_module(MODELS)
        name = f"Fluid:{_serve_name(model_id)}"
        running = [r.replica for r in self.state().replicas if (r.deployment, r.state) == (name, "RUNNING")]
        wanted = dict.fromkeys(running, running) if wanted is None else wanted
        pairs = {decode: list(prefills) for decode, prefills in wanted.items()}
        reports = self._first_transfers(name, "answers_from", pairs, models.CompletionRequest(**request))
        answers = {}
        for decode, of_decode in reports:
            for prefill, answer in of_decode.items():
                if not hasattr(answer, "choices"):
                    raise DeployError(f"{decode} answers with an error what {prefill} has prefilled: {answer}")
                answers[prefill, decode] = answer.model_dump(mode="json")
        missing = [
            (prefill, decode)
            for decode, prefills in wanted.items()
            for prefill in prefills
            if prefill != decode and (prefill, decode) not in answers
        ]
        if missing:
            raise DeployError("no KV transfer from {} to {}: a replica is gone".format(*missing[0]))
        return answers

    def ask_alone(
        self, role: Literal["prefill", "fluid"], model_id: str, requests: Sequence[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Completions by one engine of that role, without KV transfer. This is the same model served collocated.

        Raises DeployError if the engine fails, or answers with another thing than a completion.
        """
        serve, models = importlib.import_module("ray.serve"), importlib.import_module(MODELS)
        engine = "an engine" if role == "fluid" else "the prefill engine"
        handle = serve.get_deployment_handle(f"{_PREFIX[role]}:{_serve_name(model_id)}", APP)
        answers = []
        for each in requests:
            request = models.CompletionRequest(**each)
            try:
                if role == "fluid":
                    answer = handle.alone.remote(request).result()
                else:
                    stream = handle.options(stream=True).completions.remote(request, None)
                    answer = next(iter(stream), "an empty stream")
            except Exception as error:  # whatever the replica raised, as a RayTaskError
                raise DeployError(f"{engine} cannot be reached directly: {last_line(str(error))}") from error
            if not hasattr(answer, "choices"):
                raise DeployError(f"{engine} answers with an error when it is called directly: {answer or 'nothing'}")
            answers.append(answer.model_dump(mode="json"))
        return answers

    def delete(self) -> bool:
        """Delete the application, and wait until its replicas and placement groups are gone. False: there was none."""
        serve = importlib.import_module("ray.serve")
        details = self._details()
        if details is None:
            return False
        serve.delete(APP, _blocking=False)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while (up := self.state().status != "NOT_STARTED") or _placement_groups():
            if time.monotonic() > deadline:
                subject = "the application is" if up else "placement groups of the application are"
                raise ClusterError(f"{subject} still up {STOP_TIMEOUT_S:g} s after its stop was requested")
            time.sleep(POLL_S)
        end_boards()
        return APP in details.get("applications", {})

    def stop_serve(self) -> None:
        """End Ray Serve, unless it serves applications of others."""
        details = self._details()
        if details is not None and not set(details.get("applications", {})) - {APP}:
            importlib.import_module("ray.serve").shutdown()

    def _details(self) -> dict[str, Any] | None:
        """Ray Serve's own account of itself; None when it is not running."""
        import ray

        try:
            controller = ray.get_actor(CONTROLLER, namespace=NAMESPACE)
            details: dict[str, Any] = ray.get(controller.get_serve_instance_details.remote(), timeout=ANSWER_TIMEOUT_S)
        except (ValueError, ray.exceptions.RayActorError):
            return None
        except ray.exceptions.GetTimeoutError as error:
            raise ClusterError(f"Ray Serve's controller does not answer within {ANSWER_TIMEOUT_S:g} s") from error
        return details


def _ask_all(handle: Any, method: str, *args: Any) -> list[Any]:
    """What every replica of the handle's deployment answers to a call. Raises TimeoutError where Ray Serve names none.

    Not Ray Serve LLM's own `broadcast`: while the router's thread makes the handle's router, which takes the longer the
    more replicas there are, it makes a second one in this thread, without an event loop.
    """
    ready = handle.options()  # from here on it learns of the replicas
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    while not ready.running_replicas_populated():
        if time.monotonic() > deadline:
            raise TimeoutError(f"Ray Serve names no replica of {ready.deployment_name} within {ANSWER_TIMEOUT_S:g} s")
        time.sleep(POLL_S)
    answers: list[Any] = ready.broadcast(method, *args).results()
    return answers


def _controller_id() -> str:
    import ray

    return str(ray.get_actor(CONTROLLER, namespace=NAMESPACE)._actor_id.hex())


def _why_no_proxy(text: str) -> str:
    taken = re.findall(r"cannot bind socket .*:(\d+)\]", text)
    if not taken:
        return f"Ray Serve's proxy did not start: {last_line(text)}"
    return (
        f"Ray Serve's HAProxy did not start: port {' and '.join(taken)} of the head node is taken (besides --port it "
        f"takes {' and '.join(map(str, HAPROXY_PORTS))} there, RAY_SERVE_HAPROXY_METRICS_PORT and "
        "RAY_SERVE_HAPROXY_STATS_PORT of the environment that Ray is started in); free it, or start Ray with other "
        "values of the two"
    )


def deployment_names(deployment: Deployment, model_id: str) -> dict[Role, str]:
    """Role -> name of its Ray Serve deployment."""
    return {
        role: f"{_PREFIX.get(role) or ('DPServer' if pool.dp > 1 else 'LLMServer')}:{_serve_name(model_id)}"
        for role, pool in deployment.pools.items()
    }


def end_boards() -> None:
    """End the role boards of fluid engines that are gone. (Each would end itself after a minute.)"""
    import ray

    for name in board_names():
        with contextlib.suppress(ValueError):  # it has just ended
            ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)


def board_names() -> list[str]:
    """Names of the actors that hold the roles of fluid engines (`pdlab.deploy.serving.role_board`)."""
    from ray.util import list_named_actors

    actors = list_named_actors(all_namespaces=True)
    return [a["name"] for a in actors if a["namespace"] == NAMESPACE and a["name"].startswith(BOARD_PREFIX)]


def rank_order(nodes: Mapping[Any, str]) -> list[str]:
    """Node of every bundle (bundle index -> node id) in the order in which ranks take bundles.

    Ray Serve LLM and vLLM assign bundles node by node, beginning with the node of the first bundle.
    """
    by_index = [nodes[index] for index in sorted(nodes, key=int)]
    return sorted(by_index, key=lambda node: (node != by_index[0], node))


def _placement_groups() -> list[dict[str, Any]]:
    """The placement groups that Ray Serve made for this application and that are not yet removed."""
    from ray.util import placement_group_table

    groups = placement_group_table().values()
    return [group for group in groups if group["state"] != "REMOVED" and _OUR_GROUP.match(group["name"])]


def _serve_name(model_id: str) -> str:
    """Ray Serve LLM's own rule for a deployment's name."""
    return model_id.replace("/", "--").replace(".", "_")


def _failed(state: AppState) -> bool:
    """Serve tries a failing constructor three times; the first failure is enough to know."""
    if state.status in ("DEPLOY_FAILED", "UNHEALTHY"):
        return True
    return any("failed to start" in message or "Retrying" in message for message in state.messages)
