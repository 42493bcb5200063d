"""Classify the processes of a deployment with facts of Ray Serve, Ray and /proc. Pure, but for `NodeActors`."""

from __future__ import annotations

import importlib
import re
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pdlab.cluster.connection import Cluster, pinned_to
from pdlab.cluster.machine import SPAWNED
from pdlab.core.errors import ClusterError
from pdlab.deploy.application import ReplicaState
from pdlab.deploy.serving.role_board import BOARD_PREFIX
from pdlab.faults import on_node
from pdlab.faults.kinds import FaultTarget, Part, Role

ENGINE_TITLE = "VLLM::EngineCore"
WORKER_TITLE = "VLLM::Worker"
WORKER_ACTORS = ("RayWorkerWrapper", "RayWorkerProc")
PROXY_ACTOR = "SERVE_PROXY_ACTOR"
CALL_TIMEOUT_S = 120.0
SURVEY_TIMEOUT_S = 20.0
_HAPROXY = re.compile(r"(?:\S*/)?haproxy\s")
_ENDED = ("DEAD",)


class DeploymentProcess(NamedTuple):
    """One process of the deployment. ``node``: Ray's node id. ``started``: clock ticks since boot. ``replica``: its
    replica of Ray Serve, if it belongs to one."""

    node: str
    pid: int
    started: int
    part: Part
    role: Role | None = None
    replica: str | None = None

    def text(self, names: Mapping[str, str]) -> str:
        replica = f" of {self.replica}" if self.replica else ""
        what = FaultTarget(self.part, self.role).text
        return f"{what}{replica} (process {self.pid} on {names.get(self.node, self.node)})"


class NodeSurvey(NamedTuple):
    """`pdlab.faults.on_node.survey` of one node. ``address``: its IP. ``head``: whether it is Ray's head node."""

    node: str
    address: str
    head: bool
    space: str
    raylet: int | None
    own: int
    processes: dict[int, dict[str, Any]]

    def below(self, pid: int) -> list[int]:
        """Descendants of the process."""
        pids: list[int] = []
        waiting = [pid]
        while waiting:
            parent = waiting.pop()
            children = [each for each, facts in self.processes.items() if facts["parent"] == parent]
            pids += children
            waiting += children
        return sorted(pids)


def classify(
    surveys: Sequence[NodeSurvey],
    replicas: Sequence[ReplicaState],
    roles: Mapping[str, Role],
    actors: Iterable[Mapping[str, Any]],
    jobs: Iterable[Mapping[str, Any]] = (),
) -> list[DeploymentProcess]:
    """Every process that a fault may hit, sorted by node and number.

    ``roles``: Serve's name of an engine deployment -> its role; replicas of other deployments are routers. ``actors``,
    ``jobs``: Ray's tables. A Ray actor is a worker of an engine if the driver of its job is an engine core.
    """
    by_node = {survey.node: survey for survey in surveys}
    members: dict[tuple[str, int], DeploymentProcess] = {}
    driver_of = {job["JobID"]: (job.get("DriverIPAddress"), job.get("DriverPid")) for job in jobs}
    engines: dict[tuple[str, int], DeploymentProcess] = {}

    def add(
        node: str, pid: int, part: Part, role: Role | None = None, replica: str | None = None
    ) -> DeploymentProcess | None:
        survey = by_node.get(node)
        if survey is None or pid not in survey.processes:
            return None
        each = DeploymentProcess(node, pid, int(survey.processes[pid]["started"]), part, role, replica)
        members.setdefault((node, pid), each)
        return each

    for replica in replicas:
        if replica.node is None or replica.pid is None or replica.node not in by_node:
            continue
        survey, role = by_node[replica.node], roles.get(replica.deployment)
        add(replica.node, replica.pid, "replica" if role else "router", role, replica.replica)
        if role is None:
            continue
        for pid, part in _engine_parts(survey, replica.pid).items():
            if (each := add(replica.node, pid, part, role, replica.replica)) and part == "engine":
                engines[survey.address, pid] = each
    for actor in actors:
        node, pid = actor["Address"]["NodeID"], int(actor["Pid"])
        if actor["State"] in _ENDED or node not in by_node:
            continue
        if str(actor["Name"]).startswith(PROXY_ACTOR):
            add(node, pid, "proxy")
        elif str(actor["Name"]).startswith(BOARD_PREFIX):
            add(node, pid, "board")
        elif actor["ActorClassName"].rpartition(".")[2] in WORKER_ACTORS:
            engine = engines.get(driver_of.get(actor["JobID"], (None, None)))  # type: ignore[arg-type]
            if engine is not None:
                add(node, pid, "worker", engine.role, engine.replica)
    for survey in surveys:
        for pid, facts in survey.processes.items():
            if _HAPROXY.match(f"{facts['title']} "):
                add(survey.node, pid, "balancer")
        if survey.raylet is not None and not survey.head:
            add(survey.node, survey.raylet, "raylet")
    return sorted(members.values())


def _engine_parts(survey: NodeSurvey, replica: int) -> dict[int, Part]:
    """Engine cores and their workers below a replica, by number: by title, and without a title by their parent."""
    titles = {pid: str(survey.processes[pid]["title"]) for pid in survey.below(replica)}
    spawned = {pid: int(survey.processes[pid]["parent"]) for pid, title in titles.items() if SPAWNED in title}
    engines = {pid for pid, title in titles.items() if title.startswith(ENGINE_TITLE)}
    engines = engines or {pid for pid, parent in spawned.items() if parent == replica}
    workers = {pid for pid, title in titles.items() if title.startswith(WORKER_TITLE)}
    workers |= {pid for pid, parent in spawned.items() if parent in engines}
    return {**dict.fromkeys(sorted(engines), "engine"), **dict.fromkeys(sorted(workers), "worker")}


def present_parts(members: Sequence[DeploymentProcess]) -> frozenset[tuple[Role | None, Part]]:
    """(role, part) of all processes. There is a ``node`` if there is a raylet."""
    present: set[tuple[Role | None, Part]] = {(each.role, each.part) for each in members}
    return frozenset(present | ({(None, "node")} if (None, "raylet") in present else set()))


def choose(members: Sequence[DeploymentProcess], target: FaultTarget, draw: float) -> DeploymentProcess | None:
    """One process of the target, selected by ``draw`` (0 to 1); None without one. A fault uses one ``draw``."""
    part = "raylet" if target.part == "node" else target.part
    some = sorted(each for each in members if (each.role, each.part) == (target.role, part))
    return some[min(len(some) - 1, int(draw * len(some)))] if some else None


def counted(surveys: Sequence[NodeSurvey], members: Sequence[DeploymentProcess]) -> tuple[Counter[str], Counter[str]]:
    """(processes, listening TCP ports) by kind of process. Each process counts once, also if nodes share a machine."""
    processes: Counter[str] = Counter()
    ports: Counter[str] = Counter()
    for _, kind, facts in _distinct(surveys, members):
        name = kind or short_title(facts["title"])
        processes[name] += 1
        ports[name] += len(facts["ports"])
    return processes, ports


def resident_mib(surveys: Sequence[NodeSurvey], members: Sequence[DeploymentProcess]) -> dict[str, float]:
    """Resident MiB by kind of process; ``other``: processes that no fault hits, but not the actors of the surveys."""
    sums: dict[str, float] = {}
    own = {(survey.space, survey.own) for survey in surveys}
    for process, kind, facts in _distinct(surveys, members):
        if process not in own:
            sums[kind or "other"] = sums.get(kind or "other", 0.0) + facts["rss_bytes"] / 2**20
    return {name: round(value, 1) for name, value in sorted(sums.items())}


def _distinct(
    surveys: Sequence[NodeSurvey], members: Sequence[DeploymentProcess]
) -> Iterator[tuple[tuple[str, int], str | None, dict[str, Any]]]:
    """(space and number, kind if it is one of ``members``, facts) of each process, once.

    Nodes of one machine list the same processes, but only one of them has a process as a member: members come first.
    """
    kinds = {(each.node, each.pid): FaultTarget(each.part, each.role).text for each in members}
    listed = [(survey, pid) for survey in surveys for pid in survey.processes]
    done: set[tuple[str, int]] = set()
    for survey, pid in sorted(listed, key=lambda each: (each[0].node, each[1]) not in kinds):
        if (survey.space, pid) not in done:
            done.add((survey.space, pid))
            yield (survey.space, pid), kinds.get((survey.node, pid)), survey.processes[pid]


def short_title(title: str) -> str:
    """A process's title without the parts that differ between two starts."""
    words = title.split()
    if not words:
        return "a process without a title"
    if words[0].startswith("ray::"):
        return re.sub(r"[:#.].*", "", words[0][5:]) or words[0]
    names = [word.rpartition("/")[2] for word in words[:4] if not word.startswith("-")]
    scripts = [name for name in names if name.endswith(".py")]
    return (scripts or names or words)[0]


class NodeActors:
    """A `pdlab.faults.on_node.NodeActor` on every node; started at its first use, and again after its end."""

    def __init__(self, cluster: Cluster, mark: str | None) -> None:
        self.cluster = cluster
        self.mark = mark
        self._actors: dict[str, Any] = {}
        self._making = threading.Lock()
        self._surveyed = False

    def on(self, node: str) -> Any:
        """The actor of that node (Ray's node id)."""
        import ray

        with self._making:
            if node not in self._actors:
                for module in ("pdlab.remote", on_node.__name__):
                    ray.cloudpickle.register_pickle_by_value(importlib.import_module(module))
                actor: Any = ray.remote(num_cpus=0, max_concurrency=4)(on_node.NodeActor)
                self._actors[node] = actor.options(scheduling_strategy=pinned_to(node)).remote()
            return self._actors[node]

    def call(self, node: str, method: str, *args: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """Result of a method of `pdlab.faults.on_node.NodeActor` on that node. Raises ClusterError."""
        import ray

        for attempt in (1, 2):
            try:
                return ray.get(getattr(self.on(node), method).remote(*args), timeout=timeout_s)
            except ray.exceptions.RayTaskError as error:
                raise ClusterError(f"{method} on node {node[:8]} fails: {error.cause}") from error
            except ray.exceptions.RayError as error:
                self._actors.pop(node, None)  # it ended with its node, or by a fault of the node
                if attempt == 2 or isinstance(error, ray.exceptions.GetTimeoutError):
                    raise ClusterError(f"node {node[:8]} does not answer: {type(error).__name__}") from error
        raise AssertionError("unreachable")

    def survey(self, *, ports: bool = False) -> list[NodeSurvey]:
        """The survey of every node that answers; a node that is down is left out. ``ports``: with listening ports."""
        import ray

        nodes = {node["NodeID"]: node for node in self.cluster.alive()}
        calls = {node: self.on(node).survey.remote(self.mark, ports) for node in nodes}
        # The first survey starts the actors' processes; later an actor without an answer is down.
        timeout_s = SURVEY_TIMEOUT_S if self._surveyed else CALL_TIMEOUT_S
        self._surveyed = True
        ray.wait(list(calls.values()), num_returns=len(calls), timeout=timeout_s)
        surveys = []
        for node, call in calls.items():
            try:
                facts = ray.get(call, timeout=0)
            except Exception:  # the node is down, or too busy to answer
                self._actors.pop(node, None)
                continue
            record = nodes[node]
            surveys.append(
                NodeSurvey(
                    node=node,
                    address=record["NodeManagerAddress"],
                    head="node:__internal_head__" in record["Resources"],
                    **facts,
                )
            )
        return surveys

    def close(self) -> None:
        """End the actors."""
        import ray

        for actor in self._actors.values():
            ray.kill(actor)
        self._actors.clear()
