"""Who is who, from made-up surveys of two nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from pdlab.deploy.application import ReplicaState
from pdlab.faults.kinds import FaultTarget, Role
from pdlab.faults.targets import (
    DeploymentProcess,
    NodeSurvey,
    choose,
    classify,
    counted,
    present_parts,
    resident_mib,
    short_title,
)

MIB = 2**20
ROLES: Mapping[str, Role] = {"Prefill:m": "prefill", "Decode:m": "decode"}


def facts(parent: int, title: str, rss_mib: int = 10, ports: tuple[int, ...] = ()) -> dict[str, Any]:
    return {
        "parent": parent,
        "started": 1000 + parent,
        "title": title,
        "rss_bytes": rss_mib * MIB,
        "ports": list(ports),
    }


HEAD = {
    10: facts(1, "raylet --head"),
    11: facts(10, "ray::ServeReplica:pdlab:Prefill:m", 800),
    12: facts(11, "VLLM::EngineCore", 1500, (5600,)),
    13: facts(12, "VLLM::Worker_TP0", 900),
    14: facts(12, "VLLM::Worker_TP1", 900),
    15: facts(10, "ray::ProxyActor"),
    16: facts(15, "/usr/lib/haproxy -f /tmp/haproxy.cfg", 20, (8000, 9101)),
    17: facts(10, "ray::ServeReplica:pdlab:LLMRouter"),
    18: facts(10, "ray::IDLE"),
    19: facts(10, "ray::NodeActor", 90),
    90: facts(1, "python relay.py"),
}
WORKER = {
    20: facts(1, "raylet"),
    21: facts(20, "ray::ServeReplica:pdlab:Decode:m", 800),
    22: facts(21, "VLLM::EngineCore_DP0", 1500),
    23: facts(20, "ray::RayWorkerWrapper", 700),
    29: facts(20, "ray::NodeActor", 90),
    90: facts(1, "python relay.py"),
}
SURVEYS = [
    NodeSurvey("n1", "10.0.0.1", True, "machine", 10, 19, HEAD),
    NodeSurvey("n2", "10.0.0.2", False, "machine", 20, 29, WORKER),
]
REPLICAS = [
    ReplicaState(deployment="Prefill:m", replica="p1", state="RUNNING", node="n1", pid=11),
    ReplicaState(deployment="Decode:m", replica="d1", state="RUNNING", node="n2", pid=21),
    ReplicaState(deployment="LLMRouter", replica="r1", state="RUNNING", node="n1", pid=17),
    ReplicaState(deployment="Decode:m", replica="d2", state="STARTING"),
]


def actor(pid: int, node: str, cls: str, name: str = "", job: str = "01", state: str = "ALIVE") -> dict[str, Any]:
    return {"Pid": pid, "Address": {"NodeID": node}, "ActorClassName": cls, "Name": name, "JobID": job, "State": state}


ACTORS = [
    actor(15, "n1", "ProxyActor", "SERVE_PROXY_ACTOR-n1"),
    actor(23, "n2", "RayWorkerWrapper", job="02"),
    actor(18, "n1", "RayWorkerWrapper", job="03"),  # of somebody else's engine
    actor(21, "n2", "ProxyActor", "SERVE_PROXY_ACTOR-old", state="DEAD"),
]
JOBS = [{"JobID": "02", "DriverIPAddress": "10.0.0.2", "DriverPid": 22}, {"JobID": "03", "DriverPid": 99}]


def found() -> list[DeploymentProcess]:
    return classify(SURVEYS, REPLICAS, ROLES, ACTORS, JOBS)


def test_who_is_who() -> None:
    assert {(each.node, each.pid, each.part, each.role) for each in found()} == {
        ("n1", 11, "replica", "prefill"),
        ("n1", 12, "engine", "prefill"),
        ("n1", 13, "worker", "prefill"),
        ("n1", 14, "worker", "prefill"),
        ("n1", 15, "proxy", None),
        ("n1", 16, "balancer", None),
        ("n1", 17, "router", None),
        ("n2", 20, "raylet", None),
        ("n2", 21, "replica", "decode"),
        ("n2", 22, "engine", "decode"),
        ("n2", 23, "worker", "decode"),
    }
    assert all(each.started == dict(HEAD | WORKER)[each.pid]["started"] for each in found())


def test_an_engine_whose_processes_have_no_title_is_found_by_its_parents() -> None:
    spawned = "python -c from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=9) --multiprocessing-fork"
    tracker = facts(11, "python -c from multiprocessing.resource_tracker import main;main(8)")
    titles = {12: facts(11, spawned), 13: facts(12, spawned), 24: tracker, 25: facts(12, tracker["title"])}
    surveys = [SURVEYS[0]._replace(processes=HEAD | titles), SURVEYS[1]]
    assert classify(surveys, REPLICAS, ROLES, ACTORS, JOBS) == found()

    # Beside an engine core with its title, another child of the replica is something else: vLLM's coordinator of DP.
    surveys = [SURVEYS[0]._replace(processes=HEAD | {24: facts(11, spawned)}), SURVEYS[1]]
    assert classify(surveys, REPLICAS, ROLES, ACTORS, JOBS) == found()


def test_the_head_nodes_raylet_is_never_hit() -> None:
    assert all(each.pid != 10 for each in found())
    assert (None, "node") in present_parts(found())
    alone = classify(SURVEYS[:1], REPLICAS, ROLES, ACTORS, JOBS)
    assert (None, "raylet") not in present_parts(alone) and (None, "node") not in present_parts(alone)


def test_a_process_that_is_in_no_survey_is_not_hit() -> None:
    gone = [REPLICAS[0].model_copy(update={"pid": 77})]
    assert not [each for each in classify(SURVEYS, gone, ROLES, [], []) if each.role == "prefill"]


def test_choosing() -> None:
    assert choose(found(), FaultTarget("worker", "prefill"), 0.0) == choose(
        found(), FaultTarget("worker", "prefill"), 0.49
    )
    assert {choose(found(), FaultTarget("worker", "prefill"), draw).pid for draw in (0.0, 0.99)} == {13, 14}  # type: ignore[union-attr]
    node = choose(found(), FaultTarget("node"), 0.5)
    assert node is not None and node.pid == 20
    assert choose(found(), FaultTarget("engine", "collocated"), 0.5) is None


def test_a_fault_names_what_it_hits() -> None:
    text = choose(found(), FaultTarget("engine", "prefill"), 0.0).text({"n1": "local-1"})  # type: ignore[union-attr]
    assert text == "prefill engine core of p1 (process 12 on local-1)"


def test_each_process_counts_once_on_a_shared_machine() -> None:
    processes, ports = counted(SURVEYS, found())
    assert processes["relay.py"] == 1 and processes["TP worker"] == 0
    assert processes["prefill TP worker"] == 2 and processes["NodeActor"] == 2
    assert ports["HAProxy process"] == 2 and ports["prefill engine core"] == 1
    memory = resident_mib(SURVEYS, found())
    assert memory["prefill engine core"] == 1500 and memory["prefill TP worker"] == 1800
    assert memory["other"] == 10 + 10 + 10, "the head's raylet, an idle worker, the relay; not what surveys"


@pytest.mark.parametrize(
    ("title", "short"),
    [
        ("ray::ServeReplica:pdlab:Prefill:m", "ServeReplica"),
        ("ray::IDLE", "IDLE"),
        ("ray::NodeActor.survey", "NodeActor"),
        ("/usr/bin/python3 -u /x/y/agent.py --node 7", "agent.py"),
        ("/usr/lib/ray/raylet --store 1", "raylet"),
        ("", "a process without a title"),
    ],
)
def test_titles(title: str, short: str) -> None:
    assert short_title(title) == short
